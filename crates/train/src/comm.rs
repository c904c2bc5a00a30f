//! Groups of ranks, and the exchange of each kind of value.

use std::collections::HashMap;

use fabric::{Endpoint, FabricError, Group, ReducePlan};
use program::{Axis, Value};
use spec::{Coords, Layout};

use crate::buffers::{Partials, Pool};
use crate::place::Place;

/// One rank's end of the fabric with the groups it is in.
pub struct Comm {
    /// The fabric.
    pub endpoint: Endpoint,
    /// Same data and pipeline position.
    pub tp: Group,
    /// Same pipeline and tensor position.
    pub dp: Group,
    /// All.
    pub world: Group,
    /// Same data and tensor position; one channel per value and sending chunk.
    pipes: HashMap<(Value, usize), Group>,
    /// By number of lanes.
    rows: HashMap<usize, RowPlans>,
}

/// How the rows of a unit are cut over the tensor group.
struct RowPlans {
    parts: Vec<Vec<std::ops::Range<usize>>>,
    /// The sum over the tensor cells.
    partial: ReducePlan,
    /// The sum of the embedding: one leaf per rank.
    embed: ReducePlan,
}

impl RowPlans {
    fn new(layout: &Layout, place: &Place, lanes: usize) -> Self {
        let parts = place.row_parts(lanes);
        let cells = (0..layout.tp).map(|t| layout.tensor_cells(t, place.grid_tp)).collect();
        let partial = ReducePlan { parts: parts.clone(), ..ReducePlan::new(place.grid_tp, cells, Vec::new()) };
        let one_each = (0..layout.tp).map(|t| t..t + 1).collect();
        let embed = ReducePlan { parts: parts.clone(), ..ReducePlan::new(layout.tp, one_each, Vec::new()) };
        Self { parts, partial, embed }
    }
}

impl Comm {
    /// The groups of the rank at `place`.
    pub fn new(endpoint: Endpoint, layout: &Layout, place: &Place) -> Self {
        let Coords { dp, pp, tp } = place.at;
        let ranks = |of: &dyn Fn(usize) -> Coords, n: usize| -> Vec<u32> {
            (0..n).map(|i| layout.rank(of(i)) as u32).collect()
        };
        let mut next = 1u32;
        let mut ids = |count: usize, mine: usize| {
            let id = next + mine as u32;
            next += count as u32;
            id
        };
        let hosted = |group: Group| match layout.ranks_per_host {
            Some(_) => {
                let hosts = group.ranks.iter().map(|r| layout.host(*r as usize) as u32).collect();
                group.on_hosts(hosts)
            }
            None => group,
        };
        let world = hosted(Group::new(0, "world", (0..layout.world() as u32).collect()));
        let tp_id = ids(layout.dp * layout.pp, dp * layout.pp + pp);
        let tp_group = hosted(Group::new(tp_id, "tp", ranks(&|i| Coords { tp: i, ..place.at }, layout.tp)));
        let dp_id = ids(layout.pp * layout.tp, pp * layout.tp + tp);
        let dp_group = hosted(Group::new(dp_id, "dp", ranks(&|i| Coords { dp: i, ..place.at }, layout.dp)));
        let line = ranks(&|i| Coords { pp: i, ..place.at }, layout.pp);
        let mut pipes = HashMap::new();
        for value in [Value::Activation, Value::ActivationGrad, Value::TiedGrads] {
            for chunk in 0..layout.chunks() {
                let id = ids(layout.dp * layout.tp, dp * layout.tp + tp);
                pipes.insert((value, chunk), Group::new(id, "pp", line.clone()));
            }
        }
        let lanes = place.contexts.len();
        let rows = HashMap::from([(lanes, RowPlans::new(layout, place, lanes))]);
        Self { endpoint, tp: tp_group, dp: dp_group, world, pipes, rows }
    }

    /// The group of an axis; pipes have their own.
    pub fn group(&self, axis: Axis) -> &Group {
        match axis {
            Axis::Tp => &self.tp,
            Axis::Dp => &self.dp,
            Axis::Pp | Axis::World => &self.world,
        }
    }

    /// Sends along the pipeline; `chunk` is the sender's.
    ///
    /// # Errors
    /// The fabric's.
    pub fn send(&self, value: Value, chunk: usize, to: usize, data: &[f32]) -> Result<(), FabricError> {
        let group = &self.pipes[&(value, chunk)];
        self.endpoint.send(group, group.member(to as u32).expect("a pipe joins the line"), data)
    }

    /// Receives along the pipeline; `chunk` is the sender's.
    ///
    /// # Errors
    /// The fabric's.
    pub fn recv(&self, value: Value, chunk: usize, from: usize, into: &mut [f32]) -> Result<(), FabricError> {
        let group = &self.pipes[&(value, chunk)];
        self.endpoint.recv(group, group.member(from as u32).expect("a pipe joins the line"), into)
    }

    /// Local rows of every rank of the tensor group to whole lanes; in a group of one the rows are whole.
    ///
    /// # Errors
    /// The fabric's.
    pub fn gather_rows(&self, pool: &mut Pool, lanes: usize, local: &[f32]) -> Result<Vec<f32>, FabricError> {
        let mut full = pool.take(local.len() * self.tp.len());
        self.endpoint.all_gather(&self.tp, &self.rows[&lanes].parts, local, &mut full)?;
        Ok(full)
    }

    /// Partial sums over the tensor cells, added in tree order, scattered to local rows.
    ///
    /// # Errors
    /// The fabric's.
    pub fn scatter_partials(
        &self,
        pool: &mut Pool,
        lanes: usize,
        mut partials: Partials,
        embed: bool,
    ) -> Result<Vec<f32>, FabricError> {
        if self.tp.len() == 1 && partials.len() == 1 {
            return Ok(partials.pop().expect("just counted").1);
        }
        let plans = &self.rows[&lanes];
        let plan = if embed { &plans.embed } else { &plans.partial };
        let mine: Vec<_> = partials.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
        let mut out = pool.take(plan.part_len(self.tp.member(self.endpoint.rank()).expect("a member")));
        self.endpoint.reduce_scatter(&self.tp, plan, &mine, &mut out)?;
        partials.into_iter().for_each(|(_, buffer)| pool.give(buffer));
        Ok(out)
    }
}

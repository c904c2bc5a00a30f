//! Groups of ranks, and the exchange of each kind of value.

use std::collections::HashMap;
use std::time::Instant;

use fabric::{Endpoint, FabricError, FabricOptions, Group, Posted, ReducePlan, Taken};
use program::{Axis, Value};
use spec::{Layout, Run};

use crate::buffers::{Partials, Pool};
use crate::place::Place;

/// Messages of a pipeline that a ring has room for: so a sender goes on while its receiver computes.
const PIPE_MESSAGES: usize = 4;
/// The largest ring.
const RING_BYTES_MAX: usize = 64 << 20;

/// What the fabric of `run` is made with; messages of another `generation` are refused.
pub fn fabric_options(run: &Run, generation: u64) -> FabricOptions {
    let usual = FabricOptions::default();
    let rows = (run.grid.microbatch * run.train.seq).div_ceil(run.layout.cp * run.layout.tp);
    let message = rows * run.model.hidden * size_of::<f32>();
    let pipe = if run.layout.pp > 1 { (PIPE_MESSAGES * message).min(RING_BYTES_MAX) } else { 0 };
    // What is posted leaves at once, in blocks with a header each.
    let data_cells = run.grid.ep / run.layout.group;
    let rows = if run.layout.overlaps_tp() { (data_cells * message + message / 8).min(RING_BYTES_MAX) } else { 0 };
    FabricOptions {
        generation: generation as u32,
        deadline_ms: run.layout.exchange_timeout_ms as u64,
        ring_bytes: usual.ring_bytes.max(pipe).max(rows),
        ..usual
    }
}

/// One rank's end of the fabric with the groups it is in.
pub struct Comm {
    /// The fabric.
    pub endpoint: Endpoint,
    /// Same data, context and pipeline position.
    pub tp: Group,
    /// Same data, pipeline and tensor position.
    pub cp: Group,
    /// Same pipeline and tensor position.
    pub dp: Group,
    /// Those of `dp` that share one set of shards.
    pub shard: Group,
    /// Those of `dp` with the same shard.
    pub replica: Group,
    /// Those that hold the same experts; of these who share one set of shards, and who have the same shard.
    experts: [Group; 3],
    /// Same pipeline and tensor position, data positions of one group of data cells.
    pub ep: Group,
    /// All.
    pub world: Group,
    /// All, for what goes to mirrors.
    pub mirror: Group,
    /// Same data, context and tensor position; one channel per value and sending chunk.
    pipes: HashMap<(Value, usize), Group>,
    /// Kinds of groups so far, chunks, and most buckets of a chunk: the groups of posts are counted on from there.
    kinds: u32,
    chunks: u32,
    buckets: u32,
    /// By number of lanes.
    rows: HashMap<usize, RowPlans>,
    /// By number of data cells: the sum over the context cells; its parts are where the keys of each rank stand.
    keys: HashMap<usize, ReducePlan>,
}

/// The sum of key gradients over the context cells, of a unit with `cells` data cells.
fn key_plan(layout: &Layout, place: &Place, cells: usize) -> ReducePlan {
    let contexts: Vec<_> = (0..layout.cp).map(|c| layout.context_cells(c, place.grid_cp)).collect();
    let parts = contexts.iter().map(|contexts| place.key_parts(cells, contexts.clone())).collect();
    ReducePlan { parts, ..ReducePlan::new(place.grid_cp, contexts, Vec::new()) }
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
        let hosted = |group: Group| match layout.ranks_per_host {
            Some(_) => {
                let hosts = group.ranks.iter().map(|r| layout.host(*r as usize) as u32).collect();
                group.on_hosts(hosts)
            }
            None => group,
        };
        // A kind of group takes as many numbers as there are ranks: the lowest member tells its groups apart.
        let mut kinds = 0;
        let mut group = |axis: Axis, name: &str| {
            let ranks: Vec<u32> = axis.members(layout, place.at).map(|rank| rank as u32).collect();
            let id = kinds * layout.world() as u32 + ranks[0];
            kinds += 1;
            Group::new(id, name, ranks)
        };
        let world = hosted(group(Axis::World, "world"));
        let mirror = hosted(group(Axis::World, "mirror"));
        let tp = hosted(group(Axis::Tp, "tp"));
        let cp = hosted(group(Axis::Cp, "cp"));
        let dp = hosted(group(Axis::Dp, "dp"));
        let shard = hosted(group(Axis::Shard, "shard"));
        let replica = hosted(group(Axis::Replica, "replica"));
        let ep = hosted(group(Axis::Ep, "ep"));
        let experts = [(Axis::ExpertDp, "edp"), (Axis::ExpertShard, "eshard"), (Axis::ExpertReplica, "ereplica")];
        let experts = experts.map(|(axis, name)| hosted(group(axis, name)));
        let mut pipes = HashMap::new();
        for value in [Value::Activation, Value::ActivationGrad, Value::TiedGrads] {
            for chunk in 0..layout.chunks() {
                pipes.insert((value, chunk), group(Axis::Pp, "pp"));
            }
        }
        let layers = layout.stages.iter().map(|stage| stage.len()).max().unwrap_or(0);
        let (chunks, buckets) = (layout.chunks() as u32, (3 * layers + 3) as u32);
        let cells = place.group.blocks / place.group.ranks;
        let lanes = place.contexts.len() * cells;
        let rows = HashMap::from([(lanes, RowPlans::new(layout, place, lanes))]);
        let keys = HashMap::from([(cells, key_plan(layout, place, cells))]);
        Self {
            endpoint,
            tp,
            cp,
            dp,
            shard,
            replica,
            experts,
            ep,
            world,
            mirror,
            pipes,
            kinds,
            chunks,
            buckets,
            rows,
            keys,
        }
    }

    /// The group of an axis; pipes have their own.
    pub fn group(&self, axis: Axis) -> &Group {
        match axis {
            Axis::Tp => &self.tp,
            Axis::Cp => &self.cp,
            Axis::Dp => &self.dp,
            Axis::Shard => &self.shard,
            Axis::Replica => &self.replica,
            Axis::ExpertDp => &self.experts[0],
            Axis::ExpertShard => &self.experts[1],
            Axis::ExpertReplica => &self.experts[2],
            Axis::Ep => &self.ep,
            Axis::Pp | Axis::World => &self.world,
        }
    }

    /// The group of an axis in which bucket number `bucket` of `chunk` is posted: one each, so that what was posted may be
    /// taken in any order.
    pub fn posts(&self, axis: Axis, chunk: usize, bucket: usize) -> Group {
        let kind = match axis {
            Axis::Dp => 0,
            Axis::Shard => 1,
            Axis::ExpertDp => 2,
            _ => 3,
        };
        let group = self.group(axis);
        let number = self.kinds + (kind * self.chunks + chunk as u32) * self.buckets + bucket as u32;
        Group { id: number * self.world.len() as u32 + group.ranks[0], ..group.clone() }
    }

    /// The group in which `value` of a unit's rows on `chunk` is posted: what else is exchanged meanwhile does not meet it.
    fn posts_rows(&self, chunk: usize, value: Value) -> Group {
        let kind = match value {
            Value::Rows => 0,
            Value::Partial => 1,
            Value::GradRows => 2,
            _ => 3,
        };
        let number = self.kinds + 4 * self.chunks * self.buckets + 4 * chunk as u32 + kind;
        Group { id: number * self.world.len() as u32 + self.tp.ranks[0], ..self.tp.clone() }
    }

    /// The first half of [`Comm::gather_rows`].
    ///
    /// # Errors
    /// The fabric's.
    pub fn post_gather(
        &self,
        (chunk, value): (usize, Value),
        pool: &mut Pool,
        lanes: usize,
        local: &[f32],
    ) -> Result<Posted, FabricError> {
        let parts = &self.rows[&lanes].parts;
        let mut full = pool.take(local.len() * self.tp.len());
        let mut at = 0;
        for range in &parts[self.tp.member(self.endpoint.rank()).expect("a member")] {
            full[range.clone()].copy_from_slice(&local[at..at + range.len()]);
            at += range.len();
        }
        self.endpoint.post_gather(&self.posts_rows(chunk, value), parts, full)
    }

    /// The second half.
    ///
    /// # Errors
    /// The fabric's.
    pub fn take_gather(&self, at: (usize, Value), lanes: usize, posted: Posted) -> Result<Taken, FabricError> {
        self.endpoint.take_gather(&self.posts_rows(at.0, at.1), &self.rows[&lanes].parts, posted)
    }

    /// The first half of [`Comm::scatter_partials`].
    ///
    /// # Errors
    /// The fabric's.
    pub fn post_partials(
        &self,
        (chunk, value): (usize, Value),
        pool: &mut Pool,
        lanes: usize,
        partials: Partials,
        embed: bool,
    ) -> Result<Posted, FabricError> {
        let plan = self.partial_plan(lanes, embed);
        let out = pool.take(plan.part_len(self.tp.member(self.endpoint.rank()).expect("a member")));
        self.endpoint.post_scatter(&self.posts_rows(chunk, value), plan, partials, out)
    }

    /// The second half: this rank's rows of the sum; and when the last of them came.
    ///
    /// # Errors
    /// The fabric's.
    pub fn take_partials(
        &self,
        (chunk, value): (usize, Value),
        pool: &mut Pool,
        lanes: usize,
        posted: Posted,
        embed: bool,
    ) -> Result<(Vec<f32>, Instant), FabricError> {
        let plan = self.partial_plan(lanes, embed);
        let taken = self.endpoint.take_scatter(&self.posts_rows(chunk, value), plan, posted)?;
        let mut buffers = taken.buffers.into_iter();
        let sum = buffers.next().expect("the result has a buffer");
        buffers.for_each(|buffer| pool.give(buffer));
        Ok((sum, taken.came))
    }

    fn partial_plan(&self, lanes: usize, embed: bool) -> &ReducePlan {
        let plans = &self.rows[&lanes];
        if embed { &plans.embed } else { &plans.partial }
    }

    /// Posts along the pipeline; `chunk` is the sender's. Never waits.
    ///
    /// # Errors
    /// The fabric's.
    pub fn post(&self, value: Value, chunk: usize, to: usize, data: Vec<f32>) -> Result<(), FabricError> {
        let group = &self.pipes[&(value, chunk)];
        self.endpoint.post_send(group, group.member(to as u32).expect("a pipe joins the line"), data)
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

    /// Local keys and values, [2, lane, ...], to those of all context cells, [2, data cell, sequence, position, width].
    ///
    /// # Errors
    /// The fabric's.
    pub fn gather_keys(&self, pool: &mut Pool, cells: usize, local: &[f32]) -> Result<Vec<f32>, FabricError> {
        let mut full = pool.take(local.len() * self.cp.len());
        self.endpoint.all_gather(&self.cp, &self.keys[&cells].parts, local, &mut full)?;
        Ok(full)
    }

    /// Gradients of all keys and values, finished subtrees over the context cells, added in tree order: those of the
    /// local ones.
    ///
    /// # Errors
    /// The fabric's.
    pub fn scatter_key_grads(
        &self,
        pool: &mut Pool,
        cells: usize,
        partials: Partials,
    ) -> Result<Vec<f32>, FabricError> {
        let plan = &self.keys[&cells];
        let mine: Vec<_> = partials.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
        let mut out = pool.take(plan.part_len(self.cp.member(self.endpoint.rank()).expect("a member")));
        self.endpoint.reduce_scatter(&self.cp, plan, &mine, &mut out)?;
        partials.into_iter().for_each(|(_, buffer)| pool.give(buffer));
        Ok(out)
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
        let plan = self.partial_plan(lanes, embed);
        let mine: Vec<_> = partials.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
        let mut out = pool.take(plan.part_len(self.tp.member(self.endpoint.rank()).expect("a member")));
        self.endpoint.reduce_scatter(&self.tp, plan, &mine, &mut out)?;
        partials.into_iter().for_each(|(_, buffer)| pool.give(buffer));
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "[model]\npreset = \"nano\"\n[train]\nsteps = 1\nbatch = 64\nseq = 512\n\
        [grid]\nmicrobatch = 16\n[data]\nsource = \"synthetic\"\n[layout]\n";

    #[test]
    fn a_run_says_how_long_exchanges_may_take_and_pipelines_get_room() {
        let options =
            |layout: &str| Run::parse(&format!("{RUN}{layout}"), "t", &[], 1).map(|run| fabric_options(&run, 0));
        let plain = options("dp = 2\nexchange_timeout_ms = 700").unwrap();
        assert_eq!((plain.deadline_ms, plain.ring_bytes), (700, FabricOptions::default().ring_bytes));
        let pipe = options("pp = 2").unwrap();
        assert_eq!(pipe.deadline_ms, 30_000);
        let hidden = Run::parse(&format!("{RUN}pp = 2"), "t", &[], 1).unwrap().model.hidden;
        assert_eq!(pipe.ring_bytes, (PIPE_MESSAGES * 16 * 512 * hidden * 4).max(plain.ring_bytes));
        let refusal = options("dp = 2\nexchange_timeout_ms = 0").unwrap_err().to_string();
        assert!(refusal.contains("layout.exchange_timeout_ms = 0"), "{refusal}");
    }
}

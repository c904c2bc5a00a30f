//! The buffers of layers with experts.

use spec::{Grid, Layout, Model};

use super::{Load, Spare};
use crate::instr::{Pass, Segment, Value};

/// Lengths of the buffers of one unit and layer.
pub(super) struct Experts {
    /// The router's scores.
    scores: usize,
    /// A row of the stream for every slot, and of the experts' inside.
    x: usize,
    inner: usize,
    /// The same for the slots of one expert.
    one: [usize; 2],
    /// Inside of the shared expert; 0: there is none.
    shared: usize,
    /// Lanes and hosted slices, and the rows of each: what a leaf of the router and of the shared expert reads, by row.
    leaves: usize,
    rows_leaf: usize,
    widths: [usize; 3],
    /// Where rows travel.
    away: Option<Away>,
}

/// What goes to each other rank of the group and comes from it, in numbers.
#[derive(Clone, Copy)]
struct Away {
    others: usize,
    /// The parcels.
    out: usize,
    come: usize,
    /// Their rows alone.
    rows_out: usize,
    rows_come: usize,
    rows_own: usize,
    /// Gates of these rows.
    gates_out: usize,
    gates_come: usize,
    gates_own: usize,
}

/// How likely a row that chooses `chosen` of `experts` has none among `part` of them.
fn misses(experts: usize, part: usize, chosen: usize) -> f64 {
    (0..chosen).map(|i| (experts - part).saturating_sub(i) as f64 / (experts - i) as f64).product()
}

impl Away {
    fn new(rows: usize, leaves: usize, hidden: usize, [experts, chosen, ranks]: [usize; 3], load: Load) -> Self {
        let part = experts / ranks;
        let here = chosen.min(part);
        // Rows that go to a rank, and their terms; first from this rank to another, then to this rank from any.
        let [(rows_out, gates_out), (rows_come, gates_come)] = match load {
            Load::Balanced => {
                let some = (rows as f64 * (1.0 - misses(experts, part, chosen))).round() as usize;
                [(some, rows * chosen / ranks); 2]
            }
            Load::Worst if chosen > part => [(rows, (chosen - part).min(part) * rows), (rows, here * rows)],
            Load::Worst => [(0, 0), (rows, here * rows)],
        };
        let parcel = |rows: usize, gates: usize| leaves + rows + 2 * gates + rows * hidden;
        Self {
            others: ranks - 1,
            out: parcel(rows_out, gates_out),
            come: parcel(rows_come, gates_come),
            rows_out: rows_out * hidden,
            rows_come: rows_come * hidden,
            rows_own: rows_come * hidden,
            gates_out,
            gates_come,
            gates_own: gates_come,
        }
    }
}

impl Experts {
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize, load: Load) -> Option<Self> {
        let moe = model.moe.as_ref()?;
        let contexts = grid.cp / layout.cp;
        let rows_leaf = grid.microbatch * seq / grid.cp / grid.tp;
        let (lanes, cells) = (grid.ep / layout.group * contexts, grid.tp / layout.tp);
        let rows = lanes * cells * rows_leaf;
        let shape = [moe.experts, moe.per_token, layout.group];
        let away = (layout.group > 1).then(|| Away::new(rows, contexts * cells, model.hidden, shape, load));
        let slots = away.map_or(rows * moe.per_token, |away| away.gates_own + away.others * away.gates_come);
        // Where rows do not travel there is room for an expert that all rows choose.
        let most = match (away, load) {
            (None, _) => rows,
            (Some(_), Load::Balanced) => slots * layout.group / moe.experts,
            (Some(_), Load::Worst) => rows * layout.group,
        };
        Some(Self {
            scores: rows * moe.experts,
            x: slots * model.hidden,
            inner: slots * moe.ffn,
            one: [most * model.hidden, most * moe.ffn],
            shared: rows * moe.shared_ffn,
            leaves: lanes * cells,
            rows_leaf,
            widths: [model.hidden, moe.experts, moe.shared_ffn],
            away,
        })
    }

    /// Numbers of all parcels that come in one layer.
    pub fn parcels(&self) -> usize {
        self.away.map_or(0, |away| away.others * away.come)
    }

    fn take(&self, spare: &mut Spare, lens: &[usize]) {
        let loose = self.away.is_some();
        lens.iter().for_each(|len| if loose { spare.take_loose(*len) } else { spare.take(*len) });
    }

    fn give(&self, spare: &mut Spare, lens: &[usize]) {
        let loose = self.away.is_some();
        lens.iter().for_each(|len| if loose { spare.give_loose(*len) } else { spare.give(*len) });
    }

    /// What the layer has kept comes from its file, or goes there; `full`: the router's scores alone.
    pub fn kept(&self, spare: &mut Spare, full: bool, come: bool) {
        let mut kept = vec![self.scores];
        if !full && self.shared > 0 {
            kept.extend([self.shared; 2]);
        }
        let inner = if full { &[][..] } else { &[self.inner; 2] };
        if come {
            spare.all(&kept, &[]);
            self.take(spare, inner);
        } else {
            spare.all(&[], &kept);
            self.give(spare, inner);
        }
    }

    /// What is computed again goes.
    pub fn drop(&self, spare: &mut Spare) {
        self.give(spare, &[self.inner; 2]);
        if self.shared > 0 {
            spare.all(&[], &[self.shared; 2]);
        }
        self.parcels_go(spare);
    }

    fn parcels_go(&self, spare: &mut Spare) {
        if let Some(away) = self.away {
            (0..away.others).for_each(|_| spare.give_loose(away.come));
        }
    }

    /// `local`: numbers of the stream on the hosted slices.
    pub fn compute(&self, spare: &mut Spare, pass: Pass, segment: Segment, local: usize) {
        let Self { scores, x, inner, one: [one_x, one_inner], .. } = *self;
        let [hidden, experts, _] = self.widths;
        match (pass, segment) {
            (Pass::Forward, Segment::Route(_)) => spare.all(&[scores, scores], &[scores]),
            (Pass::Backward, Segment::Route(_)) => {
                spare.take(scores);
                let leaf = [self.rows_leaf * experts, self.rows_leaf * hidden];
                (0..self.leaves).for_each(|_| spare.all(&leaf, &leaf));
                spare.all(&[], &[scores, scores, local]);
            }
            (Pass::Forward, Segment::Experts(_)) => {
                self.take(spare, &[x, one_inner, inner, inner]);
                self.give(spare, &[one_inner]);
                self.outputs(spare, local, 0, |spare| self.shared_forward(spare));
                self.give(spare, &[x]);
            }
            (Pass::RecomputeKept, Segment::Experts(_)) => {
                self.take(spare, &[inner, inner, one_x]);
                self.give(spare, &[one_x]);
                if self.shared > 0 {
                    spare.all(&[self.shared; 2], &[]);
                }
            }
            (Pass::Backward, Segment::Experts(_)) => {
                self.take(spare, &[x, one_x, one_inner]);
                self.give(spare, &[one_x, one_inner, inner, inner]);
                self.outputs(spare, local, 1, |spare| self.shared_backward(spare));
                self.give(spare, &[x]);
            }
            _ => {}
        }
    }

    /// The rows that go back, with `gates` times the number of their gates, or what is left on this rank.
    fn outputs(&self, spare: &mut Spare, local: usize, gates: usize, shared: impl FnOnce(&mut Spare)) {
        match self.away {
            Some(away) => {
                spare.take_loose(away.rows_own + gates * away.gates_own);
                (0..away.others).for_each(|_| spare.take_loose(away.rows_come + gates * away.gates_come));
            }
            None => {
                spare.take(local);
                shared(spare);
            }
        }
    }

    fn shared_forward(&self, spare: &mut Spare) {
        if self.shared > 0 {
            spare.all(&[self.shared; 3], &[self.shared]);
        }
    }

    fn shared_backward(&self, spare: &mut Spare) {
        if self.shared > 0 {
            let [hidden, _, width] = self.widths.map(|width| self.rows_leaf * width);
            let leaf = [hidden, hidden, width, width, width];
            spare.take(self.shared);
            (0..self.leaves).for_each(|_| spare.all(&leaf, &leaf));
            spare.all(&[], &[self.shared; 3]);
        }
    }

    /// One of the exchanges of rows; `local` as in [`Experts::compute`].
    pub fn travel(&self, spare: &mut Spare, value: Value, local: usize) {
        let Some(away) = self.away else { return };
        let mut each = |loose: fn(&mut Spare, usize), len: usize| (0..away.others).for_each(|_| loose(spare, len));
        match value {
            Value::Dispatch(_) => {
                each(Spare::take_loose, away.out);
                each(Spare::take_loose, away.come);
                each(Spare::give_loose, away.out);
            }
            Value::DispatchGrad(_) => {
                each(Spare::take_loose, away.rows_out);
                each(Spare::take_loose, away.rows_come);
                each(Spare::give_loose, away.rows_out);
            }
            Value::Combine(_) => {
                each(Spare::take_loose, away.rows_out);
                spare.take(local);
                self.came(spare, away.rows_out, away.rows_own);
                self.shared_forward(spare);
                (0..away.others).for_each(|_| spare.give_loose(away.rows_come));
            }
            _ => {
                each(Spare::take_loose, away.rows_out + away.gates_out);
                each(Spare::give_loose, away.rows_come);
                self.parcels_go(spare);
                spare.take(local);
                self.came(spare, away.rows_out + away.gates_out, away.rows_own + away.gates_own);
                self.shared_backward(spare);
                (0..away.others).for_each(|_| spare.give_loose(away.rows_come + away.gates_come));
            }
        }
    }

    /// What came from the others, and the own part, is added up.
    fn came(&self, spare: &mut Spare, from_others: usize, own: usize) {
        spare.give_loose(own);
        (0..self.away.map_or(0, |away| away.others)).for_each(|_| spare.give_loose(from_others));
    }
}

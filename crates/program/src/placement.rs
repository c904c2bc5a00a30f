//! Where the four states of training lie: the table of states x placements for a run.
//!
//! Source of the language: "Placement Semantics for Distributed Deep Learning", arXiv 2601.02311. Bytes and traffic are
//! those of the program, not of a formula.

use spec::tensors::Cut;
use spec::{Class, Grid, Layout, Model, Recompute};

use crate::buckets::ChunkPlan;
use crate::check::Report;
use crate::instr::Value;
use crate::memory::two_neighbours;
use crate::state::chunk_tensors;

/// A state of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Parameters.
    Parameters,
    /// AdamW's two moments.
    Optimizer,
    /// Gradient accumulators.
    Gradients,
    /// What forward leaves for backward.
    Activations,
}

/// All states, in the order of the table.
pub const STATES: [State; 4] = [State::Parameters, State::Optimizer, State::Gradients, State::Activations];

/// The columns of the table.
pub const PLACEMENTS: [&str; 5] = ["replicated", "sharded", "sharded-with-gather", "materialized", "offloaded"];

impl Value {
    /// The state that an exchange moves; `None`: a decision, not a state.
    pub fn state(self) -> Option<State> {
        match self {
            Self::Params(_) => Some(State::Parameters),
            Self::NormGrads | Self::Grads(_) | Self::TiedGrads | Self::SliceGrads | Self::MirrorGrads => {
                Some(State::Gradients)
            }
            Self::Ballot => None,
            _ => Some(State::Activations),
        }
    }
}

/// One state's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The state.
    pub state: State,
    /// By placement, as in [`PLACEMENTS`]: the axes and parts that are placed so; empty: none.
    pub placed: [String; 5],
    /// Most bytes on a device.
    pub bytes: u64,
    /// Most bytes that a device sends in a step.
    pub sent: u64,
}

/// The table of a run whose lists came out as `report`.
pub fn table(model: &Model, grid: &Grid, layout: &Layout, report: &Report) -> Vec<Row> {
    let row = |state| Row {
        state,
        placed: placed(state, model, layout),
        bytes: bytes(state, model, grid, layout, report),
        sent: report.ranks.iter().map(|r| r.sent(state)).max().unwrap_or(0),
    };
    STATES.into_iter().map(row).collect()
}

/// Elements of a rank's chunks: all, and those whose optimizer state it has; the largest over the ranks.
fn elements(model: &Model, grid: &Grid, layout: &Layout) -> [u64; 2] {
    let most = |of: &dyn Fn(usize) -> usize| {
        (0..layout.pp).map(|pp| layout.chunks_of(pp).map(of).sum::<usize>()).max().unwrap_or(0) as u64
    };
    let first = layout.coords(0);
    let plans: Vec<ChunkPlan> = (0..layout.chunks()).map(|c| ChunkPlan::new(model, grid, layout, c, first)).collect();
    let all = |chunk: usize| plans[chunk].parameters;
    let owned = |chunk: usize| {
        let buckets = || plans[chunk].buckets.iter().filter(|b| b.parameters);
        let of = |holder| {
            let at = layout.holders_of(Class::Common).nth(first, holder);
            buckets().map(|b| b.owned(at).len()).sum::<usize>()
        };
        (0..layout.holders()).map(of).max().unwrap_or(0)
    };
    [most(&all), most(&owned)]
}

/// Most elements of two neighbouring buckets that a rank owns.
fn in_use(model: &Model, grid: &Grid, layout: &Layout) -> u64 {
    let mut most = 0;
    for chunk in 0..layout.chunks() {
        let plan = ChunkPlan::new(model, grid, layout, chunk, layout.coords(0));
        for holder in 0..layout.holders() {
            let at = layout.holders_of(Class::Common).nth(layout.coords(0), holder);
            let owned = plan.buckets.iter().filter(|b| b.parameters).map(|b| b.owned(at).len() as u64);
            most = most.max(two_neighbours(&owned.collect::<Vec<_>>()));
        }
    }
    most
}

fn bytes(state: State, model: &Model, grid: &Grid, layout: &Layout, report: &Report) -> u64 {
    let [all, owned] = elements(model, grid, layout);
    match state {
        // What is gathered for its use comes on top, a layer and the next one at a time.
        State::Parameters => 4 * if layout.zero >= 3 { owned } else { all },
        // A bucket and the one after it are in memory at once.
        State::Optimizer if layout.offload.optimizer() => 8 * in_use(model, grid, layout),
        State::Optimizer => 8 * owned,
        // The sums of a step; or one accumulator of the data cell at hand.
        State::Gradients => 4 * if layout.zero >= 2 { owned } else { all },
        State::Activations => report.ranks.iter().map(|r| r.peak_kept).max().unwrap_or(0),
    }
}

fn placed(state: State, model: &Model, layout: &Layout) -> [String; 5] {
    let mut words: [Vec<String>; 5] = Default::default();
    let [replicated, sharded, gathered, materialized, offloaded] = &mut words;
    match state {
        State::Optimizer if layout.offload.optimizer() => offloaded.push("moments".into()),
        State::Activations if layout.offload.activations() => offloaded.push("layers but the next one".into()),
        _ => {}
    }
    let axes = [("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("dp", layout.dp)];
    for (axis, _) in axes.into_iter().filter(|(_, ranks)| *ranks > 1) {
        let whole = (0..layout.chunks()).any(|c| chunk_tensors(model, layout, c).iter().any(|t| t.cut == Cut::Whole));
        match (state, axis) {
            (State::Activations, "tp") => {
                sharded.push("tp (rows)".into());
                gathered.push("tp (inside a segment)".into());
            }
            (State::Activations, "cp") => {
                sharded.push("cp (sequence)".into());
                gathered.push("cp (keys, inside attention)".into());
            }
            (State::Activations, "dp") => sharded.push("dp (microbatches)".into()),
            (State::Activations, _) => sharded.push(format!("{axis} (layers)")),
            (_, "tp") => {
                sharded.push("tp (matrices)".into());
                if whole {
                    replicated.push("tp (norms)".into());
                }
            }
            (_, "pp") => sharded.push("pp (layers)".into()),
            (State::Optimizer, "dp" | "cp") if layout.zero >= 1 => sharded.push(axis.into()),
            (State::Gradients, "dp" | "cp") if layout.zero >= 2 => sharded.push(axis.into()),
            (State::Parameters, "dp" | "cp") if layout.zero >= 3 => gathered.push(axis.into()),
            _ => replicated.push(axis.into()),
        }
    }
    if layout.group > 1 && state != State::Activations {
        sharded.push("ep (experts)".into());
    }
    if layout.world() == 1 {
        replicated.push("one rank".into());
    }
    if state == State::Activations {
        for mode in [Recompute::Selective, Recompute::Full] {
            let layers = layout.recompute.iter().filter(|m| **m == mode).count();
            if layers > 0 {
                let what = if mode == Recompute::Full { "layers" } else { "attentions" };
                materialized.push(format!("{layers} {what}"));
            }
        }
    }
    words.map(|w| w.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mode, check::check, lower_all_parts, testing};
    use spec::Schedule;

    #[test]
    fn a_table_counts_what_lies_where() {
        let model = testing::model(4);
        let grid = Grid::new(&model, 8, 32, 1, Some(4), 2).unwrap();
        let mut layout = testing::layout(&model, &grid, [2, 2, 2], Schedule::OneFOneB, None);
        (layout.zero, layout.shard) = (1, 2);
        layout.recompute = vec![Recompute::Full, Recompute::None, Recompute::None, Recompute::Selective];
        let programs = lower_all_parts(&model, &grid, &layout, 32, Mode::Train);
        let report = check(&programs, &model, &grid, &layout, 32, Mode::Train).unwrap();
        let rows = table(&model, &grid, &layout, &report);
        let [params, optimizer, gradients, activations] = &rows[..] else { panic!("four states") };
        assert_eq!(params.placed, ["tp (norms), dp", "tp (matrices), pp (layers)", "", "", ""]);
        assert_eq!(optimizer.placed[1], "tp (matrices), pp (layers), dp");
        assert_eq!(activations.placed[3], "1 attentions, 1 layers");
        // Together the ranks of a data position hold every parameter; a tensor pair holds the norms twice.
        let whole: usize = spec::tensors::tensors(&model).iter().map(|t| t.rows * t.cols).sum();
        assert!(params.bytes >= whole as u64 && params.bytes < 2 * whole as u64);
        assert_eq!(gradients.bytes, params.bytes);
        assert!(optimizer.bytes >= params.bytes && optimizer.bytes < params.bytes + 8 * 16 * 1024);
        // What each state sends is all that is sent, but for ballots.
        for rank in &report.ranks {
            let states: u64 = STATES.iter().map(|s| rank.sent(*s)).sum();
            assert_eq!(states, rank.bytes[..9].iter().sum::<u64>());
        }
    }
}

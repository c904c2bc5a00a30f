//! Faults that must be caught: in the numbers by the digest, in the program by the checker.

use program::check::check;
use program::instr::{Axis, Exchange};
use program::{Bucket, Instr, Mode, Op, Pass, Program, Segment, Value};
use spec::Unit;
use train::mutant::Mutant;

use super::grids::parse;
use super::rows::{Course, Row, sets};

/// What a mutant must come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// The run ends with another digest.
    OtherDigest,
    /// The run fails: two holders of one state disagree.
    Disagreement,
}

/// The run on which a mutant is active, and what it must come to.
pub fn case(mutant: Mutant) -> (Row, Expect) {
    use Expect::{Disagreement, OtherDigest};
    let (grid, layout, expect) = match mutant {
        // All four context cells of a data cell on one rank.
        Mutant::KeyGradsRotated => (7, "dp=2", OtherDigest),
        Mutant::ChunkOfNext => (6, "cp=2", OtherDigest),
        Mutant::MaskByLocal => (7, "cp=2", OtherDigest),
        // Three ranks with 2, 1 and 1 cells: ((0 + 1) + 2) + 3 for (0 + 1) + (2 + 3).
        Mutant::RanksAsLeaves => (0, "dp=3", OtherDigest),
        Mutant::MicrobatchesReversed => (3, "dp=2", OtherDigest),
        Mutant::NormOwnSlice => (0, "tp=2", Disagreement),
        // All four tensor cells on one rank.
        Mutant::PartialsRotated => (2, "pp=2", OtherDigest),
        Mutant::SoftmaxRotated => (2, "tp=2", OtherDigest),
        Mutant::TiedOneAccumulator => (1, "dp=2", OtherDigest),
        Mutant::TiedOneSided => (1, "pp=2", Disagreement),
        Mutant::PaddingCounted => (0, "dp=2", OtherDigest),
        // Replicas of plain data parallelism would disagree; with shards nobody can tell but the digest.
        Mutant::OwnTokens => (0, "dp=2 zero=1", OtherDigest),
        Mutant::MasksIgnored => (0, "dp=2", OtherDigest),
        Mutant::PositionsGoOn => (0, "dp=2", OtherDigest),
        // The owner's mirror does not lose it.
        Mutant::LastChunkLost => (1, "dp=2 zero=1", Disagreement),
        Mutant::TokenDropped => (4, "dp=2", OtherDigest),
        Mutant::GatesNotRenormed => (4, "pp=2", OtherDigest),
        Mutant::CombineInOneBlock => (10, "pp=2", OtherDigest),
        Mutant::GroupReversed => (10, "pp=2", OtherDigest),
        Mutant::ExpertsOwnSlice => (4, "tp=2", Disagreement),
        // Two groups of two ranks, each with half of the experts.
        Mutant::ExpertsOtherGroup => (11, "dp=4", OtherDigest),
        // The input part of a cell's first unit comes before the weight part of the last unit of the cell before.
        Mutant::CellsMixed => (1, "pp=2 schedule=zb-h1", OtherDigest),
        Mutant::RecomputeUnmasked => (0, "dp=2 recompute=selective", OtherDigest),
        Mutant::LeafTwice => (9, "dp=2 zero=2", OtherDigest),
        Mutant::StaleShard => (9, "dp=2 zero=3", OtherDigest),
        Mutant::StalePanels => (0, "pp=2 keep_packed=true", OtherDigest),
        Mutant::MomentsForgotten => (0, "dp=2", OtherDigest),
    };
    let course = match mutant {
        Mutant::MomentsForgotten => Course::Restored(sets("dp=2")),
        _ => Course::Straight,
    };
    (Row { grid, sets: sets(layout), simd: None, course }, expect)
}

/// A fault in the lists of all ranks.
pub struct Wrong {
    /// What is wrong.
    pub what: &'static str,
    /// The layout of the lists, over [`GRID`]; after `tied` over [`GRID_TIED`], after `reduced` over [`GRID_REDUCED`], after
    /// `experts` over [`GRID_EXPERTS`].
    pub layout: &'static str,
    /// What the refusal must say.
    pub reason: &'static str,
    change: fn(&mut [Program]),
}

/// The grid of the lists that are mutated.
const GRID: usize = 6;
/// The one for layouts that begin with `tied`: a tied embedding.
const GRID_TIED: usize = 1;
/// The one for layouts that begin with `reduced`: gradients leave microbatch by microbatch.
const GRID_REDUCED: usize = 9;
/// The one for layouts that begin with `experts`: groups of two data cells.
const GRID_EXPERTS: usize = 11;
/// Everything is sharded.
const SHARDED: &str = "reduced dp=2 tp=2 pp=2 zero=3";
/// With ZeRO-1, so that every exchange is there.
const LISTS: &str = "dp=2 cp=2 tp=2 pp=2 zero=1";

/// The faults in programs.
pub const WRONG: &[Wrong] = &[
    Wrong {
        what: "two backwards of one cell swapped on all ranks",
        layout: LISTS,
        reason: "before cell 0 mb 0 has: they add up in ascending order",
        change: swap_backwards,
    },
    Wrong {
        what: "norm gradients of one microbatch not exchanged over t",
        layout: LISTS,
        reason: "NormGrads",
        change: |lists| drop_all(lists, |i| of(i, Value::NormGrads) && i.unit == Some(Unit { cell: 1, mb: 0 })),
    },
    Wrong {
        what: "keys of one layer not gathered again for its backward",
        layout: LISTS,
        reason: "AllGather KeyValues(0) Cp",
        change: |lists| {
            let last_of = |list: &mut Program| {
                if let Some(at) = list.instrs.iter().rposition(|i| of(i, Value::KeyValues(0))) {
                    list.instrs.remove(at);
                }
            };
            lists.iter_mut().for_each(last_of);
        },
    },
    Wrong {
        what: "key gradients of one layer not summed over c",
        layout: LISTS,
        reason: "ReduceScatter KeyValueGrads(1) Cp",
        change: |lists| drop_all(lists, |i| of(i, Value::KeyValueGrads(1))),
    },
    Wrong {
        what: "one send of an activation lost",
        layout: LISTS,
        reason: "ends without the send of Activation",
        change: |lists| drop_first(&mut lists[0], |i| matches!(i.op, Op::Send { value: Value::Activation, .. })),
    },
    Wrong {
        what: "a microbatch not taken backward through one layer",
        layout: LISTS,
        reason: "where BackwardInput Mlp(0) is due, which the list lacks",
        change: |lists| drop_first(&mut lists[1], |i| i.op == Op::Compute(Pass::BackwardInput, Segment::Mlp(0))),
    },
    Wrong {
        what: "a microbatch taken backward through one layer twice",
        layout: LISTS,
        reason: "is one too many",
        change: |lists| {
            let list = &mut lists[1].instrs;
            if let Some(at) = list.iter().position(|i| i.op == Op::Compute(Pass::BackwardInput, Segment::Mlp(0))) {
                list.insert(at, list[at]);
            }
        },
    },
    Wrong {
        what: "input gradients on their way before they are made",
        layout: LISTS,
        reason: "what it moves is not made yet",
        change: |lists| {
            for list in lists {
                let is_post = |i: &Instr| matches!(i.op, Op::Post { value: Value::GradPartial, .. });
                if let Some(at) = list.instrs.iter().position(is_post) {
                    list.instrs.swap(at, at - 1);
                }
            }
        },
    },
    Wrong {
        what: "a sum of input gradients used before it has come",
        layout: LISTS,
        reason: "is out of order: ReduceScatter GradPartial Tp comes first",
        change: |lists| {
            for list in lists {
                let is_post = |i: &Instr| matches!(i.op, Op::Post { value: Value::GradPartial, .. });
                let is_take = |i: &Instr| of(i, Value::GradPartial);
                if let Some(post) = list.instrs.iter().position(is_post)
                    && let Some(take) = list.instrs[post..].iter().position(is_take)
                {
                    list.instrs.swap(post + take, post + take + 1);
                }
            }
        },
    },
    Wrong {
        what: "rows posted by one member of a tensor group",
        layout: LISTS,
        reason: "has posted nothing",
        change: |lists| drop_first(&mut lists[0], |i| matches!(i.op, Op::Post { value: Value::GradRows, .. })),
    },
    Wrong {
        what: "a data cell closed before its last microbatch",
        layout: LISTS,
        reason: "has yet to add to the weight gradients of",
        change: |lists| {
            let list = &mut lists[0].instrs;
            if let Some(at) = list.iter().position(|i| matches!(i.op, Op::Close { .. })) {
                let close = list.remove(at);
                list.insert(at / 2, close);
            }
        },
    },
    Wrong {
        what: "a data cell left out of the gradients",
        layout: LISTS,
        reason: "of the chunk is not closed",
        change: |lists| drop_all(lists, |i| matches!(i.op, Op::Close { cell: 1, .. })),
    },
    Wrong {
        what: "parameters applied before the vote",
        layout: LISTS,
        reason: "nothing is overwritten before the vote",
        change: |lists| {
            let list = &mut lists[0].instrs;
            if let Some(vote) = list.iter().position(|i| i.op == Op::Vote) {
                list.swap(vote, vote + 1);
            }
        },
    },
    Wrong {
        what: "updated parameters of ZeRO-1 not gathered",
        layout: LISTS,
        reason: "the gather of Params",
        change: |lists| drop_all(lists, |i| matches!(i.op, Op::Collective { value: Value::Params(_), .. })),
    },
    Wrong {
        what: "updated parameters of ZeRO-1 gathered before the update",
        layout: LISTS,
        reason: "parameters are gathered after the chunk's apply",
        change: |lists| {
            for list in lists {
                if let Some(at) = list.instrs.iter().position(|i| i.op == Op::Apply) {
                    list.instrs.swap(at, at + 1);
                }
            }
        },
    },
    Wrong {
        what: "gradients of a bucket summed before the last cell has added",
        layout: SHARDED,
        reason: "of the chunk is not closed in mb 0",
        change: |lists| {
            for list in lists.iter_mut().map(|list| &mut list.instrs) {
                let sum = list.iter().position(|i| matches!(i.op, Op::Collective { value: Value::Grads(_), .. }));
                let Some(sum) = sum else { continue };
                let Op::Collective { value: Value::Grads(of), .. } = list[sum].op else { continue };
                let closes = |i: &Instr| matches!(i.op, Op::Close { bucket, .. } if bucket == of);
                if let Some(close) = list[..sum].iter().rposition(closes) {
                    let sum = list.remove(sum);
                    list.insert(close, sum);
                }
            }
        },
    },
    Wrong {
        what: "a bucket posted before its gradient is complete",
        layout: SHARDED,
        reason: "are not complete",
        change: |lists| {
            for list in lists.iter_mut().map(|list| &mut list.instrs) {
                if let Some(post) = list.iter().position(posts_grads) {
                    // Behind the close of the last cell; now before it.
                    list.swap(post - 1, post);
                }
            }
        },
    },
    Wrong {
        what: "gradients posted and taken twice",
        layout: LISTS,
        reason: "is one too many",
        change: |lists| {
            for list in lists.iter_mut().map(|list| &mut list.instrs) {
                let takes = |i: &Instr| matches!(i.op, Op::Collective { value: Value::Grads(_), .. });
                if let Some(take) = list.iter().position(takes) {
                    list.insert(take, list[take]);
                }
            }
        },
    },
    Wrong {
        what: "gradients posted and never taken",
        layout: LISTS,
        reason: "without the exchange of Grads",
        change: |lists| drop_all(lists, |i| matches!(i.op, Op::Collective { value: Value::Grads(_), .. })),
    },
    Wrong {
        what: "gradients posted by one member and exchanged in one piece by the other",
        layout: LISTS,
        reason: "has posted nothing",
        change: |lists| {
            if let Some(post) = lists[0].instrs.iter().position(posts_grads) {
                lists[0].instrs.remove(post);
            }
        },
    },
    Wrong {
        what: "the buffer of gathered parameters released before the gather is taken",
        layout: SHARDED,
        reason: "are not gathered",
        change: |lists| {
            for list in lists.iter_mut().map(|list| &mut list.instrs) {
                let takes = |i: &Instr| matches!(i.op, Op::Collective { value: Value::Params(Bucket::Layer(_)), .. });
                let freed = |i: &Instr| matches!(i.op, Op::Release(Bucket::Layer(_)));
                if let (Some(take), Some(free)) = (list.iter().position(takes), list.iter().position(freed)) {
                    let free = list.remove(free);
                    list.insert(take, free);
                }
            }
        },
    },
    Wrong {
        what: "parameters freed after the forward and not gathered for the backward",
        layout: SHARDED,
        reason: "the gather of the parameters of Layer(0)",
        change: |lists| {
            for list in lists.iter_mut().map(|list| &mut list.instrs) {
                let gather = |i: &Instr| matches!(i.op, Op::Collective { value: Value::Params(Bucket::Layer(_)), .. });
                if let Some(last) = list.iter().rposition(gather) {
                    list.remove(last);
                }
            }
        },
    },
    Wrong {
        what: "gathered parameters kept beyond the update",
        layout: SHARDED,
        reason: "would outlive the update",
        change: |lists| {
            for list in lists.iter_mut().map(|list| &mut list.instrs) {
                if let Some(last) = list.iter().rposition(|i| matches!(i.op, Op::Release(_))) {
                    list.remove(last);
                }
            }
        },
    },
    Wrong {
        what: "gradients of a ZeRO-1 run reduced on tp instead of dp",
        layout: LISTS,
        reason: "names no microbatch",
        change: |lists| {
            for instr in lists.iter_mut().flat_map(|list| &mut list.instrs) {
                if let Op::Collective { value: Value::Grads(_), axis, .. } = &mut instr.op {
                    *axis = Axis::Tp;
                }
            }
        },
    },
    Wrong {
        what: "expert gradients of the wrong group: summed over ranks with other experts",
        layout: "experts dp=4 tp=2 zero=1",
        reason: "Experts(0) are of each group of data cells: its gradients are summed over the ranks at the same place",
        change: |lists| {
            for instr in lists.iter_mut().flat_map(|list| &mut list.instrs) {
                if let Op::Collective { value: Value::Grads(Bucket::Experts(_)), axis, .. } = &mut instr.op {
                    *axis = Axis::Dp;
                }
            }
        },
    },
    Wrong {
        what: "updated experts gathered from ranks with other experts",
        layout: "experts dp=4 tp=2 zero=1",
        reason: "no step has such an exchange",
        change: |lists| {
            for instr in lists.iter_mut().flat_map(|list| &mut list.instrs) {
                if let Op::Collective { value: Value::Params(Bucket::Experts(_)), axis, .. } = &mut instr.op {
                    *axis = Axis::Shard;
                }
            }
        },
    },
    Wrong {
        what: "partial outputs gathered instead of summed",
        layout: LISTS,
        reason: "`AllGather Partial Tp",
        change: |lists| {
            for instr in lists.iter_mut().flat_map(|list| &mut list.instrs) {
                if let Op::Collective { value: Value::Partial, exchange, .. } = &mut instr.op {
                    *exchange = Exchange::AllGather;
                }
            }
        },
    },
    Wrong {
        what: "the other share of a tied embedding added before the own is sent",
        layout: "tied pp=2",
        reason: "own share is sent before the other's is added to it",
        change: |lists| {
            let list = &mut lists[1].instrs;
            if let Some(at) = list.iter().position(|i| matches!(i.op, Op::Send { value: Value::TiedGrads, .. })) {
                list.swap(at, at + 1);
            }
        },
    },
    Wrong {
        what: "gradients of a tied embedding handed over as those of one microbatch",
        layout: "tied pp=2 schedule=zbv",
        reason: "it is of the whole step and names a microbatch",
        change: |lists| {
            let swap = |i: &&mut Instr| matches!(i.op, Op::Send { value: Value::TiedGrads, .. });
            lists[0].instrs.iter_mut().filter(swap).for_each(|i| i.unit = Some(Unit { cell: 0, mb: 0 }));
        },
    },
    Wrong {
        what: "a data cell closed without its microbatch",
        layout: LISTS,
        reason: "it names no microbatch",
        change: |lists| {
            let close = |i: &&mut Instr| matches!(i.op, Op::Close { .. });
            lists[0].instrs.iter_mut().filter(close).for_each(|i| i.unit = None);
        },
    },
    Wrong {
        what: "the sum of a microbatch taken as that of another, on all ranks",
        layout: SHARDED,
        reason: "the sum of mb 0 is due",
        change: |lists| {
            for instr in lists.iter_mut().flat_map(|list| &mut list.instrs) {
                if let (Op::Collective { value: Value::Grads(_), .. }, Some(unit)) = (instr.op, &mut instr.unit) {
                    unit.mb = 1 - unit.mb;
                }
            }
        },
    },
    Wrong {
        what: "two ranks that wait for each other",
        layout: "pp=2",
        reason: "in a cycle: 0 waits for 1 waits for 0",
        change: |lists| {
            // Position 0 asks for a gradient before it sends what that gradient comes from.
            let list = &mut lists[0].instrs;
            let recv = list.iter().position(|i| matches!(i.op, Op::Recv { .. }));
            let send = list.iter().position(|i| matches!(i.op, Op::Send { .. }));
            if let (Some(recv), Some(send)) = (recv, send) {
                let early = list.remove(recv);
                list.insert(send, early);
            }
        },
    },
    Wrong {
        what: "the weight part of a backward lost",
        layout: "pp=2 schedule=zb-h1",
        reason: "Attn(1)",
        change: |lists| drop_first(&mut lists[0], |i| i.op == Op::Compute(Pass::BackwardWeight, Segment::Attn(1))),
    },
    Wrong {
        what: "a weight part before its input part",
        layout: "pp=2 schedule=zb-h1",
        reason: "is out of order",
        change: |lists| {
            let list = &mut lists[0].instrs;
            let is = |pass| move |i: &Instr| i.op == Op::Compute(pass, Segment::Mlp(0));
            let input = list.iter().position(is(Pass::BackwardInput));
            let weight = list.iter().position(is(Pass::BackwardWeight));
            if let (Some(input), Some(weight)) = (input, weight) {
                let early = list.remove(weight);
                list.insert(input, early);
            }
        },
    },
    Wrong {
        what: "weight parts of two microbatches swapped",
        layout: "pp=2 schedule=zb-h1",
        reason: "they add up in ascending order",
        change: |lists| {
            for instr in &mut lists[1].instrs {
                if let (Op::Compute(Pass::BackwardWeight, _), Some(unit)) = (instr.op, &mut instr.unit)
                    && unit.cell == 0
                    && unit.mb < 2
                {
                    unit.mb = 1 - unit.mb;
                }
            }
        },
    },
    Wrong {
        what: "a layer that was let go and not computed again",
        layout: "pp=2 recompute=full",
        reason: "where RecomputeKept Mlp(1) is due, which the list lacks",
        change: |lists| drop_all(lists, |i| i.op == Op::Compute(Pass::RecomputeKept, Segment::Mlp(1))),
    },
    Wrong {
        what: "a layer let go before its last use",
        layout: "pp=2 recompute=full",
        reason: "is out of order",
        change: |lists| {
            let list = &mut lists[0].instrs;
            if let Some(at) = list.iter().position(|i| matches!(i.op, Op::Drop(_))) {
                list.swap(at, at - 1);
            }
        },
    },
];

fn of(instr: &Instr, value: Value) -> bool {
    matches!(instr.op, Op::Collective { value: v, .. } if v == value)
}

fn posts_grads(i: &Instr) -> bool {
    matches!(i.op, Op::Post { value: Value::Grads(_), .. })
}

fn drop_all(lists: &mut [Program], test: impl Fn(&Instr) -> bool) {
    lists.iter_mut().for_each(|list| list.instrs.retain(|i| !test(i)));
}

fn drop_first(list: &mut Program, test: impl Fn(&Instr) -> bool) {
    if let Some(at) = list.instrs.iter().position(test) {
        list.instrs.remove(at);
    }
}

/// The names of microbatches 0 and 1 of cell 0 exchanged in all that belongs to their backward: nobody waits, but
/// gradients add up in another order.
fn swap_backwards(lists: &mut [Program]) {
    for list in lists {
        let mut backward = false;
        for instr in &mut list.instrs {
            backward = match instr.op {
                Op::Load | Op::Compute(Pass::Forward, Segment::Embed) | Op::Recv { value: Value::Activation, .. } => {
                    false
                }
                Op::Compute(Pass::Forward, Segment::HeadNorm) | Op::Recv { value: Value::ActivationGrad, .. } => true,
                _ => backward,
            };
            if let Some(unit) = &mut instr.unit
                && backward
                && unit.cell == 0
                && unit.mb < 2
            {
                unit.mb = 1 - unit.mb;
            }
        }
    }
}

/// What the checker says to the mutant's lists; `None`: nothing, or the lists are as they were.
pub fn refusal(wrong: &Wrong) -> Result<Option<String>, String> {
    let (grid, layout) = match wrong.layout.split_once(' ') {
        Some(("tied", layout)) => (GRID_TIED, layout),
        Some(("reduced", layout)) => (GRID_REDUCED, layout),
        Some(("experts", layout)) => (GRID_EXPERTS, layout),
        _ => (GRID, wrong.layout),
    };
    let run = parse(grid, &sets(layout))?;
    let sound = program::lower_all(&run, Mode::Train);
    let judge = |lists: &[Program]| check(lists, &run.model, &run.grid, &run.layout, run.train.seq, Mode::Train);
    if let Err(violations) = judge(&sound) {
        return Err(format!("the lists are refused before the mutation: {}", violations[0]));
    }
    let mut lists = sound.clone();
    (wrong.change)(&mut lists);
    Ok(judge(&lists)
        .err()
        .filter(|_| lists != sound)
        .map(|violations| violations.iter().take(4).map(ToString::to_string).collect::<Vec<_>>().join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_of_a_program_is_refused() {
        for wrong in WRONG {
            let text = refusal(wrong).unwrap().unwrap_or_else(|| panic!("{} is not refused", wrong.what));
            assert!(text.contains(wrong.reason), "{}: {text}", wrong.what);
        }
        let nothing = Wrong { what: "nothing", layout: LISTS, reason: "", change: |_| {} };
        assert_eq!(refusal(&nothing).unwrap(), None);
    }

    #[test]
    fn swapped_backwards_break_only_the_order_of_sums() {
        let text = refusal(&WRONG[0]).unwrap().unwrap();
        assert!(text.contains("mb 1") && text.contains("before"), "{text}");
    }

    #[test]
    fn every_mutant_has_a_sound_layout_of_several_ranks() {
        for mutant in Mutant::ALL {
            let (row, _) = case(*mutant);
            assert!(parse(row.grid, &row.sets).unwrap().layout.world() >= 2, "{mutant}");
        }
    }
}

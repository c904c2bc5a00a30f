//! Rows between tensor positions that leave ahead of their exchange: beside the weight gradients of backward.

use super::*;
use crate::instr::{Axis, Exchange, Instr, Op, Pass, Segment, Value};

const SUM: Value = Value::GradPartial;
const GATHER: Value = Value::GradRows;

fn posts(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Post { value: v, .. } if *v == value)
}

fn takes(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Collective { value: v, .. } if *v == value)
}

fn is(pass: Pass, segment: Segment) -> impl Fn(&Op) -> bool {
    move |op| *op == Op::Compute(pass, segment)
}

/// One position, a pipeline, data cells too, everything sharded, recomputation, context cells.
fn cases() -> Vec<Case> {
    let small = |ranks, change: fn(&mut Model, &mut Layout)| Case::small(ranks, Schedule::OneFOneB, change);
    let again = |mode| move |_: &mut Model, layout: &mut Layout| layout.recompute = vec![mode; 8];
    let mut cases = vec![
        small([1, 2, 1], |_, _| {}),
        small([1, 2, 2], |_, _| {}),
        small([2, 2, 1], super::mutants::zero_1),
        Case::small([1, 2, 2], Schedule::DualPipeV, |_, _| {}),
        Case::small([1, 2, 1], Schedule::OneFOneB, again(spec::Recompute::Selective)),
        Case::small([1, 2, 2], Schedule::OneFOneB, again(spec::Recompute::Full)),
    ];
    let model = testing::model(4);
    let grid = Grid::new(&model, 4, SEQ, 1, Some(2), 2).unwrap().with_context(2, SEQ).unwrap();
    let grid = Grid { accumulate: spec::Accumulate::Reduced, ..grid };
    let mut layout = testing::layout(&model, &grid, [1, 2, 1], Schedule::OneFOneB, None);
    (layout.cp, layout.zero, layout.shard) = (2, 3, 2);
    cases.push(Case::new(model, grid, layout, Mode::Train));
    cases
}

fn legal(case: &Case) {
    if let Err(found) = case.check() {
        panic!("{case:?}\n{}", found.iter().map(|v| v.to_string()).collect::<Vec<_>>().join("\n"));
    }
}

/// Some violation says `text`.
fn says(case: &Case, text: &str) {
    let texts: Vec<String> = case.refused().iter().map(|v| v.to_string()).collect();
    assert!(texts.iter().any(|t| t.contains(text)), "no {text:?} among\n{}", texts.join("\n"));
}

/// Changes the lists of all ranks likewise.
fn all(case: &mut Case, change: impl Fn(&mut Vec<Instr>)) {
    case.programs.iter_mut().for_each(|program| change(&mut program.instrs));
}

fn at(list: &[Instr], test: impl Fn(&Op) -> bool) -> usize {
    list.iter().position(|i| test(&i.op)).expect("the list has it")
}

/// Moves the first of `what` in front of the first of `to`.
fn before(list: &mut Vec<Instr>, what: impl Fn(&Op) -> bool, to: impl Fn(&Op) -> bool) {
    let instr = list.remove(at(list, what));
    let to = at(list, to);
    list.insert(to, instr);
}

#[test]
fn exchanges_of_backward_run_beside_weight_gradients() {
    for case in cases() {
        legal(&case);
        let list = &case.programs[0].instrs;
        for (from, instr) in list.iter().enumerate() {
            let Op::Post { value, axis: Axis::Tp, .. } = instr.op else { continue };
            let take = from + at(&list[from..], takes(value));
            let beside = list[from..take].iter().any(|i| matches!(i.op, Op::Compute(Pass::BackwardWeight, _)));
            assert!(beside, "nothing is done beside `{instr}` in {case:?}");
        }
        let count = |test: &dyn Fn(&Op) -> bool| list.iter().filter(|i| test(&i.op)).count();
        let parts = count(&|op| matches!(op, Op::Compute(Pass::BackwardInput, Segment::Attn(_) | Segment::Mlp(_))));
        let split = case.layout.schedule == Schedule::DualPipeV;
        assert!(split || count(&posts(SUM)) == parts, "every segment's sum leaves ahead: {case:?}");
        assert!(count(&posts(GATHER)) > 0);
    }
}

/// The gradient of a stage goes to the stage before it ahead of weight gradients.
#[test]
fn a_pipeline_does_not_wait_for_weight_gradients() {
    let case = Case::small([1, 2, 2], Schedule::OneFOneB, |_, _| {});
    let list = &case.programs[2].instrs;
    let send = at(list, |op| matches!(op, Op::Send { value: Value::ActivationGrad, .. }));
    assert!(send < at(list, is(Pass::BackwardWeight, Segment::Attn(4))));
}

/// The backward of a microbatch and the forward of the next, under every axis and kind of layer that there may be.
#[test]
fn two_microbatches_hide_each_others_exchanges() {
    let pairs = |ranks, change: fn(&mut Model, &mut Layout)| {
        Case::small(ranks, Schedule::OneFOneB, |model, layout| {
            layout.tp_pairs = true;
            change(model, layout);
        })
    };
    let mut cases = vec![
        pairs([1, 2, 1], |_, _| {}),
        pairs([2, 2, 1], super::mutants::zero_1),
        pairs([1, 2, 1], |_, layout| layout.recompute = vec![spec::Recompute::Selective; 8]),
        pairs([1, 2, 1], |_, layout| layout.recompute = vec![spec::Recompute::Full; 8]),
    ];
    let model = testing::model(4);
    let grid = Grid::new(&model, 8, SEQ, 1, Some(2), 2).unwrap().with_context(2, SEQ).unwrap();
    let mut layout = testing::layout(&model, &grid, [1, 2, 1], Schedule::OneFOneB, None);
    (layout.cp, layout.tp_pairs) = (2, true);
    cases.push(Case::new(model, grid, layout, Mode::Train));
    for case in cases {
        legal(&case);
        let list = &case.programs[0].instrs;
        let (mut exchanges, mut hidden) = (0, 0);
        for (take, instr) in list.iter().enumerate() {
            let Op::Collective { value, axis: Axis::Tp, .. } = instr.op else { continue };
            if !value.of_rows() {
                continue;
            }
            exchanges += 1;
            let post = list[..take].iter().rposition(|i| posts(value)(&i.op) && i.unit == instr.unit);
            let done = post.map_or(&[][..], |post| &list[post..take]);
            hidden += usize::from(done.iter().any(|i| matches!(i.op, Op::Compute(..))));
        }
        // The first forward, and the end of the last backward, have nobody beside them.
        assert!(5 * hidden > 4 * exchanges, "{hidden} of {exchanges} in {case:?}");
    }
}

#[test]
fn other_lists_are_as_good() {
    for mut case in cases() {
        // Nothing is posted.
        case.drop_all(|i| matches!(i.op, Op::Post { axis: Axis::Tp, .. }));
        legal(&case);
    }
    for mut case in cases() {
        case.layout.tp_overlap = false;
        let plain = Case::new(case.model, case.grid, case.layout, case.mode);
        assert!(!plain.programs[0].instrs.iter().any(|i| matches!(i.op, Op::Post { axis: Axis::Tp, .. })));
        legal(&plain);
    }
    // Weight gradients behind the take, and a post right behind what makes its value.
    let last = 7;
    let mut case = Case::small([1, 2, 1], Schedule::OneFOneB, |_, _| {});
    all(&mut case, |list| {
        before(list, is(Pass::BackwardWeight, Segment::Mlp(last)), is(Pass::Backward, Segment::MlpNorm(last)))
    });
    legal(&case);
    // One rank does its weight gradients beside another exchange than its peer.
    let mut case = Case::small([1, 2, 1], Schedule::OneFOneB, |_, _| {});
    before(case.instrs(0), is(Pass::BackwardWeight, Segment::Down(last)), is(Pass::BackwardWeight, Segment::Mlp(last)));
    legal(&case);
}

#[test]
fn posted_before_its_value_is_made() {
    for mut case in cases() {
        all(&mut case, |list| {
            let first = list[at(list, posts(SUM))];
            let made = at(list, |op| matches!(op, Op::Compute(Pass::BackwardInput, _)));
            let post = at(list, posts(SUM));
            list.remove(post);
            list.insert(made, first);
        });
        says(&case, "what it moves is not made yet");
    }
    let mut case = Case::small([1, 2, 1], Schedule::OneFOneB, |_, _| {});
    all(&mut case, |list| before(list, posts(GATHER), is(Pass::Backward, Segment::MlpNorm(7))));
    says(&case, "what it moves is not made yet");
}

#[test]
fn a_value_used_before_it_is_taken() {
    for value in [SUM, GATHER] {
        for mut case in cases().into_iter().take(2) {
            all(&mut case, |list| {
                let take = at(list, posts(value));
                let take = take + at(&list[take..], takes(value));
                // What follows the take reads what it brings.
                list.swap(take, take + 1);
            });
            says(&case, "is out of order");
        }
    }
}

#[test]
fn posted_and_never_taken_or_after_its_exchange() {
    for value in [SUM, GATHER] {
        for mut case in cases() {
            all(&mut case, |list| {
                let post = at(list, posts(value));
                let take = post + at(&list[post..], takes(value));
                list.remove(take);
            });
            says(&case, &format!("{value:?} Tp"));
        }
        let mut case = Case::small([1, 2, 1], Schedule::OneFOneB, |_, _| {});
        all(&mut case, |list| {
            let post = at(list, posts(value));
            let take = post + at(&list[post..], takes(value));
            let late = list.remove(post);
            list.insert(take, late);
        });
        says(&case, "is out of order");
    }
}

#[test]
fn posted_twice() {
    for value in [SUM, GATHER] {
        for mut case in cases() {
            all(&mut case, |list| {
                let post = at(list, posts(value));
                list.insert(post, list[post]);
            });
            says(&case, "is one too many");
        }
    }
}

/// Members would post in different orders, and one's numbers would land in the other's buffer.
#[test]
fn two_units_on_their_way_at_once() {
    let mut case = Case::small([1, 2, 1], Schedule::GPipe, |_, _| {});
    all(&mut case, |list| {
        let post = at(list, posts(SUM));
        let unit = list[post].unit;
        let next = |i: &Instr| i.unit != unit && i.op == Op::Load;
        let begins = post + list[post..].iter().position(next).expect("another unit");
        let leaves = begins + at(&list[begins..], posts(SUM));
        let other: Vec<Instr> = list.drain(begins..=leaves).collect();
        list.splice(post + 1..post + 1, other);
    });
    says(&case, "is one too many");
    case.drop_all(|i| matches!(i.op, Op::Post { axis: Axis::Tp, .. }));
    legal(&case);
}

#[test]
fn posted_by_one_member_alone() {
    for value in [SUM, GATHER] {
        for mut case in cases() {
            let post = case.find(1, 0, posts(value));
            case.instrs(1).remove(post);
            let found = case.refused();
            assert!(found.iter().any(|v| matches!(v, Violation::Unposted { .. })), "{found:?}");
        }
    }
}

#[test]
fn what_is_not_posted_over_the_tensor_axis() {
    let mut case = Case::small([1, 2, 1], Schedule::OneFOneB, |_, _| {});
    all(&mut case, |list| {
        let stats = at(list, takes(Value::Stats));
        let op = Op::Post { exchange: Exchange::AllGather, value: Value::Stats, axis: Axis::Tp };
        list.insert(stats, Instr { op, ..list[stats] });
    });
    says(&case, "no such exchange is posted");
    let mut case = Case::small([1, 2, 1], Schedule::OneFOneB, |_, _| {});
    all(&mut case, |list| {
        let post = at(list, posts(SUM));
        list[post].op = Op::Post { exchange: Exchange::AllReduce, value: SUM, axis: Axis::Tp };
    });
    says(&case, "is not exchanged so any more");
}

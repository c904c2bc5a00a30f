//! Exchanges in two halves, with one thing wrong.

use super::mutants::{sharded, zero_1};
use super::*;
use crate::buckets::Bucket;
use crate::instr::{Op, Value};

const LAYER: Bucket = Bucket::Layer(1);

fn posts(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Post { value: v, .. } if *v == value)
}

fn takes(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Collective { value: v, .. } if *v == value)
}

fn closes(op: &Op) -> bool {
    matches!(op, Op::Close { bucket: LAYER, .. })
}

/// Replicas, shards of moments, and everything sharded with sums taken early.
fn cases() -> [Case; 4] {
    let dp = |change: fn(&mut Model, &mut Layout)| Case::small([2, 1, 2], Schedule::OneFOneB, change);
    [dp(|_, _| {}), dp(zero_1), sharded(2), sharded(3)]
}

/// Some violation says `text`.
fn says(case: &Case, text: &str) {
    let texts: Vec<String> = case.refused().iter().map(|v| v.to_string()).collect();
    assert!(texts.iter().any(|t| t.contains(text)), "no {text:?} among\n{}", texts.join("\n"));
}

/// Takes the first instruction that `what` finds to the place of number `nth` of those that `to` finds, on ranks 0 and 2.
fn moved(case: &mut Case, what: &dyn Fn(&Op) -> bool, to: &dyn Fn(&Op) -> bool, nth: usize) {
    for rank in [0, 2] {
        let (at, to) = (case.find(rank, 0, what), case.find(rank, nth, to));
        let instr = case.instrs(rank).remove(at);
        case.instrs(rank).insert(if to > at { to - 1 } else { to }, instr);
    }
}

#[test]
fn gradients_leave_when_they_are_complete() {
    for case in cases() {
        assert!(case.check().is_ok());
        let grads = Value::Grads(LAYER);
        let (post, take) = (case.find(0, 0, posts(grads)), case.find(0, 0, takes(grads)));
        let closed = case.programs[0].instrs[..post].iter().rposition(|i| closes(&i.op)).unwrap();
        assert_eq!(closed + 1, post, "they leave at once");
        let work = case.programs[0].instrs[post..take].iter().filter(|i| matches!(i.op, Op::Compute(..))).count();
        assert!(work >= 4, "{work} segments beside the exchange");
    }
}

#[test]
fn parameters_are_on_their_way_during_the_layer_before() {
    let case = sharded(3);
    let params = Value::Params(LAYER);
    let (post, take) = (case.find(0, 0, posts(params)), case.find(0, 0, takes(params)));
    let mut between = case.programs[0].instrs[post..take].iter();
    assert!(between.any(|i| matches!(i.op, Op::Compute(_, crate::instr::Segment::Attn(0)))));
}

#[test]
fn posted_and_never_taken() {
    for mut case in cases() {
        case.drop_all(|i| takes(Value::Grads(LAYER))(&i.op));
        says(&case, "ends without the exchange of Grads of Layer(1) for chunk 0");
    }
    let mut case = sharded(3);
    for rank in [0, 2] {
        let at = case.programs[rank].instrs.iter().rposition(|i| i.op == Op::Release(LAYER)).unwrap();
        let post = case.find(rank, 0, posts(Value::Params(LAYER)));
        let again = case.programs[rank].instrs[post];
        case.instrs(rank).insert(at + 1, again);
    }
    says(&case, "ends without the gather of posted Params of Layer(1) for chunk 0");
    says(&case, "the gathered parameters of Layer(1) would outlive the update");
}

#[test]
fn taken_twice_or_posted_twice() {
    for mut case in cases() {
        // In the last microbatch: a sum more than the step has.
        let last = case.programs[0].instrs.iter().filter(|i| takes(Value::Grads(LAYER))(&i.op)).count() - 1;
        for rank in [0, 2] {
            let at = case.find(rank, last, takes(Value::Grads(LAYER)));
            let again = case.programs[rank].instrs[at];
            case.instrs(rank).insert(at, again);
        }
        says(&case, "is one too many");
    }
    for (mut case, value) in [(sharded(3), Value::Params(LAYER)), (sharded(2), Value::Grads(LAYER))] {
        for rank in [0, 2] {
            let at = case.find(rank, 0, posts(value));
            let again = case.programs[rank].instrs[at];
            case.instrs(rank).insert(at, again);
        }
        says(&case, "is one too many");
    }
}

#[test]
fn a_buffer_used_again_before_it_is_taken() {
    let mut case = sharded(2);
    moved(&mut case, &takes(Value::Grads(LAYER)), &takes(Value::Grads(LAYER)), 1);
    says(&case, "the gradients of Layer(1) have been posted and not been taken");

    // Released while it is on its way: what comes would land in a buffer that another bucket has by then.
    let mut case = sharded(3);
    let release = |op: &Op| *op == Op::Release(LAYER);
    moved(&mut case, &release, &takes(Value::Params(LAYER)), 0);
    says(&case, "the parameters of Layer(1) are not gathered");
}

#[test]
fn posted_before_the_gradient_is_complete() {
    for mut case in cases() {
        moved(&mut case, &posts(Value::Grads(LAYER)), &closes, 0);
        says(&case, "the gradients of Layer(1) are not complete: cell 0 of the chunk is not closed");
    }
}

#[test]
fn posted_by_one_member_alone() {
    for mut case in cases() {
        let at = case.find(2, 0, posts(Value::Grads(LAYER)));
        case.instrs(2).remove(at);
        let found = case.refused();
        assert!(found.iter().any(|v| matches!(v, Violation::Unposted { .. })), "{found:?}");
        says(&case, "has posted nothing");
    }
}

#[test]
fn what_is_no_exchange_of_halves() {
    let mut case = sharded(2);
    let at = case.find(0, 0, posts(Value::Grads(LAYER)));
    let Op::Post { value, .. } = &mut case.instrs(0)[at].op else { panic!("a post") };
    *value = Value::Params(LAYER);
    says(&case, "no such exchange is posted");
}

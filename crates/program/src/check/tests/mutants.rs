//! Lists with one thing wrong: refused, and for that reason.

use super::*;
use crate::buckets::Bucket;
use crate::instr::{Axis, Exchange, Instr, Op, Pass, Segment, Value};

type Test = fn(&Op) -> bool;

fn is_send(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Send { value: v, .. } if *v == value)
}

fn is_recv(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Recv { value: v, .. } if *v == value)
}

fn is_value(value: Value) -> impl Fn(&Op) -> bool {
    move |op| matches!(op, Op::Collective { value: v, .. } if *v == value)
}

fn is_segment(pass: Pass, segment: Segment) -> impl Fn(&Op) -> bool {
    move |op| *op == Op::Compute(pass, segment)
}

impl Case {
    pub(super) fn instrs(&mut self, rank: usize) -> &mut Vec<Instr> {
        &mut self.programs[rank].instrs
    }

    /// Index of occurrence `nth` on `rank`.
    pub(super) fn find(&self, rank: usize, nth: usize, test: impl Fn(&Op) -> bool) -> usize {
        let hits = self.programs[rank].instrs.iter().enumerate().filter(|(_, i)| test(&i.op));
        hits.map(|(at, _)| at).nth(nth).expect("the list has it")
    }

    /// Takes away all that `test` finds, on every rank.
    pub(super) fn drop_all(&mut self, test: impl Fn(&Instr) -> bool) {
        for program in &mut self.programs {
            program.instrs.retain(|i| !test(i));
        }
    }

    pub(super) fn refused(&self) -> Vec<Violation> {
        self.check().expect_err("a mutant must be refused")
    }
}

/// Asserts that some violation has the variant and the text.
macro_rules! assert_violation {
    ($violations:expr, $pattern:pat, $text:expr) => {
        let texts: Vec<String> = $violations.iter().map(|v| v.to_string()).collect();
        assert!(
            $violations.iter().zip(&texts).any(|(v, t)| matches!(v, $pattern) && t.contains($text)),
            "no {} with {:?} among\n{}",
            stringify!($pattern),
            $text,
            texts.join("\n")
        );
    };
}

pub(super) fn zero_1(_: &mut Model, layout: &mut Layout) {
    (layout.zero, layout.shard) = (1, layout.dp);
}

fn is_grads(op: &Op) -> bool {
    matches!(op, Op::Collective { value: Value::Grads(_), .. })
}

fn is_params(op: &Op) -> bool {
    matches!(op, Op::Collective { value: Value::Params(_), .. })
}

/// With backward in one piece.
fn one_f_one_b() -> Case {
    Case::small([1, 2, 4], Schedule::OneFOneB, |_, layout| layout.tp_overlap = false)
}

#[test]
fn receives_swapped_across_a_collective() {
    let mut case = one_f_one_b();
    let (first, second) = (case.find(2, 0, is_recv(Value::Activation)), case.find(2, 1, is_recv(Value::Activation)));
    case.instrs(2).swap(first, second);
    let found = case.refused();
    assert_violation!(found, Violation::OutOfOrder { .. }, "the receive of Activation comes first");
    assert_violation!(found, Violation::Crossed { .. }, "rank 0");
}

#[test]
fn receives_that_wait_for_each_other() {
    let mut case = one_f_one_b();
    let forward = case.find(2, 0, is_recv(Value::Activation));
    let backward = case.find(2, 0, is_recv(Value::ActivationGrad));
    case.instrs(2).swap(forward, backward);
    let found = case.refused();
    assert_violation!(found, Violation::Deadlock { .. }, "recv ActivationGrad <- 4");
    let Some(Violation::Deadlock { waits, cycle, ended }) = found.last() else { panic!("a deadlock comes last") };
    assert_eq!((waits.len(), *ended), (8, None));
    assert_eq!(cycle, &[2, 4]);
    assert_violation!(found, Violation::Deadlock { .. }, "2 waits for 4 waits for 2");
}

#[test]
fn a_lost_send() {
    let mut case = one_f_one_b();
    let at = case.find(0, 2, is_send(Value::Activation));
    case.instrs(0).remove(at);
    let found = case.refused();
    assert_violation!(found, Violation::MissingAtEnd { .. }, "the send of Activation");
    assert_violation!(found, Violation::Crossed { .. }, "cell 0 mb 3");
    assert_violation!(found, Violation::Deadlock { .. }, "wait");
}

#[test]
fn a_lost_receive() {
    let mut case = one_f_one_b();
    let at = case.find(7, 7, is_recv(Value::Activation));
    case.instrs(7).remove(at);
    let found = case.refused();
    assert_violation!(found, Violation::Missing { .. }, "the receive of Activation");
    assert_violation!(found, Violation::Unreceived { .. }, "rank 5");
}

#[test]
fn a_backward_of_one_layer_lost_or_twice() {
    for segment in [Segment::Mlp(3), Segment::Attn(2), Segment::AttnNorm(3), Segment::MlpNorm(2)] {
        let mut case = one_f_one_b();
        let rank = 2;
        let at = case.find(rank, 1, is_segment(Pass::Backward, segment));
        let lost = case.instrs(rank).remove(at);
        let found = case.refused();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_violation!(found, Violation::Missing { .. }, &format!("Backward {segment:?}"));
        case.instrs(rank).splice(at..at, [lost, lost]);
        let found = case.refused();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_violation!(found, Violation::Double { .. }, &format!("backward {segment:?}"));
    }
}

/// Backwards of microbatch 0 and 1 in turn, consistently on all ranks: nobody waits, but sums change.
#[test]
fn backwards_of_two_units_swapped() {
    let mut case = Case::small([1, 2, 2], Schedule::GPipe, |_, _| {});
    for program in &mut case.programs {
        let back =
            |mb: usize| move |i: &Instr| i.unit.is_some_and(|u| u == spec::Unit { cell: 0, mb }) && i.op != Op::Load;
        let last_forward = program.instrs.iter().rposition(|i| is_segment(Pass::Forward, Segment::Residual(7))(&i.op));
        let last_forward =
            last_forward.or(program.instrs.iter().rposition(|i| is_send(Value::Activation)(&i.op))).unwrap();
        let (head, tail) = program.instrs.split_at(last_forward + 1);
        let of = |mb| tail.iter().filter(move |i| back(mb)(i)).copied();
        let rest = tail.iter().filter(|i| !back(0)(i) && !back(1)(i)).copied();
        program.instrs = head.iter().copied().chain(of(1)).chain(of(0)).chain(rest).collect();
    }
    let found = case.refused();
    assert!(found.iter().all(|v| matches!(v, Violation::Fifo { .. })), "{found:?}");
    assert_violation!(found, Violation::Fifo { .. }, "forward Loss(0) | chunk 1 | cell 0 mb 1");
    assert_violation!(found, Violation::Fifo { .. }, "before cell 0 mb 0 has");
}

#[test]
fn a_close_moved() {
    let close: Test = |op| matches!(op, Op::Close { cell: 0, bucket: Bucket::Embed });
    let mut case = one_f_one_b();
    let at = case.find(0, 0, close);
    let early = case.find(0, 2, is_segment(Pass::Backward, Segment::Embed));
    let instr = case.instrs(0).remove(at);
    case.instrs(0).insert(early, instr);
    let found = case.refused();
    assert_violation!(found, Violation::OutOfOrder { .. }, "mb 2 of the cell has yet to add");

    let mut case = one_f_one_b();
    let at = case.find(0, 0, close);
    let instr = case.instrs(0).remove(at);
    let late = case.find(0, 0, |op| matches!(op, Op::Close { cell: 1, bucket: Bucket::Embed }));
    case.instrs(0).insert(late + 1, instr);
    let found = case.refused();
    assert_violation!(found, Violation::OutOfOrder { .. }, "cells are closed in ascending order");

    let mut case = one_f_one_b();
    case.drop_all(|i| matches!(i.op, Op::Close { cell: 1, .. }) && i.chunk == 2);
    let found = case.refused();
    assert_violation!(found, Violation::OutOfOrder { .. }, "cell 1 of the chunk is not closed");
    assert_violation!(found, Violation::MissingAtEnd { .. }, "close of its last cell of Layer(4) for chunk 2");
}

#[test]
fn a_backward_before_its_forward() {
    let mut case = Case::small([1, 1, 1], Schedule::GPipe, |_, _| {});
    let at = case.find(0, 0, is_segment(Pass::Backward, Segment::Mlp(7)));
    let early = case.find(0, 0, is_segment(Pass::Forward, Segment::Mlp(7)));
    let instr = case.instrs(0).remove(at);
    case.instrs(0).insert(early, instr);
    let found = case.refused();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_violation!(found, Violation::OutOfOrder { .. }, "backward Mlp(7)");
    assert_violation!(found, Violation::OutOfOrder { .. }, "Forward Mlp(7) comes first");
}

#[test]
fn the_end_of_the_step_out_of_order() {
    let vote: Test = |op| *op == Op::Vote;
    let apply: Test = |op| *op == Op::Apply;
    let mut case = one_f_one_b();
    let (v, a) = (case.find(3, 0, vote), case.find(3, 0, apply));
    case.instrs(3).swap(v, a);
    let found = case.refused();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_violation!(found, Violation::OutOfOrder { .. }, "nothing is overwritten before the vote");

    let mut case = one_f_one_b();
    let (g, b) = (case.find(3, 0, is_grads), case.find(3, 0, is_value(Value::Ballot)));
    case.instrs(3).swap(g, b);
    assert_violation!(case.refused(), Violation::OutOfOrder { .. }, "gradients that are not summed");

    let mut case = one_f_one_b();
    let (b, v) = (case.find(3, 0, is_value(Value::Ballot)), case.find(3, 0, vote));
    case.instrs(3).swap(b, v);
    assert_violation!(case.refused(), Violation::OutOfOrder { .. }, "the vote follows");

    let mut case = one_f_one_b();
    case.drop_all(|i| i.op == Op::Apply && i.chunk == 1);
    assert_violation!(case.refused(), Violation::MissingAtEnd { .. }, "apply for chunk 1");
}

#[test]
fn parameters_gathered_exactly_with_zero_1() {
    let mut case = Case::small([2, 1, 2], Schedule::OneFOneB, zero_1);
    case.drop_all(|i| is_params(&i.op) && i.chunk == 1);
    let found = case.refused();
    assert_eq!(found.len(), 2 * 6, "{found:?}");
    assert_violation!(found, Violation::MissingAtEnd { .. }, "the gather of Params of Layer(7) for chunk 1");

    // On one rank only, the other one waits for it.
    let mut case = Case::small([2, 1, 2], Schedule::OneFOneB, zero_1);
    let at = case.find(3, 5, is_params);
    case.instrs(3).remove(at);
    let found = case.refused();
    assert_violation!(found, Violation::Deadlock { .. }, "for rank 3 in the end, whose list has ended");

    let mut case = Case::small([2, 1, 2], Schedule::OneFOneB, |_, _| {});
    let params = Op::Collective {
        exchange: Exchange::AllGather,
        value: Value::Params(Bucket::Embed),
        axis: Axis::Shard,
        bytes: 0,
    };
    case.instrs(0).push(Instr { op: params, chunk: 0, unit: None });
    assert_violation!(case.refused(), Violation::Wrong { .. }, "with zero 0");

    let mut case = Case::small([2, 1, 2], Schedule::OneFOneB, zero_1);
    for rank in 0..4 {
        let at = case.find(rank, 0, is_grads);
        let Op::Collective { exchange, .. } = &mut case.instrs(rank)[at].op else { panic!("a collective") };
        *exchange = Exchange::AllReduce;
    }
    assert_violation!(case.refused(), Violation::Wrong { .. }, "with zero 1 it is ReduceScatter");
}

#[test]
fn wrong_sizes() {
    for value in [Value::Rows, Value::Partial, Value::GradRows, Value::GradPartial, Value::Stats, Value::NormGrads] {
        let mut case = one_f_one_b();
        let at = case.find(7, 0, is_value(value));
        let Op::Collective { bytes, .. } = &mut case.instrs(7)[at].op else { panic!("a collective") };
        *bytes += 4;
        let found = case.refused();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_violation!(found, Violation::Bytes { .. }, &format!("{value:?}"));
    }
    let mut case = one_f_one_b();
    let at = case.find(3, 0, is_send(Value::Activation));
    let Op::Send { bytes, .. } = &mut case.instrs(3)[at].op else { panic!("a send") };
    *bytes /= 2;
    let found = case.refused();
    assert_violation!(found, Violation::Bytes { .. }, "send Activation -> 5");
    assert_violation!(found, Violation::Crossed { .. }, "rank 5");
}

#[test]
fn wrong_ranks() {
    let mut case = one_f_one_b();
    let at = case.find(3, 1, is_send(Value::Activation));
    let Op::Send { to, .. } = &mut case.instrs(3)[at].op else { panic!("a send") };
    *to = 4;
    let found = case.refused();
    assert_violation!(found, Violation::Peer { .. }, "it is rank 5");
    assert_violation!(found, Violation::Deadlock { .. }, "recv Activation <- 3");

    let mut case = one_f_one_b();
    let at = case.find(3, 1, is_send(Value::Activation));
    let Op::Send { to, .. } = &mut case.instrs(3)[at].op else { panic!("a send") };
    *to = 999;
    assert_violation!(case.refused(), Violation::Peer { .. }, "it is rank 5");

    let mut case = one_f_one_b();
    let at = case.find(3, 1, is_recv(Value::Activation));
    let Op::Recv { from, .. } = &mut case.instrs(3)[at].op else { panic!("a receive") };
    *from = 999;
    assert_violation!(case.refused(), Violation::Deadlock { .. }, "for rank 999 in the end");
}

#[test]
fn a_head_block_lost() {
    for value in [Some(Value::Stats), None] {
        let mut case = Case::small([1, 2, 2], Schedule::OneFOneB, |_, _| {});
        case.drop_all(|i| match (value, i.op) {
            (Some(value), op) => is_value(value)(&op),
            (None, Op::Compute(_, Segment::Logits(0) | Segment::Loss(0))) => true,
            (None, op) => is_value(Value::Stats)(&op),
        });
        let found = case.refused();
        let text = if value.is_some() { "AllGather Stats Tp" } else { "Forward Loss(0)" };
        assert_violation!(found, Violation::Missing { .. }, text);
    }
}

/// A gather that all members forgot keeps nobody waiting, but the rows are not whole.
#[test]
fn an_exchange_lost_on_all_members() {
    let mut case = one_f_one_b();
    case.drop_all(|i| is_value(Value::Rows)(&i.op) && i.unit == Some(spec::Unit { cell: 1, mb: 3 }) && i.chunk == 1);
    let found = case.refused();
    assert!(found.iter().all(|v| matches!(v, Violation::Missing { .. })), "{found:?}");
    assert_violation!(found, Violation::Missing { .. }, "AllGather Rows Tp (4 times)");
}

#[test]
fn members_that_meet_in_different_collectives() {
    let mut case = Case::small([1, 2, 2], Schedule::GPipe, |_, _| {});
    // Rank 1 takes its first two units in the other order; rank 0 does not.
    let instrs = case.instrs(1);
    let second =
        instrs.iter().rposition(|i| i.op == Op::Load && i.unit.is_some_and(|u| u.cell == 0 && u.mb == 1)).unwrap();
    let third =
        instrs.iter().rposition(|i| i.op == Op::Load && i.unit.is_some_and(|u| u.cell == 0 && u.mb == 2)).unwrap();
    instrs[..third].rotate_left(second);
    let found = case.refused();
    assert_violation!(found, Violation::Mismatch { .. }, "in one group");
}

#[test]
fn work_that_is_not_this_ranks() {
    let mut case = one_f_one_b();
    let at = case.find(0, 0, is_segment(Pass::Forward, Segment::Attn(1)));
    case.instrs(0)[at].op = Op::Compute(Pass::Forward, Segment::Attn(7));
    let found = case.refused();
    assert_violation!(found, Violation::Wrong { .. }, "no such thing to do on chunk 0");
    assert_violation!(found, Violation::Missing { .. }, "Forward Attn(1)");

    let mut case = one_f_one_b();
    case.instrs(0)[3].chunk = 1;
    assert_violation!(case.refused(), Violation::Wrong { .. }, "does not hold chunk 1");

    let mut case = Case::small([2, 1, 2], Schedule::OneFOneB, |_, _| {});
    case.instrs(0)[3].unit = Some(spec::Unit { cell: 1, mb: 0 });
    assert_violation!(case.refused(), Violation::Wrong { .. }, "does not host cell 1");

    let mut case = one_f_one_b();
    case.drop_all(|i| i.unit == Some(spec::Unit { cell: 1, mb: 3 }) && !matches!(i.op, Op::Close { .. }));
    let found = case.refused();
    assert_violation!(found, Violation::MissingAtEnd { .. }, "chunk 2 of cell 1 mb 3");
    assert_violation!(found, Violation::OutOfOrder { .. }, "mb 3 of the cell has yet to add");
}

#[test]
fn loads_missing_or_twice() {
    let mut case = one_f_one_b();
    case.instrs(0).remove(0);
    assert_violation!(case.refused(), Violation::Missing { .. }, "the load of the unit");
    let mut case = one_f_one_b();
    let load = case.instrs(0)[0];
    case.instrs(0).insert(5, load);
    assert_violation!(case.refused(), Violation::Double { .. }, "load");
}

#[test]
fn tied_gradients_are_swapped_exactly_when_apart() {
    let tied = |pp| Case::small([1, 1, pp], Schedule::OneFOneB, |model, _| model.tied = true);
    assert!(tied(1).check().is_ok());
    assert!(tied(2).check().is_ok());
    let swap = |i: &Instr| is_send(Value::TiedGrads)(&i.op) || is_recv(Value::TiedGrads)(&i.op);
    let mut case = tied(2);
    case.drop_all(swap);
    let found = case.refused();
    assert_violation!(found, Violation::MissingAtEnd { .. }, "the send of TiedGrads for chunk 0");
    assert_violation!(found, Violation::OutOfOrder { .. }, "chunk 1 has tied gradients that are not received");
    let mut case = tied(2);
    case.model.tied = false;
    assert_violation!(case.refused(), Violation::Wrong { .. }, "no use of a tied embedding");
    // Receive before send on both: each waits for the other.
    let mut case = tied(2);
    for rank in 0..2 {
        let at = case.find(rank, 0, is_send(Value::TiedGrads));
        case.instrs(rank).swap(at, at + 1);
    }
    let found = case.refused();
    assert_eq!(found.len(), 3, "{found:?}");
    assert_violation!(found, Violation::OutOfOrder { .. }, "own share is sent before");
    assert_violation!(found, Violation::Deadlock { .. }, "in a cycle: 0 waits for 1 waits for 0");
    // On one rank nobody waits, but it sends the sum of both shares.
    let mut case = tied(2);
    let at = case.find(0, 0, is_send(Value::TiedGrads));
    case.instrs(0).swap(at, at + 1);
    let found = case.refused();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_violation!(found, Violation::OutOfOrder { .. }, "own share is sent before");
}

#[test]
fn lists_of_another_world() {
    let mut case = one_f_one_b();
    case.programs.swap(2, 3);
    assert_violation!(case.refused(), Violation::Rank { .. }, "program number 2 is that of rank 3");
    case.programs.pop();
    assert_violation!(case.refused(), Violation::Programs { .. }, "8 ranks");
}

/// 2 data cells of 2 microbatches on 2 x 2 ranks, everything sharded.
pub(super) fn sharded(zero: usize) -> Case {
    let model = testing::model(4);
    let grid = Grid { accumulate: spec::Accumulate::Reduced, ..Grid::new(&model, 4, SEQ, 1, Some(2), 1).unwrap() };
    let mut layout = testing::layout(&model, &grid, [2, 1, 2], Schedule::OneFOneB, None);
    (layout.zero, layout.shard) = (zero, 2);
    Case::new(model, grid, layout, Mode::Train)
}

#[test]
fn parameters_read_before_they_are_gathered() {
    let gather: Test = |op| matches!(op, Op::Collective { value: Value::Params(Bucket::Layer(1)), .. });
    let mut case = sharded(3);
    assert!(case.check().is_ok());
    for rank in [0, 2] {
        let at = case.find(rank, 0, gather);
        let late = case.find(rank, 0, is_segment(Pass::Forward, Segment::Attn(1)));
        let instr = case.instrs(rank).remove(at);
        case.instrs(rank).insert(late, instr);
    }
    let found = case.refused();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_violation!(found, Violation::Missing { .. }, "the gather of the parameters of Layer(1)");

    // Freed after the forward, and not gathered again for the backward.
    let mut case = sharded(3);
    for rank in [0, 2] {
        let at = case.find(rank, 2, gather);
        case.instrs(rank).remove(at);
    }
    assert_violation!(case.refused(), Violation::Missing { .. }, "backward Mlp(1)");
}

#[test]
fn gathered_parameters_that_outlive_the_update() {
    let mut case = sharded(3);
    for rank in 0..4 {
        let bucket = Bucket::Layer(if rank % 2 == 0 { 0 } else { 2 });
        let at = case.programs[rank].instrs.iter().rposition(|i| i.op == Op::Release(bucket)).unwrap();
        case.instrs(rank).remove(at);
    }
    let found = case.refused();
    assert_violation!(
        found,
        Violation::OutOfOrder { .. },
        "the gathered parameters of Layer(0) would outlive the update"
    );
    assert_violation!(found, Violation::MissingAtEnd { .. }, "the release of Layer(2) for chunk 1");

    let mut case = sharded(3);
    let at = case.find(0, 0, |op| *op == Op::Release(Bucket::Embed));
    let twice = case.instrs(0)[at];
    case.instrs(0).insert(at, twice);
    assert_violation!(case.refused(), Violation::Wrong { .. }, "the parameters of Embed are not gathered");
}

#[test]
fn a_sum_before_the_last_cell_has_added() {
    for zero in [2, 3] {
        let sum: Test = |op| matches!(op, Op::Collective { value: Value::Grads(Bucket::Layer(1)), .. });
        let mut case = sharded(zero);
        for rank in [0, 2] {
            let at = case.find(rank, 0, sum);
            let early = case.find(rank, 0, is_segment(Pass::Backward, Segment::Attn(1)));
            let instr = case.instrs(rank).remove(at);
            case.instrs(rank).insert(early, instr);
        }
        let found = case.refused();
        assert_violation!(found, Violation::OutOfOrder { .. }, "cell 0 of the chunk is not closed in mb 0");
        assert_violation!(found, Violation::OutOfOrder { .. }, "cell 1 of the chunk is not closed in mb 0");

        // Both microbatches of a cell as leaves of one sum.
        let mut case = sharded(zero);
        for rank in [0, 2] {
            let at = case.find(rank, 0, sum);
            let late = case.find(rank, 1, sum);
            let instr = case.instrs(rank).remove(at);
            case.instrs(rank).insert(late - 1, instr);
        }
        let found = case.refused();
        assert_violation!(found, Violation::OutOfOrder { .. }, "the sum over cells of mb 0 has not been taken");

        let mut case = sharded(zero);
        case.drop_all(|i| sum(&i.op) && i.unit.is_some_and(|u| u.mb == 1));
        assert_violation!(case.refused(), Violation::MissingAtEnd { .. }, "the exchange of Grads of Layer(1)");
    }
}

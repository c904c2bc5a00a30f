//! Other lists than those that are lowered, as good as them.

use spec::schedule::Turn;

use super::*;
use crate::instr::{Op, Value};
use crate::lower::Lowering;
use crate::schedule::{Task, tasks};

fn assert_legal(case: &Case) -> Report {
    case.check().unwrap_or_else(|v| panic!("{}", v.iter().map(|v| v.to_string()).collect::<Vec<_>>().join("\n")))
}

/// Two sends of different tasks next to each other, in both orders.
#[test]
fn adjacent_sends_may_swap() {
    let mut case = Case::small([1, 2, 4], Schedule::OneFOneB, |_, _| {});
    for tp in 0..2 {
        // Position 1 in the steady state: the activation waits until the gradient is ready to go as well.
        let rank = case.layout.rank(spec::Coords { dp: 0, cp: 0, pp: 1, tp });
        let instrs = &mut case.programs[rank].instrs;
        let is = |value| move |op: &Op| matches!(op, Op::Send { value: v, .. } if *v == value);
        let grad = instrs.iter().position(|i| is(Value::ActivationGrad)(&i.op)).unwrap();
        let activation = instrs[..grad].iter().rposition(|i| is(Value::Activation)(&i.op)).unwrap();
        let late = instrs.remove(activation);
        instrs.insert(grad - 1, late);
    }
    assert_legal(&case);
    for tp in 0..2 {
        let rank = case.layout.rank(spec::Coords { dp: 0, cp: 0, pp: 1, tp });
        let instrs = &mut case.programs[rank].instrs;
        let sends = instrs.windows(2).position(|w| w.iter().all(|i| matches!(i.op, Op::Send { .. }))).unwrap();
        instrs.swap(sends, sends + 1);
    }
    assert_legal(&case);
}

#[test]
fn loads_may_move_to_the_front() {
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::Interleaved] {
        let mut case = Case::small([2, 1, 2], schedule, |_, _| {});
        for program in &mut case.programs {
            program.instrs.sort_by_key(|i| !matches!(i.op, Op::Load));
        }
        assert_legal(&case);
    }
}

/// Accumulators belong to a cell: the next one may begin before the last is closed.
#[test]
fn a_cell_may_be_closed_late() {
    let mut case = Case::small([1, 1, 4], Schedule::ZbH1, |_, _| {});
    for program in &mut case.programs {
        let instrs = &mut program.instrs;
        let closes: Vec<_> = instrs.extract_if(.., |i| matches!(i.op, Op::Close { cell: 0, .. })).collect();
        for late in closes {
            let Op::Close { bucket, .. } = late.op else { unreachable!("just tested") };
            let next = instrs.iter().position(|i| i.op == Op::Close { cell: 1, bucket }).unwrap();
            instrs.insert(next, late);
        }
    }
    assert_legal(&case);
}

/// The lists of `case` with the tasks of every rank in the order that `order` makes of them.
fn reordered(case: &mut Case, order: impl Fn(usize, Vec<Task>) -> Vec<Task>) {
    let lowering = Lowering::new(&case.model, &case.grid, &case.layout, SEQ, case.mode);
    case.programs = (0..case.layout.world())
        .map(|rank| {
            let at = case.layout.coords(rank);
            let units = crate::buckets::slots(&case.grid, &case.layout, at);
            lowering.rank_in_order(rank, &order(rank, tasks(&case.layout, at.pp, &units)))
        })
        .collect();
}

/// `extra` more forwards before the first backward of every position.
fn more_warmup(list: Vec<Task>, extra: usize) -> Vec<Task> {
    let (forwards, backwards): (Vec<Task>, Vec<Task>) =
        list.iter().partition(|t| matches!(t, Task { turn: Turn::Forward, .. }));
    let warmup = list.iter().position(|t| matches!(t, Task { turn: Turn::Backward, .. })).unwrap() - 1;
    crate::schedule::one_and_one(warmup + extra, forwards, backwards)
}

#[test]
fn more_warmup_is_legal_and_costs_memory() {
    let mut case = Case::small([1, 2, 4], Schedule::OneFOneB, |_, _| {});
    let layers = case.layout.stages[0].len();
    let plain = assert_legal(&case);
    for extra in 1..=9 {
        reordered(&mut case, |_, list| more_warmup(list, extra));
        let report = assert_legal(&case);
        assert_eq!(report.peak_activations, layers * (4 + extra).min(8));
        assert_eq!(report.bubble, plain.bubble);
    }
}

#[test]
fn data_positions_may_run_different_schedules() {
    let gpipe = Case::small([2, 2, 2], Schedule::GPipe, |_, _| {});
    let mut mixed = Case::small([2, 2, 2], Schedule::OneFOneB, |_, _| {});
    mixed.programs[..4].clone_from_slice(&gpipe.programs[..4]);
    let report = assert_legal(&mixed);
    assert!(report.ranks[0].peak_activations > report.ranks[4].peak_activations);
}

/// Gradients of one chunk may be taken while another chunk of the rank still works.
#[test]
fn gradients_may_be_taken_as_soon_as_their_chunk_is_closed() {
    let mut case = Case::small([2, 1, 2], Schedule::Interleaved, |_, _| {});
    let world = case.layout.world();
    for rank in 0..world {
        let last_chunk = case.layout.chunks_of(case.layout.coords(rank).pp).last().unwrap();
        let instrs = &mut case.programs[rank].instrs;
        let grads: Vec<_> = instrs
            .extract_if(.., |i| matches!(i.op, Op::Collective { value: Value::Grads(_), .. }) && i.chunk == last_chunk)
            .collect();
        let post = |op: &Op| matches!(op, Op::Post { .. });
        let to = instrs.iter().rposition(|i| post(&i.op) && i.chunk == last_chunk).unwrap() + 1;
        instrs.splice(to..to, grads);
    }
    assert_legal(&case);
}

/// A late layer takes over where its shards lie uneven: cells, stages.
#[test]
fn uneven_layouts_are_legal() {
    let model = testing::model(7);
    let grid = Grid::new(&model, 10, SEQ, 1, Some(5), 2).unwrap();
    let request = spec::layout::LayoutRequest {
        cells: Some(vec![3, 2]),
        stages: Some(vec![1, 4, 2]),
        zero: 1,
        ..testing::request([2, 2, 3], Schedule::OneFOneB, None)
    };
    let layout = Layout::resolve(&request, &grid, &model, 1).unwrap();
    let report = assert_legal(&Case::new(model, grid, layout, Mode::Train));
    assert!(report.ranks[0].busy > report.ranks[6].busy);
}

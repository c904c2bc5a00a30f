//! A class of data positions at a time, and all of them: the same verdict.

use super::*;
use crate::check::check_alike;
use crate::instr::{Op, Value};

fn both(case: &Case) -> [Result<Report, Vec<Violation>>; 2] {
    let alike = check_alike(&case.model, &case.grid, &case.layout, SEQ, case.mode, |rank| case.programs[rank].clone());
    [case.check(), alike]
}

#[test]
fn alike_positions_have_the_reports_of_all() {
    for (dp, schedule, zero) in
        [(1, Schedule::OneFOneB, 0), (2, Schedule::ZbV, 1), (4, Schedule::OneFOneB, 1), (3, Schedule::GPipe, 0)]
    {
        let model = testing::model(8);
        let grid = Grid::new(&model, 16, SEQ, 1, Some(4), 2).unwrap();
        let mut layout = testing::layout(&model, &grid, [dp, 2, 2], schedule, None);
        (layout.zero, layout.shard) = (zero, if zero == 0 { 1 } else { dp });
        for mode in [Mode::Train, Mode::Eval] {
            let [all, alike] = both(&Case::new(model.clone(), grid.clone(), layout.clone(), mode));
            assert_eq!(all.unwrap(), alike.unwrap(), "dp {dp} {schedule} zero {zero} {mode:?}");
        }
    }
}

/// A fault in one position makes it unlike the others: it is proved itself.
#[test]
fn a_fault_in_one_of_many_is_found() {
    let case = || Case::small([2, 1, 2], Schedule::OneFOneB, |_, layout| (layout.zero, layout.shard) = (1, layout.dp));
    let faults: [fn(&mut Program); 3] = [
        |list| {
            list.instrs.remove(7);
        },
        |list| {
            if let Some(Op::Collective { bytes, .. }) = list
                .instrs
                .iter_mut()
                .map(|i| &mut i.op)
                .find(|op| matches!(op, Op::Collective { value: Value::Grads(_), .. }))
            {
                *bytes += 4;
            }
        },
        |list| {
            let send = |op: &Op| matches!(op, Op::Send { .. });
            if let Some(at) = list.instrs.iter().position(|i| send(&i.op)) {
                list.instrs.remove(at);
            }
        },
    ];
    for (number, fault) in faults.iter().enumerate() {
        let mut case = case();
        fault(&mut case.programs[3]);
        let [all, alike] = both(&case);
        let (all, alike) = (all.unwrap_err(), alike.unwrap_err());
        assert!(all.iter().all(|v| alike.contains(v)), "fault {number}: {all:?} but {alike:?}");
    }
}

//! Why the instructions of one unit on one chunk are not those of the law.

use std::collections::HashMap;

use spec::Unit;

use super::super::law::Due;
use super::super::violation::{Place, Violation};
use crate::instr::{Axis, Instr, Op, Program, Value};

/// An operation without its size and peer.
pub(super) fn kind(op: &Op) -> Op {
    match *op {
        Op::Collective { exchange, value, axis, .. } => Op::Collective { exchange, value, axis, bytes: 0 },
        Op::Send { value, .. } => Op::Send { value, to: 0, bytes: 0 },
        Op::Recv { value, .. } => Op::Recv { value, from: 0, bytes: 0 },
        other => other,
    }
}

/// The operation in words.
fn name(op: &Op) -> String {
    match op {
        Op::Collective { exchange, value, axis, .. } => format!("{exchange:?} {value:?} {axis:?}"),
        Op::Send { value, .. } => format!("the send of {value:?}"),
        Op::Recv { value, .. } => format!("the receive of {value:?}"),
        Op::Compute(pass, segment) => format!("{pass:?} {segment:?}"),
        other => format!("{other:?}"),
    }
}

/// True for the operations that the law of a unit is about.
fn of_unit(op: &Op) -> bool {
    match op {
        Op::Compute(..) | Op::Drop(_) => true,
        Op::Collective { axis, .. } => matches!(axis, Axis::Tp | Axis::Cp),
        Op::Send { value, .. } | Op::Recv { value, .. } => *value != Value::TiedGrads,
        _ => false,
    }
}

/// The differences between the law and what `unit` does on `chunk`: what is missing, what is one too many, or, if
/// neither, what is out of order: instruction `wrong.0`, before entry `wrong.1` of the law.
pub(super) fn stream(
    program: &Program,
    chunk: usize,
    unit: Unit,
    law: &[Due],
    wrong: Option<(usize, usize)>,
) -> Vec<Violation> {
    let theirs = |i: &Instr| i.chunk == chunk && i.unit == Some(unit) && of_unit(&i.op);
    let found: Vec<Place> =
        program.instrs.iter().enumerate().filter(|(_, i)| theirs(i)).map(|(at, _)| Place::of(program, at)).collect();
    let Unit { cell, mb } = unit;
    if found.is_empty() {
        let missing = format!("chunk {chunk} of cell {cell} mb {mb}");
        return vec![Violation::MissingAtEnd { rank: program.rank, missing }];
    }
    let mut counts: HashMap<Op, i64> = HashMap::new();
    for due in law {
        *counts.entry(kind(&due.op)).or_default() += 1;
    }
    let known = |op: &Op| law.iter().any(|due| kind(&due.op) == *op);
    let mut violations = Vec::new();
    for place in &found {
        let count = counts.entry(kind(&place.instr.op)).or_default();
        *count -= 1;
        if *count < 0 {
            violations.push(if known(&kind(&place.instr.op)) {
                Violation::Double { place: *place }
            } else {
                let why = format!("a unit has no such thing to do on chunk {chunk}");
                Violation::Wrong { place: *place, why }
            });
        }
    }
    let mut reported = Vec::new();
    for due in law {
        let op = kind(&due.op);
        let left = counts[&op];
        if left > 0 && !reported.contains(&op) {
            reported.push(op);
            let times = if left > 1 { format!(" ({left} times)") } else { String::new() };
            let missing = format!("{}{times}", name(&op));
            violations.push(match wrong {
                Some((at, _)) => Violation::Missing { place: Place::of(program, at), missing },
                None => {
                    let missing = format!("{missing} for chunk {chunk} of cell {cell} mb {mb}");
                    Violation::MissingAtEnd { rank: program.rank, missing }
                }
            });
        }
    }
    if violations.is_empty()
        && let Some((at, due)) = wrong
    {
        let law = format!("{} comes first", name(&law[due].op));
        violations.push(Violation::OutOfOrder { place: Place::of(program, at), law });
    }
    violations
}

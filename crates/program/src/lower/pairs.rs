//! Two microbatches at a time: the backward of one and the forward of the next, in turns.
//!
//! Each goes on until it exchanges rows over the tensor axis; these leave, and the other has its turn while they are on their
//! way. Only the order changes, so the law of a unit holds as before; what is kept for backward is that of two units.

use crate::instr::{Axis, Instr, Op, Value};

/// A list that is done in turns.
struct Side<'a> {
    left: &'a [Instr],
    /// Values that it has posted itself.
    posted: Vec<Value>,
    /// The exchange whose result it takes at its next turn.
    pending: Option<(Value, Instr)>,
}

impl<'a> Side<'a> {
    fn new(list: &'a [Instr]) -> Self {
        Self { left: list, posted: Vec::new(), pending: None }
    }

    fn over(&self) -> bool {
        self.left.is_empty() && self.pending.is_none()
    }

    fn take(&mut self, out: &mut Vec<Instr>) {
        out.extend(self.pending.take().map(|(_, instr)| instr));
    }

    /// Goes on to the next exchange of rows, which leaves.
    fn turn(&mut self, other: &mut Self, out: &mut Vec<Instr>) {
        self.take(out);
        while let Some((instr, left)) = self.left.split_first() {
            self.left = left;
            let value = match instr.op {
                Op::Post { value, axis: Axis::Tp, .. } | Op::Collective { value, axis: Axis::Tp, .. } => value,
                _ => {
                    out.push(*instr);
                    continue;
                }
            };
            if !value.of_rows() {
                out.push(*instr);
                continue;
            }
            // One of a kind is on its way at a time.
            if other.pending.is_some_and(|(pending, _)| pending == value) {
                other.take(out);
            }
            match instr.op {
                Op::Collective { exchange, axis, .. } => {
                    if let Some(own) = self.posted.iter().position(|posted| *posted == value) {
                        self.posted.swap_remove(own);
                    } else if other.over() {
                        out.push(*instr);
                        continue;
                    } else {
                        out.push(Instr { op: Op::Post { exchange, value, axis }, ..*instr });
                    }
                    self.pending = Some((value, *instr));
                    return;
                }
                _ => {
                    self.posted.push(value);
                    out.push(*instr);
                }
            }
        }
    }
}

/// `first` and `second`, of different units on one chunk, in turns.
pub(super) fn in_turns(first: &[Instr], second: &[Instr]) -> Vec<Instr> {
    let (mut first, mut second) = (Side::new(first), Side::new(second));
    let mut out = Vec::with_capacity(2 * (first.left.len() + second.left.len()));
    while !(first.over() && second.over()) {
        first.turn(&mut second, &mut out);
        second.turn(&mut first, &mut out);
    }
    out
}

//! How far a unit is on a chunk, and whose turn it is to add to weight gradients.

use spec::Unit;

use super::super::law::{Accumulator, Due, Law};
use super::super::violation::Violation;
use super::{Order, diagnose};
use crate::instr::{Axis, Exchange, Instr, Op, Pass, Value};

/// How far a unit is on a chunk.
#[derive(Clone)]
pub(super) struct Progress {
    /// Entries of the law that are done, a bit each.
    done: Vec<u64>,
    /// All entries before this one are done.
    front: usize,
    /// Entries that are not done.
    pub left: usize,
    /// Its backward is in two parts.
    pub split: bool,
    /// Its order is wrong and has been reported.
    pub broken: bool,
}

impl Progress {
    pub fn new(law: &Law) -> Self {
        let done = vec![0; law.dues.len().div_ceil(64)];
        Self { done, front: 0, left: law.dues.len(), split: false, broken: false }
    }

    fn is_done(&self, entry: usize) -> bool {
        self.done[entry / 64] >> (entry % 64) & 1 == 1
    }

    fn put(&mut self, entry: usize) {
        self.done[entry / 64] |= 1 << (entry % 64);
        self.left -= 1;
        while self.front < 64 * self.done.len() && self.is_done(self.front) {
            self.front += 1;
        }
    }

    /// The law is the longer one after all.
    fn in_parts(&mut self, laws: &[Law; 2]) {
        let more = laws[1].dues.len() - laws[0].dues.len();
        self.split = true;
        self.left += more;
        self.done.resize(laws[1].dues.len().div_ceil(64), 0);
    }

    /// The entry of `law` that `op` is, if it may be done now.
    fn entry(&self, law: &Law, op: &Op) -> Option<usize> {
        let is = |due: &Due| due.op == *op || diagnose::kind(&due.op) == diagnose::kind(op);
        let ready = |due: &Due| due.after.iter().all(|earlier| self.is_done(*earlier));
        let rest = law.dues.iter().enumerate().skip(self.front);
        rest.filter(|(i, due)| !self.is_done(*i) && is(due) && ready(due)).map(|(i, _)| i).next()
    }
}

/// Whose turn it is to add to an accumulator of a data cell.
#[derive(Clone, Copy, Default)]
pub(super) struct Turnstile {
    /// The microbatch; all before it are through.
    pub mb: usize,
    /// What it has added already.
    adds: usize,
}

impl Order<'_> {
    /// The next thing that a unit does on a chunk.
    pub(super) fn of_unit(&mut self, at: usize, instr: &Instr) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        let Some(unit) = self.local_unit(at, instr.unit) else { return };
        let chunk = &mut self.chunks[local];
        if chunk.units[unit].broken {
            return;
        }
        let parts = matches!(instr.op, Op::Compute(Pass::BackwardInput | Pass::BackwardWeight, _));
        if parts && !chunk.units[unit].split {
            chunk.units[unit].in_parts(chunk.laws);
        }
        let (law, progress) = (chunk.law(unit), &chunk.units[unit]);
        let Some(entry) = progress.entry(law, &instr.op) else {
            let wrong = (at, progress.front.min(law.dues.len() - 1));
            chunk.units[unit].broken = true;
            chunk.posted.retain(|(_, of, _)| *of != unit);
            let unit = self.unit(unit);
            self.violations.extend(diagnose::stream(self.program, instr.chunk, unit, &law.dues, Some(wrong)));
            return;
        };
        chunk.units[unit].put(entry);
        let taken = |(value, of, due): &(Value, usize, usize)| {
            matches!(instr.op, Op::Collective { value: v, .. } if v == *value) && (*of, *due) != (unit, entry)
        };
        if chunk.posted.iter().any(taken) {
            self.out_of_order(at, "this exchange has been posted for another use and not been taken");
        }
        let chunk = &mut self.chunks[local];
        chunk.posted.retain(|(_, of, due)| (*of, *due) != (unit, entry));
        if matches!(instr.op, Op::Compute(..)) && !self.loaded[unit] {
            self.loaded[unit] = true;
            self.violations.push(Violation::Missing { place: self.place(at), missing: "the load of the unit".into() });
        }
        let due = &law.dues[entry];
        self.details(at, instr, due, local);
        if let Some(to) = due.adds {
            self.fifo(at, local, unit, law, to);
        }
        if let Op::Compute(pass, segment) = due.op {
            self.reads(at, local, pass, segment);
        }
    }

    /// Rows over the tensor axis that leave ahead of their exchange: as soon as that could be done itself. Until it is taken
    /// nothing of the unit may touch what it moves, for all that does so comes after it by the law; and it is taken
    /// before the chunk posts the same value again, so that all members post in one order.
    pub(super) fn post_rows(&mut self, at: usize, instr: &Instr, exchange: Exchange, value: Value) {
        if !value.of_rows() {
            return self.wrong(at, "no such exchange is posted");
        }
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        let Some(unit) = self.local_unit(at, instr.unit) else { return };
        let chunk = &self.chunks[local];
        if chunk.units[unit].broken {
            return;
        }
        if chunk.posted.iter().any(|(posted, ..)| *posted == value) {
            return self.double(at);
        }
        let op = Op::Collective { exchange, value, axis: Axis::Tp, bytes: 0 };
        let Some(entry) = chunk.units[unit].entry(chunk.law(unit), &op) else {
            return self.out_of_order(at, "what it moves is not made yet, or is not exchanged so any more");
        };
        self.chunks[local].posted.push((value, unit, entry));
    }

    /// Sizes and ranks.
    fn details(&mut self, at: usize, instr: &Instr, due: &Due, local: usize) {
        match (instr.op, due.op) {
            (Op::Collective { bytes, .. }, Op::Collective { bytes: want, .. }) => self.want_bytes(at, bytes, want),
            (Op::Send { to: peer, bytes, .. }, Op::Send { bytes: size, .. })
            | (Op::Recv { from: peer, bytes, .. }, Op::Recv { bytes: size, .. }) => {
                let chunk = &self.chunks[local];
                let want = if due.chunk < chunk.chunk { chunk.before } else { chunk.after };
                // What stays on the rank is no message.
                self.want_bytes(at, bytes, if want == self.program.rank { 0 } else { size });
                if peer != want {
                    self.violations.push(Violation::Peer { place: self.place(at), want });
                }
            }
            _ => {}
        }
    }

    /// Weight gradients of a cell add up in ascending order of microbatches, accumulator by accumulator.
    fn fifo(&mut self, at: usize, local: usize, unit: usize, law: &super::Law, to: Accumulator) {
        let Unit { cell, mb } = self.unit(unit);
        let index = law.accumulators.binary_search_by_key(&to, |(known, _)| *known).expect("the law lists them");
        let number = self.local_cell(cell).expect("a unit of this rank");
        let whose = self.chunks[local].turn(number, index);
        let turn = &mut self.chunks[local].turns[number][index];
        if turn.mb != whose {
            *turn = Turnstile { mb: whose, adds: 0 };
        }
        if mb > whose {
            // Whoever is passed over is reported once, below.
            *turn = Turnstile { mb, adds: 0 };
        }
        if mb >= whose {
            turn.adds += 1;
            if turn.adds == law.accumulators[index].1 {
                *turn = Turnstile { mb: mb + 1, adds: 0 };
            }
        }
        if mb > whose {
            let earlier = Unit { cell, mb: whose };
            self.violations.push(Violation::Fifo { place: self.place(at), earlier });
        }
    }
}

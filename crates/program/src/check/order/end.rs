//! The end of a step: gradients over the data axis, tied gradients, ballot, vote, apply, parameters.

use super::super::law::{grads_exchange, swaps_tied};
use super::super::violation::Violation;
use super::{Order, diagnose};
use crate::instr::{Axis, Exchange, Instr, Mode, Value};

impl Order<'_> {
    /// A collective beyond the tensor axis.
    pub(super) fn of_step(
        &mut self,
        at: usize,
        instr: &Instr,
        exchange: Exchange,
        value: Value,
        axis: Axis,
        bytes: u64,
    ) {
        let train = self.step.mode == Mode::Train;
        match (value, axis, exchange) {
            (Value::Grads, Axis::Dp, _) if train => self.grads(at, instr, exchange, bytes),
            (Value::Params, Axis::Dp, Exchange::AllGather) if train => self.params(at, instr, bytes),
            (Value::Ballot, Axis::World, Exchange::AllGather) => self.ballot(at, bytes),
            _ => self.wrong(at, "no step has such an exchange"),
        }
    }

    fn grads(&mut self, at: usize, instr: &Instr, exchange: Exchange, bytes: u64) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        let want = grads_exchange(self.step.model, self.step.layout, instr.chunk);
        if exchange != want {
            return self.wrong(at, format!("with zero {} it is {want:?}", self.step.layout.zero));
        }
        self.want_bytes(at, bytes, self.step.sizes.grads(instr.chunk, self.step.layout.holder(self.at), exchange));
        let chunk = &mut self.chunks[local];
        if std::mem::replace(&mut chunk.grads, true) {
            return self.double(at);
        }
        if chunk.closed < self.cells {
            let open = self.first_cell + chunk.closed;
            self.out_of_order(at, format!("cell {open} of the chunk is not closed"));
        }
    }

    pub(super) fn tied(&mut self, at: usize, instr: &Instr, send: bool, peer: usize, bytes: u64) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        if self.step.mode == Mode::Eval || !swaps_tied(self.step.model, self.step.layout, instr.chunk) {
            return self.wrong(at, "the chunk has no use of a tied embedding whose other use is on another rank");
        }
        let chunk = &self.chunks[local];
        let want = if instr.chunk == 0 { chunk.before } else { chunk.after };
        let here = want == self.program.rank;
        self.want_bytes(at, bytes, if here { 0 } else { self.step.sizes.tied_grads() });
        let chunk = &mut self.chunks[local];
        let done = if send { &mut chunk.tied_sent } else { &mut chunk.tied_received };
        let again = std::mem::replace(done, true);
        let summed = chunk.grads;
        // What is received is added to what is sent.
        let early = !send && !chunk.tied_sent;
        if peer != want {
            self.violations.push(Violation::Peer { place: self.place(at), want });
        }
        if again {
            self.double(at);
        } else if !summed {
            self.out_of_order(at, "the chunk's gradients are not summed over the data axis");
        } else if early {
            self.out_of_order(at, "the chunk's own share is sent before the other's is added to it");
        }
    }

    fn ballot(&mut self, at: usize, bytes: u64) {
        let sizes = self.step.sizes;
        let want = if self.step.mode == Mode::Train { sizes.ballot(self.at) } else { sizes.ballot_eval(self.at) };
        self.want_bytes(at, bytes, want);
        if std::mem::replace(&mut self.ballot, true) {
            return self.double(at);
        }
        let unfinished = self.chunks.iter().find_map(|chunk| {
            let tied = swaps_tied(self.step.model, self.step.layout, chunk.chunk);
            let train = self.step.mode == Mode::Train;
            let units = chunk.units.iter().all(|unit| unit.broken || unit.left == 0);
            let what = if !units {
                "units that are not through"
            } else if train && !chunk.grads {
                "gradients that are not summed over the data axis"
            } else if train && tied && !chunk.tied_received {
                "tied gradients that are not received"
            } else {
                return None;
            };
            Some(format!("chunk {} has {what}", chunk.chunk))
        });
        if let Some(law) = unfinished {
            self.out_of_order(at, law);
        }
    }

    pub(super) fn cast(&mut self, at: usize) {
        if self.step.mode == Mode::Eval {
            return self.wrong(at, "an evaluation has no vote");
        }
        if std::mem::replace(&mut self.vote, true) {
            return self.double(at);
        }
        if !self.ballot {
            self.out_of_order(at, "the vote follows the exchange of ballots");
        }
    }

    pub(super) fn apply(&mut self, at: usize, instr: &Instr) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        if self.step.mode == Mode::Eval {
            return self.wrong(at, "an evaluation changes no parameters");
        }
        if std::mem::replace(&mut self.chunks[local].applied, true) {
            return self.double(at);
        }
        if !self.vote {
            self.out_of_order(at, "nothing is overwritten before the vote");
        }
    }

    fn params(&mut self, at: usize, instr: &Instr, bytes: u64) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        if self.step.layout.zero == 0 {
            return self.wrong(at, "with zero 0 every rank updates all of its parameters");
        }
        self.want_bytes(at, bytes, self.step.sizes.params(instr.chunk, self.step.layout.holder(self.at)));
        let chunk = &mut self.chunks[local];
        if std::mem::replace(&mut chunk.params, true) {
            return self.double(at);
        }
        if !chunk.applied {
            self.out_of_order(at, "parameters are gathered after the chunk's apply");
        }
    }

    /// What the list should have had.
    pub(super) fn finish(&mut self) {
        let mut missing = Vec::new();
        for chunk in &self.chunks {
            for (index, progress) in chunk.units.iter().enumerate() {
                if !progress.broken && progress.left > 0 {
                    let (unit, law) = (self.unit(index), chunk.law(index));
                    self.violations.extend(diagnose::stream(self.program, chunk.chunk, unit, &law.dues, None));
                }
            }
            if self.step.mode == Mode::Eval {
                continue;
            }
            let tied = swaps_tied(self.step.model, self.step.layout, chunk.chunk);
            let parts = [
                (chunk.closed < self.cells, "the close of its last cell"),
                (!chunk.grads, "the exchange of Grads"),
                (tied && !chunk.tied_sent, "the send of TiedGrads"),
                (tied && !chunk.tied_received, "the receive of TiedGrads"),
                (!chunk.applied, "apply"),
                (self.step.layout.zero == 1 && !chunk.params, "the gather of Params"),
            ];
            missing.extend(
                parts.iter().filter(|(lacks, _)| *lacks).map(|(_, what)| format!("{what} for chunk {}", chunk.chunk)),
            );
        }
        if !self.ballot {
            missing.push("the exchange of ballots".into());
        }
        if self.step.mode == Mode::Train && !self.vote {
            missing.push("the vote".into());
        }
        let rank = self.program.rank;
        self.violations.extend(missing.into_iter().map(|missing| Violation::MissingAtEnd { rank, missing }));
    }
}

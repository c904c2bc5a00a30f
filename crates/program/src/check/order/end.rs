//! The end of a step: gradients over the data axis, tied gradients, ballot, vote, apply, parameters.

use spec::Class;

use super::super::law::swaps_tied;
use super::super::violation::Violation;
use super::{Order, diagnose};
use crate::buckets::Bucket;
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
            (Value::Grads(bucket), Axis::Dp | Axis::ExpertDp, _) if train && axis != Axis::holders(bucket.class()) => {
                self.wrong_group(at, bucket);
            }
            (Value::Grads(bucket), Axis::Dp | Axis::ExpertDp, _) if train => {
                self.sum(at, instr, exchange, bucket, bytes);
            }
            (Value::Grads(bucket), _, Exchange::AllGather) if train && axis == Axis::replica(bucket.class()) => {
                self.spread(at, instr, bucket, bytes);
            }
            (Value::Params(bucket), _, Exchange::AllGather) if axis == Axis::shard(bucket.class()) => {
                self.params(at, instr, bucket, bytes);
            }
            (Value::MirrorGrads, Axis::World, Exchange::Shift) if train => self.mirrors(at, bytes),
            (Value::Ballot, Axis::World, Exchange::AllGather) => self.ballot(at, bytes),
            _ => self.wrong(at, "no step has such an exchange"),
        }
    }

    /// A sum over ranks that do not hold the bucket: some of its leaves are missing, others are of other parameters.
    fn wrong_group(&mut self, at: usize, bucket: Bucket) {
        let (leaves, ranks) = match bucket.class() {
            Class::Experts => {
                ("each group of data cells", "at the same place in their groups, which have the same experts")
            }
            Class::Common => ("each data cell", "at all data and context positions"),
        };
        self.wrong(
            at,
            format!("the leaves of {bucket:?} are of {leaves}: its gradients are summed over the ranks {ranks}"),
        );
    }

    pub(super) fn tied(&mut self, at: usize, instr: &Instr, send: bool, peer: usize, bytes: u64) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        if self.step.mode == Mode::Eval || !swaps_tied(self.step.model, self.step.layout, instr.chunk) {
            return self.wrong(at, "the chunk has no use of a tied embedding whose other use is on another rank");
        }
        let sums = self.step.sums;
        let chunk = &self.chunks[local];
        let want = if instr.chunk == 0 { chunk.before } else { chunk.after };
        let here = want == self.program.rank;
        self.want_bytes(at, bytes, if here { 0 } else { self.step.sizes.tied_grads(instr.chunk, self.at) });
        let chunk = &mut self.chunks[local];
        let done = if send { &mut chunk.tied_sent } else { &mut chunk.tied_received };
        let again = std::mem::replace(done, true);
        let summed = chunk.buckets.iter().all(|b| b.summed(&sums));
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

    /// What is mirrored is the whole gradient of the step.
    fn mirrors(&mut self, at: usize, bytes: u64) {
        if !self.step.layout.mirrored() {
            return self.wrong(at, "the layout mirrors nothing");
        }
        self.want_bytes(at, bytes, self.step.sizes.mirror_grads(self.at));
        if std::mem::replace(&mut self.mirrored, true) {
            return self.double(at);
        }
        let incomplete = self.chunks.iter().find(|chunk| {
            let tied = swaps_tied(self.step.model, self.step.layout, chunk.chunk);
            !chunk.buckets.iter().all(|b| b.summed(&self.step.sums)) || tied && !chunk.tied_received
        });
        if let Some(chunk) = incomplete {
            let law = format!("the gradients of chunk {} are not complete", chunk.chunk);
            self.out_of_order(at, law);
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
            } else if train && !chunk.buckets.iter().all(|b| b.summed(&self.step.sums)) {
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
        } else if self.step.mode == Mode::Train && self.step.layout.mirrored() && !self.mirrored {
            self.out_of_order(at, "a rank votes when its mirror has the gradients");
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
        if let Some(stale) = self.chunks[local].buckets.iter().find(|b| b.present || b.coming) {
            let law =
                format!("the gathered parameters of {:?} would outlive the update: they are freed first", stale.bucket);
            self.out_of_order(at, law);
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
            missing.extend(chunk.buckets.iter().filter(|b| b.present).map(|b| chunk.at("the release", b.bucket)));
            let coming = chunk.buckets.iter().filter(|b| b.coming);
            missing.extend(coming.map(|b| chunk.at("the gather of posted Params", b.bucket)));
            if self.step.mode == Mode::Eval {
                continue;
            }
            let tied = swaps_tied(self.step.model, self.step.layout, chunk.chunk);
            for bucket in &chunk.buckets {
                missing.extend(self.lacks(chunk, bucket));
            }
            let parts = [
                (tied && !chunk.tied_sent, "the send of TiedGrads"),
                (tied && !chunk.tied_received, "the receive of TiedGrads"),
                (!chunk.applied, "apply"),
            ];
            missing.extend(
                parts.iter().filter(|(lacks, _)| *lacks).map(|(_, what)| format!("{what} for chunk {}", chunk.chunk)),
            );
        }
        if self.step.mode == Mode::Train && self.step.layout.mirrored() && !self.mirrored {
            missing.push("the exchange of MirrorGrads".into());
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

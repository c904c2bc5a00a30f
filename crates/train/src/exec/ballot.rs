//! The end of a step: what a rank speaks for, and what all of them came to.

use std::sync::atomic::Ordering;

use program::Mode;
use spec::tensors::Cut;

use super::Executor;
use crate::error::TrainError;
use crate::vote::{self, Ballot};

impl Executor<'_> {
    /// What this rank speaks for: every leaf's loss and every state chunk's gradient has one speaker.
    pub(super) fn fill_ballot(&self, mode: Mode) -> Ballot {
        let mut ballot = Ballot { stop: self.stop.load(Ordering::Relaxed), ..Ballot::default() };
        if self.place.at.tp == 0 {
            ballot.losses = self.memory.losses.iter().map(|(leaf, sum)| (*leaf, *sum)).collect();
            ballot.losses.sort_unstable_by_key(|(leaf, _)| *leaf);
        }
        if mode == Mode::Eval {
            return ballot;
        }
        ballot.aux = self.memory.aux.iter().map(|(at, value)| (*at, *value)).collect();
        ballot.copies = self.memory.copies;
        ballot.loads = self.memory.loads.iter().map(|(layer, counts)| (*layer, counts.clone())).collect();
        for state in self.chunks.values() {
            for bucket in state.buckets.iter().filter(|b| b.plan.parameters) {
                for (held, slice, elements, at) in state.pieces(&bucket.part) {
                    let replica = held.tensor.cut == Cut::Whole && self.place.at.tp > 0;
                    if replica || !held.counts {
                        continue;
                    }
                    let total = &bucket.total[at.start - bucket.owned.start..at.end - bucket.owned.start];
                    let sums = kernels::chunk_squares(self.ctx, total, spec::tensors::STATE_CHUNK);
                    ballot.squares.push((held.index, slice, elements.start / spec::tensors::STATE_CHUNK, sums));
                }
            }
        }
        ballot
    }

    /// What the last exchange of ballots came to.
    pub(crate) fn tally(&self, mode: Mode) -> Result<vote::Tally, TrainError> {
        let ballots = self.ballot.iter().map(|b| Ballot::decode(b)).collect::<Result<Vec<_>, _>>()?;
        match mode {
            Mode::Train => vote::tally_step(&ballots, self.run, &self.tensors),
            Mode::Eval => vote::tally(&ballots, &self.run.grid, &[]),
        }
    }
}

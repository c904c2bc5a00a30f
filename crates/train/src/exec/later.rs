//! The update of mirrored state, done while this rank waits for others in the step that follows.
//!
//! Nobody reads what a rank mirrors unless its owner is lost, so its update may wait until somebody asks for that state, or the
//! next step's gradients for it come. Each block is looked at before it is overwritten, while it comes from memory anyway, so
//! the look before the vote leaves it out. A block that is not what was written stays as it is: the next look at all finds it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kernels::Ctx;
use spec::Run;
use spec::tensors::STATE_CHUNK;

use super::verdict::Verdict;
use crate::guard::Guard;
use crate::optim::{self, Written};
use crate::state::ChunkState;

/// An update that is not complete.
pub(super) struct Later {
    verdict: Verdict,
    /// Mirrored chunk, bucket and block that are next.
    next: (usize, usize, usize),
    /// By chunk, what was written.
    written: Vec<Written>,
    /// Checksums are taken, and those of before looked at.
    guarded: bool,
    /// A block was not what it should have been.
    spoilt: bool,
    /// Time that it took so far.
    pub spent: Duration,
}

/// An update that is complete.
pub(super) struct Done {
    /// By chunk, what was written; `None`: nothing is known.
    pub written: Vec<Option<Written>>,
    /// A block was not what it should have been, and was left.
    pub spoilt: bool,
}

impl Later {
    pub fn new(verdict: Verdict, guarded: bool) -> Self {
        let spent = Duration::ZERO;
        Self { verdict, next: (0, 0, 0), written: Vec::new(), guarded, spoilt: false, spent }
    }

    /// Updates the next block of `mirrored`; false when there is none. `guard` knows them from state number `first` on.
    pub fn block(
        &mut self,
        ctx: &Ctx,
        run: &Run,
        mirrored: &mut BTreeMap<usize, ChunkState>,
        guard: &Guard,
        first: usize,
    ) -> bool {
        let began = Instant::now();
        let more = self.one(ctx, run, mirrored, guard, first);
        self.spent += began.elapsed();
        more
    }

    fn one(
        &mut self,
        ctx: &Ctx,
        run: &Run,
        mirrored: &mut BTreeMap<usize, ChunkState>,
        guard: &Guard,
        first: usize,
    ) -> bool {
        loop {
            let (number, bucket, block) = self.next;
            let Some(state) = mirrored.values_mut().nth(number) else { return false };
            if self.written.len() == number {
                self.written.push(vec![Vec::new(); state.buckets.len()]);
            }
            let Some(of) = state.buckets.get(bucket) else {
                self.next = (number + 1, 0, 0);
                continue;
            };
            let owned = if of.plan.parameters { of.owned.len() } else { 0 };
            let at = block * STATE_CHUNK..((block + 1) * STATE_CHUNK).min(owned);
            if at.start >= owned {
                let total = std::mem::take(&mut state.buckets[bucket].total);
                state.grads.pool.give(total);
                self.next = (number, bucket + 1, 0);
                continue;
            }
            self.next.2 += 1;
            let known = if self.guarded { guard.of_block(first + number, state, bucket, block) } else { [None; 3] };
            let of = &state.buckets[bucket];
            let data = [&of.shard[at.clone()], &of.moment1[at.clone()], &of.moment2[at.clone()]];
            let differs =
                |(known, data): (Option<u64>, &[f32])| known.is_some_and(|sum| sum != kernels::checksum(ctx, data));
            if known.into_iter().zip(data).any(differs) {
                self.spoilt = true;
                // What is there does not have these sums: whoever looks next finds it.
                self.written[number][bucket].push(known.map(Option::unwrap_or_default));
                return true;
            }
            let Verdict { step, decision, .. } = &self.verdict;
            let sums = optim::apply_to(ctx, &run.train, *step, decision, state, (bucket, at), self.guarded);
            self.written[number][bucket].extend(sums);
            return true;
        }
    }

    /// What it came to; to be asked when no block is left.
    pub fn done(self) -> Done {
        let written = self.written.into_iter().map(|written| self.guarded.then_some(written)).collect();
        Done { written, spoilt: self.spoilt }
    }
}

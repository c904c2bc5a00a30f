//! The update of mirrored state, done while this rank waits for others in the step that follows.
//!
//! Nobody reads what a rank mirrors unless its owner is lost, so its update may wait until somebody asks for that state, or the
//! next step's gradients for it come. Each block is looked at before it is overwritten, while it comes from memory anyway, so
//! the look before the vote leaves it out. A block that is not what was written stays as it is: the next look at all finds it.

use std::collections::BTreeMap;
use std::ops::Range;
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
        let found = self.next(mirrored);
        if let Some((number, bucket, block, at)) = found.clone() {
            let state = mirrored.values_mut().nth(number).expect("just found");
            let known = if self.guarded { guard.of_block(first + number, state, bucket, block) } else { [None; 3] };
            let of = &state.buckets[bucket];
            let data = [&of.shard[at.clone()], &of.moment1[at.clone()], &of.moment2[at.clone()]];
            let differs =
                |(known, data): (Option<u64>, &[f32])| known.is_some_and(|sum| sum != kernels::checksum(ctx, data));
            let sums = if known.into_iter().zip(data).any(differs) {
                self.spoilt = true;
                // What is there does not have these sums: whoever looks next finds it.
                vec![known.map(Option::unwrap_or_default)]
            } else {
                let Verdict { step, decision, .. } = &self.verdict;
                optim::apply_to(ctx, &run.train, *step, decision, state, (bucket, at), self.guarded)
            };
            self.written[number][bucket].extend(sums);
        }
        self.spent += began.elapsed();
        found.is_some()
    }

    /// The next block: its chunk, bucket, number, and elements. Gradients of a bucket that is done are given back.
    fn next(&mut self, mirrored: &mut BTreeMap<usize, ChunkState>) -> Option<(usize, usize, usize, Range<usize>)> {
        loop {
            let (number, bucket, block) = self.next;
            let state = mirrored.values_mut().nth(number)?;
            if self.written.len() == number {
                self.written.push(vec![Vec::new(); state.buckets.len()]);
            }
            let Some(of) = state.buckets.get(bucket) else {
                self.next = (number + 1, 0, 0);
                continue;
            };
            let owned = if of.plan.parameters { of.owned.len() } else { 0 };
            let at = block * STATE_CHUNK..((block + 1) * STATE_CHUNK).min(owned);
            if at.start < owned {
                self.next.2 += 1;
                return Some((number, bucket, block, at));
            }
            let total = std::mem::take(&mut state.buckets[bucket].total);
            state.grads.pool.give(total);
            self.next = (number, bucket + 1, 0);
        }
    }

    /// What it came to; to be asked when no block is left.
    pub fn done(self) -> Done {
        let written = self.written.into_iter().map(|written| self.guarded.then_some(written)).collect();
        Done { written, spoilt: self.spoilt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;
    use crate::vote::Decision;
    use kernels::Simd;

    const RUN: &str = "[model]\npreset = \"tiny\"\nexperts = 4\nexpert_ffn = 96\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 2\nbatch = 4\nseq = 32\n[grid]\ndp = 2\nep = 2\n[layout]\ndp = 2\n";
    const FIRST: usize = 1;

    fn verdict(step: u64) -> Verdict {
        let (loss, grad_norm, grad_scale) = (1.0, 1.0, 0.5);
        let decision =
            Decision { loss, grad_norm, grad_scale, finite: true, commit: true, stop: false, aux: 0.0, targets: 1 };
        Verdict { step, decision, loads: Vec::new() }
    }

    fn gradients(state: &mut ChunkState) {
        for bucket in &mut state.buckets {
            bucket.total = (0..bucket.owned.len()).map(|i| (i % 7) as f32 - 3.0).collect();
        }
    }

    fn bits(state: &ChunkState) -> Vec<u32> {
        let of = |b: &crate::state::BucketState| [&b.shard[..], &b.moment1, &b.moment2].concat();
        state.buckets.iter().flat_map(of).map(f32::to_bits).collect()
    }

    /// Block by block it is the update that is made at once, with its sums; a block that changed in between stays, and is found.
    #[test]
    fn late_is_what_at_once_is_and_a_changed_block_stays() {
        let ctx = Ctx::new(Simd::detect(), 1);
        let run = Run::parse(RUN, "test", &[], 1).unwrap();
        assert!(run.layout.mirrored());
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, 1);
        let state = || ChunkState::mirror(&run, &place, 0);
        let (mut at_once, mut mirrored) = (state(), BTreeMap::from([(0, state())]));
        let (mut guard, mut expected) = (Guard::default(), Guard::default());
        for step in 1..=2 {
            gradients(&mut at_once);
            let written = verdict(step).apply(&ctx, &run, &mut at_once, true);
            expected.wrote(FIRST, &at_once, written);
            gradients(mirrored.get_mut(&0).unwrap());
            let mut later = Later::new(verdict(step), true);
            let mut blocks = 0;
            while later.block(&ctx, &run, &mut mirrored, &guard, FIRST) {
                blocks += 1;
            }
            let done = later.done();
            assert!(!done.spoilt && blocks > 4, "{blocks} blocks");
            let state = &mirrored[&0];
            done.written.into_iter().for_each(|written| guard.wrote(FIRST, state, written));
            assert_eq!(bits(state), bits(&at_once), "step {step}");
            assert!(state.buckets.iter().all(|b| b.total.is_empty()), "gradients are given back");
            for bucket in 0..state.buckets.len() {
                let of = |guard: &Guard| guard.of_block(FIRST, state, bucket, 0);
                assert_eq!(of(&guard), of(&expected));
            }
        }
        let state = mirrored.get_mut(&0).unwrap();
        let bucket = state.buckets.iter().position(|b| b.owned.len() > STATE_CHUNK).unwrap();
        let changed = &mut state.buckets[bucket].moment1[STATE_CHUNK];
        *changed = f32::from_bits(changed.to_bits() ^ 1);
        let before = bits(state);
        gradients(state);
        let mut later = Later::new(verdict(3), true);
        while later.block(&ctx, &run, &mut mirrored, &guard, FIRST) {}
        let done = later.done();
        assert!(done.spoilt);
        let state = &mirrored[&0];
        done.written.into_iter().for_each(|written| guard.wrote(FIRST, state, written));
        let own = state_of_nothing(&run, &place);
        let found = guard.check(&ctx, [&own, state].into_iter(), FIRST);
        assert!(!found.is_empty() && found.iter().all(|p| p.mirror && p.what.contains("moment1")), "{found:?}");
        let (after, blocks) = (bits(state), before.len().div_ceil(STATE_CHUNK));
        assert!(after != before && blocks > 1, "the other blocks are updated");
    }

    /// What stands before the mirrored state; nothing is known of it.
    fn state_of_nothing(run: &Run, place: &Place) -> ChunkState {
        ChunkState::new(run, place, 0)
    }
}

//! Gradients computed by two ranks: the way to see a bit that flips while they are made, also by a device that always errs.
//!
//! The first of two passes over a step computes other ranks' leaves and applies nothing; the second one is the step. The ballots
//! of the second carry the hashes of both ([`crate::leaves`]): all ranks derive the same judgement from them.

use std::collections::BTreeMap;

use crate::leaves::{self, Judgement, Seen};

/// Rounds of two passes before a disagreement is a broken device.
const ROUNDS: u64 = 2;

/// The check of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recheck {
    /// The step is one that is checked.
    on: bool,
    /// By how many data cells the checking pass of each round moves on.
    shifts: [usize; 2],
    /// The pass at hand.
    pass: u64,
    /// By key, the hash of what this pass has made so far.
    now: BTreeMap<u64, u64>,
    /// What was made in the passes before.
    seen: Vec<Seen>,
    /// What the last round came to.
    pub judged: Judgement,
}

impl Recheck {
    /// Before the first pass; `shifts` as [`leaves::shifts`] tells them.
    pub fn first(shifts: [usize; 2]) -> Self {
        Self { on: true, shifts, ..Self::default() }
    }

    /// By how many data cells the pass at hand moves on.
    pub(super) fn shift(&self) -> usize {
        if self.on && self.pass.is_multiple_of(2) { self.shifts[(self.pass / 2) as usize] } else { 0 }
    }

    /// The step is checked.
    pub(super) fn on(&self) -> bool {
        self.on
    }

    /// A gradient that this rank has made of leaf `key`; `from` as in [`leaves::hash`].
    pub(super) fn see(&mut self, key: u64, from: [usize; 3], gradient: &[f32]) {
        let sum = self.now.entry(key).or_default();
        *sum = sum.wrapping_add(leaves::hash(from, gradient));
    }

    /// The pass has made all: what this rank tells in its ballot.
    pub(super) fn tell(&mut self) -> Vec<Seen> {
        if !self.on {
            return Vec::new();
        }
        let pass = self.pass;
        self.seen.extend(std::mem::take(&mut self.now).into_iter().map(|(key, hash)| Seen { pass, key, hash }));
        if pass.is_multiple_of(2) { Vec::new() } else { self.seen.clone() }
    }

    /// All ballots are in, with what each rank told; true if the step must not be applied yet.
    pub(super) fn close(&mut self, all: &[Vec<Seen>], replica: impl Fn(u32) -> usize) -> bool {
        if !self.on {
            return false;
        }
        if !self.pass.is_multiple_of(2) {
            self.judged = leaves::judge(all, self.pass / 2, replica);
        }
        self.pass += 1;
        !self.judged.agree
    }

    /// The step wants another pass.
    pub fn again(&self) -> bool {
        self.on && !self.judged.agree && self.pass < 2 * ROUNDS
    }

    /// The ranks of which one is broken, if the step cannot be computed so that all agree.
    pub fn broken(&self) -> Option<&[u32]> {
        (self.on && !self.judged.agree && self.pass == 2 * ROUNDS).then_some(&self.judged.wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One pass of two ranks with a leaf each, that swap them in the checking pass; is the step to wait?
    fn pass(ranks: &mut [Recheck; 2], made: impl Fn(usize) -> f32) -> bool {
        let tell = |rank: usize| {
            let of = (rank + ranks[rank].shift()) % 2;
            ranks[rank].see(of as u64, [0, 0, 0], &[made(rank) + of as f32]);
            ranks[rank].tell()
        };
        let told: Vec<_> = (0..2).map(tell).collect();
        let waits = ranks.each_mut().map(|rank| rank.close(&told, |rank| rank as usize));
        assert_eq!((waits[0], &ranks[0].judged), (waits[1], &ranks[1].judged), "all derive the same");
        waits[0]
    }

    fn two() -> [Recheck; 2] {
        [Recheck::first([1, 1]), Recheck::first([1, 1])]
    }

    #[test]
    fn a_step_that_all_agree_on_takes_two_passes() {
        let mut ranks = two();
        assert!(pass(&mut ranks, |_| 1.0) && ranks[0].again());
        assert!(!pass(&mut ranks, |_| 1.0) && !ranks[0].again());
        assert_eq!((ranks[0].broken(), &ranks[0].judged.wrong[..]), (None, &[][..]));
    }

    #[test]
    fn a_flipped_bit_costs_a_round_and_its_rank_is_named() {
        for spoilt in 0..2 {
            let mut ranks = two();
            let mut waits = Vec::new();
            for n in 0..4 {
                waits.push(pass(&mut ranks, |rank| if (n, rank) == (spoilt, 1) { 1.5 } else { 1.0 }));
            }
            assert_eq!(waits, [true, true, true, false]);
            assert_eq!((ranks[0].broken(), &ranks[0].judged.wrong[..], ranks[0].again()), (None, &[1][..], false));
        }
    }

    #[test]
    fn a_device_that_always_errs_is_broken() {
        let mut ranks = two();
        (0..4).for_each(|_| assert!(pass(&mut ranks, |rank| if rank == 1 { 1.5 } else { 1.0 })));
        assert_eq!((ranks[0].broken(), ranks[0].again()), (Some(&[0, 1][..]), false));
    }

    #[test]
    fn it_is_silent_where_it_is_off() {
        let mut recheck = Recheck::default();
        assert!(!recheck.on() && recheck.tell().is_empty() && !recheck.close(&[], |_| 0) && !recheck.again());
    }
}

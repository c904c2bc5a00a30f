//! Which source stands at an index of a weighted mixture, without a state.
//!
//! Every block of [`BLOCK`] sequences holds the same number from each source, spread as evenly as whole numbers allow
//! and turned by a seeded amount. So the source at an index, and how often it came before, are two look-ups.

use crate::random::{below, key, word};

/// Sequences in a block.
pub(crate) const BLOCK: usize = 4096;

/// The purpose of the keys of the turns, among all that `data.seed` is for.
const TURN: u64 = 3;

/// A mixture.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// The source of each slot of a block that is not turned.
    slots: Vec<u8>,
    /// `before[slot * sources + source]`: slots of that source before `slot`, for `slot` in `0..=BLOCK`.
    before: Vec<u16>,
    sources: usize,
    key: u64,
}

impl Mixture {
    /// The mixture by `weights`, at most 256, each at least 1 / [`BLOCK`] of their sum.
    pub(crate) fn new(weights: &[f64], seed: u64) -> Self {
        let counts = counts(weights);
        let sources = counts.len();
        let mut slots = Vec::with_capacity(BLOCK);
        let mut before = vec![0u16; sources];
        let mut due = vec![0i64; sources];
        for _ in 0..BLOCK {
            due.iter_mut().zip(&counts).for_each(|(due, &count)| *due += i64::from(count));
            let next = (0..sources).max_by_key(|&source| (due[source], std::cmp::Reverse(source)));
            let next = next.expect("at least one source");
            due[next] -= BLOCK as i64;
            slots.push(next as u8);
            before.extend_from_within(before.len() - sources..);
            let last = before.len() - sources;
            before[last + next] += 1;
        }
        Self { slots, before, sources, key: key(seed, &[TURN]) }
    }

    /// Sequences of `source` in every block.
    pub(crate) fn count(&self, source: usize) -> u64 {
        u64::from(self.before[BLOCK * self.sources + source])
    }

    /// The source at `index`, and how often it stood at an index before.
    pub(crate) fn at(&self, index: u64) -> (usize, u64) {
        let (block, slot) = (index / BLOCK as u64, (index % BLOCK as u64) as usize);
        let turn = below(word(self.key, block), BLOCK as u64) as usize;
        let place = (turn + slot) % BLOCK;
        let source = usize::from(self.slots[place]);
        let before = |slot: usize| u64::from(self.before[slot * self.sources + source]);
        let count = self.count(source);
        let wrapped = if turn + slot >= BLOCK { count } else { 0 };
        (source, block * count + before(place) + wrapped - before(turn))
    }
}

/// How many of [`BLOCK`] sequences come from each source: at least one, the rest by largest remainder.
fn counts(weights: &[f64]) -> Vec<u16> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| weight / sum * BLOCK as f64).collect();
    let mut counts: Vec<u16> = exact.iter().map(|&share| (share as u16).max(1)).collect();
    let off = |counts: &[u16], source: usize| exact[source] - f64::from(counts[source]);
    loop {
        let total: usize = counts.iter().map(|&count| usize::from(count)).sum();
        let sources = 0..counts.len();
        if total < BLOCK {
            let most = sources.max_by(|&a, &b| off(&counts, a).total_cmp(&off(&counts, b)).then(b.cmp(&a)));
            counts[most.expect("a source")] += 1;
        } else if total > BLOCK {
            let spare = sources.filter(|&source| counts[source] > 1);
            let least = spare.min_by(|&a, &b| off(&counts, a).total_cmp(&off(&counts, b)).then(a.cmp(&b)));
            counts[least.expect("more sequences than sources")] -= 1;
        } else {
            return counts;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn an_index_is_its_source_and_the_picks_before_it(
            weights in prop::collection::vec(0.01f64..1.0, 1..9), seed: u64, far in 0u64..1 << 40,
        ) {
            let mixture = Mixture::new(&weights, seed);
            let sum: f64 = weights.iter().sum();
            // From the beginning, and from any block on.
            for first in [0, far * BLOCK as u64] {
                let mut picks: Vec<u64> =
                    (0..weights.len()).map(|source| first / BLOCK as u64 * mixture.count(source)).collect();
                let at_first = picks.clone();
                for index in first..first + 3 * BLOCK as u64 {
                    let (source, nth) = mixture.at(index);
                    prop_assert_eq!(nth, picks[source]);
                    picks[source] += 1;
                }
                for source in 0..weights.len() {
                    prop_assert_eq!(picks[source] - at_first[source], 3 * mixture.count(source));
                    let exact = weights[source] / sum * BLOCK as f64;
                    prop_assert!((mixture.count(source) as f64 - exact).abs() <= 1.0);
                }
            }
        }

        #[test]
        fn every_window_has_its_share(weights in prop::collection::vec(0.05f64..1.0, 2..6), seed: u64, at in 0usize..BLOCK) {
            let mixture = Mixture::new(&weights, seed);
            for source in 0..weights.len() {
                let share = mixture.count(source) as f64 / BLOCK as f64;
                for window in [16, 64, 256] {
                    let first = at.min(BLOCK - window) as u64;
                    let met = (first..first + window as u64).filter(|&i| mixture.at(i).0 == source).count();
                    prop_assert!((met as f64 - share * window as f64).abs() < 1.0 + weights.len() as f64);
                }
            }
        }
    }

    #[test]
    fn the_least_share_stands_in_every_block() {
        let mixture = Mixture::new(&[4095.0, 1.0], 7);
        assert_eq!((mixture.count(0), mixture.count(1)), (4095, 1));
        let many = Mixture::new(&[1.0; 256], 7);
        assert!((0..256).all(|source| many.count(source) == 16));
        assert_eq!(Mixture::new(&[0.3], 1).at(12_345), (0, 12_345));
    }
}

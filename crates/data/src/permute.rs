//! A seeded permutation of `0..n` that is computed at any place without a table.
//!
//! A balanced Feistel network permutes the smallest even power of two that holds `n`; indices that leave `0..n` are
//! walked on until they come back (Black, Rogaway: "Ciphers with arbitrary finite domains", 2002). The walk ends since
//! the cycle that leaves `0..n` also enters it.

use crate::random::{key, word};

/// With fewer, small domains show which permutations a network can reach.
const ROUNDS: usize = 8;

/// Half of the fewest bits permuted, so that tiny domains also reach every order.
const HALF_BITS_MIN: u32 = 4;

/// A bijection of `0..n`.
#[derive(Debug, Clone)]
pub(crate) struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` that `seed` names. `n` is at most 2^62.
    pub(crate) fn new(n: u64, seed: u64) -> Self {
        assert!(n <= 1 << 62, "a permutation of {n} indices");
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(HALF_BITS_MIN);
        Self { n, half_bits, keys: std::array::from_fn(|round| key(seed, &[round as u64])) }
    }

    /// Where `index` goes. `index` must be below `n`.
    pub(crate) fn at(&self, index: u64) -> u64 {
        assert!(index < self.n, "index {index} of a permutation of {} indices", self.n);
        let mut place = self.network(index);
        while place >= self.n {
            place = self.network(place);
        }
        place
    }

    fn network(&self, index: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (word(key, right) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn every_place_is_taken_once(n in 1u64..3000, seed: u64) {
            let permutation = Permutation::new(n, seed);
            let mut taken = vec![false; n as usize];
            for index in 0..n {
                let place = permutation.at(index);
                prop_assert!(place < n);
                prop_assert!(!std::mem::replace(&mut taken[place as usize], true), "place {place} twice");
            }
        }

        #[test]
        fn large_domains_are_injective_where_sampled(n in 1u64 << 20..1 << 62, seed: u64, start: u64) {
            let permutation = Permutation::new(n, seed);
            let mut places: Vec<u64> = (0..200).map(|i| permutation.at((start % n + i) % n)).collect();
            prop_assert!(places.iter().all(|&place| place < n));
            places.sort_unstable();
            places.dedup();
            prop_assert_eq!(places.len(), 200);
        }
    }

    #[test]
    fn all_orders_of_four_are_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..24_000 {
            let permutation = Permutation::new(4, seed);
            *counts.entry([0, 1, 2, 3].map(|index| permutation.at(index))).or_insert(0u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        // Chi-squared with 23 degrees of freedom: 58 is the 1 in 10,000 point.
        let chi: f64 = counts.values().map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 58.0, "chi-squared {chi}");
    }

    #[test]
    fn neighbours_part() {
        let permutation = Permutation::new(100_000, 7);
        let near = (1..100_000).filter(|&i| permutation.at(i).abs_diff(permutation.at(i - 1)) < 100).count();
        assert!((100..320).contains(&near), "{near} of 100,000 neighbours stay near; about 200 are expected");
        let fixed = (0..100_000).filter(|&i| permutation.at(i) == i).count();
        assert!(fixed < 10, "{fixed} fixed points; about 1 is expected");
    }
}

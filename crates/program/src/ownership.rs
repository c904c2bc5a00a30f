//! Who owns which part of a bucket's state over the data axis.
//!
//! A bucket on one rank is a flat vector: its (tensor, hosted tensor cell) slices in canonical
//! order. It is cut at state-chunk boundaries only, which are counted inside each slice, so that
//! hashes and norms of state chunks never straddle two owners. A bucket that is smaller than a
//! state chunk per member cannot be cut evenly: the next one makes up for it ([`Balance`]).

use std::ops::Range;

use spec::tensors::STATE_CHUNK;

/// Cuts one bucket after the other so that their sum over all is as even as boundaries allow.
#[derive(Debug, Clone)]
pub struct Balance {
    /// Elements owned so far, by member.
    owned: Vec<usize>,
}

impl Balance {
    /// Nobody owns anything.
    ///
    /// # Panics
    /// If `members` is 0.
    pub fn new(members: usize) -> Self {
        assert!(members > 0, "a group has at least one member");
        Self { owned: vec![0; members] }
    }

    /// The element ranges of the flat vector of `slice_lens` that each member owns.
    ///
    /// Contiguous and ascending, together the whole vector. The boundary before member `i` is
    /// the state-chunk boundary (the lower one of two equally near) nearest to the place where
    /// the members before it would own `i / members` of everything so far, this bucket included.
    pub fn cut(&mut self, slice_lens: &[usize]) -> Vec<Range<usize>> {
        let members = self.owned.len();
        let ends: Vec<usize> = slice_lens
            .iter()
            .scan(0, |end, len| {
                *end += len;
                Some(*end)
            })
            .collect();
        let total = ends.last().copied().unwrap_or(0);
        let everything = self.owned.iter().sum::<usize>() + total;
        let (mut before, mut start) = (0, 0);
        let mut parts = Vec::with_capacity(members);
        for i in 1..=members {
            before += self.owned[i - 1];
            // The target is a fraction: everything is compared multiplied by `members`.
            let target = everything as i128 * i as i128 - before as i128 * members as i128;
            let end = if i == members { total } else { nearest(target, members, slice_lens, &ends) };
            let end = end.max(start);
            parts.push(start..end);
            start = end;
        }
        self.count(&parts);
        parts
    }

    /// Counts a bucket that was cut elsewhere.
    pub fn count(&mut self, parts: &[Range<usize>]) {
        self.owned.iter_mut().zip(parts).for_each(|(owned, part)| *owned += part.len());
    }
}

/// The state-chunk boundary nearest to `target / members`.
fn nearest(target: i128, members: usize, slice_lens: &[usize], ends: &[usize]) -> usize {
    let total = ends.last().copied().unwrap_or(0);
    let floor = (target.max(0) / members as i128) as usize;
    if target <= 0 || floor >= total {
        return if target <= 0 { 0 } else { total };
    }
    let slice = ends.partition_point(|end| *end <= floor);
    let start = ends[slice] - slice_lens[slice];
    let low = start + (floor - start) / STATE_CHUNK * STATE_CHUNK;
    let high = (low + STATE_CHUNK).min(ends[slice]);
    let below = target - low as i128 * members as i128;
    let above = high as i128 * members as i128 - target;
    if below <= above { low } else { high }
}

/// The parts of a single vector.
///
/// # Panics
/// If `members` is 0.
pub fn owners(slice_lens: &[usize], members: usize) -> Vec<Range<usize>> {
    Balance::new(members).cut(slice_lens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every state-chunk boundary, written out.
    fn boundaries(slice_lens: &[usize]) -> Vec<usize> {
        let mut all = vec![0];
        let mut start = 0;
        for len in slice_lens {
            all.extend((1..len.div_ceil(STATE_CHUNK)).map(|k| start + k * STATE_CHUNK));
            start += len;
            all.push(start);
        }
        all.dedup();
        all
    }

    #[test]
    fn even_chunks_split_evenly() {
        let got = owners(&[4 * STATE_CHUNK], 4);
        assert_eq!(got, (0..4).map(|i| i * STATE_CHUNK..(i + 1) * STATE_CHUNK).collect::<Vec<_>>());
        assert_eq!(owners(&[10], 3), [0..0, 0..10, 10..10]);
        assert_eq!(owners(&[], 2), [0..0, 0..0]);
    }

    #[test]
    fn small_buckets_go_round() {
        let mut balance = Balance::new(3);
        let of = |parts: Vec<Range<usize>>| parts.iter().position(|part| !part.is_empty()).unwrap();
        let mut owners: Vec<usize> = (0..6).map(|_| of(balance.cut(&[10]))).collect();
        assert_eq!(balance.owned, [20, 20, 20]);
        owners[..3].sort_unstable();
        assert_eq!(owners[..3], [0, 1, 2]);
    }

    proptest! {
        /// The law: a partition at the nearest boundaries.
        #[test]
        fn nearest_boundaries(
            lens in proptest::collection::vec(prop_oneof![0usize..50, 0usize..(5 * STATE_CHUNK)], 0..8),
            members in 1usize..9,
        ) {
            let all = boundaries(&lens);
            let total: usize = lens.iter().sum();
            let got = owners(&lens, members);
            prop_assert_eq!(got.len(), members);
            let mut at = 0;
            for (i, part) in got.iter().enumerate() {
                let near = |b: &usize| (*b as i128 * members as i128 - total as i128 * i as i128).abs();
                let want = all.iter().min_by_key(|b| near(b)).copied().unwrap_or(0);
                prop_assert_eq!(part.start, want);
                prop_assert_eq!(part.start, at);
                prop_assert!(part.end >= part.start);
                at = part.end;
            }
            prop_assert_eq!(at, total);
        }

        /// However many buckets: a partition of each, and nobody is further off than a state chunk.
        #[test]
        fn many_buckets_stay_even(
            buckets in proptest::collection::vec(proptest::collection::vec(1usize..(3 * STATE_CHUNK), 1..5), 1..20),
            members in 1usize..6,
        ) {
            let mut balance = Balance::new(members);
            for lens in &buckets {
                let parts = balance.cut(lens);
                let all = boundaries(lens);
                let mut at = 0;
                for part in &parts {
                    prop_assert_eq!(part.start, at);
                    prop_assert!(all.contains(&part.start), "{part:?}");
                    at = part.end;
                }
                prop_assert_eq!(at, lens.iter().sum::<usize>());
            }
            let total: usize = buckets.iter().flatten().sum();
            for owned in &balance.owned {
                let off = (*owned as i128 * members as i128 - total as i128).unsigned_abs() / members as u128;
                prop_assert!(off <= 2 * STATE_CHUNK as u128, "{:?}", balance.owned);
            }
        }
    }
}

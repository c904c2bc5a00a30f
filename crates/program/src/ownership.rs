//! Who owns which part of a chunk's state over the data axis.
//!
//! The state of a chunk on one rank is a flat vector: its (tensor, hosted tensor cell)
//! slices in canonical order. It is cut at state-chunk boundaries only, which are counted
//! inside each slice, so that hashes and norms of state chunks never straddle two owners.

use std::ops::Range;

use spec::tensors::STATE_CHUNK;

/// The element ranges of the flat vector of `slice_lens` that each of `members` owns.
///
/// Contiguous and ascending, together the whole vector. The boundary before member `i` is
/// the state-chunk boundary nearest to `total x i / members`, the lower one of two equally
/// near; members beyond the number of state chunks own nothing.
///
/// # Panics
/// If `members` is 0.
pub fn owners(slice_lens: &[usize], members: usize) -> Vec<Range<usize>> {
    assert!(members > 0, "a group has at least one member");
    let ends: Vec<usize> = slice_lens
        .iter()
        .scan(0, |end, len| {
            *end += len;
            Some(*end)
        })
        .collect();
    let total = ends.last().copied().unwrap_or(0);
    let boundary = |i: usize| {
        // The target is a fraction: compare everything multiplied by `members`.
        let target = total as u128 * i as u128;
        let floor = (target / members as u128) as usize;
        if floor >= total {
            return total;
        }
        let slice = ends.partition_point(|end| *end <= floor);
        let start = ends[slice] - slice_lens[slice];
        let low = start + (floor - start) / STATE_CHUNK * STATE_CHUNK;
        let high = (low + STATE_CHUNK).min(ends[slice]);
        let below = target - low as u128 * members as u128;
        let above = high as u128 * members as u128 - target;
        if below <= above { low } else { high }
    };
    (0..members).map(|i| boundary(i)..boundary(i + 1)).collect()
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
    }
}

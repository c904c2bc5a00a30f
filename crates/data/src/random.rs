//! Counter-based randomness: a word is a pure function of (key, counter), on every machine.
//!
//! The generator is SplitMix64 read at any place (Steele, Lea, Flood: "Fast splittable pseudorandom number
//! generators", 2014; finalizer: Stafford's variant 13).

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection of 64-bit words that spreads every bit.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A key for one purpose out of a seed and what tells the purpose apart, in order.
pub(crate) fn key(seed: u64, parts: &[u64]) -> u64 {
    parts.iter().fold(mix(seed ^ GAMMA), |key, &part| word(key, part))
}

/// Word `counter` of the stream `key`.
pub(crate) fn word(key: u64, counter: u64) -> u64 {
    mix(key.wrapping_add(GAMMA.wrapping_mul(counter.wrapping_add(1))))
}

/// A number in `0..n` out of `word`; the bias is below n / 2^64. `n` must not be 0.
pub(crate) fn below(word: u64, n: u64) -> u64 {
    ((u128::from(word) * u128::from(n)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_splitmix64() {
        // The published stream of seed 0.
        let published = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f, 0xf88b_b8a8_724c_81ec];
        assert_eq!([0, 1, 2, 3].map(|counter| word(0, counter)), published);
    }

    #[test]
    fn keys_tell_seeds_parts_and_their_order_apart() {
        let keys =
            [key(1, &[]), key(2, &[]), key(1, &[0]), key(1, &[1]), key(1, &[1, 2]), key(1, &[2, 1]), key(1, &[0, 0])];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b), "{keys:x?}");
        }
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let mut counts = [0u32; 7];
        for counter in 0..70_000 {
            counts[below(word(3, counter), 7) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| (9_600..10_400).contains(&count)), "{counts:?}");
        assert_eq!((below(0, 7), below(u64::MAX, 7)), (0, 6));
    }
}

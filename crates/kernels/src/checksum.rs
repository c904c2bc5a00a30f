//! A checksum of numbers at rest: as fast as memory is read, and blind to no change of a single word.

use crate::ctx::Ctx;
use crate::simd::by_level;

/// Places of a block that are read side by side: one alone leaves memory waiting.
const STREAMS: usize = 4;
const LANES: usize = 16;
/// An odd factor.
const FACTOR: u32 = 0x9e37_79b1;
const FACTOR64: u64 = 0x9e37_79b9_7f4a_7c15;

by_level! {
    /// Every lane takes in its words one by one, and the result takes in the lanes. Each step is a bijection of what was
    /// there and of the word, so one changed word always changes the result; several do but for a chance of about 2^-32.
    pub(crate) fn sum(x: &[f32]) -> u64 {
        let part = x.len() / (STREAMS * LANES) * LANES;
        let mut lanes = [[0u32; LANES]; STREAMS];
        for (i, lane) in lanes.as_flattened_mut().iter_mut().enumerate() {
            *lane = FACTOR ^ i as u32;
        }
        let (streams, tail) = x.split_at(part * STREAMS);
        let steps = part / LANES;
        let (words, _) = streams.as_chunks::<LANES>();
        let streams: [_; STREAMS] = std::array::from_fn(|s| &words[s * steps..(s + 1) * steps]);
        for i in 0..steps {
            for (lanes, words) in lanes.iter_mut().zip(&streams) {
                for (lane, word) in lanes.iter_mut().zip(&words[i]) {
                    *lane = taken(*lane, *word);
                }
            }
        }
        let lanes = lanes.as_flattened_mut();
        for (i, word) in tail.iter().enumerate() {
            let lane = &mut lanes[i];
            *lane = taken(*lane, *word);
        }
        lanes.iter().fold(x.len() as u64, |h, lane| (h ^ u64::from(*lane)).rotate_left(29).wrapping_mul(FACTOR64))
    }
}

/// What a lane is after a word. The shift mixes the highest bit down, which a product alone would leave where it is.
#[inline(always)]
fn taken(lane: u32, word: f32) -> u32 {
    let h = (lane ^ word.to_bits()).wrapping_mul(FACTOR);
    h ^ (h >> 15)
}

/// A checksum of the bits of `x`. It means something only beside another one of the same program.
pub fn checksum(ctx: &Ctx, x: &[f32]) -> u64 {
    sum(ctx.level(), x)
}

#[cfg(test)]
mod tests {
    use crate::{Ctx, Simd, checksum};

    #[test]
    fn every_flipped_bit_is_seen_on_every_path() {
        for n in [0, 1, 16, 63, 64, 65, 200, 1024] {
            let mut x: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
            let sums: Vec<u64> = Simd::available().map(|s| checksum(&Ctx::new(s, 1), &x)).collect();
            assert!(sums.iter().all(|s| *s == sums[0]), "{n} words: {sums:x?}");
            let ctx = Ctx::new(Simd::detect(), 1);
            let mut seen = std::collections::BTreeSet::from([sums[0]]);
            for i in 0..n {
                for bit in 0..32 {
                    x[i] = f32::from_bits(x[i].to_bits() ^ (1 << bit));
                    assert!(seen.insert(checksum(&ctx, &x)), "bit {bit} of word {i} of {n}");
                    x[i] = f32::from_bits(x[i].to_bits() ^ (1 << bit));
                }
            }
        }
    }

    #[test]
    fn order_and_length_count() {
        let ctx = Ctx::new(Simd::detect(), 1);
        let x: Vec<f32> = (0..500).map(|i| i as f32).collect();
        let turned: Vec<f32> = x.iter().rev().copied().collect();
        let zeros = vec![0.0; 501];
        assert_ne!(checksum(&ctx, &x), checksum(&ctx, &turned));
        assert_ne!(checksum(&ctx, &zeros[..500]), checksum(&ctx, &zeros));
        // Both in the same lane and bit, where they would cancel in a plain sum.
        let mut two = x.clone();
        for i in [0, 16] {
            two[i] = -two[i];
        }
        assert_ne!(checksum(&ctx, &x), checksum(&ctx, &two));
    }
}

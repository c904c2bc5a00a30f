//! Counter-based random numbers: element i of a stream is a function of (seed, stream, i).

use crate::ctx::{Ctx, Rows};
use crate::math::{cos64, ln64};
use crate::simd::by_level;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants of Stafford's mix 13).
#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Two keys of a stream.
#[inline(always)]
fn keys(seed: u64, stream: u64) -> (u64, u64) {
    let a = mix(mix(seed.wrapping_add(GOLDEN)) ^ stream.wrapping_mul(GOLDEN).wrapping_add(1));
    // Hashed twice: `number` is 0 where mix(index GOLDEN + a) meets the second key, and no small index may do that.
    (a, mix(mix(!a)))
}

/// Two rounds, so that two streams are not shifts of one sequence.
#[inline(always)]
fn number((a, b): (u64, u64), index: u64) -> u64 {
    mix(mix(index.wrapping_mul(GOLDEN).wrapping_add(a)) ^ b)
}

/// Uniform 64 bits: element `index` of stream `stream`.
pub fn uniform_u64(seed: u64, stream: u64, index: u64) -> u64 {
    number(keys(seed, stream), index)
}

/// Normal numbers of deviation `std`: `out[i]` is element `start + i` of the stream.
///
/// Box and Muller in f64: sqrt(-2 ln u) cos(2 pi v), u and v from the two halves of [`uniform_u64`].
pub fn fill_normal(ctx: &Ctx, seed: u64, stream: u64, start: u64, std: f32, out: &mut [f32]) {
    ctx.split_rows(out.len(), 16, Rows(out, 1), |r, out| {
        normal(ctx.level(), keys(seed, stream), start.wrapping_add(r.start as u64), std, out.0);
    });
}

by_level! {
    fn normal(keys: (u64, u64), start: u64, std: f32, out: &mut [f32]) {
        const UNIT: f64 = 1.0 / 4_294_967_296.0;
        for (i, out) in out.iter_mut().enumerate() {
            let bits = number(keys, start.wrapping_add(i as u64));
            // Never 0, never 1.
            let u = ((bits >> 32) as f64 + 0.5) * UNIT;
            let v = (bits as u32) as f64 * UNIT;
            *out = ((-2.0 * ln64(u)).sqrt() * cos64(v * std::f64::consts::TAU) * std as f64) as f32;
        }
    }
}

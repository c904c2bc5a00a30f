//! Our own elementary functions: fixed polynomials in fused multiply-add, so that the bits do not depend on a platform's
//! libm. All are branch-free and inlined, so that loops over them vectorise.

use std::f64::consts::{FRAC_PI_2, LN_2, LOG2_E};

/// ln 2 as a short head (9 bits, so that n * head is exact) and a tail.
const LN2_HEAD: f32 = 0.693_359_4;
const LN2_TAIL: f32 = -2.121_944_4e-4;
/// Adding this rounds a small float to an integer in the low bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
const ROUND64: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
const LN2_TAIL64: f64 = 2.319_046_813_846_299_6e-17;

/// e^x, within 1 ulp or so; 0 below -87 (no subnormal results: they are slow and of no use here); NaN stays NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder below 6e-9).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons that keep NaN.
    let vanishes = x < -87.0;
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if vanishes { 0.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let p = exp_fraction(x, shifted - ROUND);
    // 2^n in two factors: 2^128 is out of range.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let y = p * power_of_two(half) * power_of_two(n.wrapping_sub(half));
    if vanishes { 0.0 } else { y }
}

/// [`exp`] for x <= 80, the same bits with fewer operations: no clamp above, and 2^n in one factor, which is normal there.
#[inline(always)]
pub(crate) fn exp_low(x: f32) -> f32 {
    let vanishes = x < -87.0;
    let x = if vanishes { 0.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let y = exp_fraction(x, n) * power_of_two(shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32);
    if vanishes { 0.0 } else { y }
}

/// e^(x - n ln 2).
#[inline(always)]
fn exp_fraction(x: f32, n: f32) -> f32 {
    let r = n.mul_add(-LN2_HEAD, x);
    let r = n.mul_add(-LN2_TAIL, r);
    let p = (1.0f32 / 5040.0).mul_add(r, 1.0 / 720.0);
    let p = p.mul_add(r, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    p.mul_add(r * r, r) + 1.0
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
fn power_of_two64(n: i64) -> f64 {
    f64::from_bits((n.wrapping_add(1023) as u64) << 52)
}

/// Natural logarithm: [`ln64`] rounded.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    ln64(x as f64) as f32
}

/// e^x in f64; Taylor polynomial of degree 13 (remainder below 1e-17).
#[inline(always)]
pub fn exp64(x: f64) -> f64 {
    let x = if x > 710.0 { 710.0 } else { x };
    let x = if x < -746.0 { -746.0 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND64);
    let n = shifted - ROUND64;
    let r = n.mul_add(-LN_2, x);
    let r = n.mul_add(-LN2_TAIL64, r);
    // 1 / k! for k = 13 down to 2.
    const C: [f64; 12] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
    ];
    let p = horner(&C, r).mul_add(r * r, r) + 1.0;
    let n = shifted.to_bits().wrapping_sub(ROUND64.to_bits()) as i64;
    let half = n >> 1;
    p * power_of_two64(half) * power_of_two64(n.wrapping_sub(half))
}

#[inline(always)]
fn horner<const N: usize>(c: &[f64; N], x: f64) -> f64 {
    let mut p = c[0];
    for c in &c[1..] {
        p = p.mul_add(x, *c);
    }
    p
}

/// Natural logarithm in f64: -inf at 0, NaN below.
///
/// x = m 2^n with m in [sqrt 1/2, sqrt 2); ln m = 2 atanh s, s = (m - 1) / (m + 1), by its series to s^21.
#[inline(always)]
pub fn ln64(x: f64) -> f64 {
    let tiny = x < f64::MIN_POSITIVE;
    let y = if tiny { x * 18_014_398_509_481_984.0 } else { x };
    // Offset that carries into the exponent exactly when the mantissa passes sqrt 2.
    const HALF_ROOT: u64 = 0x3fe6_a09e_667f_3bcd;
    let bits = y.to_bits().wrapping_sub(HALF_ROOT);
    let n = (bits as i64) >> 52;
    let m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff).wrapping_add(HALF_ROOT));
    let n = n as i32 as f64 - if tiny { 54.0 } else { 0.0 };
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    const C: [f64; 10] = [
        2.0 / 21.0,
        2.0 / 19.0,
        2.0 / 17.0,
        2.0 / 15.0,
        2.0 / 13.0,
        2.0 / 11.0,
        2.0 / 9.0,
        2.0 / 7.0,
        2.0 / 5.0,
        2.0 / 3.0,
    ];
    let series = horner(&C, z) * (z * s);
    let ln_m = s.mul_add(2.0, series);
    let result = n.mul_add(LN_2, n.mul_add(LN2_TAIL64, ln_m));
    let result = if x == 0.0 { f64::NEG_INFINITY } else { result };
    let result = if x < 0.0 { f64::NAN } else { result };
    // Infinity and NaN pass through.
    if x < f64::INFINITY { result } else { x }
}

/// (sin x, cos x) in f64, for |x| up to about 2^30.
///
/// x = n pi/2 + r with |r| <= pi/4, pi/2 in three parts; Taylor polynomials to r^17 and r^16.
#[inline(always)]
pub fn sin_cos64(x: f64) -> (f64, f64) {
    const PI_2: [f64; 3] = [FRAC_PI_2, 6.123_233_995_736_766e-17, -1.497_384_904_859_169_8e-33];
    let shifted = x.mul_add(std::f64::consts::FRAC_2_PI, ROUND64);
    let n = shifted - ROUND64;
    let quadrant = shifted.to_bits();
    let r = n.mul_add(-PI_2[0], x);
    let r = n.mul_add(-PI_2[1], r);
    let r = n.mul_add(-PI_2[2], r);
    // (-1)^k / (2k + 1)! and (-1)^k / (2k)!, highest first.
    const S: [f64; 8] = [
        1.0 / 355_687_428_096_000.0,
        -1.0 / 1_307_674_368_000.0,
        1.0 / 6_227_020_800.0,
        -1.0 / 39_916_800.0,
        1.0 / 362_880.0,
        -1.0 / 5_040.0,
        1.0 / 120.0,
        -1.0 / 6.0,
    ];
    const C: [f64; 8] = [
        1.0 / 20_922_789_888_000.0,
        -1.0 / 87_178_291_200.0,
        1.0 / 479_001_600.0,
        -1.0 / 3_628_800.0,
        1.0 / 40_320.0,
        -1.0 / 720.0,
        1.0 / 24.0,
        -0.5,
    ];
    let z = r * r;
    let sin = (horner(&S, z) * z).mul_add(r, r);
    let cos = horner(&C, z).mul_add(z, 1.0);
    let (a, b) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let sin = if quadrant & 2 == 0 { a } else { -a };
    let cos = if quadrant.wrapping_add(1) & 2 == 0 { b } else { -b };
    (sin, cos)
}

/// sin x in f64, for |x| up to about 2^30.
#[inline(always)]
pub fn sin64(x: f64) -> f64 {
    sin_cos64(x).0
}

/// cos x in f64, for |x| up to about 2^30.
#[inline(always)]
pub fn cos64(x: f64) -> f64 {
    sin_cos64(x).1
}

/// x^y in f64 for x > 0.
#[inline(always)]
pub fn pow64(x: f64, y: f64) -> f64 {
    exp64(y * ln64(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, Simd, by_level};

    /// Distance in units of the last place of the expected value.
    fn ulps64(found: f64, expected: f64) -> f64 {
        if found == expected || (found.is_nan() && expected.is_nan()) {
            return 0.0;
        }
        let place = f64::from_bits(expected.abs().to_bits() + 1) - expected.abs();
        (found - expected).abs() / place
    }

    fn ulps(found: f32, expected: f64) -> f64 {
        let rounded = expected as f32;
        if found == rounded || (found.is_nan() && rounded.is_nan()) {
            return 0.0;
        }
        let place = f32::from_bits(rounded.abs().to_bits() + 1) - rounded.abs();
        (found as f64 - expected).abs() / place as f64
    }

    /// Floats of every sign and exponent, infinities and NaN among them.
    fn every_float() -> Vec<f32> {
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 88.72, 88.73, -87.0, -87.01];
        (0..u32::MAX / 1009).map(|i| f32::from_bits(i * 1009)).chain(special).collect()
    }

    by_level! {
        fn exp_all(x: &[f32], y: &mut [f32]) {
            x.iter().zip(y).for_each(|(x, y)| *y = exp(*x));
        }
    }
    by_level! {
        fn ln_all(x: &[f32], y: &mut [f32]) {
            x.iter().zip(y).for_each(|(x, y)| *y = ln(*x));
        }
    }
    by_level! {
        fn wide_all(x: &[f64], y: &mut [[f64; 4]]) {
            for (x, y) in x.iter().zip(y) {
                let (sin, cos) = sin_cos64(*x);
                *y = [exp64(*x), ln64(*x), sin, cos];
            }
        }
    }

    fn canonical(x: f32) -> u32 {
        if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
    }

    #[test]
    fn floats_are_accurate_and_equal_on_all_paths() {
        let x = every_float();
        // This function is compiled without any instruction set: fused multiply-add in software.
        let (plain_exp, plain_ln): (Vec<f32>, Vec<f32>) = x.iter().map(|&x| (exp(x), ln(x))).unzip();
        for (i, &x) in x.iter().enumerate() {
            let exact = (x as f64).exp();
            let found = plain_exp[i];
            if x <= 80.0 || x.is_nan() {
                assert_eq!(canonical(exp_low(x)), canonical(found), "exp_low({x})");
            }
            if x < -87.0 {
                assert_eq!(found.to_bits(), 0, "exp({x})");
            } else {
                assert!(ulps(found, exact) < 1.1, "exp({x:e}) = {found:e}, not {exact:e}");
            }
            let exact = (x as f64).ln();
            assert!(ulps(plain_ln[i], exact) < 0.51, "ln({x:e}) = {:e}, not {exact:e}", plain_ln[i]);
        }
        let mut y = vec![0.0; x.len()];
        for simd in Simd::available() {
            let level = Level::new(simd).expect("available");
            exp_all(level, &x, &mut y);
            assert!((0..x.len()).all(|i| canonical(y[i]) == canonical(plain_exp[i])), "exp on {simd}");
            ln_all(level, &x, &mut y);
            assert!((0..x.len()).all(|i| canonical(y[i]) == canonical(plain_ln[i])), "ln on {simd}");
        }
    }

    #[test]
    fn doubles_are_accurate_and_equal_on_all_paths() {
        // Angles and exponents from 2^-40 to 2^20.
        let x: Vec<f64> = (0..400_000)
            .map(|i: u64| {
                f64::from_bits(((983 + i * 60 / 400_000) << 52) + (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 12))
            })
            .flat_map(|x| [x, -x])
            .collect();
        let value = |x: f64| {
            let (sin, cos) = sin_cos64(x);
            [exp64(x), ln64(x), sin, cos]
        };
        let plain: Vec<_> = x.iter().map(|&x| value(x)).collect();
        for (&x, found) in x.iter().zip(&plain) {
            let exact = [x.exp(), x.ln(), x.sin(), x.cos()];
            for (what, (found, exact)) in ["exp", "ln", "sin", "cos"].iter().zip(found.iter().zip(exact)) {
                assert!(ulps64(*found, exact) <= 2.0, "{what}({x:e}) = {found:e}, not {exact:e}");
            }
        }
        let mut y = vec![[0.0; 4]; x.len()];
        for simd in Simd::available() {
            wide_all(Level::new(simd).expect("available"), &x, &mut y);
            let bits = |y: &[f64; 4]| y.map(|y| if y.is_nan() { 0 } else { y.to_bits() });
            assert!(y.iter().zip(&plain).all(|(y, p)| bits(y) == bits(p)), "on {simd}");
        }
    }

    #[test]
    fn edges() {
        assert_eq!(ln64(0.0), f64::NEG_INFINITY);
        assert_eq!(ln64(f64::INFINITY), f64::INFINITY);
        assert!(ln64(-1.0).is_nan() && ln64(f64::NAN).is_nan() && exp64(f64::NAN).is_nan());
        assert!(ulps64(ln64(5e-324), 5e-324f64.ln()) < 2.0);
        assert_eq!((exp64(800.0), exp64(-800.0)), (f64::INFINITY, 0.0));
        assert_eq!(sin_cos64(0.0), (0.0, 1.0));
        assert!((pow64(1e6, -0.5) - 1e-3).abs() < 1e-17);
    }
}

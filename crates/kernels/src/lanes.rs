//! Sums of one row in a fixed shape: element i goes to lane i mod 16, ascending; the lanes are added in one tree.

use crate::simd::Level;
#[cfg(target_arch = "x86_64")]
use crate::simd::Path;

/// Lanes of a row sum.
pub(crate) const LANES: usize = 16;

/// Adds the lanes by halves.
// Out of line: inlined, it makes the compiler keep the lanes in scalars.
#[inline(never)]
pub(crate) fn tree(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds the lanes by halves.
#[inline(always)]
pub(crate) fn tree64(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// [`tree`] of each of `lanes`, into `out`.
pub(crate) fn trees(level: Level, lanes: &[[f32; LANES]], out: &mut [f32]) {
    folded::<true>(level, lanes, out);
}

/// The largest lane of each.
pub(crate) fn largests(level: Level, lanes: &[[f32; LANES]], out: &mut [f32]) {
    folded::<false>(level, lanes, out);
}

fn folded<const SUM: bool>(level: Level, lanes: &[[f32; LANES]], out: &mut [f32]) {
    let done = folded_by_16::<SUM>(level, lanes, out);
    for (lanes, out) in lanes.iter().zip(out).skip(done) {
        *out = if SUM { tree(lanes) } else { largest(lanes) };
    }
}

/// As many of the first rows as vectors take; answers how many.
fn folded_by_16<const SUM: bool>(level: Level, lanes: &[[f32; LANES]], out: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if level.path() == Path::Avx512 {
        let (rows, outs) = (lanes.as_chunks::<16>().0, out.as_chunks_mut::<16>().0);
        for (rows, out) in rows.iter().zip(outs) {
            // SAFETY: a `Level` exists only for a path that the CPU has.
            *out = unsafe { x86::folded::<SUM>(rows) };
        }
        return lanes.len().min(out.len()) / 16 * 16;
    }
    let _ = (level, lanes, out);
    0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::LANES;
    use std::arch::x86_64::*;

    /// [`super::tree`] or [`super::largest`] of 16 rows: at each level the halves of two vectors in one operation.
    #[target_feature(enable = "avx512f")]
    pub(super) fn folded<const SUM: bool>(rows: &[[f32; LANES]; 16]) -> [f32; 16] {
        let mut fours = [_mm512_setzero_ps(); 4];
        for (i, four) in fours.iter_mut().enumerate() {
            // These rows, so that the last level leaves all in order.
            let (a, b, c, d) = (load(&rows[i]), load(&rows[i + 4]), load(&rows[i + 8]), load(&rows[i + 12]));
            let ab = pair::<SUM>(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let cd = pair::<SUM>(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            *four = pair::<SUM>(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
        }
        let [a, b, c, d] = fours;
        let ab = pair::<SUM>(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
        let cd = pair::<SUM>(_mm512_shuffle_ps::<0x44>(c, d), _mm512_shuffle_ps::<0xee>(c, d));
        let mut all = pair::<SUM>(_mm512_shuffle_ps::<0x88>(ab, cd), _mm512_shuffle_ps::<0xdd>(ab, cd));
        if !SUM {
            all = _mm512_add_ps(all, _mm512_setzero_ps());
        }
        let mut out = [0.0; 16];
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), all) };
        out
    }

    #[target_feature(enable = "avx512f")]
    fn load(row: &[f32; LANES]) -> __m512 {
        // SAFETY: 16 floats.
        unsafe { _mm512_loadu_ps(row.as_ptr()) }
    }

    /// What becomes of the lower halves and the upper ones.
    #[target_feature(enable = "avx512f")]
    fn pair<const SUM: bool>(low: __m512, high: __m512) -> __m512 {
        if SUM { _mm512_add_ps(low, high) } else { _mm512_max_ps(high, low) }
    }
}

/// Sum of x * y.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    tree(&dot_lanes(x, y))
}

/// The lanes of the sum of x * y.
#[inline(always)]
pub(crate) fn dot_lanes(x: &[f32], y: &[f32]) -> [f32; LANES] {
    let mut acc = [0.0f32; LANES];
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (y_chunks, y_tail) = y.as_chunks::<LANES>();
    for (a, b) in x_chunks.iter().zip(y_chunks) {
        for l in 0..LANES {
            acc[l] = a[l].mul_add(b[l], acc[l]);
        }
    }
    for (l, (a, b)) in x_tail.iter().zip(y_tail).enumerate() {
        acc[l] = a.mul_add(*b, acc[l]);
    }
    acc
}

/// Sum of (x * w) * y.
#[inline(always)]
pub(crate) fn dot3(x: &[f32], w: &[f32], y: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (w_chunks, w_tail) = w.as_chunks::<LANES>();
    let (y_chunks, y_tail) = y.as_chunks::<LANES>();
    for ((a, c), b) in x_chunks.iter().zip(w_chunks).zip(y_chunks) {
        for l in 0..LANES {
            acc[l] = (a[l] * c[l]).mul_add(b[l], acc[l]);
        }
    }
    for (l, ((a, c), b)) in x_tail.iter().zip(w_tail).zip(y_tail).enumerate() {
        acc[l] = (a * c).mul_add(*b, acc[l]);
    }
    tree(&acc)
}

/// Sum of x.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for a in chunks {
        for l in 0..LANES {
            acc[l] += a[l];
        }
    }
    for (l, a) in tail.iter().enumerate() {
        acc[l] += a;
    }
    tree(&acc)
}

/// The larger one; a NaN in `a` loses, so that NaN shows up in the sum and not in the maximum.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The largest lane. Out of line as [`tree`].
#[inline(never)]
fn largest(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = larger(lanes[i + half], lanes[i]);
        }
        half /= 2;
    }
    // One sign of zero, whatever the order met.
    lanes[0] + 0.0
}

/// Largest element; -inf for an empty row. Exact, so that the shape only serves speed.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for a in chunks {
        for l in 0..LANES {
            acc[l] = larger(a[l], acc[l]);
        }
    }
    for (l, a) in tail.iter().enumerate() {
        acc[l] = larger(*a, acc[l]);
    }
    largest(&acc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Simd;

    #[test]
    fn many_rows_at_once_are_each_row_alone() {
        let lanes: Vec<[f32; LANES]> = (0..64)
            .map(|r| std::array::from_fn(|l| ((r * 31 + l * 17) % 97) as f32 * 0.37 - 17.0))
            .chain([[-0.0; LANES], [f32::NEG_INFINITY; LANES]])
            .collect();
        for level in Simd::available().map(|simd| Level::new(simd).expect("available")) {
            for rows in [0, 1, 15, 16, 50, 66] {
                let (mut sums, mut tops) = (vec![0.0; rows], vec![0.0; rows]);
                trees(level, &lanes[66 - rows..], &mut sums);
                largests(level, &lanes[66 - rows..], &mut tops);
                for (i, lanes) in lanes[66 - rows..].iter().enumerate() {
                    assert_eq!(sums[i].to_bits(), tree(lanes).to_bits(), "sum of row {i} of {rows} by {level:?}");
                    assert_eq!(
                        tops[i].to_bits(),
                        largest(lanes).to_bits(),
                        "largest of row {i} of {rows} by {level:?}"
                    );
                }
            }
        }
    }
}

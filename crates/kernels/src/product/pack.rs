//! Packing: strips of a matrix, inner index first, so that the tile loop reads in order.

use crate::mat::Mat;
use crate::simd::{Level, by_level};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

#[derive(Default)]
/// Reusable scratch, aligned to cache lines; grows, never shrinks.
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    pub(crate) const fn new() -> Self {
        Buffer(Vec::new())
    }

    /// The first `len` floats, contents unspecified.
    pub(crate) fn take(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is 16 floats without padding, and the lines are initialised.
        let all = unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<f32>(), self.0.len() * 16) };
        &mut all[..len]
    }
}

/// Packs the rows of `m` (rows x k) in strips of `width` rows: `out[strip][k][row]`.
///
/// The rows that a last strip lacks hold anything: their results are thrown away.
pub(super) fn pack(level: Level, m: Mat, width: usize, out: &mut [f32]) {
    for (r, out) in (0..m.rows).step_by(width).zip(out.chunks_exact_mut(m.cols * width)) {
        let part = m.rows_range(r..m.rows.min(r + width));
        match width {
            6 => strip::<6>(level, part, out),
            14 => strip::<14>(level, part, out),
            16 => strip::<16>(level, part, out),
            _ => strip::<32>(level, part, out),
        }
    }
}

/// One strip: at most W rows.
fn strip<const W: usize>(level: Level, m: Mat, out: &mut [f32]) {
    if m.cs == 1 {
        // Rows in memory become columns: a transpose.
        let done = transpose::<W>(level, m, out);
        let rows: [&[f32]; W] = std::array::from_fn(|i| &m.data[i.min(m.rows - 1) * m.rs..][..m.cols]);
        for (k, out) in out.as_chunks_mut::<W>().0.iter_mut().enumerate().skip(done) {
            *out = std::array::from_fn(|i| rows[i][k]);
        }
    } else if m.rs == 1 {
        copy(level, m, W, out);
    } else {
        for (k, out) in out.as_chunks_mut::<W>().0.iter_mut().enumerate() {
            for (i, out) in out[..m.rows].iter_mut().enumerate() {
                *out = m.data[i * m.rs + k * m.cs];
            }
        }
    }
}

by_level! {
    /// A strip whose rows are neighbours in memory.
    fn copy(m: Mat<'_>, width: usize, out: &mut [f32]) {
        match width {
            6 => copy_body::<6>(m, out),
            14 => copy_body::<14>(m, out),
            16 => copy_body::<16>(m, out),
            _ => copy_body::<32>(m, out),
        }
    }
}

#[inline(always)]
fn copy_body<const W: usize>(m: Mat, out: &mut [f32]) {
    // What lies behind a short strip is as good as any, where there is something.
    let whole = match m.data.len().checked_sub(W) {
        Some(last) => (last / m.cs.max(1) + 1).min(m.cols),
        None => 0,
    };
    let (head, tail) = out.as_chunks_mut::<W>().0.split_at_mut(whole);
    for (k, out) in head.iter_mut().enumerate() {
        out.copy_from_slice(&m.data[k * m.cs..][..W]);
    }
    for (k, out) in tail.iter_mut().enumerate() {
        for (i, out) in out[..m.rows].iter_mut().enumerate() {
            *out = m.data[(whole + k) * m.cs + i];
        }
    }
}

/// Transposes the first columns of a strip with vectors; answers how many.
fn transpose<const W: usize>(level: Level, m: Mat, out: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if level.has_avx2() && m.cols >= 8 {
        m.check();
        assert!(m.cs == 1 && m.rows > 0 && out.len() >= m.cols * W);
        // A store of 8 floats passes the end of a narrow strip's row, into the next one, hence never from the last.
        let columns = if W < 8 { (m.cols - 1) / 8 * 8 } else { m.cols / 8 * 8 };
        // SAFETY: rows are clamped to those of m and columns <= m.cols, both checked; stores stay in the strip, see
        // above; the CPU has the path.
        unsafe { x86::transpose::<W>(m.data.as_ptr(), m.rs, m.rows, columns, out.as_mut_ptr()) };
        return columns;
    }
    let _ = (level, m, out);
    0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// `out[k * W + i] = m[i * rs + k]` for k < columns (a multiple of 8), i < W; rows beyond `rows` repeat the last.
    ///
    /// # Safety
    /// m has `rows` > 0 rows of `columns` floats; out has columns * W floats, and a further W where W < 8; the CPU has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose<const W: usize>(
        m: *const f32,
        rs: usize,
        rows: usize,
        columns: usize,
        out: *mut f32,
    ) {
        for k in (0..columns).step_by(8) {
            // The last group of 14 rows starts at row 6: it repeats two.
            for group in 0..W.div_ceil(8) {
                let first = if W < 8 { 0 } else { (group * 8).min(W - 8) };
                let mut r = [_mm256_setzero_ps(); 8];
                for (i, r) in r.iter_mut().enumerate() {
                    // SAFETY: the caller's promise.
                    *r = unsafe { _mm256_loadu_ps(m.add((first + i).min(rows - 1) * rs + k)) };
                }
                for (i, r) in transpose_8x8(r).into_iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { _mm256_storeu_ps(out.add((k + i) * W + first), r) };
                }
            }
        }
    }

    // Loops and no closures: code inside of a closure would not be compiled for AVX2.

    /// Columns of an 8 x 8 block.
    #[target_feature(enable = "avx2")]
    fn transpose_8x8(r: [__m256; 8]) -> [__m256; 8] {
        // Pairs, then fours, then the halves of the vectors.
        let mut pairs = [_mm256_setzero_ps(); 8];
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let mut fours = pairs;
        for half in [0, 4] {
            for i in 0..2 {
                let (x, y) = (pairs[half + i], pairs[half + i + 2]);
                fours[half + 2 * i] = _mm256_shuffle_ps::<0x44>(x, y);
                fours[half + 2 * i + 1] = _mm256_shuffle_ps::<0xee>(x, y);
            }
        }
        let mut columns = fours;
        for i in 0..4 {
            columns[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
            columns[i + 4] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
        }
        columns
    }
}

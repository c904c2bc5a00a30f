//! Packing: strips of columns of the right operand, inner index first, so that the tile loop reads in order.

use std::ops::Range;

use super::micro::LANES;
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

    /// The first `len` floats of what was taken before.
    pub(crate) fn filled(&self, len: usize) -> &[f32] {
        // SAFETY: as in `take`.
        let all = unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<f32>(), self.0.len() * 16) };
        &all[..len]
    }
}

/// Strips of `n` columns, and how many columns each takes when it is packed: `whole`, or the last one what it needs in units of `unit`.
pub(super) fn strips(n: usize, (whole, unit): (usize, usize)) -> impl Iterator<Item = (Range<usize>, usize)> {
    (0..n).step_by(whole).map(move |j| (j..n.min(j + whole), whole.min((n - j).next_multiple_of(unit))))
}

/// Packs the columns of `b` (k x columns) in [`strips`]: `out[strip][k][column]`.
///
/// The columns that the last strip lacks hold anything: their results are thrown away.
pub(super) fn pack(level: Level, b: Mat, (whole, unit): (usize, usize), out: &mut [f32]) {
    // All but a last one that is narrower.
    let rest = b.cols % whole;
    let even = if rest.next_multiple_of(unit) < whole { b.cols - rest } else { b.cols };
    let (first, last) = out.split_at_mut(b.rows * even.next_multiple_of(whole));
    pack_even(level, b.cols_range(0..even), whole, first);
    pack_even(level, b.cols_range(even..b.cols), rest.next_multiple_of(unit), last);
}

/// The same in strips of `width`, 8, 16, 32 or 64.
fn pack_even(level: Level, b: Mat, width: usize, out: &mut [f32]) {
    if b.cols == 0 {
        return;
    }
    b.check();
    assert_eq!(out.len(), b.rows * b.cols.next_multiple_of(width), "panels of {} x {}", b.rows, b.cols);
    if b.cs == 1 {
        copy(level, b, width, out);
    } else {
        let strips = (0..b.cols).step_by(width).zip(out.chunks_exact_mut(b.rows * width));
        strips.for_each(|(j, out)| match width {
            8 => turn::<8>(level, b.cols_range(j..b.cols.min(j + width)), out),
            16 => turn::<16>(level, b.cols_range(j..b.cols.min(j + width)), out),
            32 => turn::<32>(level, b.cols_range(j..b.cols.min(j + width)), out),
            _ => turn::<64>(level, b.cols_range(j..b.cols.min(j + width)), out),
        });
    }
}

/// Packs the rows of `a` (rows x k) tile by tile, each of at most [`LANES`] rows: `out[tile][k][row]`; the rows that a
/// tile lacks hold anything.
pub(super) fn tiles(level: Level, a: Mat, tiles: impl Iterator<Item = Range<usize>>, out: &mut [f32]) {
    let tiles: Vec<_> = tiles.collect();
    if a.rs == 1 {
        a.check();
        return copy_tiles(level, a, &tiles, out);
    }
    for (rows, out) in tiles.into_iter().zip(out.chunks_exact_mut(LANES * a.cols)) {
        pack_even(level, a.rows_range(rows).t(), LANES, out);
    }
}

by_level! {
    /// Tiles of a matrix whose columns are contiguous.
    fn copy_tiles(a: Mat<'_>, tiles: &[Range<usize>], out: &mut [f32]) {
        copy_tiles_body(a, tiles, out);
    }
}

/// Columns of a that are copied side by side: what they fill of a tile is whole cache lines.
const COLUMNS: usize = 16;

/// Some columns of a after the others, through all tiles: its memory is read in order.
#[inline(always)]
fn copy_tiles_body(a: Mat, tiles: &[Range<usize>], out: &mut [f32]) {
    let k = a.cols;
    for first in (0..k).step_by(COLUMNS) {
        for (t, rows) in tiles.iter().enumerate() {
            let columns = first..k.min(first + COLUMNS);
            let out = &mut out[(t * k + first) * LANES..][..columns.len() * LANES];
            for (p, out) in columns.zip(out.as_chunks_mut::<LANES>().0) {
                let column = &a.data[p * a.cs..];
                // What lies behind the rows of a tile comes with them where there is anything.
                match column.get(rows.start..rows.start + LANES) {
                    Some(rows) => out.copy_from_slice(rows),
                    None => out[..rows.len()].copy_from_slice(&column[rows.clone()]),
                }
            }
        }
    }
}

by_level! {
    /// Strips of a matrix whose rows are contiguous.
    fn copy(b: Mat<'_>, width: usize, out: &mut [f32]) {
        match width {
            8 => copy_body::<8>(b, out),
            16 => copy_body::<16>(b, out),
            32 => copy_body::<32>(b, out),
            _ => copy_body::<64>(b, out),
        }
    }
}

/// Strips copied side by side: long reads of a row, few places to write to.
const TOGETHER: usize = 4;

#[inline(always)]
fn copy_body<const W: usize>(b: Mat, out: &mut [f32]) {
    let (k, whole) = (b.rows, b.cols / W);
    for (first, out) in (0..whole).step_by(TOGETHER).zip(out.chunks_mut(TOGETHER * k * W)) {
        let strips = TOGETHER.min(whole - first);
        for p in 0..k {
            let row = &b.data[p * b.rs + first * W..][..strips * W];
            for (strip, part) in row.as_chunks::<W>().0.iter().enumerate() {
                out[(strip * k + p) * W..][..W].copy_from_slice(part);
            }
        }
    }
    let rest = b.cols % W;
    let last = &mut out[whole * k * W..];
    for (p, out) in last.as_chunks_mut::<W>().0.iter_mut().enumerate() {
        out[..rest].copy_from_slice(&b.data[p * b.rs + whole * W..][..rest]);
    }
}

/// One strip, at most W columns, of a matrix whose columns are contiguous (or nothing is): a transpose.
fn turn<const W: usize>(level: Level, b: Mat, out: &mut [f32]) {
    let done = if b.rs == 1 { transpose::<W>(level, b, out) } else { 0 };
    for (p, out) in out.as_chunks_mut::<W>().0.iter_mut().enumerate().skip(done) {
        for (j, out) in out[..b.cols].iter_mut().enumerate() {
            *out = b.data[p * b.rs + j * b.cs];
        }
    }
}

/// Transposes the first rows of a strip with vectors; answers how many.
fn transpose<const W: usize>(level: Level, b: Mat, out: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if level.has_avx2() && b.cols > 0 {
        b.check();
        assert!(b.rs == 1 && W.is_multiple_of(8) && out.len() >= b.rows * W);
        let done = b.rows / 16 * 16;
        // SAFETY: columns are clamped to those of b and `done` to its rows, both checked; out has as many rows of W;
        // the CPU has the path.
        unsafe { x86::transpose::<W>(b.data.as_ptr(), b.cs, b.cols, done, out.as_mut_ptr()) };
        return done;
    }
    let _ = (level, b, out);
    0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// `out[p * W + j] = b[j * cs + p]` for p < k (a multiple of 16), j < W; columns beyond `columns` repeat the last.
    ///
    /// # Safety
    /// b has `columns` > 0 columns of k floats, `cs` apart; out has k * W floats, W a multiple of 8; the CPU has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose<const W: usize>(b: *const f32, cs: usize, columns: usize, k: usize, out: *mut f32) {
        // A whole cache line of each column before the next: they may share one set of the cache.
        for p in (0..k).step_by(16) {
            for j in (0..W).step_by(8) {
                for p in [p, p + 8] {
                    let mut r = [_mm256_setzero_ps(); 8];
                    for (i, r) in r.iter_mut().enumerate() {
                        // SAFETY: the caller's promise.
                        *r = unsafe { _mm256_loadu_ps(b.add((j + i).min(columns - 1) * cs + p)) };
                    }
                    for (i, r) in transpose_8x8(r).into_iter().enumerate() {
                        // SAFETY: the caller's promise.
                        unsafe { _mm256_storeu_ps(out.add((p + i) * W + j), r) };
                    }
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

//! Matrix product: packed panels, register tiles, one order of accumulation.

mod micro;
mod pack;

pub(crate) use pack::Buffer;

use std::cell::RefCell;
use std::ops::Range;

use crate::Acc;
use crate::ctx::{Ctx, Part};
use crate::mat::{Mat, MatMut};
use crate::simd::{Level, Path};

/// Inner block: part of the numerics, never tuned to a host.
pub const KC: usize = 256;
/// Columns of b packed at a time; free of bits.
const NC: usize = 1024;
/// Most rows of a used with one block of b; free of bits.
const MC: usize = 266;
/// Columns of a apart by more than this are copied together first: else every step of a tile touches a page.
const DIRECT_MAX: usize = 512;
/// Multiply-adds below which one thread does all.
const GRAIN_FMA: usize = 128 * 128 * 128;

thread_local! {
    static SCRATCH: RefCell<(Buffer, Buffer)> = const { RefCell::new((Buffer::new(), Buffer::new())) };
}

/// c = a b (`Store`) or c += a b (`Add`); a: m x k, b: k x n, c: m x n.
///
/// Law, for each element: for each inner block of [`KC`] in ascending order, s = 0, then s = fma(a, b, s) with k
/// ascending in the block, then c = c + s. With `Store` the first block sets c = s; k = 0 stores zeros.
pub fn product(ctx: &Ctx, a: Mat, b: Mat, c: MatMut, acc: Acc) {
    let (m, n, k) = (c.rows(), c.cols(), a.cols);
    let level = ctx.level();
    let pieces = (m.saturating_mul(n).saturating_mul(k) / GRAIN_FMA).clamp(1, ctx.threads());
    let (_, nr) = tile(level);
    let strips = n.div_ceil(nr);
    // Threads that share columns of c would pack the same part of b, but strips may not come out even.
    if strips.next_multiple_of(pieces) * 8 <= strips * 9 {
        ctx.split_parts(strips, pieces, Strips { c, width: nr }, &|strips, Strips { c, .. }| {
            let first = strips.start * nr;
            serial(level, a, b.cols_range(first..first + c.cols()), c, acc);
        });
    } else {
        ctx.split_parts(m, pieces, c, &|rows, c| serial(level, a.rows_range(rows), b, c, acc));
    }
}

/// A matrix that is cut along its columns, at whole strips.
struct Strips<'a> {
    c: MatMut<'a>,
    width: usize,
}

impl Part for Strips<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        let width = self.width;
        let at = (at * width).min(self.c.cols());
        let (a, b) = self.c.split_cols(at);
        (Strips { c: a, width }, Strips { c: b, width })
    }
}

/// Most rows, and columns, of a register tile.
fn tile(level: Level) -> (usize, usize) {
    match level.path() {
        Path::Avx512 => micro::AVX512,
        _ => micro::AVX2,
    }
}

/// The product on the calling thread.
pub(crate) fn serial(level: Level, a: Mat, b: Mat, mut c: MatMut, acc: Acc) {
    let (m, n, k) = (c.rows(), c.cols(), a.cols);
    assert!(
        a.rows == m && b.rows == k && b.cols == n,
        "product of {} x {} and {} x {} into {m} x {n}",
        a.rows,
        a.cols,
        b.rows,
        b.cols
    );
    a.check();
    b.check();
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if acc == Acc::Store {
            c.fill(0.0);
        }
        return;
    }
    let (_, nr) = tile(level);
    SCRATCH.with_borrow_mut(|(a_buffer, b_buffer)| {
        for j0 in (0..n).step_by(NC) {
            let nb = NC.min(n - j0);
            for k0 in (0..k).step_by(KC) {
                let kb = KC.min(k - k0);
                let add = acc == Acc::Add || k0 > 0;
                let panels = b_buffer.take(kb * nb.next_multiple_of(nr));
                pack::pack(level, b.rows_range(k0..k0 + kb).cols_range(j0..j0 + nb), nr, panels);
                for rows in even(m, MC) {
                    let block = c.reborrow().rows_range(rows.clone()).cols_range(j0..j0 + nb);
                    let mut a = a.rows_range(rows).cols_range(k0..k0 + kb);
                    if a.rs == 1 && a.cs > DIRECT_MAX {
                        let buffer = a_buffer.take(a.rows * kb);
                        a = pack::dense(level, a.t(), buffer).t();
                    }
                    multiply_strips(level, a, panels.chunks_exact(kb * nr), block, add);
                }
            }
        }
    });
}

/// A right operand that is packed once for many products.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    // For every inner block its strips.
    data: &'a [f32],
    k: usize,
    n: usize,
}

impl<'a> Panels<'a> {
    /// Floats that a k x n operand takes.
    pub(crate) fn len(level: Level, k: usize, n: usize) -> usize {
        k * n.next_multiple_of(tile(level).1)
    }

    /// Packs `b` into `buffer`, of which it uses [`Panels::len`].
    pub(crate) fn pack(level: Level, b: Mat, buffer: &'a mut [f32]) -> Self {
        let (_, nr) = tile(level);
        let width = b.cols.next_multiple_of(nr);
        let data = &mut buffer[..b.rows * width];
        for k0 in (0..b.rows).step_by(KC) {
            let k1 = b.rows.min(k0 + KC);
            pack::pack(level, b.rows_range(k0..k1), nr, &mut data[k0 * width..k1 * width]);
        }
        Panels { data, k: b.rows, n: b.cols }
    }

    /// c = a b or c += a b with rows `inner` of b alone and as many of its columns as c has, by the law of
    /// [`product`]; on the calling thread.
    pub(crate) fn multiply(&self, level: Level, a: Mat, inner: Range<usize>, mut c: MatMut, acc: Acc) {
        assert!(
            a.rows == c.rows() && a.cols == inner.len() && inner.end <= self.k && c.cols() <= self.n,
            "product of {} x {} and rows {inner:?}, columns 0..{} of {} x {}",
            a.rows,
            a.cols,
            c.cols(),
            self.k,
            self.n
        );
        a.check();
        let (_, nr) = tile(level);
        let width = self.n.next_multiple_of(nr);
        let mut add = acc == Acc::Add;
        if inner.is_empty() && !add {
            c.fill(0.0);
        }
        for k0 in (0..self.k).step_by(KC) {
            let k1 = self.k.min(k0 + KC);
            let (low, high) = (inner.start.clamp(k0, k1), inner.end.clamp(k0, k1));
            if low < high {
                let a = a.cols_range(low - inner.start..high - inner.start);
                let strips = self.data[k0 * width..k1 * width].chunks_exact((k1 - k0) * nr);
                multiply_strips(level, a, strips.map(|s| &s[(low - k0) * nr..(high - k0) * nr]), c.reborrow(), add);
                add = true;
            }
        }
    }
}

/// One block of c from a block of a in any layout and the strips of one block of b.
fn multiply_strips<'a>(level: Level, a: Mat, strips: impl Iterator<Item = &'a [f32]>, mut c: MatMut, add: bool) {
    let (mr, nr) = tile(level);
    let (m, n) = (c.rows(), c.cols());
    for (j, b) in (0..n).step_by(nr).zip(strips) {
        let mut strip = c.reborrow().cols_range(j..n.min(j + nr));
        for rows in even(m, mr) {
            micro::tile(level, a.rows_range(rows.clone()), b, strip.reborrow().rows_range(rows), add);
        }
    }
}

/// Cuts `0..n` in as few ranges of at most `most` as can be, of about the same length.
fn even(n: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = n.div_ceil(most);
    (0..parts).map(move |i| n * i / parts..n * (i + 1) / parts)
}

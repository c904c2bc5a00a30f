//! Matrix product: packed panels, register tiles, one order of accumulation.

mod micro;
mod pack;

pub(crate) use pack::Buffer;

use std::cell::RefCell;

use crate::Acc;
use crate::ctx::{Columns, Ctx};
use crate::mat::{Mat, MatMut};
use crate::simd::{Level, Path};

/// Inner block: part of the numerics, never tuned to a host.
pub const KC: usize = 256;
/// Columns of b packed at a time; free of bits.
const NC: usize = 1024;
/// Rows of a packed at a time; free of bits, a multiple of every tile height.
const MC: usize = 252;
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
    let (mr, nr) = tile(level);
    if pieces == 1 {
        serial(level, a, b, c, acc);
    } else if m >= n {
        split_aligned(ctx, m.div_ceil(mr), pieces, mr, Aligned { part: c, step: mr }, &|rows, c| {
            serial(level, a.rows_range(rows), b, c.part, acc);
        });
    } else {
        split_aligned(ctx, n.div_ceil(nr), pieces, nr, Aligned { part: Columns(c), step: nr }, &|cols, c| {
            serial(level, a, b.cols_range(cols), c.part.0, acc);
        });
    }
}

/// A part that is cut at whole tiles.
struct Aligned<P> {
    part: P,
    step: usize,
}

trait Len {
    fn len(&self) -> usize;
}

impl Len for MatMut<'_> {
    fn len(&self) -> usize {
        self.rows()
    }
}

impl Len for Columns<'_> {
    fn len(&self) -> usize {
        self.0.cols()
    }
}

impl<P: crate::ctx::Part> crate::ctx::Part for Aligned<P> {
    fn cut(self, at: usize) -> (Self, Self) {
        let (a, b) = self.part.cut(at * self.step);
        (Aligned { part: a, step: self.step }, Aligned { part: b, step: self.step })
    }
}

fn split_aligned<P: crate::ctx::Part + Len>(
    ctx: &Ctx,
    tiles: usize,
    pieces: usize,
    step: usize,
    part: Aligned<P>,
    f: &(impl Fn(std::ops::Range<usize>, Aligned<P>) + Sync),
) {
    ctx.split_parts(tiles, pieces, part, &|range, part: Aligned<P>| {
        let start = range.start * step;
        f(start..start + part.part.len(), part);
    });
}

/// Rows and columns of a register tile.
fn tile(level: Level) -> (usize, usize) {
    match level.path() {
        Path::Avx512 => (micro::AVX512.0, micro::AVX512.1),
        _ => (micro::AVX2.0, micro::AVX2.1),
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
    let (mr, nr) = tile(level);
    SCRATCH.with_borrow_mut(|(a_buffer, b_buffer)| {
        for j0 in (0..n).step_by(NC) {
            let nb = NC.min(n - j0);
            for k0 in (0..k).step_by(KC) {
                let kb = KC.min(k - k0);
                let add = acc == Acc::Add || k0 > 0;
                let b_panels = b_buffer.take(kb * nb.next_multiple_of(nr));
                pack::pack(level, b.rows_range(k0..k0 + kb).cols_range(j0..j0 + nb).t(), nr, b_panels);
                for i0 in (0..m).step_by(MC) {
                    let mb = MC.min(m - i0);
                    let a_panels = a_buffer.take(kb * mb.next_multiple_of(mr));
                    pack::pack(level, a.rows_range(i0..i0 + mb).cols_range(k0..k0 + kb), mr, a_panels);
                    let block = c.reborrow().rows_range(i0..i0 + mb).cols_range(j0..j0 + nb);
                    multiply_block(level, kb, a_panels, b_panels, block, add);
                }
            }
        }
    });
}

/// One block of c from packed panels.
fn multiply_block(level: Level, kb: usize, a: &[f32], b: &[f32], mut c: MatMut, add: bool) {
    let (mr, nr) = tile(level);
    let (m, n) = (c.rows(), c.cols());
    for (j, b) in (0..n).step_by(nr).zip(b.chunks_exact(kb * nr)) {
        for (i, a) in (0..m).step_by(mr).zip(a.chunks_exact(kb * mr)) {
            micro::tile(level, kb, a, b, c.reborrow().rows_range(i..m.min(i + mr)).cols_range(j..n.min(j + nr)), add);
        }
    }
}

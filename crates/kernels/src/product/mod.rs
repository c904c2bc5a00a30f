//! Matrix product: packed panels, register tiles, one order of accumulation.

mod micro;
mod pack;
mod packed;

use micro::{LANES, Place};
pub(crate) use pack::Buffer;
pub use packed::{Packed, Right};

use std::cell::RefCell;
use std::ops::Range;

use crate::Acc;
use crate::ctx::Ctx;
use crate::mat::{Mat, MatMut};
use crate::simd::{Level, Path};

/// Inner block: part of the numerics, never tuned to a host.
pub const KC: usize = 256;
/// Most floats of b packed at a time; free of bits.
const B_FLOATS: usize = 1 << 20;
/// Columns of b that a block of rows is multiplied with at a time; free of bits.
const NC: usize = 512;
/// Most rows of a block, and most floats of a in it; free of bits.
const A_ROWS: usize = 264;
const A_FLOATS: usize = 192 << 10;
/// Columns of a apart by more than this are copied together first.
const DIRECT_MAX: usize = 32;
/// Multiply-adds below which one thread does all.
const GRAIN_FMA: usize = 128 * 128 * 128;
/// Floats below which one thread packs all.
const GRAIN_PACK: usize = 8 << 10;

thread_local! {
    static PACKED_A: RefCell<Buffer> = const { RefCell::new(Buffer::new()) };
    static PACKED_B: RefCell<Buffer> = const { RefCell::new(Buffer::new()) };
}

/// Bytes that products take beside their operands, by `threads` threads, where the largest right operand has `right` bytes.
pub fn scratch_bytes(right: u64, threads: usize) -> u64 {
    right.min(4 * B_FLOATS as u64) + threads as u64 * right.min(4 * A_FLOATS as u64)
}

/// c = a b (`Store`) or c += a b (`Add`); a: m x k, b: k x n, c: m x n.
///
/// Law, for each element: for each inner block of [`KC`] in ascending order, s = 0, then s = fma(a, b, s) with k
/// ascending in the block, then c = c + s. With `Store` the first block sets c = s; k = 0 stores zeros.
pub fn product<'b>(ctx: &Ctx, a: Mat, b: impl Into<Right<'b>>, c: MatMut, acc: Acc) {
    products(ctx, &[b.into()], vec![(a, 0, c)], acc);
}

/// [`product`]s at once: of each (a, i, c) that of a and `right[i]`. What they share is packed once, and threads meet
/// twice for all of them.
pub fn products(ctx: &Ctx, right: &[Right], list: Vec<(Mat, usize, MatMut)>, acc: Acc) {
    for (a, i, c) in &list {
        let (b, (b_rows, b_cols)) = (&right[*i], right[*i].shape());
        let (m, n, k) = (c.rows(), c.cols(), a.cols);
        assert!(
            a.rows == m && b_rows == k && b_cols == n,
            "product of {} x {} and {b_rows} x {b_cols} into {m} x {n}",
            a.rows,
            a.cols,
        );
        a.check();
        if let Right::Plain(b) = b {
            b.check();
        }
    }
    let list = list.into_iter().filter_map(|(a, i, mut c)| {
        if a.cols == 0 && acc == Acc::Store {
            c.fill(0.0);
        }
        (a.cols > 0 && c.rows() > 0 && c.cols() > 0).then_some((a, i, c))
    });
    let mut list: Vec<_> = list.collect();
    let level = ctx.level();
    PACKED_B.with_borrow_mut(|buffer| {
        let plain = right.iter().filter_map(|b| if let Right::Plain(b) = b { Some(*b) } else { None });
        let plain: Vec<Mat> = plain.collect();
        if plain.iter().map(|b| Panels::len(level, b.rows, b.cols)).sum::<usize>() <= B_FLOATS {
            let mut packed = pack_all(ctx, &plain, buffer).into_iter();
            let all = right.iter().map(|b| match b {
                Right::Plain(_) => packed.next().expect("one of each"),
                Right::Packed(b) => b.panels(level),
            });
            return multiply_all(ctx, &all.collect::<Vec<_>>(), list, acc);
        }
        for (i, b) in right.iter().enumerate() {
            let of = list.iter_mut().filter(|of| of.1 == i);
            match b {
                Right::Packed(b) => {
                    let parts = of.map(|(a, _, c)| (*a, 0, c.reborrow())).collect();
                    multiply_all(ctx, &[b.panels(level)], parts, acc);
                }
                Right::Plain(b) => {
                    let mut of: Vec<_> = of.collect();
                    for (inner, columns) in pieces(level, b) {
                        let panels = pack_all(ctx, &[b.rows_range(inner.clone()).cols_range(columns.clone())], buffer);
                        let parts = of.iter_mut().map(|(a, _, c)| {
                            (a.cols_range(inner.clone()), 0, c.reborrow().cols_range(columns.clone()))
                        });
                        let acc = if inner.start == 0 { acc } else { Acc::Add };
                        multiply_all(ctx, &panels, parts.collect(), acc);
                    }
                }
            }
        }
    });
}

/// Cuts an operand of which no more than [`B_FLOATS`] are packed at a time: a tall one into whole inner blocks, in ascending order, so that all of
/// its columns meet the rows of a at once; a wide one into strips of columns.
fn pieces(level: Level, b: &Mat) -> Vec<(Range<usize>, Range<usize>)> {
    let width = b.cols.next_multiple_of(tile(level).1);
    if b.rows > b.cols && width * KC <= B_FLOATS {
        let most = B_FLOATS / width / KC * KC;
        let starts = (0..b.rows).step_by(most);
        return starts.map(|k0| (k0..b.rows.min(k0 + most), 0..b.cols)).collect();
    }
    let most = B_FLOATS.checked_div(b.rows).unwrap_or(b.cols);
    even_strips(b.cols, wide(level).1, most).map(|columns| (0..b.rows, columns)).collect()
}

/// Packs all of `right` with the threads of `ctx`.
fn pack_all<'b>(ctx: &Ctx, right: &[Mat], buffer: &'b mut Buffer) -> Vec<Panels<'b>> {
    let level = ctx.level();
    let (unit, strip) = (tile(level).1, wide(level).1);
    let len = |b: &Mat| Panels::len(level, b.rows, b.cols);
    let total = right.iter().map(len).sum::<usize>();
    let pieces = (total / GRAIN_PACK).clamp(1, ctx.threads());
    let (mut rest, mut items) = (buffer.take(total), Vec::new());
    for b in right {
        for k0 in (0..b.rows).step_by(KC) {
            let rows = k0..b.rows.min(k0 + KC);
            for columns in even_strips(b.cols, strip, b.cols.next_multiple_of(strip).div_ceil(pieces)) {
                let (out, after) = rest.split_at_mut(rows.len() * columns.len().next_multiple_of(unit));
                rest = after;
                items.push((b.rows_range(rows.clone()).cols_range(columns), out));
            }
        }
    }
    if pieces == 1 {
        items.into_iter().for_each(|(b, out)| pack::pack(level, b, (strip, unit), out));
    } else {
        ctx.each(items, &|_, (b, out)| pack::pack(level, b, (strip, unit), out));
    }
    let mut rest = &*buffer.take(total);
    let mut cut = |b: &Mat| {
        let (data, after) = rest.split_at(len(b));
        rest = after;
        Panels { data, k: b.rows, n: b.cols, strip }
    };
    right.iter().map(&mut cut).collect()
}

/// All products with packed operands, in blocks of rows.
fn multiply_all(ctx: &Ctx, panels: &[Panels], list: Vec<(Mat, usize, MatMut)>, acc: Acc) {
    let level = ctx.level();
    let work = list.iter().map(|(a, i, _)| a.rows.saturating_mul(a.cols).saturating_mul(panels[*i].n));
    let threads = (work.fold(0, usize::saturating_add) / GRAIN_FMA).clamp(1, ctx.threads());
    let mut items = Vec::new();
    for (a, i, c) in list {
        let mr = wide(level).0;
        // Where one strip holds all columns, rows of a pass once and need not stay: the more of them, the seldomer b comes.
        let once = panels[i].n <= NC && a.cs <= DIRECT_MAX;
        let most = if once { A_ROWS } else { (A_FLOATS / a.cols).min(A_ROWS) };
        let tiles = a.rows.div_ceil(mr);
        let blocks = tiles.div_ceil((most / mr).max(1)).next_multiple_of(threads).min(tiles);
        let mut rest = c;
        for tiles in even(tiles, tiles.div_ceil(blocks)) {
            let rows = tiles.start * mr..a.rows.min(tiles.end * mr);
            let (block, after) = rest.split_rows(rows.len());
            rest = after;
            items.push((a.rows_range(rows), i, block));
        }
    }
    let one = |(a, i, c): (Mat, usize, MatMut)| {
        PACKED_A.with_borrow_mut(|buffer| panels[i].multiply_block(level, a, c, acc, buffer));
    };
    if threads == 1 {
        items.into_iter().for_each(one);
    } else {
        ctx.each(items, &|_, item| one(item));
    }
}

/// Most rows, and columns, of a register tile of operands in the first cache; panels are padded to such columns.
fn tile(level: Level) -> (usize, usize) {
    match level.path() {
        Path::Avx512 => micro::AVX512,
        _ => micro::AVX2,
    }
}

/// Most rows, and columns, of a register tile of operands that come from further away.
fn wide(level: Level) -> (usize, usize) {
    match level.path() {
        Path::Avx512 => micro::AVX512_WIDE,
        _ => micro::AVX2,
    }
}

/// A right operand that is packed once for many products.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    // For every inner block its strips.
    data: &'a [f32],
    k: usize,
    n: usize,
    /// Columns of a strip; the last one may be narrower.
    strip: usize,
}

impl<'a> Panels<'a> {
    /// Floats that a k x n operand takes.
    pub(crate) fn len(level: Level, k: usize, n: usize) -> usize {
        k * n.next_multiple_of(tile(level).1)
    }

    /// Packs `b` for [`Panels::multiply`] into `buffer`, of which it uses [`Panels::len`].
    pub(crate) fn pack(level: Level, b: Mat, buffer: &'a mut [f32]) -> Self {
        let (_, nr) = tile(level);
        let width = b.cols.next_multiple_of(nr);
        let data = &mut buffer[..b.rows * width];
        for k0 in (0..b.rows).step_by(KC) {
            let k1 = b.rows.min(k0 + KC);
            pack::pack(level, b.rows_range(k0..k1), (nr, nr), &mut data[k0 * width..k1 * width]);
        }
        Panels { data, k: b.rows, n: b.cols, strip: nr }
    }

    /// c = a b or c += a b for all of b, by the law of [`product`], on the calling thread. A tile of a stays in the first cache while the strips of b pass by;
    /// the strips of an inner block, and c over all inner blocks, stay in the second one.
    fn multiply_block(&self, level: Level, a: Mat, mut c: MatMut, acc: Acc, buffer: &mut Buffer) {
        let ((mr, strip), unit) = (wide(level), tile(level).1);
        assert_eq!(self.strip, strip, "panels for operands in the first cache");
        let (m, width) = (c.rows(), self.n.next_multiple_of(unit));
        let tiles = m.div_ceil(mr);
        // Columns of a that are far apart: else every step of a tile would touch another page.
        let packed = (a.cs > DIRECT_MAX).then(|| {
            let packed = buffer.take(tiles * LANES * self.k);
            pack::tiles(level, a, even(m, mr), packed);
            &*packed
        });
        for columns in even_strips(self.n, strip, NC) {
            for k0 in (0..self.k).step_by(KC) {
                let inner = k0..self.k.min(k0 + KC);
                let strips = &self.data[k0 * width + columns.start * inner.len()..inner.end * width];
                for (t, rows) in even(m, mr).enumerate() {
                    let (place, a) = match packed {
                        Some(packed) => {
                            let data = &packed[(t * self.k + k0) * LANES..][..inner.len() * LANES];
                            (Place::Packed, Mat { data, rows: rows.len(), cols: inner.len(), rs: 1, cs: LANES })
                        }
                        None => (Place::Far, a.rows_range(rows.clone()).cols_range(inner.clone())),
                    };
                    let mut c = c.reborrow().rows_range(rows).cols_range(columns.clone());
                    for (columns, nr) in pack::strips(c.cols(), (strip, unit)) {
                        let b = &strips[columns.start * inner.len()..][..nr * inner.len()];
                        let c = c.reborrow().cols_range(columns);
                        micro::tile(level, place, nr, a, b, c, acc == Acc::Add || k0 > 0);
                    }
                }
            }
        }
    }

    /// c = a b or c += a b by the law of [`product`], on the calling thread, of small operands that lie in the first cache. For each register tile, given by
    /// its rows, `part` says which part of the inner index counts, and how many columns of c: of the others some are computed.
    pub(crate) fn multiply(
        &self,
        level: Level,
        a: Mat,
        mut c: MatMut,
        acc: Acc,
        part: impl Fn(Range<usize>) -> (Range<usize>, usize),
    ) {
        let n = c.cols();
        assert!(
            a.rows == c.rows() && a.cols <= self.k && n <= self.n,
            "product of {} x {} and {} x {} into {n} columns",
            a.rows,
            a.cols,
            self.k,
            self.n
        );
        a.check();
        let (mr, nr) = tile(level);
        assert_eq!(self.strip, nr, "panels for operands that come from further away");
        let width = self.n.next_multiple_of(nr);
        for rows in even(a.rows, mr) {
            let (inner, columns) = part(rows.clone());
            assert!(inner.end <= a.cols, "inner {inner:?} of {}", a.cols);
            let a = a.rows_range(rows.clone());
            let mut c = c.reborrow().rows_range(rows);
            let mut add = acc == Acc::Add;
            if inner.is_empty() && !add {
                c.fill(0.0);
            }
            for k0 in (inner.start / KC * KC..inner.end).step_by(KC) {
                let k1 = self.k.min(k0 + KC);
                let (low, high) = (inner.start.max(k0), inner.end.min(k1));
                let a = a.cols_range(low..high);
                let strips = self.data[k0 * width..k1 * width].chunks_exact((k1 - k0) * nr);
                for (j, b) in (0..columns).step_by(nr).zip(strips) {
                    let c = c.reborrow().cols_range(j..n.min(j + nr));
                    micro::tile(level, Place::Near, nr, a, &b[(low - k0) * nr..(high - k0) * nr], c, add);
                }
                add = true;
            }
        }
    }
}

/// Cuts `0..n` in as few ranges of at most `most` as can be, of about the same length.
fn even(n: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = n.div_ceil(most);
    (0..parts).map(move |i| n * i / parts..n * (i + 1) / parts)
}

/// Cuts the columns `0..n` at whole strips of `nr`, in as few ranges of at most `most` columns (or one strip) as can be.
fn even_strips(n: usize, nr: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    even(n.div_ceil(nr), (most / nr).max(1)).map(move |s| s.start * nr..n.min(s.end * nr))
}

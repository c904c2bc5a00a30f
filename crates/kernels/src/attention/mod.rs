//! Causal attention over packed documents with grouped key/value heads; never a seq x seq buffer.
//!
//! Keys go in blocks of [`BLOCK`] at absolute positions of the sequence, queries in tiles of as many
//! ([`Queries`]: all positions or some); key blocks are visited in ascending order with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//!
//! Why skipping a block cannot change bits. Forward: of the blocks up to its own, a row fails to see only those
//! before its document, and these would add zeros to zeros. Backward: a block without visible keys would add zeros to
//! sums that start at +0, and such sums are never -0. For the same reasons half of a block is skipped where its rows or
//! columns are all masked. All this for finite numbers; a NaN may spread inside of its block.

mod backward;
mod forward;
mod queries;

use std::cell::RefCell;
use std::ops::Range;

use crate::mat::Mat;
use crate::product::{Buffer, Panels};
use crate::simd::{Level, by_level};

pub use backward::attention_backward;
pub use forward::attention;
pub use queries::Queries;

/// Queries and keys of a block: part of the numerics.
const BLOCK: usize = 64;

/// Shape of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttnShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence; all have keys.
    pub seq: usize,
    /// Those that have queries.
    pub queries: Queries,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl AttnShape {
    /// Queries of the call.
    pub fn rows(&self) -> usize {
        self.batch * self.queries.len()
    }

    /// Keys of the call.
    pub fn keys(&self) -> usize {
        self.batch * self.seq
    }

    fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn check(&self, q: usize, k: usize, v: usize, doc_start: usize, lse: usize) {
        let (rows, keys) = (self.rows(), self.keys());
        let (wide, narrow) = (self.q_width(), self.kv_width());
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads) && self.head_dim > 0,
            "{self:?}: key/value heads must divide heads"
        );
        assert!(
            q == rows * wide && k == keys * narrow && v == keys * narrow && doc_start == rows,
            "{self:?}: q, k, v, doc_start of {q}, {k}, {v}, {doc_start} elements"
        );
        assert_eq!(lse, rows * self.heads, "{self:?}: log-sum-exp");
        assert!(self.queries.end() <= self.seq, "{self:?}: queries behind the sequence");
    }
}

/// Rows `rows` (of the whole call) of head `head` in a matrix of `heads` heads.
fn head_block<'a>(data: &'a [f32], heads: usize, head_dim: usize, head: usize, rows: Range<usize>) -> Mat<'a> {
    let width = heads * head_dim;
    Mat::new(data, data.len() / width, width).rows_range(rows).cols_range(head * head_dim..(head + 1) * head_dim)
}

/// Columns of key block `k0..k0 + BLOCK` that position `row` of its sequence sees, as (low, high) inside the block.
#[inline(always)]
fn visible(row: usize, doc_start: usize, k0: usize) -> (usize, usize) {
    let low = doc_start.clamp(k0, k0 + BLOCK) - k0;
    let high = (row + 1).clamp(k0, k0 + BLOCK) - k0;
    (low, high.max(low))
}

/// First key block that some row of the query tile sees.
fn first_block(doc_start: &[u32]) -> usize {
    doc_start.iter().min().map_or(0, |&d| d as usize / BLOCK * BLOCK)
}

/// Half of a tile or of a block: what is cut off where a block is masked in part.
const HALF: usize = BLOCK / 2;

/// Cuts the rows of a tile whose first is at position `at` so that each part needs one number of keys of block
/// `k0..k0 + keys`: (rows, keys); parts that see none are left out.
fn row_parts(at: usize, rows: usize, k0: usize, keys: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let seen = move |end: usize| (at + end).saturating_sub(k0).min(keys);
    let cut = if seen(HALF.min(rows)) == keys { rows } else { HALF.min(rows) };
    [(0..cut, seen(cut)), (cut..rows, seen(rows))].into_iter().filter(|(rows, keys)| !rows.is_empty() && *keys > 0)
}

/// Likewise for the keys of a block: (keys, the rows of the tile that may see them).
fn key_parts(at: usize, rows: usize, k0: usize, keys: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let first = move |key: usize| (k0 + key).saturating_sub(at).min(rows);
    let cut = if first(HALF.min(keys)) == 0 { keys } else { HALF.min(keys) };
    let parts = [(0..cut, first(0)..rows), (cut..keys, first(cut)..rows)];
    parts.into_iter().filter(|(keys, rows)| !keys.is_empty() && !rows.is_empty())
}

/// Packs each key block of `first..end`; `of` gives the operand of the keys of one, which takes up to `len` floats.
fn pack_blocks<'a, 'b>(
    level: Level,
    buffer: &'a mut Buffer,
    (first, end): (usize, usize),
    len: usize,
    of: impl Fn(Range<usize>) -> Mat<'b>,
) -> Vec<Panels<'a>> {
    let blocks = (first..end).step_by(BLOCK);
    let out = buffer.take(blocks.len() * len).chunks_exact_mut(len);
    blocks.zip(out).map(|(k0, out)| Panels::pack(level, of(k0..end.min(k0 + BLOCK)), out)).collect()
}

#[derive(Default)]
struct Scratch {
    scores: Buffer,
    other: Buffer,
    out: Buffer,
    rows: Buffer,
    keys_turned: Buffer,
    values: Buffer,
    keys: Buffer,
    queries: Buffer,
    d_outputs: Buffer,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

by_level! {
    /// `out[r]` = dot of row r of a and row r of b.
    fn row_dots(a: Mat<'_>, b: Mat<'_>, out: &mut [f32]) {
        for (r, out) in out.iter_mut().enumerate() {
            *out = crate::lanes::dot(&a.data[r * a.rs..][..a.cols], &b.data[r * b.rs..][..b.cols]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_leave_out_what_is_masked_and_nothing_else() {
        for at in [0, 5, 40, 64, 100, 128] {
            for (rows, keys) in [(64, 64), (30, 64), (64, 33), (40, 40), (1, 1)] {
                let k0 = 64;
                let mut of_rows = [[false; BLOCK]; BLOCK];
                let mut of_keys = of_rows;
                for (r, n) in row_parts(at, rows, k0, keys) {
                    r.for_each(|r| of_rows[r][..n].iter_mut().for_each(|seen| *seen = true));
                }
                for (c, r) in key_parts(at, rows, k0, keys) {
                    r.for_each(|r| of_keys[r][c.clone()].iter_mut().for_each(|seen| *seen = true));
                }
                for (r, c) in (0..rows).flat_map(|r| (0..keys).map(move |c| (r, c))) {
                    let visible = k0 + c <= at + r;
                    let what = format!("row {r} of {rows} at {at}, key {c} of {keys}");
                    assert!(!visible || (of_rows[r][c] && of_keys[r][c]), "{what} is left out");
                    let far = k0 + c >= at + r + BLOCK;
                    assert!(!far || !(of_rows[r][c] || of_keys[r][c]), "{what} is computed");
                }
            }
        }
    }
}

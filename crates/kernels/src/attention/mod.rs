//! Causal attention over packed documents with grouped key/value heads; never a seq x seq buffer.
//!
//! Keys go in blocks of [`BLOCK`] at absolute positions of the sequence, queries in tiles of as many
//! ([`Queries`]: all positions or some); key blocks are visited in ascending order with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//!
//! Why skipping a block cannot change bits. Forward: of the blocks up to its own, a row fails to see only those
//! before its document, and these would add zeros to zeros. Backward: a block without visible keys would add zeros to
//! sums that start at +0, and such sums are never -0. For the same reasons a register tile leaves out the keys that
//! none of its rows sees, and the queries that see none of its keys. All this for finite numbers; a NaN may spread inside of its block.

mod backward;
mod forward;
mod queries;

use std::cell::RefCell;
use std::ops::Range;

use crate::lanes::{self, LANES};
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

/// Whether `low <= i < high`, in a form that vectorises.
#[inline(always)]
fn is_between(i: usize, low: usize, high: usize) -> bool {
    (i as u32).wrapping_sub(low as u32) < (high - low) as u32
}

/// First key block that some row of the query tile sees.
fn first_block(doc_start: &[u32]) -> usize {
    doc_start.iter().min().map_or(0, |&d| d as usize / BLOCK * BLOCK)
}

/// Rows of a query tile at position `at` beside the keys of block `k0..k0 + keys`.
#[derive(Clone, Copy)]
struct Pair {
    at: usize,
    rows: usize,
    k0: usize,
    keys: usize,
}

impl Pair {
    /// How many of the keys, from the first one, some row before row `end` may see.
    fn seen(&self, end: usize) -> usize {
        (self.at + end).saturating_sub(self.k0).min(self.keys)
    }

    /// The rows that may see key `first` of the block or one behind it.
    fn seeing(&self, first: usize) -> Range<usize> {
        (self.k0 + first).saturating_sub(self.at).min(self.rows)..self.rows
    }
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

/// `out[r]` = dot of row r of a and row r of b, for at most a block of rows.
fn row_dots(level: Level, a: Mat, b: Mat, out: &mut [f32]) {
    let mut sums = [[0.0; LANES]; BLOCK];
    let sums = &mut sums[..out.len()];
    row_lanes(level, a, b, sums);
    lanes::trees(level, sums, out);
}

by_level! {
    fn row_lanes(a: Mat<'_>, b: Mat<'_>, out: &mut [[f32; LANES]]) {
        for (r, out) in out.iter_mut().enumerate() {
            *out = lanes::dot_lanes(&a.data[r * a.rs..][..a.cols], &b.data[r * b.rs..][..b.cols]);
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
                let pair = Pair { at, rows, k0: 64, keys };
                for (r, c) in (0..rows).flat_map(|r| (0..keys).map(move |c| (r, c))) {
                    let visible = 64 + c <= at + r;
                    assert_eq!(c < pair.seen(r + 1), visible, "key {c}, row {r} of {rows} at {at}");
                    assert_eq!(pair.seeing(c).contains(&r), visible, "row {r} of {rows} at {at}, key {c}");
                }
            }
        }
    }
}

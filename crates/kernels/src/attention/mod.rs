//! Causal attention over packed documents with grouped key/value heads; never a seq x seq buffer.
//!
//! Keys go in blocks of [`BLOCK`] at absolute positions of the sequence, queries in tiles of as many
//! ([`Queries`]: all positions or some); key blocks are visited in ascending order with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//!
//! Why skipping a block cannot change bits. Forward: of the blocks up to its own, a row fails to see only those
//! before its document, and these would add zeros to zeros. Backward: a block without visible keys would add zeros to
//! sums that start at +0, and such sums are never -0. Both for finite numbers; a NaN may spread inside of its block.

mod backward;
mod forward;
mod queries;

use std::cell::RefCell;

use crate::mat::Mat;
use crate::product::Buffer;
use crate::simd::by_level;

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
fn head_block<'a>(
    data: &'a [f32],
    heads: usize,
    head_dim: usize,
    head: usize,
    rows: std::ops::Range<usize>,
) -> Mat<'a> {
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

#[derive(Default)]
struct Scratch {
    scores: Buffer,
    other: Buffer,
    out: Buffer,
    rows: Buffer,
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

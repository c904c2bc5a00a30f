//! Forward pass: tiles of queries, each free of the others.

use super::queries::Tile;
use super::{AttnShape, BLOCK, SCRATCH, Scratch, first_block, head_block, visible};
use crate::Acc;
use crate::ctx::{Ctx, Part, Rows};
use crate::lanes;
use crate::mat::MatMut;
use crate::math::{exp, ln};
use crate::product::serial;
use crate::simd::{Level, by_level};

/// o = softmax(q k^T / sqrt(head_dim)) v per head, the query at position i over the keys doc_start..=i of its sequence.
///
/// q, o: [batch * queries, heads * head_dim]; k, v: [batch * seq, kv_heads * head_dim]; head h uses key/value head
/// h / (heads / kv_heads). doc_start: [batch * queries], position in its sequence where the query's document begins.
/// lse: [batch * queries, heads], log of the sum of e^score, for the backward pass. A row that sees no key gets 0 and -inf.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    ctx: &Ctx,
    shape: &AttnShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    doc_start: &[u32],
    o: &mut [f32],
    lse: &mut [f32],
) {
    shape.check(q.len(), k.len(), v.len(), doc_start.len(), lse.len());
    assert_eq!(o.len(), q.len(), "{shape:?}: output");
    let tiles = Tiles { shape: *shape, first: 0, o: Rows(o, shape.q_width()), lse: Rows(lse, shape.heads) };
    let per_sequence = shape.queries.tiles();
    // One piece a tile: causal tiles differ in cost.
    ctx.split_parts(shape.batch * per_sequence, usize::MAX, tiles, &|range, mut tiles: Tiles| {
        for index in range {
            let (tile, rest) = tiles.cut(1);
            tiles = rest;
            let (b, at) = (index / per_sequence, shape.queries.tile(index % per_sequence));
            SCRATCH.with_borrow_mut(|scratch| {
                query_tile(ctx.level(), shape, q, k, v, doc_start, b, at, tile, scratch);
            });
        }
    });
}

/// Consecutive query tiles of the output, the first at `first`; the last tile of a sequence may be short.
struct Tiles<'a> {
    shape: AttnShape,
    first: usize,
    o: Rows<'a, f32>,
    lse: Rows<'a, f32>,
}

impl Part for Tiles<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        let queries = self.shape.queries;
        let per_sequence = queries.tiles();
        let row = |tile: usize| tile / per_sequence * queries.len() + queries.tile(tile % per_sequence).row;
        let next = self.first + at;
        let rows = row(next) - row(self.first);
        let ((o, o_rest), (lse, lse_rest)) = (self.o.cut(rows), self.lse.cut(rows));
        (Tiles { o, lse, ..self }, Tiles { first: next, o: o_rest, lse: lse_rest, ..self })
    }
}

/// One tile of sequence `b`, every head.
#[allow(clippy::too_many_arguments)]
fn query_tile(
    level: Level,
    shape: &AttnShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    doc_start: &[u32],
    b: usize,
    Tile { row, at, rows }: Tile,
    tile: Tiles,
    scratch: &mut Scratch,
) {
    let d = shape.head_dim;
    let row = b * shape.queries.len() + row;
    let doc_start = &doc_start[row..][..rows];
    let scores = scratch.scores.take(BLOCK * BLOCK);
    let update = scratch.other.take(BLOCK * d);
    let out = scratch.out.take(BLOCK * d);
    let (max, rest) = scratch.rows.take(3 * BLOCK).split_at_mut(BLOCK);
    let (sum, decay) = rest.split_at_mut(BLOCK);
    for h in 0..shape.heads {
        let q_tile = head_block(q, shape.heads, d, h, row..row + rows);
        out.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        for k0 in (first_block(doc_start)..at + rows).step_by(BLOCK) {
            let keys = BLOCK.min(shape.seq - k0);
            let block = b * shape.seq + k0..b * shape.seq + k0 + keys;
            let k_block = head_block(k, shape.kv_heads, d, h / shape.group(), block.clone());
            let v_block = head_block(v, shape.kv_heads, d, h / shape.group(), block);
            serial(level, q_tile, k_block.t(), MatMut::with_stride(scores, rows, keys, BLOCK), Acc::Store);
            softmax_block(level, scores, shape.scale(), at, k0, doc_start, max, sum, decay);
            let p = crate::Mat::with_stride(scores, rows, keys, BLOCK);
            serial(level, p, v_block, MatMut::new(update, rows, d), Acc::Store);
            rescale_add(level, &decay[..rows], update, out, d);
        }
        finish(level, out, max, sum, h, d, tile.o.0, shape.q_width(), tile.lse.0, shape.heads);
    }
}

by_level! {
    /// Scores of one block become weights relative to the running maximum; running sums follow.
    ///
    /// decay is the factor of what was summed before.
    fn softmax_block(
        scores: &mut [f32],
        scale: f32,
        q0: usize,
        k0: usize,
        doc_start: &[u32],
        max: &mut [f32],
        sum: &mut [f32],
        decay: &mut [f32],
    ) {
        for (r, &start) in doc_start.iter().enumerate() {
            let row = &mut scores[r * BLOCK..(r + 1) * BLOCK];
            let (low, high) = visible(q0 + r, start as usize, k0);
            if low == high {
                row.fill(0.0);
                decay[r] = 1.0;
                continue;
            }
            row[..low].fill(f32::NEG_INFINITY);
            row[high..].fill(f32::NEG_INFINITY);
            for s in &mut row[low..high] {
                *s *= scale;
            }
            let new_max = lanes::larger(lanes::max(row), max[r]);
            for s in row.iter_mut() {
                *s = exp(*s - new_max);
            }
            let d = exp(max[r] - new_max);
            decay[r] = d;
            sum[r] = sum[r].mul_add(d, lanes::sum(row));
            max[r] = new_max;
        }
    }
}

by_level! {
    /// out = out * decay + update, row by row.
    fn rescale_add(decay: &[f32], update: &[f32], out: &mut [f32], d: usize) {
        for ((&decay, update), out) in decay.iter().zip(update.chunks_exact(d)).zip(out.chunks_exact_mut(d)) {
            for (o, u) in out.iter_mut().zip(update) {
                // + 0.0: one sign of zero, however many masked keys were multiplied.
                *o = o.mul_add(decay, u + 0.0);
            }
        }
    }
}

by_level! {
    fn finish(
        out: &[f32],
        max: &[f32],
        sum: &[f32],
        head: usize,
        d: usize,
        o: &mut [f32],
        width: usize,
        lse: &mut [f32],
        heads: usize,
    ) {
        let rows = o.chunks_exact_mut(width).zip(lse.chunks_exact_mut(heads));
        for (r, (o, lse)) in rows.enumerate() {
            let o = &mut o[head * d..(head + 1) * d];
            let inv = if sum[r] == 0.0 { 0.0 } else { 1.0 / sum[r] };
            for (o, x) in o.iter_mut().zip(&out[r * d..(r + 1) * d]) {
                *o = x * inv;
            }
            lse[head] = max[r] + ln(sum[r]);
        }
    }
}

//! Forward pass: tiles of queries, each free of the others; keys and values are packed once for all tiles of a head.

use std::ops::Range;

use super::queries::Tile;
use super::{AttnShape, BLOCK, SCRATCH, Scratch, first_block, head_block, pack_blocks, row_parts, visible};
use crate::Acc;
use crate::ctx::Ctx;
use crate::lanes;
use crate::mat::{Mat, MatMut};
use crate::math::{exp, ln};
use crate::product::Panels;
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
    let input = Input { shape: *shape, q, k, v, doc_start };
    ctx.each(items(shape, ctx.threads(), o, lse), &|_, item| {
        SCRATCH.with_borrow_mut(|scratch| item.compute(ctx.level(), &input, scratch));
    });
}

struct Input<'a> {
    shape: AttnShape,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    doc_start: &'a [u32],
}

/// Query tiles of the heads of one key/value head, in one sequence.
struct Item<'a> {
    b: usize,
    kv_head: usize,
    tiles: Range<usize>,
    /// Rows of the tiles x head_dim of the heads.
    o: MatMut<'a>,
    /// Rows of the tiles x heads.
    lse: MatMut<'a>,
}

/// Every sequence and key/value head; cut along the tiles only where these are fewer than the threads.
fn items<'a>(shape: &AttnShape, threads: usize, o: &'a mut [f32], lse: &'a mut [f32]) -> Vec<Item<'a>> {
    let AttnShape { batch, queries, kv_heads, head_dim, .. } = *shape;
    let (group, tiles) = (shape.group(), queries.tiles());
    let parts = threads.div_ceil((batch * kv_heads).max(1)).clamp(1, tiles.max(1));
    let mut o = MatMut::new(o, shape.rows(), shape.q_width());
    let mut lse = MatMut::new(lse, shape.rows(), shape.heads);
    let mut items = Vec::with_capacity(batch * kv_heads * parts);
    for b in 0..batch {
        for part in 0..parts {
            let tiles = tiles * part / parts..tiles * (part + 1) / parts;
            let rows = queries.tile(tiles.end).row - queries.tile(tiles.start).row;
            let (mut o_rows, o_rest) = o.split_rows(rows);
            let (mut lse_rows, lse_rest) = lse.split_rows(rows);
            (o, lse) = (o_rest, lse_rest);
            for kv_head in 0..kv_heads {
                let (o, o_rest) = o_rows.split_cols(group * head_dim);
                let (lse, lse_rest) = lse_rows.split_cols(group);
                (o_rows, lse_rows) = (o_rest, lse_rest);
                items.push(Item { b, kv_head, tiles: tiles.clone(), o, lse });
            }
        }
    }
    items
}

impl Item<'_> {
    fn compute(mut self, level: Level, input: &Input, scratch: &mut Scratch) {
        let Input { shape, q, k, v, doc_start } = *input;
        let AttnShape { seq, queries, heads, kv_heads, head_dim: d, .. } = shape;
        let tiles: Vec<Tile> = self.tiles.clone().map(|i| queries.tile(i)).collect();
        let Some(last) = tiles.last() else { return };
        // Rows of the whole call.
        let base = self.b * queries.len();
        let all = base + tiles[0].row..base + last.row + last.rows;
        let span = (first_block(&doc_start[all]), last.at + last.rows);
        let keys_of = |data, keys: Range<usize>| {
            head_block(data, kv_heads, d, self.kv_head, self.b * seq + keys.start..self.b * seq + keys.end)
        };
        let Scratch { scores, other, out, rows: numbers, keys_turned, values, .. } = scratch;
        let k_blocks = pack_blocks(level, keys_turned, span, Panels::len(level, d, BLOCK), |keys| keys_of(k, keys).t());
        let v_blocks = pack_blocks(level, values, span, Panels::len(level, BLOCK, d), |keys| keys_of(v, keys));
        let scores = scores.take(BLOCK * BLOCK);
        let update = other.take(BLOCK * d);
        let out = out.take(BLOCK * d);
        let (max, rest) = numbers.take(3 * BLOCK).split_at_mut(BLOCK);
        let (sum, decay) = rest.split_at_mut(BLOCK);
        for &Tile { row, at, rows } in &tiles {
            let doc_start = &doc_start[base + row..][..rows];
            let local = row - tiles[0].row;
            for j in 0..shape.group() {
                let q = head_block(q, heads, d, self.kv_head * shape.group() + j, base + row..base + row + rows);
                out.fill(0.0);
                max.fill(f32::NEG_INFINITY);
                sum.fill(0.0);
                for k0 in (first_block(doc_start)..at + rows).step_by(BLOCK) {
                    let block = (k0 - span.0) / BLOCK;
                    let keys = BLOCK.min(span.1 - k0);
                    for (rows, keys) in row_parts(at, rows, k0, keys) {
                        let part = MatMut::with_stride(&mut scores[rows.start * BLOCK..], rows.len(), keys, BLOCK);
                        k_blocks[block].multiply(level, q.rows_range(rows), 0..d, part, Acc::Store);
                    }
                    softmax_block(level, scores, shape.scale(), at, k0, doc_start, max, sum, decay);
                    for (rows, keys) in row_parts(at, rows, k0, keys) {
                        let p = Mat::with_stride(&scores[rows.start * BLOCK..], rows.len(), keys, BLOCK);
                        let elements = rows.start * d..rows.end * d;
                        let update = &mut update[elements.clone()];
                        v_blocks[block].multiply(level, p, 0..keys, MatMut::new(update, rows.len(), d), Acc::Store);
                        rescale_add(level, &decay[rows], update, &mut out[elements], d);
                    }
                }
                let o = self.o.reborrow().rows_range(local..local + rows).cols_range(j * d..(j + 1) * d);
                let lse = self.lse.reborrow().rows_range(local..local + rows).cols_range(j..j + 1);
                finish(level, out, max, sum, o, lse);
            }
        }
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
    fn finish(out: &[f32], max: &[f32], sum: &[f32], o: MatMut<'_>, lse: MatMut<'_>) {
        let (mut o, mut lse) = (o, lse);
        let d = o.cols();
        for r in 0..o.rows() {
            let inv = if sum[r] == 0.0 { 0.0 } else { 1.0 / sum[r] };
            for (o, x) in o.row_mut(r).iter_mut().zip(&out[r * d..(r + 1) * d]) {
                *o = x * inv;
            }
            lse.row_mut(r)[0] = max[r] + ln(sum[r]);
        }
    }
}

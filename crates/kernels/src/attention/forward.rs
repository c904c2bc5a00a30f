//! Forward pass: tiles of queries, each free of the others; keys and values are packed once for all tiles of a head.

use std::ops::Range;

use super::queries::Tile;
use super::{AttnShape, BLOCK, Pair, SCRATCH, Scratch, first_block, head_block, is_between, pack_blocks, visible};
use crate::Acc;
use crate::ctx::Ctx;
use crate::lanes::{self, LANES};
use crate::mat::{Mat, MatMut};
use crate::math::{exp_low, ln};
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
        let [max, sum, decay] = numbers.take(3 * BLOCK).as_chunks_mut::<BLOCK>().0 else {
            unreachable!("three blocks of rows")
        };
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
                    let pair = Pair { at, rows, k0, keys };
                    let part = MatMut::with_stride(scores, rows, keys, BLOCK);
                    k_blocks[block].multiply(level, q, part, Acc::Store, |rows| (0..d, pair.seen(rows.end)));
                    softmax_block(level, scores, shape.scale(), at, k0, doc_start, max, sum, decay);
                    let p = Mat::with_stride(scores, rows, keys, BLOCK);
                    let update = &mut update[..rows * d];
                    let part = MatMut::new(update, rows, d);
                    v_blocks[block].multiply(level, p, part, Acc::Store, |rows| (0..pair.seen(rows.end), d));
                    rescale_add(level, &decay[..rows], update, out, d);
                }
                let o = self.o.reborrow().rows_range(local..local + rows).cols_range(j * d..(j + 1) * d);
                let lse = self.lse.reborrow().rows_range(local..local + rows).cols_range(j..j + 1);
                finish(level, out, max, sum, o, lse);
            }
        }
    }
}

/// Scores of one block become weights relative to the running maximum; running sums follow.
///
/// decay is the factor of what was summed before. All rows pass a stage before the next one: none waits for the chain of
/// another. Rows behind the last query see nothing.
#[allow(clippy::too_many_arguments)]
fn softmax_block(
    level: Level,
    scores: &mut [f32],
    scale: f32,
    q0: usize,
    k0: usize,
    doc_start: &[u32],
    max: &mut [f32; BLOCK],
    sum: &mut [f32; BLOCK],
    decay: &mut [f32; BLOCK],
) {
    let scores = scores.as_chunks_mut::<BLOCK>().0;
    let mut seen = [(0, 0); BLOCK];
    for (r, (seen, &start)) in seen.iter_mut().zip(doc_start).enumerate() {
        *seen = visible(q0 + r, start as usize, k0);
    }
    let (mut lanes, mut shift, mut sums) = ([[0.0; LANES]; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    mask(level, scores, scale, &seen);
    tops(level, scores, &mut lanes);
    lanes::largests(level, &lanes, &mut shift);
    follow(level, &seen, max, &mut shift, decay);
    weigh(level, scores, &shift, &mut lanes);
    lanes::trees(level, &lanes, &mut sums);
    add_up(level, sum, decay, &sums);
}

by_level! {
    /// Scales what a row sees, hides the rest.
    fn mask(scores: &mut [[f32; BLOCK]], scale: f32, seen: &[(usize, usize); BLOCK]) {
        for (row, &(low, high)) in scores.iter_mut().zip(seen) {
            for (i, s) in row.iter_mut().enumerate() {
                *s = if is_between(i, low, high) { *s * scale } else { f32::NEG_INFINITY };
            }
        }
    }
}

by_level! {
    /// The lanes of each row's maximum. Apart from [`mask`]: of both in one loop the compiler makes scalar code.
    fn tops(scores: &[[f32; BLOCK]], lanes: &mut [[f32; LANES]; BLOCK]) {
        for (row, lanes) in scores.iter().zip(lanes) {
            let mut top = [f32::NEG_INFINITY; LANES];
            for part in row.as_chunks::<LANES>().0 {
                for l in 0..LANES {
                    top[l] = lanes::larger(part[l], top[l]);
                }
            }
            *lanes = top;
        }
    }
}

by_level! {
    /// The running maxima; shift: maxima of the block to what is taken from scores.
    fn follow(
        seen: &[(usize, usize); BLOCK],
        max: &mut [f32; BLOCK],
        shift: &mut [f32; BLOCK],
        decay: &mut [f32; BLOCK],
    ) {
        for r in 0..BLOCK {
            let new_max = lanes::larger(shift[r], max[r]);
            // A row that sees nothing here: its weights become zero, its sum and output stay.
            let blind = seen[r].0 == seen[r].1;
            shift[r] = if blind { 0.0 } else { new_max };
            decay[r] = if blind { 0.0 } else { max[r] - new_max };
            max[r] = new_max;
        }
        for decay in decay {
            *decay = exp_low(*decay);
        }
    }
}

by_level! {
    /// Scores to weights, and the lanes of their sums.
    fn weigh(scores: &mut [[f32; BLOCK]], shift: &[f32; BLOCK], lanes: &mut [[f32; LANES]; BLOCK]) {
        for ((row, lanes), &shift) in scores.iter_mut().zip(lanes).zip(shift) {
            let mut sum = [0.0; LANES];
            for part in row.as_chunks_mut::<LANES>().0 {
                for l in 0..LANES {
                    part[l] = exp_low(part[l] - shift);
                    sum[l] += part[l];
                }
            }
            *lanes = sum;
        }
    }
}

by_level! {
    fn add_up(sum: &mut [f32; BLOCK], decay: &[f32; BLOCK], add: &[f32; BLOCK]) {
        for r in 0..BLOCK {
            sum[r] = sum[r].mul_add(decay[r], add[r]);
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
    fn finish(out: &[f32], max: &[f32; BLOCK], sum: &[f32; BLOCK], o: MatMut<'_>, lse: MatMut<'_>) {
        let (mut o, mut lse) = (o, lse);
        let d = o.cols();
        let (mut inverse, mut log) = ([0.0; BLOCK], [0.0; BLOCK]);
        for r in 0..BLOCK {
            inverse[r] = if sum[r] == 0.0 { 0.0 } else { 1.0 / sum[r] };
            log[r] = max[r] + ln(sum[r]);
        }
        for r in 0..o.rows() {
            for (o, x) in o.row_mut(r).iter_mut().zip(&out[r * d..(r + 1) * d]) {
                *o = x * inverse[r];
            }
            lse.row_mut(r)[0] = log[r];
        }
    }
}

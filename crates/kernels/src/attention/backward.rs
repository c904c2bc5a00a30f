//! Backward pass: weights are recomputed from the saved log-sum-exp; key/value heads are free of each other, and each
//! is packed once for all query heads and tiles.

use std::ops::Range;

use super::queries::Tile;
use super::{
    AttnShape, BLOCK, Pair, SCRATCH, Scratch, first_block, head_block, is_between, pack_blocks, row_dots, visible,
};
use crate::Acc;
use crate::ctx::Ctx;
use crate::mat::{Mat, MatMut};
use crate::math::exp_low;
use crate::product::Panels;
use crate::simd::{Level, by_level};

/// Gradients of [`attention`](super::attention) wrt q, k and v; stored.
///
/// Shapes as there; o and lse from the forward pass; d_o, dq like q; dk, dv like k: the sums over the queries of this
/// call, zero for a key that none sees. Order of dk and dv of a key: query heads of the group ascending, for each the
/// query tiles ascending, for each one chain over its queries. Order of dq: key blocks ascending.
#[allow(clippy::too_many_arguments)]
pub fn attention_backward(
    ctx: &Ctx,
    shape: &AttnShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    doc_start: &[u32],
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    shape.check(q.len(), k.len(), v.len(), doc_start.len(), lse.len());
    assert!(
        o.len() == q.len() && d_o.len() == q.len() && dq.len() == q.len(),
        "{shape:?}: o, d_o, dq of {}, {}, {} elements",
        o.len(),
        d_o.len(),
        dq.len()
    );
    assert!(dk.len() == k.len() && dv.len() == k.len(), "{shape:?}: dk, dv of {}, {}", dk.len(), dv.len());
    if shape.keys() == 0 {
        return;
    }
    let input = Input { shape: *shape, q, k, v, o, lse, d_o, doc_start };
    let mut items = Vec::with_capacity(shape.batch * shape.kv_heads);
    let mut dq = MatMut::new(dq, shape.rows(), shape.q_width());
    let mut dk = MatMut::new(dk, shape.keys(), shape.kv_width());
    let mut dv = MatMut::new(dv, shape.keys(), shape.kv_width());
    for b in 0..shape.batch {
        let (mut dq_rows, mut dk_rows, mut dv_rows);
        (dq_rows, dq) = dq.split_rows(shape.queries.len());
        (dk_rows, dk) = dk.split_rows(shape.seq);
        (dv_rows, dv) = dv.split_rows(shape.seq);
        for kv_head in 0..shape.kv_heads {
            let (dq, dk, dv);
            (dq, dq_rows) = dq_rows.split_cols(shape.group() * shape.head_dim);
            (dk, dk_rows) = dk_rows.split_cols(shape.head_dim);
            (dv, dv_rows) = dv_rows.split_cols(shape.head_dim);
            items.push(Item { b, kv_head, dq, dk, dv });
        }
    }
    ctx.each(items, &|_, item| SCRATCH.with_borrow_mut(|scratch| item.compute(ctx.level(), &input, scratch)));
}

struct Input<'a> {
    shape: AttnShape,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
    d_o: &'a [f32],
    doc_start: &'a [u32],
}

/// The gradients of one key/value head in one sequence, with those of the query heads of its group.
struct Item<'a> {
    b: usize,
    kv_head: usize,
    dq: MatMut<'a>,
    dk: MatMut<'a>,
    dv: MatMut<'a>,
}

impl Item<'_> {
    fn compute(mut self, level: Level, input: &Input, scratch: &mut Scratch) {
        let AttnShape { seq, queries, heads, kv_heads, head_dim: d, .. } = input.shape;
        self.dq.fill(0.0);
        self.dk.fill(0.0);
        self.dv.fill(0.0);
        let base = self.b * queries.len();
        let span = (first_block(&input.doc_start[base..base + queries.len()]), queries.end());
        let keys_of = |data, keys: Range<usize>| {
            head_block(data, kv_heads, d, self.kv_head, self.b * seq + keys.start..self.b * seq + keys.end)
        };
        let (turned, straight) = (Panels::len(level, d, BLOCK), Panels::len(level, BLOCK, d));
        let kt_blocks = pack_blocks(level, &mut scratch.keys_turned, span, turned, |keys| keys_of(input.k, keys).t());
        let vt_blocks = pack_blocks(level, &mut scratch.values, span, turned, |keys| keys_of(input.v, keys).t());
        let k_blocks = pack_blocks(level, &mut scratch.keys, span, straight, |keys| keys_of(input.k, keys));
        let weights = scratch.scores.take(BLOCK * BLOCK);
        let d_scores = scratch.other.take(BLOCK * BLOCK);
        let (delta, lse) = scratch.rows.take(2 * BLOCK).split_at_mut(BLOCK);
        let group = input.shape.group();
        for (j, h) in (self.kv_head * group..(self.kv_head + 1) * group).enumerate() {
            for Tile { row, at, rows } in (0..queries.tiles()).map(|i| queries.tile(i)) {
                let tile = base + row..base + row + rows;
                let doc_start = &input.doc_start[tile.clone()];
                let q = head_block(input.q, heads, d, h, tile.clone());
                let d_o = head_block(input.d_o, heads, d, h, tile.clone());
                row_dots(level, d_o, head_block(input.o, heads, d, h, tile.clone()), &mut delta[..rows]);
                for (lse, row) in lse.iter_mut().zip(tile) {
                    *lse = input.lse[row * heads + h];
                }
                let q_panels = Panels::pack(level, q, scratch.queries.take(straight));
                let d_o_panels = Panels::pack(level, d_o, scratch.d_outputs.take(straight));
                for k0 in (first_block(doc_start)..at + rows).step_by(BLOCK) {
                    let block = (k0 - span.0) / BLOCK;
                    let keys = BLOCK.min(span.1 - k0);
                    let pair = Pair { at, rows, k0, keys };
                    let p = MatMut::with_stride(weights, rows, keys, BLOCK);
                    kt_blocks[block].multiply(level, q, p, Acc::Store, |rows| (0..d, pair.seen(rows.end)));
                    let dp = MatMut::with_stride(d_scores, rows, keys, BLOCK);
                    vt_blocks[block].multiply(level, d_o, dp, Acc::Store, |rows| (0..d, pair.seen(rows.end)));
                    score_gradient(level, weights, d_scores, input.shape.scale(), at, k0, doc_start, lse, delta);
                    let p = Mat::with_stride(weights, rows, keys, BLOCK);
                    let ds = Mat::with_stride(d_scores, rows, keys, BLOCK);
                    let dv = self.dv.reborrow().rows_range(k0..k0 + keys);
                    d_o_panels.multiply(level, p.t(), dv, Acc::Add, |keys| (pair.seeing(keys.start), d));
                    let dk = self.dk.reborrow().rows_range(k0..k0 + keys);
                    q_panels.multiply(level, ds.t(), dk, Acc::Add, |keys| (pair.seeing(keys.start), d));
                    let dq = self.dq.reborrow().rows_range(row..row + rows).cols_range(j * d..(j + 1) * d);
                    k_blocks[block].multiply(level, ds, dq, Acc::Add, |rows| (0..pair.seen(rows.end), d));
                }
            }
        }
    }
}

by_level! {
    /// weights: scores to p = e^(score scale - lse); d_scores: dp to p (dp - delta) scale; zero where masked.
    fn score_gradient(
        weights: &mut [f32],
        d_scores: &mut [f32],
        scale: f32,
        q0: usize,
        k0: usize,
        doc_start: &[u32],
        lse: &[f32],
        delta: &[f32],
    ) {
        let (weights, d_scores) = (weights.as_chunks_mut::<BLOCK>().0, d_scores.as_chunks_mut::<BLOCK>().0);
        for (r, ((p, dp), &start)) in weights.iter_mut().zip(d_scores).zip(doc_start).enumerate() {
            let (low, high) = visible(q0 + r, start as usize, k0);
            let (lse, delta) = (lse[r], delta[r]);
            for i in 0..BLOCK {
                let seen = is_between(i, low, high);
                let weight = exp_low(p[i] * scale - lse);
                let gradient = weight * (dp[i] - delta) * scale;
                p[i] = if seen { weight } else { 0.0 };
                dp[i] = if seen { gradient } else { 0.0 };
            }
        }
    }
}

//! Backward pass: weights are recomputed from the saved log-sum-exp; key/value heads are free of each other.

use super::queries::Tile;
use super::{AttnShape, BLOCK, SCRATCH, Scratch, first_block, head_block, row_dots, visible};
use crate::Acc;
use crate::ctx::{Ctx, Part};
use crate::mat::{Mat, MatMut};
use crate::math::exp;
use crate::product::serial;
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
    let grads = Grads {
        shape: *shape,
        first: 0,
        dq: MatMut::new(dq, shape.rows(), shape.q_width()),
        dk: MatMut::new(dk, shape.keys(), shape.kv_width()),
        dv: MatMut::new(dv, shape.keys(), shape.kv_width()),
    };
    // First by sequence, then by key/value head inside of one sequence.
    ctx.split_parts(shape.batch, usize::MAX, grads, &|batches, mut grads: Grads| {
        for b in batches {
            let (one, rest) = grads.cut(1);
            grads = rest;
            let heads = HeadGrads { head_dim: shape.head_dim, group: shape.group(), grads: one };
            ctx.split_parts(shape.kv_heads, usize::MAX, heads, &|kv_heads, mut heads: HeadGrads| {
                for g in kv_heads {
                    let (one, rest) = heads.cut(1);
                    heads = rest;
                    SCRATCH.with_borrow_mut(|scratch| {
                        key_value_head(ctx.level(), &input, b, g, one.grads, scratch);
                    });
                }
            });
        }
    });
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

/// Gradients of consecutive sequences.
struct Grads<'a> {
    shape: AttnShape,
    first: usize,
    dq: MatMut<'a>,
    dk: MatMut<'a>,
    dv: MatMut<'a>,
}

impl Part for Grads<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        let (rows, keys) = (at * self.shape.queries.len(), at * self.shape.seq);
        let ((dq, dq1), (dk, dk1), (dv, dv1)) = (self.dq.cut(rows), self.dk.cut(keys), self.dv.cut(keys));
        (Grads { dq, dk, dv, ..self }, Grads { first: self.first + at, dq: dq1, dk: dk1, dv: dv1, ..self })
    }
}

/// Gradients of consecutive key/value heads, with the query heads of their groups.
struct HeadGrads<'a> {
    head_dim: usize,
    group: usize,
    grads: Grads<'a>,
}

impl Part for HeadGrads<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        let columns = at * self.head_dim;
        let HeadGrads { head_dim, group, grads } = self;
        let (dq, dq1) = grads.dq.split_cols(columns * group);
        let (dk, dk1) = grads.dk.split_cols(columns);
        let (dv, dv1) = grads.dv.split_cols(columns);
        (
            HeadGrads { head_dim, group, grads: Grads { dq, dk, dv, ..grads } },
            HeadGrads { head_dim, group, grads: Grads { dq: dq1, dk: dk1, dv: dv1, ..grads } },
        )
    }
}

/// Key/value head `g` and its query heads, in sequence `b`.
fn key_value_head(level: Level, input: &Input, b: usize, g: usize, mut grads: Grads, scratch: &mut Scratch) {
    let AttnShape { seq, queries, heads, kv_heads, head_dim: d, .. } = input.shape;
    let group = input.shape.group();
    let weights = scratch.scores.take(BLOCK * BLOCK);
    let d_scores = scratch.other.take(BLOCK * BLOCK);
    let (delta, lse) = scratch.rows.take(2 * BLOCK).split_at_mut(BLOCK);
    grads.dq.fill(0.0);
    grads.dk.fill(0.0);
    grads.dv.fill(0.0);
    for (j, h) in (g * group..(g + 1) * group).enumerate() {
        for Tile { row, at, rows } in (0..queries.tiles()).map(|i| queries.tile(i)) {
            let first = b * queries.len() + row;
            let tile = first..first + rows;
            let doc_start = &input.doc_start[tile.clone()];
            let q = head_block(input.q, heads, d, h, tile.clone());
            let d_o = head_block(input.d_o, heads, d, h, tile.clone());
            row_dots(level, d_o, head_block(input.o, heads, d, h, tile.clone()), &mut delta[..rows]);
            for (r, lse) in lse[..rows].iter_mut().enumerate() {
                *lse = input.lse[(tile.start + r) * heads + h];
            }
            for k0 in (first_block(doc_start)..at + rows).step_by(BLOCK) {
                let keys = BLOCK.min(seq - k0);
                let block = b * seq + k0..b * seq + k0 + keys;
                let k = head_block(input.k, kv_heads, d, g, block.clone());
                let v = head_block(input.v, kv_heads, d, g, block);
                serial(level, q, k.t(), MatMut::with_stride(weights, rows, keys, BLOCK), Acc::Store);
                serial(level, d_o, v.t(), MatMut::with_stride(d_scores, rows, keys, BLOCK), Acc::Store);
                score_gradient(level, weights, d_scores, input.shape.scale(), at, k0, doc_start, lse, delta);
                let p = Mat::with_stride(weights, rows, keys, BLOCK);
                let ds = Mat::with_stride(d_scores, rows, keys, BLOCK);
                let dq = grads.dq.reborrow().rows_range(row..row + rows).cols_range(j * d..(j + 1) * d);
                serial(level, p.t(), d_o, grads.dv.reborrow().rows_range(k0..k0 + keys), Acc::Add);
                serial(level, ds.t(), q, grads.dk.reborrow().rows_range(k0..k0 + keys), Acc::Add);
                serial(level, ds, k, dq, Acc::Add);
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
        let rows = weights.chunks_exact_mut(BLOCK).zip(d_scores.chunks_exact_mut(BLOCK)).zip(doc_start);
        for (r, ((p, dp), &start)) in rows.enumerate() {
            let (low, high) = visible(q0 + r, start as usize, k0);
            let (lse, delta) = (lse[r], delta[r]);
            for masked in [0..low, high..BLOCK] {
                p[masked.clone()].fill(0.0);
                dp[masked].fill(0.0);
            }
            for (p, dp) in p[low..high].iter_mut().zip(&mut dp[low..high]) {
                *p = exp(*p * scale - lse);
                *dp = *p * (*dp - delta) * scale;
            }
        }
    }
}

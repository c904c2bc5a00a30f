//! Root-mean-square norm over the last axis (hidden, or a head for QK-norm).

use std::ops::Range;

use crate::Acc;
use crate::ctx::{Ctx, Rows};
use crate::lanes;
use crate::simd::by_level;

/// y = x / sqrt(mean(x^2) + eps) * w.
///
/// x, y: rows x h, contiguous; w: h; inv_rms: rows, saved for the backward pass.
pub fn rms_norm(ctx: &Ctx, x: &[f32], w: &[f32], eps: f32, y: &mut [f32], inv_rms: &mut [f32]) {
    let (rows, h) = (inv_rms.len(), w.len());
    assert!(x.len() == rows * h && y.len() == rows * h, "norm of {} and {} elements, {rows} x {h}", x.len(), y.len());
    ctx.split_rows(rows, h, (Rows(y, h), Rows(inv_rms, 1)), |r, (y, inv)| {
        forward(ctx.level(), &x[r.start * h..r.end * h], w, eps, y.0, inv.0);
    });
}

by_level! {
    fn forward(x: &[f32], w: &[f32], eps: f32, y: &mut [f32], inv_rms: &mut [f32]) {
        let h = w.len();
        if h == 0 {
            return;
        }
        for ((x, y), inv) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)).zip(inv_rms) {
            *inv = 1.0 / (lanes::dot(x, x) / h as f32 + eps).sqrt();
            for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                *y = x * *inv * w;
            }
        }
    }
}

/// dx = (w dy - x inv_rms^2 mean(w dy x)) inv_rms, stored or added.
///
/// x, dy, dx: rows x h; w: h; inv_rms: rows, from the forward pass.
pub fn rms_norm_backward(ctx: &Ctx, x: &[f32], w: &[f32], inv_rms: &[f32], dy: &[f32], dx: &mut [f32], acc: Acc) {
    let (rows, h) = (inv_rms.len(), w.len());
    let n = rows * h;
    assert!(x.len() == n && dy.len() == n && dx.len() == n, "norm of {} elements, {rows} x {h}", x.len());
    ctx.split_rows(rows, h, Rows(dx, h), |r, dx| {
        let elements = r.start * h..r.end * h;
        backward(ctx.level(), &x[elements.clone()], w, &inv_rms[r], &dy[elements], dx.0, acc);
    });
}

by_level! {
    fn backward(x: &[f32], w: &[f32], inv_rms: &[f32], dy: &[f32], dx: &mut [f32], acc: Acc) {
        let h = w.len();
        if h == 0 {
            return;
        }
        let rows = x.chunks_exact(h).zip(dy.chunks_exact(h)).zip(dx.chunks_exact_mut(h)).zip(inv_rms);
        for (((x, dy), dx), &inv) in rows {
            let c = -(lanes::dot3(dy, w, x) * (inv * inv * inv) / h as f32);
            let gradient = |((x, dy), w): ((&f32, &f32), &f32)| c.mul_add(*x, inv * (dy * w));
            let values = x.iter().zip(dy).zip(w).map(gradient);
            match acc {
                Acc::Store => dx.iter_mut().zip(values).for_each(|(d, g)| *d = g),
                Acc::Add => dx.iter_mut().zip(values).for_each(|(d, g)| *d += g),
            }
        }
    }
}

/// `dw[j]` = sum of dy x inv_rms over the rows in `rows`, range after range, ascending: each column is one chain.
///
/// x, dy: rows x h; dw: h, stored.
pub fn rms_norm_weight_grad(
    ctx: &Ctx,
    x: &[f32],
    inv_rms: &[f32],
    dy: &[f32],
    h: usize,
    rows: &[Range<usize>],
    dw: &mut [f32],
) {
    let n = inv_rms.len() * h;
    assert!(x.len() == n && dy.len() == n && dw.len() == h, "norm weight of {} elements, h = {h}", dw.len());
    let total: usize = rows.iter().map(Range::len).sum();
    ctx.split_rows(h, total, Rows(dw, 1), |columns, dw| {
        weight_grad(ctx.level(), x, inv_rms, dy, h, rows, columns, dw.0);
    });
}

by_level! {
    fn weight_grad(
        x: &[f32],
        inv_rms: &[f32],
        dy: &[f32],
        h: usize,
        rows: &[Range<usize>],
        columns: Range<usize>,
        dw: &mut [f32],
    ) {
        dw.fill(0.0);
        for row in rows.iter().cloned().flatten() {
            let (lo, hi) = (row * h + columns.start, row * h + columns.end);
            let inv = inv_rms[row];
            for ((dw, x), dy) in dw.iter_mut().zip(&x[lo..hi]).zip(&dy[lo..hi]) {
                *dw = dy.mul_add(x * inv, *dw);
            }
        }
    }
}

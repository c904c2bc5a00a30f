//! Textbook twins of the kernels: plain loops, f64 inside, no blocks. For tests and as a reference for other backends.

mod attention;
mod experts;

pub use attention::{attention, attention_backward};
pub use experts::{experts, gates};

use std::ops::Range;

use crate::{Acc, AdamW, IGNORE, Mat};

/// c = a b or c += a b; c: m x n contiguous.
pub fn product(a: Mat, b: Mat, c: &mut [f32], acc: Acc) {
    for i in 0..a.rows {
        for j in 0..b.cols {
            let s: f64 = (0..a.cols).map(|p| a.at(i, p) as f64 * b.at(p, j) as f64).sum();
            let c = &mut c[i * b.cols + j];
            *c = match acc {
                Acc::Store => s as f32,
                Acc::Add => (*c as f64 + s) as f32,
            };
        }
    }
}

fn inv_rms(x: &[f32], eps: f32) -> f64 {
    let mean = x.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / x.len() as f64;
    1.0 / (mean + eps as f64).sqrt()
}

/// y = x / sqrt(mean(x^2) + eps) * w; rows of w.len().
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let row = |x: &[f32]| {
        let inv = inv_rms(x, eps);
        x.iter().zip(w).map(|(&x, &w)| (x as f64 * inv * w as f64) as f32).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

/// dx of [`rms_norm`].
pub fn rms_norm_backward(x: &[f32], w: &[f32], eps: f32, dy: &[f32]) -> Vec<f32> {
    let h = w.len();
    let row = |(x, dy): (&[f32], &[f32])| {
        let inv = inv_rms(x, eps);
        let dot: f64 = (0..h).map(|j| dy[j] as f64 * w[j] as f64 * x[j] as f64).sum();
        (0..h)
            .map(|j| (inv * dy[j] as f64 * w[j] as f64 - x[j] as f64 * inv.powi(3) * dot / h as f64) as f32)
            .collect::<Vec<_>>()
    };
    x.chunks(h).zip(dy.chunks(h)).flat_map(row).collect()
}

/// dw of [`rms_norm`] over the rows in `rows`.
pub fn rms_norm_weight_grad(x: &[f32], h: usize, eps: f32, dy: &[f32], rows: &[Range<usize>]) -> Vec<f32> {
    let mut dw = vec![0.0f64; h];
    for r in rows.iter().cloned().flatten() {
        let inv = inv_rms(&x[r * h..(r + 1) * h], eps);
        for j in 0..h {
            dw[j] += dy[r * h + j] as f64 * x[r * h + j] as f64 * inv;
        }
    }
    dw.into_iter().map(|d| d as f32).collect()
}

/// Rotates pairs (i, i + head_dim / 2) of each head by position * theta^(-2i / head_dim), or back.
pub fn rope(head_dim: usize, theta: f64, positions: &[u32], heads: usize, x: &mut [f32], inverse: bool) {
    let half = head_dim / 2;
    for (r, &position) in positions.iter().enumerate() {
        for h in 0..heads {
            let head = &mut x[(r * heads + h) * head_dim..][..head_dim];
            for i in 0..half {
                let angle = position as f64 * theta.powf(-2.0 * i as f64 / head_dim as f64);
                let (sin, cos) = if inverse { -angle } else { angle }.sin_cos();
                let (a, b) = (head[i] as f64, head[i + half] as f64);
                head[i] = (a * cos - b * sin) as f32;
                head[i + half] = (b * cos + a * sin) as f32;
            }
        }
    }
}

/// silu(gate) * up.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let one = |(&g, &u): (&f32, &f32)| (g as f64 / (1.0 + (-g as f64).exp()) * u as f64) as f32;
    gate.iter().zip(up).map(one).collect()
}

/// (d_gate, d_up) of [`swiglu`].
pub fn swiglu_backward(gate: &[f32], up: &[f32], d_act: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let one = |((&g, &u), &d): ((&f32, &f32), &f32)| {
        let (g, u, d) = (g as f64, u as f64, d as f64);
        let s = 1.0 / (1.0 + (-g).exp());
        ((d * u * (s + g * s * (1.0 - s))) as f32, (d * g * s) as f32)
    };
    gate.iter().zip(up).zip(d_act).map(one).unzip()
}

/// Loss of each row over the whole vocabulary (`valid` columns of `width`), 0 for [`IGNORE`].
pub fn xent_loss(logits: &[f32], width: usize, valid: usize, targets: &[u32]) -> Vec<f64> {
    let row = |(x, &t): (&[f32], &u32)| {
        if t == IGNORE {
            return 0.0;
        }
        let max = x[..valid].iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x as f64));
        let sum: f64 = x[..valid].iter().map(|&x| (x as f64 - max).exp()).sum();
        sum.ln() + max - x[t as usize] as f64
    };
    logits.chunks(width).zip(targets).map(row).collect()
}

/// softmax - onehot over the whole vocabulary; zeros for [`IGNORE`] and for padding.
pub fn xent_grad(logits: &[f32], width: usize, valid: usize, targets: &[u32]) -> Vec<f32> {
    let mut grad = vec![0.0; logits.len()];
    for ((g, x), &t) in grad.chunks_mut(width).zip(logits.chunks(width)).zip(targets) {
        if t == IGNORE {
            continue;
        }
        let max = x[..valid].iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x as f64));
        let sum: f64 = x[..valid].iter().map(|&x| (x as f64 - max).exp()).sum();
        for j in 0..valid {
            let onehot = if j == t as usize { 1.0 } else { 0.0 };
            g[j] = ((x[j] as f64 - max).exp() / sum - onehot) as f32;
        }
    }
    grad
}

/// Rows of w for the ids of the slice from `first`, else zeros.
pub fn embed(ids: &[u32], w: &[f32], h: usize, first: u32) -> Vec<f32> {
    let slice = first as usize..first as usize + w.len() / h;
    let mut out = vec![0.0; ids.len() * h];
    for (out, &id) in out.chunks_mut(h).zip(ids) {
        if slice.contains(&(id as usize)) {
            out.copy_from_slice(&w[(id - first) as usize * h..][..h]);
        }
    }
    out
}

/// Adds dx of each id of the slice to dw.
pub fn embed_backward(ids: &[u32], dx: &[f32], h: usize, first: u32, dw: &mut [f32]) {
    let slice = first as usize..first as usize + dw.len() / h;
    for (dx, &id) in dx.chunks(h).zip(ids) {
        if slice.contains(&(id as usize)) {
            let at = (id - first) as usize * h;
            dw[at..at + h].iter_mut().zip(dx).for_each(|(w, x)| *w += x);
        }
    }
}

/// One AdamW update in f64.
pub fn adamw(s: &AdamW, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    let (b1, b2, lr) = (s.beta1 as f64, s.beta2 as f64, s.lr as f64);
    for i in 0..p.len() {
        let g = g[i] as f64 * s.grad_scale as f64;
        let m1 = b1 * m[i] as f64 + (1.0 - b1) * g;
        let v1 = b2 * v[i] as f64 + (1.0 - b2) * g * g;
        let p1 = p[i] as f64 * (1.0 - lr * s.weight_decay as f64);
        let step = (m1 / s.correction1 as f64) / ((v1 / s.correction2 as f64).sqrt() + s.eps as f64);
        (m[i], v[i], p[i]) = (m1 as f32, v1 as f32, (p1 - lr * step) as f32);
    }
}

//! AdamW, element by element, hence free to shard.

use std::ops::Range;

use crate::checksum;
use crate::ctx::{Ctx, Part, Rows};
use crate::simd::by_level;

/// Scalars of one AdamW update (Loshchilov and Hutter, decoupled weight decay).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay, multiplied by the learning rate.
    pub weight_decay: f32,
    /// 1 - beta1^step.
    pub correction1: f32,
    /// 1 - beta2^step.
    pub correction2: f32,
    /// Factor of the gradient (clipping).
    pub grad_scale: f32,
}

/// One update. p, g, m, v of one length.
///
/// g' = g grad_scale; m = beta1 m + (1 - beta1) g'; v = beta2 v + (1 - beta2) g'^2; p -= lr weight_decay p;
/// p -= lr (m / correction1) / (sqrt(v / correction2) + eps).
pub fn adamw(ctx: &Ctx, step: &AdamW, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    let n = p.len();
    assert!(
        g.len() == n && m.len() == n && v.len() == n,
        "update of {n} parameters with {} gradients, {} and {} moments",
        g.len(),
        m.len(),
        v.len()
    );
    ctx.split_rows(n, 2, (Rows(p, 1), Rows(m, 1), Rows(v, 1)), |r, (p, m, v)| {
        update(ctx.level(), step, p.0, &g[r], m.0, v.0);
    });
}

/// State of an update: parameters and both moments, of one length.
#[derive(Debug)]
pub struct AdamWState<'a> {
    /// Parameters.
    pub p: &'a mut [f32],
    /// First moments.
    pub m: &'a mut [f32],
    /// Second moments.
    pub v: &'a mut [f32],
}

/// [`adamw`] of the ranges in `parts`, each with its weight decay, in one pass; they ascend, and what lies outside of them stays.
///
/// With `sums` the checksums of every `block` elements of p, m and v as they are left: taken while they are in the
/// cache. Else nothing is returned.
pub fn adamw_parts(
    ctx: &Ctx,
    step: &AdamW,
    parts: &[(Range<usize>, f32)],
    state: AdamWState,
    g: &[f32],
    block: usize,
    sums: bool,
) -> Vec<[u64; 3]> {
    let AdamWState { p, m, v } = state;
    let n = p.len();
    assert!(
        g.len() == n && m.len() == n && v.len() == n && parts.iter().all(|(at, _)| at.end <= n),
        "update of {n} parameters with {} gradients, {} and {} moments, parts {parts:?}",
        g.len(),
        m.len(),
        v.len()
    );
    let mut out = vec![[0; 3]; n.div_ceil(block)];
    let (level, blocks) = (ctx.level(), out.len());
    let data = (Blocks(p, block), Blocks(m, block), Blocks(v, block));
    ctx.split_rows(blocks, 2 * block, (data, Rows(&mut out, 1)), |r, ((p, m, v), out)| {
        let data = p.0.chunks_mut(block).zip(m.0.chunks_mut(block)).zip(v.0.chunks_mut(block));
        for ((i, out), ((p, m), v)) in r.zip(out.0).zip(data) {
            let whole = i * block..i * block + p.len();
            for (part, weight_decay) in parts {
                let at = part.start.max(whole.start)..part.end.min(whole.end);
                if at.is_empty() {
                    continue;
                }
                let here = at.start - whole.start..at.end - whole.start;
                let step = AdamW { weight_decay: *weight_decay, ..*step };
                update(level, &step, &mut p[here.clone()], &g[at], &mut m[here.clone()], &mut v[here]);
            }
            if sums {
                *out = [&*p, m, v].map(|x| checksum::sum(level, x));
            }
        }
    });
    if sums { out } else { Vec::new() }
}

/// Contiguous blocks, the last of which may be short.
struct Blocks<'a>(&'a mut [f32], usize);

impl Part for Blocks<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        let at = (at * self.1).min(self.0.len());
        let (a, b) = self.0.split_at_mut(at);
        (Blocks(a, self.1), Blocks(b, self.1))
    }
}

by_level! {
    fn update(s: &AdamW, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let s = *s;
        let (rest1, rest2) = (1.0 - s.beta1, 1.0 - s.beta2);
        let decay = -(s.lr * s.weight_decay);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * s.grad_scale;
            *m = s.beta1.mul_add(*m, rest1 * g);
            *v = s.beta2.mul_add(*v, rest2 * g * g);
            let step = (*m / s.correction1) / ((*v / s.correction2).sqrt() + s.eps);
            *p = decay.mul_add(*p, *p);
            *p = (-s.lr).mul_add(step, *p);
        }
    }
}

//! AdamW, element by element, hence free to shard.

use crate::ctx::{Ctx, Rows};
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

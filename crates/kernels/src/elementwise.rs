//! Kernels without neighbours: SwiGLU, sums of buffers, squares.

use crate::ctx::{Ctx, Rows};
use crate::lanes::{LANES, tree64};
use crate::math::exp;
use crate::simd::by_level;

/// act = silu(gate) * up, silu(g) = g / (1 + e^-g). All of one length.
pub fn swiglu(ctx: &Ctx, gate: &[f32], up: &[f32], act: &mut [f32]) {
    let n = act.len();
    assert!(gate.len() == n && up.len() == n, "swiglu of {}, {} and {n} elements", gate.len(), up.len());
    ctx.split_rows(n, 4, Rows(act, 1), |r, act| swiglu_range(ctx.level(), &gate[r.clone()], &up[r], act.0));
}

by_level! {
    fn swiglu_range(gate: &[f32], up: &[f32], act: &mut [f32]) {
        for ((act, &g), &u) in act.iter_mut().zip(gate).zip(up) {
            let sigma = 1.0 / (1.0 + exp(-g));
            *act = g * sigma * u;
        }
    }
}

/// With s = 1 / (1 + e^-gate): d_up = d_act gate s; d_gate = d_act up s (1 + gate (1 - s)). Both stored.
pub fn swiglu_backward(ctx: &Ctx, gate: &[f32], up: &[f32], d_act: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
    let n = d_act.len();
    assert!(
        gate.len() == n && up.len() == n && d_gate.len() == n && d_up.len() == n,
        "swiglu gradient of {n} elements: {}, {}, {}, {}",
        gate.len(),
        up.len(),
        d_gate.len(),
        d_up.len()
    );
    ctx.split_rows(n, 4, (Rows(d_gate, 1), Rows(d_up, 1)), |r, (d_gate, d_up)| {
        swiglu_backward_range(ctx.level(), &gate[r.clone()], &up[r.clone()], &d_act[r], d_gate.0, d_up.0);
    });
}

by_level! {
    fn swiglu_backward_range(gate: &[f32], up: &[f32], d_act: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
        for ((((d_gate, d_up), &g), &u), &d) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(d_act) {
            let sigma = 1.0 / (1.0 + exp(-g));
            *d_up = d * (g * sigma);
            *d_gate = d * u * sigma * g.mul_add(1.0 - sigma, 1.0);
        }
    }
}

/// [`swiglu`] and [`swiglu_backward`] in one pass and in place: gate becomes d_gate, up d_up, and d_act becomes act.
pub fn swiglu_gradients(ctx: &Ctx, gate: &mut [f32], up: &mut [f32], d_act: &mut [f32]) {
    let n = d_act.len();
    assert!(gate.len() == n && up.len() == n, "swiglu gradients of {}, {} and {n} elements", gate.len(), up.len());
    ctx.split_rows(n, 4, (Rows(gate, 1), Rows(up, 1), Rows(d_act, 1)), |_, (gate, up, d_act)| {
        swiglu_gradients_range(ctx.level(), gate.0, up.0, d_act.0);
    });
}

by_level! {
    fn swiglu_gradients_range(gate: &mut [f32], up: &mut [f32], d_act: &mut [f32]) {
        for ((gate, up), d_act) in gate.iter_mut().zip(up).zip(d_act) {
            let (g, u, d) = (*gate, *up, *d_act);
            let sigma = 1.0 / (1.0 + exp(-g));
            *d_act = g * sigma * u;
            *up = d * (g * sigma);
            *gate = d * u * sigma * g.mul_add(1.0 - sigma, 1.0);
        }
    }
}

/// dst += src.
pub fn add_assign(ctx: &Ctx, dst: &mut [f32], src: &[f32]) {
    assert_eq!(dst.len(), src.len(), "sum of buffers of unequal length");
    ctx.split_rows(dst.len(), 1, Rows(dst, 1), |r, dst| add_range(ctx.level(), dst.0, &src[r]));
}

by_level! {
    fn add_range(dst: &mut [f32], src: &[f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d += s;
        }
    }
}

/// Sum of x^2 in f64: 16 lanes, added in one tree. One call is one leaf (a chunk of a parameter); never threaded.
pub fn sum_squares(ctx: &Ctx, x: &[f32]) -> f64 {
    squares(ctx.level(), x)
}

/// [`sum_squares`] of every `chunk` elements of x, leaf by leaf; the last one may be short.
pub fn chunk_squares(ctx: &Ctx, x: &[f32], chunk: usize) -> Vec<f64> {
    let mut out = vec![0.0; x.len().div_ceil(chunk)];
    ctx.split_rows(out.len(), chunk, Rows(&mut out, 1), |r, out| {
        for (i, out) in r.zip(out.0) {
            *out = squares(ctx.level(), &x[i * chunk..x.len().min((i + 1) * chunk)]);
        }
    });
    out
}

by_level! {
    fn squares(x: &[f32]) -> f64 {
        let mut acc = [0.0f64; LANES];
        let (chunks, tail) = x.as_chunks::<LANES>();
        for a in chunks {
            for l in 0..LANES {
                let a = a[l] as f64;
                acc[l] = a.mul_add(a, acc[l]);
            }
        }
        for (l, &a) in tail.iter().enumerate() {
            acc[l] = (a as f64).mul_add(a as f64, acc[l]);
        }
        tree64(acc)
    }
}

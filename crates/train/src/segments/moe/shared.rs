//! The expert that every row passes, on the rows where they are.

use kernels::{Acc, Mat, MatMut};
use spec::tensors::Role;

use super::rows_of_leaf;
use crate::buffers::Memory;
use crate::error::TrainError;
use crate::segments::{Env, add_weight_grad, linear, need};
use crate::state::ChunkState;

const ROLES: [Role; 3] = [Role::SharedGate, Role::SharedUp, Role::SharedDown];

/// Adds its output; keeps gate and up.
pub(super) fn forward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    width: usize,
    out: &mut [f32],
) -> Vec<Vec<f32>> {
    let (rows, hidden) = (env.rows_local(), env.place.hidden);
    let kept = self::kept(env, chunk, memory, layer, n, width);
    let mut act = memory.pool.take(rows * width);
    kernels::swiglu(env.ctx, &kept[0], &kept[1], &mut act);
    let down = Mat::new(chunk.param(layer, ROLES[2]), hidden, width);
    kernels::product(env.ctx, Mat::new(&act, rows, width), down.t(), MatMut::new(out, rows, hidden), Acc::Add);
    memory.pool.give(act);
    kept
}

/// Gate and up of the rows `n`: all that the backward reads.
pub(super) fn kept(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    width: usize,
) -> Vec<Vec<f32>> {
    let (rows, hidden) = (env.rows_local(), env.place.hidden);
    let project = |role| {
        let mut out = memory.pool.take(rows * width);
        linear(env.ctx, n, rows, chunk.param(layer, role), hidden, &mut out);
        out
    };
    ROLES[..2].iter().copied().map(project).collect()
}

/// Its weight gradients, a leaf per lane and hosted slice, and its share of the rows' gradient.
pub(super) fn backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    kept: &mut Vec<Vec<f32>>,
    out: &mut [f32],
) -> Result<(), TrainError> {
    let ctx = env.ctx;
    let (rows, hidden) = (env.rows_local(), env.place.hidden);
    let up = need(&mut kept.pop(), "the shared expert's up")?;
    let gate = need(&mut kept.pop(), "the shared expert's gate")?;
    let width = gate.len() / rows;
    let mut act = memory.pool.take(rows * width);
    let dy = need(&mut memory.regs.grad, "grad")?;
    let down = Mat::new(chunk.param(layer, ROLES[2]), hidden, width);
    kernels::product(ctx, Mat::new(&dy, rows, hidden), down, MatMut::new(&mut act, rows, width), Acc::Store);
    let (mut d_gate, mut d_up) = (gate, up);
    kernels::swiglu_gradients(ctx, &mut d_gate, &mut d_up, &mut act);
    for leaf in env.lane_cells() {
        let of_leaf = rows_of_leaf(env, leaf);
        let mut part = |x: &[f32], width: usize| {
            let mut out = memory.pool.take(of_leaf.len() * width);
            kernels::gather_rows(ctx, x, width, &of_leaf, &mut out);
            out
        };
        let (n, dy) = (part(n, hidden), part(&dy, hidden));
        let inner = [part(&d_gate, width), part(&d_up, width), part(&act, width)];
        let mat = |x, width| Mat::new(x, of_leaf.len(), width);
        add_weight_grad(ctx, mat(&inner[0], width), mat(&n, hidden), chunk.slice_grad(leaf, layer, ROLES[0]));
        add_weight_grad(ctx, mat(&inner[1], width), mat(&n, hidden), chunk.slice_grad(leaf, layer, ROLES[1]));
        add_weight_grad(ctx, mat(&dy, hidden), mat(&inner[2], width), chunk.slice_grad(leaf, layer, ROLES[2]));
        [n, dy].into_iter().chain(inner).for_each(|b| memory.pool.give(b));
    }
    for (role, d) in [(ROLES[0], &d_gate), (ROLES[1], &d_up)] {
        let w = Mat::new(chunk.param(layer, role), width, hidden);
        kernels::product(ctx, Mat::new(d, rows, width), w, MatMut::new(out, rows, hidden), Acc::Add);
    }
    memory.regs.grad = Some(dy);
    [act, d_gate, d_up].into_iter().for_each(|b| memory.pool.give(b));
    Ok(())
}

//! RMSNorms and residual additions, on the hosted sequence slices.

use kernels::Acc;
use spec::Unit;
use spec::tensors::Role;

use super::{Env, need, store_norm_leaf};
use crate::buffers::{Memory, Saved};
use crate::error::TrainError;
use crate::state::ChunkState;

/// y = norm(x) w; gives (y, 1/rms).
fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, x: &[f32], layer: usize, role: Role) -> [Vec<f32>; 2] {
    let mut y = memory.pool.take(x.len());
    let mut inv = memory.pool.take(env.rows_local());
    kernels::rms_norm(env.ctx, x, chunk.param(layer, role), env.model.norm_eps, &mut y, &mut inv);
    [y, inv]
}

/// The normed rows that [`Env::norms_again`] says were not kept.
pub(super) fn again(env: &Env, chunk: &ChunkState, memory: &mut Memory, x: &[f32], at: (usize, Role)) -> Vec<f32> {
    let [y, inv] = forward(env, chunk, memory, x, at.0, at.1);
    memory.pool.give(inv);
    y
}

/// The weight's gradient, a leaf per lane and hosted slice, then the input's into `grad`.
#[allow(clippy::too_many_arguments)] // a norm is its operands
fn backward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    (layer, role): (usize, Role),
    x: &[f32],
    inv: &[f32],
    dy: &[f32],
    grad: &mut [f32],
    acc: Acc,
) {
    for (lane, i) in env.lane_cells() {
        let rows = env.place.cell_rows(lane, i);
        store_norm_leaf(env, chunk, memory, (lane, i), (layer, role), |dw| {
            kernels::rms_norm_weight_grad(env.ctx, x, inv, dy, env.place.hidden, &rows, dw);
        });
    }
    kernels::rms_norm_backward(env.ctx, x, chunk.param(layer, role), inv, dy, grad, acc);
}

fn saved(memory: &mut Memory, chunk: usize, unit: Unit) -> &mut Saved {
    memory.saved.entry((chunk, unit)).or_default()
}

/// Norm before the attention; keeps its input.
pub fn attn_forward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    // The first layer of the model finds the embedding, the others the stream.
    let x = match memory.regs.x.take() {
        Some(x) => x,
        None => need(&mut memory.regs.reduced, "x")?,
    };
    let [y, inv] = forward(env, chunk, memory, &x, layer, Role::AttnNorm);
    memory.regs.normed = Some(y);
    let kept = memory.layer(chunk.chunk, unit, layer);
    (kept.x_attn, kept.inv_attn) = (x, inv);
    Ok(())
}

/// The norm before the attention a second time, out of the kept input.
pub fn attn_again(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let x = std::mem::take(&mut memory.layer(chunk.chunk, unit, layer).x_attn);
    let [y, inv] = forward(env, chunk, memory, &x, layer, Role::AttnNorm);
    memory.regs.normed = Some(y);
    let kept = memory.layer(chunk.chunk, unit, layer);
    kept.x_attn = x;
    let spent = std::mem::replace(&mut kept.inv_attn, inv);
    memory.pool.give(spent);
    Ok(())
}

/// The attention's output joins the stream; norm before the feed-forward.
pub fn mlp_forward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let mut x = need(&mut memory.regs.reduced, "reduced")?;
    let kept = memory.layer(chunk.chunk, unit, layer);
    kernels::add_assign(env.ctx, &mut x, &kept.x_attn);
    let [y, inv] = forward(env, chunk, memory, &x, layer, Role::MlpNorm);
    memory.regs.normed = Some(y);
    let kept = memory.layer(chunk.chunk, unit, layer);
    (kept.x_mlp, kept.inv_mlp) = (x, inv);
    Ok(())
}

/// The feed-forward's output joins the stream.
pub fn residual(env: &Env, memory: &mut Memory, unit: Unit, chunk: usize, layer: usize) -> Result<(), TrainError> {
    let mut x = need(&mut memory.regs.reduced, "reduced")?;
    let kept = memory.layer(chunk, unit, layer);
    kernels::add_assign(env.ctx, &mut x, &kept.x_mlp);
    memory.regs.x = Some(x);
    Ok(())
}

/// Final norm. In training it opens the backward, so its input was kept at the end of the forward.
pub fn head_forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit) -> Result<(), TrainError> {
    let x = match memory.regs.x.take() {
        Some(x) => x,
        None => std::mem::take(&mut saved(memory, chunk.chunk, unit).x_head),
    };
    let [y, inv] = forward(env, chunk, memory, &x, 0, Role::FinalNorm);
    memory.regs.normed = Some(y);
    let kept = saved(memory, chunk.chunk, unit);
    (kept.x_head, kept.inv_head) = (x, inv);
    Ok(())
}

/// Gradient of the stream out of the head.
pub fn head_backward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit) -> Result<(), TrainError> {
    let dy = need(&mut memory.regs.reduced, "reduced")?;
    let kept = saved(memory, chunk.chunk, unit);
    let (x, inv) = (std::mem::take(&mut kept.x_head), std::mem::take(&mut kept.inv_head));
    let mut grad = memory.pool.take(x.len());
    backward(env, chunk, memory, (0, Role::FinalNorm), &x, &inv, &dy, &mut grad, Acc::Store);
    memory.regs.grad = Some(grad);
    [x, inv, dy].into_iter().for_each(|b| memory.pool.give(b));
    Ok(())
}

/// Adds the feed-forward's share to the gradient of the stream.
pub fn mlp_backward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let kept = memory.layer(chunk.chunk, unit, layer);
    let (x, inv) = (std::mem::take(&mut kept.x_mlp), std::mem::take(&mut kept.inv_mlp));
    add_backward(env, chunk, memory, (layer, Role::MlpNorm), x, inv)
}

/// Adds the attention's share.
pub fn attn_backward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let kept = memory.layer(chunk.chunk, unit, layer);
    let (x, inv) = (std::mem::take(&mut kept.x_attn), std::mem::take(&mut kept.inv_attn));
    memory.settle_layer(chunk.chunk, unit, layer);
    add_backward(env, chunk, memory, (layer, Role::AttnNorm), x, inv)
}

fn add_backward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    norm: (usize, Role),
    x: Vec<f32>,
    inv: Vec<f32>,
) -> Result<(), TrainError> {
    let dy = need(&mut memory.regs.reduced, "reduced")?;
    let mut grad = need(&mut memory.regs.grad, "grad")?;
    backward(env, chunk, memory, norm, &x, &inv, &dy, &mut grad, Acc::Add);
    memory.regs.grad = Some(grad);
    [x, inv, dy].into_iter().for_each(|b| memory.pool.give(b));
    Ok(())
}

//! Queries, keys and values out of the normed rows: projections, QK-norm, rotation.

use std::ops::Range;

use kernels::Acc;
use spec::Unit;
use spec::tensors::Role;

use super::super::products::{column_parallel, column_parallel_input, column_parallel_weight};
use super::super::{Env, Part, need, norm, store_norm_leaf};
use crate::buffers::{LayerSaved, Memory, QkvWeights};
use crate::error::TrainError;
use crate::state::ChunkState;

/// Rotated queries and keys, and values; kept.
pub fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    kept.n_attn = need(&mut memory.regs.rows, "rows")?;
    kept.q = memory.pool.take(rows * place.q_width());
    kept.k = memory.pool.take(rows * place.kv_width());
    kept.v = memory.pool.take(rows * place.kv_width());
    let uses = vec![(Role::Q, &mut kept.q[..]), (Role::K, &mut kept.k), (Role::V, &mut kept.v)];
    column_parallel(env, chunk, layer, &kept.n_attn, uses);
    if env.norms_again() {
        memory.pool.give(std::mem::take(&mut kept.n_attn));
    }
    if env.model.qk_norm {
        norm_heads(env, chunk, memory, layer, &mut kept);
    }
    let positions = &memory.tokens[&unit].positions;
    kernels::rope(ctx, env.rope, positions, place.q_width() / place.head_dim, &mut kept.q);
    kernels::rope(ctx, env.rope, positions, place.kv_width() / place.head_dim, &mut kept.k);
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// QK-norm: every query and key head on its own; keeps the heads before it.
fn norm_heads(env: &Env, chunk: &ChunkState, memory: &mut Memory, layer: usize, kept: &mut LayerSaved) {
    let dim = env.place.head_dim;
    let mut one = |raw: Vec<f32>, role| {
        let mut out = memory.pool.take(raw.len());
        let mut inv = memory.pool.take(raw.len() / dim);
        kernels::rms_norm(env.ctx, &raw, chunk.param(layer, role), env.model.norm_eps, &mut out, &mut inv);
        (out, raw, inv)
    };
    let (q, q_raw, q_inv) = one(std::mem::take(&mut kept.q), Role::QNorm);
    let (k, k_raw, k_inv) = one(std::mem::take(&mut kept.k), Role::KNorm);
    (kept.q, kept.k) = (q, k);
    kept.qk_raw = Some([q_raw, k_raw]);
    kept.qk_inv = Some([q_inv, k_inv]);
}

/// Partial gradients of the normed rows, and the weight gradients or what they need.
pub fn backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
    part: Part,
) -> Result<(), TrainError> {
    let (place, ctx) = (env.place, env.ctx);
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut dq = need(&mut memory.regs.d_q, "d_q")?;
    let [mut dk, dv] = need(&mut memory.regs.d_keys, "d_keys")?;
    let positions = &memory.tokens[&unit].positions;
    kernels::rope_backward(ctx, env.rope, positions, place.q_width() / place.head_dim, &mut dq);
    kernels::rope_backward(ctx, env.rope, positions, place.kv_width() / place.head_dim, &mut dk);
    if env.model.qk_norm {
        [dq, dk] = norm_heads_backward(env, chunk, memory, layer, &mut kept, [dq, dk])?;
    }
    if env.norms_again() {
        kept.n_attn = norm::again(env, chunk, memory, &kept.x_attn, (layer, Role::AttnNorm));
    }
    let uses = [(Role::Q, &dq[..]), (Role::K, &dk), (Role::V, &dv)];
    if part == Part::Whole {
        column_parallel_weight(env, chunk, layer, &kept.n_attn, &uses);
    }
    memory.regs.partials = Some(column_parallel_input(env, chunk, memory, layer, &uses));
    let n = std::mem::take(&mut kept.n_attn);
    match part {
        Part::Whole => [n, dq, dk, dv].into_iter().for_each(|b| memory.pool.give(b)),
        Part::Input => kept.qkv_weights = Some(QkvWeights { n, dq, dk, dv }),
    }
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// The weight gradients that [`backward`] put off.
pub fn backward_weight(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let kept = memory.layer(chunk.chunk, unit, layer);
    let QkvWeights { n, dq, dk, dv } = need(&mut kept.qkv_weights, "qkv_weights")?;
    column_parallel_weight(env, chunk, layer, &n, &[(Role::Q, &dq), (Role::K, &dk), (Role::V, &dv)]);
    [n, dq, dk, dv].into_iter().for_each(|b| memory.pool.give(b));
    memory.settle_layer(chunk.chunk, unit, layer);
    Ok(())
}

/// Gradients through QK-norm. The leaf of its weights is a tensor cell's heads over all rows of a lane.
fn norm_heads_backward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    kept: &mut LayerSaved,
    grads: [Vec<f32>; 2],
) -> Result<[Vec<f32>; 2], TrainError> {
    let (place, dim) = (env.place, env.place.head_dim);
    let raw = need(&mut kept.qk_raw, "queries and keys before their norm")?;
    let inv = need(&mut kept.qk_inv, "1 / rms of queries and keys")?;
    let heads = [place.heads_cell, place.kv_heads_cell];
    let mut out = [Vec::new(), Vec::new()];
    for (n, ((raw, inv), dy)) in raw.into_iter().zip(inv).zip(grads).enumerate() {
        let role = [Role::QNorm, Role::KNorm][n];
        for (lane, i) in env.lane_cells() {
            let rows = head_rows(env.lane_rows(lane), heads[n], place.num_cells(), i);
            store_norm_leaf(env, chunk, memory, (lane, i), (layer, role), |dw| {
                kernels::rms_norm_weight_grad(env.ctx, &raw, &inv, &dy, dim, &rows, dw);
            });
        }
        let mut dx = memory.pool.take(raw.len());
        kernels::rms_norm_backward(env.ctx, &raw, chunk.param(layer, role), &inv, &dy, &mut dx, Acc::Store);
        [raw, inv, dy].into_iter().for_each(|b| memory.pool.give(b));
        out[n] = dx;
    }
    Ok(out)
}

/// The (token, head) rows of hosted cell `i`, tokens ascending.
fn head_rows(rows: Range<usize>, heads_cell: usize, cells: usize, i: usize) -> Vec<Range<usize>> {
    rows.map(|row| {
        let first = (row * cells + i) * heads_cell;
        first..first + heads_cell
    })
    .collect()
}

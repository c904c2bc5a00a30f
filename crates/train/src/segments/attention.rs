//! Attention: query, key and value are column-parallel, the output projection is row-parallel.

use std::ops::Range;

use kernels::{Acc, AttnShape, Mat, MatMut, Queries};
use spec::Unit;
use spec::tensors::Role;

use super::{Env, Part, grad_rows, linear, need, partials, store_norm_leaf, weight_grad};
use crate::buffers::{AttnWeights, LayerSaved, Memory};
use crate::error::TrainError;
use crate::state::ChunkState;

fn shape(env: &Env) -> AttnShape {
    let place = env.place;
    AttnShape {
        batch: env.lanes.len() * place.batch,
        seq: place.seq_lane,
        queries: Queries::all(place.seq_lane),
        heads: place.heads_cell * place.num_cells(),
        kv_heads: place.kv_heads_cell * place.num_cells(),
        head_dim: place.head_dim,
    }
}

/// Partial outputs, one leaf per hosted cell.
pub fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let (hidden, shape) = (place.hidden, shape(env));
    let key = (chunk.chunk, unit);
    let mut kept = memory.saved.entry(key).or_default().layers.remove(&layer).unwrap_or_default();
    kept.n_attn = need(&mut memory.regs.rows, "rows")?;
    kept.q = memory.pool.take(rows * place.q_width());
    kept.k = memory.pool.take(rows * place.kv_width());
    kept.v = memory.pool.take(rows * place.kv_width());
    for (role, out) in [(Role::Q, &mut kept.q), (Role::K, &mut kept.k), (Role::V, &mut kept.v)] {
        linear(ctx, &kept.n_attn, rows, chunk.param(layer, role), hidden, out);
    }
    if env.model.qk_norm {
        norm_heads(env, chunk, memory, layer, &mut kept);
    }
    let tokens = &memory.tokens[&unit];
    kernels::rope(ctx, env.rope, &tokens.positions, shape.heads, &mut kept.q);
    kernels::rope(ctx, env.rope, &tokens.positions, shape.kv_heads, &mut kept.k);
    kept.o = memory.pool.take(rows * place.q_width());
    kept.lse = memory.pool.take(rows * shape.heads);
    let doc_start = &memory.tokens[&unit].doc_start;
    kernels::attention(ctx, &shape, &kept.q, &kept.k, &kept.v, doc_start, &mut kept.o, &mut kept.lse);

    let cell = place.heads_cell * place.head_dim;
    let o = Mat::new(&kept.o, rows, place.q_width());
    let sums = partials(env, memory, rows * hidden, |_, i, out| {
        let w = Mat::new(chunk.param_slice(layer, Role::O, i), hidden, cell);
        let o = o.cols_range(place.cell_cols(i, cell));
        kernels::product(ctx, o, w.t(), MatMut::new(out, rows, hidden), Acc::Store);
    });
    memory.regs.partials = Some(sums);
    memory.saved.entry(key).or_default().layers.insert(layer, kept);
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
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let (hidden, shape) = (place.hidden, shape(env));
    let key = (chunk.chunk, unit);
    let mut kept = memory.saved.entry(key).or_default().layers.remove(&layer).unwrap_or_default();
    let grad = grad_rows(memory)?;
    if part == Part::Whole {
        output_gradient(env, chunk, layer, &grad.rows, &kept.o);
    }

    let cell = place.heads_cell * place.head_dim;
    let dy = Mat::new(&grad.rows, rows, hidden);
    let mut d_o = memory.pool.take(rows * place.q_width());
    for i in 0..place.num_cells() {
        let w = Mat::new(chunk.param_slice(layer, Role::O, i), hidden, cell);
        let out = MatMut::new(&mut d_o, rows, place.q_width()).cols_range(place.cell_cols(i, cell));
        kernels::product(ctx, dy, w, out, Acc::Store);
    }

    let mut dq = memory.pool.take(rows * place.q_width());
    let mut dk = memory.pool.take(rows * place.kv_width());
    let mut dv = memory.pool.take(rows * place.kv_width());
    let tokens = &memory.tokens[&unit];
    kernels::attention_backward(
        ctx,
        &shape,
        &kept.q,
        &kept.k,
        &kept.v,
        &kept.o,
        &kept.lse,
        &d_o,
        &tokens.doc_start,
        &mut dq,
        &mut dk,
        &mut dv,
    );
    kernels::rope_backward(ctx, env.rope, &tokens.positions, shape.heads, &mut dq);
    kernels::rope_backward(ctx, env.rope, &tokens.positions, shape.kv_heads, &mut dk);
    if env.model.qk_norm {
        [dq, dk] = norm_heads_backward(env, chunk, memory, layer, &mut kept, [dq, dk])?;
    }
    if part == Part::Whole {
        input_gradients(env, chunk, layer, &kept.n_attn, [&dq, &dk, &dv]);
    }

    let uses = [(Role::Q, &dq, place.q_width()), (Role::K, &dk, place.kv_width()), (Role::V, &dv, place.kv_width())];
    let weights = &*chunk;
    let sums = partials(env, memory, rows * hidden, |_, i, out| {
        for ((role, d, width), acc) in uses.into_iter().zip([Acc::Store, Acc::Add, Acc::Add]) {
            let cell = width / place.num_cells();
            let d = Mat::new(d, rows, width).cols_range(place.cell_cols(i, cell));
            let w = Mat::new(weights.param_slice(layer, role, i), cell, hidden);
            kernels::product(ctx, d, w, MatMut::new(out, rows, hidden), acc);
        }
    });
    memory.regs.partials = Some(sums);
    let [n, o] = [&mut kept.n_attn, &mut kept.o].map(std::mem::take);
    let LayerSaved { q, k, v, lse, .. } = &mut kept;
    for spent in [q, k, v, lse] {
        memory.pool.give(std::mem::take(spent));
    }
    memory.pool.give(d_o);
    match part {
        Part::Whole => {
            grad.release(memory);
            [n, o, dq, dk, dv].into_iter().for_each(|b| memory.pool.give(b));
        }
        Part::Input => {
            let dy = grad.keep(memory);
            kept.attn_weights = Some(AttnWeights { dy, o, n, dq, dk, dv });
        }
    }
    memory.saved.entry(key).or_default().layers.insert(layer, kept);
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
    let layers = &mut memory.saved.entry((chunk.chunk, unit)).or_default().layers;
    let kept = layers.entry(layer).or_default();
    let AttnWeights { dy, o, n, dq, dk, dv } = need(&mut kept.attn_weights, "attn_weights")?;
    output_gradient(env, chunk, layer, &dy, &o);
    input_gradients(env, chunk, layer, &n, [&dq, &dk, &dv]);
    [dy, o, n, dq, dk, dv].into_iter().for_each(|b| memory.pool.give(b));
    memory.settle_layer(chunk.chunk, unit, layer);
    Ok(())
}

/// Gradient of the output projection out of all rows' gradients and attention outputs.
fn output_gradient(env: &Env, chunk: &mut ChunkState, layer: usize, dy: &[f32], o: &[f32]) {
    let (place, rows) = (env.place, env.rows());
    let cell = place.heads_cell * place.head_dim;
    let output = chunk.held(layer, Role::O).clone();
    for i in 0..place.num_cells() {
        let o = Mat::new(o, rows, place.q_width()).cols_range(place.cell_cols(i, cell));
        weight_grad(env, Mat::new(dy, rows, place.hidden), o, &mut chunk.grads, output.slice(i));
    }
}

/// Gradients of the query, key and value projections.
fn input_gradients(env: &Env, chunk: &mut ChunkState, layer: usize, n: &[f32], [dq, dk, dv]: [&[f32]; 3]) {
    let (place, rows) = (env.place, env.rows());
    let n = Mat::new(n, rows, place.hidden);
    let uses = [(Role::Q, dq, place.q_width()), (Role::K, dk, place.kv_width()), (Role::V, dv, place.kv_width())];
    for (role, d, width) in uses {
        let at = chunk.grad_range(layer, role);
        weight_grad(env, Mat::new(d, rows, width), n, &mut chunk.grads, at);
    }
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

//! Attention: query, key and value are column-parallel, the output projection is row-parallel.
//!
//! With context cells an exchange of keys and values stands between the first three ([`qkv_forward`]) and the rest.

mod keys;
mod qkv;

use kernels::{Acc, Mat, MatMut};
use program::Pass;
use spec::Unit;
use spec::tensors::Role;

pub use self::qkv::{backward as qkv_backward, backward_weight as qkv_backward_weight, forward as qkv_forward};
use super::{Env, Part, grad_rows, need, partials, weight_grad};
use crate::buffers::{AttnWeights, LayerSaved, Memory};
use crate::error::TrainError;
use crate::state::ChunkState;

/// What a layer has kept of the unit; put back by who took it.
fn take_layer(memory: &mut Memory, chunk: usize, unit: Unit, layer: usize) -> LayerSaved {
    memory.saved.entry((chunk, unit)).or_default().layers.remove(&layer).unwrap_or_default()
}

fn put_layer(memory: &mut Memory, chunk: usize, unit: Unit, layer: usize, kept: LayerSaved) {
    memory.saved.entry((chunk, unit)).or_default().layers.insert(layer, kept);
}

/// Partial outputs, one leaf per hosted cell; none where only what backward reads is recomputed.
pub fn forward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
    pass: Pass,
) -> Result<(), TrainError> {
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let hidden = place.hidden;
    if place.grid_cp == 1 {
        qkv::forward(env, chunk, memory, unit, layer)?;
    }
    let mut kept = take_layer(memory, chunk.chunk, unit, layer);
    keys::attend(env, memory, unit, &mut kept, pass)?;

    if pass != Pass::RecomputeKept {
        let cell = place.heads_cell * place.head_dim;
        let o = Mat::new(&kept.o, rows, place.q_width());
        let sums = partials(env, memory, rows * hidden, |_, i, out| {
            let w = Mat::new(chunk.param_slice(layer, Role::O, i), hidden, cell);
            let o = o.cols_range(place.cell_cols(i, cell));
            kernels::product(ctx, o, w.t(), MatMut::new(out, rows, hidden), Acc::Store);
        });
        memory.regs.partials = Some(sums);
    }
    put_layer(memory, chunk.chunk, unit, layer, kept);
    Ok(())
}

/// Gradients of queries, keys and values, and the weight gradient or what it needs; without context cells all of
/// [`qkv_backward`] too.
pub fn backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
    part: Part,
) -> Result<(), TrainError> {
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let hidden = place.hidden;
    let mut kept = take_layer(memory, chunk.chunk, unit, layer);
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
    keys::attend_backward(env, memory, unit, &kept, &d_o)?;

    let o = std::mem::take(&mut kept.o);
    let LayerSaved { q, k, v, lse, .. } = &mut kept;
    for spent in [q, k, v, lse] {
        memory.pool.give(std::mem::take(spent));
    }
    memory.pool.give(d_o);
    match part {
        Part::Whole => {
            grad.release(memory);
            memory.pool.give(o);
        }
        Part::Input => {
            let dy = grad.keep(memory);
            kept.attn_weights = Some(AttnWeights { dy, o });
        }
    }
    put_layer(memory, chunk.chunk, unit, layer, kept);
    if place.grid_cp == 1 {
        qkv::backward(env, chunk, memory, unit, layer, part)?;
    }
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
    let AttnWeights { dy, o } = need(&mut kept.attn_weights, "attn_weights")?;
    output_gradient(env, chunk, layer, &dy, &o);
    [dy, o].into_iter().for_each(|b| memory.pool.give(b));
    if env.place.grid_cp == 1 {
        return qkv::backward_weight(env, chunk, memory, unit, layer);
    }
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

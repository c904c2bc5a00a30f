//! SwiGLU feed-forward: gate and up are column-parallel, down is row-parallel.

use kernels::{Acc, Mat, MatMut};
use program::Pass;
use spec::Unit;
use spec::tensors::Role;

use super::{Env, Part, grad_rows, linear, need, partials, weight_grad};
use crate::buffers::{LayerSaved, Memory, MlpWeights};
use crate::error::TrainError;
use crate::state::ChunkState;

fn layer_of(memory: &mut Memory, chunk: usize, unit: Unit, layer: usize) -> LayerSaved {
    let saved = memory.saved.entry((chunk, unit)).or_default();
    std::mem::take(saved.layers.entry(layer).or_default())
}

fn put_back(memory: &mut Memory, chunk: usize, unit: Unit, layer: usize, kept: LayerSaved) {
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
    let (place, rows) = (env.place, env.rows());
    let (hidden, width, cell) = (place.hidden, place.ffn_width(), place.ffn_cell);
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    kept.n_mlp = need(&mut memory.regs.rows, "rows")?;
    kept.gate = memory.pool.take(rows * width);
    kept.up = memory.pool.take(rows * width);
    linear(env.ctx, &kept.n_mlp, rows, chunk.param(layer, Role::Gate), hidden, &mut kept.gate);
    linear(env.ctx, &kept.n_mlp, rows, chunk.param(layer, Role::Up), hidden, &mut kept.up);
    if pass != Pass::RecomputeKept {
        let mut act = memory.pool.take(rows * width);
        kernels::swiglu(env.ctx, &kept.gate, &kept.up, &mut act);
        let sums = partials(env, memory, rows * hidden, |_, i, out| {
            let a = Mat::new(&act, rows, width).cols_range(place.cell_cols(i, cell));
            let w = Mat::new(chunk.param_slice(layer, Role::Down, i), hidden, cell);
            kernels::product(env.ctx, a, w.t(), MatMut::new(out, rows, hidden), Acc::Store);
        });
        memory.regs.partials = Some(sums);
        memory.pool.give(act);
    }
    put_back(memory, chunk.chunk, unit, layer, kept);
    Ok(())
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
    let (hidden, width, cell) = (place.hidden, place.ffn_width(), place.ffn_cell);
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    let grad = grad_rows(memory)?;

    // The activation is recomputed: the same bits for less memory.
    let mut act = memory.pool.take(rows * width);
    kernels::swiglu(ctx, &kept.gate, &kept.up, &mut act);
    let (mut d_act, act) = match part {
        Part::Whole => {
            down_gradient(env, chunk, layer, &grad.rows, &act);
            (act, Vec::new())
        }
        Part::Input => (memory.pool.take(rows * width), act),
    };
    let dy = Mat::new(&grad.rows, rows, hidden);
    for i in 0..place.num_cells() {
        let w = Mat::new(chunk.param_slice(layer, Role::Down, i), hidden, cell);
        let out = MatMut::new(&mut d_act, rows, width).cols_range(place.cell_cols(i, cell));
        kernels::product(ctx, dy, w, out, Acc::Store);
    }
    let mut d_gate = memory.pool.take(rows * width);
    let mut d_up = memory.pool.take(rows * width);
    kernels::swiglu_backward(ctx, &kept.gate, &kept.up, &d_act, &mut d_gate, &mut d_up);
    if part == Part::Whole {
        gate_up_gradients(env, chunk, layer, &kept.n_mlp, [&d_gate, &d_up]);
    }
    let weights = &*chunk;
    let sums = partials(env, memory, rows * hidden, |_, i, out| {
        for (role, d, acc) in [(Role::Gate, &d_gate, Acc::Store), (Role::Up, &d_up, Acc::Add)] {
            let d = Mat::new(d, rows, width).cols_range(place.cell_cols(i, cell));
            let w = Mat::new(weights.param_slice(layer, role, i), cell, hidden);
            kernels::product(ctx, d, w, MatMut::new(out, rows, hidden), acc);
        }
    });
    memory.regs.partials = Some(sums);
    let n = std::mem::take(&mut kept.n_mlp);
    for spent in [d_act, std::mem::take(&mut kept.gate), std::mem::take(&mut kept.up)] {
        memory.pool.give(spent);
    }
    match part {
        Part::Whole => {
            grad.release(memory);
            [n, d_gate, d_up].into_iter().for_each(|b| memory.pool.give(b));
        }
        Part::Input => {
            let dy = grad.keep(memory);
            kept.mlp_weights = Some(MlpWeights { dy, act, n, d_gate, d_up });
        }
    }
    put_back(memory, chunk.chunk, unit, layer, kept);
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
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    let MlpWeights { dy, act, n, d_gate, d_up } = need(&mut kept.mlp_weights, "mlp_weights")?;
    down_gradient(env, chunk, layer, &dy, &act);
    gate_up_gradients(env, chunk, layer, &n, [&d_gate, &d_up]);
    [dy, act, n, d_gate, d_up].into_iter().for_each(|b| memory.pool.give(b));
    put_back(memory, chunk.chunk, unit, layer, kept);
    memory.settle_layer(chunk.chunk, unit, layer);
    Ok(())
}

/// Gradient of the down projection out of all rows' gradients and activations.
fn down_gradient(env: &Env, chunk: &mut ChunkState, layer: usize, dy: &[f32], act: &[f32]) {
    let (place, rows) = (env.place, env.rows());
    let down = chunk.held(layer, Role::Down).clone();
    for i in 0..place.num_cells() {
        let a = Mat::new(act, rows, place.ffn_width()).cols_range(place.cell_cols(i, place.ffn_cell));
        weight_grad(env, Mat::new(dy, rows, place.hidden), a, &mut chunk.grads, down.slice(i));
    }
}

/// Gradients of the gate and up projections.
fn gate_up_gradients(env: &Env, chunk: &mut ChunkState, layer: usize, n: &[f32], [d_gate, d_up]: [&[f32]; 2]) {
    let (rows, width) = (env.rows(), env.place.ffn_width());
    let n = Mat::new(n, rows, env.place.hidden);
    for (role, d) in [(Role::Gate, d_gate), (Role::Up, d_up)] {
        let at = chunk.grad_range(layer, role);
        weight_grad(env, Mat::new(d, rows, width), n, &mut chunk.grads, at);
    }
}

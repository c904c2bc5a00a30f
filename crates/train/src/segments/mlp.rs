//! SwiGLU feed-forward: gate and up are column-parallel, down is row-parallel.

use program::Pass;
use spec::Unit;
use spec::tensors::Role;

use super::products::{
    column_parallel, column_parallel_input, column_parallel_weight, row_parallel, row_parallel_input,
    row_parallel_weight,
};
use super::{Env, Part, grad_rows, need, norm};
use crate::buffers::{DownWeights, Memory, MlpWeights};
use crate::error::TrainError;
use crate::state::ChunkState;

/// Partial outputs, one leaf per hosted cell; none where only what backward reads is recomputed.
pub fn forward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
    pass: Pass,
) -> Result<(), TrainError> {
    let (rows, width) = (env.rows(), env.place.ffn_width());
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    kept.n_mlp = need(&mut memory.regs.rows, "rows")?;
    kept.gate = memory.pool.take(rows * width);
    kept.up = memory.pool.take(rows * width);
    let uses = vec![(Role::Gate, &mut kept.gate[..]), (Role::Up, &mut kept.up)];
    column_parallel(env, chunk, layer, &kept.n_mlp, uses);
    if env.norms_again() {
        memory.pool.give(std::mem::take(&mut kept.n_mlp));
    }
    if pass != Pass::RecomputeKept {
        let mut act = memory.pool.take(rows * width);
        kernels::swiglu(env.ctx, &kept.gate, &kept.up, &mut act);
        memory.regs.partials = Some(row_parallel(env, chunk, memory, (layer, Role::Down), &act));
        memory.pool.give(act);
    }
    memory.put_layer(chunk.chunk, unit, layer, kept);
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
    let (rows, width) = (env.rows(), env.place.ffn_width());
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let grad = grad_rows(memory)?;
    if env.norms_again() {
        kept.n_mlp = norm::again(env, chunk, memory, &kept.x_mlp, (layer, Role::MlpNorm));
    }

    // The activation is recomputed, the same bits for less memory: in one pass with the gradients, in place.
    let mut act = memory.pool.take(rows * width);
    row_parallel_input(env, chunk, (layer, Role::Down), &grad.rows, &mut act);
    let [mut d_gate, mut d_up] = [std::mem::take(&mut kept.gate), std::mem::take(&mut kept.up)];
    kernels::swiglu_gradients(env.ctx, &mut d_gate, &mut d_up, &mut act);
    if part == Part::Whole {
        row_parallel_weight(env, chunk, (layer, Role::Down), &grad.rows, &act);
    }
    let uses = [(Role::Gate, &d_gate[..]), (Role::Up, &d_up)];
    if part == Part::Whole {
        column_parallel_weight(env, chunk, layer, &kept.n_mlp, &uses);
    }
    memory.regs.partials = Some(column_parallel_input(env, chunk, memory, layer, &uses));
    let n = std::mem::take(&mut kept.n_mlp);
    match part {
        Part::Whole => {
            grad.release(memory);
            [n, act, d_gate, d_up].into_iter().for_each(|b| memory.pool.give(b));
        }
        Part::Input => {
            let dy = grad.keep(memory);
            kept.down_weights = Some(DownWeights { dy, act });
            kept.mlp_weights = Some(MlpWeights { n, d_gate, d_up });
        }
    }
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// The gradients of gate and up that [`backward`] put off.
pub fn backward_weight(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let kept = memory.layer(chunk.chunk, unit, layer);
    let MlpWeights { n, d_gate, d_up } = need(&mut kept.mlp_weights, "mlp_weights")?;
    column_parallel_weight(env, chunk, layer, &n, &[(Role::Gate, &d_gate), (Role::Up, &d_up)]);
    [n, d_gate, d_up].into_iter().for_each(|b| memory.pool.give(b));
    memory.settle_layer(chunk.chunk, unit, layer);
    Ok(())
}

/// The gradient of the down projection that it put off.
pub fn down_weight(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let kept = memory.layer(chunk.chunk, unit, layer);
    let DownWeights { dy, act } = need(&mut kept.down_weights, "down_weights")?;
    row_parallel_weight(env, chunk, (layer, Role::Down), &dy, &act);
    [dy, act].into_iter().for_each(|b| memory.pool.give(b));
    memory.settle_layer(chunk.chunk, unit, layer);
    Ok(())
}

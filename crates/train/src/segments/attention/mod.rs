//! Attention: query, key and value are column-parallel, the output projection is row-parallel.
//!
//! With context cells an exchange of keys and values stands between the first three ([`qkv_forward`]) and the rest.

mod keys;
mod qkv;

use program::Pass;
use spec::Unit;
use spec::tensors::Role;

pub use self::qkv::{backward as qkv_backward, backward_weight as qkv_backward_weight, forward as qkv_forward};
use super::products::{row_parallel, row_parallel_input, row_parallel_weight};
use super::{Env, Part, grad_rows, need};
use crate::buffers::{AttnWeights, LayerSaved, Memory};
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
    if env.place.grid_cp == 1 {
        qkv::forward(env, chunk, memory, unit, layer)?;
    }
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    keys::attend(env, memory, unit, &mut kept, pass)?;

    if pass != Pass::RecomputeKept {
        memory.regs.partials = Some(row_parallel(env, chunk, memory, (layer, Role::O), &kept.o));
    }
    memory.put_layer(chunk.chunk, unit, layer, kept);
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
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let grad = grad_rows(memory)?;
    if part == Part::Whole {
        row_parallel_weight(env, chunk, (layer, Role::O), &grad.rows, &kept.o);
    }
    let mut d_o = memory.pool.take(kept.o.len());
    row_parallel_input(env, chunk, (layer, Role::O), &grad.rows, &mut d_o);
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
    memory.put_layer(chunk.chunk, unit, layer, kept);
    if env.place.grid_cp == 1 {
        qkv::backward(env, chunk, memory, unit, layer, part)?;
    }
    Ok(())
}

/// The gradient of the output projection that [`backward`] put off.
pub fn backward_weight(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let kept = memory.layer(chunk.chunk, unit, layer);
    let AttnWeights { dy, o } = need(&mut kept.attn_weights, "attn_weights")?;
    row_parallel_weight(env, chunk, (layer, Role::O), &dy, &o);
    [dy, o].into_iter().for_each(|b| memory.pool.give(b));
    memory.settle_layer(chunk.chunk, unit, layer);
    Ok(())
}

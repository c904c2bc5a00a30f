//! Token embedding out of the hosted vocabulary slices.

use spec::Unit;
use spec::tensors::Role;

use super::{Env, grad_rows};
use crate::buffers::Memory;
use crate::error::TrainError;
use crate::state::ChunkState;

/// Leaves one partial per rank: at most one rank of the tensor group has a row that is not zero.
pub fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit) -> Result<(), TrainError> {
    let place = env.place;
    let mut out = memory.pool.take(env.rows() * place.hidden);
    let first = (place.cells.start * place.vocab_cell) as u32;
    let ids = &memory.tokens[&unit].ids;
    kernels::embed(env.ctx, ids, chunk.param(0, Role::Embed), place.hidden, first, &mut out);
    memory.regs.partials = Some(vec![(place.at.tp..place.at.tp + 1, out)]);
    Ok(())
}

/// Adds the rows' gradients to the accumulators of the input use, rows of a lane ascending.
pub fn backward(env: &Env, chunk: &mut ChunkState, memory: &mut Memory, unit: Unit) -> Result<(), TrainError> {
    let place = env.place;
    let grad = grad_rows(memory)?;
    let first = (place.cells.start * place.vocab_cell) as u32;
    let at = chunk.grad_range(0, Role::Embed);
    let ids = &memory.tokens[&unit].ids;
    for lane in 0..env.lanes.len() {
        let rows = env.lane_rows(lane);
        let dx = &grad.rows[rows.start * place.hidden..rows.end * place.hidden];
        kernels::embed_backward(env.ctx, &ids[rows], dx, place.hidden, first, chunk.grads.lane(lane, at.clone()));
    }
    grad.release(memory);
    // Nothing lies before the embedding.
    if let Some(spent) = memory.regs.grad.take() {
        memory.pool.give(spent);
    }
    Ok(())
}

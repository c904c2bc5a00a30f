//! Which queries see which keys.
//!
//! Without context cells the sequences of a unit are free of each other, keys are local. With them a lane has the queries
//! of two chunks of its sequences and sees the gathered keys of all. The gradients of all keys are a sum over the query
//! cells: the leaf of a cell is one call of the kernel per data cell, its queries ascending.

use kernels::{AttnShape, Queries};
use program::Pass;
use spec::Unit;
use spec::tree::Counter;

use super::super::{Env, need};
use crate::buffers::{LayerSaved, Memory};
use crate::error::TrainError;
use crate::mutant::{self, Mutant, rotated};

/// A call over `batch` sequences of `seq` keys.
fn shape(env: &Env, batch: usize, seq: usize, queries: Queries) -> AttnShape {
    let place = env.place;
    let heads = place.heads_cell * place.num_cells();
    let kv_heads = place.kv_heads_cell * place.num_cells();
    AttnShape { batch, seq, queries, heads, kv_heads, head_dim: place.head_dim }
}

/// The call of all lanes, whose keys are local.
fn local_shape(env: &Env) -> AttnShape {
    let (batch, seq) = (env.lanes.len() * env.place.batch, env.place.seq_lane);
    shape(env, batch, seq, Queries::all(seq))
}

/// The call of a lane with context cell `context`.
fn lane_shape(env: &Env, context: usize) -> AttnShape {
    let place = env.place;
    let by_local = env.mutant == Some(Mutant::MaskByLocal);
    let queries = if by_local { Queries::all(place.seq_lane) } else { place.queries(context) };
    shape(env, place.batch, place.seq, queries)
}

/// Where a lane stands in a buffer of rows of `width`, and the keys of its data cell in one of whole keys.
fn ranges(env: &Env, lane: usize, cell: usize, width: usize, kv_width: usize) -> [std::ops::Range<usize>; 2] {
    let (rows, keys) = (env.lane_rows(lane), env.place.batch * env.place.seq * kv_width);
    let number = cell - env.lanes.cells.start;
    [rows.start * width..rows.end * width, number * keys..(number + 1) * keys]
}

/// Attention outputs and their log-sum-exp; kept.
pub fn attend(env: &Env, memory: &mut Memory, unit: Unit, kept: &mut LayerSaved, pass: Pass) -> Result<(), TrainError> {
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let (width, kv_width) = (place.q_width(), place.kv_width());
    let heads = width / place.head_dim;
    kept.o = memory.pool.take(rows * width);
    kept.lse = memory.pool.take(rows * heads);
    let unmasked = mutant::unmasked(env.mutant, pass, rows);
    let doc_start = unmasked.as_ref().unwrap_or(&memory.tokens[&unit].doc_start);
    let LayerSaved { q, k, v, o, lse, .. } = kept;
    if place.grid_cp == 1 {
        kernels::attention(ctx, &local_shape(env), q, k, v, doc_start, o, lse);
        return Ok(());
    }
    let keys = need(&mut memory.regs.keys, "keys")?;
    let (all_k, all_v) = keys.split_at(keys.len() / 2);
    for (lane, (cell, context)) in env.lanes.iter().enumerate() {
        let [at, of_cell] = ranges(env, lane, cell, width, kv_width);
        let lane_rows = env.lane_rows(lane);
        kernels::attention(
            ctx,
            &lane_shape(env, context),
            &q[at.clone()],
            &all_k[of_cell.clone()],
            &all_v[of_cell],
            &doc_start[lane_rows.clone()],
            &mut o[at],
            &mut lse[lane_rows.start * heads..lane_rows.end * heads],
        );
    }
    memory.pool.give(keys);
    Ok(())
}

/// Gradients of queries, keys and values out of those of the outputs; with context cells those of keys and values are
/// subtrees over the hosted query cells.
pub fn attend_backward(
    env: &Env,
    memory: &mut Memory,
    unit: Unit,
    kept: &LayerSaved,
    d_o: &[f32],
) -> Result<(), TrainError> {
    let (place, rows, ctx) = (env.place, env.rows(), env.ctx);
    let (width, kv_width) = (place.q_width(), place.kv_width());
    let heads = width / place.head_dim;
    let mut dq = memory.pool.take(rows * width);
    let LayerSaved { q, k, v, o, lse, .. } = kept;
    if place.grid_cp == 1 {
        let [mut dk, mut dv] = [(); 2].map(|()| memory.pool.take(rows * kv_width));
        let (shape, doc_start) = (local_shape(env), &memory.tokens[&unit].doc_start);
        kernels::attention_backward(ctx, &shape, q, k, v, o, lse, d_o, doc_start, &mut dq, &mut dk, &mut dv);
        (memory.regs.d_q, memory.regs.d_keys) = (Some(dq), Some([dk, dv]));
        return Ok(());
    }
    let keys = need(&mut memory.regs.keys, "keys")?;
    let (all_k, all_v) = keys.split_at(keys.len() / 2);
    let mut sum = Counter::new(place.grid_cp);
    let hosted = env.lanes.contexts.clone();
    for (number, leaf) in hosted.clone().enumerate() {
        let context = hosted.start + rotated(env.mutant == Some(Mutant::KeyGradsRotated), number, hosted.len());
        let mut grads = memory.pool.take(keys.len());
        let (dk, dv) = grads.split_at_mut(keys.len() / 2);
        for (lane, (cell, _)) in env.lanes.iter().enumerate().filter(|(_, (_, c))| *c == context) {
            let [at, of_cell] = ranges(env, lane, cell, width, kv_width);
            let lane_rows = env.lane_rows(lane);
            kernels::attention_backward(
                ctx,
                &lane_shape(env, context),
                &q[at.clone()],
                &all_k[of_cell.clone()],
                &all_v[of_cell.clone()],
                &o[at.clone()],
                &lse[lane_rows.start * heads..lane_rows.end * heads],
                &d_o[at.clone()],
                &memory.tokens[&unit].doc_start[lane_rows],
                &mut dq[at],
                &mut dk[of_cell.clone()],
                &mut dv[of_cell],
            );
        }
        for spent in sum.push(leaf..leaf + 1, grads, |left, right| kernels::add_assign(ctx, left, right)) {
            memory.pool.give(spent);
        }
    }
    (memory.regs.d_q, memory.regs.key_partials) = (Some(dq), Some(sum.into_nodes()));
    memory.pool.give(keys);
    Ok(())
}

//! Mixture of experts on the hosted sequence slices: the router, then whole experts on the rows that chose them.
//!
//! Tensor cells do not cut experts: each cell's slice of the rows goes through whole experts, and leaves its own leaf of
//! their gradient. The data cells of a group share one product per expert and leaf; where several ranks host a group,
//! each works on its share of the experts, and rows travel there and back ([`dispatch`]).

mod balance;
pub mod dispatch;
mod experts;
mod shared;

use std::ops::Range;

use kernels::{Acc, Mat, MatMut, RouterShape};
use program::Mode;
use spec::moe::Scores;
use spec::tensors::Role;
use spec::{Leaf, Moe, Unit};

pub use balance::{Routing, move_biases, routing};
pub use experts::{add_shared, add_shared_backward, backward, forward, forward_again};

use super::{Env, linear, need, store_norm_leaf};
use crate::buffers::{Memory, Routed};
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::state::ChunkState;

fn moe<'a>(env: &Env<'a>) -> Result<&'a Moe, TrainError> {
    env.model.moe.as_ref().ok_or_else(|| TrainError::Internal("the model has no experts".into()))
}

fn shape(moe: &Moe) -> RouterShape {
    let sigmoid = moe.scores == Scores::Sigmoid;
    RouterShape { experts: moe.experts, per_token: moe.per_token, sigmoid, renorm: moe.renorm }
}

/// The local rows of a lane and hosted tensor cell.
fn rows_of_leaf(env: &Env, (lane, i): (usize, usize)) -> Vec<u32> {
    env.place.cell_rows(lane, i).into_iter().flatten().map(|row| row as u32).collect()
}

/// Scores, choice and gates of the hosted rows.
pub fn route(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let moe = moe(env)?;
    let (rows, shape) = (env.rows_local(), shape(moe));
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    kept.n_mlp = need(&mut memory.regs.normed, "normed")?;
    let mut logits = memory.pool.take(rows * moe.experts);
    linear(env.ctx, &kept.n_mlp, rows, chunk.param(layer, Role::Router), env.place.hidden, &mut logits);
    let mut scores = memory.pool.take(rows * moe.experts);
    let (mut chosen, mut gates) = (vec![0; rows * moe.per_token], vec![0.0; rows * moe.per_token]);
    let bias = if moe.bias { chunk.param(layer, Role::RouterBias) } else { &[] };
    let routed_as = RouterShape { renorm: shape.renorm && env.mutant != Some(Mutant::GatesNotRenormed), ..shape };
    kernels::route(env.ctx, &routed_as, &logits, bias, &mut scores, &mut chosen, &mut gates);
    memory.pool.give(logits);
    if env.mutant == Some(Mutant::TokenDropped) {
        gates[0] = 0.0;
    }
    let mut counts = vec![0; moe.experts];
    chosen.iter().for_each(|e| counts[*e as usize] += 1);
    let work =
        if env.group.ranks == 1 { dispatch::at_home(env, moe, &chosen, &gates) } else { dispatch::Work::default() };
    kept.routed = Some(Routed { scores, chosen, gates, counts, work, ..Routed::default() });
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// The rows of a layer that is computed again; the choice was kept, and the work that follows from it where the rows do not travel.
pub fn route_again(memory: &mut Memory, unit: Unit, chunk: usize, layer: usize) -> Result<(), TrainError> {
    let normed = need(&mut memory.regs.normed, "normed")?;
    memory.layer(chunk, unit, layer).n_mlp = normed;
    Ok(())
}

/// The router's gradient, a leaf per hosted slice, and its share of the rows' gradient. Here every unit is met once
/// (a recomputed forward is not), so here tokens are counted.
pub fn route_backward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let (moe, ctx) = (moe(env)?, env.ctx);
    let (rows, hidden, shape) = (env.rows_local(), env.place.hidden, shape(moe));
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let routed = need(&mut kept.routed, "the router's choice")?;
    let loads = memory.loads.entry(layer).or_insert_with(|| vec![0; moe.experts]);
    loads.iter_mut().zip(&routed.counts).for_each(|(sum, count)| *sum += count);
    memory.copies += routed.sent.iter().map(|sent| sent.rows.len() as u64).sum::<u64>();

    let mut aux = Vec::new();
    if moe.aux_loss > 0.0 && env.mode == Mode::Train {
        let balance = balance::Balance::of(env, moe, memory, chunk.chunk, unit, layer)?;
        let leaves: Vec<usize> = env.place.leaves(unit).collect();
        for (lane, i) in env.lane_cells() {
            let sums = kernels::score_sums(&shape, &routed.scores, &env.place.cell_rows(lane, i));
            let leaf = Leaf { cell: leaves[lane], mb: unit.mb };
            memory.aux.insert((leaf, layer, env.place.cells.start + i), balance.value(&sums));
        }
        aux = balance.gradient(moe.aux_loss);
    }
    let mut d_logits = memory.pool.take(rows * moe.experts);
    let Routed { scores, chosen, gates, d_gates, .. } = routed;
    kernels::route_backward(ctx, &shape, &scores, &chosen, &gates, &d_gates, &aux, &mut d_logits);
    for leaf in env.lane_cells() {
        let of_leaf = rows_of_leaf(env, leaf);
        let mut d = memory.pool.take(of_leaf.len() * moe.experts);
        let mut n = memory.pool.take(of_leaf.len() * hidden);
        kernels::gather_rows(ctx, &d_logits, moe.experts, &of_leaf, &mut d);
        kernels::gather_rows(ctx, &kept.n_mlp, hidden, &of_leaf, &mut n);
        store_norm_leaf(env, chunk, memory, leaf, (layer, Role::Router), |dw| {
            let (d, n) = (Mat::new(&d, of_leaf.len(), moe.experts), Mat::new(&n, of_leaf.len(), hidden));
            kernels::product(ctx, d.t(), n, MatMut::new(dw, moe.experts, hidden), Acc::Store);
        });
        [d, n].into_iter().for_each(|b| memory.pool.give(b));
    }
    let mut dx = need(&mut memory.regs.reduced, "reduced")?;
    let w = Mat::new(chunk.param(layer, Role::Router), moe.experts, hidden);
    let d = Mat::new(&d_logits, rows, moe.experts);
    kernels::product(ctx, d, w, MatMut::new(&mut dx, rows, hidden), Acc::Add);
    memory.regs.reduced = Some(dx);
    [d_logits, scores, std::mem::take(&mut kept.n_mlp)].into_iter().for_each(|b| memory.pool.give(b));
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// `rows` of a row-major matrix.
fn rows_of(x: &[f32], width: usize, rows: Range<usize>) -> &[f32] {
    &x[rows.start * width..rows.end * width]
}

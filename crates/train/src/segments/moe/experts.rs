//! Whole experts on the rows that chose them, where the rows are: at home, or sent by the other ranks of the group.

use std::ops::Range;

use kernels::{Acc, Mat, MatMut};
use spec::tensors::Role;
use spec::{Moe, Unit};

use super::dispatch::Work;
use super::{moe, rows_of, shared};
use crate::buffers::{LayerSaved, Memory};
use crate::error::TrainError;
use crate::segments::{Env, add_weight_grad, linear, need};
use crate::state::ChunkState;

/// One SwiGLU of a layer by its roles: gate, up, down.
type Roles = [Role; 3];

fn roles(e: usize) -> Roles {
    [Role::ExpertGate(e), Role::ExpertUp(e), Role::ExpertDown(e)]
}

/// The experts that have rows, with their slots.
fn used(moe: &Moe, work: &Work) -> Vec<(usize, Range<usize>)> {
    (0..moe.experts).map(|e| (e, work.groups.of(e))).filter(|(_, slots)| !slots.is_empty()).collect()
}

/// Gives buffers back whose sizes come again: not those that depend on how many rows were sent here.
fn spend(env: &Env, memory: &mut Memory, buffers: impl IntoIterator<Item = Vec<f32>>) {
    if env.group.ranks == 1 {
        buffers.into_iter().for_each(|buffer| memory.pool.give(buffer));
    }
}

/// Leaves the layer's output, or what is to be returned to the ranks that sent rows.
pub fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let (moe, ctx, hidden) = (moe(env)?, env.ctx, env.place.hidden);
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let (work, away) = (&routed.work, env.group.ranks > 1);
    let slots = work.groups.rows.len();
    let x = gate_and_up(env, chunk, memory, layer, &mut kept, work)?;
    let mut act = memory.pool.take(slots * moe.ffn);
    kernels::swiglu(ctx, &kept.gate, &kept.up, &mut act);
    let mut y = x;
    for (e, slots) in &used(moe, work) {
        let (inner, out) = (slots.start * moe.ffn..slots.end * moe.ffn, slots.start * hidden..slots.end * hidden);
        linear(ctx, &act[inner], slots.len(), chunk.param(layer, roles(*e)[2]), moe.ffn, &mut y[out]);
    }
    let mut out = memory.pool.take(work.rows() * hidden);
    kernels::combine(ctx, &y, hidden, &work.terms(env.group, &work.gates), &mut out);
    spend(env, memory, [y, act]);
    if away {
        routed.returned = out;
    } else {
        routed.shared = add_shared(env, chunk, memory, layer, &kept.n_mlp, &mut out)?;
        memory.regs.reduced = Some(out);
    }
    kept.routed = Some(routed);
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// [`forward`] a second time, only for what the backward reads.
pub fn forward_again(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let width = moe(env)?.shared_ffn;
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let x = gate_and_up(env, chunk, memory, layer, &mut kept, &routed.work)?;
    spend(env, memory, [x]);
    if width > 0 {
        routed.shared = shared::kept(env, chunk, memory, layer, &kept.n_mlp, width);
    }
    kept.routed = Some(routed);
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// Gate and up of every slot into `kept`; the rows of the slots.
fn gate_and_up(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    kept: &mut LayerSaved,
    work: &Work,
) -> Result<Vec<f32>, TrainError> {
    let (moe, ctx, hidden) = (moe(env)?, env.ctx, env.place.hidden);
    let slots = work.groups.rows.len();
    let mut x = memory.pool.take(slots * hidden);
    let rows = if env.group.ranks > 1 { &work.x } else { &kept.n_mlp };
    kernels::gather_rows(ctx, rows, hidden, &work.groups.rows, &mut x);
    kept.gate = memory.pool.take(slots * moe.ffn);
    kept.up = memory.pool.take(slots * moe.ffn);
    for (e, slots) in &used(moe, work) {
        let ([gate, up, _], inner) = (roles(*e), slots.start * moe.ffn..slots.end * moe.ffn);
        let x = rows_of(&x, hidden, slots.clone());
        linear(ctx, x, slots.len(), chunk.param(layer, gate), hidden, &mut kept.gate[inner.clone()]);
        linear(ctx, x, slots.len(), chunk.param(layer, up), hidden, &mut kept.up[inner]);
    }
    Ok(x)
}

/// Adds the shared expert, if there is one, to the sum of the others; what it keeps.
pub fn add_shared(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    out: &mut [f32],
) -> Result<Vec<Vec<f32>>, TrainError> {
    let width = moe(env)?.shared_ffn;
    Ok(if width > 0 { shared::forward(env, chunk, memory, layer, n, width, out) } else { Vec::new() })
}

/// Weight gradients of the experts, gradients of the gates, and the rows' gradient but for the router's share.
pub fn backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let (moe, ctx, hidden) = (moe(env)?, env.ctx, env.place.hidden);
    let (ffn, away) = (moe.ffn, env.group.ranks > 1);
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let work = &routed.work;
    let slots = work.groups.rows.len();
    let mut x = memory.pool.take(slots * hidden);
    kernels::gather_rows(ctx, if away { &work.x } else { &kept.n_mlp }, hidden, &work.groups.rows, &mut x);
    let mut dy = memory.pool.take(slots * hidden);
    let grad = if away { Some(&routed.dy) } else { memory.regs.grad.as_ref() };
    let grad = grad.ok_or_else(|| super::dispatch::missing("the gradient of the stream", unit, layer))?;
    kernels::gather_rows(ctx, grad, hidden, &work.groups.rows, &mut dy);

    let [mut act, mut d_act] = std::array::from_fn(|_| memory.pool.take(slots * ffn));
    kernels::swiglu(ctx, &kept.gate, &kept.up, &mut act);
    let used = used(moe, work);
    let inner = |slots: &Range<usize>| slots.start * ffn..slots.end * ffn;
    for (e, slots) in &used {
        let down = Mat::new(chunk.param(layer, roles(*e)[2]), hidden, ffn);
        let dy = Mat::new(rows_of(&dy, hidden, slots.clone()), slots.len(), hidden);
        kernels::product(ctx, dy, down, MatMut::new(&mut d_act[inner(slots)], slots.len(), ffn), Acc::Store);
    }
    let mut d_gates = vec![0.0; slots];
    kernels::gates_backward(ctx, &work.groups.to_slots(&work.gates), ffn, &mut act, &mut d_act, &mut d_gates);
    let [mut d_gate, mut d_up] = std::array::from_fn(|_| memory.pool.take(slots * ffn));
    kernels::swiglu_backward(ctx, &kept.gate, &kept.up, &d_act, &mut d_gate, &mut d_up);
    for (e, slots) in &used {
        let roles = roles(*e);
        // A leaf is a context cell and a tensor cell; the group's sum stands with its first data cell of this rank.
        let leaves = (0..env.lanes.contexts.len()).flat_map(|c| (0..env.place.num_cells()).map(move |i| (c, i)));
        for (part, leaf) in leaves.enumerate() {
            let slots = work.groups.of_part(*e, part);
            let part = |x, width| Mat::new(rows_of(x, width, slots.clone()), slots.len(), width);
            let (x, dy) = (part(&x, hidden), part(&dy, hidden));
            add_weight_grad(ctx, part(&d_gate, ffn), x, chunk.slice_grad(leaf, layer, roles[0]));
            add_weight_grad(ctx, part(&d_up, ffn), x, chunk.slice_grad(leaf, layer, roles[1]));
            add_weight_grad(ctx, dy, part(&act, ffn), chunk.slice_grad(leaf, layer, roles[2]));
        }
        debug_assert!(slots.end <= work.groups.rows.len());
    }
    let mut dx = x;
    for (e, slots) in &used {
        let out = &mut dx[slots.start * hidden..slots.end * hidden];
        for (role, d, acc) in [(roles(*e)[0], &d_gate, Acc::Store), (roles(*e)[1], &d_up, Acc::Add)] {
            let d = Mat::new(&d[inner(slots)], slots.len(), ffn);
            let w = Mat::new(chunk.param(layer, role), ffn, hidden);
            kernels::product(ctx, d, w, MatMut::new(out, slots.len(), hidden), acc);
        }
    }
    let mut out = memory.pool.take(work.rows() * hidden);
    kernels::combine(ctx, &dx, hidden, &work.terms(env.group, &[]), &mut out);
    routed.d_gates = work.groups.from_slots(&d_gates);
    if away {
        routed.returned = out;
    } else {
        add_shared_backward(env, chunk, memory, layer, &kept.n_mlp, &mut routed.shared, &mut out)?;
        memory.regs.reduced = Some(out);
    }
    let spent = [dy, act, d_act, d_gate, d_up, dx, std::mem::take(&mut kept.gate), std::mem::take(&mut kept.up)];
    spend(env, memory, spent);
    kept.routed = Some(routed);
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// The shared expert's part of `backward`.
pub fn add_shared_backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    kept: &mut Vec<Vec<f32>>,
    out: &mut [f32],
) -> Result<(), TrainError> {
    if moe(env)?.shared_ffn > 0 {
        shared::backward(env, chunk, memory, layer, n, kept, out)?;
    }
    Ok(())
}

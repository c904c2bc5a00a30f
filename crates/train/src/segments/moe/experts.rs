//! Whole experts on the rows that chose them, where the rows are: at home, or sent by the other ranks of the group.

use std::ops::Range;

use kernels::{Acc, Mat, MatMut, Pieces};
use spec::tensors::Role;
use spec::{Moe, Unit};

use super::dispatch::Work;
use super::{moe, rows_of, shared};
use crate::buffers::{LayerSaved, Memory};
use crate::error::TrainError;
use crate::segments::{Env, add_weight_grad, linear, linears, need};
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

/// The most slots that one expert has; where rows do not travel, could have.
fn most(env: &Env, moe: &Moe, work: &Work) -> usize {
    if env.group.ranks == 1 {
        return env.rows_local();
    }
    used(moe, work).iter().map(|(_, slots)| slots.len()).max().unwrap_or(0)
}

/// A buffer whose size depends on the routers where rows come from other ranks.
fn take(env: &Env, memory: &mut Memory, len: usize) -> Vec<f32> {
    if env.group.ranks > 1 { memory.pool.take_loose(len) } else { memory.pool.take(len) }
}

/// What goes back to every member, and `behind` of them more numbers each: the sums of their rows over `y`.
fn by_member(env: &Env, memory: &mut Memory, work: &Work, y: &[f32], gates: &[f32], behind: Behind) -> Vec<Vec<f32>> {
    let hidden = env.place.hidden;
    let one = |member: usize| {
        let rows = work.from[member].clone();
        let more = if behind == Behind::Gates { work.choices_of(member).len() } else { 0 };
        let mut out = memory.pool.take_loose(rows.len() * hidden + more);
        let sums = &mut out[..rows.len() * hidden];
        kernels::combine(env.ctx, y, hidden, &work.terms(env.group, gates, rows), sums);
        out
    };
    (0..env.group.ranks).map(one).collect()
}

/// What stands behind the rows that go back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Behind {
    Nothing,
    /// Gradients of their gates.
    Gates,
}

/// Leaves the layer's output, or what is to be returned to the ranks that sent rows.
pub fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let (moe, ctx, hidden) = (moe(env)?, env.ctx, env.place.hidden);
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let work = &routed.work;
    let mut y = take(env, memory, work.groups.rows.len() * hidden);
    let mut act = take(env, memory, most(env, moe, work) * moe.ffn);
    take_gate_and_up(env, memory, moe, &mut kept, work);
    // Expert by expert, so that what one leaves is near when the next product reads it.
    for (e, slots) in used(moe, work) {
        let out = &mut y[slots.start * hidden..slots.end * hidden];
        gate_and_up(env, chunk, layer, &mut kept, work, (e, slots.clone()), out)?;
        let inner = slots.start * moe.ffn..slots.end * moe.ffn;
        let act = &mut act[..inner.len()];
        kernels::swiglu(ctx, &kept.gate[inner.clone()], &kept.up[inner], act);
        linear(ctx, act, slots.len(), chunk.param(layer, roles(e)[2]), moe.ffn, out);
    }
    memory.pool.give(act);
    if env.group.ranks > 1 {
        routed.returned = by_member(env, memory, work, &y, &work.gates, Behind::Nothing);
    } else {
        let rows = env.rows_local();
        let mut out = memory.pool.take(rows * hidden);
        kernels::combine(ctx, &y, hidden, &work.terms(env.group, &work.gates, 0..rows), &mut out);
        routed.shared = add_shared(env, chunk, memory, layer, &kept.n_mlp, &mut out)?;
        memory.regs.reduced = Some(out);
    }
    memory.pool.give(y);
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
    let (moe, hidden) = (moe(env)?, env.place.hidden);
    let width = moe.shared_ffn;
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let work = &routed.work;
    take_gate_and_up(env, memory, moe, &mut kept, work);
    let mut x = take(env, memory, most(env, moe, work) * hidden);
    for (e, slots) in used(moe, work) {
        let x = &mut x[..slots.len() * hidden];
        gate_and_up(env, chunk, layer, &mut kept, work, (e, slots), x)?;
    }
    memory.pool.give(x);
    if width > 0 {
        routed.shared = shared::kept(env, chunk, memory, layer, &kept.n_mlp, width);
    }
    kept.routed = Some(routed);
    memory.put_layer(chunk.chunk, unit, layer, kept);
    Ok(())
}

/// Room for gate and up of every slot.
fn take_gate_and_up(env: &Env, memory: &mut Memory, moe: &Moe, kept: &mut LayerSaved, work: &Work) {
    [kept.gate, kept.up] = std::array::from_fn(|_| take(env, memory, work.groups.rows.len() * moe.ffn));
}

/// Gate and up of the slots of one expert into `kept`, and their rows into `x`.
fn gate_and_up(
    env: &Env,
    chunk: &ChunkState,
    layer: usize,
    kept: &mut LayerSaved,
    work: &Work,
    (e, slots): (usize, Range<usize>),
    x: &mut [f32],
) -> Result<(), TrainError> {
    let (ffn, hidden) = (moe(env)?.ffn, env.place.hidden);
    kernels::gather_pieces(env.ctx, &work.rows(&kept.n_mlp, hidden), &work.at[slots.clone()], x);
    let ([gate, up, _], inner) = (roles(e), slots.start * ffn..slots.end * ffn);
    let w = |role| Mat::new(chunk.param(layer, role), ffn, hidden).t().into();
    let uses = vec![(w(gate), &mut kept.gate[inner.clone()]), (w(up), &mut kept.up[inner])];
    linears(env.ctx, x, slots.len(), hidden, uses);
    Ok(())
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
    let ffn = moe.ffn;
    let mut kept = memory.take_layer(chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let work = &routed.work;
    let slots = work.groups.rows.len();
    let mut dx = take(env, memory, slots * hidden);
    let most = most(env, moe, work);
    let [mut dy, mut act] = [hidden, ffn].map(|width| take(env, memory, most * width));
    let grad = memory.regs.grad.as_deref();
    let grad = grad.ok_or_else(|| super::dispatch::missing("the gradient of the stream", unit, layer))?;
    let came = routed.dy.iter().map(Vec::as_slice);
    let grads = Pieces::new(hidden, std::iter::once(grad).chain(came));
    let rows = work.rows(&kept.n_mlp, hidden);
    let [mut d_gate, mut d_up] = [std::mem::take(&mut kept.gate), std::mem::take(&mut kept.up)];
    let gates = work.groups.to_slots(&work.gates);
    let mut d_gates = vec![0.0; slots];
    // Expert by expert, as forward.
    for (e, slots) in used(moe, work) {
        let (roles, n) = (roles(e), slots.len());
        let [x_at, inner] = [hidden, ffn].map(|width| slots.start * width..slots.end * width);
        let (x, dy, act) = (&mut dx[x_at], &mut dy[..n * hidden], &mut act[..n * ffn]);
        let (d_gate, d_up) = (&mut d_gate[inner.clone()], &mut d_up[inner]);
        kernels::gather_pieces(ctx, &rows, &work.at[slots.clone()], x);
        kernels::gather_pieces(ctx, &grads, &work.at[slots.clone()], dy);
        // The activation is computed again, in one pass with the gradients, in place.
        let down = Mat::new(chunk.param(layer, roles[2]), hidden, ffn);
        kernels::product(ctx, Mat::new(dy, n, hidden), down, MatMut::new(act, n, ffn), Acc::Store);
        kernels::experts_backward(ctx, &gates[slots.clone()], ffn, d_gate, d_up, act, &mut d_gates[slots.clone()]);
        // A leaf is a context cell and a tensor cell; the group's sum stands with its first data cell of this rank.
        let leaves = (0..env.lanes.contexts.len()).flat_map(|c| (0..env.place.num_cells()).map(move |i| (c, i)));
        for (part, leaf) in leaves.enumerate() {
            let of_part = work.groups.of_part(e, part);
            let at = of_part.start - slots.start..of_part.end - slots.start;
            let part = |x, width| Mat::new(rows_of(x, width, at.clone()), at.len(), width);
            let (x, dy) = (part(x, hidden), part(dy, hidden));
            let inner = [part(d_gate, ffn), part(d_up, ffn)].into_iter();
            let sums = chunk.slice_grads(leaf, layer, &roles[..2]).into_iter().zip(inner);
            let sums = sums.map(|(dw, d)| (d.t(), 0, MatMut::new(dw, ffn, hidden))).collect();
            kernels::products(ctx, &[x.into()], sums, Acc::Add);
            add_weight_grad(ctx, dy, part(act, ffn), chunk.slice_grad(leaf, layer, roles[2]));
        }
        for (role, d, acc) in [(roles[0], &*d_gate, Acc::Store), (roles[1], &*d_up, Acc::Add)] {
            let w = Mat::new(chunk.param(layer, role), ffn, hidden);
            kernels::product(ctx, Mat::new(d, n, ffn), w, MatMut::new(x, n, hidden), acc);
        }
    }
    [dy, act, d_gate, d_up].into_iter().for_each(|buffer| memory.pool.give(buffer));
    let d_gates = work.groups.from_slots(&d_gates);
    if env.group.ranks > 1 {
        routed.returned = by_member(env, memory, work, &dx, &[], Behind::Gates);
        for (member, out) in routed.returned.iter_mut().enumerate() {
            let rows = work.from[member].len();
            out[rows * hidden..].copy_from_slice(&d_gates[work.choices_of(member)]);
        }
    } else {
        let rows = env.rows_local();
        let mut out = memory.pool.take(rows * hidden);
        kernels::combine(ctx, &dx, hidden, &work.terms(env.group, &[], 0..rows), &mut out);
        routed.d_gates = d_gates;
        add_shared_backward(env, chunk, memory, layer, &kept.n_mlp, &mut routed.shared, &mut out)?;
        memory.regs.reduced = Some(out);
    }
    memory.pool.give(dx);
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

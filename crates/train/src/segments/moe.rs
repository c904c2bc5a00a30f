//! Mixture of experts on the hosted sequence slices: the router, then whole experts on the rows that chose them.
//!
//! Tensor cells do not cut experts: each cell's slice of the rows goes through whole experts, and leaves its own leaf of
//! their gradient. Rows are free, so the hosted slices share the products that are not gradients of weights.

use std::ops::Range;

use kernels::{Acc, Groups, Mat, MatMut, RouterShape};
use program::{Bucket, Mode};
use spec::moe::{AuxScope, Scores};
use spec::tensors::Role;
use spec::{Leaf, Moe, Unit};

use super::{Env, add_weight_grad, linear, need, store_norm_leaf};
use crate::buffers::{LayerSaved, Memory, POOLED, Routed};
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::state::ChunkState;

/// One SwiGLU of a layer by its roles: gate, up, down.
type Roles = [Role; 3];

const SHARED: Roles = [Role::SharedGate, Role::SharedUp, Role::SharedDown];

fn expert(e: usize) -> Roles {
    [Role::ExpertGate(e), Role::ExpertUp(e), Role::ExpertDown(e)]
}

fn moe<'a>(env: &Env<'a>) -> Result<&'a Moe, TrainError> {
    env.model.moe.as_ref().ok_or_else(|| TrainError::Internal("the model has no experts".into()))
}

fn shape(moe: &Moe) -> RouterShape {
    let sigmoid = moe.scores == Scores::Sigmoid;
    RouterShape { experts: moe.experts, per_token: moe.per_token, sigmoid, renorm: moe.renorm }
}

fn layer_of(memory: &mut Memory, chunk: usize, unit: Unit, layer: usize) -> LayerSaved {
    let saved = memory.saved.entry((chunk, unit)).or_default();
    std::mem::take(saved.layers.entry(layer).or_default())
}

fn put_back(memory: &mut Memory, chunk: usize, unit: Unit, layer: usize, kept: LayerSaved) {
    memory.saved.entry((chunk, unit)).or_default().layers.insert(layer, kept);
}

fn rows_of(x: &[f32], width: usize, rows: Range<usize>) -> &[f32] {
    &x[rows.start * width..rows.end * width]
}

/// The local rows of every lane and hosted tensor cell, in the order of [`Env::lane_cells`]: each is a leaf.
fn parts(env: &Env) -> Vec<Vec<Range<usize>>> {
    env.lane_cells().map(|(lane, i)| env.place.cell_rows(lane, i)).collect()
}

/// Scores, choice and gates of the hosted rows.
pub fn route(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let (moe, place) = (moe(env)?, env.place);
    let (rows, shape) = (env.rows_local(), shape(moe));
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    kept.n_mlp = need(&mut memory.regs.normed, "normed")?;
    let mut logits = memory.pool.take(rows * moe.experts);
    linear(env.ctx, &kept.n_mlp, rows, chunk.param(layer, Role::Router), place.hidden, &mut logits);
    let mut scores = memory.pool.take(rows * moe.experts);
    let (mut chosen, mut gates) = (vec![0; rows * moe.per_token], vec![0.0; rows * moe.per_token]);
    let bias = if moe.bias { chunk.param(layer, Role::RouterBias) } else { &[] };
    let routed_as = RouterShape { renorm: shape.renorm && env.mutant != Some(Mutant::GatesNotRenormed), ..shape };
    kernels::route(env.ctx, &routed_as, &logits, bias, &mut scores, &mut chosen, &mut gates);
    memory.pool.give(logits);
    if env.mutant == Some(Mutant::TokenDropped) {
        gates[0] = 0.0;
    }
    let groups = Groups::new(&chosen, moe.per_token, moe.experts, &parts(env));
    let counts = (0..moe.experts).map(|e| groups.of(e).len() as u64).collect();
    kept.routed = Some(Routed { scores, chosen, gates, groups, counts, d_gates: Vec::new(), shared: Vec::new() });
    put_back(memory, chunk.chunk, unit, layer, kept);
    Ok(())
}

/// Whole experts on the rows that chose them; leaves the layer's output.
pub fn forward(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, layer: usize) -> Result<(), TrainError> {
    let (moe, place, ctx) = (moe(env)?, env.place, env.ctx);
    let hidden = place.hidden;
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let slots = routed.groups.rows.len();
    let mut x = memory.pool.take(slots * hidden);
    kernels::gather_rows(ctx, &kept.n_mlp, hidden, &routed.groups.rows, &mut x);
    kept.gate = memory.pool.take(slots * moe.ffn);
    kept.up = memory.pool.take(slots * moe.ffn);
    let mut y = memory.pool.take(slots * hidden);
    let mut act = memory.pool.take(slots * moe.ffn);
    let inner = |rows: &Range<usize>| rows.start * moe.ffn..rows.end * moe.ffn;
    let groups = &routed.groups;
    for (e, rows) in (0..moe.experts).map(|e| (e, groups.of(e))).filter(|(_, rows)| !rows.is_empty()) {
        let [gate, up, _] = expert(e);
        let x = rows_of(&x, hidden, rows.clone());
        linear(ctx, x, rows.len(), chunk.param(layer, gate), hidden, &mut kept.gate[inner(&rows)]);
        linear(ctx, x, rows.len(), chunk.param(layer, up), hidden, &mut kept.up[inner(&rows)]);
    }
    kernels::swiglu(ctx, &kept.gate, &kept.up, &mut act);
    for (e, rows) in (0..moe.experts).map(|e| (e, groups.of(e))).filter(|(_, rows)| !rows.is_empty()) {
        let out = &mut y[rows.start * hidden..rows.end * hidden];
        linear(ctx, &act[inner(&rows)], rows.len(), chunk.param(layer, expert(e)[2]), moe.ffn, out);
    }
    let mut out = memory.pool.take(env.rows_local() * hidden);
    kernels::combine(ctx, &y, hidden, moe.per_token, &groups.slots, &routed.gates, &mut out);
    [x, y, act].into_iter().for_each(|b| memory.pool.give(b));
    if moe.shared_ffn > 0 {
        routed.shared = shared_forward(env, chunk, memory, layer, &kept.n_mlp, moe.shared_ffn, &mut out);
    }
    memory.regs.reduced = Some(out);
    kept.routed = Some(routed);
    put_back(memory, chunk.chunk, unit, layer, kept);
    Ok(())
}

/// Adds the expert that every row passes; keeps gate and up.
fn shared_forward(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    width: usize,
    out: &mut [f32],
) -> Vec<Vec<f32>> {
    let (rows, hidden) = (env.rows_local(), env.place.hidden);
    let [mut gate, mut up, mut act] = std::array::from_fn(|_| memory.pool.take(rows * width));
    linear(env.ctx, n, rows, chunk.param(layer, SHARED[0]), hidden, &mut gate);
    linear(env.ctx, n, rows, chunk.param(layer, SHARED[1]), hidden, &mut up);
    kernels::swiglu(env.ctx, &gate, &up, &mut act);
    let down = Mat::new(chunk.param(layer, SHARED[2]), hidden, width);
    kernels::product(env.ctx, Mat::new(&act, rows, width), down.t(), MatMut::new(out, rows, hidden), Acc::Add);
    memory.pool.give(act);
    vec![gate, up]
}

/// Weight gradients of the experts, gradients of the gates, and the rows' gradient but for the router's share.
pub fn backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    layer: usize,
) -> Result<(), TrainError> {
    let (moe, place, ctx) = (moe(env)?, env.place, env.ctx);
    let (hidden, ffn) = (place.hidden, moe.ffn);
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    let mut routed = need(&mut kept.routed, "the router's choice")?;
    let groups = &routed.groups;
    let slots = groups.rows.len();
    let mut x = memory.pool.take(slots * hidden);
    kernels::gather_rows(ctx, &kept.n_mlp, hidden, &groups.rows, &mut x);
    let mut dy = memory.pool.take(slots * hidden);
    let grad = memory.regs.grad.as_deref().ok_or_else(|| TrainError::Internal("no gradient of the stream".into()))?;
    kernels::gather_rows(ctx, grad, hidden, &groups.rows, &mut dy);

    let [mut act, mut d_act] = std::array::from_fn(|_| memory.pool.take(slots * ffn));
    kernels::swiglu(ctx, &kept.gate, &kept.up, &mut act);
    let used: Vec<(usize, Range<usize>)> =
        (0..moe.experts).map(|e| (e, groups.of(e))).filter(|(_, rows)| !rows.is_empty()).collect();
    let inner = |rows: &Range<usize>| rows.start * ffn..rows.end * ffn;
    for (e, rows) in &used {
        let down = Mat::new(chunk.param(layer, expert(*e)[2]), hidden, ffn);
        let dy = Mat::new(rows_of(&dy, hidden, rows.clone()), rows.len(), hidden);
        kernels::product(ctx, dy, down, MatMut::new(&mut d_act[inner(rows)], rows.len(), ffn), Acc::Store);
    }
    let mut d_gates = vec![0.0; slots];
    kernels::gates_backward(ctx, &groups.to_slots(&routed.gates), ffn, &mut act, &mut d_act, &mut d_gates);
    let [mut d_gate, mut d_up] = std::array::from_fn(|_| memory.pool.take(slots * ffn));
    kernels::swiglu_backward(ctx, &kept.gate, &kept.up, &d_act, &mut d_gate, &mut d_up);
    let mut dx = memory.pool.take(slots * hidden);
    for (e, rows) in &used {
        let roles = expert(*e);
        for (part, leaf) in env.lane_cells().enumerate() {
            let rows = groups.of_part(*e, part);
            let part = |x, width| Mat::new(rows_of(x, width, rows.clone()), rows.len(), width);
            let (x, dy) = (part(&x, hidden), part(&dy, hidden));
            add_weight_grad(ctx, part(&d_gate, ffn), x, chunk.slice_grad(leaf, layer, roles[0]));
            add_weight_grad(ctx, part(&d_up, ffn), x, chunk.slice_grad(leaf, layer, roles[1]));
            add_weight_grad(ctx, dy, part(&act, ffn), chunk.slice_grad(leaf, layer, roles[2]));
        }
        let out = &mut dx[rows.start * hidden..rows.end * hidden];
        for (role, d, acc) in [(roles[0], &d_gate, Acc::Store), (roles[1], &d_up, Acc::Add)] {
            let d = Mat::new(&d[inner(rows)], rows.len(), ffn);
            let w = Mat::new(chunk.param(layer, role), ffn, hidden);
            kernels::product(ctx, d, w, MatMut::new(out, rows.len(), hidden), acc);
        }
    }
    let mut out = memory.pool.take(env.rows_local() * hidden);
    kernels::combine(ctx, &dx, hidden, moe.per_token, &groups.slots, &[], &mut out);
    routed.d_gates = groups.from_slots(&d_gates);
    if moe.shared_ffn > 0 {
        shared_backward(env, chunk, memory, layer, &kept.n_mlp, &mut routed.shared, &mut out)?;
    }
    memory.regs.reduced = Some(out);
    let spent = [x, dy, act, d_act, d_gate, d_up, dx, std::mem::take(&mut kept.gate), std::mem::take(&mut kept.up)];
    spent.into_iter().for_each(|b| memory.pool.give(b));
    kept.routed = Some(routed);
    put_back(memory, chunk.chunk, unit, layer, kept);
    Ok(())
}

/// The shared expert's weight gradients, a leaf per hosted slice, and its share of the rows' gradient.
fn shared_backward(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    layer: usize,
    n: &[f32],
    kept: &mut Vec<Vec<f32>>,
    out: &mut [f32],
) -> Result<(), TrainError> {
    let (place, ctx) = (env.place, env.ctx);
    let (rows, hidden) = (env.rows_local(), place.hidden);
    let up = need(&mut kept.pop(), "the shared expert's up")?;
    let gate = need(&mut kept.pop(), "the shared expert's gate")?;
    let width = gate.len() / rows;
    let [mut act, mut d_act, mut d_gate, mut d_up] = std::array::from_fn(|_| memory.pool.take(rows * width));
    kernels::swiglu(ctx, &gate, &up, &mut act);
    let dy = memory.regs.grad.take().ok_or_else(|| TrainError::Internal("no gradient of the stream".into()))?;
    let down = Mat::new(chunk.param(layer, SHARED[2]), hidden, width);
    kernels::product(ctx, Mat::new(&dy, rows, hidden), down, MatMut::new(&mut d_act, rows, width), Acc::Store);
    kernels::swiglu_backward(ctx, &gate, &up, &d_act, &mut d_gate, &mut d_up);
    for leaf in env.lane_cells() {
        let of_cell: Vec<u32> = place.cell_rows(leaf.0, leaf.1).into_iter().flatten().map(|row| row as u32).collect();
        let mut part = |x: &[f32], width: usize| {
            let mut out = memory.pool.take(of_cell.len() * width);
            kernels::gather_rows(ctx, x, width, &of_cell, &mut out);
            out
        };
        let (n, dy) = (part(n, hidden), part(&dy, hidden));
        let inner = [part(&d_gate, width), part(&d_up, width), part(&act, width)];
        let mat = |x, width| Mat::new(x, of_cell.len(), width);
        add_weight_grad(ctx, mat(&inner[0], width), mat(&n, hidden), chunk.slice_grad(leaf, layer, SHARED[0]));
        add_weight_grad(ctx, mat(&inner[1], width), mat(&n, hidden), chunk.slice_grad(leaf, layer, SHARED[1]));
        add_weight_grad(ctx, mat(&dy, hidden), mat(&inner[2], width), chunk.slice_grad(leaf, layer, SHARED[2]));
        [n, dy].into_iter().chain(inner).for_each(|b| memory.pool.give(b));
    }
    for (role, d) in [(SHARED[0], &d_gate), (SHARED[1], &d_up)] {
        let w = Mat::new(chunk.param(layer, role), width, hidden);
        kernels::product(ctx, Mat::new(d, rows, width), w, MatMut::new(out, rows, hidden), Acc::Add);
    }
    memory.regs.grad = Some(dy);
    [gate, up, act, d_act, d_gate, d_up].into_iter().for_each(|b| memory.pool.give(b));
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
    let (moe, place, ctx) = (moe(env)?, env.place, env.ctx);
    let (rows, hidden, shape) = (env.rows_local(), place.hidden, shape(moe));
    let mut kept = layer_of(memory, chunk.chunk, unit, layer);
    let routed = need(&mut kept.routed, "the router's choice")?;
    let loads = memory.loads.entry(layer).or_insert_with(|| vec![0; moe.experts]);
    loads.iter_mut().zip(&routed.counts).for_each(|(sum, count)| *sum += count);

    let mut aux = Vec::new();
    if moe.aux_loss > 0.0 && env.mode == Mode::Train {
        let balance = Balance::of(env, moe, memory, chunk.chunk, unit, layer)?;
        let leaves: Vec<usize> = place.leaves(unit).collect();
        for (lane, i) in env.lane_cells() {
            let sums = kernels::score_sums(&shape, &routed.scores, &place.cell_rows(lane, i));
            let value = balance.fractions.iter().zip(&sums).map(|(f, sum)| f * sum).sum::<f64>() * balance.factor;
            let leaf = Leaf { cell: leaves[lane], mb: unit.mb };
            memory.aux.insert((leaf, layer, place.cells.start + i), value);
        }
        aux = balance.fractions.iter().map(|f| (f * moe.aux_loss * balance.factor) as f32).collect();
    }
    let mut d_logits = memory.pool.take(rows * moe.experts);
    let Routed { scores, chosen, gates, d_gates, .. } = routed;
    kernels::route_backward(ctx, &shape, &scores, &chosen, &gates, &d_gates, &aux, &mut d_logits);
    for leaf in env.lane_cells() {
        let of_cell: Vec<u32> = place.cell_rows(leaf.0, leaf.1).into_iter().flatten().map(|row| row as u32).collect();
        let mut d = memory.pool.take(of_cell.len() * moe.experts);
        let mut n = memory.pool.take(of_cell.len() * hidden);
        kernels::gather_rows(ctx, &d_logits, moe.experts, &of_cell, &mut d);
        kernels::gather_rows(ctx, &kept.n_mlp, hidden, &of_cell, &mut n);
        store_norm_leaf(env, chunk, memory, leaf, (layer, Role::Router), |dw| {
            let (d, n) = (Mat::new(&d, of_cell.len(), moe.experts), Mat::new(&n, of_cell.len(), hidden));
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
    put_back(memory, chunk.chunk, unit, layer, kept);
    Ok(())
}

/// What the auxiliary loss of one unit and layer is made of: `factor x sum_e fractions_e x (sum of scores of e)`.
struct Balance {
    /// f_e.
    fractions: Vec<f64>,
    /// Experts / rows of the scope x tokens of the unit that have a target: its weight in the step.
    factor: f64,
}

impl Balance {
    fn of(env: &Env, moe: &Moe, memory: &Memory, chunk: usize, unit: Unit, layer: usize) -> Result<Self, TrainError> {
        let saved = &memory.saved[&(chunk, unit)];
        let (scope, layers, per_row) = match moe.aux_scope {
            AuxScope::Layer => (layer, 1, moe.per_token),
            AuxScope::Pooled => (POOLED, env.model.layers, 1),
        };
        let missing = || TrainError::Internal(format!("no router counts of layer {layer}"));
        let counts = saved.counts.get(&scope).ok_or_else(missing)?;
        // Every row of the scope was counted once for each of its experts.
        let rows = counts.iter().map(|count| f64::from(*count)).sum::<f64>() / moe.per_token as f64;
        debug_assert!(rows >= (layers * env.rows_local()) as f64);
        let fraction = |count: &f32| f64::from(*count) / (rows * per_row as f64);
        let factor = moe.experts as f64 / rows * saved.targets;
        Ok(Self { fractions: counts.iter().map(fraction).collect(), factor })
    }
}

/// Balancing biases move by `rate` towards the mean load: up where an expert had fewer tokens, down where it had more.
pub fn move_biases(chunk: &mut ChunkState, loads: &[Vec<u64>], rate: f64) {
    let biases: Vec<_> = chunk.held.iter().filter(|held| held.tensor.role == Role::RouterBias).cloned().collect();
    let Some(bucket) = chunk.find(Bucket::Norms) else { return };
    let owned = chunk.buckets[bucket].owned.clone();
    let (params, kept) = chunk.kept_mut(bucket);
    for held in biases {
        let spec::tensors::Home::Layer(layer) = held.tensor.home else { continue };
        let Some(counts) = loads.get(layer) else { continue };
        let total: u64 = counts.iter().sum();
        for (e, count) in counts.iter().enumerate() {
            let at = held.at.start + e;
            // Integers: mean - count has the sign of total - experts x count.
            let step = match (count * counts.len() as u64).cmp(&total) {
                std::cmp::Ordering::Less => rate as f32,
                std::cmp::Ordering::Equal => continue,
                std::cmp::Ordering::Greater => -(rate as f32),
            };
            if owned.contains(&at) {
                params[at - kept.start] += step;
            }
        }
    }
}

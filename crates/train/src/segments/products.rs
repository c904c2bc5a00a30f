//! Products of a layer's weights, and how tensor cells cut them.
//!
//! A *column-parallel* weight is cut by its outputs: hosted cells stand side by side, and the gradient of its input is
//! a sum over cells. A *row-parallel* weight is cut by its inputs, a slice [hidden, cell] per cell: its output is such a
//! sum. Each cell's product is a leaf; all buffers hold all rows of the unit.

use std::ops::Range;

use kernels::{Acc, Ctx, Mat, MatMut, Right};
use program::packed::Form;
use spec::tensors::Role;
use spec::tree::Counter;

use super::Env;
use crate::buffers::{Memory, Partials};
use crate::mutant::{Mutant, rotated};
use crate::state::{ChunkState, Grads};

/// y = x w^T for a weight stored [out, in]; x: [rows, in].
pub fn linear(ctx: &Ctx, x: &[f32], rows: usize, w: &[f32], inner: usize, y: &mut [f32]) {
    let out = w.len() / inner;
    let (x, w) = (Mat::new(x, rows, inner), Mat::new(w, out, inner));
    kernels::product(ctx, x, w.t(), MatMut::new(y, rows, out), Acc::Store);
}

/// y = x w^T for several weights of one input, as right operands; x: [rows, inner].
pub fn linears(ctx: &Ctx, x: &[f32], rows: usize, inner: usize, uses: Vec<(Right, &mut [f32])>) {
    let (weights, outputs): (Vec<_>, Vec<_>) = uses.into_iter().unzip();
    let outputs = outputs.into_iter().enumerate().map(|(i, y)| {
        let y = MatMut::new(y, rows, weights[i].shape().1);
        (Mat::new(x, rows, inner), i, y)
    });
    kernels::products(ctx, &weights, outputs.collect(), Acc::Store);
}

/// [`linears`] of column-parallel weights, of all hosted cells; x: all rows.
pub fn column_parallel(env: &Env, chunk: &ChunkState, layer: usize, x: &[f32], uses: Vec<(Role, &mut [f32])>) {
    let uses = uses.into_iter().map(|(role, y)| (chunk.right_whole(layer, role, Form::Forward), y));
    linears(env.ctx, x, env.rows(), env.place.hidden, uses.collect());
}

/// dw += dy^T x for a weight stored [out, in] whose accumulator stands at `at`, lane by lane; dy, x: all rows.
fn weight_grad(env: &Env, dy: Mat, x: Mat, grads: &mut Grads, at: Range<usize>) {
    for lane in 0..env.lanes.len() {
        let rows = env.lane_rows(lane);
        add_weight_grad(env.ctx, dy.rows_range(rows.clone()), x.rows_range(rows), grads.lane(lane, at.clone()));
    }
}

/// dw += dy^T x for the rows of one lane, or some of them.
pub fn add_weight_grad(ctx: &Ctx, dy: Mat, x: Mat, dw: &mut [f32]) {
    let (out, inner) = (dy.cols, x.cols);
    kernels::product(ctx, dy.t(), x, MatMut::new(dw, out, inner), Acc::Add);
}

/// The sum over hosted tensor cells: `leaf(i, buffer)` fills the whole buffer of hosted cell `i`.
fn partials(
    env: &Env,
    memory: &mut Memory,
    len: usize,
    mut leaf: impl FnMut(&mut Memory, usize, &mut [f32]),
) -> Partials {
    let mut sum = Counter::new(env.place.grid_tp);
    for (i, cell) in env.place.cells.clone().enumerate() {
        let mut buffer = memory.pool.take(len);
        let i = rotated(env.mutant == Some(Mutant::PartialsRotated), i, env.place.num_cells());
        leaf(memory, i, &mut buffer);
        for spent in sum.push(cell..cell + 1, buffer, |left, right| kernels::add_assign(env.ctx, left, right)) {
            memory.pool.give(spent);
        }
    }
    sum.into_nodes()
}

/// Partial outputs of a row-parallel weight on `x`: [rows, hosted width].
pub fn row_parallel(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    (layer, role): (usize, Role),
    x: &[f32],
) -> Partials {
    let (rows, hidden) = (env.rows(), env.place.hidden);
    let (width, cell) = widths(env, x);
    partials(env, memory, rows * hidden, |_, i, out| {
        let x = Mat::new(x, rows, width).cols_range(env.place.cell_cols(i, cell));
        let w = chunk.right_slice((layer, role), i, cell, Form::Forward);
        kernels::product(env.ctx, x, w, MatMut::new(out, rows, hidden), Acc::Store);
    })
}

/// The gradient `dx` of its input out of that of its output.
pub fn row_parallel_input(env: &Env, chunk: &ChunkState, (layer, role): (usize, Role), dy: &[f32], dx: &mut [f32]) {
    let (rows, hidden) = (env.rows(), env.place.hidden);
    let (width, cell) = widths(env, dx);
    for i in 0..env.place.num_cells() {
        let w = chunk.right_slice((layer, role), i, cell, Form::Input);
        let out = MatMut::new(dx, rows, width).cols_range(env.place.cell_cols(i, cell));
        kernels::product(env.ctx, Mat::new(dy, rows, hidden), w, out, Acc::Store);
    }
}

/// Adds its own gradient.
pub fn row_parallel_weight(env: &Env, chunk: &mut ChunkState, (layer, role): (usize, Role), dy: &[f32], x: &[f32]) {
    let rows = env.rows();
    let (width, cell) = widths(env, x);
    let held = chunk.held(layer, role).clone();
    for i in 0..env.place.num_cells() {
        let x = Mat::new(x, rows, width).cols_range(env.place.cell_cols(i, cell));
        weight_grad(env, Mat::new(dy, rows, env.place.hidden), x, &mut chunk.grads, held.slice(i));
    }
}

/// Partial input gradients of column-parallel weights on one input, each with the gradient of its output.
pub fn column_parallel_input(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    layer: usize,
    uses: &[(Role, &[f32])],
) -> Partials {
    let (rows, hidden) = (env.rows(), env.place.hidden);
    partials(env, memory, rows * hidden, |_, i, out| {
        for (n, (role, dy)) in uses.iter().enumerate() {
            let (width, cell) = widths(env, dy);
            let dy = Mat::new(dy, rows, width).cols_range(env.place.cell_cols(i, cell));
            let w = chunk.right_slice((layer, *role), i, hidden, Form::Input);
            let acc = if n == 0 { Acc::Store } else { Acc::Add };
            kernels::product(env.ctx, dy, w, MatMut::new(out, rows, hidden), acc);
        }
    })
}

/// Adds their own gradients.
pub fn column_parallel_weight(env: &Env, chunk: &mut ChunkState, layer: usize, x: &[f32], uses: &[(Role, &[f32])]) {
    let rows = env.rows();
    let x = Mat::new(x, rows, env.place.hidden);
    let at: Vec<_> = uses.iter().map(|(role, _)| chunk.grad_range(layer, *role)).collect();
    for lane in 0..env.lanes.len() {
        let rows_lane = env.lane_rows(lane);
        let parts = chunk.grads.lane_parts(lane, &at).into_iter().zip(uses).map(|(dw, (_, dy))| {
            let dy = Mat::new(dy, rows, dy.len() / rows).rows_range(rows_lane.clone());
            (dy.t(), 0, MatMut::new(dw, dy.cols, x.cols))
        });
        kernels::products(env.ctx, &[x.rows_range(rows_lane.clone()).into()], parts.collect(), Acc::Add);
    }
}

/// Hosted width of a buffer with all rows, and the width of one cell.
fn widths(env: &Env, buffer: &[f32]) -> (usize, usize) {
    let width = buffer.len() / env.rows();
    (width, width / env.place.num_cells())
}

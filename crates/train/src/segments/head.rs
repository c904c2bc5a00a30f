//! Output projection and loss over the hosted vocabulary slices, a block of tokens at a time.

use std::ops::Range;

use kernels::{Acc, Mat, MatMut, XentTotal};
use program::instr::Mode;
use program::packed::Form;
use spec::tensors::Role;
use spec::tree::Counter;
use spec::{Leaf, Unit};

use super::{Env, add_weight_grad, need};
use crate::buffers::Memory;
use crate::error::TrainError;
use crate::mutant::{Mutant, rotated};
use crate::state::ChunkState;

/// The rows of a block, and the lane that they belong to.
fn rows_of(env: &Env, block: usize) -> (Range<usize>, usize) {
    let rows = env.place.token_blocks().rows(block);
    let lane = rows.start / env.place.rows_lane();
    (rows, lane)
}

/// Logits of the block, a buffer per hosted cell, and their softmax statistics, by cell and then row.
pub fn logits(env: &Env, chunk: &ChunkState, memory: &mut Memory, unit: Unit, block: usize) -> Result<(), TrainError> {
    let (place, (rows, _)) = (env.place, rows_of(env, block));
    let saved = memory.saved.entry((chunk.chunk, unit)).or_default();
    if let Some(gathered) = memory.regs.rows.take() {
        saved.n_head = gathered;
    }
    let n = Mat::new(&saved.n_head, env.rows(), place.hidden).rows_range(rows.clone());
    let targets = &memory.tokens[&unit].targets[rows.clone()];
    memory.regs.stats.clear();
    memory.regs.logits.clear();
    for i in 0..place.num_cells() {
        let mut logits = memory.pool.take(rows.len() * place.vocab_cell);
        let w = chunk.right_slice((0, chunk.head_role()), i, place.hidden, Form::Forward);
        kernels::product(env.ctx, n, w, MatMut::new(&mut logits, rows.len(), place.vocab_cell), Acc::Store);
        let (first, valid) = place.vocab_part(i);
        let mut stats = vec![kernels::XentStat { max: 0.0, sum: 0.0, target: 0.0 }; rows.len()];
        kernels::xent_stats(env.ctx, &logits, place.vocab_cell, valid, first, targets, &mut stats);
        memory.regs.stats.extend(stats);
        memory.regs.logits.push(logits);
    }
    Ok(())
}

/// Loss of the block from the statistics of all cells; in training also its gradient.
pub fn loss(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    block: usize,
) -> Result<(), TrainError> {
    let (rows, lane) = rows_of(env, block);
    let stats = std::mem::take(&mut memory.regs.stats);
    let cells = env.place.grid_tp;
    if stats.len() != cells * rows.len() {
        return Err(TrainError::Internal(format!("{} softmax statistics for {cells} cells", stats.len())));
    }
    let rotate = env.mutant == Some(Mutant::SoftmaxRotated);
    let mut of_row = vec![kernels::XentStat { max: 0.0, sum: 0.0, target: 0.0 }; cells];
    let totals: Vec<XentTotal> = (0..rows.len())
        .map(|row| {
            (0..cells).for_each(|cell| of_row[rotated(rotate, cell, cells)] = stats[cell * rows.len() + row]);
            kernels::xent_combine(&of_row)
        })
        .collect();
    let tokens = &memory.tokens[&unit];
    let (cell, context) = env.lanes.iter().nth(lane).expect("a block lies in a lane");
    let leaf = Leaf { cell: env.place.leaf(cell, context), mb: unit.mb };
    let sum = memory.losses.entry(leaf).or_default();
    let all = env.mutant == Some(Mutant::PaddingCounted);
    for (total, row) in totals.iter().zip(rows.clone()).filter(|(_, row)| all || tokens.targets[*row] != data::IGNORE) {
        sum.nats += f64::from(total.loss());
        sum.tokens += 1;
        sum.bytes += tokens.bytes(row);
    }
    memory.regs.stats = stats;
    if env.mode == Mode::Train {
        gradient(env, chunk, memory, unit, block, &totals);
    }
    for spent in std::mem::take(&mut memory.regs.logits) {
        memory.pool.give(spent);
    }
    let last = rows.end == env.rows();
    if last && env.mode == Mode::Train {
        memory.regs.partials = Some(std::mem::take(&mut memory.regs.head_partials));
        let spent = std::mem::take(&mut memory.saved.entry((chunk.chunk, unit)).or_default().n_head);
        memory.pool.give(spent);
    } else if last {
        let saved = memory.saved.remove(&(chunk.chunk, unit)).unwrap_or_default();
        [saved.n_head, saved.x_head, saved.inv_head].into_iter().for_each(|b| memory.pool.give(b));
    }
    Ok(())
}

/// Softmax minus one-hot (not yet divided by the tokens of the step), into the output
/// projection's accumulator of the lane and into the partial gradients of the rows.
fn gradient(env: &Env, chunk: &mut ChunkState, memory: &mut Memory, unit: Unit, block: usize, totals: &[XentTotal]) {
    let (place, (rows, lane), ctx) = (env.place, rows_of(env, block), env.ctx);
    let (hidden, width) = (place.hidden, place.vocab_cell);
    let mut sum = Counter::new(place.grid_tp);
    let mut logits = std::mem::take(&mut memory.regs.logits);
    let one_sum = env.mutant == Some(Mutant::TiedOneAccumulator);
    let use_at = chunk.grad_range(0, if one_sum { chunk.head_role() } else { Role::LmHead });
    for (i, cell) in place.cells.clone().enumerate() {
        let (first, valid) = place.vocab_part(i);
        let targets = &memory.tokens[&unit].targets[rows.clone()];
        kernels::xent_grad(ctx, &mut logits[i], width, valid, first, targets, totals);
        let d = Mat::new(&logits[i], rows.len(), width);
        let n = &memory.saved[&(chunk.chunk, unit)].n_head;
        let n = Mat::new(n, env.rows(), hidden).rows_range(rows.clone());
        let at = use_at.start + i * width * hidden;
        add_weight_grad(ctx, d, n, chunk.grads.lane(lane, at..at + width * hidden));
        let mut out = memory.pool.take(rows.len() * hidden);
        let w = chunk.right_slice((0, chunk.head_role()), i, hidden, Form::Input);
        kernels::product(ctx, d, w, MatMut::new(&mut out, rows.len(), hidden), Acc::Store);
        for spent in sum.push(cell..cell + 1, out, |left, right| kernels::add_assign(ctx, left, right)) {
            memory.pool.give(spent);
        }
    }
    memory.regs.logits = logits;
    let nodes = sum.into_nodes();
    if memory.regs.head_partials.is_empty() {
        let len = env.rows() * hidden;
        memory.regs.head_partials = nodes.iter().map(|(node, _)| (node.clone(), memory.pool.take(len))).collect();
    }
    for ((_, whole), (_, part)) in memory.regs.head_partials.iter_mut().zip(nodes) {
        whole[rows.start * hidden..rows.end * hidden].copy_from_slice(&part);
        memory.pool.give(part);
    }
}

/// Keeps the stream at the end of the last chunk's forward until the backward opens with the head.
pub fn keep_input(memory: &mut Memory, chunk: usize, unit: Unit) -> Result<(), TrainError> {
    let x = need(&mut memory.regs.x, "x")?;
    memory.saved.entry((chunk, unit)).or_default().x_head = x;
    Ok(())
}

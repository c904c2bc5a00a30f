//! Whole tensors out of what the ranks hold.

use spec::tensors::{Cut, Tensor};
use spec::{Model, Run, Unit};

use crate::exec::Executor;
use crate::state::ChunkState;
use program::instr::block_rows;

/// A whole tensor without padding rows, row-major.
#[derive(Debug, Clone)]
pub struct Whole {
    /// Which.
    pub tensor: Tensor,
    /// [real rows, columns].
    pub values: Vec<f32>,
}

/// Logits of one block of rows of one tensor cell: (unit, block, cell, values).
pub type Captured = (Unit, usize, usize, Vec<f32>);

/// Every tensor of the model, zero.
pub fn whole_tensors(model: &Model) -> Vec<Whole> {
    let all = spec::tensors::tensors(model);
    all.into_iter().map(|tensor| Whole { values: vec![0.0; tensor.real_len()], tensor }).collect()
}

/// Room for the logits of all positions.
pub fn whole_logits(run: &Run) -> Vec<f32> {
    vec![0.0; run.tokens_per_step() * run.model.vocab]
}

/// Puts in the elements that this rank speaks for, out of a flat vector of each chunk.
pub fn put_state(executor: &Executor, all: &mut [Whole], flat: impl Fn(&ChunkState) -> &[f32]) {
    let place = &executor.place;
    if place.holder > 0 {
        return;
    }
    for state in executor.chunks.values() {
        for held in &state.held {
            if !held.counts || (held.tensor.cut == Cut::Whole && place.at.tp > 0) {
                continue;
            }
            let whole = &mut all[held.index];
            for (n, slice) in held.slices.clone().enumerate() {
                let (rows, cols) = held.tensor.slice(slice, place.grid_tp);
                let from = flat(state)[held.slice(n)].chunks_exact(cols.len());
                for (row, values) in rows.zip(from).filter(|(row, _)| *row < held.tensor.real_rows) {
                    let at = row * held.tensor.cols + cols.start;
                    whole.values[at..at + values.len()].copy_from_slice(values);
                }
            }
        }
    }
}

/// Puts in the logits that this rank computed.
pub fn put_logits(run: &Run, executor: &Executor, captured: Vec<Captured>, all: &mut [f32]) {
    let (place, vocab) = (&executor.place, run.model.vocab);
    for (unit, block, i, values) in captured {
        let (first, valid) = place.vocab_part(i);
        for (row, values) in block_rows(place.rows_lane(), block).zip(values.chunks_exact(place.vocab_cell)) {
            let (cell, whole_row) = place.whole_row(unit, row);
            let first_row = run.grid.sequences(Unit { cell, ..unit }).start * place.seq;
            let at = (first_row + whole_row) * vocab + first as usize;
            all[at..at + valid].copy_from_slice(&values[..valid]);
        }
    }
}

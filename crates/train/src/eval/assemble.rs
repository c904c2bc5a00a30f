//! Whole tensors out of what the ranks hold.

use spec::tensors::{Cut, Tensor};
use spec::{Model, Run, Unit};

use crate::exec::Executor;

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

/// What [`put_state`] puts together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// The parameters.
    Parameters,
    /// The summed gradients of a step, before its update.
    Gradients,
}

/// Puts in the elements that this rank speaks for.
pub fn put_state(executor: &Executor, all: &mut [Whole], of: Of) {
    let place = &executor.place;
    for state in executor.chunks.values() {
        for (i, bucket) in state.buckets.iter().enumerate().filter(|(_, b)| b.plan.parameters) {
            let (data, first) = match of {
                Of::Parameters => (state.kept(i).0, state.kept(i).1.start),
                Of::Gradients => (&bucket.total[..], bucket.owned.start),
            };
            for (held, slice, elements, at) in state.pieces(&bucket.part) {
                if !held.counts || (held.tensor.cut == Cut::Whole && place.at.tp > 0) {
                    continue;
                }
                let (rows, cols) = held.tensor.slice(slice, place.grid_tp);
                let whole = &mut all[held.index].values;
                for (element, value) in elements.zip(&data[at.start - first..at.end - first]) {
                    let (row, col) = (rows.start + element / cols.len(), cols.start + element % cols.len());
                    // Padding rows are left out.
                    if row < held.tensor.real_rows {
                        whole[row * held.tensor.cols + col] = *value;
                    }
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
        for (row, values) in place.token_blocks().rows(block).zip(values.chunks_exact(place.vocab_cell)) {
            let (cell, whole_row) = place.whole_row(unit, row);
            let first_row = run.grid.sequences(Unit { cell, ..unit }).start * place.seq;
            let at = (first_row + whole_row) * vocab + first as usize;
            all[at..at + valid].copy_from_slice(&values[..valid]);
        }
    }
}

//! The end of a vote: what an update needs beside the gradients, and the update.

use kernels::Ctx;
use serde::{Deserialize, Serialize};
use spec::Run;

use crate::optim::{self, Written};
use crate::segments;
use crate::state::ChunkState;
use crate::vote::Decision;

/// What all ranks derived from the ballots of a training step. With the gradients of the step it is the update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The step.
    pub step: u64,
    /// What is done.
    pub decision: Decision,
    /// Rows of each expert in the step, by layer.
    pub loads: Vec<Vec<u64>>,
}

impl Verdict {
    /// Applies the step to a chunk whose gradients are complete, if that was decided; the gradients are gone then.
    /// With `sums` it says what it wrote; `None`: no sums are known.
    pub fn apply(&self, ctx: &Ctx, run: &Run, state: &mut ChunkState, sums: bool) -> Option<Written> {
        let mut written = None;
        if self.decision.commit {
            let biases = run.model.moe.as_ref().filter(|moe| moe.bias_rate > 0.0);
            written = optim::apply(ctx, &run.train, self.step, &self.decision, state, sums && biases.is_none());
            if let Some(moe) = biases {
                segments::move_biases(state, &self.loads, moe.bias_rate);
            }
        }
        for bucket in &mut state.buckets {
            state.grads.pool.give(std::mem::take(&mut bucket.total));
        }
        written
    }
}

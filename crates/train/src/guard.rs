//! Hashes of state at rest: each rank hashes what it wrote, and looks again before it speaks for the next step.
//!
//! A bit that changes in memory between two steps would otherwise go into every later number. Hashes are of blocks of
//! a state chunk's size; they are no part of any result.

use std::sync::atomic::{AtomicU64, Ordering};

use kernels::Ctx;
use spec::tensors::STATE_CHUNK;
use twox_hash::XxHash3_64;

use crate::persist;
use crate::state::ChunkState;

/// Blocks that a message about corrupt state names.
const NAMED_MAX: usize = 8;

/// What a rank wrote last.
#[derive(Debug, Default)]
pub struct Guard {
    /// By chunk, those of the rank before those that it mirrors; empty: nothing is known.
    hashes: Vec<Vec<u64>>,
}

impl Guard {
    /// The state as it is.
    pub fn of<'s>(ctx: &Ctx, states: impl Iterator<Item = &'s ChunkState>) -> Self {
        Self { hashes: states.map(|state| hashes(ctx, state)).collect() }
    }

    /// The state is about to change.
    pub fn forget(&mut self) {
        self.hashes.clear();
    }

    /// What is not as it was remembered, in words; empty: all is well, or nothing is known.
    pub fn check<'s>(&self, ctx: &Ctx, states: impl Iterator<Item = &'s ChunkState>) -> Vec<String> {
        let mut bad = Vec::new();
        for (known, state) in self.hashes.iter().zip(states) {
            let now = hashes(ctx, state);
            let differs = known.iter().zip(&now).enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| i);
            bad.extend(differs.take(NAMED_MAX).map(|i| name(state, i)));
        }
        bad
    }
}

/// The blocks of a chunk's state in one order: by bucket, then parameters and the two moments.
fn blocks(state: &ChunkState) -> Vec<&[f32]> {
    let of = |bucket| persist::kinds(state, bucket).into_iter().flat_map(|(_, data, _)| data.chunks(STATE_CHUNK));
    (0..state.buckets.len()).flat_map(of).collect()
}

fn hashes(ctx: &Ctx, state: &ChunkState) -> Vec<u64> {
    let blocks = blocks(state);
    let out: Vec<AtomicU64> = blocks.iter().map(|_| AtomicU64::new(0)).collect();
    ctx.split(blocks.len(), |range| {
        for i in range {
            out[i].store(hash(blocks[i]), Ordering::Relaxed);
        }
    });
    out.into_iter().map(AtomicU64::into_inner).collect()
}

fn hash(block: &[f32]) -> u64 {
    XxHash3_64::oneshot(kernels::bytes(block))
}

/// Block number `i` of [`blocks`] in words.
fn name(state: &ChunkState, i: usize) -> String {
    let mut before = 0;
    for bucket in 0..state.buckets.len() {
        for (kind, data, range) in persist::kinds(state, bucket) {
            let count = data.len().div_ceil(STATE_CHUNK);
            if i < before + count {
                let first = range.start + (i - before) * STATE_CHUNK;
                let at = first..(first + STATE_CHUNK).min(range.end);
                let touches = |held: &&crate::state::Held| held.at.start < at.end && at.start < held.at.end;
                let tensors: Vec<_> = state.held.iter().filter(touches).map(|held| held.tensor.name.as_str()).collect();
                return format!("{kind} of {}", tensors.join(", "));
            }
            before += count;
        }
    }
    format!("block {i} of chunk {}", state.chunk)
}

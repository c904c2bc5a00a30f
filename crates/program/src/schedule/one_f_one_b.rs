//! 1F1B: as soon as the pipeline is full, one forward and one backward in turn.
//!
//! Source: Narayanan et al., arXiv 2104.04473, section 2.2.1 (PipeDream-Flush). The idle
//! share is GPipe's; position `i` of `p` keeps at most `p - i` units' activations.

use spec::Unit;
use spec::schedule::Turn;

use super::{Task, one_and_one};

pub(super) fn tasks(positions: usize, pp: usize, units: &[Unit]) -> Vec<Task> {
    let forwards = units.iter().map(|&unit| Task { turn: Turn::Forward, chunk: pp, unit }).collect();
    let backwards = units.iter().map(|&unit| Task { turn: Turn::Backward, chunk: pp, unit }).collect();
    one_and_one(positions - pp - 1, forwards, backwards)
}

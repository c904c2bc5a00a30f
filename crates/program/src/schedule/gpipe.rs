//! GPipe: all forwards, then all backwards.
//!
//! Source: Huang et al., arXiv 1811.06965, section 2.3. Idle share of the pipeline
//! (p - 1) / (m + p - 1); m units' activations are alive at the peak. The paper runs the
//! backwards last in, first out; here they are ascending, as the gradient sums ask.

use spec::Unit;
use spec::schedule::Turn;

use super::Task;

pub(super) fn tasks(pp: usize, units: &[Unit]) -> Vec<Task> {
    let forwards = units.iter().map(|&unit| Task { turn: Turn::Forward, chunk: pp, unit });
    let backwards = units.iter().map(|&unit| Task { turn: Turn::Backward, chunk: pp, unit });
    forwards.chain(backwards).collect()
}

//! ZB-H1: 1F1B whose weight gradients are put off into the bubble, at 1F1B's memory.
//!
//! Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.3. Position `r` of `p` puts off at
//! most `r` weight parts, so a unit's activations and what waits for weights together are at most `p` units. Idle time is
//! (p - 1) (T_F + T_B - T_W) with T_B the input part: a third of 1F1B's where the three are equal.

use spec::Unit;
use spec::schedule::Turn::{BackwardInput, BackwardWeight, Forward};

use super::Task;

pub(super) fn tasks(positions: usize, pp: usize, units: &[Unit]) -> Vec<Task> {
    let warmup = (positions - pp - 1).min(units.len());
    let of = |turn, unit: &Unit| Task { turn, chunk: pp, unit: *unit };
    let mut all: Vec<Task> = units[..warmup].iter().map(|u| of(Forward, u)).collect();
    for i in 0..units.len() {
        all.extend(units.get(warmup + i).map(|u| of(Forward, u)));
        all.push(of(BackwardInput, &units[i]));
        if i >= pp {
            all.push(of(BackwardWeight, &units[i - pp]));
        }
    }
    let begun = units.len().saturating_sub(pp);
    all.extend(units[begun..].iter().map(|u| of(BackwardWeight, u)));
    all
}

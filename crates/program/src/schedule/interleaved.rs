//! Interleaved 1F1B: several chunks of layers per position.
//!
//! Source: Narayanan et al., arXiv 2104.04473, section 2.2.2; the freedom in the number of
//! units after Llama 3, arXiv 2407.21783, section 3.3.2. Units go through in groups: a group
//! passes the first chunk of a position, then the second, and so on; backwards likewise with
//! chunks descending. With `v` chunks idle time / ideal time is (p - 1) / (v m) for any number
//! of units m >= p; with fewer it is (p - 1 + (v - 1) (p - m)) / (v m).
//!
//! Groups have at least `p` units (fewer only if there are fewer in all), so that a unit is
//! back at position 0 when its next chunk is due; the units beyond a multiple of `p` spread
//! over the groups, larger groups first. Why it never waits for ever: with `g` the size of
//! the first (largest) group, position `r` warms up with `2 (p - 1 - r) + (v - 1) g`
//! forwards. Backward number `k` of the last position then follows forward `k + (v - 1) g`,
//! which is at or after the forward that it needs as no group is larger than `g`; and what
//! it needs from position 0 asks of the last position for forward
//! `k + (v - 1) g - g' - g'' + 2 (p - 1)`, with the sizes of the groups of the two units: an
//! earlier one, as both are at least `p`. One group of fewer units has all forwards that others wait for in the warm-up.

use spec::Unit;
use spec::schedule::Turn;

use super::{Task, one_and_one};

pub(super) fn tasks(positions: usize, vpp: usize, pp: usize, units: &[Unit]) -> Vec<Task> {
    let groups = groups(positions, units);
    let chunk = |v: usize| v * positions + pp;
    let mut forwards = Vec::with_capacity(units.len() * vpp);
    let mut backwards = Vec::with_capacity(units.len() * vpp);
    for group in &groups {
        for v in 0..vpp {
            forwards.extend(group.iter().map(|&unit| Task { turn: Turn::Forward, chunk: chunk(v), unit }));
        }
        for v in (0..vpp).rev() {
            backwards.extend(group.iter().map(|&unit| Task { turn: Turn::Backward, chunk: chunk(v), unit }));
        }
    }
    let first = groups.first().map_or(0, |g| g.len());
    one_and_one(2 * (positions - 1 - pp) + (vpp - 1) * first, forwards, backwards)
}

/// `units` in as many groups of at least `positions` as fit, as even as possible, larger ones first.
fn groups(positions: usize, units: &[Unit]) -> Vec<&[Unit]> {
    let count = (units.len() / positions).max(1);
    let mut rest = units;
    (0..count)
        .map(|i| {
            let (group, after) = rest.split_at(units.len() / count + usize::from(i < units.len() % count));
            rest = after;
            group
        })
        .collect()
}

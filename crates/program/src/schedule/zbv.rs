//! ZB-V: two chunks per position, there and back, and no bubble where the three parts take equally long.
//!
//! Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, section 4.3, in the closed form of
//! the order that PyTorch uses. A unit passes chunk `r` of position `r` on its way there and chunk `2 p - 1 - r` on its
//! way back, so the loss is on position 0. The order is made for at least `2 p - 1` units; of fewer, the others are
//! left out, which keeps what waits for what.

use std::ops::Range;

use spec::Unit;
use spec::schedule::Turn::{self, BackwardInput, BackwardWeight, Forward};

use super::Task;

pub(super) fn tasks(positions: usize, pp: usize, units: &[Unit]) -> Vec<Task> {
    let full = units.len().max(2 * positions - 1);
    let mut list = List { chunks: [pp, 2 * positions - 1 - pp], units, done: [[0; 3]; 2], tasks: Vec::new() };
    let [there, back] = [0, 1];
    // Warm-up: forwards there, then in turn with those back, then those back with their backwards.
    list.times(2 * (positions - pp) - 1, &[(Forward, there)]);
    list.times(pp, &[(Forward, back), (Forward, there)]);
    list.times(positions - pp, &[(Forward, back), (BackwardInput, back), (BackwardWeight, back)]);
    while list.count(Forward, back) < list.count(Forward, there) || list.count(Forward, there) < full {
        if list.count(Forward, there) < full {
            list.next(Forward, there);
        }
        list.times(1, &[(BackwardInput, there), (BackwardWeight, there), (Forward, back)]);
        list.times(1, &[(BackwardInput, back), (BackwardWeight, back)]);
    }
    // The weight parts of the last units fill what would be the bubble.
    list.times(pp, &[(BackwardInput, there), (BackwardInput, back)]);
    list.times(positions - pp, &[(BackwardInput, there), (BackwardWeight, there)]);
    for place in [back, there] {
        let left = list.count(BackwardWeight, place)..list.count(BackwardInput, place);
        list.times(left.len(), &[(BackwardWeight, place)]);
    }
    list.tasks
}

/// The order as it grows: each turn of a chunk takes the units in ascending order.
struct List<'a> {
    /// There and back.
    chunks: [usize; 2],
    units: &'a [Unit],
    /// Units done, by chunk and turn.
    done: [[usize; 3]; 2],
    tasks: Vec<Task>,
}

fn index(turn: Turn) -> usize {
    match turn {
        Forward => 0,
        BackwardInput => 1,
        _ => 2,
    }
}

impl List<'_> {
    fn count(&self, turn: Turn, place: usize) -> usize {
        self.done[place][index(turn)]
    }

    /// The next unit of a turn, if it exists.
    fn next(&mut self, turn: Turn, place: usize) {
        let number = &mut self.done[place][index(turn)];
        if let Some(unit) = self.units.get(*number) {
            self.tasks.push(Task { turn, chunk: self.chunks[place], unit: *unit });
        }
        *number += 1;
    }

    fn times(&mut self, times: usize, round: &[(Turn, usize)]) {
        for _ in (Range { start: 0, end: times }) {
            round.iter().for_each(|&(turn, place)| self.next(turn, place));
        }
    }
}

//! DualPipeV: DualPipe cut in half, on the V placement and without a second copy of the parameters.
//!
//! Source: DeepSeek-AI, DualPipe's `dualpipev.py` (its eight steps are those below); DeepSeek-V3, arXiv 2412.19437, section
//! 3.2.1. There a forward and a backward of two units overlap their communication; here they follow one another. The order is
//! made for at least `2 p` units; of fewer, the others are left out, which keeps what waits for what.

use std::collections::VecDeque;

use spec::Unit;
use spec::schedule::Turn::{self, Backward, BackwardInput, BackwardWeight, Forward};

use super::Task;

pub(super) fn tasks(positions: usize, pp: usize, units: &[Unit]) -> Vec<Task> {
    let full = units.len().max(2 * positions);
    let mut list = List {
        chunks: [pp, 2 * positions - 1 - pp],
        units,
        forwards: [0; 2],
        backwards: [0; 2],
        put_off: VecDeque::new(),
        tasks: Vec::new(),
    };
    let rest = positions - pp - 1;
    let [there, back] = [0, 1];
    // 1 and 2: forwards there, then in turn with those back.
    (0..2 * rest).for_each(|_| list.forward(there));
    for _ in 0..pp + 1 {
        list.forward(there);
        list.forward(back);
    }
    // 3: the first backwards, in parts.
    for _ in 0..rest {
        list.backward(back, true);
        list.weight();
        list.forward(back);
    }
    // 4: the steady state.
    for _ in 0..full + pp + 1 - 2 * positions {
        list.forward(there);
        list.backward(back, false);
        list.forward(back);
        list.backward(there, false);
    }
    // 5: the last forwards.
    for _ in 0..rest {
        list.backward(back, false);
        list.forward(back);
        list.backward(there, false);
    }
    // 6: the second half of them without their weight parts.
    for i in 0..2 * (pp + 1) {
        list.backward(if i % 2 == 0 { back } else { there }, i > pp);
    }
    // 7 and 8: weight parts in what would be the bubble, then those that are left.
    for _ in 0..rest {
        list.weight();
        list.backward(there, true);
    }
    (0..pp + 1).for_each(|_| list.weight());
    list.tasks
}

struct List<'a> {
    /// There and back.
    chunks: [usize; 2],
    units: &'a [Unit],
    /// Units done, by chunk.
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Weight parts (place, number of the unit) in the order of their input parts.
    put_off: VecDeque<(usize, usize)>,
    tasks: Vec<Task>,
}

impl List<'_> {
    fn push(&mut self, turn: Turn, place: usize, number: usize) {
        if let Some(unit) = self.units.get(number) {
            self.tasks.push(Task { turn, chunk: self.chunks[place], unit: *unit });
        }
    }

    fn forward(&mut self, place: usize) {
        self.push(Forward, place, self.forwards[place]);
        self.forwards[place] += 1;
    }

    /// Whole, or `apart`: the input part now, the weight part later.
    fn backward(&mut self, place: usize, apart: bool) {
        let number = self.backwards[place];
        self.backwards[place] += 1;
        self.push(if apart { BackwardInput } else { Backward }, place, number);
        if apart {
            self.put_off.push_back((place, number));
        }
    }

    fn weight(&mut self) {
        if let Some((place, number)) = self.put_off.pop_front() {
            self.push(BackwardWeight, place, number);
        }
    }
}

//! Pipeline schedules: in which order one pipeline position works.
//!
//! A schedule is a generator of [`Task`]s; it knows chunks and units, nothing of layers or
//! messages. Two laws hold for all of them: the backwards of one chunk run in ascending
//! unit order (weight gradients add up first in, first out), and the lists of all positions
//! together cannot wait for ever.

mod gpipe;
mod interleaved;
mod one_f_one_b;

use spec::{Layout, Schedule, Unit};

/// A piece of pipeline work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// One unit through the layers of one chunk.
    Forward {
        /// The chunk of layers.
        chunk: usize,
        /// The unit.
        unit: Unit,
    },
    /// The way back.
    Backward {
        /// The chunk of layers.
        chunk: usize,
        /// The unit.
        unit: Unit,
    },
}

/// The work of pipeline position `pp` for `units` (ascending), in order.
///
/// At one position every schedule is plain accumulation: each unit forward, then backward.
///
/// # Panics
/// If `pp` is not a position of the layout.
pub fn tasks(layout: &Layout, pp: usize, units: &[Unit]) -> Vec<Task> {
    assert!(pp < layout.pp, "position {pp} of {}", layout.pp);
    if layout.pp == 1 {
        return one_f_one_b::tasks(1, 0, units);
    }
    match layout.schedule {
        Schedule::GPipe => gpipe::tasks(pp, units),
        // One chunk per position: interleaving has nothing to interleave.
        Schedule::Interleaved if layout.vpp > 1 => interleaved::tasks(layout.pp, layout.vpp, pp, units),
        Schedule::OneFOneB | Schedule::Interleaved => one_f_one_b::tasks(layout.pp, pp, units),
    }
}

/// `forwards[..warmup]`, then one forward and one backward in turn, then the backwards that are left.
pub(crate) fn one_and_one(warmup: usize, forwards: Vec<Task>, backwards: Vec<Task>) -> Vec<Task> {
    let warmup = warmup.min(forwards.len());
    let mut all = Vec::with_capacity(forwards.len() + backwards.len());
    let mut backwards = backwards.into_iter();
    for (i, forward) in forwards.into_iter().enumerate() {
        all.push(forward);
        if i >= warmup {
            all.extend(backwards.next());
        }
    }
    all.extend(backwards);
    all
}

#[cfg(test)]
mod tests;

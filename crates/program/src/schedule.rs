//! Pipeline schedules: in which order one pipeline position works.
//!
//! A schedule is a generator of [`Task`]s; it knows chunks and units, nothing of layers or
//! messages. Two laws hold for all of them: each turn of one chunk takes the units in ascending
//! order (weight gradients add up first in, first out), and the lists of all positions
//! together cannot wait for ever.

mod dualpipe_v;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zb_h1;
mod zbv;

use spec::schedule::Turn;
use spec::schedule_file::Orders;
use spec::{Layout, Schedule, Unit};

/// A piece of pipeline work: a turn of one unit on one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Task {
    /// What.
    pub turn: Turn,
    /// The chunk of layers.
    pub chunk: usize,
    /// The unit.
    pub unit: Unit,
}

/// The work of pipeline position `pp` for `units` (ascending), in order.
///
/// At one position every schedule but a file is plain accumulation: each unit forward, then backward.
///
/// # Panics
/// If `pp` is not a position of the layout.
pub fn tasks(layout: &Layout, pp: usize, units: &[Unit]) -> Vec<Task> {
    assert!(pp < layout.pp, "position {pp} of {}", layout.pp);
    if let Some(orders) = &layout.orders {
        return of_file(orders, pp, units);
    }
    if layout.pp == 1 {
        return one_f_one_b::tasks(1, 0, units);
    }
    match layout.schedule {
        Schedule::GPipe => gpipe::tasks(pp, units),
        // One chunk per position: interleaving has nothing to interleave.
        Schedule::Interleaved if layout.vpp > 1 => interleaved::tasks(layout.pp, layout.vpp, pp, units),
        Schedule::ZbH1 => zb_h1::tasks(layout.pp, pp, units),
        Schedule::ZbV => zbv::tasks(layout.pp, pp, units),
        Schedule::DualPipeV => dualpipe_v::tasks(layout.pp, pp, units),
        Schedule::OneFOneB | Schedule::Interleaved | Schedule::Csv => one_f_one_b::tasks(layout.pp, pp, units),
    }
}

/// The order of a file, which counts the units of a data position; a position with fewer leaves the others out.
fn of_file(orders: &Orders, pp: usize, units: &[Unit]) -> Vec<Task> {
    let task = |a: &spec::schedule_file::Action| {
        units.get(a.microbatch).map(|unit| Task { turn: a.turn, chunk: a.chunk, unit: *unit })
    };
    orders.positions[pp].iter().filter_map(task).collect()
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

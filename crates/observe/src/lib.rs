//! What ran when, read back: the profile of a step and traces, as pure functions of what the ranks wrote down.
//!
//! A rank writes down one time per instruction ([`record`]). What an instruction is, the program tells: the same lists
//! that ran, lowered again. So recording costs a few words, and everything here can be redone from the files.

mod flows;
pub mod goodput;
pub mod hang;
mod label;
mod profile;
pub mod pytorch;
pub mod record;
pub mod straggler;
#[cfg(test)]
mod testing;
mod trace;

pub use flows::{Flow, flows};
pub use profile::profile;
pub use record::{Flight, RankRecord, StepRecord};
pub use trace::{Written, write_trace};

use program::Program;
use spec::{Grid, Layout, Model};

/// The run that was observed.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// The shape of the model.
    pub model: &'a Model,
    /// What the numbers are.
    pub grid: &'a Grid,
    /// Where they were computed.
    pub layout: &'a Layout,
    /// Tokens per sequence.
    pub seq: usize,
    /// The lists that ran, by rank.
    pub programs: &'a [Program],
    /// Measured peak of one rank's cores, GFLOP/s.
    pub peak_gflops: f64,
    /// Measured memory bandwidth of one rank's cores while all ranks stream, GB/s.
    pub bandwidth_gb_s: f64,
}

//! Deliberate faults of a rank, as a run is asked to suffer them (`--inject`).

use serde::{Deserialize, Serialize};

/// A fault that strikes `rank` in step `step` (the step that would be committed next).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fault {
    /// The rank that it strikes, in the layout of the moment.
    pub rank: u32,
    /// The step, from 1.
    pub step: u64,
    /// What happens.
    pub kind: FaultKind,
}

/// What a fault does. The rank itself fires it, at a place in the step that (rank, step) chooses, and says so before it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: all its threads stand still.
    Stop,
    /// A gradient becomes not a number.
    Nan,
    /// One bit of a moment changes between two steps.
    FlipMoment,
    /// One bit of a parameter changes between two steps.
    FlipWeight,
    /// One bit of a message changes on its way.
    FlipMessage,
    /// One bit of a gradient changes before it is summed.
    FlipGradient,
    /// From this step on, for `steps` steps, work takes `factor_percent` / 100 times as long.
    Slow {
        /// 400: four times.
        factor_percent: u32,
        /// For how many steps.
        steps: u64,
    },
    /// The next checkpoint of this rank finds a full disk.
    DiskFull,
    /// Messages between this rank and `peer` vanish.
    Partition {
        /// The other side.
        peer: u32,
    },
}

//! Deliberate faults of a rank, as a run is asked to suffer them (`--inject`).

use std::fmt;

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
    /// SIGKILL at a given moment of the transaction; tests of the failure path.
    KillAt(Moment),
    /// SIGSTOP: all its threads stand still.
    Stop,
    /// A gradient becomes not a number.
    Nan,
    /// Gradients become not a number whenever the batch that was this step's is computed: a fault of the data.
    Poison,
    /// One bit of a moment changes between two steps.
    FlipMoment,
    /// One bit of a parameter changes between two steps.
    FlipWeight,
    /// One bit of a message changes on its way.
    FlipMessage,
    /// One bit of a gradient changes before it is summed.
    FlipGradient,
    /// From this step on one bit of every gradient that the process makes is another one, until another process is in its place.
    FlipDevice,
    /// From this step on, for `steps` steps, work takes `factor_percent` / 100 times as long.
    Slow {
        /// 400: four times.
        factor_percent: u32,
        /// For how many steps.
        steps: u64,
    },
    /// The next checkpoint of this rank finds a full disk.
    DiskFull,
    /// The wall clock, as this process reads it, shows so many seconds more from now on.
    Clock {
        /// Or less.
        seconds: i64,
    },
    /// Messages between this rank and `peer` vanish.
    Partition {
        /// The other side.
        peer: u32,
    },
}

impl Fault {
    /// Whether a world of `size` ranks has all that it concerns.
    pub fn there(&self, size: u32) -> bool {
        let peer = if let FaultKind::Partition { peer } = self.kind { peer } else { self.rank };
        self.rank < size && peer < size
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => write!(f, "kill"),
            Self::KillAt(Moment::Load) => write!(f, "kill while state is loaded"),
            Self::KillAt(moment) => write!(f, "kill at {moment:?}"),
            Self::Stop => write!(f, "stop"),
            Self::Nan => write!(f, "nan"),
            Self::Poison => write!(f, "poison"),
            Self::FlipMoment => write!(f, "flip moment"),
            Self::FlipWeight => write!(f, "flip weight"),
            Self::FlipMessage => write!(f, "flip message"),
            Self::FlipGradient => write!(f, "flip gradient"),
            Self::FlipDevice => write!(f, "flip device"),
            Self::Slow { factor_percent, steps: u64::MAX } => write!(f, "slow x{}", f64::from(*factor_percent) / 100.0),
            Self::Slow { factor_percent, steps } => {
                write!(f, "slow x{} for {steps} steps", f64::from(*factor_percent) / 100.0)
            }
            Self::DiskFull => write!(f, "diskfull"),
            Self::Clock { seconds } => write!(f, "clock {seconds:+} s"),
            Self::Partition { peer } => write!(f, "partition from rank {peer}"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of rank {} in step {}", self.kind, self.rank, self.step)
    }
}

/// A moment of a step's transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// In a recovery, when its state has come and it has not heard that of all others.
    Load,
    /// Before its ballot leaves.
    Vote,
    /// Its ballot has reached all peers but one, and it has theirs.
    HalfBallot,
    /// After the vote, before its update.
    Apply,
    /// After its update, while parameters are gathered.
    Gather,
}

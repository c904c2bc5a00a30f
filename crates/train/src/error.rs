//! What can end a rank or a run.

use std::path::PathBuf;

use control::wire::Cause;
use fabric::FabricError;

/// Exit code of a request that cannot be run: nothing was written.
const BAD_INPUT: i32 = 2;
/// Exit code of a run that was stopped on request.
const STOPPED: i32 = 3;
/// Exit code of a run that did all its steps, and whose end could not be saved.
pub(crate) const NOT_SAVED: i32 = 6;
/// Exit code of a run that had begun when something that it was given (data, a checkpoint, a setting) turned out not to be usable.
pub(crate) const UNUSABLE: i32 = 7;

/// Why a rank or a run could not go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The request cannot be run.
    #[error(transparent)]
    Spec(#[from] spec::SpecError),
    /// The data cannot be read or is too little.
    #[error(transparent)]
    Data(#[from] data::DataError),
    /// A checkpoint cannot be read or is not of this run.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::CheckpointError),
    /// A Hugging Face folder cannot be read or written.
    #[error(transparent)]
    Hf(#[from] checkpoint::hf::HfError),
    /// Replicas of the state disagree, or some of it is missing.
    #[error(transparent)]
    Digest(#[from] checkpoint::DigestError),
    /// A message did not arrive, or not as it was sent.
    #[error(transparent)]
    Fabric(#[from] fabric::FabricError),
    /// The instruction path is not there.
    #[error(transparent)]
    Simd(#[from] kernels::SimdError),
    /// Other bad input; names the operands and the remedy.
    #[error("{0}")]
    BadInput(String),
    /// The checker refuses the program.
    #[error("the program of {layout} is refused before the start:\n{violations}")]
    Program {
        /// The layout.
        layout: String,
        /// One violation a line.
        violations: String,
    },
    /// Loss or gradient norm is not finite.
    #[error(
        "training diverged at step {step}: loss {loss}, gradient norm {norm}; lower train.lr or train.clip, or raise train.warmup; nothing was applied"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        norm: f64,
    },
    /// State in memory that is not what was written; nothing was applied.
    #[error("state of ranks {ranks:?} is not what they wrote: memory changed between two steps; nothing was applied")]
    Corrupt {
        /// The ranks.
        ranks: Vec<u32>,
    },
    /// Gradients came out differently on different ranks, again and again; nothing was applied.
    #[error(
        "the gradients of step {step} come out differently where other ranks compute them, again and again: a device is broken, of one of ranks {ranks:?}; nothing was applied"
    )]
    Broken {
        /// The step.
        step: u64,
        /// The ranks of which one is wrong.
        ranks: Vec<u32>,
    },
    /// The device of this process does not compute what it should.
    #[error("{0}")]
    Device(String),
    /// State of an earlier world that nobody holds any more.
    #[error("{0}")]
    Lost(String),
    /// The state at the end of a run could not be saved.
    #[error("{0}")]
    LastCheckpoint(String),
    /// A file or folder of the run.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A run that has begun could not go on; mostly in the words of a rank.
    #[error("{reason}")]
    Rank {
        /// The exit code.
        code: i32,
        /// Why.
        reason: String,
    },
    /// A fault that was asked for was not noticed; what there is to go on from.
    #[error("{0}")]
    Unseen(String),
    /// A rank ended without finishing.
    #[error("rank {rank} ended without finishing: {reason}")]
    RankDied {
        /// The rank.
        rank: usize,
        /// Its exit status or last words.
        reason: String,
    },
    /// Another controller acts for the run; this one has nothing to say about it any more.
    #[error("this controller stops, and leaves the ranks at work: {0}")]
    Deposed(String),
    /// The run came to its end under the controller that this one stood by for.
    #[error("{0}")]
    Over(String),
    /// Stopped on request while no rank was at work.
    #[error("{0}")]
    Stopped(String),
    /// The executor met a program that it cannot run: a bug, for the checker should have refused it.
    #[error("internal: {0}")]
    Internal(String),
}

impl TrainError {
    /// The exit code that fits (design section 7).
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Data(data::DataError::Changed { .. }) => policy::CHANGED,
            Self::Spec(_) | Self::Data(_) | Self::Checkpoint(_) | Self::Hf(_) | Self::Simd(_) | Self::BadInput(_) => {
                BAD_INPUT
            }
            Self::Stopped(_) => STOPPED,
            Self::Diverged { .. } => 4,
            Self::LastCheckpoint(_) => NOT_SAVED,
            Self::Rank { code, .. } => *code,
            _ => 70,
        }
    }

    /// The error of a run that has begun. Exit code 2 promises that nothing was written, which is not true any more.
    #[must_use]
    pub fn of_begun(self) -> Self {
        if self.exit_code() == BAD_INPUT { Self::Rank { code: UNUSABLE, reason: self.to_string() } } else { self }
    }

    /// Why this world is over for a rank that could live on in another one; none: the rank itself cannot go on.
    pub fn cause(&self) -> Option<Cause> {
        let error = match self {
            Self::Fabric(error) => error,
            Self::Digest(error) => return Some(Cause::Disagree { reason: error.to_string() }),
            Self::Corrupt { ranks } => return Some(Cause::Corrupt { ranks: ranks.clone() }),
            Self::Broken { step, ranks } => return Some(Cause::Broken { step: *step, ranks: ranks.clone() }),
            Self::Lost(reason) => return Some(Cause::Lost { reason: reason.clone() }),
            _ => return None,
        };
        let reason = error.to_string();
        Some(match error {
            FabricError::Aborted { .. } => Cause::Aborted,
            FabricError::PeerGone { rank, .. } => Cause::PeerGone { rank: *rank, reason },
            FabricError::Deadline { rank, .. } => Cause::Deadline { rank: *rank, reason },
            FabricError::Mismatch { rank, .. }
            | FabricError::Oversize { rank, .. }
            | FabricError::MailboxFull { rank, .. } => Cause::BadMessage { rank: *rank, reason },
            FabricError::Setup { .. } => Cause::NotConnected { reason },
            // Also what is wrong with the call: a bug.
            _ => return None,
        })
    }

    /// A step came to no number: what a controller that may leave batches out is told.
    pub fn diverged(&self) -> Option<Cause> {
        match self {
            Self::Diverged { step, .. } => Some(Cause::NotFinite { step: *step, reason: self.to_string() }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_input_is_told_apart_from_what_fails_in_a_run_that_has_begun() {
        let bad = || TrainError::BadInput("the file is gone".into());
        assert_eq!((bad().exit_code(), bad().of_begun().exit_code()), (2, 7));
        assert_eq!(bad().of_begun().of_begun().to_string(), "the file is gone");
        let said = |code| TrainError::Rank { code, reason: "why".into() }.of_begun().exit_code();
        assert_eq!([2, 4, 5, 7, 70].map(said), [7, 4, 5, 7, 70]);
        assert_eq!(TrainError::Internal("a bug".into()).of_begun().exit_code(), 70);
    }
}

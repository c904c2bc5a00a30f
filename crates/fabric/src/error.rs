//! What can go wrong between ranks.

use crate::frame::Operation;
use crate::options::RankId;

/// Why an operation failed. All but [`FabricError::Argument`] and [`FabricError::Oversize`]
/// on the sending side leave the endpoint failed: every later operation returns the same
/// error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// [`crate::Endpoint::abort`] was called.
    #[error("aborted: {reason}")]
    Aborted {
        /// What the caller of `abort` said.
        reason: String,
    },
    /// The peer closed its end or its process died.
    #[error("rank {rank} is gone during {operation} in group {group}: {detail}")]
    PeerGone {
        /// The peer.
        rank: RankId,
        /// What was under way.
        operation: Operation,
        /// The group's name.
        group: String,
        /// How it was noticed.
        detail: String,
    },
    /// The operation took longer than [`crate::FabricOptions::deadline_ms`], which a run file
    /// calls `layout.exchange_timeout_ms`.
    #[error(
        "{operation} in group {group} waited {waited_ms} ms {direction} rank {rank} at sequence \
         {sequence}; see what that rank is doing, or raise layout.exchange_timeout_ms"
    )]
    Deadline {
        /// What was under way.
        operation: Operation,
        /// The group's name.
        group: String,
        /// The peer waited for.
        rank: RankId,
        /// `for` (a message from it) or `to send to`.
        direction: &'static str,
        /// Sequence number of the message waited for.
        sequence: u64,
        /// Since the operation began.
        waited_ms: u64,
    },
    /// A message that does not fit what was expected.
    #[error(
        "message from rank {rank} in group {group}, sequence {sequence}: {what} is {got}, expected \
         {expected}"
    )]
    Mismatch {
        /// The field: `generation`, `sequence`, `byte count`, `checksum`, ...
        what: &'static str,
        /// The group's name, or its id as `#7` if the message is not for the operation under way.
        group: String,
        /// The peer.
        rank: RankId,
        /// The sequence number that the message carries.
        sequence: u64,
        /// What should have come.
        expected: String,
        /// What came.
        got: String,
    },
    /// A payload above `message_bytes_max`.
    #[error(
        "message of {bytes} bytes {direction} rank {rank} in group {group} is over the limit \
         message_bytes_max = {bytes_max}; send it in parts"
    )]
    Oversize {
        /// `to` or `from`.
        direction: &'static str,
        /// The peer.
        rank: RankId,
        /// The group's name or `#id`.
        group: String,
        /// Its payload.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// Too much has arrived that nobody received.
    #[error(
        "{bytes} bytes wait in the mailbox, over mailbox_bytes_max = {bytes_max}; rank {rank} sends \
         what this rank does not receive"
    )]
    MailboxFull {
        /// Who sent the message that went over.
        rank: RankId,
        /// What would wait.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The caller's arguments contradict each other; nothing was sent.
    #[error("{operation} in group {group}: {problem}")]
    Argument {
        /// What was asked for.
        operation: Operation,
        /// The group's name.
        group: String,
        /// Operands and what is wrong with them.
        problem: String,
    },
    /// A transport could not be set up.
    #[error("{what}: {problem}")]
    Setup {
        /// The step.
        what: &'static str,
        /// Operands and cause.
        problem: String,
    },
}

impl FabricError {
    pub(crate) fn setup(what: &'static str, problem: impl std::fmt::Display) -> Self {
        Self::Setup { what, problem: problem.to_string() }
    }

    /// True if the endpoint can no longer be used after this error of `operation`.
    pub(crate) fn is_final(&self, operation: Operation) -> bool {
        match self {
            Self::Argument { .. } | Self::Setup { .. } => false,
            Self::Oversize { direction, .. } => *direction == "from" || operation != Operation::Send,
            _ => true,
        }
    }
}

//! Errors: what was being done, on what, and what to do about it.

use std::{fmt, io, path::PathBuf};

use spec::tensors::STATE_CHUNK;
use thiserror::Error;

use crate::tensor::Kind;

/// One state chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Tensor name.
    pub tensor: String,
    /// Kind of state.
    pub kind: Kind,
    /// Slice, counted in tensor cells.
    pub slice: usize,
    /// State chunk inside the slice.
    pub chunk: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, kind, slice, chunk } = self;
        let first = chunk.saturating_mul(STATE_CHUNK);
        write!(f, "{kind} of {tensor}, slice {slice}, chunk {chunk} (from element {first})")
    }
}

/// What can go wrong when hashes of state are collected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DigestError {
    /// Two holders of one chunk have other bits.
    #[error("two holders disagree on {0}: one of them computed or stored wrong bits")]
    Disagree(Place),
    /// Nobody gave this chunk.
    #[error("no holder gave {0}")]
    Missing(Place),
    /// A piece that the model does not have.
    #[error("no such state: {0}")]
    NoSuchState(String),
    /// Bytes that [`crate::encode_pieces`] did not write.
    #[error("bytes of hash pieces are damaged at byte {at} of {len}: {reason}")]
    Bytes {
        /// Byte position.
        at: usize,
        /// Length of the message, bytes.
        len: usize,
        /// What is wrong there.
        reason: &'static str,
    },
}

/// What can go wrong with a checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The file system refused.
    #[error("cannot {action} {}: {cause}{}", path.display(), io_remedy(cause))]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// The answer of the file system.
        cause: io::Error,
    },
    /// The slower tier cannot be used.
    #[error("checkpoint.store {url}: {reason}")]
    Store {
        /// Which.
        url: String,
        /// Why.
        reason: String,
    },
    /// The folder has no manifest.
    #[error("{} is not a checkpoint: it has no manifest.json (an interrupted write leaves such a folder; it is safe to delete)", path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
    },
    /// The manifest cannot be believed.
    #[error("the manifest {} is damaged: {reason}{}", path.display(), use_older(*older))]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// An older complete checkpoint, if there is one.
        older: Option<u64>,
    },
    /// A file of the checkpoint is missing, of another size, or has another header.
    #[error("{} is damaged: {reason}{}", path.display(), use_older(*older))]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// An older complete checkpoint, if there is one.
        older: Option<u64>,
    },
    /// State whose bits are not those that were written.
    #[error("{place} is corrupt in {}: its bytes do not have the hash that was written{}", file.display(), use_older(*older))]
    Corrupt {
        /// The first corrupt chunk.
        place: Place,
        /// The file that holds it.
        file: PathBuf,
        /// An older complete checkpoint, if there is one.
        older: Option<u64>,
    },
    /// Asked for, or gave, state that the model does not have.
    #[error("no such state: {0}")]
    NoSuchState(String),
    /// A piece that cannot be written.
    #[error("cannot write this piece of {tensor}: {reason}")]
    Piece {
        /// Tensor name.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// State that no rank wrote.
    #[error("the checkpoint would lack {0}: no rank wrote it")]
    Missing(Place),
    /// State that two ranks wrote.
    #[error("two pieces hold {0}: each chunk is written by exactly one rank")]
    Twice(Place),
    /// The step has a checkpoint already.
    #[error("step {step} already has a checkpoint in {}; keep it, or discard it before writing the step again", path.display())]
    Exists {
        /// Step.
        step: u64,
        /// Its folder.
        path: PathBuf,
    },
    /// The run is in another timeline now.
    #[error("the run went back to an earlier step while step {step} was being written: it is no checkpoint")]
    WentBack {
        /// Step.
        step: u64,
    },
    /// What was written is not the state whose digest was taken.
    #[error(
        "the state written at step {step} has digest {written}, but the ranks agreed on {agreed}: it changed while it was written"
    )]
    DigestDiffers {
        /// Step.
        step: u64,
        /// Digest of the bytes written.
        written: String,
        /// Digest given by the caller.
        agreed: String,
    },
    /// Another numerics version.
    #[error("{} was written with numerics version {theirs}, this program has {ours}: the run would not continue with the same bits; use the program that wrote it", path.display())]
    OtherNumerics {
        /// The checkpoint.
        path: PathBuf,
        /// Of the checkpoint.
        theirs: u32,
        /// Of the caller.
        ours: u32,
    },
    /// The definition of another run.
    #[error("{} belongs to another run: line {line} of the definition is {theirs:?} there, {ours:?} here; use its run file, or another run directory", path.display())]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// First line that differs, from 1.
        line: usize,
        /// That line in the checkpoint; empty past the end.
        theirs: String,
        /// That line of the caller; empty past the end.
        ours: String,
    },
    /// The tensors of another model.
    #[error("{} holds another model: {tensor} is {theirs} there, {ours} here; use the model and grid that wrote it", path.display())]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// First tensor that differs.
        tensor: String,
        /// Its shape and slices in the checkpoint, or `absent`.
        theirs: String,
        /// Its shape and slices for the caller, or `absent`.
        ours: String,
    },
}

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Io { action, path, cause }
    }

    /// Step of the older complete checkpoint that can be used instead, if one is known.
    pub fn older(&self) -> Option<u64> {
        match self {
            Self::Manifest { older, .. } | Self::File { older, .. } | Self::Corrupt { older, .. } => *older,
            _ => None,
        }
    }
}

fn use_older(older: Option<u64>) -> String {
    match older {
        Some(step) => format!("; the checkpoint of step {step} is complete: go on from there"),
        None => "; no older checkpoint is complete".into(),
    }
}

fn io_remedy(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space or keep fewer checkpoints (the older ones are untouched)"
        }
        io::ErrorKind::PermissionDenied => "; check who owns the folder",
        _ => "",
    }
}

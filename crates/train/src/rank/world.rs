//! Between a rank and who runs it: how it begins, what it shows and says, how it ends and what is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};

use control::wire::Piece;
use events::wall::Wall;
use events::{Event, Step};
use serde::{Deserialize, Serialize};

use crate::best::Best;
use crate::error::TrainError;
use crate::exec::Verdict;
use crate::recover::Peers;
use crate::state::ChunkState;

/// Where a rank's state comes from.
#[derive(Debug)]
pub enum Start {
    /// Initial weights, or the folder that the run names.
    Fresh,
    /// A checkpoint.
    Disk(PathBuf),
    /// The ranks of an earlier world.
    Peers(Box<Peers>),
}

/// What a rank shows of itself to whoever looks, at any time.
#[derive(Debug, Default)]
pub struct Pulse {
    /// The last committed step.
    pub step: AtomicU64,
    /// Instructions run.
    pub work: AtomicU64,
    /// A fault that was asked for: what this process computes is wrong from now on.
    pub broken: AtomicBool,
    /// The wall clock as this process reads it.
    pub wall: Wall,
}

/// What a rank says while it runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// Something happened.
    Event(Event),
    /// A step that is decided, of which nobody may have told, because its world ends.
    Carried(Step),
    /// What this rank made of the leaves of a committed step, which spares check: (leaf, hash of its gradients).
    Leaves {
        /// The step.
        step: u64,
        /// By leaf.
        leaves: Vec<(u64, u64)>,
    },
    /// The state is here and verified.
    Loaded {
        /// The last committed step in it.
        step: u64,
        /// Bytes that came from peers or disk.
        bytes: u64,
        /// Seconds that this took.
        seconds: f64,
    },
}

/// The end of a rank before its time.
#[derive(Debug)]
pub struct Ending {
    /// Why.
    pub error: TrainError,
    /// What it holds, if it got that far.
    pub remains: Option<Box<Remains>>,
}

impl From<TrainError> for Ending {
    fn from(error: TrainError) -> Self {
        Self { error, remains: None }
    }
}

/// What is left of a world on a rank.
#[derive(Debug)]
pub struct Remains {
    /// The world; 0: the one that has just ended.
    pub generation: u64,
    /// All ranks of it had said that they had their state.
    pub settled: bool,
    /// The rank, in that world.
    pub rank: usize,
    /// State by chunk.
    pub chunks: BTreeMap<usize, ChunkState>,
    /// The rank whose state is mirrored here, and that state by its chunks.
    pub mirrors: Option<(usize, BTreeMap<usize, ChunkState>)>,
    /// The last step whose update is whole in it.
    pub step: u64,
    /// The gradients of the step after it are complete.
    pub prepared: bool,
    /// The last vote that this rank saw.
    pub decided: Option<Verdict>,
    /// State that is not what was written.
    pub corrupt: Vec<Piece>,
    /// Validations up to the last step, without those that follow it.
    pub best: Best,
    /// What this world started from, as long as it is not settled.
    pub before: Option<Box<Remains>>,
}

impl Remains {
    /// What is held of world `generation`; the rest is given up.
    pub fn of(self: Box<Self>, generation: u64) -> Option<Box<Self>> {
        let mut held = Some(self);
        while let Some(mut remains) = held {
            if remains.generation == generation {
                remains.before = None;
                return Some(remains);
            }
            held = remains.before.take();
        }
        None
    }

    /// The vote of the last step was to stop after it.
    pub fn stops(&self) -> bool {
        self.decided.as_ref().is_some_and(|verdict| verdict.step == self.step && verdict.decision.stop)
    }
}

/// How a rank ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// All steps done.
    Finished,
    /// Stopped on request, after a checkpoint at this step.
    Stopped(u64),
    /// Ended after this step: `train.patience` validations in a row brought no new best.
    Exhausted(u64),
}

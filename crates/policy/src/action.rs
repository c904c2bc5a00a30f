//! What is to be done.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::input::{Decided, Process};

/// Where the state of a world comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Origin {
    /// Initial weights, or the folder that the run names.
    Fresh,
    /// A checkpoint on disk; verified while it is read.
    Disk(PathBuf),
    /// The processes that are left of an earlier world.
    Peers {
        /// Which.
        #[serde(default)]
        generation: u64,
        /// Its resolved run file.
        before: String,
        /// By rank of the earlier world: the rank in this world of the process that holds its state; none: lost, or not
        /// to be trusted.
        holders: Vec<Option<u32>>,
        /// The step that all holders are at, or roll forward to.
        step: u64,
        /// Those that are one step behind and prepared apply this decision first.
        forward: Option<Decided>,
    },
}

/// Who has which place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct World {
    /// Ascends with every world of a run.
    pub generation: u64,
    /// The processes, by rank.
    pub processes: Vec<Process>,
    /// The resolved run file of this world.
    pub run_toml: String,
    /// Its layout, as a line for the person.
    pub layout: String,
    /// Where its state comes from.
    pub origin: Origin,
    /// Its first steps are checked by other ranks, whatever the run file says: a spare has found a step wrong, copies differ, or it begins with
    /// steps that nobody checked.
    #[serde(default)]
    pub recheck: bool,
}

/// Something is wrong; the shell tells the person and times the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trouble {
    /// Counts from 1.
    pub id: u64,
    /// exit, stopped, silence, no progress, deadline, bad message, corrupt, broken device, disagree, lost, not finite, failed, host lost.
    pub kind: String,
    /// The rank that it points to.
    pub rank: Option<u32>,
    /// Its host.
    pub host: Option<String>,
    /// The last committed step.
    pub step: u64,
    /// What was seen.
    pub detail: String,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action")]
pub enum Action {
    /// Tell the person.
    Tell(Trouble),
    /// Start a rank process on a host.
    Spawn {
        /// Its number.
        process: Process,
        /// Where.
        host: String,
    },
    /// End a process now.
    Kill {
        /// Which.
        process: Process,
    },
    /// Tell all members of this world to leave it.
    Abort {
        /// Which world.
        generation: u64,
    },
    /// Give places.
    Form(World),
    /// Ask all members where they stand, then give [`crate::Input::Verdict`].
    Dump {
        /// Of which world.
        generation: u64,
    },
    /// What the run is changes from `step` on. To be written down, so that no death takes it back; then [`crate::Input::Recorded`].
    /// Nobody acts on it before.
    Intervene {
        /// The first step that differs.
        step: u64,
        /// What changes, as `key=value`.
        detail: String,
        /// What a run file has to say for that: the list of `train.skip` or `train.changes` with this change alone.
        #[serde(default)]
        set: String,
        /// The resolved run file from then on.
        run_toml: String,
        /// A person asked for it.
        #[serde(default)]
        asked: bool,
    },
    /// The run is about to go on from disk. End the timeline of the worlds before, so that nothing of them is committed any more; then
    /// look which checkpoints are there and good, and give [`crate::Input::Found`].
    Survey,
    /// What a person asked for cannot be, and the run goes on unchanged.
    Refuse,
    /// Checkpoints of steps after this one are none any more: they are set aside, here and in the slower tier, and what is being
    /// written of them is not committed.
    Distrust {
        /// The last step that is good.
        after: u64,
    },
    /// Place nothing on this host any more.
    Evict {
        /// Its name.
        host: String,
    },
    /// Ask all members to stop after the step under way, with a checkpoint.
    AskStop,
    /// The run is over.
    Stop {
        /// Exit code.
        code: i32,
    },
}

/// An action and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// What.
    pub action: Action,
    /// A sentence for the person.
    pub reason: String,
}

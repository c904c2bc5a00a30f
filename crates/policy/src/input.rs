//! What happened.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A rank process of a run: numbered by the policy, never again used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Process(pub u64);

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process #{}", self.0)
    }
}

/// The decision of a vote, bit for bit as its ranks derived it. Nobody but ranks reads it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decided {
    /// The step that it commits.
    pub step: u64,
    /// As `train` wrote it.
    pub decision: serde_json::Value,
}

/// A piece of a tensor's state, parameters and moments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The tensor, index in canonical order.
    pub tensor: usize,
    /// The tensor cell's slice.
    pub slice: usize,
    /// Elements of the slice.
    pub elements: Range<usize>,
    /// Of what is mirrored, and not of the own state.
    pub mirror: bool,
    /// What it is, for the person.
    pub what: String,
}

/// What a process holds of one world after an interruption, and behind it what it still has of the world before.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// The world whose layout it follows.
    #[serde(default)]
    pub generation: u64,
    /// The rank that the process had there.
    #[serde(default)]
    pub rank: u32,
    /// It heard from all ranks of that world that they had their state.
    #[serde(default)]
    pub settled: bool,
    /// The last step whose update is whole here; none: no state yet.
    pub step: Option<u64>,
    /// Gradients of the next step are complete here and where they are mirrored: with the decision it can be applied.
    pub prepared: bool,
    /// The decision of the last vote that this rank saw. It is never one behind: a rank that saw a vote has applied it,
    /// so its step is `step`; a rank whose `step` is one less and which is `prepared` rolls forward with it.
    pub decided: Option<Decided>,
    /// Pieces of it that failed their hash: it is no source of these. Empty: all is well.
    pub corrupt: Vec<Piece>,
    /// State of the world before, which this one started from: kept until that is settled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Box<Held>>,
}

impl Held {
    /// This, and what is behind it.
    pub fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |held| held.before.as_deref())
    }

    /// Pieces of any of it failed their hash.
    pub fn any_corrupt(&self) -> bool {
        self.all().any(|held| !held.corrupt.is_empty())
    }
}

/// Why a world ended for a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "cause")]
pub enum Cause {
    /// The agent asked for it.
    Aborted,
    /// A peer's process or link ended.
    PeerGone {
        /// The peer's rank.
        rank: u32,
        /// The fabric's words.
        reason: String,
    },
    /// The links of the world did not all come up.
    NotConnected {
        /// The fabric's words.
        reason: String,
    },
    /// An exchange outlived its deadline.
    Deadline {
        /// The peer waited for.
        rank: u32,
        /// The fabric's words.
        reason: String,
    },
    /// A message was not what was sent.
    BadMessage {
        /// Its sender.
        rank: u32,
        /// The fabric's words.
        reason: String,
    },
    /// The vote found state that failed its hash, on these ranks.
    Corrupt {
        /// Their ranks.
        ranks: Vec<u32>,
    },
    /// The vote found a loss or a norm that is no number, twice with the same bits: not the machine's fault.
    NotFinite {
        /// The step.
        step: u64,
        /// The words of the error.
        reason: String,
    },
    /// Gradients come out differently where other ranks compute them, again and again: a device is broken.
    Broken {
        /// The step, which was not applied.
        step: u64,
        /// One of these ranks has it; the others could not tell which.
        ranks: Vec<u32>,
    },
    /// Two holders of one state disagree.
    Disagree {
        /// What and who.
        reason: String,
    },
    /// A piece of the state has no living holder: only the disk has it.
    Lost {
        /// Which.
        reason: String,
    },
}

/// Something that the shell saw or heard. The shell numbers hosts by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "input")]
pub enum Input {
    /// A host can run so many rank processes.
    HostJoined {
        /// Its name.
        host: String,
        /// Most processes.
        slots: usize,
    },
    /// The agent of a host is gone, and its processes with it.
    HostLost {
        /// Its name.
        host: String,
        /// Why, as far as it is known.
        reason: String,
    },
    /// A process could not be started.
    SpawnFailed {
        /// Which.
        process: Process,
        /// What the system said.
        reason: String,
    },
    /// It waits for a place.
    Ready {
        /// Which.
        process: Process,
    },
    /// It reads its data, which may take long, and is not ready yet.
    Reading {
        /// Which.
        process: Process,
    },
    /// It is not of this run: its data or its numbers are others, or it cannot read them.
    Unfit {
        /// Which.
        process: Process,
        /// A sentence that names it and both values.
        reason: String,
    },
    /// It ended.
    Exited {
        /// Which.
        process: Process,
        /// Signal or exit code, as a sentence.
        how: String,
        /// With an exit code of its own: nobody has killed it.
        #[serde(default)]
        by_itself: bool,
    },
    /// It gives no sign of life.
    Silent {
        /// Which.
        process: Process,
        /// Milliseconds since the last sign.
        age_ms: u64,
        /// The system shows it as stopped.
        stopped: bool,
    },
    /// Its world is over for it.
    Interrupted {
        /// Which.
        process: Process,
        /// Of which world.
        generation: u64,
        /// What it holds.
        held: Held,
        /// Why.
        cause: Cause,
    },
    /// Its links are up.
    Connected {
        /// Which.
        process: Process,
        /// Of which world.
        generation: u64,
    },
    /// It has its state.
    Loaded {
        /// Which.
        process: Process,
        /// Of which world.
        generation: u64,
        /// The last committed step in it.
        step: u64,
    },
    /// A step was committed.
    Step {
        /// The step.
        step: u64,
    },
    /// Work goes on between two steps: instructions run, a validation or a checkpoint ended.
    Working,
    /// All ranks of the world wait in exchanges, and have seen for so long, all at one time, that not a byte came or went.
    Still {
        /// Milliseconds.
        ms: u64,
    },
    /// A checkpoint exists.
    Checkpoint {
        /// The last committed step in it.
        step: u64,
        /// Its folder.
        path: PathBuf,
    },
    /// The checkpoints that are there, after [`crate::Action::Survey`]: each with its last step and its folder, ascending. The last one
    /// was read whole and is good. Those that the policy knows and that are not among them are gone or damaged.
    Found {
        /// Steps and folders.
        saved: Vec<(u64, PathBuf)>,
    },
    /// Who holds the others up, after [`crate::Action::Dump`].
    Verdict {
        /// The culprits, by rank; empty: nobody can be named.
        ranks: Vec<u32>,
        /// A sentence.
        reason: String,
        /// Milliseconds for which nothing has moved at any rank; 0: something does, or not all have answered.
        #[serde(default)]
        still_ms: u64,
    },
    /// Spares have computed the gradients of a step again, of all ranks, and all were alike.
    Checked {
        /// The step.
        step: u64,
    },
    /// They have, twice, and those of these members were otherwise.
    Disputed {
        /// The step.
        step: u64,
        /// Who is alone with what it made.
        processes: Vec<Process>,
        /// A sentence.
        detail: String,
    },
    /// A spare has computed what nobody else came to.
    Erred {
        /// Which.
        process: Process,
        /// A sentence.
        detail: String,
    },
    /// A rank came to the end of the run.
    Done {
        /// Which.
        process: Process,
    },
    /// It cannot go on, and says why.
    Failed {
        /// Which.
        process: Process,
        /// Exit code that fits.
        code: i32,
        /// Its words.
        reason: String,
        /// All ranks have come to the same, and another world would come to it again.
        alike: bool,
    },
    /// A person asks for a stop, with a checkpoint.
    Stop,
    /// A person changes the run: these settings hold from the next world on, those of the recipe from the next step on.
    Reload {
        /// Each `key=value`.
        #[serde(default)]
        sets: Vec<String>,
    },
    /// What was to be written down ([`crate::Action::Intervene`]) is, for good.
    Recorded {
        /// Or why it is not; nothing is left of it then.
        refused: Option<String>,
    },
    /// Processes started from now on are of another program: those of before are replaced, one by one.
    Replace,
    /// Time passes.
    Tick,
}

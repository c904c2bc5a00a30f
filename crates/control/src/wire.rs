//! What an agent and a rank process say to each other: JSON lines on the rank's standard input and output.
//!
//! A rank process outlives worlds. It gets an [`Assignment`], joins that world's fabric, fetches its state and steps until the
//! world ends: because all is done, or because a peer died, an exchange failed or the agent said [`ToRank::Abort`]. Then it says
//! what it holds ([`FromRank::Interrupted`]), keeps it, and waits for the next assignment, of a higher generation.

use std::path::PathBuf;

use events::Event;
use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// The hidden command under which the binary is a rank.
pub const RANK_COMMAND: &str = "__rank";

/// From the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToRank {
    /// First: what every assignment of this run shares. The agent does not read `job`.
    Hello {
        /// Process id of the agent: a rank dies with it.
        parent: u32,
        /// Milliseconds between two [`FromRank::Beat`]s.
        beat_ms: u64,
        /// The training job, as `train` wrote it.
        job: serde_json::Value,
    },
    /// A place in a world.
    Assign(Box<Assignment>),
    /// TCP: where every rank of the world listens, by rank.
    Addresses {
        /// Of which world.
        generation: u64,
        /// Socket addresses.
        addresses: Vec<String>,
    },
    /// The world of this generation is over: leave the exchange under way and say what you hold.
    Abort {
        /// Of which world; others are not touched.
        generation: u64,
        /// For the person.
        reason: String,
    },
    /// Say where you stand in your exchanges ([`FromRank::Flight`]), now, without disturbing them.
    Dump,
    /// Stop after the step under way, with a checkpoint.
    Stop,
    /// A spare: connect to nothing, keep the data open, wait.
    Wait,
}

/// A place in a world.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// Ascends with every world; messages of another one are refused.
    pub generation: u64,
    /// The rank in this world.
    pub rank: u32,
    /// Ranks of this world.
    pub world: u32,
    /// The resolved run file of this world: the grid never changes, the layout may.
    pub run_toml: String,
    /// How to reach the others.
    pub fabric: FabricSpec,
    /// Cores to hold on to; empty: the system places the rank.
    pub cores: Vec<usize>,
    /// Where the state is.
    pub origin: Origin,
    /// Deliberate faults still to come, of this rank.
    pub faults: Vec<Fault>,
}

/// Where the state of a world comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Origin {
    /// Initial weights, or the folder that the run names.
    Fresh,
    /// A checkpoint on disk; verified while it is read.
    Disk(PathBuf),
    /// The processes that are left of an earlier world.
    Peers {
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

/// The decision of a vote, bit for bit as its ranks derived it. The agent does not read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decided {
    /// The step that it commits.
    pub step: u64,
    /// As `train` wrote it.
    pub decision: serde_json::Value,
}

/// How a rank process joins the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricSpec {
    /// Shared memory behind this path.
    Shm(PathBuf),
    /// Sockets; only who has the token is let in.
    Tcp {
        /// Random, made by who forms the world.
        token: [u8; 32],
        /// The address to listen on.
        bind: std::net::IpAddr,
    },
}

/// From a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromRank {
    /// A spare, or a rank between two worlds: ready for an assignment.
    Ready,
    /// TCP: where this rank listens.
    Listening {
        /// For which world.
        generation: u64,
        /// Socket address.
        address: String,
    },
    /// All links of the world are up.
    Connected {
        /// Of which world.
        generation: u64,
    },
    /// The state is here and verified; the next step begins.
    Loaded {
        /// Of which world.
        generation: u64,
        /// The last committed step in it.
        step: u64,
        /// Bytes that came from peers or disk.
        bytes: u64,
        /// Seconds that this took.
        seconds: f64,
    },
    /// Three signals that are never merged: that this line comes is the heartbeat.
    Beat {
        /// Progress: the last committed step.
        step: u64,
        /// Work evidence: instructions run since the process began.
        work: u64,
    },
    /// Something happened.
    Event(Event),
    /// This world is over for this rank.
    Interrupted {
        /// Which world.
        generation: u64,
        /// What is held.
        held: Held,
        /// Why.
        cause: Cause,
    },
    /// Answer to [`ToRank::Dump`]: the last exchanges, as `fabric` wrote them.
    Flight(serde_json::Value),
    /// The end of the rank, as `train` wrote it.
    Done(serde_json::Value),
    /// The end of the rank, with its exit code.
    Failed {
        /// Exit code that fits.
        code: i32,
        /// Why.
        reason: String,
    },
}

/// What a rank holds after an interruption.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// The last step whose update is whole here; none: no state yet.
    pub step: Option<u64>,
    /// Gradients of the next step are complete here and where they are mirrored: with the decision it can be applied.
    pub prepared: bool,
    /// The decision of the last vote that this rank saw. It is never one behind: a rank that saw a vote has applied it,
    /// so its step is `step`; a rank whose `step` is one less and which is `prepared` rolls forward with it.
    pub decided: Option<Decided>,
    /// Pieces of the own state that failed their hash; empty: all is well.
    pub corrupt: Vec<String>,
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

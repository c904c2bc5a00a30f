//! What an agent and a rank process say to each other: JSON lines on the rank's standard input and output.
//!
//! A rank process outlives worlds. It gets an [`Assignment`], joins that world's fabric, fetches its state and steps until the
//! world ends: because all is done, or because a peer died, an exchange failed or the agent said [`ToRank::Abort`]. Then it says
//! what it holds ([`FromRank::Interrupted`]), keeps it, and waits for the next assignment, of a higher generation.

use std::path::PathBuf;

use events::{Event, Step};
pub use policy::{Cause, Decided, Held, Origin, Piece};
use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::identity::Identity;

/// The hidden command under which the binary is a rank.
pub const RANK_COMMAND: &str = "__rank";

/// The hidden command under which the binary says what it is ([`About`]), as one line of JSON.
pub const ABOUT_COMMAND: &str = "__about";

/// Changes whenever these messages, or the job in [`ToRank::Hello`], do: binaries of one number understand each other.
pub const PROTOCOL: u32 = 4;

/// What a binary says of itself before a run is handed over to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its version, for the person.
    pub version: String,
    /// [`PROTOCOL`] of it.
    pub protocol: u32,
    /// Equal numbers: equal bits.
    pub numerics_version: u32,
}

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
    /// Open the data, say what you are, and wait for a place: connect to nothing.
    Wait,
    /// A spare: compute a step's gradients again, until there is something else to do.
    Check(Box<CheckOrder>),
}

/// What a spare is to compute again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckOrder {
    /// The step.
    pub step: u64,
    /// The checkpoint of the step before it.
    pub from: PathBuf,
    /// The resolved run file of the world that made the step.
    pub run_toml: String,
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
    /// The first steps, as many as lie between two checks (`guard.recompute_every`, at least one), are checked by other ranks.
    #[serde(default)]
    pub recheck: bool,
    /// Where steps are checked: the last one that was; what checkpoints say of themselves counts from it on.
    #[serde(default)]
    pub checked: Option<u64>,
    /// The first step that nobody can check any more: checks of later ones say nothing of it.
    #[serde(default)]
    pub unseen: Option<u64>,
}

/// How a rank process joins the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricSpec {
    /// Shared memory behind this path.
    Shm(PathBuf),
    /// Sockets; only who has the token is let in.
    Tcp {
        /// Random, or made of the secret of agents and controller; never sent from one host to another.
        token: [u8; 32],
        /// The address to listen on.
        bind: std::net::IpAddr,
    },
    /// The same on the way to an agent of another host, which makes the token of the secret that it shares with the controller.
    Keyed {
        /// What the token is for.
        purpose: String,
        /// The address to listen on.
        bind: std::net::IpAddr,
    },
}

/// From a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromRank {
    /// Ready for an assignment: it has opened its data, and says what it is.
    Ready {
        /// What the controller compares with the run's.
        identity: Identity,
    },
    /// It is no process of this run, and says why: such as data that cannot be read where it is.
    Unfit {
        /// Why.
        reason: String,
    },
    /// It is still reading its data, and will be ready later.
    Reading,
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
        /// Milliseconds for which it has looked for what it waits for, and not a byte came or went; 0: it moves.
        #[serde(default)]
        still_ms: u64,
    },
    /// Something happened.
    Event(Event),
    /// What this rank made of the leaves of a step that was committed: (leaf, hash of its gradients).
    Leaves {
        /// In which world.
        generation: u64,
        /// The step.
        step: u64,
        /// Named as in every layout with these axes.
        leaves: Vec<(u64, u64)>,
    },
    /// What a spare made of a step ([`ToRank::Check`]).
    Checked {
        /// The step.
        step: u64,
        /// As in [`FromRank::Leaves`]; of all ranks.
        leaves: Vec<(u64, u64)>,
        /// Seconds that it took.
        seconds: f64,
        /// Why nothing came of it.
        problem: Option<String>,
    },
    /// A step that the ranks of this world have decided, and of which nobody may have told: the world is over for this rank.
    Carried {
        /// Which world.
        generation: u64,
        /// The step.
        step: Step,
    },
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
        /// All ranks have come to the same, and another world would come to it again.
        alike: bool,
    },
}

//! Agents of other hosts: what travels between them and their controller, by TCP.
//!
//! ```text
//!  frame.rs      bytes on the link: sealed frames of limited size
//!  handshake.rs  who has the token, on both sides; the keys of the link
//!  window.rs     what was said and not yet acknowledged is kept, in order
//!  server.rs     the controller's side: [`Remote`] is an [`crate::agent::Agents`]
//!  host.rs       what the controller's side knows of a host
//!  client.rs     the agent's side
//!  dial.rs       its link: calls, and calls again
//!  refused.rs    how long it asks again where it is refused
//! ```
//!
//! The link is authenticated, each frame of it, and not encrypted: who reads the network reads the run's words, and cannot say any.

pub mod client;
mod dial;
pub mod frame;
pub mod handshake;
mod host;
mod refused;
pub mod server;
#[cfg(test)]
mod tests;
pub mod window;

use std::net::IpAddr;

use policy::Process;
use serde::{Deserialize, Serialize};

use crate::agent::Heard;
use crate::wire::ToRank;

/// Version of everything that travels between agent and controller.
pub const VERSION: u32 = 3;
/// Bytes of one word at most.
pub const WORD_MAX: usize = 16 << 20;
/// A host's name is at most so long.
const NAME_MAX: usize = 128;
/// Words that may wait for a link that takes none.
const WAITING_MAX: usize = 4096;

/// Whether a host may be called so: letters, digits, `.`, `-` and `_`.
///
/// # Errors
/// That it may not; the remedy.
pub fn host_name(name: &str) -> Result<(), String> {
    let good = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(&c);
    let named = name.chars().any(|c| c.is_ascii_alphanumeric());
    if named && name.len() <= NAME_MAX && name.chars().all(good) {
        return Ok(());
    }
    Err(format!("{name:?} is no host's name: 1 to {NAME_MAX} letters, digits, `.`, `-` or `_`; give another --host"))
}

/// The agent's first word after the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Here {
    /// Name of the host.
    pub host: String,
    /// This agent's life: another number means other processes.
    pub session: u64,
    /// Most rank processes.
    pub slots: usize,
    /// Where ranks of this host can be reached.
    pub address: IpAddr,
    /// Orders that were carried out, by epoch and number.
    pub done: (u64, u64),
    /// Processes that it ever started.
    pub started: Vec<Process>,
    /// Those of them that run.
    pub running: Vec<Process>,
}

/// From an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "word")]
pub enum FromAgent {
    /// First.
    Here(Here),
    /// What a process said or what became of it; kept until acknowledged.
    News {
        /// Ascends by one from 1 in a session.
        seq: u64,
        /// Of which process.
        process: Process,
        /// What.
        heard: Heard,
    },
    /// The same of what is stale a moment later, and not kept.
    Passing {
        /// Of which process.
        process: Process,
        /// What.
        heard: Heard,
    },
    /// The agent lives; orders up to this one were carried out.
    Beat {
        /// Number of the order.
        done: u64,
    },
}

/// From the controller.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "word")]
pub enum ToAgent {
    /// The agent is let in.
    Welcome {
        /// News up to this one are written down.
        heard: u64,
        /// Milliseconds between two signs of life, each way.
        beat_ms: u64,
        /// A side that was silent for so long is called again, or given up.
        silence_ms: u64,
    },
    /// It is not.
    Refused {
        /// Why.
        reason: String,
        /// After so long a host that is gone is known to be: who takes its place may be refused until then.
        #[serde(default)]
        silence_ms: u64,
    },
    /// Kept until carried out.
    Order {
        /// Ascends by one from 1 in an epoch.
        seq: u64,
        /// What to do.
        order: Order,
    },
    /// News up to this one are written down; also the controller's sign of life.
    Heard {
        /// Number of the news.
        seq: u64,
    },
    /// The run is over: end.
    End {
        /// Exit code of the run.
        code: i32,
        /// Why.
        reason: String,
    },
}

/// What an agent does for a controller. Each can come twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Start a process.
    Spawn {
        /// Its number.
        process: Process,
        /// Milliseconds between its beats.
        beat_ms: u64,
        /// What `train` wrote for it.
        job: serde_json::Value,
    },
    /// Tell a process.
    Say {
        /// Which.
        process: Process,
        /// What.
        said: ToRank,
    },
    /// End a process at once.
    Kill {
        /// Which.
        process: Process,
    },
    /// Stand it still: a drill.
    Stop {
        /// Which.
        process: Process,
    },
    /// End it as somebody else would: a drill.
    Strike {
        /// Which.
        process: Process,
    },
}

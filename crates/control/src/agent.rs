//! Agents: who starts rank processes on a host, relays their words, and notices their ends.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::Receiver;

use fabric::FabricOptions;
use policy::Process;
use serde::{Deserialize, Serialize};

use crate::wire::{FabricSpec, FromRank, ToRank};

/// What an agent heard of a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Heard {
    /// Its own words.
    Said(FromRank),
    /// A line that is none, such as the message of a panic.
    Line(String),
    /// The system shows it as stopped, for so many milliseconds.
    Stopped(u64),
    /// It could not be started.
    NotStarted(String),
    /// It ended: signal or exit code, as a sentence.
    Exited {
        /// As a sentence.
        how: String,
        /// With an exit code of its own: nobody has killed it.
        #[serde(default)]
        by_itself: bool,
    },
}

/// What comes from agents.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// A host is there.
    Joined {
        /// Its name.
        host: String,
        /// Most processes.
        slots: usize,
    },
    /// The agent of a host is gone, and its processes with it.
    Lost {
        /// Its name.
        host: String,
        /// Why, as far as it is known.
        reason: String,
    },
    /// Of a process.
    Process(Process, Heard),
    /// After [`News::Joined`], where an agent outlives controllers: what it runs, if another controller may have ordered it.
    Present {
        /// Its host.
        host: String,
        /// Processes that it ever started.
        started: Vec<Process>,
        /// Those of them that run.
        running: Vec<Process>,
    },
    /// Everything up to here came before: once it is written down the agent may forget it.
    Mark {
        /// Its host.
        host: String,
        /// Which life of the agent.
        session: u64,
        /// Number of the news.
        seq: u64,
    },
    /// A line for the person, such as who was turned away.
    Notice(String),
}

/// All agents of a run, however they are reached. Nothing here waits for a rank.
pub trait Agents {
    /// What they say.
    fn news(&self) -> &Receiver<News>;

    /// From now on at most so many processes at once, where it is the controller's to say.
    fn slots(&mut self, _slots: usize) {}

    /// What came before a [`News::Mark`] is written down.
    fn written(&mut self, _host: &str, _seq: u64) {}

    /// True while hosts cannot be heard for a reason that is most likely on this side (it is cut off, or has just come): silence
    /// says nothing of a rank then.
    fn deaf(&self) -> bool {
        false
    }

    /// The run is over.
    fn end(&mut self, _code: i32, _reason: &str) {}

    /// The program that processes are started from, where this side may change it.
    fn program(&mut self) -> Option<&mut PathBuf> {
        None
    }

    /// Starts a process and says hello; what becomes of it comes as news.
    fn spawn(&mut self, host: &str, process: Process, beat_ms: u64, job: &serde_json::Value);

    /// Says something to a process; one that is gone hears nothing.
    fn say(&mut self, process: Process, word: &ToRank);

    /// Ends a process at once, also one that stands still.
    fn kill(&mut self, process: Process);

    /// Stands a process still: a drill.
    fn stop(&mut self, process: Process);

    /// Ends a process as somebody else would: its end comes as news. A drill.
    fn strike(&mut self, process: Process);

    /// How the ranks of a new world reach each other, one [`FabricSpec`] for each of `processes`.
    ///
    /// # Errors
    /// What the system refuses.
    fn fabric(
        &mut self,
        processes: &[Process],
        shared_memory: bool,
        options: &FabricOptions,
    ) -> io::Result<Vec<FabricSpec>>;
}

/// 32 random bytes from the system.
///
/// # Errors
/// If it has none.
pub fn token() -> io::Result<[u8; 32]> {
    let mut token = [0; 32];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut token)?;
    Ok(token)
}

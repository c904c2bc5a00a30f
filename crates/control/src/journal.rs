//! What a controller went through, on disk: another one goes on from it.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use policy::{Decision, Input, Process};
use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// A line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "entry")]
pub enum Entry {
    /// A controller begins with nothing: what is before this line is of an earlier start of the run.
    Begin {
        /// The resolved run file.
        run_toml: String,
        /// Faults to come.
        faults: Vec<Fault>,
    },
    /// What the policy was told.
    Input {
        /// When, milliseconds since the start.
        at: u64,
        /// What.
        #[serde(flatten)]
        input: Input,
    },
    /// What it answered.
    Decision {
        /// When.
        at: u64,
        /// What, and why.
        #[serde(flatten)]
        decision: Decision,
    },
    /// TCP: where a rank of a world listens.
    Listening {
        /// Whose.
        process: Process,
        /// In which world.
        generation: u64,
        /// Where.
        address: String,
    },
    /// A fault struck: it will not again.
    Fired {
        /// Which.
        fault: Fault,
        /// When.
        at: u64,
    },
}

/// The journal, open.
pub struct Journal {
    file: File,
    broken: Option<String>,
}

impl Journal {
    /// Appends to the journal at `path`, which is made if it is not there.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { file, broken: None })
    }

    /// Adds a line; once it fails the reason is kept for [`Journal::broken`] and the run goes on.
    pub fn write(&mut self, entry: &Entry) {
        let line = serde_json::to_string(entry).expect("entries are plain data") + "\n";
        if let Err(e) = self.file.write_all(line.as_bytes()) {
            self.broken.get_or_insert(e.to_string());
        }
    }

    /// Why lines are missing, if they are; told once.
    pub fn broken(&mut self) -> Option<String> {
        self.broken.take()
    }

    /// The entries since the last beginning. A line cut short by a death is left out, and everything behind it.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for line in BufReader::new(File::open(path)?).lines() {
            let Ok(entry) = serde_json::from_str::<Entry>(&line?) else { break };
            if matches!(entry, Entry::Begin { .. }) {
                entries.clear();
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

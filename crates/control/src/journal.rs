//! What a controller went through, on disk: another one goes on from it.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

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
        /// The checkpoint that the run went on from, and its step.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<(u64, PathBuf)>,
        /// Milliseconds since 1970.
        #[serde(default)]
        unix_ms: u64,
        /// Hosts that were waited for; 0: ranks are children of the controller.
        #[serde(default)]
        hosts: usize,
    },
    /// What an agent said up to here stands above.
    Mark {
        /// Its host.
        host: String,
        /// Which life of the agent.
        session: u64,
        /// Number of the news.
        seq: u64,
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
    /// A fault strikes nobody: its rank was gone when it was due.
    Missed {
        /// Which.
        fault: Fault,
    },
    /// A fault struck: it will not again, if it is not of the kind that does.
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
    path: PathBuf,
    broken: Option<String>,
}

impl Journal {
    /// Appends to the journal at `path`, which is made if it is not there.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().create(true).append(true).read(true).open(path)?;
        // A line cut short by a death was not acted on.
        let text = std::fs::read(path)?;
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        if whole < text.len() {
            file.set_len(whole as u64)?;
        }
        Ok(Self { file, path: path.into(), broken: None })
    }

    /// Adds a line; once it fails the reason is kept for [`Journal::broken`] and the run goes on.
    pub fn write(&mut self, entry: &Entry) {
        let line = serde_json::to_string(entry).expect("entries are plain data") + "\n";
        // Without its name a controller that comes after this one would not find it.
        let restored =
            events::restore(&self.file, &self.path).map(|again| again.into_iter().for_each(|file| self.file = file));
        if let Err(e) = restored.and_then(|()| self.file.write_all(line.as_bytes())) {
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

/// Milliseconds since a run began at `begin_ms` (since 1970), for a controller that goes on with it at `now_ms`. The wall clock may
/// have jumped between: what the journal has seen is not in the future, and all later times are taken from this one by a clock
/// that does not jump.
pub fn since_begin(entries: &[Entry], begin_ms: u64, now_ms: u64) -> u64 {
    let seen = entries.iter().filter_map(|entry| match entry {
        Entry::Input { at, .. } | Entry::Decision { at, .. } | Entry::Fired { at, .. } => Some(*at),
        _ => None,
    });
    now_ms.saturating_sub(begin_ms).max(seen.max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_back_does_not_turn_time_around() {
        let at = |at| Entry::Input { at, input: Input::Step { step: 1 } };
        let entries = [at(10), at(5_000), at(4_000)];
        assert_eq!(since_begin(&entries, 1_000_000, 1_007_000), 7_000);
        // Set back by an hour, to before the beginning; to between.
        assert_eq!(since_begin(&entries, 1_000_000, 0), 5_000);
        assert_eq!(since_begin(&entries, 1_000_000, 1_002_000), 5_000);
        assert_eq!(since_begin(&[], 1_000_000, 0), 0);
    }
}

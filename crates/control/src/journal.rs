//! What a controller went through, on disk: another one goes on from it.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use events::regular;
use policy::{Decision, Input, Process, Unchecked};
use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::identity::Identity;

/// (leaf, hash of its gradients), as `train` names them.
pub type Leaves = Vec<(u64, u64)>;

/// A journal that could not be written is tried again so often.
const AGAIN: Duration = Duration::from_millis(500);

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
        /// That nobody has checked the last steps before that checkpoint.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unchecked: Option<Unchecked>,
        /// Milliseconds since 1970.
        #[serde(default)]
        unix_ms: u64,
        /// Hosts that were waited for; 0: ranks are children of the controller.
        #[serde(default)]
        hosts: usize,
        /// What every process of the run is; none: the run was begun before anybody asked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        identity: Option<Identity>,
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
    /// What a rank made of the leaves of a step, which spares can check.
    Claimed {
        /// Who.
        process: Process,
        /// The step.
        step: u64,
        /// By leaf.
        leaves: Leaves,
    },
    /// A spare is to check a step.
    Checking {
        /// Who.
        spare: Process,
        /// The step.
        step: u64,
        /// What a check before came to, and whose it was, if it was not what the ranks said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        first: Option<(Process, Leaves)>,
    },
    /// Nothing more comes of the check of a step.
    CheckOver {
        /// The step.
        step: u64,
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

/// The journal, open. Lines that cannot be written are kept and tried again, in order, so that what is on disk has no holes; a
/// controller that goes on in the same process gets them with it.
pub struct Journal {
    file: File,
    path: PathBuf,
    /// Bytes of whole lines on disk.
    len: u64,
    /// Whole lines that are not there yet.
    kept: Vec<u8>,
    /// When they were tried last.
    tried: Option<Instant>,
    news: Option<String>,
}

impl Journal {
    /// Appends to the journal at `path`, which is made if it is not there.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = regular::open(File::options().create(true).append(true).read(true), path)?;
        // A line cut short by a death was not acted on.
        let text = std::fs::read(path)?;
        let len = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        if len < text.len() {
            file.set_len(len as u64)?;
        }
        Ok(Self { file, path: path.into(), len: len as u64, kept: Vec::new(), tried: None, news: None })
    }

    /// Adds a line. Where that fails the reason is kept for [`Journal::news`], the line is tried again later, and the run goes on.
    pub fn write(&mut self, entry: &Entry) {
        let line = serde_json::to_string(entry).expect("entries are plain data") + "\n";
        self.kept.extend(line.as_bytes());
        if self.tried.is_none_or(|tried| tried.elapsed() >= AGAIN) {
            self.flush();
        }
    }

    /// Writes what was kept, at the end of the run: nobody tries again.
    pub fn close(&mut self) {
        if self.kept.is_empty() {
            return;
        }
        self.flush();
        let lines = self.kept.iter().filter(|byte| **byte == b'\n').count();
        if lines > 0 {
            self.news = Some(format!(
                "the last {lines} lines of the journal {} are NOT on disk, which refuses them to the end; checkpoints are not concerned",
                self.path.display()
            ));
        }
    }

    fn flush(&mut self) {
        match self.append() {
            Ok(()) => {
                self.len += self.kept.len() as u64;
                self.kept.clear();
                if self.tried.take().is_some() {
                    self.news = Some("the journal is written again, nothing is missing in it".into());
                }
            }
            Err(e) => {
                // No part of a line stays: what comes later would hang on it.
                let _ = self.file.set_len(self.len);
                if self.tried.replace(Instant::now()).is_none() {
                    let text = format!(
                        "the journal cannot be written ({e}); the run goes on and tries again, a controller that dies before that cannot be rebuilt"
                    );
                    self.news = Some(text);
                }
            }
        }
    }

    fn append(&mut self) -> io::Result<()> {
        // Without its name a controller that comes after this one would not find it.
        if let Some(again) = events::restore(&self.file, &self.path)? {
            self.file = again;
        }
        self.file.write_all(&self.kept)
    }

    /// What the person should know of it, told once.
    pub fn news(&mut self) -> Option<String> {
        self.news.take()
    }

    /// The entries since the last beginning, with those that are not on disk.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut text = vec![0; usize::try_from(self.len).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut text, 0)?;
        text.extend(&self.kept);
        Ok(entries(&text))
    }

    /// The entries since the last beginning. A line cut short by a death is left out, and everything behind it.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Vec<Entry>> {
        Ok(entries(&regular::read(path)?))
    }
}

fn entries(text: &[u8]) -> Vec<Entry> {
    let mut entries = Vec::new();
    for line in text.split(|byte| *byte == b'\n') {
        let Ok(entry) = serde_json::from_slice::<Entry>(line) else { break };
        if matches!(entry, Entry::Begin { .. }) {
            entries.clear();
        }
        entries.push(entry);
    }
    entries
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
    fn what_cannot_be_written_is_kept_and_leaves_no_hole() {
        let folder = std::env::temp_dir().join(format!("lockstep-journal-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("journal.jsonl");
        let step = |step| Entry::Input { at: step, input: Input::Step { step } };
        let mut journal = Journal::open(&path).unwrap();
        journal.write(&step(1));
        let writable = std::mem::replace(&mut journal.file, File::open(&path).unwrap());
        (2..4).for_each(|n| journal.write(&step(n)));
        assert!(journal.news().unwrap().contains("cannot be written") && journal.news().is_none());
        assert_eq!(Journal::read(&path).unwrap(), [step(1)]);
        assert_eq!(journal.entries().unwrap(), [step(1), step(2), step(3)]);
        // Half a line, as a disk that is full takes it.
        (&writable).write_all(b"{\"entry\":\"inp").unwrap();
        writable.set_len(journal.len).unwrap();
        (journal.file, journal.tried) = (writable, Instant::now().checked_sub(AGAIN));
        journal.write(&step(4));
        assert!(journal.news().unwrap().contains("nothing is missing"));
        let all: Vec<_> = (1..5).map(step).collect();
        assert_eq!((Journal::read(&path).unwrap(), journal.entries().unwrap()), (all.clone(), all));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn at_the_end_what_was_kept_is_written_or_it_is_said_that_it_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let step = |step| Entry::Input { at: step, input: Input::Step { step } };
        let mut journal = Journal::open(&path).unwrap();
        journal.write(&step(1));
        let writable = std::mem::replace(&mut journal.file, File::open(&path).unwrap());
        (2..4).for_each(|n| journal.write(&step(n)));
        drop(journal.news());
        journal.close();
        let news = journal.news().unwrap();
        assert!(news.contains("the last 2 lines") && news.contains("NOT on disk"), "{news}");
        // The disk takes lines again, a moment after it refused one: nobody waits for the next try.
        journal.file = writable;
        journal.close();
        assert!(journal.news().unwrap().contains("nothing is missing"));
        assert_eq!(Journal::read(&path).unwrap(), [1, 2, 3].map(step));
        journal.close();
        assert_eq!(journal.news(), None);
    }

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

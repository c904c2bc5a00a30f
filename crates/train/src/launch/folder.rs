//! The run's folder: what is in it, whose it is, what is written to it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use control::journal::{Entry, Journal};
use events::{Event, regular};
use kernels::NUMERICS_VERSION;
use spec::Run;

use super::Summary;
use super::record::INTERVENTIONS;
use crate::best::Best;
use crate::error::{NOT_SAVED, TrainError, UNUSABLE};
use crate::rank::Ended;

/// A run's folder.
pub struct RunFolder {
    path: PathBuf,
}

/// Name of the file that keeps others out.
pub(super) const LOCK: &str = "run.lock";

/// While it lives no other run may use the folder.
pub struct Lock(#[expect(dead_code, reason = "held for its lock")] File);

/// `events.jsonl`, open.
pub struct EventLog {
    file: File,
    // Bytes of whole lines.
    len: u64,
    began: Instant,
    broken: bool,
    path: PathBuf,
    // What else is given its name again if the folder is removed.
    others: Vec<(File, PathBuf)>,
    // The lock of the folder that was made again.
    lock: Option<Lock>,
}

/// What a run's folder has from its start on, beside its events.
const OTHERS: [&str; 3] = [LOCK, "run.toml", INTERVENTIONS];

/// What is opened in a run's folder.
const FILES: [&str; 16] = [
    LOCK,
    INTERVENTIONS,
    "run.toml",
    "run.toml.new",
    "events.jsonl",
    "journal.jsonl",
    "controller.lease",
    "summary.json",
    "reload.request",
    "reload.answer",
    "checkpoints/timeline",
    "checkpoints/timeline.tmp",
    "checkpoints/held.json",
    "checkpoints/held.json.tmp",
    "checkpoints/best.json.tmp",
    "trace/trace.json",
];

/// Folders in a run's folder.
const FOLDERS: [&str; 3] = ["checkpoints", "trace", "flight"];

impl EventLog {
    fn open(path: &Path) -> io::Result<Self> {
        let mut file = regular::open(File::options().read(true).append(true), path)?;
        let mut len = file.metadata()?.len();
        let mut last = [b'\n'];
        if len > 0 {
            file.read_exact_at(&mut last, len - 1)?;
        }
        if last != *b"\n" {
            // A death in the middle of a line: the next one begins on its own.
            file.write_all(b"\n")?;
            len += 1;
        }
        let beside = |name| {
            let path = path.with_file_name(name);
            regular::open(File::options().read(true), &path).ok().map(|file| (file, path))
        };
        let others = OTHERS.into_iter().filter_map(beside).collect();
        Ok(Self { file, len, began: Instant::now(), broken: false, path: path.into(), others, lock: None })
    }

    /// Seconds count from `began` on, as those of recoveries do.
    pub fn count_from(&mut self, began: Instant) {
        self.began = began;
    }

    /// Appends an event. A full disk must not stop a run: it is said once; a line is written whole or not at all. A folder
    /// that was removed is made again; returns what the person should know of that.
    pub fn write(&mut self, event: &Event) -> Option<Event> {
        let notice = self.restore().map(|text| Event::Notice { text });
        notice.iter().chain([event]).for_each(|event| self.append(event));
        notice
    }

    fn restore(&mut self) -> Option<String> {
        // Where that is not possible the next words say so: they find no file.
        let file = events::restore(&self.file, &self.path).ok()??;
        self.file = file;
        for (file, path) in &mut self.others {
            if let Ok(Some(again)) = events::restore(file, path) {
                *file = again;
            }
        }
        let folder = self.path.parent().unwrap_or(Path::new("."));
        self.lock = RunFolder::new(folder).lock().ok();
        let text = format!(
            "the run's folder {} was REMOVED while the run is at work; it is made again with run.toml, events.jsonl and the journal, and the run goes on. LOST is what else was in it: checkpoints written so far (copies in checkpoint.store stay), best.json, traces; until the next checkpoint is written the state is in memory alone",
            folder.display()
        );
        Some(text)
    }

    fn append(&mut self, event: &Event) {
        let line = event.to_line(self.began.elapsed().as_secs_f64()) + "\n";
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => self.len += line.len() as u64,
            Err(e) => {
                let _ = self.file.set_len(self.len);
                if !std::mem::replace(&mut self.broken, true) {
                    complain(&format!(
                        "events.jsonl cannot be written ({e}); the run goes on, lines are missing there"
                    ));
                }
            }
        }
    }
}

/// A line on standard error; that nobody listens is no reason to stop.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

impl RunFolder {
    /// The folder at `path`; nothing is read or written yet.
    pub fn new(path: &Path) -> Self {
        // Ranks are started from here, and may be told paths.
        Self { path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()) }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its checkpoints are.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Where its traces are.
    pub fn traces(&self) -> PathBuf {
        self.path.join("trace")
    }

    /// Writes the resolved run file.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn write_run(&self, run: &Run) -> Result<(), TrainError> {
        // Whole or not at all: a resume may be given it, and a full disk must not leave half of it.
        let (draft, at) = (self.path.join("run.toml.draft"), self.path.join("run.toml"));
        let written = fs::write(&draft, run.values.to_toml()).and_then(|()| fs::rename(&draft, &at));
        written.map_err(|e| {
            drop(fs::remove_file(&draft));
            self.io("cannot write", "run.toml")(e)
        })
    }

    /// Where its controller's journal is.
    pub fn journal(&self) -> PathBuf {
        self.path.join("journal.jsonl")
    }

    /// What its controllers wrote down.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn read_journal(&self) -> Result<Vec<Entry>, TrainError> {
        let path = self.journal();
        Journal::read(&path).map_err(|source| TrainError::Io { what: "cannot read", path, source })
    }

    /// Where the lease of its controller is.
    pub fn lease(&self) -> PathBuf {
        self.path.join("controller.lease")
    }

    /// What happened since the run was started last: seconds since then, and what.
    pub fn events_of_last_start(&self) -> Vec<(f64, Event)> {
        let text = regular::read_to_string(&self.path.join("events.jsonl")).unwrap_or_default();
        let mut events: Vec<(f64, Event)> = Vec::new();
        for (t, event) in text.lines().filter_map(|line| Event::timed(line).ok()) {
            // Another start counts from zero.
            if events.last().is_some_and(|(last, _)| t + 0.5 < *last) {
                events.clear();
            }
            events.push((t, event));
        }
        events
    }

    /// The log of a run that goes on.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn log(&self) -> Result<EventLog, TrainError> {
        EventLog::open(&self.path.join("events.jsonl")).map_err(self.io("cannot open", "events.jsonl"))
    }

    /// Keeps every other run out of the folder while the lock lives, however this process ends.
    ///
    /// # Errors
    /// If another run is in it.
    pub fn lock(&self) -> Result<Lock, TrainError> {
        fs::create_dir_all(&self.path).map_err(|e| {
            let path = self.path.display();
            TrainError::BadInput(format!("the run directory {path} cannot be made: {e}; choose another --run-dir"))
        })?;
        let file = regular::open(File::options().create(true).truncate(false).write(true), &self.path.join(LOCK))
            .map_err(self.io("cannot create", LOCK))?;
        self.hold(file)
    }

    /// The same where a run has been before; none: there was none, nothing is written.
    ///
    /// # Errors
    /// If another run is in it.
    pub fn lock_if_there(&self) -> Result<Option<Lock>, TrainError> {
        match regular::open(File::options().write(true), &self.path.join(LOCK)) {
            Ok(file) => self.hold(file).map(Some),
            Err(_) => Ok(None),
        }
    }

    fn hold(&self, file: File) -> Result<Lock, TrainError> {
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Lock(file)),
            Err(_) => Err(TrainError::BadInput(format!(
                "another run is at work in {}; wait for its end, or choose another --run-dir",
                self.path.display()
            ))),
        }
    }

    /// Where flight records are, a folder per hang.
    pub fn flights(&self) -> PathBuf {
        self.path.join("flight")
    }

    /// What the system refused before anything was started is for the person to mend: the folder and the remedy.
    pub fn unusable(&self, error: TrainError) -> TrainError {
        let TrainError::Io { what, path, source } = error else { return error };
        TrainError::BadInput(format!(
            "the run directory {} cannot be used: {what} {}: {source}; nothing was started: make room or writable what is there, or choose another --run-dir",
            self.path.display(),
            path.display()
        ))
    }

    /// Checks all files of the folder before any is opened: opening a pipe in the place of a file would block.
    ///
    /// # Errors
    /// What is no file where one must be, or no folder.
    pub fn check(&self) -> Result<(), TrainError> {
        let refused = |path: &Path, why: &dyn std::fmt::Display| {
            TrainError::BadInput(format!(
                "the run directory {} cannot be used: {}: {why}",
                self.path.display(),
                path.display()
            ))
        };
        for name in FILES {
            let path = self.path.join(name);
            regular::check(&path).map_err(|e| refused(&path, &e))?;
        }
        for name in FOLDERS {
            let path = self.path.join(name);
            if fs::metadata(&path).is_ok_and(|found| !found.is_dir()) {
                return Err(refused(&path, &"it is no folder, and must be one; move it away"));
            }
        }
        Ok(())
    }

    fn io(&self, what: &'static str, name: &str) -> impl FnOnce(std::io::Error) -> TrainError {
        let path = self.path.join(name);
        move |source| TrainError::Io { what, path, source }
    }

    /// What the run's validations up to step `done` were, by its own log: for checkpoints of older versions alone, which do not say
    /// it themselves.
    pub fn best_until(&self, done: u64) -> Best {
        let path = self.path.join("events.jsonl");
        let text = regular::read_to_string(&path).unwrap_or_default();
        let of = |line: &str| match Event::from_line(line) {
            Ok(Event::Validation { step, set: None, loss, .. }) => Some((step, loss)),
            _ => None,
        };
        Best::replay(text.lines().filter_map(of), done)
    }

    /// Creates the folder and its first files, sets the `damaged` steps aside, and says so.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn create(&self, run: &Run, damaged: &[u64]) -> Result<(EventLog, Vec<String>), TrainError> {
        fs::create_dir_all(self.checkpoints()).map_err(|e| {
            let path = self.path.display();
            TrainError::BadInput(format!("the run directory {path} cannot be made: {e}; choose another --run-dir"))
        })?;
        checkpoint::sweep(&self.checkpoints());
        let notes = self.set_aside(damaged)?;
        self.write_run(run)?;
        for name in [INTERVENTIONS, "events.jsonl"] {
            regular::open(File::options().create(true).append(true), &self.path.join(name))
                .map_err(self.io("cannot create", name))?;
        }
        Ok((self.log()?, notes))
    }

    /// Steps that the run is about to write again must be free; what was saved is kept under another name.
    fn set_aside(&self, damaged: &[u64]) -> Result<Vec<String>, TrainError> {
        let mut notes = Vec::new();
        for step in damaged {
            let to = checkpoint::store::set_aside(&checkpoint::step_dir(&self.checkpoints(), *step))?;
            notes.push(format!("the damaged checkpoint of step {step} is kept as {}", to.display()));
        }
        Ok(notes)
    }

    /// Adds to a death what there is to go on from.
    pub fn advise(&self, error: TrainError) -> TrainError {
        let spent = |code: i32| [policy::BUDGET_SPENT, policy::INTERNAL, NOT_SAVED, UNUSABLE].contains(&code);
        if !matches!(&error, TrainError::RankDied { .. })
            && !matches!(&error, TrainError::Rank { code, .. } if spent(*code))
        {
            return error;
        }
        let newest = checkpoint::newest(&self.checkpoints()).ok().and_then(|newest| newest.checkpoint);
        let advice = match newest {
            Some(found) => format!("--resume goes on after step {}", found.meta().step),
            None => {
                "there is no checkpoint to --resume from (checkpoint.every makes some on the way): --resume starts the run from its beginning".into()
            }
        };
        match error {
            TrainError::RankDied { rank, reason } => {
                TrainError::RankDied { rank, reason: format!("{reason}; {advice}") }
            }
            TrainError::Rank { code, reason } => TrainError::Rank { code, reason: format!("{reason}; {advice}") },
            other => other,
        }
    }

    /// What there is to go on from where `step` and all that follow it may be spoilt.
    pub fn before(&self, step: u64) -> String {
        let sound = checkpoint::newest_before(&self.checkpoints(), step).ok().and_then(|newest| newest.checkpoint);
        let spoilt = format!("checkpoints of step {step} and later ones may be spoilt");
        match sound {
            Some(sound) => {
                let sound = sound.meta().step;
                format!("{spoilt}: move them away before --resume, which then goes on after step {sound}")
            }
            None => format!("{spoilt}, and there is none from before: start the run again in another --run-dir"),
        }
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn write_summary(&self, run: &Run, summary: &Result<Summary, TrainError>) -> Result<(), TrainError> {
        let value = match summary {
            Ok(s) => serde_json::json!({
                "schema": events::SCHEMA,
                "ended": match s.ended { Ended::Finished => "finished".into(), Ended::Stopped(n) => format!("stopped after step {n}"), Ended::Exhausted(n) => format!("ended after step {n}: no better validation") },
                "layout": run.layout.to_string(),
                "digest": s.digest,
                "numerics_version": NUMERICS_VERSION,
                "loss": s.loss,
                "validation_bits_per_byte": s.bits_per_byte,
                "wall_s": s.wall,
                "time_s": s.time,
                "restarts": s.recoveries.len(),
                "recoveries": s.recoveries,
                "checked_by_spares": { "steps": s.checked_by_spares.0, "leaves": s.checked_by_spares.1 },
                "ranks": s.ranks,
            }),
            Err(TrainError::Stopped(text)) => {
                serde_json::json!({ "schema": events::SCHEMA, "ended": "stopped", "reason": text })
            }
            Err(e) => serde_json::json!({ "schema": events::SCHEMA, "ended": "failed", "reason": e.to_string() }),
        };
        let text = serde_json::to_string_pretty(&value).map_err(|e| TrainError::Internal(e.to_string()))? + "\n";
        regular::write(&self.path.join("summary.json"), text).map_err(self.io("cannot write", "summary.json"))
    }
}

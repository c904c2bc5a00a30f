//! What becomes of `--profile`: which steps, and a profile and a trace when all ranks have written theirs down.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use events::{Event, regular};
use observe::{Observed, RankRecord};
use program::{Mode, Program};
use serde::{Deserialize, Serialize};
use spec::Run;

use crate::error::TrainError;

/// Most instructions that a rank writes down.
const MARKS_MAX: usize = 4_000_000;

/// Which steps are profiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Steps left out at the start of the run.
    pub warmup: u64,
    /// Steps profiled, at most.
    pub steps: u64,
}

/// What a rank is told about profiling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profiling {
    /// The first profiled step.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// Where records and trace go.
    pub folder: PathBuf,
}

impl Profiling {
    /// Profiling of `run`, of which `done` steps are done, with records in `folder`.
    ///
    /// # Errors
    /// If no step is left to profile.
    pub fn new(window: Window, run: &Run, done: u64, folder: PathBuf) -> Result<Self, TrainError> {
        let Window { warmup, steps } = window;
        let first = done.saturating_add(warmup).saturating_add(1);
        if steps == 0 || first > run.train.steps {
            let to_come = run.train.steps.saturating_sub(done);
            return Err(TrainError::BadInput(format!(
                "--profile finds no step: --profile-warmup {warmup} of the {to_come} steps to come (train.steps = {}, {done} done) are left out, and --profile-steps is {steps}; lower --profile-warmup, or raise train.steps or --profile-steps",
                run.train.steps
            )));
        }
        Ok(Self { first, last: first.saturating_add(steps - 1).min(run.train.steps), folder })
    }

    /// Makes the folder.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn create(&self) -> Result<(), TrainError> {
        let path = self.folder.clone();
        fs::create_dir_all(&path).map_err(|source| TrainError::Io { what: "cannot make", path, source })
    }

    /// Where `rank` writes its record.
    pub fn path(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("spans-{rank}.json"))
    }
}

/// The parent's side: waits for all records.
pub(crate) struct Profiler<'a> {
    run: &'a Run,
    profiling: Profiling,
    programs: Vec<Program>,
    peak_gflops: f64,
    bandwidth_gb_s: f64,
    written: usize,
}

impl<'a> Profiler<'a> {
    /// For ranks that have `peak_gflops` and `bandwidth_gb_s` each. Steps that are too many to be written down are cut
    /// off the end; the sentence says so.
    pub fn new(run: &'a Run, mut profiling: Profiling, peak_gflops: f64, bandwidth_gb_s: f64) -> (Self, String) {
        let programs = program::lower_all(run, Mode::Train);
        let longest = programs.iter().map(|p| p.instrs.len()).max().unwrap_or(0);
        let wanted = profiling.last - profiling.first + 1;
        let steps = wanted.min((MARKS_MAX / longest.max(1)).max(1) as u64);
        profiling.last = profiling.first + steps - 1;
        let mut text = format!("profile of steps {} to {}", profiling.first, profiling.last);
        if steps < wanted {
            text += &format!(": {wanted} were asked for, but at {longest} instructions a step no more are kept");
        }
        (Self { run, profiling, programs, peak_gflops, bandwidth_gb_s, written: 0 }, text)
    }

    /// What the ranks are told.
    pub fn profiling(&self) -> &Profiling {
        &self.profiling
    }

    /// What to tell after `event`: once, when the last rank's record is there.
    pub fn take(&mut self, event: &Event) -> Vec<Event> {
        if !matches!(event, Event::SpansRecorded { .. }) {
            return Vec::new();
        }
        self.written += 1;
        if self.written < self.programs.len() {
            return Vec::new();
        }
        // A profile is no reason to stop training.
        self.finish().unwrap_or_else(|e| vec![Event::Notice { text: format!("no profile: {e}") }])
    }

    /// What to tell at the end of the run.
    pub fn ended(&self) -> Option<Event> {
        let text = format!("no profile: the run ended before step {}, the first to profile", self.profiling.first);
        (self.written == 0).then_some(Event::Notice { text })
    }

    fn finish(&self) -> Result<Vec<Event>, TrainError> {
        let paths = (0..self.programs.len()).map(|rank| self.profiling.path(rank));
        let records = paths.map(|path| read(&path)).collect::<Result<Vec<_>, _>>()?;
        let of = Observed {
            model: &self.run.model,
            grid: &self.run.grid,
            layout: &self.run.layout,
            seq: self.run.train.seq,
            programs: &self.programs,
            peak_gflops: self.peak_gflops,
            bandwidth_gb_s: self.bandwidth_gb_s,
        };
        let profile = observe::profile(&of, &records).map_err(|e| TrainError::Internal(e.to_string()))?;
        let path = self.profiling.folder.join("trace.json");
        let write = || observe::write_trace(&mut BufWriter::new(File::create(&path)?), &of, &records);
        let written = write().map_err(|source| TrainError::Io { what: "cannot write", path: path.clone(), source })?;
        let (steps, recorded) = (written.steps, written.recorded);
        let cut = if steps < recorded { format!(" of {recorded}: more would be too large") } else { String::new() };
        let text = format!(
            "trace of all ranks, {steps} steps{cut}, {} arrows: {} (open it at https://ui.perfetto.dev)",
            written.flows,
            path.display()
        );
        Ok(vec![Event::Profile(profile), Event::Notice { text }])
    }
}

/// Writes a rank's record.
///
/// # Errors
/// Where the system refuses.
pub(crate) fn write(record: &RankRecord, path: &Path) -> Result<(), TrainError> {
    let text = serde_json::to_string(record).map_err(|e| TrainError::Internal(e.to_string()))?;
    regular::write(path, text).map_err(|source| TrainError::Io { what: "cannot write", path: path.to_owned(), source })
}

fn read(path: &Path) -> Result<RankRecord, TrainError> {
    let text = regular::read_to_string(path).map_err(|source| TrainError::Io {
        what: "cannot read",
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|e| TrainError::Internal(format!("{}: {e}", path.display())))
}

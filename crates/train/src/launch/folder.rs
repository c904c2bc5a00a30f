//! The run's folder: what is in it, whose it is, what is written to it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use checkpoint::Checkpoint;
use events::Event;
use kernels::NUMERICS_VERSION;
use spec::Run;

use super::Summary;
use crate::best::Best;
use crate::error::TrainError;
use crate::rank::Ended;

/// A run's folder.
pub struct RunFolder {
    path: PathBuf,
}

/// `events.jsonl`, open.
pub struct EventLog {
    file: File,
    began: Instant,
    broken: bool,
}

impl EventLog {
    /// Appends an event. A full disk must not stop a run: it is said once.
    pub fn write(&mut self, event: &Event) {
        let line = event.to_line(self.began.elapsed().as_secs_f64()) + "\n";
        if let Err(e) = self.file.write_all(line.as_bytes())
            && !std::mem::replace(&mut self.broken, true)
        {
            eprintln!("events.jsonl cannot be written ({e}); the run goes on without it");
        }
    }
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

    fn io(&self, what: &'static str, name: &str) -> impl FnOnce(std::io::Error) -> TrainError {
        let path = self.path.join(name);
        move |source| TrainError::Io { what, path, source }
    }

    /// Whether this run may use the folder, and the checkpoint that it goes on from. Nothing is written.
    ///
    /// # Errors
    /// A folder that holds another run, or any run without `resume`; `resume` without a checkpoint.
    pub fn resume_point(
        &self,
        run: &Run,
        resume: bool,
        observe: &mut dyn FnMut(&Event),
    ) -> Result<Option<Checkpoint>, TrainError> {
        let path = self.path.display();
        let used = fs::read_dir(&self.path).is_ok_and(|mut entries| entries.next().is_some());
        if !resume {
            return if used {
                Err(TrainError::BadInput(format!(
                    "the run directory {path} holds something already; add --resume to go on with the run in it, or choose another --run-dir"
                )))
            } else {
                Ok(None)
            };
        }
        let newest = checkpoint::newest(&self.checkpoints())?;
        let Some(found) = newest.checkpoint else {
            let damaged = newest.skipped.iter().map(|(_, e)| format!("\n  {e}")).collect::<String>();
            return Err(TrainError::BadInput(format!(
                "--resume finds no complete checkpoint under {}; start the run without --resume in another --run-dir{damaged}",
                self.checkpoints().display()
            )));
        };
        let tensors = spec::tensors::tensors(&run.model);
        found.check_model(&run.definition(), &tensors, run.grid.tp, NUMERICS_VERSION)?;
        let from = found.meta().step;
        if from > run.train.steps {
            let steps = run.train.steps;
            return Err(TrainError::BadInput(format!("the checkpoint is at step {from}, train.steps = {steps}")));
        }
        for (step, reason) in &newest.skipped {
            observe(&Event::Notice { text: format!("the checkpoint of step {step} is passed over: {reason}") });
        }
        observe(&Event::Notice { text: format!("going on after step {from} of {}", found.path().display()) });
        Ok(Some(found))
    }

    /// What the run's validations up to step `done` were, by its own log.
    pub fn best_until(&self, done: u64) -> Best {
        let text = fs::read_to_string(self.path.join("events.jsonl")).unwrap_or_default();
        let of = |line: &str| match Event::from_line(line) {
            Ok(Event::Validation { step, loss, .. }) => Some((step, loss)),
            _ => None,
        };
        Best::replay(text.lines().filter_map(of), done)
    }

    /// Creates the folder and its first files.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn create(&self, run: &Run) -> Result<EventLog, TrainError> {
        fs::create_dir_all(self.checkpoints()).map_err(self.io("cannot create", "checkpoints"))?;
        self.set_damaged_aside()?;
        fs::write(self.path.join("run.toml"), run.values.to_toml()).map_err(self.io("cannot write", "run.toml"))?;
        for name in ["interventions.jsonl", "events.jsonl"] {
            File::options()
                .create(true)
                .append(true)
                .open(self.path.join(name))
                .map_err(self.io("cannot create", name))?;
        }
        let file = File::options()
            .append(true)
            .open(self.path.join("events.jsonl"))
            .map_err(self.io("cannot open", "events.jsonl"))?;
        Ok(EventLog { file, began: Instant::now(), broken: false })
    }

    /// Steps that the run is about to write again must be free; what was saved is kept under another name.
    fn set_damaged_aside(&self) -> Result<(), TrainError> {
        for (step, _) in checkpoint::newest(&self.checkpoints())?.skipped {
            let from = checkpoint::step_dir(&self.checkpoints(), step);
            let to = from.with_extension("damaged");
            if !to.exists() {
                fs::rename(&from, &to).map_err(self.io("cannot set aside", "checkpoints"))?;
            }
        }
        Ok(())
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
                "restarts": 0,
                "ranks": s.ranks,
            }),
            Err(e) => serde_json::json!({ "schema": events::SCHEMA, "ended": "failed", "reason": e.to_string() }),
        };
        let text = serde_json::to_string_pretty(&value).map_err(|e| TrainError::Internal(e.to_string()))? + "\n";
        fs::write(self.path.join("summary.json"), text).map_err(self.io("cannot write", "summary.json"))
    }
}

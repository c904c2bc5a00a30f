//! A rank's checkpoints: beside the steps, or while it waits.

use std::time::{Duration, Instant};

use events::Event;

use super::RankRun;
use crate::error::TrainError;
use crate::persist::{self, Saved};

/// How often a checkpoint at the end of a run is tried before the run ends without it.
const FINAL_CHECKPOINT_TRIES: u32 = 5;
/// Pause between these tries.
const FINAL_CHECKPOINT_PAUSE: Duration = Duration::from_millis(500);

impl RankRun<'_> {
    /// The checkpoint of a due step; true if it is on disk.
    pub(super) fn checkpoint_due(&mut self, step: u64) -> Result<bool, TrainError> {
        // A copy of moments that lie in files would take the memory that they do not.
        if !self.job.run.checkpoint.background || self.job.run.layout.offload.optimizer() {
            return self.checkpoint(step, step + 1);
        }
        if self.open_at == Some(step) && self.is_saved(step)? {
            return Ok(true);
        }
        let began = Instant::now();
        let told = self.executor.writers.take();
        self.saver.begin(&mut self.executor, step, &self.best, told)?;
        self.spent("checkpoint", began);
        Ok(false)
    }

    /// Waits for checkpoints under way; the newest step that was written beside the steps.
    pub(super) fn drain(&mut self) -> Result<u64, TrainError> {
        let began = Instant::now();
        let saved = self.saver.drain(&self.executor)?;
        self.spent("checkpoint", began);
        self.saver.news().into_iter().for_each(|event| self.say(event));
        Ok(saved)
    }

    /// True if it was written; if not, the run goes on and tries again after step `retry_at`.
    pub(super) fn checkpoint(&mut self, step: u64, retry_at: u64) -> Result<bool, TrainError> {
        if self.open_at == Some(step) && self.is_saved(step)? {
            return Ok(true);
        }
        let began = Instant::now();
        self.saver.room_is_made();
        let result = persist::save(&mut self.executor, &self.job.checkpoints, step, &self.best)?;
        self.spent("checkpoint", began);
        self.failed_checkpoint = result.as_ref().err().cloned();
        match result {
            Ok(saved) => {
                self.saver.wrote(step, &self.best, &self.job.run);
                let seconds = began.elapsed().as_secs_f64();
                let Saved { path, bytes, written_s, .. } = saved;
                self.say(Event::Checkpoint { step, path, bytes, seconds, written_s });
            }
            Err(reason) => self.say(Event::CheckpointFailed { step, reason, retry_at }),
        }
        Ok(self.failed_checkpoint.is_none())
    }

    /// Whether an earlier world has written the checkpoint of `step`, as rank 0 sees it; on every rank.
    pub(super) fn is_saved(&self, step: u64) -> Result<bool, TrainError> {
        let manifest = checkpoint::step_dir(&self.job.checkpoints, step).join(checkpoint::MANIFEST);
        let mut seen = vec![u8::from(manifest.exists())];
        let comm = &self.executor.comm;
        comm.endpoint.broadcast(&comm.world, 0, &mut seen)?;
        Ok(seen == [1])
    }

    /// The checkpoint of the run's end, which is tried again.
    pub(super) fn last_checkpoint(&mut self, step: u64) -> Result<(), TrainError> {
        for attempt in 0..FINAL_CHECKPOINT_TRIES {
            if attempt > 0 {
                std::thread::sleep(FINAL_CHECKPOINT_PAUSE);
            }
            if self.checkpoint(step, step)? {
                return Ok(());
            }
        }
        let (tries, root) = (FINAL_CHECKPOINT_TRIES, self.job.checkpoints.display());
        let reason = self.failed_checkpoint.as_deref().unwrap_or("unknown");
        Err(TrainError::LastCheckpoint(format!(
            "the last checkpoint, of step {step}, could not be written under {root} in {tries} tries: {reason}"
        )))
    }
}

//! A rank's checkpoints: beside the steps, or while it waits.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use events::Event;
use spec::StoreUrl;

use super::{RankRun, Said};
use crate::error::TrainError;
use crate::persist::{self, Saved};

/// Pause before the second try of a run's last checkpoint; each one is twice as long as the one before.
const LAST_PAUSE: Duration = Duration::from_millis(250);
/// But not longer, and never so long that it is taken for a hang.
const LAST_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Who was asked to stop tries for so long.
const STOP_WAIT: Duration = Duration::from_secs(3);

/// The pauses between tries of a run's last checkpoint, which take `wait` together; alike on all ranks.
fn pauses(wait: Duration, most: Duration) -> impl Iterator<Item = Duration> {
    let mut left = wait;
    let mut next = LAST_PAUSE;
    std::iter::from_fn(move || {
        let pause = next.min(most).min(left);
        (left, next) = (left - pause, next * 2);
        (!pause.is_zero()).then_some(pause)
    })
}

impl RankRun<'_> {
    /// What its writer has to say, on any rank.
    pub(super) fn tell_of_checkpoints(&mut self) {
        self.saver.news().into_iter().for_each(|event| (self.sink)(Said::Event(event)));
    }

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
        let saved = self.saver.drain(&self.executor, &self.job.pulse)?;
        self.spent("checkpoint", began);
        self.tell_of_checkpoints();
        Ok(saved)
    }

    /// Waits for copies to the store. A word now and then, so that no exchange waits as long as a slow machine may take, and nobody
    /// takes it for a hang.
    pub(super) fn end_store(&mut self) -> Result<(), TrainError> {
        if self.job.run.checkpoint.store.is_none() {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            let over = self.speaks && self.saver.is_stored(began, self.job.stop.load(Ordering::Relaxed));
            self.job.pulse.work.fetch_add(1, Ordering::Relaxed);
            if self.heard_from_first(over)? {
                self.spent("checkpoint", began);
                return Ok(());
            }
        }
    }

    /// What rank 0 says, on every rank.
    fn heard_from_first(&self, word: bool) -> Result<bool, TrainError> {
        let mut word = vec![u8::from(word)];
        let comm = &self.executor.comm;
        comm.endpoint.broadcast(&comm.world, 0, &mut word)?;
        Ok(word == [1])
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
                self.saver.wrote(step, &self.best);
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
        self.heard_from_first(manifest.exists())
    }

    /// The checkpoint of the run's end. A disk that is full or refuses is no reason to give up what is still in memory: room is made
    /// by what retention would remove after it, a folder that is the slower tier takes it, and both are tried again
    /// (`checkpoint.last_wait_s`) until a person who stops the run says otherwise.
    pub(super) fn last_checkpoint(&mut self, step: u64) -> Result<(), TrainError> {
        if self.checkpoint(step, step)? {
            return Ok(());
        }
        let run = &self.job.run;
        if self.speaks {
            let removed =
                persist::make_room_before(&self.job.checkpoints, step, run, &self.best, &self.saver.pending());
            if !removed.is_empty() {
                let text = format!(
                    "checkpoints of steps {removed:?} are removed now, as they would be after the last one (checkpoint.keep = {})",
                    run.checkpoint.keep
                );
                self.say(Event::Notice { text });
            }
        }
        let most = LAST_PAUSE_MAX.min(Duration::from_millis(run.guard.progress_floor_ms / 4).max(LAST_PAUSE));
        let wait = Duration::from_secs(run.checkpoint.last_wait_s);
        let (mut tries, mut waited, mut store) = (1, Duration::ZERO, None);
        for pause in std::iter::once(Duration::ZERO).chain(pauses(wait, most)) {
            std::thread::sleep(pause);
            waited += pause;
            tries += 1;
            if self.checkpoint(step, step)? || self.checkpoint_in_store(step, &mut store)? {
                return Ok(());
            }
            let hurry = waited >= STOP_WAIT && self.job.stop.load(Ordering::Relaxed);
            if self.heard_from_first(hurry)? {
                break;
            }
        }
        let root = self.job.checkpoints.display();
        let reason = self.failed_checkpoint.as_deref().unwrap_or("unknown");
        let store = store.map_or(String::new(), |why| format!(", nor in checkpoint.store: {why}"));
        Err(TrainError::LastCheckpoint(format!(
            "the last checkpoint, of step {step}, could not be written under {root} in {tries} tries and {:.0} s: {reason}{store}; all steps are \
             done, the state of the last ones is not saved; free some space, then run it again with --resume (a \
             checkpoint.last_wait_s above {} tries longer)",
            waited.as_secs_f64(),
            run.checkpoint.last_wait_s
        )))
    }

    /// The checkpoint of `step` in the slower tier, where that is a folder; true if it is there, else `failed` is why not.
    fn checkpoint_in_store(&mut self, step: u64, failed: &mut Option<String>) -> Result<bool, TrainError> {
        let Some(StoreUrl::Folder(store)) = &self.job.run.checkpoint.store else { return Ok(false) };
        let began = Instant::now();
        let result = persist::save(&mut self.executor, store, step, &self.best)?;
        self.spent("checkpoint", began);
        let Saved { path, bytes, written_s, .. } = match result {
            Ok(saved) => saved,
            Err(why) => {
                *failed = Some(why);
                return Ok(false);
            }
        };
        let why = self.failed_checkpoint.take().unwrap_or_default();
        let text = format!(
            "the last checkpoint, of step {step}, is in checkpoint.store ALONE, where --resume finds it: {} cannot take it: {why}",
            self.job.checkpoints.display()
        );
        self.say(Event::Notice { text });
        let seconds = began.elapsed().as_secs_f64();
        self.say(Event::Checkpoint { step, path, bytes, seconds, written_s });
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_sum_to_the_wait() {
        let of = |ms| pauses(Duration::from_millis(ms), Duration::from_secs(5)).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(1000), [250, 500, 250].map(Duration::from_millis));
        let all = of(300_000);
        assert_eq!((all.iter().sum::<Duration>(), all.iter().max()), (Duration::from_secs(300), Some(&LAST_PAUSE_MAX)));
    }
}

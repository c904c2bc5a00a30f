//! The thread that copies checkpoints to a store while the run goes on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Store;
use crate::folder::{Retention, step_dir};
use crate::read::Checkpoint;
use crate::timeline::Timeline;

/// Pause after the first failure; it doubles up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Default)]
struct State {
    /// Steps to copy.
    queue: BTreeSet<u64>,
    /// The step being copied.
    at_work: Option<u64>,
    /// For the person.
    words: Vec<String>,
    /// Steps kept in the store beside the newest.
    also: Vec<u64>,
    /// The last try failed, and there will be another one.
    failing: bool,
    over: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A copy that panicked changed nothing here.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Copies checkpoints in the background, tries again where that fails, and makes room in the store.
pub struct Uploader {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Uploader {
    /// Starts it, for checkpoints under `root`; `started` runs first in its thread.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn start(
        root: &Path,
        store: Store,
        retention: Retention,
        started: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let worker = Worker { root: root.into(), store, retention, shared: shared.clone() };
        let thread = std::thread::Builder::new().name("checkpoint-store".into()).spawn(move || {
            started();
            worker.run();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Has the checkpoint of `step` copied; `also` are steps that the store keeps beside the newest.
    pub fn push(&self, step: u64, also: Vec<u64>) {
        let mut state = self.shared.lock();
        state.queue.insert(step);
        state.also = also;
        self.shared.changed.notify_all();
    }

    /// Steps not yet in the store: the local ones must stay.
    pub fn pending(&self) -> Vec<u64> {
        let state = self.shared.lock();
        state.queue.iter().copied().chain(state.at_work).collect()
    }

    /// What happened since the last call.
    pub fn words(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().words)
    }

    /// Whether the last try to copy something failed.
    pub fn failing(&self) -> bool {
        self.shared.lock().failing
    }

    /// Waits until all is copied, at most so long; true if it is.
    pub fn wait(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.lock();
        while !state.queue.is_empty() || state.at_work.is_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        true
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
        // A copy under way is not waited for: without its manifest it is none.
        drop(self.thread.take());
    }
}

struct Worker {
    root: PathBuf,
    store: Store,
    retention: Retention,
    shared: Arc<Shared>,
}

impl Worker {
    fn run(self) {
        let mut pause = PAUSE;
        while let Some(step) = self.next() {
            let place = self.store.name();
            let (again, word) = match self.copy(step) {
                Ok(0) => (false, None),
                Ok(bytes) => {
                    (false, Some(format!("checkpoint of step {step} | {:.1} MB copied to {place}", bytes as f64 / 1e6)))
                }
                Err((true, reason)) => {
                    let seconds = pause.as_secs();
                    (
                        true,
                        Some(format!(
                            "the checkpoint of step {step} could not be copied to {place}, the run goes on, next try in {seconds} s: {reason}"
                        )),
                    )
                }
                Err((false, reason)) => {
                    (false, Some(format!("the checkpoint of step {step} is NOT copied to {place}: {reason}")))
                }
            };
            let mut state = self.shared.lock();
            state.words.extend(word);
            state.at_work = None;
            state.failing = again;
            if again {
                // A newer one makes this one needless.
                if state.queue.is_empty() || self.retention.spares(step) {
                    state.queue.insert(step);
                }
                state = self.rest(state, pause);
                pause = (pause * 2).min(PAUSE_MAX);
            } else {
                pause = PAUSE;
            }
            drop(state);
            self.shared.changed.notify_all();
        }
    }

    /// The oldest step to copy, once there is one.
    fn next(&self) -> Option<u64> {
        let mut state = self.shared.lock();
        loop {
            if state.over {
                return None;
            }
            if let Some(step) = state.queue.pop_first() {
                state.at_work = Some(step);
                return Some(step);
            }
            state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn rest<'a>(&self, mut state: MutexGuard<'a, State>, pause: Duration) -> MutexGuard<'a, State> {
        let until = Instant::now() + pause;
        while !state.over {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        state
    }

    /// `Err`: whether another try may help, and why.
    fn copy(&self, step: u64) -> Result<u64, (bool, String)> {
        let words = |e: crate::CheckpointError| (matches!(e, crate::CheckpointError::Io { .. }), e.to_string());
        let (timeline, folder) = (Timeline::of(&self.root), step_dir(&self.root, step));
        let from = Checkpoint::open(&folder).map_err(|e| (false, e.to_string()))?;
        let bytes = self.store.put(&from).map_err(words)?;
        // Who goes back gives the folder here its new name before looking into the store. That the original is gone by now says
        // nothing: retention may have removed it, and then the copy is all there is.
        let still = || Checkpoint::open_alone(&folder).is_ok_and(|now| now.files() == from.files());
        let kept = || timeline.keeps(&self.root, step).unwrap_or_else(still);
        if Timeline::of(&self.root) != timeline && !kept() {
            self.store.set_one_aside(step).map_err(words)?;
            return Err((false, "the run went back to an earlier step meanwhile".into()));
        }
        let also = [self.retention.also.clone(), self.shared.lock().also.clone()].concat();
        let retention = Retention { also, ..self.retention.clone() };
        // What cannot be removed takes room, no more.
        drop(self.store.retain(&retention));
        Ok(bytes)
    }
}

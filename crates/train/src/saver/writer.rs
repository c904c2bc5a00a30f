//! A writer's thread: it copies what it was lent, leaves its part of the checkpoint on disk, and on rank 0 commits.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use checkpoint::store::Uploader;
use checkpoint::{Attempt, Committed, Meta, Snapshot};
use rustix::time::{ClockId, clock_gettime};
use spec::tensors::Tensor;

use crate::best::Best;
use crate::lent::Loan;
use crate::persist::{self, Saved};

/// The writer's niceness: where steps use every core it gets about a tenth of one.
pub(super) const WRITER_NICE: i32 = 10;
/// A part that did not come by then does not come.
pub(super) const PART_LIMIT: Duration = Duration::from_secs(3600);
/// How long parts are still waited for once the world has ended.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// No rank.
pub(super) const NOBODY: usize = usize::MAX;

/// The step is no longer being written once this is gone.
pub(super) struct Busy(pub(super) Arc<AtomicU64>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// What a writer's thread gives back.
pub(super) struct Done {
    pub(super) snapshot: Snapshot,
    /// Why neither its part nor its word is on disk.
    pub(super) untold: Option<String>,
    /// Processor time of the thread, seconds.
    pub(super) cpu: f64,
    /// Rank 0's: what came of it.
    pub(super) verdict: Option<Result<Saved, String>>,
}

/// What a writer's thread is given.
pub(super) struct Task {
    pub(super) attempt: Attempt,
    pub(super) rank: usize,
    pub(super) tensors: Vec<Tensor>,
    pub(super) tp: usize,
    /// What is copied, and where to.
    pub(super) loan: Loan,
    pub(super) snapshot: Snapshot,
    pub(super) delay: Duration,
    /// A deliberate fault.
    pub(super) disk_full: bool,
    pub(super) closing: Arc<AtomicBool>,
    pub(super) void: Arc<AtomicBool>,
    pub(super) partless: Arc<AtomicUsize>,
    pub(super) stuck: Arc<AtomicU64>,
    /// Rank 0's.
    pub(super) commit: Option<Commit>,
}

/// What rank 0 commits with.
pub(super) struct Commit {
    pub(super) meta: Meta,
    pub(super) best: Best,
    pub(super) uploader: Option<Arc<Uploader>>,
}

/// Steps that are kept for what they are.
pub(super) fn kept_for(best: &Best) -> Vec<u64> {
    best.best.iter().map(|(step, _)| *step).collect()
}

impl Task {
    /// All of it; what fails is in what it gives back.
    pub(super) fn run(self) -> Done {
        let began = Instant::now();
        let Self {
            attempt,
            rank,
            tensors,
            tp,
            loan,
            mut snapshot,
            delay,
            disk_full,
            closing,
            void,
            partless,
            stuck,
            commit,
        } = self;
        // An update may wait for the copy, so that is as important as a step. After it the steps come first; where that is
        // refused it only writes sooner.
        loan.copy_into(&mut snapshot);
        let _ = rustix::process::nice(WRITER_NICE);
        if commit.is_some() {
            attempt.sweep();
        }
        while began.elapsed() < delay && !closing.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5).min(delay));
        }
        // What fails here is in the part that the committer reads, or there is none.
        let untold = if disk_full {
            let reason = "no space left on device (injected)";
            (!attempt.fail(rank, reason)).then(|| reason.to_owned())
        } else {
            let written = attempt.write(rank, &tensors, tp, &snapshot.pieces());
            written.err().filter(|failed| !failed.told).map(|failed| failed.cause.to_string())
        };
        if rank == 0 || untold.is_some() {
            stuck.store(attempt.step, Ordering::Release);
        }
        let verdict = commit.map(|Commit { meta, best, uploader }| {
            let closed = Cell::new(None);
            let given_up = || {
                let since = closing.load(Ordering::Relaxed).then(|| closed.get().unwrap_or_else(Instant::now));
                closed.set(since);
                since.is_some_and(|since| since.elapsed() > CLOSE_LIMIT) || partless.load(Ordering::Acquire) != NOBODY
            };
            let files = match &untold {
                Some(cause) => Err(format!("rank {rank} could not write its part: {cause}")),
                None => attempt.collect(began + PART_LIMIT, &given_up).map_err(|reason| {
                    match partless.load(Ordering::Acquire) {
                        NOBODY => reason,
                        rank => format!("rank {rank} has no part of it, as it says itself"),
                    }
                }),
            };
            stuck.store(0, Ordering::Release);
            let committed = files.and_then(|files| {
                if void.load(Ordering::Relaxed) {
                    return Err("a device has proved to be broken since its step".into());
                }
                let bytes = files.iter().map(|file| file.bytes).sum();
                let Committed { path, aside } = attempt.commit(&tensors, &meta, files).map_err(|e| e.to_string())?;
                Ok((path, bytes, aside))
            });
            let written_s = Some(began.elapsed().as_secs_f64());
            match committed {
                Ok((path, bytes, aside)) => {
                    if let Some(uploader) = &uploader {
                        uploader.push(attempt.step, kept_for(&best));
                    }
                    persist::mark_best(&attempt.root, &best);
                    let aside = aside.map(|aside| aside.display().to_string());
                    Ok(Saved { path: path.display().to_string(), bytes, written_s, aside })
                }
                Err(reason) => {
                    attempt.abandon();
                    Err(reason)
                }
            }
        });
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        Done { snapshot, untold, cpu: cpu.tv_sec as f64 + cpu.tv_nsec as f64 * 1e-9, verdict }
    }
}

//! Checkpoints beside the steps: a rank lends what it writes to a thread and goes on; the thread copies it before the next
//! update, then writes the copy.
//!
//! The ranks agree at a due step that all of them are free and which attempt this is: by their ballots, so that nobody waits for
//! it, or in one small exchange where the step was not known to be due before its vote. From there on nothing is exchanged:
//! each leaves its part on disk, rank 0's thread looks for them and commits (`writer`).

mod writer;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::interval::{Measured, steps_between};
use checkpoint::store::{Store, Uploader};
use checkpoint::{Attempt, Retention, Snapshot, Timeline};
use events::Event;
use spec::{Run, Transport};

use self::writer::{Busy, Commit, Done, NOBODY, PART_LIMIT, Task, WRITER_NICE, kept_for};
use crate::best::Best;
use crate::error::TrainError;
use crate::exec::Executor;
use crate::lent::Copied;
use crate::persist::{self, Saved};
use crate::rank::Pulse;

/// How often ranks that wait for their writers at the end of a run say so.
const DRAIN_LOOK: Duration = Duration::from_millis(50);
/// How often ranks that wait for the store at the end of a run say so.
const STORE_LOOK: Duration = Duration::from_secs(1);
/// How long the end of a run waits for a store that fails, or of a run that was asked to stop; copies that go on are waited for.
const STORE_LIMIT: Duration = Duration::from_secs(10);
/// But not longer.
const STORE_LIMIT_MAX: Duration = Duration::from_secs(3600);
/// How long older checkpoints wait for the controller to know of a newer one; after that those that it knows stay, and no others.
const KNOWN_LIMIT: Duration = Duration::from_secs(5);
/// With `checkpoint.every = "auto"`: steps before the first checkpoint, whose cost is not known.
pub(crate) const FIRST: u64 = 10;

/// When a checkpoint is due.
enum Due {
    Multiples(u64),
    /// Not before this step, which all ranks know alike.
    Auto(u64),
}

/// A rank's writer of checkpoints.
pub struct Saver {
    run: Run,
    root: PathBuf,
    rank: usize,
    /// That of this world: once the run has gone back nothing of it is committed any more.
    timeline: Timeline,
    due: Due,
    stagger: Duration,
    spare: Snapshot,
    under_way: Option<Writing>,
    /// What happened since it was last asked for.
    news: Vec<Event>,
    /// The newest step committed by rank 0's writer.
    saved: u64,
    /// A step's seconds, smoothed.
    step_s: Option<f64>,
    /// Of the last checkpoint: held the run up for, until its manifest; seconds.
    cost: Option<(f64, f64)>,
    gap: u64,
    /// Why the gap is another one, until it is told.
    why: Option<String>,
    /// Rank 0's, if there is a store.
    uploader: Option<Arc<Uploader>>,
    /// The step that is being written here; 0: none.
    busy: Arc<AtomicU64>,
    /// As in [`Word`].
    stuck: Arc<AtomicU64>,
    /// Rank 0's, after a checkpoint for which the ranks waited: what removes older ones.
    room: Option<JoinHandle<()>>,
}

/// What ranks tell each other before a checkpoint.
#[derive(Debug, Clone)]
pub struct Word {
    busy: Arc<AtomicU64>,
    /// Of rank 0, the step of which it waits for nothing but parts; of others, the last one of which they could leave neither their
    /// part nor that they have none.
    stuck: Arc<AtomicU64>,
    token: u64,
    gap: u64,
}

impl Word {
    /// The step that is being written (0: none), a number that names the attempt, the steps to the next one, the step that is stuck.
    pub fn now(&self) -> [u64; 4] {
        [self.busy.load(Ordering::Acquire), self.token, self.gap, self.stuck.load(Ordering::Acquire)]
    }
}

struct Writing {
    step: u64,
    best: Best,
    began: Instant,
    /// Seconds that the rank waited until it could go on.
    waited: f64,
    /// The copy, for which the next update waits.
    copied: Arc<Copied>,
    closing: Arc<AtomicBool>,
    /// It is not to be committed.
    void: Arc<AtomicBool>,
    /// A rank has said that its part will never come; [`NOBODY`]: none has.
    partless: Arc<AtomicUsize>,
    done: Receiver<Done>,
}

impl Saver {
    /// The writer of `rank`, in a run that has `done` steps behind it.
    pub fn new(run: &Run, rank: usize, root: &Path, done: u64) -> Self {
        let config = &run.checkpoint;
        Self {
            run: run.clone(),
            root: root.to_owned(),
            rank,
            timeline: Timeline::of(root),
            due: config.every.map_or(Due::Auto(done + FIRST), Due::Multiples),
            stagger: Duration::from_millis(config.stagger_ms) * rank as u32,
            spare: Snapshot::default(),
            under_way: None,
            news: Vec::new(),
            saved: 0,
            step_s: None,
            cost: None,
            gap: FIRST,
            why: None,
            uploader: None,
            busy: Arc::default(),
            stuck: Arc::default(),
            room: None,
        }
    }

    /// Rank 0: starts what copies checkpoints to the store, if the run has one.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn open_store(&mut self, run: &Run) -> Result<(), TrainError> {
        let Some(url) = run.checkpoint.store.as_ref().filter(|_| self.rank == 0) else { return Ok(()) };
        let (keep, keep_every) = (run.checkpoint.keep, run.checkpoint.keep_every);
        let retention = Retention { keep, keep_every, also: Vec::new() };
        // The steps come first; where that is refused it only copies sooner.
        let started = || {
            let _ = rustix::process::nice(WRITER_NICE);
        };
        let uploader = Uploader::start(&self.root, Store::open(url)?, retention, started)
            .map_err(|e| TrainError::Internal(format!("cannot start the copies to the store: {e}")))?;
        // What an earlier life did not get there; what is there already costs a look.
        if let Some(newest) = checkpoint::newest(&self.root)?.checkpoint {
            uploader.push(newest.meta().step, Vec::new());
        }
        self.uploader = Some(Arc::new(uploader));
        Ok(())
    }

    /// Steps whose checkpoints are not in the store yet.
    pub fn pending(&self) -> Vec<u64> {
        self.uploader.as_ref().map_or(Vec::new(), |uploader| uploader.pending())
    }

    /// Takes in that `step` was written while the ranks waited; older ones are removed without them.
    pub fn wrote(&mut self, step: u64, best: &Best) {
        if let Due::Auto(next) = &mut self.due {
            *next = step + self.gap;
        }
        if let Some(uploader) = &self.uploader {
            uploader.push(step, kept_for(best));
        }
        self.make_room(step, best);
    }

    /// Rank 0, once `step` is committed: removes what is old, in a thread, as soon as the run's controller knows of this one. Until then
    /// the run may go back to the one before.
    fn make_room(&mut self, step: u64, best: &Best) {
        if self.rank > 0 {
            return;
        }
        let (root, run, best, uploader) = (self.root.clone(), self.run.clone(), *best, self.uploader.clone());
        let thread = std::thread::Builder::new().name("checkpoint-room".into());
        let make = move || {
            let _ = rustix::process::nice(WRITER_NICE);
            // A rank that is alone has no controller but where agents run it; what that one knows stays in any case.
            if run.layout.transport != Transport::Threads && run.layout.world() > 1 {
                persist::wait_until_known(&root, step, KNOWN_LIMIT);
            }
            let pending = uploader.map_or(Vec::new(), |uploader| uploader.pending());
            persist::make_room(&root, step, &run, &best, &pending);
        };
        // Without a thread there is none to spare: the next one makes room.
        self.room = thread.spawn(make).ok();
    }

    /// Waits until what a checkpoint leaves room for is gone.
    pub fn room_is_made(&mut self) {
        if let Some(thread) = self.room.take() {
            drop(thread.join());
        }
    }

    /// What this rank tells the others with its ballot for a step that is due.
    pub fn word(&mut self, run: &Run) -> Word {
        self.look(Duration::ZERO);
        if let Some(why) = self.adapt(run) {
            self.why = Some(why);
        }
        let token = RandomState::new().build_hasher().finish();
        Word { busy: self.busy.clone(), stuck: self.stuck.clone(), token, gap: self.gap }
    }

    /// Rank 0, after the last checkpoint: waits a while for the store; true if there is nothing to wait for any more. `since`: when
    /// that began; `hurry`: somebody wants the run to stop.
    pub fn is_stored(&mut self, since: Instant, hurry: bool) -> bool {
        let Some(uploader) = &self.uploader else { return true };
        if uploader.wait(STORE_LOOK) {
            return true;
        }
        let limit = if hurry || uploader.failing() { STORE_LIMIT } else { STORE_LIMIT_MAX };
        let over = since.elapsed() >= limit;
        if over {
            let steps = uploader.pending();
            let text = format!(
                "the checkpoints of steps {steps:?} are NOT in the store after {} s; they are in {}",
                since.elapsed().as_secs(),
                self.root.display()
            );
            self.news.push(Event::Notice { text });
        }
        over
    }

    /// Whether the step is one after which a checkpoint is due; alike on all ranks.
    pub fn due(&self, step: u64) -> bool {
        match self.due {
            Due::Multiples(every) => every > 0 && step.is_multiple_of(every),
            Due::Auto(next) => step >= next,
        }
    }

    /// Takes in how long a step took.
    pub fn stepped(&mut self, seconds: f64) {
        self.step_s = Some(self.step_s.map_or(seconds, |known| 0.9 * known + 0.1 * seconds));
    }

    /// What became of checkpoints since the last call, as rank 0 knows it; and what another rank could not tell it.
    pub fn news(&mut self) -> Vec<Event> {
        self.look(Duration::ZERO);
        let words = self.uploader.iter().flat_map(|uploader| uploader.words());
        self.news.extend(words.map(|text| Event::Notice { text }));
        std::mem::take(&mut self.news)
    }

    /// Begins the checkpoint of the state after `step`, unless one is still being written on some rank. All ranks call it,
    /// with the [`Word`]s that came with the ballots of the step, if they did.
    ///
    /// # Errors
    /// The fabric's.
    pub fn begin(
        &mut self,
        executor: &mut Executor,
        step: u64,
        best: &Best,
        words: Option<Vec<[u64; 4]>>,
    ) -> Result<(), TrainError> {
        let began = Instant::now();
        let words = match words {
            Some(words) => words,
            None => words_of_all(&*executor, self.word(executor.run).now())?,
        };
        let [_, token, gap, _] = words[0];
        if matches!(self.due, Due::Auto(_)) {
            self.due = Due::Auto(step + gap);
            self.news.extend(self.why.take().map(|text| Event::Notice { text }));
        }
        self.give_up_without_parts(&words);
        if let Some([under_way, ..]) = words.iter().find(|word| word[0] > 0).filter(|_| !is_dead(&words)) {
            let text = format!(
                "the checkpoint of step {step} is skipped: that of step {under_way} is still being written (checkpoint.every is shorter than a write takes)"
            );
            self.news.extend((self.rank == 0).then_some(Event::Notice { text }));
            return Ok(());
        }
        // Who said that it is free has given back what it gave, or is about to.
        self.look(PART_LIMIT);
        // One that is skipped finds no disk full.
        let disk_full = std::mem::take(&mut executor.faults.disk_full);
        let (loan, snapshot) = (executor.lend(), std::mem::take(&mut self.spare));
        let copied = loan.copied();
        let executor = &*executor;
        let (root, timeline) = (self.root.clone(), self.timeline.clone());
        let attempt = Attempt { root, step, token, writers: words.len(), timeline };
        let [closing, void] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let partless = Arc::new(AtomicUsize::new(NOBODY));
        let (tell, done) = channel();
        let task = Task {
            attempt,
            rank: self.rank,
            tensors: executor.tensors.clone(),
            tp: executor.place.grid_tp,
            loan,
            snapshot,
            delay: self.stagger,
            disk_full,
            closing: closing.clone(),
            void: void.clone(),
            partless: partless.clone(),
            stuck: self.stuck.clone(),
            commit: (self.rank == 0).then(|| Commit {
                meta: persist::meta(executor, step, None, best),
                best: *best,
                uploader: self.uploader.clone(),
            }),
        };
        let thread = std::thread::Builder::new().name(format!("checkpoint-{}", self.rank));
        self.busy.store(step, Ordering::Release);
        let busy = Busy(self.busy.clone());
        let spawned = thread.spawn(move || {
            let _busy = busy;
            drop(tell.send(task.run()));
        });
        spawned.map_err(|e| TrainError::Internal(format!("cannot start the writer of checkpoints: {e}")))?;
        self.under_way = Some(Writing {
            step,
            best: *best,
            began,
            waited: began.elapsed().as_secs_f64(),
            copied,
            closing,
            void,
            partless,
            done,
        });
        Ok(())
    }

    /// Rank 0: an attempt for which somebody has no part is not waited for.
    fn give_up_without_parts(&self, words: &[[u64; 4]]) {
        let Some(writing) = self.under_way.as_ref().filter(|_| self.rank == 0) else { return };
        if let Some(rank) = (1..words.len()).find(|rank| words[*rank][3] == writing.step) {
            writing.partless.store(rank, Ordering::Release);
        }
    }

    /// What is being written is of a state that nobody trusts any more: it becomes no checkpoint.
    pub fn void(&self) {
        self.under_way.iter().for_each(|writing| writing.void.store(true, Ordering::Relaxed));
    }

    /// Waits until no rank is writing; returns the newest step that this run's writers committed, alike on all ranks.
    ///
    /// # Errors
    /// The fabric's.
    pub fn drain(&mut self, executor: &Executor, pulse: &Pulse) -> Result<u64, TrainError> {
        let began = Instant::now();
        loop {
            self.look(DRAIN_LOOK);
            // A slow disk is no hang; one that takes for ever is.
            if began.elapsed() < PART_LIMIT {
                pulse.work.fetch_add(1, Ordering::Relaxed);
            }
            // A word now and then, so that no exchange waits as long as a slow disk may take.
            let busy = u64::from(self.under_way.is_some());
            let words = words_of_all(executor, [busy, self.saved, 0, self.stuck.load(Ordering::Acquire)])?;
            self.give_up_without_parts(&words);
            if words.iter().all(|word| word[0] == 0) {
                return Ok(words[0][1]);
            }
        }
    }

    /// Takes in what the writer's thread gave back, if it ends within `patience`.
    fn look(&mut self, patience: Duration) {
        let Some(writing) = &self.under_way else { return };
        let done = match patience.is_zero() {
            true => writing.done.try_recv().map_err(|e| e == TryRecvError::Disconnected),
            false => writing.done.recv_timeout(patience).map_err(|e| e == RecvTimeoutError::Disconnected),
        };
        let waited = writing.waited + writing.copied.waited().as_secs_f64();
        let (step, best, seconds) = (writing.step, writing.best, writing.began.elapsed().as_secs_f64());
        let (verdict, untold) = match done {
            Err(false) => return,
            Err(true) => {
                let reason = "its writer panicked; the message is on standard error".to_owned();
                self.stuck.store(step, Ordering::Release);
                ((self.rank == 0).then(|| Err(reason.clone())), Some(reason))
            }
            Ok(Done { snapshot, untold, cpu, verdict }) => {
                self.spare = snapshot;
                self.cost = Some((waited + cpu, seconds));
                (verdict, untold)
            }
        };
        self.under_way = None;
        // What rank 0 could not write is in its verdict.
        if let Some(cause) = untold.filter(|_| self.rank > 0) {
            let text = format!("rank {} has no part of the checkpoint of step {step}: {cause}", self.rank);
            self.news.push(Event::Notice { text });
        }
        match verdict {
            Some(Ok(saved)) => {
                self.saved = step;
                self.make_room(step, &best);
                let Saved { path, bytes, written_s, aside } = saved;
                let note = |aside| format!("another checkpoint of step {step} was in its place, it is in {aside} now");
                self.news.extend(aside.map(|aside| Event::Notice { text: note(aside) }));
                self.news.push(Event::Checkpoint { step, path, bytes, seconds: waited, written_s });
            }
            Some(Err(reason)) => {
                let retry_at = match self.due {
                    Due::Auto(next) => next,
                    Due::Multiples(every) => step + every.max(1),
                };
                self.news.push(Event::CheckpointFailed { step, reason, retry_at });
            }
            None => {}
        }
    }

    /// With `checkpoint.every = "auto"`, rank 0: the steps to the next checkpoint; the reason, if they are others now.
    fn adapt(&mut self, run: &Run) -> Option<String> {
        if self.rank > 0 || run.checkpoint.every.is_some() {
            return None;
        }
        let ((cost, written), step) = (self.cost?, self.step_s?);
        let world = run.layout.world();
        let hosts = world.div_ceil(run.layout.ranks_per_host.unwrap_or(world)) as f64;
        let failures_per_host_day = run.checkpoint.failures_per_host_day;
        let (gap, why) = steps_between(Measured { cost, written, step, hosts, failures_per_host_day });
        // Measurements scatter; a tenth is not worth a word.
        if gap.abs_diff(self.gap) * 10 <= self.gap {
            return None;
        }
        self.gap = gap;
        Some(format!("checkpoint.every = \"auto\": the next one in {gap} steps: {why}"))
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.room_is_made();
        let Some(writing) = self.under_way.take() else { return };
        // The world has ended. Its writers go on by themselves, as long as their processes do: what can be finished is, unless
        // the run goes back (`checkpoint::Timeline`), and the folder of an attempt is never taken for a checkpoint.
        writing.closing.store(true, Ordering::Relaxed);
    }
}

/// All that is under way is that rank 0 waits for a part that will never come; alike on all ranks.
fn is_dead(words: &[[u64; 4]]) -> bool {
    let [busy, _, _, waits] = words[0];
    let others = &words[1..];
    busy > 0 && waits == busy && others.iter().all(|word| word[0] == 0) && others.iter().any(|word| word[3] == busy)
}

/// Four numbers of every rank, by rank.
fn words_of_all(executor: &Executor, mine: [u64; 4]) -> Result<Vec<[u64; 4]>, TrainError> {
    let mine: Vec<u8> = mine.iter().flat_map(|n| n.to_le_bytes()).collect();
    let all = executor.comm.endpoint.all_gather_bytes(&executor.comm.world, &mine)?;
    let words = all.iter().map(|bytes| decode(bytes)).collect::<Option<_>>();
    words.ok_or_else(|| TrainError::Internal("a rank's word on a checkpoint is unclear".into()))
}

fn decode(bytes: &[u8]) -> Option<[u64; 4]> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    let numbers: [[u8; 8]; 4] = numbers.try_into().ok()?;
    rest.is_empty().then(|| numbers.map(u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_writes_is_busy_until_its_thread_is_over_however_it_ends() {
        let busy = Arc::new(AtomicU64::new(7));
        let word = Word { busy: busy.clone(), stuck: Arc::default(), token: 3, gap: 5 };
        assert_eq!(word.now(), [7, 3, 5, 0]);
        let over = Busy(busy);
        let ended = std::thread::spawn(move || {
            let _over = over;
            std::panic::resume_unwind(Box::new("a writer that fails"));
        });
        assert!(ended.join().is_err());
        assert_eq!(word.now(), [0, 3, 5, 0]);
    }

    #[test]
    fn an_attempt_is_dead_if_rank_0_only_waits_for_who_has_nothing() {
        let waits = [9, 1, 1, 9];
        assert!(is_dead(&[waits, [0, 2, 1, 9]]));
        // Still writing itself, committing, or another rank is; or the part is of an attempt before, or there.
        assert!(!is_dead(&[[9, 1, 1, 0], [0, 2, 1, 9]]));
        assert!(!is_dead(&[waits, [0, 2, 1, 9], [9, 2, 1, 0]]));
        assert!(!is_dead(&[waits, [0, 2, 1, 6]]) && !is_dead(&[waits, [0, 2, 1, 0]]) && !is_dead(&[waits]));
        assert!(!is_dead(&[[0, 1, 1, 0], [0, 2, 1, 9]]));
    }
}

//! A rank process: it outlives worlds. It gets a place in a world, joins it, steps until the world ends, says what it holds,
//! keeps that, and waits for the next place.
//!
//! ```text
//!  mod.rs    the life: hello, then world after world
//!  ear.rs    a thread that hears the agent: what must act at once does, the rest queues up
//!  voice.rs  one writer of the standard output; the thread of the heartbeat
//!  join.rs   into the fabric of a world
//!  check.rs  a spare computes a step of the ranks again
//!  selftest.rs  known products, before a process is ready and while it waits
//! ```

mod check;
mod ear;
mod join;
mod selftest;
mod voice;

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::wire::{Assignment, CheckOrder, Decided, FromRank, Held, Origin, ToRank};
use data::content::Reading;
use kernels::Ctx;
use spec::Run;

use crate::corpus::Corpus;
use crate::error::TrainError;
use crate::launch::wire::{JobSpec, Part};
use crate::rank::{self, Ended, Ending, Remains, Said, Start};
use crate::recover::Peers;
use check::Check;
use ear::Ear;
use voice::Voice;

/// How often a process says that it is still reading its data.
const READING: Duration = Duration::from_secs(1);

/// The whole life of a rank process; the exit code.
pub fn rank_main() -> i32 {
    let voice = Voice::new();
    match life(&voice) {
        Ok(ended) => match serde_json::to_value(ended) {
            Ok(ended) => {
                voice.say(&FromRank::Done(ended));
                0
            }
            Err(_) => 70,
        },
        Err(e) => {
            let e = e.of_begun();
            // Whether the last checkpoint was written all ranks were told by one.
            let alike = matches!(e, TrainError::LastCheckpoint(_));
            voice.say(&FromRank::Failed { code: e.exit_code(), reason: e.to_string(), alike });
            e.exit_code()
        }
    }
}

fn unclear(e: &dyn std::fmt::Display) -> TrainError {
    TrainError::Internal(format!("the agent's words are unclear: {e}"))
}

fn life(voice: &Arc<Voice>) -> Result<Ended, TrainError> {
    let mut input = BufReader::new(std::io::stdin());
    let mut first = String::new();
    input.read_line(&mut first).map_err(|e| unclear(&e))?;
    let ToRank::Hello { parent, beat_ms, job } = serde_json::from_str(&first).map_err(|e| unclear(&e))? else {
        return Err(unclear(&"expected hello"));
    };
    die_with_parent(parent)?;
    let spec: JobSpec = serde_json::from_value(job).map_err(|e| unclear(&e))?;
    let no_thread = |e| TrainError::Internal(format!("a rank cannot start a thread: {e} (look at ulimit -u and -v)"));
    let mut ear = Ear::listen(input, voice.clone()).map_err(no_thread)?;
    voice.beat(beat_ms, ear.pulse().clone(), ear.still_ms()).map_err(no_thread)?;
    let ctx = Ctx::new(spec.simd.parse()?, 1);
    let mut worker = Worker { spec, voice, data: None, remains: None, check: None };
    let mut waits = false;
    loop {
        let Some(word) = ear.next_within(waits.then_some(selftest::EVERY)) else {
            selftest::look(&ctx, |_| ())?;
            continue;
        };
        waits = matches!(word, ToRank::Wait) || waits && matches!(word, ToRank::Check(_));
        match word {
            ToRank::Check(order) => worker.check(*order),
            ToRank::Assign(assignment) => {
                worker.check = None;
                if let Some(ended) = worker.world(*assignment, &mut ear)? {
                    return Ok(ended);
                }
            }
            ToRank::Wait => {
                selftest::look(&ctx, |_| ())?;
                let present = worker.present();
                voice.say(&present);
            }
            // Of a world that is over, or already done by the ear.
            _ => {}
        }
    }
}

/// What a process keeps from world to world.
struct Worker<'v> {
    spec: JobSpec,
    voice: &'v Arc<Voice>,
    /// The data do not depend on the layout.
    data: Option<Arc<Corpus>>,
    /// State of the last world.
    remains: Option<Box<Remains>>,
    /// What it checks while it waits.
    check: Option<Check>,
}

impl Worker<'_> {
    /// Lives through one world; none: it was interrupted, the agent knows, and another may come.
    fn world(&mut self, assignment: Assignment, ear: &mut Ear) -> Result<Option<Ended>, TrainError> {
        let generation = assignment.generation;
        let skips = self.spec.run(&assignment.run_toml).is_ok_and(|run| run.guard.skip_batches > 0);
        let ending = match self.steps(assignment, ear) {
            Ok(ended) => return Ok(Some(ended)),
            Err(ending) => ending,
        };
        ear.leave();
        let diverged = ending.error.diverged().filter(|_| skips);
        let Some(cause) = ending.error.cause().or(diverged) else { return Err(ending.error) };
        if let Some(mut remains) = ending.remains {
            if remains.generation == 0 {
                remains.generation = generation;
            }
            self.remains = Some(remains);
        }
        self.voice.say(&FromRank::Interrupted { generation, held: self.held()?, cause });
        Ok(None)
    }

    /// Begins a check; what was under way is given up.
    fn check(&mut self, order: CheckOrder) {
        self.check = None;
        let step = order.step;
        let begun = self.spec.run(&order.run_toml).and_then(|run| {
            let simd = self.spec.simd.parse()?;
            Check::begin(order, self.data(&run)?, run, self.spec.cores, simd, self.voice.clone())
        });
        match begun {
            Ok(check) => self.check = Some(check),
            Err(e) => {
                let (leaves, problem) = (Vec::new(), Some(e.to_string()));
                self.voice.say(&FromRank::Checked { step, leaves, seconds: 0.0, problem });
            }
        }
    }

    /// What this process is, by what it reads here.
    fn present(&mut self) -> FromRank {
        let run_toml = self.spec.run_toml.clone();
        let identity = self.spec.run(&run_toml).and_then(|run| Ok(self.data(&run)?.identity(&run)));
        match identity {
            Ok(identity) => FromRank::Ready { identity },
            Err(e) => FromRank::Unfit { reason: e.to_string() },
        }
    }

    /// The data, which are opened once: no change of a run that is at work changes them.
    fn data(&mut self, run: &Run) -> Result<Arc<Corpus>, TrainError> {
        if let Some(data) = &self.data {
            return Ok(data.clone());
        }
        let told = Cell::new(Instant::now());
        let progress = |_| {
            if told.get().elapsed() >= READING {
                told.set(Instant::now());
                self.voice.say(&FromRank::Reading);
            }
        };
        let data = Arc::new(Corpus::open_with(run, Reading { known: &self.spec.known, progress: &progress })?);
        Ok(self.data.insert(data).clone())
    }

    fn steps(&mut self, assignment: Assignment, ear: &mut Ear) -> Result<Ended, Ending> {
        let Assignment { generation, rank, world, run_toml, fabric, cores, origin, faults, recheck, checked, unseen } =
            assignment;
        let run = self.spec.run(&run_toml)?;
        let data = self.data(&run)?;
        let part = Part { run_toml, cores, faults, recheck, checked, unseen };
        let job = self.spec.job(part, data, ear.stop().clone(), ear.pulse().clone())?;
        let endpoint = join::join(&job.run, (generation, rank, world), &fabric, ear, self.voice)?;
        ear.enter(generation, endpoint.aborter(), endpoint.flight());
        self.voice.say(&FromRank::Connected { generation });
        // What is left is taken only now: should this world fail before, the next one asks for it.
        let start = self.start(origin)?;
        rank::run(&job, endpoint, start, &|said| {
            self.voice.say(&match said {
                Said::Event(event) | Said::Digest(event) => FromRank::Event(event),
                Said::Leaves { step, leaves } => FromRank::Leaves { generation, step, leaves },
                Said::Carried(step) => FromRank::Carried { generation, step },
                Said::Loaded { step, bytes, seconds } => FromRank::Loaded { generation, step, bytes, seconds },
            });
        })
    }

    /// Where the state of a world comes from; what is left of an earlier one goes along.
    fn start(&mut self, origin: Origin) -> Result<Start, TrainError> {
        Ok(match origin {
            Origin::Fresh | Origin::Disk(_) => {
                // What is left of an earlier world is not wanted.
                self.remains = None;
                if let Origin::Disk(path) = origin { Start::Disk(path) } else { Start::Fresh }
            }
            Origin::Peers { generation, before, holders, step, forward } => {
                let forward = forward.map(|decided| serde_json::from_value(decided.decision)).transpose();
                Start::Peers(Box::new(Peers {
                    before: self.spec.run(&before)?,
                    holders,
                    step,
                    forward: forward.map_err(|e| unclear(&e))?,
                    remains: self.remains.take().and_then(|remains| remains.of(generation)),
                    whole: None,
                }))
            }
        })
    }

    /// What the agent is told about what is left.
    fn held(&self) -> Result<Held, TrainError> {
        self.remains.as_deref().map_or(Ok(Held::default()), told)
    }
}

/// `remains`, and what is behind them, in the agent's words.
fn told(remains: &Remains) -> Result<Held, TrainError> {
    let decided = |verdict: &crate::exec::Verdict| {
        let decision = serde_json::to_value(verdict).map_err(|e| TrainError::Internal(e.to_string()))?;
        Ok::<_, TrainError>(Decided { step: verdict.step, decision })
    };
    Ok(Held {
        generation: remains.generation,
        rank: remains.rank as u32,
        settled: remains.settled,
        step: Some(remains.step),
        prepared: remains.prepared,
        decided: remains.decided.as_ref().map(decided).transpose()?,
        corrupt: remains.corrupt.clone(),
        before: remains.before.as_deref().map(|before| told(before).map(Box::new)).transpose()?,
    })
}

/// The kernel ends this process when the parent dies, however it dies.
fn die_with_parent(parent: u32) -> Result<(), TrainError> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| TrainError::Internal(format!("cannot bind this process to its parent: {e}")))?;
    // It may have died before that.
    let alive = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() as u32 == parent);
    if alive { Ok(()) } else { Err(TrainError::Internal("the parent is gone".into())) }
}

//! One rank's run: steps, validations, checkpoints, digests; it reports, it does not decide about failures.

mod begin;
mod save;
mod work;
mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use control::fault::Fault;
use data::{Dataset, Split};
use events::wall::Watcher;
use events::{Event, RankReport, Step};
use fabric::Endpoint;
use kernels::{Ctx, NUMERICS_VERSION, Simd};
use program::memory::Plan;
use program::{Mode, Program};
use spec::{Run, Transport, Unit};

use crate::best::Best;
use crate::buffers::LossSum;
use crate::comm::fabric_options;
use crate::corpus::{self, Corpus};
use crate::error::TrainError;
use crate::exec::{Executor, Outcome, Recheck, Recorder};
use crate::fault::Faults;
use crate::launch::{Profiling, write_record};
use crate::leaves;
use crate::load::expert_load;
use crate::mutant::{self, Mutant};
use crate::optim::learning_rate;
use crate::persist;
use crate::pin;
use crate::sample::Sampling;
use crate::saver::{self, Saver};
use crate::state::ChunkState;
use crate::vote::Decision;

pub use world::{Ended, Ending, Pulse, Remains, Said, Start};

/// What every rank takes at work beside all that is planned from its shapes: code that it comes through, stacks, buffers of
/// files, lists. Measured over runs of `tiny`, S and M: 2.3 to 3 MB.
const AT_WORK_BYTES: u64 = 2_600_000;

/// What a rank is given.
pub struct Job {
    /// The run.
    pub run: Run,
    /// Its data.
    pub data: Arc<Corpus>,
    /// Instruction path of the kernels.
    pub simd: Simd,
    /// Folder of checkpoints.
    pub checkpoints: PathBuf,
    /// Steps between hashes of every tensor; 0: none.
    pub digest_every: u64,
    /// Measured peak of the run's cores, GFLOP/s.
    pub peak_gflops: f64,
    /// The rank's cores; empty: the system places it.
    pub cores: Vec<usize>,
    /// Asks for a stop after the step under way.
    pub stop: Arc<AtomicBool>,
    /// Where progress is shown.
    pub pulse: Arc<Pulse>,
    /// Which steps are profiled, if any.
    pub profiling: Option<Profiling>,
    /// Faults to come, of this rank.
    pub faults: Vec<Fault>,
    /// A deliberate fault, that a proof must catch.
    pub mutant: Option<Mutant>,
    /// The first steps, as many as lie between two checks (`guard.recompute_every`, at least one), are checked by other ranks.
    pub recheck: bool,
    /// Where steps are checked: the last one before this world that was.
    pub checked: Option<u64>,
    /// The first step that nobody can check any more, if there is one.
    pub unseen: Option<u64>,
}

/// Runs the rank behind `endpoint`; rank 0 speaks for the run, all ranks report their own end.
///
/// # Errors
/// Divergence, a broken fabric, a checkpoint that cannot be read, or (at the end) written; with what the rank holds then.
pub fn run(job: &Job, endpoint: Endpoint, start: Start, sink: &dyn Fn(Said)) -> Result<Ended, Ending> {
    let rank = endpoint.rank() as usize;
    sink(Said::Event(Event::RankStarted { rank, pid: std::process::id() }));
    let ctx = pinned(job, rank, sink);
    let began = Instant::now();
    let base_bytes = status_bytes("VmRSS:");
    let make = if matches!(start, Start::Fresh) { Executor::new } else { Executor::empty };
    let mut executor = make(&job.run, &ctx, endpoint, job.stop.clone());
    let own = job.checkpoints.parent().unwrap_or(&job.checkpoints);
    executor.offload(job.run.layout.offload_folder.as_deref().unwrap_or(own))?;
    executor.mutant = job.mutant;
    executor.definition = job.data.definition(&job.run);
    executor.pulse = job.pulse.clone();
    executor.guarded = job.run.guard.hash_state;
    executor.checked = job.checked;
    executor.unseen = job.unseen;
    executor.faults = Faults::new(job.faults.clone(), sink);
    executor.faults.skips = job.run.train.skip.clone();
    let loaded = begin::load(job, &mut executor, start)?;
    job.pulse.step.store(loaded.step, Ordering::Relaxed);
    sink(Said::Loaded { step: loaded.step, bytes: loaded.bytes, seconds: began.elapsed().as_secs_f64() });
    let train = program::lower(&job.run, rank, Mode::Train);
    job.pulse.footprint.enter(base_bytes, plan(&job.run, &train).total());
    let recorder = |p: &Profiling| Recorder::new(rank, (p.last - p.first + 1) as usize, train.instrs.len());
    executor.recorder = job.profiling.as_ref().map(recorder);
    let mut rank_run = RankRun {
        job,
        speaks: rank == 0,
        train,
        eval: program::lower(&job.run, rank, Mode::Eval),
        executor,
        sink,
        time: vec![("setup".into(), began.elapsed().as_secs_f64())],
        own_work: work::OwnWork::default(),
        saver: Saver::new(&job.run, rank, &job.checkpoints, loaded.step),
        failed_checkpoint: None,
        best: loaded.best,
        best_at_step: loaded.best,
        step: loaded.step,
        began,
        took_s: 0.0,
        from_peers: loaded.from_peers,
        clock: Watcher::new(job.pulse.wall.clone()),
        recheck_at: None,
        recheck_until: if job.recheck { loaded.step + job.run.guard.recompute_every.max(1) } else { 0 },
        stops: false,
        open_at: loaded.open.then_some(loaded.step),
    };
    rank_run.saver.open_store(&job.run)?;
    if job.run.guard.recompute_every > 0 && job.run.layout.dp == job.run.layout.group {
        let text = "guard.recompute_every: no other rank has this state (layout.dp = 1), so each rank computes its own gradients again: \
                    a fault that repeats itself is not seen";
        rank_run.say(Event::Notice { text: text.into() });
    }
    match rank_run.steps(&loaded) {
        Ok(ended) => {
            rank_run.hand_over_spans();
            rank_run.finish();
            Ok(ended)
        }
        Err(error) => {
            // What is on disk by now is there to go back to.
            rank_run.tell_of_checkpoints();
            Err(Ending { remains: Some(Box::new(rank_run.remains())), error })
        }
    }
}

/// Keeps this rank, and each thread of its team, to its cores.
fn pinned(job: &Job, rank: usize, sink: &dyn Fn(Said)) -> Ctx {
    let (simd, threads) = (job.simd, job.run.layout.threads);
    if job.cores.is_empty() {
        return Ctx::new(simd, threads);
    }
    let cores = job.cores.clone();
    if let Err(e) = pin::hold(&cores) {
        let text = format!("rank {rank} could not be held on {}: {e}; it runs unpinned", pin::named(&cores));
        sink(Said::Event(Event::Notice { text }));
        return Ctx::new(simd, threads);
    }
    // A thread that cannot be held runs on the rank's cores, which it inherits.
    Ctx::with_start(simd, threads, move |thread| drop(pin::hold(pin::of_thread(&cores, threads, thread))))
}

struct RankRun<'a> {
    job: &'a Job,
    speaks: bool,
    train: Program,
    eval: Program,
    executor: Executor<'a>,
    sink: &'a dyn Fn(Said),
    time: Vec<(String, f64)>,
    own_work: work::OwnWork,
    saver: Saver,
    /// Why the last try of a checkpoint failed, if it did.
    failed_checkpoint: Option<String>,
    best: Best,
    /// `best` before what follows the last step.
    best_at_step: Best,
    /// The last step whose update is whole.
    step: u64,
    /// When the last step was begun.
    began: Instant,
    /// Seconds that the last whole step took.
    took_s: f64,
    from_peers: bool,
    /// Sees the wall clock jump.
    clock: Watcher,
    /// The step that is checked in any case.
    recheck_at: Option<u64>,
    /// Up to this step all are checked.
    recheck_until: u64,
    /// A stop was asked for and waits for a step that is checked.
    stops: bool,
    /// The step whose checkpoint an earlier world may have written.
    open_at: Option<u64>,
}

impl RankRun<'_> {
    fn say(&self, event: Event) {
        if self.speaks {
            (self.sink)(Said::Event(event));
        }
    }

    /// What there is after an error. A rank that saw a vote has applied it: no exchange comes between.
    fn remains(&mut self) -> Remains {
        let executor = &mut self.executor;
        executor.settle();
        // A pass that only asks for another one has decided nothing about the step.
        let decided = executor.verdict.take().filter(|verdict| verdict.decision.commit);
        let voted = decided.as_ref().map_or(0, |verdict| verdict.step);
        let step = self.step.max(voted);
        if let Some((verdict, voted)) = decided.as_ref().zip(executor.voted) {
            // Who was to tell it may be gone.
            let took = voted.saturating_duration_since(self.began).as_secs_f64();
            let seconds = if verdict.step > self.step { took } else { self.took_s };
            (self.sink)(Said::Carried(self.told(verdict.step, &verdict.decision, seconds)));
        }
        let executor = &mut self.executor;
        let corrupt = executor.guard.check(executor.ctx, executor.states(), executor.chunks.len());
        Remains {
            generation: 0,
            // State of peers has come to all or to none; else the first vote says that all have theirs.
            settled: self.from_peers || voted > 0,
            before: None,
            corrupt,
            guard: std::mem::take(&mut executor.guard),
            rank: executor.place.rank,
            chunks: std::mem::take(&mut executor.chunks),
            mirrors: executor.mirrors.take(),
            prepared: executor.prepared == Some(step + 1),
            step,
            decided,
            best: if step == self.step { self.best_at_step } else { self.best },
        }
    }

    fn spent(&mut self, class: &str, began: Instant) {
        let seconds = began.elapsed().as_secs_f64();
        match self.time.iter_mut().find(|(name, _)| name == class) {
            Some((_, sum)) => *sum += seconds,
            None => self.time.push((class.into(), seconds)),
        }
    }

    fn steps(&mut self, from: &begin::Loaded) -> Result<Ended, TrainError> {
        let run = &self.job.run;
        let steps = run.train.steps;
        let mut ended = Ended::Finished;
        // What follows a step is done again where a world ended before all of it was done.
        let first = if from.open { from.step } else { from.step + 1 };
        let (mut saved, mut last) = (first - 1, from.step);
        for step in first..=steps {
            let stop = if step > from.step {
                if self.best.exhausted(run.train.patience) {
                    ended = Ended::Exhausted(last);
                    break;
                }
                let checked = self.checks(step);
                let asked = self.step(step)?;
                last = step;
                (self.step, self.best_at_step) = (step, self.best);
                self.job.pulse.step.store(step, Ordering::Relaxed);
                self.stops_after(step, asked, checked)
            } else {
                self.stops_after(step, from.stop, false)
            };
            if self.job.profiling.as_ref().is_some_and(|p| p.last == step) {
                self.hand_over_spans();
            }
            let due = |n: u64| n > 0 && step % n == 0;
            let better = (due(run.train.eval_every) || step == steps) && self.validate(step)?;
            if due(run.train.sample.every) {
                self.sample(step)?;
            }
            if due(self.job.digest_every) {
                self.hashes(step)?;
            }
            let save = self.failed_checkpoint.is_some() || self.saver.due(step) || (better && run.checkpoint.best);
            if save && step < steps && !stop {
                if self.checkpoint_due(step)? {
                    saved = step;
                }
                // The step after it can be computed again from it.
                self.executor.watch = (run.spares_check() == Ok(true)).then(BTreeMap::new);
            }
            self.tell_of_checkpoints();
            if stop && step < steps {
                ended = Ended::Stopped(step);
                break;
            }
        }
        saved = saved.max(self.drain()?);
        if saved < last {
            self.last_checkpoint(last)?;
        }
        self.end_store()?;
        self.tell_of_checkpoints();
        let began = Instant::now();
        let digest = persist::digest(&mut self.executor, run.cursor(last))?;
        self.spent("digest", began);
        let told = Event::Digest { step: last, digest: digest.to_string(), numerics_version: NUMERICS_VERSION };
        (self.sink)(if self.speaks { Said::Event(told) } else { Said::Digest(told) });
        // Nobody waits for this rank any more.
        self.saver.room_is_made();
        Ok(ended)
    }

    /// Other ranks check the gradients of `step`. All that may be the run's last are among them: what it leaves behind was checked.
    fn checks(&self, step: u64) -> bool {
        let (train, every) = (&self.job.run.train, self.job.run.guard.recompute_every);
        let validates = train.eval_every > 0 && step.is_multiple_of(train.eval_every);
        let may_end = validates && train.patience > 0 && self.best.since + 1 >= train.patience;
        let due = every > 0 && (step.is_multiple_of(every) || step == train.steps || may_end);
        due || self.recheck_at == Some(step) || step <= self.recheck_until
    }

    /// Whether the run stops after `step`, if that was `asked` for. After one that nobody checked it takes one more, which is checked.
    /// All ranks come to the same, by the vote.
    fn stops_after(&mut self, step: u64, asked: bool, checked: bool) -> bool {
        self.stops |= asked;
        let waits = self.stops && !checked && self.job.run.guard.recompute_every > 1;
        if waits {
            self.recheck_at = Some(step + 1);
        }
        self.stops && !waits
    }

    /// One training step; true if a stop was asked for.
    fn step(&mut self, step: u64) -> Result<bool, TrainError> {
        let run = &self.job.run;
        let began = Instant::now();
        self.began = began;
        let first = run.first_sequence(step);
        let load = |unit: Unit| {
            let sequences = run.grid.sequences(mutant::unit(self.job.mutant, &run.grid, unit));
            let loaded = corpus::read(&self.job.data.main, Split::Train, sequences.map(|i| first + i as u64))?;
            Ok(mutant::tokens(self.job.mutant, run.train.seq, loaded))
        };
        let profiled = self.job.profiling.as_ref().is_some_and(|p| (p.first..=p.last).contains(&step));
        let waited_ns = self.executor.comm.endpoint.waited_ns();
        self.own_work.begin(&self.executor.comm.endpoint);
        if let Some(recorder) = self.executor.recorder.as_mut().filter(|_| profiled) {
            recorder.begin(step, began, waited_ns);
        }
        let train = &self.train;
        let run_once = |executor: &mut Executor| match executor.run(train, Mode::Train, step, &load)? {
            Outcome::Step(decision) => Ok(decision),
            Outcome::Eval(_) => Err(TrainError::Internal("a training program gave no decision".into())),
        };
        let checked = self.checks(step);
        self.executor.recheck =
            if checked { Recheck::first(leaves::shifts(&run.grid, &run.layout)) } else { Recheck::default() };
        self.executor.writer = self.saver.due(step).then(|| self.saver.word(run));
        let mut decision = run_once(&mut self.executor)?;
        while self.executor.recheck.again() && decision.finite {
            decision = run_once(&mut self.executor)?;
        }
        let check = std::mem::take(&mut self.executor.recheck);
        if let Some(ranks) = check.broken().filter(|_| decision.finite) {
            self.saver.void();
            return Err(TrainError::Broken { step, ranks: ranks.to_vec() });
        }
        let agreed = checked && decision.finite && check.judged.agree;
        let wrong = &check.judged.wrong;
        if !wrong.is_empty() {
            let reason = format!("the gradients of ranks {wrong:?} came out differently when they were computed again");
            self.say(Event::Replayed { step, reason });
        }
        if !decision.finite {
            // Nothing was applied. A fault of a machine does not come twice with the same bits.
            let (loss, norm) = (decision.loss, decision.grad_norm);
            decision = run_once(&mut self.executor)?;
            let bits = |loss: f64, norm: f64| (loss.to_bits(), norm.to_bits());
            let same = bits(loss, norm) == bits(decision.loss, decision.grad_norm);
            let came = if same { "the same came of it" } else { "it came out otherwise" };
            let reason = format!("loss {loss}, gradient norm {norm}; {came}");
            self.say(Event::Replayed { step, reason });
        }
        if let Some(recorder) = &mut self.executor.recorder {
            recorder.end(Instant::now());
        }
        if !decision.finite {
            return Err(TrainError::Diverged { step, loss: decision.loss, norm: decision.grad_norm });
        }
        if agreed && run.layout.dp > run.layout.group {
            self.executor.checked = Some(step);
        }
        self.spent("train", began);
        let seconds = began.elapsed().as_secs_f64();
        self.saver.stepped(seconds);
        if let Some(work) = self.own_work.end(&self.executor, step, seconds) {
            (self.sink)(Said::Event(Event::Work(work)));
        }
        self.took_s = seconds;
        if let Some(seconds) = self.clock.look() {
            (self.sink)(Said::Event(Event::ClockJumped { rank: Some(self.executor.place.rank), seconds }));
        }
        self.say(Event::Step(self.told(step, &decision, seconds)));
        if let Some(made) = self.executor.watch.take() {
            (self.sink)(Said::Leaves { step, leaves: made.into_iter().collect() });
        }
        Ok(decision.stop)
    }

    /// What is told of a step that was decided and took so long.
    fn told(&self, step: u64, decision: &Decision, seconds: f64) -> Step {
        let run = &self.job.run;
        let tokens = run.tokens_per_step() as u64;
        let rate = tokens as f64 / seconds;
        let flops = rate * run.model.flops_per_token(run.train.seq);
        let aux = run.model.moe.as_ref().filter(|moe| moe.aux_loss > 0.0).map(|_| decision.aux);
        Step {
            step,
            steps: run.train.steps,
            loss: decision.loss,
            targets: Some(decision.targets),
            grad_norm: decision.grad_norm,
            lr: learning_rate(&run.train, step),
            tokens,
            seconds,
            tokens_per_s: rate,
            tokens_per_s_rank: rate / run.layout.world() as f64,
            mfu: flops / (self.job.peak_gflops * 1e9),
            experts: expert_load(&self.executor.loads, self.executor.copies, tokens, aux),
        }
    }

    /// Writes down what was recorded; the parent waits for it. From then on nothing is recorded.
    fn hand_over_spans(&mut self) {
        let (Some(recorder), Some(profiling)) = (self.executor.recorder.take(), &self.job.profiling) else { return };
        let record = recorder.finish();
        let (rank, steps) = (record.rank, record.steps.len() as u64);
        if steps == 0 {
            return;
        }
        let path = profiling.path(rank);
        (self.sink)(Said::Event(match write_record(&record, &path) {
            Ok(()) => Event::SpansRecorded { rank, path: path.display().to_string(), steps },
            // A profile is no reason to stop training.
            Err(e) => Event::Notice { text: format!("no profile of rank {rank}: {e}") },
        }));
    }

    /// Validates on every held-out set; true if the first was the best so far, which all ranks see alike.
    fn validate(&mut self, step: u64) -> Result<bool, TrainError> {
        let data = self.job.data.clone();
        let began = Instant::now();
        let mut best = false;
        let sets = data.sets.iter().map(|(name, set)| (Some(name.clone()), set));
        for (name, set) in std::iter::once((None, &data.main)).chain(sets) {
            let sum = self.held_out(step, set)?;
            if sum.tokens == 0 {
                continue;
            }
            let loss = sum.nats / sum.tokens as f64;
            let better = name.is_none() && self.best.observe(step, loss);
            best |= better;
            let bits_per_byte = sum.bits_per_byte(set.knows_bytes(Split::Validation));
            let (tokens, kept) = (sum.tokens, better && self.job.run.checkpoint.best);
            self.say(Event::Validation { step, set: name, loss, bits_per_byte, tokens, best: better, kept });
        }
        self.spent("validation", began);
        Ok(best)
    }

    /// Loss over the first `train.eval_sequences` held-out sequences of `set`, of which there may be none.
    fn held_out(&mut self, step: u64, set: &Dataset) -> Result<LossSum, TrainError> {
        let run = &self.job.run;
        let wanted = (run.train.eval_sequences as u64).min(set.sequences(Split::Validation));
        let batch = run.grid.batch() as u64;
        let mut total = LossSum::default();
        for round in 0..wanted.div_ceil(batch) {
            let load = |unit: Unit| {
                let indices = run.grid.sequences(unit).map(|i| round * batch + i as u64);
                corpus::read_first(set, Split::Validation, wanted, indices)
            };
            let Outcome::Eval(sum) = self.executor.run(&self.eval, Mode::Eval, step, &load)? else {
                return Err(TrainError::Internal("a validation program gave no loss".into()));
            };
            total.add(&sum);
        }
        Ok(total)
    }

    fn sample(&mut self, step: u64) -> Result<(), TrainError> {
        let began = Instant::now();
        let config = &self.job.run.train.sample;
        let draw = Sampling { temperature: config.temperature, top_k: config.top_k, seed: step };
        let Some(speech) = &self.job.data.speech else { return Ok(()) };
        let text = self.executor.write_text(&self.eval, speech, &config.prompt, config.tokens, draw)?;
        self.spent("sample", began);
        self.say(Event::Sample { step, text });
        Ok(())
    }

    fn hashes(&mut self, step: u64) -> Result<(), TrainError> {
        let began = Instant::now();
        let digest = persist::digest(&mut self.executor, self.job.run.cursor(step))?;
        let name = |t: &checkpoint::TensorDigest| (format!("{}/{}", t.name, t.kind), t.hash.to_hex().to_string());
        let hashes = digest.tensors.iter().map(name).collect();
        self.spent("digest", began);
        self.say(Event::TensorHashes { step, hashes });
        Ok(())
    }

    fn finish(&self) {
        let counts = &self.executor.counts;
        let mut traffic: Vec<_> = Vec::new();
        for ((group, operation), count) in &self.executor.comm.endpoint.counters().rows {
            if count.bytes_sent() + count.bytes_received() > 0 {
                traffic.push((format!("{group} {operation}"), count.calls, count.bytes_sent()));
            }
            if count.inter_bytes_sent > 0 {
                traffic.push((format!("{group} {operation} between hosts"), count.calls, count.inter_bytes_sent));
            }
        }
        let mut time = self.time.clone();
        time.push(("compute".into(), counts.compute.as_secs_f64()));
        time.push(("exchange".into(), counts.exchange.as_secs_f64()));
        time.push(("guard".into(), counts.guard.as_secs_f64()));
        // Threads of one process have no resident memory of their own.
        let shared = self.job.run.layout.transport == Transport::Threads && self.job.run.layout.world() > 1;
        let (base_bytes, planned_bytes, worlds) = self.job.pulse.footprint.so_far();
        let bytes = |of: fn(&ChunkState) -> usize| 4 * self.executor.chunks.values().map(of).sum::<usize>() as u64;
        (self.sink)(Said::Event(Event::RankFinished(RankReport {
            rank: self.executor.place.rank,
            peak_bytes: status_bytes("VmHWM:"),
            base_bytes,
            planned_bytes: if shared { 0 } else { planned_bytes },
            worlds,
            instructions: counts.instructions,
            units: counts.units,
            leaves_checked: counts.leaves_checked,
            peak_kept: counts.peak_kept,
            state_bytes: bytes(ChunkState::resident),
            gathered_bytes: bytes(|state| state.gathered.peak),
            leaves_bytes: bytes(|state| state.grads.alive.peak),
            buffers_bytes: self.executor.buffers_bytes(),
            traffic,
            time,
        })));
    }
}

/// The memory that the rank of `program` is planned to take.
pub fn plan(run: &Run, program: &Program) -> Plan {
    let ring = match run.layout.transport {
        Transport::Shm => fabric_options(run, 0).ring_bytes as u64,
        Transport::Tcp | Transport::Threads => 0,
    };
    let plan = Plan::new(&run.model, &run.grid, &run.layout, run.train.seq, program, ring);
    let often = run.checkpoint.every.unwrap_or(saver::FIRST);
    let beside = run.checkpoint.background && !run.layout.offload.optimizer() && (1..run.train.steps).contains(&often);
    let scratch = kernels::scratch_bytes(plan.scratch, run.layout.threads);
    Plan { copy: if beside { plan.copy } else { 0 }, scratch, at_work: AT_WORK_BYTES, ..plan }
}

/// A line of the process's status: `VmHWM:` is its largest resident memory so far, `VmRSS:` what is resident now. In bytes; 0
/// where the system does not tell.
fn status_bytes(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

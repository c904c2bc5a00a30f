//! Starts the ranks of a run, listens to them, and ends them: one machine, threads or processes.
//!
//! The parent is not in the data path. It checks everything first, writes nothing before that,
//! and hands every event to the caller.

mod flight;
mod folder;
mod guided;
mod hosts;
mod offload;
mod profile;
mod record;
pub mod reload;
mod resume;
mod survey;
mod threads;
mod watch;
pub mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use checkpoint::hf::HfFolder;
use control::inject::Injection;
use data::Split;
use events::{Anatomy, Event, RankReport};
use kernels::Simd;
use observe::goodput::Account;
use program::bytes::Sizes;
use program::{Mirrors, Mode, check};
use spec::{Run, StoreUrl, Transport};

pub use folder::RunFolder;
pub(crate) use guided::StateLaws;
pub use hosts::Hosts;
pub use profile::{Profiling, Window};
pub use record::with_course;

pub(crate) use profile::write as write_record;

use crate::corpus::Corpus;
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::persist;
use crate::pin;
use crate::rank::Ended;
use profile::Profiler;
use resume::Went;
use threads::ThreadRanks;
use watch::Watch;

/// How often the parent looks whether it was asked to stop.
const POLL: Duration = Duration::from_millis(20);
/// How long ranks may take to end after one of them failed, before they are ended.
const GRACE: Duration = Duration::from_secs(3);

/// Which checkpoint a run goes on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resuming {
    /// None: it begins.
    No,
    /// The newest good one. Where a run checks steps and nobody has checked the last ones in it, the first step is checked.
    Newest,
    /// The newest one of which all steps were checked.
    Checked,
}

/// What to run.
pub struct Request {
    /// The validated run.
    pub run: Run,
    /// Instruction path of the kernels.
    pub simd: Simd,
    /// The run's folder.
    pub folder: PathBuf,
    /// Go on from a checkpoint in it.
    pub resume: Resuming,
    /// Steps between hashes of every tensor; 0: none.
    pub digest_every: u64,
    /// Which steps to profile, if any.
    pub profile: Option<Window>,
    /// Set by a signal handler: stop after the step under way, with a checkpoint.
    pub stop: Arc<AtomicBool>,
    /// The binary that runs a rank when called with [`wire::RANK_COMMAND`].
    pub program: PathBuf,
    /// Deliberate faults, as [`control::inject`] reads them; empty: none.
    pub inject: String,
    /// Ranks run where agents call from; none: on this machine.
    pub hosts: Option<Hosts>,
}

/// How a run ended.
#[derive(Debug, Clone)]
pub struct Summary {
    /// Finished, or stopped on request.
    pub ended: Ended,
    /// The last committed step.
    pub step: u64,
    /// The digest, 64 hex digits.
    pub digest: String,
    /// What each rank counted, by rank.
    pub ranks: Vec<RankReport>,
    /// Loss of the last step, nats per token.
    pub loss: Option<f64>,
    /// Loss of the last validation, bits per byte.
    pub bits_per_byte: Option<f64>,
    /// Class and seconds; together the wall time.
    pub time: Vec<(String, f64)>,
    /// Seconds from the request to the end.
    pub wall: f64,
    /// What recoveries took.
    pub recoveries: Vec<Anatomy>,
    /// Steps that spares have computed again, and leaves of them.
    pub checked_by_spares: (u64, u64),
}

/// Checks the data, the program and the folder, then trains; `observe` sees every event.
///
/// # Errors
/// Bad input before anything was written; afterwards what ended the run.
pub fn train(request: &Request, observe: &mut dyn FnMut(&Event)) -> Result<Summary, TrainError> {
    train_mutant(request, None, observe)
}

/// [`train`] with a deliberate fault, that a proof must catch.
///
/// # Errors
/// As [`train`].
pub fn train_mutant(
    request: &Request,
    mutant: Option<Mutant>,
    observe: &mut dyn FnMut(&Event),
) -> Result<Summary, TrainError> {
    let mut began = Instant::now();
    let run = &request.run;
    // A controller that stands by is called by nobody yet.
    let mut listener = None;
    if let Some(hosts) = &request.hosts {
        hosts.check(run)?;
        listener = (!hosts.standby).then(|| hosts.bind()).transpose()?;
    }
    let data = Arc::new(Corpus::open(run)?);
    prove(run)?;
    let mut notes = data.main.describe();
    for (name, set) in &data.sets {
        let (documents, sequences) = (set.documents(Split::Validation), set.sequences(Split::Validation));
        notes.push(format!("data: validation set {name}: {documents} documents, {sequences} sequences"));
    }
    if let Some(from) = &run.from {
        let weights = HfFolder::open(from, &run.model)?;
        weights.check_finite()?;
        notes.push(format!("weights of {} ({} files)", from.display(), weights.files()));
        notes.extend(weights.notes().iter().cloned());
        notes.extend(spec::hf::HfConfig::read(&from.join(checkpoint::hf::CONFIG))?.notes);
    }
    let injection = Injection::parse(&request.inject).map_err(TrainError::BadInput)?;
    let folder = RunFolder::new(&request.folder);
    folder.check()?;
    let mut lease = None;
    let mut lock = match &request.hosts {
        Some(hosts) => {
            let seized = hosts::seize(hosts, &folder, &request.stop, observe).map_err(|e| folder.unusable(e))?;
            let (lock, held) = seized.unzip();
            lease = held;
            listener = listener.map_or_else(|| hosts.bind().map(Some), |listener| Ok(Some(listener)))?;
            lock.map_or_else(|| folder.lock_if_there(), |lock| Ok(Some(lock)))?
        }
        None => folder.lock_if_there()?,
    };
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let earlier = match request.hosts {
        Some(_) => hosts::earlier(&folder, run, cores)?,
        None => None,
    };
    let (resume, mut known, damaged, unchecked, distrusts, went) = match &earlier {
        Some(earlier) => {
            began = earlier.began;
            let text = format!("going on where the controller before was, by {}", folder.journal().display());
            let went = Went { run: earlier.run.clone(), untold: Vec::new() };
            (earlier.from.clone(), vec![text], Vec::new(), earlier.unchecked.clone(), false, went)
        }
        None => {
            let found = folder.resume_point(run, &data.definition(run), request.resume, cores)?;
            let checkpoint = found.checkpoint.map(|checkpoint| (checkpoint.meta().step, checkpoint.path().to_owned()));
            (checkpoint, found.notes, found.damaged, found.unchecked, found.distrusts, found.went)
        }
    };
    // With what was changed in it, as far as it went.
    let run = &went.run;
    let done = resume.as_ref().map_or(0, |(step, _)| *step);
    let profiling = request.profile.map(|window| Profiling::new(window, run, done, folder.traces())).transpose()?;
    injection.check(run, done).map_err(TrainError::BadInput)?;
    if let Some(StoreUrl::Folder(store)) = &run.checkpoint.store {
        std::fs::create_dir_all(store).map_err(|e| {
            let store = store.display();
            TrainError::BadInput(format!(
                "checkpoint.store: the folder {store} cannot be made ({e}); name one that can"
            ))
        })?;
    }
    offload::check(run, folder.path())?;
    let fresh = lock.is_none() && !folder.path().exists();
    if lock.is_none() {
        lock = Some(folder.lock().map_err(|e| folder.unusable(e))?);
    }
    let begun = match &earlier {
        Some(_) => folder.log().map(|log| (log, Vec::new())),
        None => folder.create(run, &damaged),
    };
    let traced = |begun| profiling.as_ref().map_or(Ok(()), Profiling::create).map(|()| begun);
    let (mut log, set_aside) = begun.and_then(traced).map_err(|e| {
        if fresh {
            // Nobody else is in it: it is locked. What is left would be taken for a run.
            drop(std::fs::remove_dir_all(folder.path()));
        }
        folder.unusable(e)
    })?;
    for intervention in &went.untold {
        folder.intervene(intervention).map_err(TrainError::BadInput)?;
    }
    log.count_from(began);
    known.extend(set_aside);
    if let Some(text) = persist::mend_held(&folder.checkpoints()) {
        known.push(text);
    }
    if earlier.is_none() && persist::checked(&folder.checkpoints()).is_some_and(|step| step > done) {
        // It was noted of steps that are made again.
        persist::hold(&folder.checkpoints(), &[], None);
    }
    if distrusts {
        // Nobody goes on from them later, when this run has written older ones.
        known.extend(guided::distrust(&folder.checkpoints(), run, done));
    }
    let mut watch = Watch::new(began);
    let mut collected = Collected::default();
    for (at, event) in earlier.iter().flat_map(|earlier| &earlier.events) {
        watch.recall(*at, event);
        collected.take(event);
    }
    let mut observe = |event: &Event| {
        for event in watch.take(event) {
            for event in log.write(&event).iter().chain([&event]) {
                observe(event);
            }
        }
    };
    if let Some(mutant) = mutant {
        observe(&Event::Notice { text: format!("DELIBERATELY WRONG: {}", mutant.what()) });
    }
    known.extend(notes);
    for text in known {
        observe(&Event::Notice { text });
    }
    if run.layout.world() == 1 {
        let text = "one rank: its state has no mirror, checkpoints on disk alone protect it".into();
        observe(&Event::Notice { text });
    }
    if run.checkpoint.every == Some(0) {
        let text = format!(
            "checkpoint.every = 0: no checkpoint is written on the way; a failure that takes the state with all its holders sets the run back to step {done}"
        );
        observe(&Event::Notice { text });
    }
    if let Err(why) = run.spares_check() {
        let text = format!("guard.spares_check: spares check their device only, and no gradients of the ranks: {why}");
        observe(&Event::Notice { text });
    }
    if let Some(text) = mirror_sentence(run) {
        observe(&Event::Notice { text });
    }
    let _lock = lock;
    let (allowed, world) = (pin::allowed(), run.layout.world());
    if request.hosts.is_none() {
        observe(&Event::Notice { text: pin::sentence(run.layout.pin, &allowed, world) });
    }
    let busy = (world * run.layout.threads).min(cores);
    let peak_gflops = kernels::measure_peak(request.simd, busy);
    let mut profiler = profiling.map(|profiling| {
        let bandwidth_gb_s = kernels::measure_bandwidth(busy);
        let (profiler, text) = Profiler::new(run, profiling, peak_gflops / world as f64, bandwidth_gb_s / world as f64);
        observe(&Event::Notice { text });
        profiler
    });
    let pins = pin::shares(run.layout.pin, &allowed, world).unwrap_or_default();
    let job = wire::JobSpec {
        name: folder.path().join("run.toml").display().to_string(),
        run_toml: earlier.as_ref().map_or(run, |earlier| &earlier.run).values.to_toml(),
        known: data.known(),
        cores,
        simd: request.simd.to_string(),
        checkpoints: folder.checkpoints(),
        digest_every: request.digest_every,
        peak_gflops,
        profiling: profiler.as_ref().map(|profiler| profiler.profiling().clone()),
        mutant,
    };
    let mut hear = |event: &Event| {
        observe(event);
        profiler.iter_mut().flat_map(|profiler| profiler.take(event)).for_each(|event| observe(&event));
    };
    let threads = world == 1 || run.layout.transport == Transport::Threads;
    let ended = if threads && request.hosts.is_none() {
        let cores = |rank: usize| pins.get(rank).cloned().unwrap_or_default();
        let part = |rank: usize| wire::Part {
            run_toml: run.values.to_toml(),
            cores: cores(rank),
            faults: Vec::new(),
            recheck: false,
            checked: None,
            unseen: None,
        };
        let from = resume.map(|(_, path)| path);
        let started = threads::start(run, &job, &part, from, data, request.stop.clone());
        started.and_then(|mut ranks| collected.listen(&mut ranks, &mut hear))
    } else {
        let own = data.identity(run);
        drop(data);
        let identity = earlier.as_ref().and_then(|earlier| earlier.identity.clone()).unwrap_or_else(|| own.clone());
        let differ = identity.differences(&own);
        if !differ.is_empty() {
            let text = format!(
                "this controller's own data or numbers are not those of the run at work, whose processes are judged by what the run began \
                 with: {}",
                differ.join(", ")
            );
            hear(&Event::Notice { text });
        }
        let guided = guided::Guided {
            request,
            run,
            folder: &folder,
            job: &job,
            identity,
            from: resume,
            unchecked,
            injection,
            began,
            listener,
            lease,
            earlier,
        };
        guided::supervise(guided, &mut |event| {
            collected.take(event);
            hear(event);
        })
    };
    profiler.iter().filter_map(Profiler::ended).for_each(|event| observe(&event));
    let summary = ended.and_then(|ended| collected.summary(ended, &watch.account()));
    let summary = summary.map_err(|e| folder.advise(e.of_begun()));
    if matches!(&summary, Err(TrainError::Deposed(_))) {
        // The summary is another one's.
        return summary;
    }
    if request.hosts.is_none() || summary.is_ok() {
        // All ranks have ended: nobody writes on with what their attempts left.
        checkpoint::sweep(&folder.checkpoints());
    }
    if let Err(e) = folder.write_summary(run, &summary) {
        // The state is saved, or the reason why it is not is about to be told.
        folder::complain(&e.to_string());
    }
    summary
}

/// What a person is told of mirrors, and their price.
fn mirror_sentence(run: &Run) -> Option<String> {
    let layout = &run.layout;
    let mirrors = Mirrors::of(layout)?;
    let sizes = Sizes::new(&run.model, &run.grid, layout, run.train.seq);
    // Parameters and two moments, each as large as the gradient that is sent.
    let sent = (0..layout.world()).map(|rank| sizes.mirror_grads(layout.coords(rank))).max().unwrap_or(0);
    Some(format!(
        "mirrors: the state that rank 0 alone would have is kept by rank {}, too, and so on; up to {:.1} MB a rank, {:.1} MB sent a step (layout.mirror)",
        mirrors.mirror(layout, 0),
        3.0 * sent as f64 / 1e6,
        sent as f64 / 1e6
    ))
}

/// Lowers the run for all ranks and checks the lists.
///
/// # Errors
/// [`TrainError::Program`] with every violation.
pub fn prove(run: &Run) -> Result<check::Report, TrainError> {
    let refused = |violations: Vec<check::Violation>| TrainError::Program {
        layout: run.layout.to_string(),
        violations: violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
    };
    let verdict = |mode| {
        let Run { model, grid, layout, train, .. } = run;
        let lowering = program::lower::Lowering::new(model, grid, layout, train.seq, mode);
        check::check_alike(model, grid, layout, train.seq, mode, |rank| lowering.rank(rank)).map_err(refused)
    };
    verdict(Mode::Eval)?;
    verdict(Mode::Train)
}

/// What the parent hears from the ranks.
pub(crate) enum News {
    /// An event of a rank.
    Event(Event),
    /// A rank is done.
    Ended(usize, Result<Ended, Failure>),
}

/// Why a rank failed, as far as it could say.
pub(crate) struct Failure {
    /// Exit code that fits.
    pub code: i32,
    /// Its words, or its exit status.
    pub reason: String,
    /// It died without a word: most likely the cause and not a consequence.
    pub silent: bool,
}

#[derive(Default)]
struct Collected {
    digest: Option<(u64, String)>,
    loss: Option<f64>,
    bits_per_byte: Option<f64>,
    reports: Vec<RankReport>,
    recoveries: Vec<Anatomy>,
    checked_by_spares: (u64, u64),
}

impl Collected {
    fn listen(&mut self, ranks: &mut ThreadRanks, observe: &mut dyn FnMut(&Event)) -> Result<Ended, TrainError> {
        let mut left = ranks.count();
        let mut ended = Ended::Finished;
        let mut failures: Vec<(usize, Failure)> = Vec::new();
        let mut deadline: Option<Instant> = None;
        let mut ending = false;
        while left > 0 {
            match ranks.news().recv_timeout(POLL) {
                Ok(News::Event(event)) => {
                    self.take(&event);
                    observe(&event);
                }
                Ok(News::Ended(_, Ok(how))) => {
                    ended = how;
                    left -= 1;
                }
                Ok(News::Ended(rank, Err(mut failure))) => {
                    if ending && failure.silent {
                        // It is not the cause.
                        failure.silent = false;
                        failure.reason = "it did not end after another rank failed, and was ended".into();
                    }
                    let event = Event::Failed { rank, code: failure.code, reason: failure.reason.clone() };
                    observe(&event);
                    failures.push((rank, failure));
                    left -= 1;
                    deadline.get_or_insert_with(|| Instant::now() + GRACE);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if !ending && deadline.is_some_and(|d| Instant::now() > d) {
                ending = true;
                ranks.end();
            }
        }
        match cause(failures) {
            None => Ok(ended),
            Some((_, failure)) if failure.code != 70 => {
                Err(TrainError::Rank { code: failure.code, reason: failure.reason })
            }
            Some((rank, failure)) => Err(TrainError::RankDied { rank, reason: failure.reason }),
        }
    }

    fn take(&mut self, event: &Event) {
        match event {
            // The mean over nothing is no loss.
            Event::Step(step) => self.loss = (step.targets != Some(0)).then_some(step.loss),
            Event::Validation { bits_per_byte, .. } => self.bits_per_byte = *bits_per_byte,
            Event::Digest { step, digest, .. } => self.digest = Some((*step, digest.clone())),
            Event::RankFinished(report) => self.reports.push(report.clone()),
            Event::Checked { leaves, .. } => {
                self.checked_by_spares = (self.checked_by_spares.0 + 1, self.checked_by_spares.1 + leaves);
            }
            Event::Recovery(anatomy) => self.recoveries.push(anatomy.as_ref().clone()),
            _ => {}
        }
    }

    fn summary(&mut self, ended: Ended, account: &Account) -> Result<Summary, TrainError> {
        let (step, digest) = self.digest.take().ok_or_else(|| TrainError::Internal("no rank gave a digest".into()))?;
        self.reports.sort_by_key(|r| r.rank);
        let wall = account.wall_s;
        let time = account.time_s.iter().map(|(class, s)| (class.name().to_owned(), *s)).collect();
        let ranks = std::mem::take(&mut self.reports);
        let recoveries = std::mem::take(&mut self.recoveries);
        let (loss, bits_per_byte) = (self.loss, self.bits_per_byte);
        let checked_by_spares = self.checked_by_spares;
        Ok(Summary { ended, step, digest, ranks, loss, bits_per_byte, time, wall, recoveries, checked_by_spares })
    }
}

/// The failure that the others followed from: a silent death first, then one with a code of its own, then the first.
fn cause(mut failures: Vec<(usize, Failure)>) -> Option<(usize, Failure)> {
    let at = failures
        .iter()
        .position(|(_, f)| f.silent)
        .or_else(|| failures.iter().position(|(_, f)| f.code != 70))
        .or_else(|| (!failures.is_empty()).then_some(0))?;
    Some(failures.swap_remove(at))
}

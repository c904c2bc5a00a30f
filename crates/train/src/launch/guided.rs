//! Rank processes under a controller that is part of this process.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use checkpoint::CheckpointError;
use checkpoint::store::Store;
use control::agent::Agents;
use control::controller::{Config, Controller, Judgement, Survey, Trade};
use control::identity::Identity;
use control::inject::{Injection, Random};
use control::lease::Holding;
use control::local::LocalAgent;
use events::wall::Wall;
use events::{Event, Intervention};
use fabric::FabricOptions;
use policy::{Laws, Piece, Unchecked};
use spec::Run;

use super::flight;
use super::folder::complain;
use super::hosts::{self, Earlier};
use super::reload::{Change, Desk};
use super::survey::survey;
use super::wire::JobSpec;
use super::{POLL, Request, RunFolder, prove};
use crate::comm::fabric_options;
use crate::error::TrainError;
use crate::fault::mix;
use crate::persist;
use crate::pin;
use crate::rank::Ended;
use crate::recover;

/// What a controller asks `train`.
pub(super) struct Knowledge {
    /// Cores that this process may use.
    pub allowed: Vec<usize>,
    /// Where flight records go.
    pub flights: PathBuf,
    /// Where checkpoints are.
    pub checkpoints: PathBuf,
    /// The run's folder.
    pub folder: RunFolder,
    /// Cores of a host.
    pub cores: usize,
}

/// The laws of layouts and state, as the program and its checker know them.
pub(crate) struct StateLaws;

impl Laws for StateLaws {
    fn fits(&self, run: &Run) -> Result<(), String> {
        prove(run).map(drop).map_err(|e| e.to_string())
    }

    fn lost(&self, before: &Run, holds: &[Option<&[Piece]>], after: &Run) -> Option<String> {
        let mut next = 0..;
        let holders: Vec<Option<usize>> = holds.iter().map(|holds| holds.and_then(|_| next.next())).collect();
        let corrupt: Vec<_> = holds.iter().map(|holds| holds.unwrap_or(&[])).collect();
        recover::plan(before, &holders, &corrupt, after).names_lost(after)
    }
}

impl Trade for Knowledge {
    fn laws(&self) -> Box<dyn Laws> {
        Box::new(StateLaws)
    }

    fn fabric(&self, run: &Run, generation: u64) -> FabricOptions {
        fabric_options(run, generation)
    }

    fn cores(&self, run: &Run) -> Vec<Vec<usize>> {
        pin::shares(run.layout.pin, &self.allowed, run.layout.world()).unwrap_or_default()
    }

    fn verdict(&self, _: &Run, flights: &[Option<serde_json::Value>]) -> Judgement {
        let verdict = observe::hang::of_answers(flights);
        let mut reason = verdict.to_string().replace('\n', "; ");
        if let Some(folder) = flight::save(&self.flights, flights) {
            reason += &format!("; `lockstep diagnose {}` says it again", folder.display());
        }
        Judgement { ranks: verdict.named(), reason, still_ms: observe::hang::still_ms(flights) }
    }

    fn hold(&self, steps: &[u64], checked: Option<u64>) {
        persist::hold(&self.checkpoints, steps, checked);
    }

    fn survey(&self, run: &Run) -> Survey {
        survey(&self.checkpoints, run)
    }

    fn record(&self, intervention: &Intervention, run_toml: &str) -> Result<(), String> {
        self.folder.intervene(intervention)?;
        // It counts from here on; the run file that says the same is for whoever reads it.
        let run = Run::parse(run_toml, "the run", &[], self.cores).map_err(TrainError::from);
        if let Err(e) = run.and_then(|run| self.folder.write_run(&run)) {
            complain(&format!("run.toml does not say what was changed, interventions.jsonl does: {e}"));
        }
        Ok(())
    }

    fn distrust(&self, run: &Run, after: u64) -> Vec<String> {
        distrust(&self.checkpoints, run, after)
    }
}

/// Sets checkpoints of steps after `after` aside, in the run's folder and in the slower tier; what was done, or could not be.
pub(super) fn distrust(checkpoints: &Path, run: &Run, after: u64) -> Vec<String> {
    let far = run.checkpoint.store.as_ref().map(|url| Store::open(url).map(|store| (format!(" in {url}"), store)));
    let near = Ok((String::new(), Store::folder(checkpoints)));
    let note = |place: Result<(String, Store), CheckpointError>| {
        let done = place.and_then(|(place, store)| store.distrust(after).map(|steps| (place, steps)));
        match done {
            Ok((_, steps)) if steps.is_empty() => None,
            Ok((place, steps)) => Some(format!("checkpoints of steps {steps:?}{place} are set aside (.damaged)")),
            Err(e) => Some(format!(
                "checkpoints of steps after {after} could NOT be set aside, move them away by hand before the run is resumed: {e}"
            )),
        }
    };
    std::iter::once(near).chain(far).filter_map(note).collect()
}

/// What [`supervise`] needs beside the request.
pub(super) struct Guided<'a> {
    pub request: &'a Request,
    /// The run, with what was changed in it before.
    pub run: &'a Run,
    pub folder: &'a RunFolder,
    pub job: &'a JobSpec,
    /// What every process of the run is.
    pub identity: Identity,
    /// The checkpoint to go on from, and its step.
    pub from: Option<(u64, PathBuf)>,
    /// That nobody has checked the last steps before it.
    pub unchecked: Option<Unchecked>,
    pub injection: Injection,
    pub began: Instant,
    /// Where agents of other hosts call.
    pub listener: Option<TcpListener>,
    /// The lease, if it is taken already.
    pub lease: Option<Holding>,
    /// A controller that was here before.
    pub earlier: Option<Earlier>,
}

/// Runs the ranks to the end of the run, through whatever happens to them.
///
/// # Errors
/// What ended the run; a deliberate fault that was not seen or not repaired.
pub(super) fn supervise(guided: Guided, observe: &mut dyn FnMut(&Event)) -> Result<Ended, TrainError> {
    let Guided { request, run, folder, job, identity, from, unchecked, injection, began, listener, lease, earlier } =
        guided;
    let run = earlier.as_ref().map_or(run, |earlier| &earlier.run);
    let machine_cores = job.cores;
    let job = serde_json::to_value(job).map_err(|e| TrainError::Internal(e.to_string()))?;
    let journal = folder.journal();
    let config = Config {
        run: run.clone(),
        cores: machine_cores,
        identity,
        from,
        unchecked,
        job,
        journal: journal.clone(),
        faults: injection.of_ranks(run.layout.world()),
        wall: Wall::default(),
        began,
        hosts: request.hosts.as_ref().map_or(0, |hosts| hosts.count),
    };
    // Cores of other hosts are theirs to give.
    let allowed = if request.hosts.is_some() { Vec::new() } else { pin::allowed() };
    let trade = Knowledge {
        allowed,
        flights: folder.flights(),
        checkpoints: folder.checkpoints(),
        folder: RunFolder::new(folder.path()),
        cores: machine_cores,
    };
    let io = |source| TrainError::Io { what: "cannot write", path: journal.clone(), source };
    let at = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    let mut lease = match (lease, at) {
        (None, Some(at)) => Some(hosts::lease(folder, at).map_err(|e| folder.unusable(e))?),
        (lease, _) => lease,
    };
    let mut controller = match &earlier {
        Some(_) => Controller::rebuild(&config, &trade, None),
        None => Controller::new(&config, &trade),
    }
    .map_err(|source| folder.unusable(io(source)))?;
    let mut agents: Box<dyn Agents> = match (&request.hosts, listener) {
        (Some(hosts), Some(listener)) => {
            let epoch = lease.as_ref().map_or(0, Holding::epoch);
            let remote = hosts.open(listener, epoch, folder, run, controller.marks())?;
            let text = format!("controller of epoch {epoch}: agents call {}", remote.address());
            observe(&Event::Notice { text });
            Box::new(remote)
        }
        _ => Box::new(LocalAgent::new(request.program.clone(), run.layout.world() + run.guard.spares)),
    };
    let agents = agents.as_mut();
    let mut deaths = injection.controller.clone();
    let mut chance = injection.random.map(Chance::new);
    let mut stopping = false;
    let desk = Desk::new(folder.path(), machine_cores);
    // A change whose step is not known yet, or not written down.
    let mut asked: Option<Change> = None;
    // The program that takes over, until it has.
    let mut handed: Option<PathBuf> = None;
    let end = loop {
        let news = agents.news().recv_timeout(POLL);
        if let Some(lease) = &mut lease
            && let Some(text) = lease.keep().map_err(TrainError::Deposed)?
        {
            observe(&Event::Notice { text });
        }
        match news {
            Ok(news) => controller.hear(news, agents, observe),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        controller.tick(agents, observe);
        let stop = request.stop.load(Ordering::Relaxed);
        if let Some(end) = controller.end() {
            break end.clone();
        }
        if stop && request.hosts.is_some() && controller.is_idle() {
            // Agents may never come, and nobody holds anything. The journal says nothing of a stop: the same command waits again.
            let from = if controller.generation() == 0 { "" } else { " from the newest checkpoint" };
            let text = format!("stopped on request while no rank was at work; the same command goes on{from}");
            controller.close(observe);
            agents.end(3, &text);
            if let Some(lease) = lease {
                lease.give_back();
            }
            return Err(TrainError::Stopped(text));
        }
        if !stopping && stop {
            stopping = true;
            controller.ask_stop(agents, observe);
        }
        let ready = match &asked {
            // One after the other.
            Some(_) => controller.outcome().and_then(|outcome| Some((asked.take()?, outcome.map(Some)))),
            None => desk.look(controller.wanted(), &StateLaws, agents.program().is_some()).and_then(|change| {
                // One more than places: while processes are replaced, the new one is there before the old one goes.
                agents.slots(change.run.layout.world() + change.run.guard.spares + 1);
                if !change.sets.is_empty() {
                    observe(&Event::Notice { text: format!("a change of the run is asked for: {}", change.shown()) });
                    controller.reload(change.sets.clone(), agents, observe);
                }
                if change.of_recipe() {
                    asked = Some(change);
                    return None;
                }
                let refused = controller.outcome().and_then(Result::err);
                Some((change, refused.map_or(Ok(None), Err)))
            }),
        };
        if let Some((change, outcome)) = ready {
            desk.answer(&change, &outcome);
            if let Err(why) = &outcome {
                observe(&Event::Notice { text: format!("the run goes on unchanged: {why}") });
            } else if let Err(e) = folder.write_run(controller.wanted()) {
                observe(&Event::Notice { text: e.to_string() });
            }
            if let (Ok(_), Some(binary)) = (outcome, change.binary) {
                observe(&Event::Notice {
                    text: format!("rank processes go over to {} on request, one by one", binary.display()),
                });
                if let Some(program) = agents.program() {
                    program.clone_from(&binary);
                }
                controller.replace(agents, observe);
                handed = Some(binary);
            }
        }
        if let Some(binary) = handed.take_if(|_| controller.replacing() == 0) {
            observe(&Event::Notice { text: format!("all rank processes are of {} now", binary.display()) });
        }
        if let Some(chance) = &mut chance {
            chance.strike(&controller, agents, observe);
        }
        if let Some(at) = deaths.iter().position(|step| *step <= controller.committed() + 1) {
            let step = deaths.swap_remove(at);
            observe(&Event::Notice {
                text: format!(
                    "fault: the controller is thrown away before step {step}; another one goes on from {}",
                    shown(&journal)
                ),
            });
            controller = Controller::rebuild(&config, &trade, Some(controller.leave())).map_err(io)?;
        }
    };
    controller.close(observe);
    if let Some(change) = asked {
        let outcome = controller.outcome().unwrap_or_else(|| Err(format!("it ended before: {}", end.reason)));
        desk.answer(&change, &outcome.map(Some));
    }
    agents.end(end.code, &end.reason);
    if let Some(lease) = lease {
        lease.give_back();
    }
    if end.code != 0 {
        return Err(TrainError::Rank { code: end.code, reason: end.reason });
    }
    let done = end.done.ok_or_else(|| TrainError::Internal("no rank said how it ended".into()))?;
    let ended: Ended = serde_json::from_value(done).map_err(|e| TrainError::Internal(e.to_string()))?;
    let account = match ended {
        Ended::Stopped(_) => Ok(()),
        Ended::Finished | Ended::Exhausted(_) => controller.account(),
    };
    account.map(|()| ended).map_err(|reason| match controller.unseen() {
        Some(step) => TrainError::Unseen(format!("{reason}; {}", folder.before(step))),
        None => TrainError::Rank { code: 70, reason },
    })
}

fn shown(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Faults from outside, at random: the same ones for the same seed.
struct Chance {
    random: Random,
    next_at: u64,
    drawn: u64,
}

impl Chance {
    fn new(random: Random) -> Self {
        Self { random, next_at: random.every_ms, drawn: 0 }
    }

    fn strike(&mut self, controller: &Controller, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let now = controller.now();
        let members = controller.members();
        if now < self.next_at || members.is_empty() || controller.committed() == 0 {
            return;
        }
        self.next_at = now + self.random.every_ms;
        self.drawn += 1;
        let draw = mix(0, self.random.seed ^ mix(0, self.drawn));
        let rank = (draw >> 8) as usize % members.len();
        let (word, step) = (if draw & 1 == 0 { "kill" } else { "stop" }, controller.committed() + 1);
        observe(&Event::FaultFired { rank, step, fault: format!("{word}, from outside") });
        match word {
            "kill" => agents.strike(members[rank]),
            _ => agents.stop(members[rank]),
        }
    }
}

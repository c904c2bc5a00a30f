//! The controller: hears agents, asks the policy, does what it says, and writes all of it down.
//!
//! It is not in the data path: ranks step on while it is away. What it is told goes into the journal before it is acted on,
//! and a controller that is built from that journal goes on where this one was.

mod act;
mod hear;
mod rebuild;
mod spares;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Instant;

use events::wall::{Wall, Watcher};
use events::{Event, Intervention};
use fabric::FabricOptions;
use policy::{Input, Laws, Policy, Process, Start, Unchecked};
use spec::Run;

use crate::agent::Agents;
use crate::fault::{Fault, FaultKind, Moment};
use crate::identity::Identity;
use crate::journal::{Entry, Journal};
use crate::repair::Repairs;
use crate::signs::Signs;

/// Ranks that have not said where they stand after this time are judged without it.
const ANSWER_MS: u64 = 1_000;

/// What `train` knows and the controller does not.
pub trait Trade: Send {
    /// The laws of layouts and state, for the policy.
    fn laws(&self) -> Box<dyn Laws>;
    /// Limits of the fabric of a world.
    fn fabric(&self, run: &Run, generation: u64) -> FabricOptions;
    /// The cores of each rank; empty: the system places them.
    fn cores(&self, run: &Run) -> Vec<Vec<usize>>;
    /// Who holds the others up, from what the ranks said about their exchanges; by rank, none: no answer came.
    fn verdict(&self, run: &Run, flights: &[Option<serde_json::Value>]) -> Judgement;
    /// The checkpoints of these steps are not removed, however old they get. `checked`: the newest one of which all is known to be
    /// good that was computed before it.
    fn hold(&self, steps: &[u64], checked: Option<u64>);
    /// Called when earlier worlds are over. Ends their timeline, so that they commit nothing any more, and looks which checkpoints
    /// are there.
    fn survey(&self, run: &Run) -> Survey;
    /// Writes down that the run is changed, so that no death takes it back; the run is that of `run_toml` from then on. What is
    /// written down already is not written twice.
    ///
    /// # Errors
    /// Why it is not; nothing of it is left then.
    fn record(&self, intervention: &Intervention, run_toml: &str) -> Result<(), String>;
    /// Sets checkpoints of steps after `after` aside, in the run's folder and in the slower tier; what was done, or could not be.
    fn distrust(&self, run: &Run, after: u64) -> Vec<String>;
}

/// What the ranks' words about their exchanges tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The ranks to name, the first before all; empty: nobody.
    pub ranks: Vec<u32>,
    /// A sentence.
    pub reason: String,
    /// Milliseconds for which nothing has moved at any rank; 0: something does, or not all have answered.
    pub still_ms: u64,
}

/// The checkpoints that a run can go on from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Survey {
    /// Steps and folders, ascending. The last one was read whole and is good.
    pub saved: Vec<(u64, PathBuf)>,
    /// What the person should know.
    pub notes: Vec<String>,
}

/// What a controller is told.
pub struct Config {
    /// The run, as the person asked for it.
    pub run: Run,
    /// Cores of a host.
    pub cores: usize,
    /// What every process of the run is.
    pub identity: Identity,
    /// The checkpoint to go on from.
    pub from: Option<(u64, PathBuf)>,
    /// That nobody has checked the last steps before that checkpoint.
    pub unchecked: Option<Unchecked>,
    /// What every rank process is told; `train` wrote it.
    pub job: serde_json::Value,
    /// Where the journal is.
    pub journal: PathBuf,
    /// Faults to come.
    pub faults: Vec<Fault>,
    /// The beginning of the run.
    pub began: Instant,
    /// Dates the run.
    pub wall: Wall,
    /// Hosts that are waited for before anything is started; 0: ranks are children of this process.
    pub hosts: usize,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// Exit code.
    pub code: i32,
    /// Why.
    pub reason: String,
    /// What the ranks wrote at their end, as `train` wrote it.
    pub done: Option<serde_json::Value>,
}

/// A change of what the run is, before it is written down.
#[derive(Debug, Clone)]
struct Change {
    intervention: Intervention,
    /// The run file from then on.
    run_toml: String,
    /// A person asked for it.
    asked: bool,
}

/// See the module.
pub struct Controller<'a> {
    config: &'a Config,
    trade: &'a dyn Trade,
    policy: Policy,
    journal: Journal,
    faults: Vec<Fault>,
    signs: Signs,
    addresses: BTreeMap<Process, String>,
    flights: Option<Vec<Option<serde_json::Value>>>,
    /// Since when they are asked for.
    asked_at: u64,
    /// Processes that were sent away: their words count no more.
    sent_away: std::collections::HashSet<Process>,
    /// When a step was committed last, in seconds since the start.
    stepped_at: Option<f64>,
    repairs: Repairs,
    /// The last step that was told.
    told: u64,
    /// A rank has told the digest.
    digest_told: bool,
    /// A step that was decided in the world that ends: told when it is sure that the next one goes on after it.
    carried: Option<events::Step>,
    /// Where processes were started.
    hosts: HashMap<Process, String>,
    /// Of each agent that outlives controllers, its life and what of its news is written down.
    marks: BTreeMap<String, (u64, u64)>,
    /// Another controller was here before: what it ordered may not have come to the agents.
    rebuilt: bool,
    /// When this controller looked at its clock last.
    ticked_at: u64,
    /// A change of what the run is that the controller before may not have written down.
    unwritten: Option<Change>,
    /// What became of the change that is being made, for the policy.
    recorded: Option<Result<(), String>>,
    /// What became of the one that a person asked for last: the step with which it begins, or why it cannot be.
    outcome: Option<Result<u64, String>>,
    /// Sees the wall clock jump.
    clock: Watcher,
    /// What spares check.
    checks: spares::Checks,
    end: Option<End>,
    done: Option<serde_json::Value>,
}

impl<'a> Controller<'a> {
    /// Begins a run.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub fn new(config: &'a Config, trade: &'a dyn Trade) -> std::io::Result<Self> {
        let mut controller = Self::empty(config, trade, Journal::open(&config.journal)?);
        let since = config.wall.since_1970();
        controller.journal.write(&Entry::Begin {
            run_toml: config.run.values.to_toml(),
            faults: config.faults.clone(),
            from: config.from.clone(),
            unchecked: config.unchecked.clone(),
            hosts: config.hosts,
            identity: Some(config.identity.clone()),
            unix_ms: since.saturating_sub(config.began.elapsed()).as_millis() as u64,
        });
        Ok(controller)
    }

    fn empty(config: &'a Config, trade: &'a dyn Trade, journal: Journal) -> Self {
        let start = Start {
            run: config.run.clone(),
            cores: config.cores,
            from: config.from.clone(),
            unchecked: config.unchecked.clone(),
        };
        Self {
            config,
            trade,
            policy: Policy::new(start, trade.laws()).after_hosts(config.hosts),
            journal,
            faults: config.faults.clone(),
            signs: Signs::default(),
            addresses: BTreeMap::new(),
            flights: None,
            asked_at: 0,
            sent_away: Default::default(),
            stepped_at: None,
            repairs: Repairs::default(),
            told: config.from.as_ref().map_or(0, |(step, _)| *step),
            digest_told: false,
            carried: None,
            hosts: HashMap::new(),
            marks: BTreeMap::new(),
            rebuilt: false,
            ticked_at: 0,
            unwritten: None,
            recorded: None,
            outcome: None,
            clock: Watcher::new(config.wall.clone()),
            checks: spares::Checks::default(),
            end: None,
            done: None,
        }
    }

    /// Agents that outlive controllers, as far as they were heard: host, life, number of the news.
    pub fn marks(&self) -> Vec<(String, u64, u64)> {
        self.marks.iter().map(|(host, (session, seq))| (host.clone(), *session, *seq)).collect()
    }

    /// What the next controller in this process need not find on disk: what is known of recoveries, and the journal, which it may
    /// not be allowed to open any more.
    pub fn leave(self) -> (Repairs, Journal) {
        (self.repairs, self.journal)
    }

    /// Milliseconds since the start.
    pub fn now(&self) -> u64 {
        self.config.began.elapsed().as_millis() as u64
    }

    fn seconds(&self) -> f64 {
        self.config.began.elapsed().as_secs_f64()
    }

    /// The last committed step.
    pub fn committed(&self) -> u64 {
        self.policy.committed()
    }

    /// The processes of the world of the moment, by rank.
    pub fn members(&self) -> &[Process] {
        self.policy.world().map_or(&[], |world| &world.processes)
    }

    /// How the run ended, if it did.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// The run is over under this controller: what the journal kept while the disk refused is written, or it is said that it is
    /// not.
    pub fn close(&mut self, observe: &mut dyn FnMut(&Event)) {
        self.journal.close();
        if let Some(text) = self.journal.news() {
            observe(&Event::Notice { text });
        }
    }

    /// The run is over and well: did every fault that was asked for strike, was it seen, was it repaired?
    ///
    /// # Errors
    /// What was not.
    pub fn account(&self) -> Result<(), String> {
        let size = self.members().len() as u32;
        match self.faults.iter().find(|fault| fault.there(size) && !self.repairs.has_struck(fault)) {
            Some(fault) if fault.kind == FaultKind::KillAt(Moment::Load) => Err(format!(
                "the injected fault never struck: {fault}: no recovery came from which step {} or a later one came next; ask for a \
                 fault that makes one, such as kill:{}@{}",
                fault.step, fault.rank, fault.step
            )),
            Some(fault) => Err(format!("the injected fault never struck: {fault}")),
            None => self.repairs.account(),
        }
    }

    /// The first step that an injected fault may have spoilt which nobody noticed.
    pub fn unseen(&self) -> Option<u64> {
        self.repairs.unseen()
    }

    /// The run as it is to be from the next world on.
    pub fn wanted(&self) -> &Run {
        self.policy.wanted()
    }

    /// What became of the change of the recipe that a person asked for last ([`Controller::reload`]), told once: the step with which it
    /// begins, when that is written down; or why the run goes on unchanged.
    pub fn outcome(&mut self) -> Option<Result<u64, String>> {
        self.outcome.take()
    }

    /// A person asks for a stop.
    pub fn ask_stop(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.feed(Input::Stop, agents, observe);
    }

    /// A person changes the run by these settings, each `key=value`; they are validated already.
    pub fn reload(&mut self, sets: Vec<String>, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.outcome = None;
        self.feed(Input::Reload { sets }, agents, observe);
    }

    /// Processes started from now on are of another program; those of before are replaced.
    pub fn replace(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.feed(Input::Replace, agents, observe);
    }

    /// How many processes are still of the program before.
    pub fn replacing(&self) -> usize {
        self.policy.replacing()
    }

    /// Time passes: who is silent, who is late.
    pub fn tick(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        if let Some(change) = self.unwritten.take() {
            self.record(change, observe);
            self.tell_recorded(agents, observe);
        }
        let (now, limit) = (self.now(), self.policy.run().guard.heartbeat_timeout_ms);
        let away = now > std::mem::replace(&mut self.ticked_at, now) + limit / 4;
        if away || agents.deaf() {
            // What this process has not heard is its own fault: ranks have stepped on.
            self.signs.excuse(now);
            self.feed(Input::Working, agents, observe);
        }
        for (process, age_ms) in self.signs.silent(now, limit) {
            self.feed(Input::Silent { process, age_ms, stopped: false }, agents, observe);
        }
        if self.flights.is_some() && now > self.asked_at + ANSWER_MS {
            self.judge(agents, observe);
        }
        let ms = self.signs.still_ms(self.members());
        if ms > 0 {
            self.feed(Input::Still { ms }, agents, observe);
        }
        self.feed(Input::Tick, agents, observe);
        self.check(agents);
        if let Some(seconds) = self.clock.look() {
            self.repairs.clock_seen(None);
            observe(&Event::ClockJumped { rank: None, seconds });
        }
        if let Some(text) = self.journal.news() {
            observe(&Event::Notice { text });
        }
    }

    /// The number of the newest world; 0: none yet.
    pub fn generation(&self) -> u64 {
        self.policy.world().map_or(0, |world| world.generation)
    }

    /// No process holds anything: no world was formed yet, or all that was started is gone.
    pub fn is_idle(&self) -> bool {
        self.generation() == 0 || self.signs.expected().next().is_none()
    }

    fn rank(&self, process: Process) -> Option<usize> {
        self.members().iter().position(|p| *p == process)
    }
}

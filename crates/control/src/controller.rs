//! The controller: hears agents, asks the policy, does what it says, and writes all of it down.
//!
//! It is not in the data path: ranks step on while it is away. What it is told goes into the journal before it is acted on,
//! and a controller that is built from that journal goes on where this one was.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use events::{Event, Intervention};
use fabric::FabricOptions;
use policy::{Action, Decision, Input, Laws, Origin, Policy, Process, Start, World};
use spec::{Run, Transport};

use crate::agent::{Agents, Heard, News};
use crate::fault::{Fault, FaultKind};
use crate::journal::{Entry, Journal};
use crate::repair::Repairs;
use crate::signs::Signs;
use crate::wire::{Assignment, FromRank, ToRank};

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

/// What a controller is told.
pub struct Config {
    /// The run, as the person asked for it.
    pub run: Run,
    /// Cores of a host.
    pub cores: usize,
    /// The checkpoint to go on from.
    pub from: Option<(u64, PathBuf)>,
    /// What every rank process is told; `train` wrote it.
    pub job: serde_json::Value,
    /// Where the journal is.
    pub journal: PathBuf,
    /// Faults to come.
    pub faults: Vec<Fault>,
    /// The beginning of the run.
    pub began: Instant,
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
    /// Where processes were started.
    hosts: HashMap<Process, String>,
    /// Of each agent that outlives controllers, its life and what of its news is written down.
    marks: BTreeMap<String, (u64, u64)>,
    /// Another controller was here before: what it ordered may not have come to the agents.
    rebuilt: bool,
    /// Changes of what the run is, with its run file from then on, that nobody has taken yet.
    interventions: Vec<(Intervention, String)>,
    end: Option<End>,
    done: Option<serde_json::Value>,
}

impl<'a> Controller<'a> {
    /// Begins a run.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub fn new(config: &'a Config, trade: &'a dyn Trade) -> std::io::Result<Self> {
        let mut controller = Self::empty(config, trade)?;
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        controller.journal.write(&Entry::Begin {
            run_toml: config.run.values.to_toml(),
            faults: config.faults.clone(),
            from: config.from.clone(),
            hosts: config.hosts,
            unix_ms: since.saturating_sub(config.began.elapsed()).as_millis() as u64,
        });
        Ok(controller)
    }

    fn empty(config: &'a Config, trade: &'a dyn Trade) -> std::io::Result<Self> {
        let start = Start { run: config.run.clone(), cores: config.cores, from: config.from.clone() };
        Ok(Self {
            config,
            trade,
            policy: Policy::new(start, trade.laws()).after_hosts(config.hosts),
            journal: Journal::open(&config.journal)?,
            faults: config.faults.clone(),
            signs: Signs::default(),
            addresses: BTreeMap::new(),
            flights: None,
            asked_at: 0,
            sent_away: Default::default(),
            stepped_at: None,
            repairs: Repairs::default(),
            hosts: HashMap::new(),
            marks: BTreeMap::new(),
            rebuilt: false,
            interventions: Vec::new(),
            end: None,
            done: None,
        })
    }

    /// Goes on where another controller was, by its journal; `repairs` is what it had seen of recoveries, if it still tells.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub fn rebuild(config: &'a Config, trade: &'a dyn Trade, repairs: Option<Repairs>) -> std::io::Result<Self> {
        let mut controller = Self::empty(config, trade)?;
        controller.rebuilt = true;
        let told = repairs.is_some();
        controller.repairs = repairs.unwrap_or_default();
        let now = controller.now();
        for entry in Journal::read(&config.journal)? {
            match entry {
                Entry::Input { at, input } => {
                    if let Input::Ready { process } | Input::Loaded { process, .. } = &input {
                        controller.signs.expect(*process, now);
                    }
                    match &input {
                        Input::HostLost { host, .. } => controller.host_is_away(host),
                        Input::Exited { process, .. }
                        | Input::Done { process }
                        | Input::Failed { process, .. }
                        | Input::SpawnFailed { process, .. }
                        | Input::Silent { process, .. } => controller.signs.forget(*process),
                        Input::Step { step } if !told => drop(controller.repairs.step(*step, at as f64 / 1000.0)),
                        _ => {}
                    }
                    for Decision { action, .. } in controller.policy.on(at, input) {
                        match action {
                            Action::Kill { process } => {
                                controller.signs.forget(process);
                                controller.sent_away.insert(process);
                            }
                            Action::Spawn { process, host } => {
                                controller.signs.expect(process, now);
                                controller.hosts.insert(process, host);
                            }
                            Action::Form(_) => controller.addresses.clear(),
                            Action::Tell(trouble) if !told => {
                                let _ = controller.repairs.trouble(&trouble, at as f64 / 1000.0, None);
                            }
                            Action::Stop { code } => {
                                let reason = "the run has ended".into();
                                controller.end = Some(End { code, reason, done: None });
                            }
                            _ => {}
                        }
                    }
                }
                Entry::Listening { process, address, .. } => drop(controller.addresses.insert(process, address)),
                Entry::Fired { fault, at } => {
                    controller.faults.retain(|f| *f != fault);
                    if !told {
                        controller.repairs.fired(fault, at as f64 / 1000.0);
                    }
                }
                Entry::Missed { fault } => controller.faults.retain(|f| *f != fault),
                Entry::Begin { faults, .. } => controller.faults = faults,
                Entry::Mark { host, session, seq } => drop(controller.marks.insert(host, (session, seq))),
                Entry::Decision { .. } => {}
            }
        }
        Ok(controller)
    }

    /// Agents that outlive controllers, as far as they were heard: host, life, number of the news.
    pub fn marks(&self) -> Vec<(String, u64, u64)> {
        self.marks.iter().map(|(host, (session, seq))| (host.clone(), *session, *seq)).collect()
    }

    /// What is known of recoveries, for the next controller.
    pub fn into_repairs(self) -> Repairs {
        self.repairs
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

    /// The run is over and well: did every fault that was asked for strike, was it seen, was it repaired?
    ///
    /// # Errors
    /// What was not.
    pub fn account(&self) -> Result<(), String> {
        let size = self.members().len() as u32;
        match self.faults.iter().find(|fault| fault.there(size) && !self.repairs.has_struck(fault)) {
            Some(fault) => Err(format!("the injected fault never struck: {fault}")),
            None => self.repairs.account(),
        }
    }

    /// What was changed of what the run is since this was asked last; with its run file.
    pub fn interventions(&mut self) -> Vec<(Intervention, String)> {
        std::mem::take(&mut self.interventions)
    }

    /// A person asks for a stop.
    pub fn ask_stop(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.feed(Input::Stop, agents, observe);
    }

    /// A person changes the run; it is validated already.
    pub fn reload(&mut self, run_toml: String, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.feed(Input::Reload { run_toml }, agents, observe);
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
        let (now, limit) = (self.now(), self.policy.run().guard.heartbeat_timeout_ms);
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
        if let Some(why) = self.journal.broken() {
            observe(&Event::Notice {
                text: format!(
                    "the journal cannot be written ({why}); the run goes on, a controller that dies now cannot be rebuilt"
                ),
            });
        }
    }

    /// Something came from an agent.
    pub fn hear(&mut self, news: News, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        match news {
            News::Joined { host, slots } => self.feed(Input::HostJoined { host, slots }, agents, observe),
            News::Lost { host, reason } => {
                self.host_is_away(&host);
                self.feed(Input::HostLost { host, reason }, agents, observe);
            }
            News::Process(process, heard) => self.heard(process, heard, agents, observe),
            News::Present { host, started, running } => self.present(&host, &started, &running, agents, observe),
            News::Mark { host, session, seq } => {
                self.journal.write(&Entry::Mark { host: host.clone(), session, seq });
                self.marks.insert(host.clone(), (session, seq));
                agents.written(&host, seq);
            }
            News::Notice(text) => observe(&Event::Notice { text }),
        }
    }

    /// Its processes are given up: their words count no more.
    fn host_is_away(&mut self, host: &str) {
        let there = self.hosts.iter().filter(|(_, at)| *at == host).map(|(process, _)| *process);
        for process in there {
            self.signs.forget(process);
            self.sent_away.insert(process);
        }
    }

    /// An agent is here (again): what it runs and what it should run are brought together. It ignores what it was told before.
    fn present(
        &mut self,
        host: &str,
        started: &[Process],
        running: &[Process],
        agents: &mut dyn Agents,
        observe: &mut dyn FnMut(&Event),
    ) {
        let now = self.now();
        for process in running {
            if self.sent_away.contains(process) || !self.hosts.contains_key(process) {
                agents.kill(*process);
            } else if self.signs.is_expected(*process) {
                self.signs.heard(*process, now);
            }
        }
        if !self.rebuilt {
            return;
        }
        let here = |p: &Process| self.hosts.get(p).is_some_and(|at| at == host) && !self.sent_away.contains(p);
        let mut expected: Vec<_> = self.signs.expected().filter(here).collect();
        expected.sort();
        for process in expected {
            if !started.contains(&process) {
                // Its order was on the way when the controller before died.
                self.signs.expect(process, now);
                agents.spawn(host, process, self.policy.run().guard.beat_ms, &self.config.job);
            }
        }
        if let Some(world) = self.policy.world().cloned() {
            let mine: Vec<_> = world.processes.iter().copied().filter(here).collect();
            match self.assignments(&world, &mine, agents) {
                Ok(words) => words.iter().for_each(|(p, word)| agents.say(*p, word)),
                Err(e) => observe(&Event::Notice { text: format!("host {host} cannot be told of its world: {e}") }),
            }
            let generation = world.generation;
            if let Some(addresses) = self.all_addresses() {
                let word = ToRank::Addresses { generation, addresses };
                mine.iter().for_each(|p| agents.say(*p, &word));
            }
            if self.policy.settling() {
                let word = ToRank::Abort { generation, reason: "this world was ended".into() };
                mine.iter().for_each(|p| agents.say(*p, &word));
            }
            if self.policy.stopping() {
                mine.iter().for_each(|p| agents.say(*p, &ToRank::Stop));
            }
        }
    }

    fn heard(&mut self, process: Process, heard: Heard, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let away = self.sent_away.contains(&process);
        let word = match heard {
            Heard::Said(word) => word,
            Heard::Line(line) => {
                let who = match self.rank(process) {
                    Some(rank) => format!("rank {rank}"),
                    None => process.to_string(),
                };
                // That nobody listens is no reason to stop.
                let _ = writeln!(std::io::stderr(), "{who}: {line}");
                return;
            }
            Heard::Stopped(age_ms) => {
                if age_ms >= self.policy.run().guard.stopped_timeout_ms && !away {
                    self.signs.forget(process);
                    self.feed(Input::Silent { process, age_ms, stopped: true }, agents, observe);
                }
                return;
            }
            Heard::NotStarted(reason) => {
                self.signs.forget(process);
                return self.feed(Input::SpawnFailed { process, reason }, agents, observe);
            }
            Heard::Exited(how) => {
                self.signs.forget(process);
                self.repairs.left(self.seconds());
                return self.feed(Input::Exited { process, how }, agents, observe);
            }
        };
        if away {
            return;
        }
        let now = self.now();
        self.signs.heard(process, now);
        match word {
            FromRank::Beat { work, still_ms, .. } => {
                if self.signs.beat(process, now, work, still_ms) {
                    self.feed(Input::Working, agents, observe);
                }
            }
            FromRank::Ready => self.feed(Input::Ready { process }, agents, observe),
            FromRank::Listening { generation, address } => self.listening(process, generation, address, agents),
            FromRank::Connected { generation } => {
                if self.generation() == generation {
                    self.repairs.connected(process, self.members().len(), self.seconds());
                }
                self.feed(Input::Connected { process, generation }, agents, observe);
            }
            FromRank::Loaded { generation, step, bytes, .. } => {
                if self.generation() == generation {
                    self.repairs.loaded(process, bytes, self.members().len(), self.seconds());
                }
                self.feed(Input::Loaded { process, generation, step }, agents, observe);
            }
            FromRank::Event(event) => self.event(process, event, agents, observe),
            FromRank::Interrupted { generation, held, cause } => {
                if self.generation() == generation {
                    self.repairs.left(self.seconds());
                }
                self.feed(Input::Interrupted { process, generation, held, cause }, agents, observe);
            }
            FromRank::Flight(flight) => self.flight(process, flight, agents, observe),
            FromRank::Done(done) => {
                self.signs.forget(process);
                self.done = Some(done);
                self.feed(Input::Done { process }, agents, observe);
            }
            FromRank::Failed { code, reason, alike } => {
                self.signs.forget(process);
                if let Some(rank) = self.rank(process) {
                    observe(&Event::Failed { rank, code, reason: reason.clone() });
                }
                self.feed(Input::Failed { process, code, reason, alike }, agents, observe);
            }
        }
    }

    fn event(&mut self, process: Process, event: Event, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        // Who has no place any more has nothing to tell about the run.
        if self.rank(process).is_none() && !matches!(event, Event::Notice { .. }) {
            return;
        }
        let at = self.seconds();
        observe(&event);
        let input = match event {
            Event::Step(step) => {
                self.stepped_at = Some(at);
                self.repairs.step(step.step, at).iter().for_each(&mut *observe);
                self.missed(step.step, observe);
                Input::Step { step: step.step }
            }
            Event::Checkpoint { step, path, .. } => {
                self.repairs.checkpoint_written();
                Input::Checkpoint { step, path: path.into() }
            }
            Event::CheckpointFailed { .. } => {
                self.repairs.checkpoint_failed();
                Input::Working
            }
            Event::Replayed { step, .. } => {
                self.repairs.replayed(step);
                Input::Working
            }
            Event::FaultFired { rank, step, fault } => {
                let struck = self
                    .faults
                    .iter()
                    .position(|f| (f.rank as usize, f.step) == (rank, step) && f.kind.to_string() == fault);
                let struck =
                    struck.or_else(|| self.faults.iter().position(|f| (f.rank as usize, f.step) == (rank, step)));
                let again = |at: usize| self.faults[at].kind == FaultKind::Poison;
                if let Some(fault) = struck.filter(|at| again(*at)).map(|at| self.faults[at]) {
                    self.repairs.fired_again(fault, at);
                } else if let Some(fault) = struck.map(|at| self.faults.remove(at)) {
                    self.repairs.fired(fault, at);
                    self.journal.write(&Entry::Fired { fault, at: self.now() });
                }
                return;
            }
            Event::Validation { .. } | Event::Sample { .. } | Event::TensorHashes { .. } => Input::Working,
            _ => return,
        };
        self.feed(input, agents, observe);
    }

    /// The number of the newest world; 0: none yet.
    pub fn generation(&self) -> u64 {
        self.policy.world().map_or(0, |world| world.generation)
    }

    fn rank(&self, process: Process) -> Option<usize> {
        self.members().iter().position(|p| *p == process)
    }

    /// When all was well for the last time, as far as it shows: the rank's last words, or the last step.
    fn last_sign(&self, told: &policy::Trouble) -> Option<f64> {
        let process = told.rank.and_then(|rank| self.members().get(rank as usize));
        let said = process.and_then(|process| self.signs.last(*process)).map(|ms| ms as f64 / 1000.0);
        match told.kind.as_str() {
            "exit" | "silence" | "stopped" | "host lost" => said,
            _ => self.stepped_at,
        }
    }

    /// Faults that were due by `step` for ranks that this world does not have strike nobody.
    fn missed(&mut self, step: u64, observe: &mut dyn FnMut(&Event)) {
        let size = self.members().len() as u32;
        let (gone, faults) = self
            .faults
            .drain(..)
            .partition(|fault| fault.step <= step && !fault.there(size) && fault.kind != FaultKind::Poison);
        self.faults = faults;
        let gone: Vec<Fault> = gone;
        for fault in gone {
            self.journal.write(&Entry::Missed { fault });
            observe(&Event::Notice { text: format!("fault: {fault} strikes nobody, its rank was gone by then") });
        }
    }

    fn listening(&mut self, process: Process, generation: u64, address: String, agents: &mut dyn Agents) {
        if self.generation() != generation || self.rank(process).is_none() {
            return;
        }
        self.journal.write(&Entry::Listening { process, generation, address: address.clone() });
        self.addresses.insert(process, address);
        if let Some(addresses) = self.all_addresses() {
            let word = ToRank::Addresses { generation, addresses };
            self.members().iter().for_each(|p| agents.say(*p, &word));
        }
    }

    /// Where the members of the world of the moment listen, when all have said it.
    fn all_addresses(&self) -> Option<Vec<String>> {
        self.members().iter().map(|p| self.addresses.get(p).cloned()).collect()
    }

    fn flight(
        &mut self,
        process: Process,
        flight: serde_json::Value,
        agents: &mut dyn Agents,
        observe: &mut dyn FnMut(&Event),
    ) {
        let (Some(rank), Some(flights)) = (self.rank(process), &mut self.flights) else { return };
        flights[rank] = Some(flight);
        if flights.iter().all(Option::is_some) {
            self.judge(agents, observe);
        }
    }

    /// Who holds the others up, by what was answered.
    fn judge(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let Some(flights) = self.flights.take() else { return };
        let Judgement { ranks, reason, still_ms } = self.trade.verdict(self.policy.run(), &flights);
        self.feed(Input::Verdict { ranks, reason, still_ms }, agents, observe);
    }

    /// Tells the policy, writes it down, does what it answers.
    fn feed(&mut self, input: Input, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let at = self.now();
        let quiet = matches!(input, Input::Tick | Input::Working | Input::Still { .. });
        if !quiet {
            self.journal.write(&Entry::Input { at, input: input.clone() });
        }
        let again = quiet.then(|| input.clone());
        let decisions = self.policy.on(at, input);
        if let Some(input) = again.filter(|_| !decisions.is_empty()) {
            self.journal.write(&Entry::Input { at, input });
        }
        let mut trouble = 0;
        for decision in decisions {
            self.journal.write(&Entry::Decision { at, decision: decision.clone() });
            if let Action::Tell(told) = &decision.action {
                trouble = told.id;
            }
            self.act(decision, trouble, agents, observe);
        }
    }

    fn act(&mut self, decision: Decision, trouble: u64, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let Decision { action, reason } = decision;
        let at = self.seconds();
        let tell = |action: String, observe: &mut dyn FnMut(&Event)| {
            observe(&Event::Decided { id: trouble, action, reason: reason.clone() });
        };
        match action {
            Action::Tell(told) => {
                let since_fault_ms = self.repairs.trouble(&told, at, self.last_sign(&told));
                let policy::Trouble { id, kind, rank, host, step, detail } = told;
                let rank = rank.map(|r| r as usize);
                observe(&Event::Trouble(events::Trouble { id, kind, rank, host, step, detail, since_fault_ms }));
                self.repairs.decided(self.seconds());
            }
            Action::Spawn { process, host } => {
                self.signs.expect(process, self.now());
                self.hosts.insert(process, host.clone());
                agents.spawn(&host, process, self.policy.run().guard.beat_ms, &self.config.job);
            }
            Action::Kill { process } => {
                self.signs.forget(process);
                self.sent_away.insert(process);
                agents.kill(process);
                tell(format!("end {process}"), observe);
            }
            Action::Abort { generation } => {
                let word = ToRank::Abort { generation, reason };
                self.members().iter().for_each(|p| agents.say(*p, &word));
            }
            Action::Form(world) => self.form(world, &reason, agents, observe),
            Action::Dump { generation } => {
                tell(format!("ask every rank of world {generation} where it stands"), observe);
                self.flights = Some(vec![None; self.members().len()]);
                self.asked_at = self.now();
                self.members().iter().for_each(|p| agents.say(*p, &ToRank::Dump));
            }
            Action::Intervene { step, detail, run_toml } => {
                let intervention =
                    Intervention { step, action: "skip".into(), detail, by: "guard.skip_batches".into() };
                self.interventions.push((intervention, run_toml));
            }
            Action::Evict { host } => tell(format!("place nothing on host {host} any more"), observe),
            Action::AskStop => self.members().iter().for_each(|p| agents.say(*p, &ToRank::Stop)),
            Action::Stop { code } => {
                self.end = Some(End { code, reason, done: self.done.clone() });
            }
        }
    }

    fn form(&mut self, world: World, reason: &str, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.addresses.clear();
        self.flights = None;
        self.signs.moves();
        match self.assignments(&world, &world.processes, agents) {
            Ok(words) => words.iter().for_each(|(process, word)| agents.say(*process, word)),
            Err(e) => {
                let reason = format!("the ranks cannot be connected: {e}");
                return self.end = Some(End { code: policy::INTERNAL, reason, done: None });
            }
        }
        let committed = self.policy.reached();
        let (from, resumed) = match &world.origin {
            Origin::Fresh => ("the start".to_string(), 1),
            Origin::Disk(path) => (format!("disk, {}", path.display()), 0),
            Origin::Peers { step, .. } => {
                if *step < committed {
                    let text = format!(
                        "world {} goes on after step {step}, but step {committed} was committed",
                        world.generation
                    );
                    self.repairs.went_back(text);
                }
                (format!("peers, step {step}"), step + 1)
            }
        };
        if world.generation > 1 {
            self.repairs.placed(reason, resumed, self.seconds());
            observe(&Event::Decided {
                id: 0,
                action: format!("form world {}", world.generation),
                reason: reason.into(),
            });
            observe(&Event::World(events::World {
                generation: world.generation,
                ranks: world.processes.len(),
                layout: world.layout,
                origin: from,
            }));
        }
    }

    /// What `members` of `world` are told of their places.
    fn assignments(
        &self,
        world: &World,
        members: &[Process],
        agents: &mut dyn Agents,
    ) -> std::io::Result<Vec<(Process, ToRank)>> {
        let run = self.policy.run();
        let options = self.trade.fabric(run, world.generation);
        let fabric = agents.fabric(members, run.layout.transport == Transport::Shm, &options)?;
        let cores = self.trade.cores(run);
        let place = |(process, fabric): (&Process, _)| {
            let rank = world.processes.iter().position(|p| p == process)?;
            let faults = self.faults.iter().filter(|f| f.rank as usize == rank);
            let word = ToRank::Assign(Box::new(Assignment {
                generation: world.generation,
                rank: rank as u32,
                world: world.processes.len() as u32,
                run_toml: world.run_toml.clone(),
                fabric,
                cores: cores.get(rank).cloned().unwrap_or_default(),
                origin: world.origin.clone(),
                faults: faults.copied().collect(),
            }));
            Some((*process, word))
        };
        Ok(members.iter().zip(fabric).filter_map(place).collect())
    }
}

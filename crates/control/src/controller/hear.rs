//! What agents and ranks say, and what follows for those who keep the account.

use std::io::Write;

use events::Event;
use policy::{Input, Process};

use super::{Controller, Judgement};
use crate::agent::{Agents, Heard, News};
use crate::fault::{Fault, FaultKind, Moment};
use crate::identity::Identity;
use crate::journal::Entry;
use crate::wire::{FromRank, ToRank};

impl Controller<'_> {
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
            Heard::Exited { how, by_itself } => {
                self.signs.forget(process);
                self.repairs.left(self.seconds());
                return self.feed(Input::Exited { process, how, by_itself }, agents, observe);
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
            FromRank::Ready { identity } => match self.stranger(process, &identity) {
                None => self.feed(Input::Ready { process }, agents, observe),
                Some(reason) => self.feed(Input::Unfit { process, reason }, agents, observe),
            },
            FromRank::Unfit { reason } => {
                let reason = format!("{} cannot take a place: {reason}", self.named(process));
                self.feed(Input::Unfit { process, reason }, agents, observe);
            }
            FromRank::Reading => self.feed(Input::Reading { process }, agents, observe),
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
            FromRank::Leaves { generation, step, leaves } => {
                if self.generation() == generation && self.rank(process).is_some() {
                    self.claimed(process, step, leaves);
                }
            }
            FromRank::Checked { step, leaves, seconds, problem } => {
                self.checked(process, (step, leaves, seconds), problem, agents, observe);
            }
            FromRank::Carried { generation, step } => {
                if self.generation() == generation && self.rank(process).is_some() {
                    self.carried = Some(step);
                }
            }
            FromRank::Interrupted { generation, held, cause } => {
                if self.generation() == generation {
                    self.repairs.left(self.seconds());
                    if let Some(rank) = self.rank(process).filter(|_| held.any_corrupt()) {
                        self.repairs.failed_hash(rank as u32);
                    }
                }
                self.feed(Input::Interrupted { process, generation, held, cause }, agents, observe);
            }
            FromRank::Flight(flight) => self.flight(process, flight, agents, observe),
            FromRank::Done(done) => {
                self.signs.forget(process);
                self.done = Some(done);
                self.repairs.finished().iter().for_each(&mut *observe);
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

    /// Why a process that says so of itself is none of this run.
    fn stranger(&self, process: Process, identity: &Identity) -> Option<String> {
        let differ = self.config.identity.differences(identity);
        (!differ.is_empty()).then(|| {
            format!(
                "{} is not of this run: {}; the data and the lockstep of every host must be those that the run began with: bring \
                 them back, then go on with --resume",
                self.named(process),
                differ.join(", ")
            )
        })
    }

    fn named(&self, process: Process) -> String {
        match self.hosts.get(&process) {
            Some(host) => format!("{process} on host {host}"),
            None => process.to_string(),
        }
    }

    fn event(&mut self, process: Process, event: Event, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        // Who has no place any more has nothing to tell about the run.
        if self.rank(process).is_none() && !matches!(event, Event::Notice { .. }) {
            return;
        }
        // The controller before has told of it, and did not live to say to the agent that it is written down.
        if matches!(&event, Event::Step(step) if self.rebuilt && step.step <= self.policy.reached()) {
            return;
        }
        // Each rank tells it, so that it is known whoever ends then; it is one.
        if matches!(&event, Event::Digest { .. }) && std::mem::replace(&mut self.digest_told, true) {
            return;
        }
        let at = self.seconds();
        observe(&event);
        let input = match event {
            Event::Step(step) => {
                self.stepped_at = Some(at);
                self.told = step.step;
                self.repairs.step(step.step, at).iter().for_each(&mut *observe);
                self.missed(step.step, observe);
                Input::Step { step: step.step }
            }
            Event::Checkpoint { step, path, .. } => {
                self.repairs.checkpoint_written();
                self.checks.checkpoint(step, path.clone().into());
                Input::Checkpoint { step, path: path.into() }
            }
            Event::CheckpointFailed { step, .. } => {
                self.repairs.checkpoint_failed(step);
                Input::Working
            }
            Event::Replayed { step, .. } => {
                self.repairs.replayed(step);
                Input::Working
            }
            Event::ClockJumped { rank, .. } => {
                self.repairs.clock_seen(rank.map(|rank| rank as u32));
                return;
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
                    if !self.repairs.has_struck(&fault) {
                        self.repairs.fired(fault, at);
                        self.journal.write(&Entry::Fired { fault, at: self.now() });
                    }
                } else if let Some(fault) = struck.map(|at| self.faults.remove(at)) {
                    if let (FaultKind::Clock { seconds }, 0) = (fault.kind, fault.rank) {
                        // The machine's clock is this process's, too.
                        self.config.wall.jump(seconds);
                    }
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

    /// When all was well for the last time, as far as it shows: the rank's last words, or the last step.
    pub(super) fn last_sign(&self, told: &policy::Trouble) -> Option<f64> {
        let process = told.rank.and_then(|rank| self.members().get(rank as usize));
        let said = process.and_then(|process| self.signs.last(*process)).map(|ms| ms as f64 / 1000.0);
        match told.kind.as_str() {
            "exit" | "silence" | "stopped" | "host lost" => said,
            _ => self.stepped_at,
        }
    }

    /// Faults that were due by `step` for ranks that this world does not have strike nobody.
    pub(super) fn missed(&mut self, step: u64, observe: &mut dyn FnMut(&Event)) {
        let size = self.members().len() as u32;
        let (gone, faults) = self
            .faults
            .drain(..)
            .partition(|fault| fault.step <= step && !fault.there(size) && fault.kind != FaultKind::Poison);
        self.faults = faults;
        self.forgo(gone, observe);
    }

    /// The world in which `step` was decided has ended: faults that were due by then and did not strike strike nobody.
    pub(super) fn let_pass(&mut self, step: u64, observe: &mut dyn FnMut(&Event)) {
        let again = |kind| matches!(kind, FaultKind::Poison | FaultKind::KillAt(Moment::Load));
        let (gone, faults) = self.faults.drain(..).partition(|fault| fault.step <= step && !again(fault.kind));
        self.faults = faults;
        self.forgo(gone, observe);
    }

    fn forgo(&mut self, gone: Vec<Fault>, observe: &mut dyn FnMut(&Event)) {
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
    pub(super) fn all_addresses(&self) -> Option<Vec<String>> {
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
    pub(super) fn judge(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let Some(flights) = self.flights.take() else { return };
        let Judgement { ranks, reason, still_ms } = self.trade.verdict(self.policy.run(), &flights);
        self.feed(Input::Verdict { ranks, reason, still_ms }, agents, observe);
    }
}

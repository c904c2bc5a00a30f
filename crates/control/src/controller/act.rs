//! Asking the policy, and doing what it answers.

use events::{Event, Intervention};
use policy::{Action, Decision, Input, Origin, Process, World};
use spec::Transport;

use super::{Change, Controller, End, Survey};
use crate::agent::Agents;
use crate::journal::Entry;
use crate::wire::{Assignment, ToRank};

impl Controller<'_> {
    /// Tells the policy, writes it down, does what it answers.
    pub(super) fn feed(&mut self, input: Input, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        let at = self.now();
        let quiet = matches!(input, Input::Tick | Input::Working | Input::Still { .. } | Input::Reading { .. });
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
        self.tell_recorded(agents, observe);
    }

    /// Tells the policy that what it changes is written down, or is not.
    pub(super) fn tell_recorded(&mut self, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        if let Some(recorded) = self.recorded.take() {
            self.feed(Input::Recorded { refused: recorded.err() }, agents, observe);
        }
    }

    /// Writes a change down.
    pub(super) fn record(&mut self, change: Change, observe: &mut dyn FnMut(&Event)) {
        let Change { intervention, run_toml, asked } = change;
        let recorded = self.trade.record(&intervention, &run_toml);
        if asked {
            self.outcome = Some(recorded.clone().map(|()| intervention.step));
        }
        if recorded.is_ok() {
            observe(&Event::Intervention(intervention));
        }
        self.recorded = Some(recorded);
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
            action @ Action::Intervene { .. } => {
                if let Some(change) = change(action) {
                    self.record(change, observe);
                }
            }
            Action::Survey => {
                let Survey { saved, notes } = self.trade.survey(self.policy.wanted());
                notes.into_iter().for_each(|text| observe(&Event::Notice { text }));
                self.checks.hold_again();
                self.feed(Input::Found { saved }, agents, observe);
            }
            Action::Refuse => self.outcome = Some(Err(reason)),
            Action::Distrust { after } => self.distrust(after, &reason, observe),
            Action::Evict { host } => tell(format!("place nothing on host {host} any more"), observe),
            Action::AskStop => self.members().iter().for_each(|p| agents.say(*p, &ToRank::Stop)),
            Action::Stop { code } => {
                self.end = Some(End { code, reason, done: self.done.clone() });
            }
        }
    }

    pub(super) fn distrust(&self, after: u64, reason: &str, observe: &mut dyn FnMut(&Event)) {
        let notes = self.trade.distrust(self.policy.run(), after);
        notes.into_iter().for_each(|note| observe(&Event::Notice { text: format!("{note}: {reason}") }));
    }

    fn form(&mut self, world: World, reason: &str, agents: &mut dyn Agents, observe: &mut dyn FnMut(&Event)) {
        self.addresses.clear();
        self.flights = None;
        self.digest_told = false;
        self.signs.moves();
        match self.assignments(&world, &world.processes, agents) {
            Ok(words) => words.iter().for_each(|(process, word)| agents.say(*process, word)),
            Err(e) => {
                let reason = format!("the ranks cannot be connected: {e}");
                return self.end = Some(End { code: policy::INTERNAL, reason, done: None });
            }
        }
        let committed = self.policy.reached();
        if let (Some(carried), Origin::Peers { step, .. }) = (self.carried.take(), &world.origin)
            && carried.step == *step
            && *step == self.told + 1
        {
            observe(&Event::Step(carried));
            // Its world is over: who was to be struck in it and was not there is not struck any more.
            self.let_pass(*step, observe);
        }
        self.told = committed;
        let (from, resumed) = match &world.origin {
            Origin::Fresh => ("the start".to_string(), 1),
            Origin::Disk(path) => (format!("disk, {}", path.display()), committed + 1),
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
        self.checks_in(&world);
        if world.generation == 1 {
            self.repairs.seated(&world.processes);
        } else {
            self.repairs.placed(reason, resumed, &world.processes, self.seconds());
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
    pub(super) fn assignments(
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
            // A link to a rank that this world does not have cannot be cut.
            let size = world.processes.len() as u32;
            let faults = self.faults.iter().filter(|f| f.rank as usize == rank && f.there(size));
            let word = ToRank::Assign(Box::new(Assignment {
                generation: world.generation,
                rank: rank as u32,
                world: world.processes.len() as u32,
                run_toml: world.run_toml.clone(),
                fabric,
                cores: cores.get(rank).cloned().unwrap_or_default(),
                origin: world.origin.clone(),
                faults: faults.copied().collect(),
                recheck: world.recheck,
                checked: self.policy.checked(),
                unseen: self.policy.unseen(),
            }));
            Some((*process, word))
        };
        Ok(members.iter().zip(fabric).filter_map(place).collect())
    }
}

/// What is to be written down of a change.
pub(super) fn change(action: Action) -> Option<Change> {
    let Action::Intervene { step, detail, set, run_toml, asked } = action else { return None };
    let (action, by) = if asked { ("reload", "lockstep reload") } else { ("skip", "guard.skip_batches") };
    let set = Some(set).filter(|set| !set.is_empty());
    let intervention = Intervention { step, action: action.into(), detail, by: by.into(), set };
    Some(Change { intervention, run_toml, asked })
}

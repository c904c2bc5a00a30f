//! Going on where another controller was: by its journal, and with agents that were at work meanwhile.

use events::Event;
use policy::{Action, Decision, Input, Process};

use super::act::change;
use super::{Config, Controller, End, Trade};
use crate::agent::Agents;
use crate::fault::FaultKind;
use crate::journal::{Entry, Journal};
use crate::repair::Repairs;
use crate::wire::ToRank;

impl<'a> Controller<'a> {
    /// Goes on where another controller was, by its journal; `left` is what that one gave on, if it was in this process.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub fn rebuild(
        config: &'a Config,
        trade: &'a dyn Trade,
        left: Option<(Repairs, Journal)>,
    ) -> std::io::Result<Self> {
        let told = left.is_some();
        let (repairs, journal) = match left {
            Some(left) => left,
            None => (Repairs::default(), Journal::open(&config.journal)?),
        };
        let entries = journal.entries()?;
        let mut controller = Self::empty(config, trade, journal);
        controller.rebuilt = true;
        controller.repairs = repairs;
        let now = controller.now();
        // After which step checkpoints are to be set aside, if no step has come since.
        let mut distrusted = None;
        for entry in entries {
            match entry {
                Entry::Input { at, input } => {
                    if let Input::Ready { process } | Input::Loaded { process, .. } = &input {
                        controller.signs.expect(*process, now);
                    }
                    if let Input::Step { .. } = &input {
                        distrusted = None;
                    }
                    match &input {
                        Input::HostLost { host, .. } => controller.host_is_away(host),
                        Input::Exited { process, .. }
                        | Input::Done { process }
                        | Input::Failed { process, .. }
                        | Input::SpawnFailed { process, .. }
                        | Input::Silent { process, .. } => controller.signs.forget(*process),
                        Input::Step { step } if !told => drop(controller.repairs.step(*step, at as f64 / 1000.0)),
                        Input::Interrupted { process, held, .. } if !told && held.any_corrupt() => {
                            if let Some(rank) = controller.rank(*process) {
                                controller.repairs.failed_hash(rank as u32);
                            }
                        }
                        Input::Checked { step } | Input::Disputed { step, .. } => controller.checks.over(*step),
                        Input::Checkpoint { step, path } => controller.checks.checkpoint(*step, path.clone()),
                        Input::Recorded { refused } => {
                            if let Some(change) = controller.unwritten.take() {
                                let step = change.intervention.step;
                                if change.asked {
                                    controller.outcome = Some(refused.clone().map_or(Ok(step), Err));
                                }
                                if refused.is_none() {
                                    // It is there, if nobody has taken it away.
                                    drop(trade.record(&change.intervention, &change.run_toml));
                                }
                            }
                        }
                        _ => {}
                    }
                    for Decision { action, reason } in controller.policy.on(at, input) {
                        match action {
                            Action::Kill { process } => {
                                controller.signs.forget(process);
                                controller.sent_away.insert(process);
                            }
                            Action::Spawn { process, host } => {
                                controller.signs.expect(process, now);
                                controller.hosts.insert(process, host);
                            }
                            Action::Form(world) => {
                                controller.addresses.clear();
                                controller.repairs.seated(&world.processes);
                                controller.checks_in(&world);
                            }
                            action @ Action::Intervene { .. } => controller.unwritten = change(action),
                            Action::Refuse => controller.outcome = Some(Err(reason)),
                            Action::Distrust { after } => distrusted = Some(after),
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
                    controller.faults.retain(|f| *f != fault || f.kind == FaultKind::Poison);
                    if !told {
                        controller.repairs.fired(fault, at as f64 / 1000.0);
                    }
                }
                Entry::Claimed { process, step, leaves } => controller.claim(process, step, leaves),
                Entry::Checking { spare, step, first } => controller.checks.give(step, spare, first),
                Entry::CheckOver { step } => controller.checks.over(step),
                Entry::Missed { fault } => controller.faults.retain(|f| *f != fault),
                Entry::Begin { faults, .. } => controller.faults = faults,
                Entry::Mark { host, session, seq } => drop(controller.marks.insert(host, (session, seq))),
                Entry::Decision { .. } => {}
            }
        }
        if let Some(after) = distrusted {
            // The controller before may not have lived to do it.
            drop(trade.distrust(controller.policy.run(), after));
        }
        controller.ticked_at = controller.now();
        controller.told = controller.policy.reached();
        Ok(controller)
    }

    /// An agent is here (again): what it runs and what it should run are brought together. It ignores what it was told before.
    pub(super) fn present(
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
        if let Some((spare, order)) = self.order_under_way().filter(|(spare, _)| here(spare)) {
            agents.say(spare, &order);
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

    /// Its processes are given up: their words count no more.
    pub(super) fn host_is_away(&mut self, host: &str) {
        let there = self.hosts.iter().filter(|(_, at)| *at == host).map(|(process, _)| *process);
        for process in there {
            self.signs.forget(process);
            self.sent_away.insert(process);
        }
    }
}

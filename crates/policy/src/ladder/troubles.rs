//! What goes wrong: who is to blame, what is said of it, and whether it was once too often.

use super::{Next, Phase, Policy};
use crate::action::{Action, Trouble};
use crate::hosts::Doing;
use crate::input::{Cause, Held, Process};
use crate::{BUDGET_SPENT, INTERNAL};

/// A step may fail so often in the same way before the run ends.
const SAME_MAX: usize = 3;

impl Policy {
    /// Something is wrong: say it, end the world, and count it against the budget unless the world is ending already. At the end of the
    /// run nothing is: its result is known.
    pub(super) fn trouble(&mut self, now: u64, kind: &str, process: Option<Process>, detail: String) {
        if self.is_ending() {
            return;
        }
        self.troubles += 1;
        let rank = process.and_then(|p| self.rank(p));
        let host = process.and_then(|p| self.hosts.host(p));
        let trouble =
            Trouble { id: self.troubles, kind: kind.into(), rank, host, step: self.committed, detail: detail.clone() };
        self.act(Action::Tell(trouble), detail.clone());
        if !std::mem::replace(&mut self.counted, true) && self.spent(now) {
            let who = rank.map_or(String::new(), |rank| format!("rank {rank} ended without finishing: "));
            return self.stop(BUDGET_SPENT, format!("{who}{detail}; {}", self.budget()));
        }
        let (again, times) = (self.committed + 1, self.times(format!("{kind} {rank:?}")));
        if times > SAME_MAX {
            let text = format!(
                "the same failure at the same step: step {again} failed {times} times by the same ({kind}): {detail}; what does \
                 not go away is no accident of a machine, so the run gives up before guard.restarts_max = {} recoveries: look at \
                 the code, the data, or the host that is named",
                self.guard.restarts_max
            );
            return self.stop(BUDGET_SPENT, text);
        }
        if self.phase == Phase::Running {
            self.end_world(now, &detail);
        }
    }

    /// Why there is no recovery more.
    fn budget(&self) -> String {
        match (self.guard.restarts_max, self.guard.restarts_window_s) {
            (0, _) => "guard.restarts_max = 0: no failure is repaired".into(),
            (n, seconds) => format!("this is one more than guard.restarts_max = {n} recoveries in {seconds} s"),
        }
    }

    /// How often the step under way has failed like this, this time included.
    pub(super) fn times(&mut self, how: String) -> usize {
        let times = self.replays.entry((self.committed + 1, how)).or_default();
        *times += 1;
        *times
    }

    /// One more recovery in the window; true if it is one too many.
    pub(super) fn spent(&mut self, now: u64) -> bool {
        let window = 1000 * self.guard.restarts_window_s;
        self.recoveries.push_back(now);
        self.recoveries.retain(|at| at + window > now);
        self.recoveries.len() > self.guard.restarts_max
    }

    /// A process is gone; its place is empty for a while or taken at once.
    pub(super) fn gone(&mut self, now: u64, process: Process, how: &str) {
        if *self.hosts.doing(process) == Doing::Gone {
            return;
        }
        if self.leaves_at_the_end(process) {
            return;
        }
        let member = self.is_member(process);
        let was = self.hosts.doing(process).clone();
        self.hosts.set(process, Doing::Gone);
        if !member {
            self.note_failure(now, process);
            if matches!(was, Doing::Starting(_)) {
                // Never came up: this too is a recovery, or it would be tried for ever.
                if self.spent(now) {
                    return self
                        .stop(BUDGET_SPENT, format!("{process} ended before it was ready: {how}; {}", self.budget()));
                }
            }
            return;
        }
        self.trouble(now, "exit", Some(process), how.into());
        self.note_failure(now, process);
    }

    pub(super) fn note_failure(&mut self, now: u64, process: Process) {
        let (window, limit) = (1000 * self.guard.restarts_window_s, self.guard.evict_after);
        if let Some(host) = self.hosts.failed(process, now, window, limit, self.guard.respawn_after_ms) {
            self.act(Action::Evict { host }, format!("{limit} failures there within {window} ms"));
        }
    }

    pub(super) fn kill(&mut self, now: u64, process: Process, kind: &str, reason: String) {
        if self.is_ending() && self.rank(process).is_some() {
            self.act(Action::Kill { process }, reason);
            self.leaves_at_the_end(process);
            return;
        }
        if self.is_member(process) {
            self.trouble(now, kind, Some(process), reason.clone());
        }
        self.act(Action::Kill { process }, reason);
        self.hosts.set(process, Doing::Gone);
        self.note_failure(now, process);
    }

    pub(super) fn silent(&mut self, now: u64, process: Process, age_ms: u64, stopped: bool) {
        if matches!(self.hosts.doing(process), Doing::Gone | Doing::Done | Doing::Failed(..)) {
            return;
        }
        let (kind, detail) = if stopped {
            ("stopped", format!("its process stands still (stopped by a signal) for {age_ms} ms"))
        } else {
            (
                "silence",
                format!(
                    "no sign of life for {age_ms} ms (guard.heartbeat_timeout_ms = {})",
                    self.guard.heartbeat_timeout_ms
                ),
            )
        };
        self.kill(now, process, kind, detail);
    }

    pub(super) fn host_lost(&mut self, now: u64, name: &str, reason: &str) {
        if let Some(host) = self.hosts.hosts.get_mut(name) {
            (host.away, host.away_since) = (true, now);
        }
        let there = |p: &crate::hosts::Known| p.host == name && p.doing != Doing::Gone;
        let lost: Vec<_> = self.hosts.processes.iter().filter(|(_, p)| there(p)).map(|(id, _)| *id).collect();
        if self.is_ending() {
            for process in lost {
                self.leaves_at_the_end(process);
            }
            return;
        }
        // Whatever was there is gone by one cause, and counts once.
        let member = lost.iter().copied().find(|process| self.is_member(*process));
        lost.iter().for_each(|process| self.hosts.set(*process, Doing::Gone));
        if let Some(process) = member {
            self.trouble(now, "host lost", Some(process), format!("host {name} is gone: {reason}"));
        }
        if let Some(process) = member.or(lost.first().copied()) {
            self.note_failure(now, process);
        }
    }

    pub(super) fn interrupted(&mut self, now: u64, process: Process, generation: u64, held: Held, cause: Cause) {
        if !self.is_member(process) || self.world().is_none_or(|w| w.generation != generation) {
            return;
        }
        if *self.hosts.doing(process) == Doing::Gone || self.leaves_at_the_end(process) {
            return;
        }
        self.hosts.set(process, Doing::Holds(held, cause.clone()));
        // Of a broken device all ranks say the same, also those that others have made leave their world meanwhile.
        let news = matches!(cause, Cause::Broken { .. }) && !self.broken_seen;
        if self.phase != Phase::Running && !news {
            return;
        }
        let named = |rank: u32| format!("rank {rank}");
        let me = self.rank(process).unwrap_or(0);
        match cause {
            Cause::Aborted => self.end_world(now, "a member left"),
            // Its exit, or its silence, comes by itself and says more.
            Cause::PeerGone { rank, reason } => {
                self.suspicion = Some(("peer gone", self.process(rank), reason.clone()));
                self.end_world(now, &reason);
            }
            Cause::NotConnected { reason } => {
                self.suspicion = Some(("not connected", None, reason.clone()));
                self.end_world(now, &reason);
            }
            Cause::Deadline { rank, reason } => {
                let detail = format!("{} waited too long for {}: {reason}", named(me), named(rank));
                self.trouble(now, "deadline", self.process(rank), detail);
            }
            Cause::BadMessage { rank, reason } => {
                let detail = format!("{} got a bad message from {}: {reason}", named(me), named(rank));
                self.trouble(now, "bad message", self.process(rank), detail);
            }
            Cause::Corrupt { ranks } => {
                let process = ranks.first().and_then(|rank| self.process(*rank));
                self.trouble(now, "corrupt", process, format!("state of ranks {ranks:?} failed its hash"));
            }
            Cause::Broken { step, ranks } => self.broken(now, step, &ranks),
            Cause::NotFinite { step, reason } => {
                self.trouble(now, "not finite", None, format!("step {step}: {reason}"));
            }
            Cause::Disagree { reason } => self.disagree(now, reason),
            Cause::Lost { reason } => self.trouble(now, "lost", None, reason),
        }
    }

    /// Spares have found what members made of a step wrong. The run goes back to before it, and other ranks check it: a fault of
    /// a moment is gone then, a broken device is found. Who is found wrong again is replaced.
    pub(super) fn disputed(&mut self, now: u64, step: u64, processes: &[Process], detail: String) {
        let Some(back) = self.saves.back(step, self.reached) else { return };
        let member = processes.iter().copied().find(|process| self.is_member(*process));
        let times = member.map_or(0, |process| {
            let times = self.accused.entry(process).or_default();
            *times += 1;
            *times
        });
        let (first, last, from) = (back.first, self.reached, back.name());
        let detail = format!("{detail}; steps {first} to {last} may be spoilt and are computed again, from {from}");
        self.act(Action::Distrust { after: first - 1 }, format!("steps {first} to {last} may be spoilt"));
        (self.suspect, self.recheck) = (Some(back), true);
        match member.filter(|_| times > 1) {
            Some(process) => self.kill(now, process, "broken device", detail),
            None => self.trouble(now, "disputed", member, detail),
        }
        if self.phase == Phase::Forming && self.go_back() {
            self.origin = Next::Saved;
        }
    }

    /// Copies of one state are not alike: some step made them so. Where steps are checked it was one that was not, and what was saved
    /// since has it, too. The next steps are checked all: who made it may still be there.
    fn disagree(&mut self, now: u64, reason: String) {
        let checks = super::checks_every(self.run()) > 0 || self.saves.unseen().is_some();
        let back = self.saves.back(self.saves.all_checked() + 1, self.reached);
        let Some(back) = back.filter(|_| checks) else {
            return self.trouble(now, "disagree", None, reason);
        };
        let (first, last, from) = (back.first, self.reached, back.name());
        let detail = format!(
            "{reason}; steps {first} to {last} may be spoilt, as some were not checked, and are computed again, from {from}"
        );
        self.act(Action::Distrust { after: first - 1 }, format!("steps {first} to {last} may be spoilt"));
        (self.suspect, self.recheck) = (Some(back), true);
        self.trouble(now, "disagree", None, detail);
    }

    /// Ranks of which one has a broken device: one of them gets another process. Where nobody can tell which it is they have their
    /// turns, because the step fails again as long as it is the wrong one.
    pub(super) fn broken(&mut self, now: u64, step: u64, ranks: &[u32]) {
        self.broken_seen = true;
        self.doubt = ranks.len() > 1;
        let step = step.max(1);
        let turn = self.times("broken".into()) - 1;
        // Where spares have named one before it is the first.
        let named = ranks.iter().find(|rank| self.process(**rank).is_some_and(|p| self.accused.contains_key(&p)));
        let Some(rank) = named.or(ranks.get(turn % ranks.len().max(1))) else { return };
        let Some(process) = self.process(*rank) else { return };
        let others = match ranks.len() {
            1 => String::new(),
            n => format!(", or that of another one of ranks {ranks:?} (turn {} of {n})", turn % n + 1),
        };
        // What it made since the last check nobody has looked at.
        let back = self.saves.back(step, self.reached);
        let unseen = match &back {
            Some(back) => format!(
                "; steps {} to {} were not checked (guard.recompute_every = {}) and are computed again, from {}",
                back.first,
                self.reached,
                self.run().guard.recompute_every,
                back.name()
            ),
            None => String::new(),
        };
        let detail = format!(
            "the gradients of step {step} come out differently where others compute them, again and again: its device is broken{others}{unseen}"
        );
        if let Some(back) = &back {
            // At once: should the run end here, nobody goes on from them.
            let text = format!("steps {} to {} may be spoilt by a broken device", back.first, self.reached);
            self.act(Action::Distrust { after: back.first - 1 }, text);
        }
        self.suspect = back;
        self.kill(now, process, "broken device", detail);
    }

    pub(super) fn failed(&mut self, now: u64, process: Process, code: i32, reason: &str, alike: bool) {
        let member = self.is_member(process);
        self.hosts.set(process, Doing::Failed(code, reason.into()));
        if alike && member {
            // The others are about to say the same: their last words are waited for.
            if self.members().iter().all(|p| matches!(self.hosts.doing(*p), Doing::Failed(..))) {
                self.stop(code, reason);
            }
            return;
        }
        if code != INTERNAL {
            return self.stop(code, reason);
        }
        if self.leaves_at_the_end(process) {
            return;
        }
        if !member {
            return self.gone(now, process, reason);
        }
        self.trouble(now, "failed", Some(process), reason.into());
        self.note_failure(now, process);
    }
}

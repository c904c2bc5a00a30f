//! Another program takes over: its processes take the places of the old ones, one by one, and get the state from those that stay.

use super::{Next, Policy};
use crate::action::Action;
use crate::hosts::Doing;
use crate::input::Process;

const REASON: &str = "a process of the new program takes its place";

impl Policy {
    /// All processes of now are to be replaced.
    pub(super) fn replace(&mut self) {
        self.old = self.hosts.processes.keys().copied().collect();
        self.renewed_at = 0;
    }

    /// Sends the next old process away, once a new one is there and every piece of state has another holder.
    pub(super) fn renew(&mut self, now: u64) {
        let there = |p: &Process| !matches!(self.hosts.doing(*p), Doing::Gone | Doing::Done | Doing::Failed(..));
        self.old = self.old.iter().copied().filter(there).collect();
        let idle = |p: &Process| matches!(self.hosts.doing(*p), Doing::Ready | Doing::Starting(_));
        let idle: Vec<_> = self.old.iter().copied().filter(idle).collect();
        for process in idle {
            self.retire(process);
        }
        let members = self.members();
        let steady = self.is_whole() && members.iter().all(|p| *self.hosts.doing(*p) == Doing::Member);
        // After a step of this world all mirrors are up to date again.
        if !steady || self.reached <= self.renewed_at || self.stopping {
            return;
        }
        if self.hosts.available().iter().all(|p| self.old.contains(p)) {
            return;
        }
        let Some(process) = members.iter().copied().find(|p| self.old.contains(p)) else { return };
        let holds: Vec<_> = members.iter().map(|p| (*p != process).then_some(&[][..])).collect();
        let run = self.run();
        if !self.laws.covers(run, &holds, run) {
            return;
        }
        self.leaving = Some(process);
        self.end_world(now, REASON);
    }

    /// All members of the world that ended are heard: who was to leave goes, unless something else has happened to the others.
    pub(super) fn let_go(&mut self) {
        let (Some(process), Next::Peers(left)) = (self.leaving.take(), &self.origin) else { return };
        let covered = self.laws.covers(&left.run, &left.holds(|other| other != process), &left.run);
        // Also if it stays: the next try is after a step, when mirrors are up to date.
        self.renewed_at = self.reached;
        if covered {
            self.retire(process);
        }
    }

    fn retire(&mut self, process: Process) {
        self.act(Action::Kill { process }, REASON);
        self.hosts.set(process, Doing::Gone);
        self.old.remove(&process);
    }
}

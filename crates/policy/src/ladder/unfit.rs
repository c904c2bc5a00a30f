//! A process that is not of this run: what it has read, or what it computes, is something else.

use super::Policy;
use crate::CHANGED;
use crate::action::Action;
use crate::hosts::Doing;

impl Policy {
    /// It gets no place, and nothing more is started on its host: what it found there the next one would find, too. Those that
    /// are at work there had the run's data before, and go on. Before there was any world the run ends: nobody has begun.
    pub(super) fn unfit(&mut self, process: crate::Process, reason: &str) {
        if !matches!(self.hosts.doing(process), Doing::Starting(_) | Doing::Ready) {
            return;
        }
        self.act(Action::Kill { process }, "it is not of this run");
        self.hosts.set(process, Doing::Gone);
        if self.world.is_none() {
            return self.stop(CHANGED, reason);
        }
        if let Some(host) = self.hosts.close(process, reason) {
            self.act(Action::Evict { host }, reason);
        }
    }

    /// Why hosts get no more processes, if there is one that could else.
    pub(super) fn closed(&self) -> Option<&str> {
        self.hosts.hosts.values().find_map(|host| host.closed.as_deref())
    }
}

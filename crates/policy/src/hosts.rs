//! Processes, their hosts, and what failed there.

use std::collections::{BTreeMap, VecDeque};

use crate::input::{Cause, Held, Process};

/// What a process is doing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Doing {
    /// It was started at this time and has not said that it is ready.
    Starting(u64),
    /// It waits for a place.
    Ready,
    /// It has a place in the world of the moment.
    Member,
    /// Its world ended; it holds this and waits for a place.
    Holds(Held, Cause),
    /// It came to the end of the run.
    Done,
    /// It said why it cannot go on.
    Failed(i32, String),
    /// It is to be killed, or is gone.
    Gone,
}

#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub host: String,
    pub doing: Doing,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    pub slots: usize,
    pub away: bool,
    /// Since when, if it is.
    pub away_since: u64,
    pub evicted: bool,
    /// Why nothing more is started there, if so; what runs there goes on.
    pub closed: Option<String>,
    failures: VecDeque<u64>,
    // Places of processes that died are empty until then.
    empty_until: Vec<u64>,
}

/// All hosts and processes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hosts {
    pub hosts: BTreeMap<String, Host>,
    pub processes: BTreeMap<Process, Known>,
    next: u64,
}

impl Host {
    /// More processes may be started there.
    fn takes(&self) -> bool {
        !self.away && !self.evicted && self.closed.is_none()
    }
}

impl Hosts {
    pub fn join(&mut self, name: &str, slots: usize) {
        let host = self.hosts.entry(name.into()).or_default();
        if std::mem::replace(&mut host.away, false) {
            // It was gone, and may have been mended.
            host.closed = None;
        }
        host.slots = slots;
    }

    /// Starts nothing more where `process` was; its host, if that is news.
    pub fn close(&mut self, process: Process, reason: &str) -> Option<String> {
        let name = self.host(process)?;
        let host = self.hosts.get_mut(&name).filter(|host| host.closed.is_none())?;
        host.closed = Some(reason.into());
        Some(name)
    }

    /// Hosts that may get processes.
    pub fn open(&self) -> usize {
        self.hosts.values().filter(|h| h.takes()).count()
    }

    /// A place for one more process at `now`: on the host with the fewest processes that has one, so that hosts are alike.
    pub fn place(&mut self, now: u64) -> Option<(Process, String)> {
        let mut best: Option<(usize, &String)> = None;
        for (name, host) in self.hosts.iter().filter(|(_, h)| h.takes()) {
            let taken = self.taken(name, now);
            if taken < host.slots && best.is_none_or(|(fewest, _)| taken < fewest) {
                best = Some((taken, name));
            }
        }
        let host = best?.1.clone();
        let process = Process(self.next);
        self.next += 1;
        self.processes.insert(process, Known { host: host.clone(), doing: Doing::Starting(now) });
        Some((process, host))
    }

    fn taken(&self, name: &str, now: u64) -> usize {
        let alive = self.processes.values().filter(|p| p.host == name && !matches!(p.doing, Doing::Gone | Doing::Done));
        alive.count() + self.hosts[name].empty_until.iter().filter(|until| **until > now).count()
    }

    /// When a place that is kept empty can be taken.
    pub fn next_place(&self, now: u64) -> Option<u64> {
        let open = self.hosts.values().filter(|h| h.takes());
        open.flat_map(|h| h.empty_until.iter().copied().filter(|until| *until > now)).min()
    }

    /// Notes a failure of the host of `process`; true if it is one too many and other hosts are there.
    pub fn failed(
        &mut self,
        process: Process,
        now: u64,
        window_ms: u64,
        limit: usize,
        empty_ms: u64,
    ) -> Option<String> {
        let name = self.processes.get(&process)?.host.clone();
        let others = self.hosts.iter().any(|(n, h)| *n != name && h.takes());
        let host = self.hosts.get_mut(&name)?;
        host.empty_until.retain(|until| *until > now);
        if empty_ms > 0 {
            host.empty_until.push(now + empty_ms);
        }
        host.failures.push_back(now);
        host.failures.retain(|at| at + window_ms > now);
        if host.failures.len() < limit || !others || host.evicted {
            return None;
        }
        host.evicted = true;
        Some(name)
    }

    pub fn doing(&self, process: Process) -> &Doing {
        self.processes.get(&process).map_or(&Doing::Gone, |p| &p.doing)
    }

    pub fn set(&mut self, process: Process, doing: Doing) {
        if let Some(known) = self.processes.get_mut(&process) {
            known.doing = doing;
        }
    }

    pub fn host(&self, process: Process) -> Option<String> {
        self.processes.get(&process).map(|p| p.host.clone())
    }

    /// Those that can be given a place now.
    pub fn available(&self) -> Vec<Process> {
        let free = |p: &&Known| matches!(p.doing, Doing::Ready | Doing::Holds(..)) && !self.hosts[&p.host].evicted;
        self.processes.iter().filter(|(_, p)| free(p)).map(|(id, _)| *id).collect()
    }

    pub fn starting(&self) -> usize {
        self.processes.values().filter(|p| matches!(p.doing, Doing::Starting(_))).count()
    }

    /// All that are not gone.
    pub fn alive(&self) -> usize {
        self.processes.values().filter(|p| !matches!(p.doing, Doing::Gone | Doing::Done | Doing::Failed(..))).count()
    }
}

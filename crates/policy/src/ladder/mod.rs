//! The state machine: what an input means. What goes wrong is told and counted in `troubles`, what follows from it stands in
//! `form`, who holds the others up in `hang`.

mod form;
mod hang;
mod intervene;
mod renew;
mod saves;
mod troubles;
mod unfit;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use spec::{Guard, Run};

use crate::action::{Action, Decision, World};
use crate::hosts::{Doing, Hosts};
use crate::input::{Input, Piece, Process};
use crate::shrink::Laws;
use crate::{BUDGET_SPENT, STOPPED};
use saves::{Back, Saves};

/// How long the members of an ended world may take to say what they hold, at least.
const SETTLE_MS: u64 = 3_000;

/// How long members may take to say that they are done once one has said it, at least: a profile may still be written.
const DONE_MS: u64 = 30_000;

/// When all hosts are away they are waited for so long; agents let their ranks live as long (`--idle-limit-s`).
const AWAY_MS: u64 = 600_000;

/// All ranks may end by themselves at one step so often before the run ends.
const ALL_ALIKE_MAX: usize = 1;

/// Where the first world starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    /// The run as the person asked for it.
    pub run: Run,
    /// Cores of a host.
    pub cores: usize,
    /// The checkpoint to go on from: its step and folder.
    pub from: Option<(u64, PathBuf)>,
    /// Steps before that checkpoint that nobody has checked, in a run that checks; none: nothing is in doubt.
    pub unchecked: Option<Unchecked>,
}

/// What is known of a checkpoint whose last steps nobody has checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unchecked {
    /// The last step that was checked.
    pub checked: u64,
    /// The newest checkpoint up to it, if there is one: its step and folder.
    pub sound: Option<(u64, PathBuf)>,
    /// The first step that nobody could check any more when it was made, if there was one: later checks say nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unseen: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
enum Phase {
    /// Waits for processes; places are given as soon as there are enough.
    Forming,
    /// A world has its places.
    Running,
    /// A world was ended; its members say what they hold.
    Settling(u64),
    /// All is said.
    Ended,
}

/// The decisions about one run.
pub struct Policy {
    guard: Guard,
    /// The run under the layout that the person wants.
    wanted: Run,
    cores: usize,
    laws: Box<dyn Laws>,
    hosts: Hosts,
    phase: Phase,
    /// The world of the moment, or the last one, with its run.
    world: Option<(World, Run)>,
    /// Worlds of which something may still be held, with their run files.
    past: BTreeMap<u64, (Run, String)>,
    /// Where the next world's state comes from.
    origin: Next,
    /// Why it is not what processes hold.
    why_saved: String,
    connected: BTreeSet<Process>,
    loaded: BTreeSet<Process>,
    formed_at: u64,
    committed: u64,
    /// The last step of the state that the run goes on with: below `committed` on the way back from a checkpoint.
    reached: u64,
    saves: Saves,
    /// Steps that a broken device may have spoilt: the next world goes on before them.
    suspect: Option<Back>,
    /// What is on disk was looked at since the last world ended.
    surveyed: bool,
    /// Since when there is no world whose ranks are at work.
    unformed_since: Option<u64>,
    /// When a member of the world of the moment said that it is done.
    done_since: Option<u64>,
    /// A broken device was found in the world of the moment.
    broken_seen: bool,
    /// The next steps are to be checked by other ranks.
    recheck: bool,
    /// Members may have a broken device that nobody could name for sure, and no step was checked since.
    doubt: bool,
    /// Whom spares have found wrong, and how often.
    accused: BTreeMap<Process, usize>,
    progress_at: u64,
    longest_step_ms: u64,
    /// The members are asked where they stand.
    asked: Option<hang::Asked>,
    /// They were asked whether nothing moves, and something did: not asked again before then.
    moved_until: u64,
    recoveries: VecDeque<u64>,
    /// Troubles without a culprit at a step: they are replayed, but not for ever.
    replays: BTreeMap<(u64, String), usize>,
    troubles: u64,
    /// Who of the world of the moment ended by itself, and how.
    by_themselves: BTreeMap<Process, String>,
    /// A trouble of the world of the moment stands in `recoveries`.
    counted: bool,
    /// What a rank said of a peer that has not said anything itself.
    suspicion: Option<(&'static str, Option<Process>, String)>,
    stopping: bool,
    /// When somebody asked the run to stop.
    stop_asked: Option<u64>,
    /// Changes of what the run is whose step is not known yet.
    wishes: VecDeque<intervene::Wish>,
    /// The one that is being written down.
    written: Option<intervene::Written>,
    /// Hosts that are waited for before the first process is started.
    first_hosts: usize,
    /// Processes of the program before, still to be replaced.
    old: BTreeSet<Process>,
    /// The last step of the state when the last of them was to be.
    renewed_at: u64,
    /// Which of them goes when it has said its last words in the world that ends.
    leaving: Option<Process>,
    out: Vec<Decision>,
}

/// Where the next world's state comes from.
#[derive(Debug, Clone, PartialEq)]
enum Next {
    /// The start of the run, or the newest checkpoint.
    Saved,
    /// What processes hold: by rank of the world that ended.
    Peers(Box<Left>),
}

/// A world that ended, as far as it is believed.
#[derive(Debug, Clone, PartialEq)]
struct Left {
    generation: u64,
    run: Run,
    run_toml: String,
    /// By its ranks.
    holders: Vec<Option<Process>>,
    /// By its ranks: what is corrupt of what they hold.
    corrupt: Vec<Vec<Piece>>,
    step: u64,
    forward: Option<crate::Decided>,
}

impl Left {
    /// What it holds with who is there, as [`Laws::lost`] asks.
    fn holds(&self, there: impl Fn(Process) -> bool) -> Vec<Option<&[Piece]>> {
        let all = self.holders.iter().zip(&self.corrupt);
        all.map(|(holder, corrupt)| holder.is_some_and(&there).then_some(corrupt.as_slice())).collect()
    }
}

/// Of so many steps one is checked in this world; 0: none, also where ranks could only check themselves.
fn checks_every(run: &Run) -> u64 {
    if others_can_check(run) { run.guard.recompute_every } else { 0 }
}

/// Another rank has the state that is needed to compute a rank's gradients again.
fn others_can_check(run: &Run) -> bool {
    run.layout.dp > run.layout.group
}

impl Policy {
    /// Nothing has happened yet. The processes are asked for when hosts join.
    pub fn new(start: Start, laws: Box<dyn Laws>) -> Self {
        // The next step tells whether a device is broken that was already when these were made.
        let from = start.from.as_ref().map_or(0, |(step, _)| *step);
        let doubt = start.unchecked.as_ref().is_some_and(|unchecked| unchecked.checked < from);
        let recheck = doubt && others_can_check(&start.run);
        Self {
            guard: start.run.guard.clone(),
            wanted: start.run,
            cores: start.cores,
            laws,
            hosts: Hosts::default(),
            phase: Phase::Forming,
            world: None,
            past: BTreeMap::new(),
            origin: Next::Saved,
            why_saved: String::new(),
            connected: BTreeSet::new(),
            loaded: BTreeSet::new(),
            formed_at: 0,
            committed: start.from.as_ref().map_or(0, |(step, _)| *step),
            reached: 0,
            saves: match start.unchecked {
                Some(unchecked) => Saves::doubtful(start.from, unchecked),
                None => Saves::of(start.from),
            },
            suspect: None,
            surveyed: false,
            unformed_since: None,
            done_since: None,
            broken_seen: false,
            recheck,
            doubt: false,
            accused: BTreeMap::new(),
            progress_at: 0,
            longest_step_ms: 0,
            asked: None,
            moved_until: 0,
            recoveries: VecDeque::new(),
            replays: BTreeMap::new(),
            troubles: 0,
            by_themselves: BTreeMap::new(),
            counted: false,
            suspicion: None,
            stopping: false,
            stop_asked: None,
            wishes: VecDeque::new(),
            written: None,
            first_hosts: 1,
            old: BTreeSet::new(),
            renewed_at: 0,
            leaving: None,
            out: Vec::new(),
        }
    }

    /// Starts nothing before so many hosts are there.
    #[must_use]
    pub fn after_hosts(self, hosts: usize) -> Self {
        Self { first_hosts: hosts, ..self }
    }

    /// A world was ended and the next one is not formed.
    pub fn settling(&self) -> bool {
        matches!(self.phase, Phase::Settling(_) | Phase::Forming)
    }

    /// Somebody asked the run to stop.
    pub fn stopping(&self) -> bool {
        self.stopping
    }

    /// The world of the moment, or the last one.
    pub fn world(&self) -> Option<&World> {
        self.world.as_ref().map(|(world, _)| world)
    }

    /// The run of that world.
    pub fn run(&self) -> &Run {
        self.world.as_ref().map_or(&self.wanted, |(_, run)| run)
    }

    /// The run as it is to be from the next world on, under the layout that the person wants.
    pub fn wanted(&self) -> &Run {
        &self.wanted
    }

    /// The last committed step.
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// The last step of the state that the run goes on with.
    pub fn reached(&self) -> u64 {
        self.reached
    }

    /// How many processes are still of the program before ([`Input::Replace`]).
    /// The last one counts until a step was committed with the one in its place.
    pub fn replacing(&self) -> usize {
        let last = self.renewed_at > 0 && self.reached <= self.renewed_at;
        self.old.len().max(usize::from(last))
    }

    /// Processes that wait to take a place, the first first.
    pub fn waiting(&self) -> Vec<Process> {
        let waits = |p: &&Process| *self.hosts.doing(**p) == Doing::Ready;
        self.hosts.processes.keys().filter(waits).copied().collect()
    }

    /// The step of the newest checkpoint that this knows of; it must not be removed before a newer one is known.
    pub fn newest_saved(&self) -> Option<u64> {
        self.saves.newest().map(|(step, _)| *step)
    }

    /// The step of the checkpoint that the run would go back to if a device were broken now; it must not be removed.
    pub fn sound(&self) -> Option<u64> {
        self.saves.sound()
    }

    /// The last step that was checked, where anybody checks any; [`Policy::unseen`] says which ones before it were not.
    pub fn checked(&self) -> Option<u64> {
        let run = self.run();
        let checks = checks_every(run) > 0 || self.recheck || run.spares_check() == Ok(true);
        checks.then(|| self.saves.checked())
    }

    /// The first step that nobody can check any more, if there is one in what the run goes on with.
    pub fn unseen(&self) -> Option<u64> {
        self.saves.unseen()
    }

    /// The step of the newest checkpoint of which all is known to be good that was computed before it. While the run is about to go
    /// back only what it goes back to counts.
    pub fn vouched(&self) -> Option<u64> {
        let mut until = self.checked()?.min(self.saves.all_checked());
        if let Some(back) = &self.suspect {
            until = until.min(back.first - 1);
        }
        if self.origin == Next::Saved && self.phase != Phase::Running {
            until = until.min(self.saves.newest_step());
        }
        self.saves.newest_until(until)
    }

    /// True from the last decision on.
    pub fn ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// How many recoveries there were in the window that ends at the last of them.
    pub fn recoveries(&self) -> usize {
        self.recoveries.len()
    }

    /// What to do about `input` at `now_ms`. Words of older worlds change nothing.
    pub fn on(&mut self, now_ms: u64, input: Input) -> Vec<Decision> {
        if self.phase != Phase::Ended {
            self.take(now_ms, input);
            self.advance(now_ms);
        }
        std::mem::take(&mut self.out)
    }

    fn take(&mut self, now: u64, input: Input) {
        match input {
            Input::HostJoined { host, slots } => self.hosts.join(&host, slots),
            Input::HostLost { host, reason } => self.host_lost(now, &host, &reason),
            Input::SpawnFailed { process, reason } => {
                self.gone(now, process, &format!("it could not be started: {reason}"))
            }
            Input::Ready { process } => {
                if matches!(self.hosts.doing(process), Doing::Starting(_)) {
                    self.hosts.set(process, Doing::Ready);
                }
            }
            Input::Reading { process } => {
                if matches!(self.hosts.doing(process), Doing::Starting(_)) {
                    self.hosts.set(process, Doing::Starting(now));
                }
            }
            Input::Unfit { process, reason } => self.unfit(process, &reason),
            Input::Exited { process, how, by_itself } => match self.hosts.doing(process) {
                Doing::Done => {}
                Doing::Failed(..) => {}
                _ => {
                    if by_itself {
                        self.by_themselves.insert(process, how.clone());
                    }
                    self.gone(now, process, &how);
                }
            },
            Input::Silent { process, age_ms, stopped } => self.silent(now, process, age_ms, stopped),
            Input::Interrupted { process, generation, held, cause } => {
                self.interrupted(now, process, generation, held, cause)
            }
            Input::Connected { process, generation } => {
                if self.is_now(generation) {
                    self.connected.insert(process);
                }
            }
            Input::Loaded { process, generation, step } => {
                if self.is_now(generation) {
                    self.loaded.insert(process);
                    self.committed = self.committed.max(step);
                    self.reached = self.reached.max(step);
                    self.progress_at = now;
                }
            }
            Input::Step { step } => self.step(now, step),
            Input::Working => self.progress_at = now,
            Input::Checkpoint { step, path } => {
                self.progress_at = now;
                self.saves.written(step, path);
            }
            Input::Found { saved } => {
                self.progress_at = now;
                self.saves.found(saved);
                self.surveyed = true;
            }
            Input::Still { ms } => self.still(now, ms),
            Input::Verdict { ranks, reason, still_ms } => self.verdict(now, &ranks, &reason, still_ms),
            Input::Checked { step } => self.saves.begin_checks(step),
            Input::Disputed { step, processes, detail } => self.disputed(now, step, &processes, detail),
            Input::Erred { process, detail } => self.kill(now, process, "broken device", detail),
            Input::Done { process } => self.done(now, process),
            Input::Failed { process, code, reason, alike } => self.failed(now, process, code, &reason, alike),
            Input::Stop => {
                self.stop_asked.get_or_insert(now);
                if !std::mem::replace(&mut self.stopping, true) && self.phase == Phase::Running {
                    self.act(Action::AskStop, "somebody asked the run to stop");
                }
            }
            Input::Reload { sets } => self.reload(now, sets),
            Input::Recorded { refused } => self.recorded(refused),
            Input::Replace => self.replace(),
            Input::Tick => self.tick(now),
        }
    }

    fn act(&mut self, action: Action, reason: impl Into<String>) {
        self.out.push(Decision { action, reason: reason.into() });
    }

    fn stop(&mut self, code: i32, reason: impl Into<String>) {
        self.phase = Phase::Ended;
        self.act(Action::Stop { code }, reason);
    }

    fn is_now(&self, generation: u64) -> bool {
        self.phase == Phase::Running && self.world().is_some_and(|w| w.generation == generation)
    }

    fn rank(&self, process: Process) -> Option<u32> {
        self.world()?.processes.iter().position(|p| *p == process).map(|rank| rank as u32)
    }

    fn process(&self, rank: u32) -> Option<Process> {
        self.world()?.processes.get(rank as usize).copied()
    }

    fn is_member(&self, process: Process) -> bool {
        matches!(self.phase, Phase::Running | Phase::Settling(_)) && self.rank(process).is_some()
    }

    /// All members have their state.
    fn is_whole(&self) -> bool {
        self.loaded.len() == self.members().len()
    }

    fn members(&self) -> Vec<Process> {
        self.world().map_or(Vec::new(), |w| w.processes.clone())
    }

    fn step(&mut self, now: u64, step: u64) {
        // The first one of a world also loads code and data.
        if self.committed > 0 && step == self.committed + 1 {
            self.longest_step_ms = self.longest_step_ms.max(now.saturating_sub(self.progress_at));
        }
        self.committed = self.committed.max(step);
        self.reached = step;
        let every = checks_every(self.run());
        self.saves.committed(step, every);
        if self.recheck && self.phase == Phase::Running && self.world().is_some_and(|world| world.recheck) {
            // Its ranks have checked this one, and agreed.
            self.recheck = false;
            if others_can_check(self.run()) {
                self.saves.begin_checks(step);
            }
        }
        self.doubt &= every == 0 || !step.is_multiple_of(every);
        self.progress_at = now;
        self.replays.retain(|(at, _), _| *at >= step);
    }

    fn end_world(&mut self, now: u64, reason: &str) {
        let Some(generation) = self.world().map(|w| w.generation) else { return };
        self.phase = Phase::Settling(now);
        self.surveyed = false;
        self.unformed_since = Some(now);
        self.act(Action::Abort { generation }, reason);
    }

    /// A member has come to the end of the run. All ranks agreed on the digest before the first of them could say so: nothing is
    /// left to do for the others but to say it, too. Whoever cannot any more is done as well.
    fn done(&mut self, now: u64, process: Process) {
        self.done_since.get_or_insert(now);
        self.hosts.set(process, Doing::Done);
        for member in self.members() {
            if !matches!(self.hosts.doing(member), Doing::Member) {
                self.hosts.set(member, Doing::Done);
            }
        }
        self.end_if_done();
    }

    /// A member of the world of the moment has come to the end of the run.
    fn is_ending(&self) -> bool {
        self.done_since.is_some()
    }

    /// `process`, a member, has nothing to say any more, and the run is at its end. True if that is so.
    fn leaves_at_the_end(&mut self, process: Process) -> bool {
        let leaves = self.is_ending() && self.rank(process).is_some();
        if leaves {
            self.hosts.set(process, Doing::Done);
            self.end_if_done();
        }
        leaves
    }

    fn end_if_done(&mut self) {
        if self.members().iter().all(|p| *self.hosts.doing(*p) == Doing::Done) {
            self.stop(0, "every rank is done");
        }
    }

    /// No state lasts for ever: what has no end of its own ends here, with the reason.
    fn limit(&mut self, now: u64) {
        if let Some(since) = self.done_since {
            let limit = DONE_MS.max(self.guard.progress_floor_ms);
            if now > since + limit {
                self.stop(0, format!("the ranks are done; not all have said so within {limit} ms"));
            }
            return;
        }
        let Some(since) = self.unformed_since else { return };
        if let Some(asked) = self.stop_asked.filter(|asked| now > since.max(*asked) + self.guard.assemble_timeout_ms) {
            let (ms, from) = (now - asked, self.saves.name());
            let text = format!(
                "stopped on request; no world came together in the {ms} ms since, --resume goes on from {from}"
            );
            return self.stop(STOPPED, text);
        }
        let limit = AWAY_MS + 2 * self.guard.assemble_timeout_ms;
        if now > since + limit {
            let from = self.saves.name();
            self.stop(BUDGET_SPENT, format!("no world came together within {limit} ms; --resume goes on from {from}"));
        }
    }

    fn tick(&mut self, now: u64) {
        self.limit(now);
        if self.phase == Phase::Ended {
            return;
        }
        let late = self.hosts.processes.iter().filter_map(|(id, p)| match p.doing {
            Doing::Starting(since) if now > since + self.guard.assemble_timeout_ms => Some(*id),
            _ => None,
        });
        let late: Vec<_> = late.collect();
        for process in late {
            self.act(Action::Kill { process }, "it was not ready in time (guard.assemble_timeout_ms)");
            self.gone(now, process, "it was not ready in time (guard.assemble_timeout_ms)");
        }
        match self.phase {
            Phase::Settling(since) => {
                for process in self.members() {
                    let limit = self.settle_ms(process);
                    if *self.hosts.doing(process) == Doing::Member && now > since + limit {
                        self.kill(now, process, "silence", format!("it did not leave its world within {limit} ms"));
                    }
                }
            }
            Phase::Running if self.is_whole() => self.hang(now),
            Phase::Running if now > self.formed_at + self.guard.assemble_timeout_ms => {
                let late = self.members().into_iter().find(|p| !self.loaded.contains(p));
                let detail = "it had neither its links nor its state in time (guard.assemble_timeout_ms)";
                self.trouble(now, "no progress", late, detail.into());
            }
            _ => {}
        }
    }

    /// How long `process` may take to leave its world: it hears of it between two exchanges, or when it gives up connecting.
    fn settle_ms(&self, process: Process) -> u64 {
        let connecting =
            if self.connected.contains(&process) { 0 } else { self.run().layout.exchange_timeout_ms as u64 };
        match self.longest_step_ms {
            0 => self.guard.assemble_timeout_ms,
            longest => SETTLE_MS.max(2 * longest) + connecting,
        }
    }
}

//! What follows from what was said: from which step all go on, who is started, and who gets which place.

use std::collections::BTreeMap;

use spec::Run;

use super::intervene::Wish;
use super::{ALL_ALIKE_MAX, AWAY_MS, Left, Next, Phase, Policy, checks_every};
use crate::action::{Action, Origin, World};
use crate::held::{Agreement, agree};
use crate::hosts::{Doing, Host};
use crate::input::{Cause, Held, Piece, Process};
use crate::shrink::nearest;
use crate::spread::{block, neighbours};
use crate::{BUDGET_SPENT, CHANGED, DIVERGED};

/// A step is replayed so often with the same processes before one is restarted.
const REPLAYS_MAX: usize = 2;

impl Policy {
    /// What follows without a further input.
    pub(super) fn advance(&mut self, now: u64) {
        if matches!(self.phase, Phase::Settling(_)) {
            let heard = |p: &Process| *self.hosts.doing(*p) != Doing::Member;
            if self.members().iter().all(heard) {
                self.settle(now);
            }
        }
        match self.phase {
            Phase::Forming => {
                if !self.intervene() {
                    self.form(now);
                }
            }
            Phase::Settling(_) => self.fill(now),
            Phase::Running => {
                self.renew(now);
                self.fill(now);
                self.grow(now);
            }
            Phase::Ended => {}
        }
    }

    /// All members of the ended world are heard: from which step do they go on, and who is believed.
    fn settle(&mut self, now: u64) {
        if let Some((kind, process, detail)) = self.suspicion.take().filter(|_| !self.counted) {
            self.trouble(now, kind, process, detail);
            if self.phase == Phase::Ended {
                return;
            }
        }
        let members = self.members();
        if self.all_alike(&members) {
            return;
        }
        let doing: Vec<_> = members.iter().map(|p| self.hosts.doing(*p).clone()).collect();
        let failed = |d: &Doing| matches!(d, Doing::Failed(..));
        if let Some(Doing::Failed(code, reason)) = doing.first().filter(|_| doing.iter().all(failed)) {
            let text = format!("every rank failed; the first: {reason}");
            return self.stop(*code, text);
        }
        let held: Vec<_> =
            doing.iter().map(|d| if let Doing::Holds(held, _) = d { Some(held) } else { None }).collect();
        let causes: Vec<_> =
            doing.iter().filter_map(|d| if let Doing::Holds(_, cause) = d { Some(cause) } else { None }).collect();
        // All ranks derive it from one vote, also those that were told to leave before they could say so.
        let not_finite = causes.iter().find(|cause| matches!(cause, Cause::NotFinite { .. }));
        if let Some(Cause::NotFinite { step, reason }) = not_finite {
            if self.guard.skip_batches == 0 {
                return self.stop(DIVERGED, reason.clone());
            }
            self.wishes.push_front(Wish::Skip(*step, reason.clone()));
        }
        for (process, doing) in members.iter().zip(&doing) {
            if failed(doing) {
                self.hosts.set(*process, Doing::Gone);
            }
        }
        let back = |c: &&Cause| matches!(c, Cause::Disagree { .. } | Cause::Lost { .. } | Cause::NotFinite { .. });
        let distrust = causes.iter().any(back);
        let mut held: Vec<Vec<&Held>> = held.into_iter().map(|h| h.map_or(Vec::new(), |h| h.all().collect())).collect();
        for cause in &causes {
            if let Cause::Corrupt { ranks } = cause {
                // Who does not know which piece it is could have given it to anybody.
                let unknown = |r: &&u32| held[**r as usize].first().is_some_and(|held| held.corrupt.is_empty());
                let unknown: Vec<_> = ranks.iter().filter(unknown).copied().collect();
                unknown.into_iter().for_each(|r| held[r as usize].clear());
            }
        }
        self.blame(now, &members, &causes);
        self.phase = Phase::Forming;
        let was_whole = self.is_whole();
        let Some((world, run)) = self.world.clone() else { return };
        self.past.insert(world.generation, (run, world.run_toml));
        let started = matches!(world.origin, Origin::Peers { .. }) || was_whole;
        self.why_saved.clear();
        let distrust = self.go_back() || distrust;
        self.origin = if distrust || !started { Next::Saved } else { self.left(&members, &held) };
        // What was held before is never asked for again.
        let from = match &self.origin {
            Next::Peers(left) => left.generation,
            Next::Saved => world.generation + 1,
        };
        self.past = self.past.split_off(&from);
        self.let_go();
    }

    /// Where steps may be spoilt that were committed, the next world goes on before them; true if so.
    pub(super) fn go_back(&mut self) -> bool {
        let Some(back) = self.suspect.take() else { return false };
        self.saves.go(&back);
        let (first, last) = (back.first, self.reached);
        self.why_saved = format!("steps {first} to {last} may be spoilt and are computed again, ");
        true
    }

    /// All members ended by themselves in the same way, and not for the first time at this step: what they run is at fault, or what
    /// it runs on. True if the run ends so.
    fn all_alike(&mut self, members: &[Process]) -> bool {
        let mut ends = members.iter().map(|process| self.by_themselves.get(process));
        let Some(how) = ends.next().flatten().filter(|how| ends.all(|other| other == Some(how))).cloned() else {
            return false;
        };
        let (step, times) = (self.committed + 1, self.times(format!("all by themselves: {how}")));
        if times <= ALL_ALIKE_MAX {
            return false;
        }
        let text = format!(
            "every rank ended by itself in step {step}, {times} times, each time alike: {how}; that is no accident of a machine: look at \
             the code, or at the data of that step"
        );
        self.stop(BUDGET_SPENT, text);
        true
    }

    /// What the members hold together, if it is all there.
    fn left(&mut self, members: &[Process], held: &[Vec<&Held>]) -> Next {
        let run = |generation| self.past.get(&generation).map(|(run, _)| run);
        let size = |generation| run(generation).map(|run| run.layout.world());
        let corrupt = |generation, rank: usize| {
            let of = |held: &&&Held| (held.generation, held.rank as usize) == (generation, rank);
            held.iter().flatten().find(of).map_or(&[][..], |held| &held.corrupt)
        };
        let covers = |generation, holds: &[bool]| {
            let but = |(rank, holds): (usize, &bool)| holds.then(|| corrupt(generation, rank));
            let holds: Vec<_> = holds.iter().enumerate().map(but).collect();
            run(generation).is_some_and(|run| self.laws.covers(run, &holds, run))
        };
        let Some(Agreement { generation, step, forward, holders }) = agree(held, size, covers) else {
            // What is missing of the last world, by who is believed.
            let of =
                |held: &Vec<&'_ Held>| held.first().filter(|held| held.step.is_some()).map(|held| held.corrupt.clone());
            let pieces: Vec<Option<Vec<Piece>>> = held.iter().map(of).collect();
            let holds: Vec<_> = pieces.iter().map(Option::as_deref).collect();
            let run = self.run();
            let lost = self.laws.lost(run, &holds, run);
            self.why_saved = lost.map_or(String::new(), |lost| format!("nobody holds {lost}: "));
            return Next::Saved;
        };
        let bad = (0..holders.len()).map(|rank| corrupt(generation, rank).to_vec()).collect();
        let holders = holders.into_iter().map(|holder| holder.map(|i| members[i])).collect();
        let (run, run_toml) = self.past[&generation].clone();
        if step > self.reached {
            // Its ranks had decided it, and nobody lived to tell.
            let every = checks_every(&run);
            self.saves.committed(step, every);
        }
        self.committed = self.committed.max(step);
        self.reached = self.reached.max(step);
        Next::Peers(Box::new(Left { generation, run, run_toml, holders, corrupt: bad, step, forward }))
    }

    /// The same trouble at the same step, again and again: somebody is restarted, although nobody can be named for sure.
    fn blame(&mut self, now: u64, members: &[Process], causes: &[&Cause]) {
        let mut suspects: BTreeMap<u32, usize> = BTreeMap::new();
        for cause in causes {
            match cause {
                Cause::Deadline { rank, .. } | Cause::BadMessage { rank, .. } => {
                    *suspects.entry(*rank).or_default() += 1
                }
                Cause::Corrupt { ranks } => ranks.iter().for_each(|rank| *suspects.entry(*rank).or_default() += 1),
                _ => {}
            }
        }
        let Some((rank, _)) = suspects.into_iter().max_by_key(|(rank, n)| (*n, std::cmp::Reverse(*rank))) else {
            return;
        };
        let times = self.times(format!("rank {rank}"));
        if times > REPLAYS_MAX {
            let process = members[rank as usize];
            let reason =
                format!("step {} failed {times} times because of rank {rank}: it is started again", self.committed + 1);
            self.kill(now, process, "repeated", reason);
        }
    }

    /// Starts what is missing: members, then spares.
    fn fill(&mut self, now: u64) {
        if self.is_ending() {
            return;
        }
        if self.world.is_none() && self.hosts.open() < self.first_hosts {
            return;
        }
        // One more, so that a process of the new program is ready before one of the old leaves.
        let need = self.wanted.layout.world() + self.guard.spares + usize::from(!self.old.is_empty());
        while self.hosts.alive() < need {
            let Some((process, host)) = self.hosts.place(now) else { return };
            self.act(Action::Spawn { process, host }, "a place is empty");
        }
    }

    fn form(&mut self, now: u64) {
        self.fill(now);
        let available = self.hosts.available();
        let wanted = self.wanted.layout.world();
        if available.len() < wanted && self.hosts.starting() > 0 {
            return;
        }
        if available.is_empty() {
            // One that is away may come back: its power, its link, its agent.
            let lost = |h: &Host| h.evicted || h.closed.is_some() || h.away && now > h.away_since + AWAY_MS;
            let hopeless = self.hosts.next_place(now).is_none() && self.hosts.hosts.values().all(lost);
            if let Some(reason) = self.closed().filter(|_| hopeless).map(str::to_owned) {
                return self
                    .stop(CHANGED, format!("no process is left to go on with, and no other can be started: {reason}"));
            }
            if hopeless && self.world.is_some() {
                let seconds = AWAY_MS / 1000;
                self.stop(BUDGET_SPENT, format!("no host is left to go on with, and none came back in {seconds} s"));
            }
            return;
        }
        if self.world.is_none() && available.len() < wanted {
            // The first world is the one that was asked for: hosts are still joining.
            return;
        }
        let Some(run) = nearest(&self.wanted, available.len(), self.cores, self.laws.as_ref()) else {
            if self.hosts.next_place(now).is_none() {
                let text = format!("no layout of {} or fewer ranks fits this run", available.len());
                match self.closed() {
                    Some(reason) => self.stop(CHANGED, format!("{text}, and no more can be started: {reason}")),
                    None => self.stop(BUDGET_SPENT, text),
                }
            }
            return;
        };
        // Among them may be a broken device, and nobody would see what it does: the empty place is waited for.
        let blind = checks_every(&run) == 0 && checks_every(&self.wanted) > 0;
        if self.doubt && blind && self.hosts.next_place(now).is_some() {
            return;
        }
        self.place(now, run, available);
    }

    fn place(&mut self, now: u64, run: Run, available: Vec<Process>) {
        let size = run.layout.world();
        let ended = self.left_world();
        let generation = self.world().map_or(0, |w| w.generation) + 1;
        let mut places: Vec<Option<Process>> = vec![None; size];
        let mut rest: Vec<Process> = Vec::new();
        let same = self.world.as_ref().is_some_and(|(_, before)| before.layout.world() == size);
        // Who had a place keeps it, so that its state is where it is needed.
        let mut by_old_rank = available.clone();
        by_old_rank.sort_by_key(|p| (self.rank(*p).is_none(), self.rank(*p), *p));
        let by_old_rank = self.with_state(&run, by_old_rank);
        for process in by_old_rank {
            match self.rank(process).filter(|_| same) {
                Some(rank) => places[rank as usize] = Some(process),
                None => rest.push(process),
            }
        }
        let host = |process: Process| self.hosts.processes.get(&process).map(|known| known.host.as_str());
        let processes = neighbours(places, rest, host);
        let run = self.on_hosts(run, &processes);
        let rank_of = |p: &Process| processes.iter().position(|q| q == p).map(|rank| rank as u32);
        let newest = || match self.saves.newest() {
            Some((_, path)) => Origin::Disk(path.clone()),
            None => Origin::Fresh,
        };
        let (origin, from) = match &self.origin {
            Next::Peers(left) => {
                let holders: Vec<_> = left.holders.iter().map(|h| h.as_ref().and_then(rank_of)).collect();
                let holds = left.holds(|process| rank_of(&process).is_some());
                let lost = self.laws.lost(&left.run, &holds, &run);
                if lost.is_none() {
                    let (before, step, forward) = (left.run_toml.clone(), left.step, left.forward.clone());
                    let generation = left.generation;
                    let (here, all) = (holds.iter().flatten().count(), holds.len());
                    let text = format!("state of step {step} from {here} of the {all} ranks before");
                    (Origin::Peers { generation, before, holders, step, forward }, text)
                } else {
                    (newest(), format!("nobody holds {}: from {}", lost.unwrap_or_default(), self.saves.name()))
                }
            }
            Next::Saved => (newest(), format!("{}from {}", self.why_saved, self.saves.name())),
        };
        let saved = !matches!(origin, Origin::Peers { .. });
        if saved && generation > 1 && !self.surveyed {
            // A checkpoint may be there that nobody lived to tell of, and one that was told of may be gone or damaged.
            return self.act(Action::Survey, "the run goes on from disk");
        }
        let shape = match size.cmp(&self.wanted.layout.world()) {
            std::cmp::Ordering::Less => format!("{} of {} ranks, over the same grid", size, self.wanted.layout.world()),
            _ => format!("all {size} ranks"),
        };
        processes.iter().for_each(|p| self.hosts.set(*p, Doing::Member));
        let (run_toml, layout) = (run.values.to_toml(), run.layout.to_string());
        let world = World { generation, processes, run_toml, layout, origin, recheck: self.recheck };
        self.world = Some((world.clone(), run));
        if saved {
            self.reached = self.saves.newest_step();
            // It may be newer than all that was heard of.
            self.committed = self.committed.max(self.reached);
            if generation > 1 {
                // Somebody of a world before may still be writing one of a later step, or have written it unheard.
                let after = self.reached;
                self.act(Action::Distrust { after }, format!("the run goes on after step {after}"));
            }
        }
        self.saves.goes_on(self.reached);
        let unseen = self.note_unseen(&ended);
        self.phase = Phase::Running;
        self.unformed_since = None;
        (self.counted, self.suspicion) = (false, None);
        self.by_themselves.clear();
        self.broken_seen = false;
        self.connected.clear();
        self.loaded.clear();
        (self.formed_at, self.progress_at, self.asked) = (now, now, None);
        // Those that wait and hold something from before hold it for nothing now.
        for process in self.hosts.available() {
            self.hosts.set(process, Doing::Ready);
        }
        self.act(Action::Form(world), format!("{shape}; {from}{unseen}"));
        if self.stopping {
            self.act(Action::AskStop, "somebody asked the run to stop");
        }
    }

    /// The ranks of the world before whose processes are gone, where some of its steps are checked and others not.
    fn left_world(&self) -> Vec<u32> {
        if checks_every(self.run()) < 2 {
            return Vec::new();
        }
        let gone = |(_, process): &(u32, Process)| *self.hosts.doing(*process) == Doing::Gone;
        (0..).zip(self.members()).filter(gone).map(|(rank, _)| rank).collect()
    }

    /// That what the ranks `ended` made since the last check nobody can check any more, and the run goes on with it.
    fn note_unseen(&mut self, ended: &[u32]) -> String {
        match self.saves.back(self.reached + 1, self.reached) {
            Some(back) if !ended.is_empty() => {
                self.saves.never_checked(back.first);
                let whose = match ended {
                    [rank] => format!("rank {rank}"),
                    ranks => format!("ranks {ranks:?}"),
                };
                format!(
                    "; steps {} to {} of {whose} were not checked before it ended, nobody can check them now: guard.recompute_every = 1 \
                     checks every step",
                    back.first, self.reached
                )
            }
            _ => String::new(),
        }
    }

    /// `run` where its ranks are: a mirror is on another host than its owner where there are several.
    fn on_hosts(&self, run: Run, processes: &[Process]) -> Run {
        if self.hosts.hosts.len() < 2 {
            // What the person says of the one host holds.
            return run;
        }
        let hosts: Vec<_> = processes.iter().map(|process| self.hosts.host(*process)).collect();
        let set = format!("cluster.ranks_per_host={}", block(&hosts));
        let there = Run::parse(&run.values.to_toml(), "the run", &[set], self.cores);
        there.ok().filter(|there| self.laws.fits(there).is_ok()).unwrap_or(run)
    }

    /// `processes` without those that `run` has no place for: who goes is who holds nothing that the others lack.
    fn with_state(&self, run: &Run, mut processes: Vec<Process>) -> Vec<Process> {
        let Next::Peers(left) = &self.origin else { return processes };
        let covers =
            |with: &[Process]| self.laws.covers(&left.run, &left.holds(|process| with.contains(&process)), run);
        let mut at = if covers(&processes) { processes.len() } else { 0 };
        while processes.len() > run.layout.world() && at > 0 {
            at -= 1;
            let gone = processes.remove(at);
            if !covers(&processes) {
                processes.insert(at, gone);
            }
        }
        processes
    }

    /// More ranks when there are processes for them.
    fn grow(&mut self, now: u64) {
        let size = self.members().len();
        if size >= self.wanted.layout.world() || !self.is_whole() || self.stopping {
            return;
        }
        if self.members().iter().any(|p| *self.hosts.doing(*p) != Doing::Member) || self.hosts.starting() > 0 {
            return;
        }
        let could = size + self.hosts.available().len();
        if could == size {
            return;
        }
        let more = nearest(&self.wanted, could, self.cores, self.laws.as_ref());
        if more.is_some_and(|run| run.layout.world() > size) {
            self.end_world(now, "there are processes for more ranks again");
        }
    }
}

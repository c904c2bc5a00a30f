//! The protocol of a step and of a recovery, in steps so small that a fault can strike between any two.
//!
//! A party is a rank process: it computes, sends, and waits for messages in a fixed order, as ranks do. So which of several
//! messages arrives first makes no difference to it, only how far each party has come; and a message that is lost with its
//! sender is one that the receiver is still waiting for when its world is ended. The controller hears what the parties hold
//! and asks `policy::transaction` where to go on.

use std::hash::Hash;

use policy::transaction::{Holding, Stuck, resume};

use crate::parts::{
    GENERATIONS, Kind, Life, Mutant, PROCESSES, Phase, Process, SHARDS, Setup, State, TARGET, Violation, World,
};

/// Messages under way or taken, by (generation, from, to): a bit per kind.
type Mail = [[[u32; PROCESSES]; PROCESSES]; GENERATIONS];

/// All that there is.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Model {
    processes: [Process; PROCESSES],
    worlds: [Option<World>; GENERATIONS],
    /// The world of the controller.
    generation: u8,
    /// Processes that it has given up, a bit each.
    evicted: u8,
    /// It is ending the world; processes that have said what they hold, a bit each.
    ending: Option<u8>,
    /// State has to come from disk: the end of the exploration here.
    disk: bool,
    mail: Mail,
    /// Pairs between which messages vanish.
    cut: [u8; PROCESSES],
    faults: u8,
    /// The last step of which a member of the controller's world saw the vote.
    committed: u8,
    /// The last world of which a member heard that all its members had their state.
    settled: u8,
}

/// A step of the exploration, to tell the way to a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    Goes(u8),
    Kill(u8),
    Stop(u8),
    Continue(u8),
    Cut(u8, u8),
    Alarm,
    Evict(u8),
    Says(u8),
    Forms,
}

type Next = Result<Model, Violation>;

impl Model {
    pub fn new(setup: &Setup) -> Self {
        let mut members = [0; PROCESSES];
        (0..setup.ranks).for_each(|rank| members[rank] = rank as u8);
        let first = World { members, len: setup.ranks as u8, from: 0, step: 0, forward: false, sources: [0; SHARDS] };
        let idle = Process { life: Life::Dead, generation: 0, phase: Phase::Waits, state: None, before: None };
        let mut processes = [idle; PROCESSES];
        for (id, process) in processes.iter_mut().enumerate().take(setup.ranks + setup.spares) {
            process.life = Life::Running;
            if id < setup.ranks {
                let mut shards = [None; SHARDS];
                (0..SHARDS).filter(|&s| first.keeps(id, s)).for_each(|s| shards[s] = Some(0));
                let params = [0; SHARDS];
                // Initial weights are a function of the run file: every process has them.
                let state = State { generation: 1, settled: true, step: 0, decided: 0, shards, grads: 0, params };
                *process = Process { phase: Phase::Computes, generation: 1, state: Some(state), ..*process };
            }
        }
        let mut worlds = [None; GENERATIONS];
        worlds[1] = Some(first);
        Self {
            processes,
            worlds,
            generation: 1,
            evicted: 0,
            ending: None,
            disk: false,
            mail: Mail::default(),
            cut: [0; PROCESSES],
            faults: setup.faults,
            committed: 0,
            settled: 1,
        }
    }

    fn world(&self, generation: u8) -> World {
        self.worlds[generation as usize].expect("a world that was formed")
    }

    fn here(&self) -> World {
        self.world(self.generation)
    }

    fn is_evicted(&self, process: usize) -> bool {
        self.evicted & 1 << process != 0
    }

    /// Members that the controller counts on.
    fn counted(&self) -> impl Iterator<Item = usize> {
        let (members, evicted) = (self.here(), self.evicted);
        members.list().filter(move |m| evicted & 1 << m == 0).collect::<Vec<_>>().into_iter()
    }

    /// Everything that can happen next.
    pub fn moves(&self, setup: &Setup) -> Vec<(Move, Next)> {
        let mut moves = Vec::new();
        if self.disk {
            return moves;
        }
        for id in 0..PROCESSES {
            match self.processes[id].life {
                Life::Running => {
                    if let Some(next) = self.goes(id, setup) {
                        moves.push((Move::Goes(id as u8), next));
                    }
                }
                Life::Stopped => {
                    let mut next = self.clone();
                    next.processes[id].life = Life::Running;
                    moves.push((Move::Continue(id as u8), Ok(next)));
                }
                Life::Dead => {}
            }
        }
        self.controller(setup, &mut moves);
        if self.faults > 0 {
            self.strikes(setup, &mut moves);
        }
        moves.iter_mut().filter_map(|(_, next)| next.as_mut().ok()).for_each(|next| next.forget(setup));
        moves
    }

    /// True if `moves` is empty with good reason: the run is done with the right state, or nothing is left to go on with.
    pub fn ends_well(&self) -> Result<(), Violation> {
        if self.disk || self.counted().next().is_none() {
            return Ok(());
        }
        if !self.counted().all(|m| self.processes[m].phase == Phase::Done || self.processes[m].life == Life::Dead) {
            return Err(Violation::Stopped);
        }
        let right = |m: usize| {
            let state = self.processes[m].state.as_ref().expect("a member that is done has state");
            let kept = (0..SHARDS).all(|s| state.shards[s] == self.here().keeps(m, s).then_some(TARGET));
            kept && state.params == [TARGET; SHARDS]
        };
        let alive = |m: &usize| self.processes[*m].phase == Phase::Done;
        if self.counted().filter(alive).all(right) { Ok(()) } else { Err(Violation::WrongEnd) }
    }

    fn strikes(&self, setup: &Setup, moves: &mut Vec<(Move, Next)>) {
        if setup.kinds[3] && self.ending.is_none() {
            let next = Self { faults: self.faults - 1, ending: Some(0), ..self.clone() };
            moves.push((Move::Alarm, Ok(next)));
        }
        for id in self.counted().filter(|&id| self.processes[id].life == Life::Running) {
            let mut strike = |what: Move, change: &dyn Fn(&mut Self)| {
                let mut next = self.clone();
                next.faults -= 1;
                change(&mut next);
                moves.push((what, Ok(next)));
            };
            if setup.kinds[0] {
                strike(Move::Kill(id as u8), &|next| next.processes[id].life = Life::Dead);
            }
            if setup.kinds[1] {
                strike(Move::Stop(id as u8), &|next| next.processes[id].life = Life::Stopped);
            }
            for other in self.counted().filter(|&other| setup.kinds[2] && other > id) {
                strike(Move::Cut(id as u8, other as u8), &|next| {
                    next.cut[id] |= 1 << other;
                    next.cut[other] |= 1 << id;
                });
            }
        }
    }

    fn controller(&self, setup: &Setup, moves: &mut Vec<(Move, Next)>) {
        let troubled = |id: usize| {
            let cut = self.counted().any(|other| self.cut[id] & 1 << other != 0);
            self.processes[id].life != Life::Running || (cut && self.ending.is_none())
        };
        let done = self.counted().all(|m| self.processes[m].phase == Phase::Done);
        for id in self.counted().filter(|&id| !done && troubled(id)) {
            let mut next = self.clone();
            next.evicted |= 1 << id;
            next.ending.get_or_insert(0);
            moves.push((Move::Evict(id as u8), Ok(next)));
        }
        let Some(said) = self.ending else { return };
        for id in self.counted().filter(|&id| said & 1 << id == 0 && self.processes[id].life == Life::Running) {
            let mut next = self.clone();
            next.ending = Some(said | 1 << id);
            next.processes[id].phase = Phase::Waits;
            moves.push((Move::Says(id as u8), Ok(next)));
        }
        if self.counted().all(|id| said & 1 << id != 0) {
            moves.push((Move::Forms, self.forms(setup)));
        }
    }

    /// What a process says it holds, newest first.
    fn holdings(&self, id: usize) -> Vec<Holding<u8>> {
        let process = &self.processes[id];
        let held = |state: &State| {
            let kept = (0..SHARDS).filter(|&s| state.shards[s].is_some());
            Holding {
                generation: state.generation.into(),
                settled: state.settled,
                rank: self.world(state.generation).rank(id).expect("it was a member") as u32,
                step: state.step.into(),
                prepared: kept.clone().all(|s| state.grads & 1 << s != 0),
                decided: (state.decided > 0).then_some((state.decided.into(), state.decided)),
            }
        };
        process.state.iter().chain(&process.before).map(held).collect()
    }

    fn forms(&self, setup: &Setup) -> Next {
        let answered: Vec<usize> = self.counted().collect();
        let held: Vec<Vec<Holding<u8>>> = answered.iter().map(|&id| self.holdings(id)).collect();
        let mut next = self.clone();
        // Could the run go on, by what is really there?
        let live = |generation: u8| {
            let world = self.world(generation);
            let keeps = |id: usize, shard: usize| {
                let process = &self.processes[id];
                process.state.iter().chain(&process.before).any(|state| {
                    state.generation == generation && state.shards[shard].is_some() && world.keeps(id, shard)
                })
            };
            (0..SHARDS).all(|shard| answered.iter().any(|&id| keeps(id, shard)))
        };
        // What a member must not have dropped counts as being there.
        let settled = self.world(self.settled);
        let owed = (0..SHARDS)
            .all(|shard| answered.iter().any(|&id| self.processes[id].life != Life::Dead && settled.keeps(id, shard)));
        let possible = owed || (1..=self.generation).any(live);
        let keepers = |generation: u64| -> Vec<Vec<u32>> {
            let world = self.world(generation as u8);
            (0..SHARDS).map(|shard| world.keepers(shard)).collect()
        };
        let lost = |generation: u64, ranks: &[u32]| {
            let keepers = keepers(generation);
            (0..SHARDS).filter(|&shard| !keepers[shard].iter().any(|k| ranks.contains(k))).collect::<Vec<_>>()
        };
        let mut resumption = match resume(&held, lost) {
            Ok(resumption) => resumption,
            Err(Stuck::Nothing | Stuck::Lost { .. }) if !possible => {
                next.disk = true;
                return Ok(next);
            }
            Err(stuck) => return Err(Violation::Unavailable { why: format!("{stuck:?} of {held:?}") }),
        };
        if setup.mutant == Some(Mutant::StayAlthoughApplied) && resumption.forward.is_some() {
            (resumption.step, resumption.forward) = (resumption.step - 1, None);
        }
        let prepared = held.iter().flatten().any(|h| h.generation == resumption.generation && h.prepared);
        if setup.mutant == Some(Mutant::ForwardWithoutVote) && prepared && resumption.forward.is_none() {
            resumption.step += 1;
            resumption.forward = Some(resumption.step as u8);
        }
        let known = held.iter().flatten().flat_map(|h| [h.step as u8, h.decided.map_or(0, |d| d.1)]).max().unwrap_or(0);
        let step = resumption.step as u8;
        if step < known || step + 1 < self.committed {
            return Err(Violation::Lost { to: step, committed: known.max(self.committed) });
        }
        let mut sources = [0; SHARDS];
        for (shard, keepers) in keepers(resumption.generation).iter().enumerate() {
            let holder = keepers.iter().find_map(|rank| resumption.holders.iter().find(|(r, _)| r == rank));
            sources[shard] = answered[holder.expect("none is missing").1] as u8;
        }
        let spare = (setup.ranks..setup.ranks + setup.spares).filter(|&id| {
            self.processes[id].life == Life::Running && self.processes[id].generation == 0 && !self.is_evicted(id)
        });
        let wanted = self.here().len as usize;
        let list: Vec<usize> = answered.iter().copied().chain(spare).take(wanted).collect();
        let mut members = [0; PROCESSES];
        list.iter().enumerate().for_each(|(rank, &id)| members[rank] = id as u8);
        next.generation += 1;
        next.worlds[next.generation as usize] = Some(World {
            members,
            len: list.len() as u8,
            from: resumption.generation as u8,
            step,
            forward: resumption.forward.is_some(),
            sources,
        });
        next.ending = None;
        for &id in &list {
            let process = &mut next.processes[id];
            let serves = resumption.holders.iter().any(|&(_, i)| answered[i] == id);
            let old =
                process.state.iter().chain(&process.before).find(|s| u64::from(s.generation) == resumption.generation);
            (process.state, process.before) = (old.filter(|_| serves).copied(), None);
            (process.phase, process.generation) = (Phase::Sends, next.generation);
        }
        Ok(next)
    }

    /// The next small step of a process, if it need not wait.
    fn goes(&self, id: usize, setup: &Setup) -> Option<Next> {
        let process = self.processes[id];
        if process.phase == Phase::Waits || process.phase == Phase::Done {
            return None;
        }
        let world = self.world(process.generation);
        let mut next = self.clone();
        let outcome = next.act(id, &world, setup);
        match outcome {
            Ok(true) => Some(Ok(next)),
            Ok(false) => None,
            Err(violation) => Some(Err(violation)),
        }
    }

    /// True if it did something; false if it has to wait.
    fn act(&mut self, id: usize, world: &World, setup: &Setup) -> Result<bool, Violation> {
        let Process { phase, state, generation, .. } = self.processes[id];
        let mutant = |m| setup.mutant == Some(m);
        let members: Vec<usize> = world.list().collect();
        if phase == Phase::Sends {
            if let Some(mut state) = state {
                if world.forward && state.step + 1 == world.step {
                    apply(id, &mut state)?;
                    state.decided = world.step;
                }
                self.processes[id].state = Some(state);
                for shard in (0..SHARDS).filter(|&s| world.sources[s] as usize == id) {
                    members.iter().for_each(|&to| self.send(id, to, Kind::Transfer(shard)));
                }
            }
            self.processes[id].phase = Phase::Loads;
            return Ok(true);
        }
        if phase == Phase::Loads {
            for shard in 0..SHARDS {
                if !self.came(id, world.sources[shard] as usize, Kind::Transfer(shard), setup)? {
                    return Ok(false);
                }
            }
            let mut shards = [None; SHARDS];
            (0..SHARDS).filter(|&s| world.keeps(id, s)).for_each(|s| shards[s] = Some(world.step));
            let step = world.step;
            let params = [step; SHARDS];
            let process = &mut self.processes[id];
            process.before = if mutant(Mutant::ForgetsTooEarly) { None } else { process.state };
            process.state = Some(State { generation, settled: false, step, decided: 0, shards, grads: 0, params });
            process.phase = Phase::Claims;
            members.iter().for_each(|&to| self.send(id, to, Kind::Claim));
            return Ok(true);
        }
        if phase == Phase::Claims {
            for &from in &members {
                if !self.came(id, from, Kind::Claim, setup)? && !mutant(Mutant::SettlesUnheard) {
                    return Ok(false);
                }
            }
            if generation == self.generation {
                self.settled = generation;
            }
            let process = &mut self.processes[id];
            process.before = None;
            let state = process.state.as_mut().expect("a rank that has loaded");
            state.settled = true;
            process.phase = if state.step == TARGET { Phase::Done } else { Phase::Computes };
            return Ok(true);
        }
        let mut state = state.expect("a rank that has loaded");
        let of = state.step + 1;
        match phase {
            Phase::Computes => {
                if state.params != [state.step; SHARDS] {
                    return Err(Violation::Mixed { process: id });
                }
                (0..SHARDS).for_each(|s| self.send(id, world.owner(s), Kind::Contribution(s, of)));
                self.processes[id].phase = Phase::Reduces;
            }
            Phase::Reduces => {
                let owned = (0..SHARDS).filter(|&s| world.owner(s) == id);
                for shard in owned.clone() {
                    for &from in &members {
                        if !self.came(id, from, Kind::Contribution(shard, of), setup)? {
                            return Ok(false);
                        }
                    }
                }
                for shard in owned {
                    state.grads |= 1 << shard;
                    world.mirror(shard).iter().for_each(|&mirror| self.send(id, mirror, Kind::Reduced(shard, of)));
                }
                self.processes[id].phase = Phase::Mirrors;
            }
            Phase::Mirrors => {
                for shard in (0..SHARDS).filter(|&s| world.mirror(s) == Some(id)) {
                    if self.came(id, world.owner(shard), Kind::Reduced(shard, of), setup)? {
                        state.grads |= 1 << shard;
                    } else if !mutant(Mutant::MirrorNotPrepared) {
                        return Ok(false);
                    }
                }
                if mutant(Mutant::ApplyBeforeVote) {
                    apply_some(id, &mut state, false)?;
                }
                members.iter().for_each(|&to| self.send(id, to, Kind::Ballot(of)));
                self.processes[id].phase = Phase::Votes;
            }
            Phase::Votes => {
                for &from in &members {
                    if !self.came(id, from, Kind::Ballot(of), setup)? {
                        return Ok(false);
                    }
                }
                state.decided = of;
                if generation == self.generation {
                    self.committed = self.committed.max(of);
                }
                self.processes[id].phase = Phase::Applies;
            }
            Phase::Applies => {
                if mutant(Mutant::ApplyBeforeVote) {
                    (state.step, state.grads) = (of, 0);
                } else if mutant(Mutant::MirrorNotPrepared) {
                    // Its gradient comes later; here it is as good as applied.
                    state.grads = u8::MAX;
                    apply(id, &mut state)?;
                } else {
                    apply(id, &mut state)?;
                }
                for shard in (0..SHARDS).filter(|&s| world.owner(s) == id) {
                    state.params[shard] = of;
                    members.iter().for_each(|&to| self.send(id, to, Kind::Params(shard, of)));
                }
                self.processes[id].phase = Phase::Gathers;
            }
            Phase::Gathers => {
                for shard in 0..SHARDS {
                    if !self.came(id, world.owner(shard), Kind::Params(shard, state.step), setup)? {
                        return Ok(false);
                    }
                    state.params[shard] = state.step;
                }
                self.processes[id].phase = if state.step == TARGET { Phase::Done } else { Phase::Computes };
            }
            Phase::Waits | Phase::Done | Phase::Sends | Phase::Loads | Phase::Claims => return Ok(false),
        }
        self.processes[id].state = Some(state);
        Ok(true)
    }

    fn send(&mut self, from: usize, to: usize, kind: Kind) {
        if self.cut[from] & 1 << to == 0 {
            let generation = self.processes[from].generation as usize;
            self.mail[generation][from][to] |= 1 << kind.index();
        }
    }

    fn came(&self, to: usize, from: usize, kind: Kind, setup: &Setup) -> Result<bool, Violation> {
        let generation = self.processes[to].generation as usize;
        let bit = |generation: usize| self.mail[generation][from][to] & 1 << kind.index() != 0;
        if bit(generation) {
            return Ok(true);
        }
        if setup.mutant == Some(Mutant::NoFence) {
            // Whoever was evicted goes on sending to the place where it thinks a rank is.
            let stale = |from: usize| (1..generation).any(|g| self.mail[g][from][to] & 1 << kind.index() != 0);
            if let Some(from) = (0..PROCESSES).find(|&from| self.is_evicted(from) && stale(from)) {
                return Err(Violation::Zombie { process: to, from });
            }
        }
        Ok(false)
    }

    /// Drops what nothing can depend on any more, so that states that behave alike are one.
    fn forget(&mut self, setup: &Setup) {
        for id in 0..PROCESSES {
            let dead = self.processes[id].life == Life::Dead;
            if dead {
                let generation = self.processes[id].generation;
                self.processes[id] =
                    Process { life: Life::Dead, generation, phase: Phase::Waits, state: None, before: None };
            }
            if setup.mutant == Some(Mutant::NoFence) {
                continue;
            }
            for generation in 1..GENERATIONS {
                if dead || self.processes[id].generation as usize != generation {
                    (0..PROCESSES).for_each(|from| self.mail[generation][from][id] = 0);
                }
            }
        }
    }
}

/// The update of the next step, on all shards that are kept.
fn apply(process: usize, state: &mut State) -> Result<(), Violation> {
    apply_some(process, state, true)?;
    (state.step, state.grads) = (state.step + 1, 0);
    Ok(())
}

fn apply_some(process: usize, state: &mut State, all: bool) -> Result<(), Violation> {
    let of = state.step + 1;
    for shard in 0..SHARDS {
        let Some(at) = state.shards[shard].as_mut() else { continue };
        if state.grads & 1 << shard == 0 {
            if all {
                return Err(Violation::NoGradient { process, shard });
            }
            continue;
        }
        if *at + 1 != of {
            return Err(Violation::Applied { process, shard, of, at: *at });
        }
        *at = of;
    }
    Ok(())
}

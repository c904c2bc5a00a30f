//! Times of recoveries, and what became of faults that were asked for.

use std::collections::BTreeSet;

use events::{Anatomy, Event};
use policy::{Process, Trouble};

use crate::fault::{Fault, FaultKind};

/// A fault that was asked for and struck.
#[derive(Debug, Clone, PartialEq)]
pub struct Struck {
    /// Which.
    pub fault: Fault,
    /// When, seconds since the start.
    pub at: f64,
    /// Somebody noticed.
    pub detected: bool,
    /// The step went on after it.
    pub repaired: bool,
    /// Its process has no place any more.
    pub gone: bool,
}

/// Follows recoveries from trouble to the first step after it.
#[derive(Debug, Default)]
pub struct Repairs {
    open: Vec<Anatomy>,
    connected: BTreeSet<Process>,
    loaded: BTreeSet<Process>,
    struck: Vec<Struck>,
    /// Of the world that is, by rank.
    members: Vec<Process>,
    /// Troubles (rank, last committed step) of the world that ends that no fault explains yet: who suffers from a fault may say so
    /// sooner than who was asked to commit it.
    early: Vec<(Option<u32>, u64)>,
    /// What cannot be: a world that went on before the last committed step, although its state had living holders.
    broken: Vec<String>,
}

impl Repairs {
    /// A deliberate fault is about to strike.
    pub fn fired(&mut self, fault: Fault, at: f64) {
        let this = |(rank, step): &(Option<u32>, u64)| {
            fault.kind.shows() && fault.step == step + 1 && rank.is_none_or(|rank| fault.concerns(rank))
        };
        let seen = self.early.iter().position(this).map(|at| self.early.swap_remove(at));
        self.struck.push(Struck { fault, at, detected: seen.is_some(), repaired: false, gone: false });
    }

    /// Whether it has.
    pub fn has_struck(&self, fault: &Fault) -> bool {
        self.struck.iter().any(|s| s.fault == *fault)
    }

    /// Milliseconds since the fault behind a trouble struck, if one that was asked for is; from then on it is detected. Else
    /// all was well at `last_sign`, as far as it showed.
    pub fn trouble(&mut self, trouble: &Trouble, at: f64, last_sign: Option<f64>) -> Option<f64> {
        let new = |s: &&mut Struck| !s.detected && s.fault.kind.shows_as(&trouble.kind);
        let named = |s: &&mut Struck| trouble.rank.is_none_or(|rank| s.fault.concerns(rank));
        // A rank may suffer more than one in a step: what the trouble looks like comes first.
        let like = |s: &&mut Struck| s.fault.kind.looks_like(&trouble.kind);
        let mut struck = self.struck.iter_mut().rev().filter(new).filter(like).find(named);
        if struck.is_none() {
            struck = self.struck.iter_mut().rev().filter(new).find(named);
        }
        if struck.is_none() {
            struck = self.struck.iter_mut().rev().find(new);
        }
        let fault = struck.map(|struck| {
            struck.detected = true;
            struck.at
        });
        if fault.is_none() {
            self.early.push((trouble.rank, trouble.step));
        }
        // The hash of all state is looked at together: who else has a piece that failed is found by the same.
        let of_state = |s: &&mut Struck| {
            trouble.kind == "corrupt" && s.fault.kind.flips_state() && s.fault.step <= trouble.step + 1
        };
        for struck in self.struck.iter_mut().filter(of_state) {
            struck.detected = true;
        }
        // A step that is left for another reason is computed again: what its gradients suffered goes with it.
        let spoilt = |s: &&mut Struck| s.fault.kind.goes_with_its_step() && s.fault.step > trouble.step;
        for struck in self.struck.iter_mut().filter(spoilt) {
            struck.detected = true;
        }
        let whom = trouble.rank.map_or(String::new(), |rank| format!(" of rank {rank}"));
        self.open.push(Anatomy {
            id: trouble.id,
            cause: format!("{}{whom}", trouble.kind),
            fault,
            last_sign: last_sign.filter(|sign| fault.is_none() && *sign <= at),
            detected: Some(at),
            last_committed: trouble.step,
            ..Anatomy::default()
        });
        fault.map(|fault| 1000.0 * (at - fault))
    }

    /// The policy has answered.
    pub fn decided(&mut self, at: f64) {
        for anatomy in &mut self.open {
            anatomy.decided.get_or_insert(at);
        }
    }

    /// A member of the world that ended has said what it holds, or is gone.
    pub fn left(&mut self, at: f64) {
        self.open.iter_mut().filter(|a| a.placed.is_none()).for_each(|a| a.aborted = Some(at));
    }

    /// State of a rank failed its hash when its world ended, whatever it ended for: nobody takes it.
    pub fn failed_hash(&mut self, rank: u32) {
        let state = |s: &&mut Struck| s.fault.rank == rank && s.fault.kind.flips_state();
        self.struck.iter_mut().filter(state).for_each(|s| s.detected = true);
    }

    /// The first world has its places, or that of a controller before.
    pub fn seated(&mut self, members: &[Process]) {
        self.members = members.to_vec();
    }

    /// A new world has its places, by `remedy`.
    pub fn placed(&mut self, remedy: &str, resumed_at: u64, members: &[Process], at: f64) {
        // What a process that has no place any more held went with it, and so did its device; what it made of steps that are
        // computed again, too.
        let before = std::mem::replace(&mut self.members, members.to_vec());
        for struck in &mut self.struck {
            let kind = struck.fault.kind;
            struck.gone |= before.get(struck.fault.rank as usize).is_some_and(|process| !members.contains(process));
            struck.detected |=
                struck.gone && struck.fault.step >= resumed_at && (kind.flips_state() || kind == FaultKind::FlipDevice);
            // Its links are those of the world that ended.
            struck.detected |= matches!(kind, FaultKind::Partition { .. });
        }
        self.connected.clear();
        self.loaded.clear();
        self.early.clear();
        // The disk that the next checkpoint would have found full was that of the world that ended.
        self.struck.retain(|s| s.detected || s.fault.kind != FaultKind::DiskFull);
        // What a step of the world that ended was spoilt with went with it, before anybody could see it.
        let undone = |s: &&mut Struck| s.fault.kind.goes_with_its_step() && s.fault.step >= resumed_at;
        self.struck.iter_mut().filter(undone).for_each(|s| s.detected = true);
        // Who has another process reads the clock as it is now.
        self.clock_seen(None);
        for anatomy in &mut self.open {
            // One that failed while it was formed, or before it had caught up, is formed again: what the attempt before took is
            // part of this one's way to its places.
            anatomy.placed = Some(at);
            (anatomy.connected, anatomy.loaded, anatomy.first_step) = (None, None, None);
            anatomy.remedy = remedy.into();
            anatomy.resumed_at = resumed_at;
            anatomy.steps_redone = (anatomy.last_committed + 1).saturating_sub(resumed_at);
        }
    }

    /// A world goes on before a step that was committed, although it should not.
    pub fn went_back(&mut self, text: String) {
        self.broken.push(text);
    }

    /// A member has its links.
    pub fn connected(&mut self, process: Process, members: usize, at: f64) {
        self.connected.insert(process);
        if self.connected.len() == members {
            self.open.iter_mut().for_each(|a| a.connected = Some(at));
        }
    }

    /// A member has its state, of which so many bytes came from elsewhere.
    pub fn loaded(&mut self, process: Process, bytes: u64, members: usize, at: f64) {
        self.open.iter_mut().filter(|a| a.placed.is_some()).for_each(|a| a.bytes_moved += bytes);
        self.loaded.insert(process);
        if self.loaded.len() == members {
            self.open.iter_mut().for_each(|a| a.loaded = Some(at));
            // The step that it struck is committed, and all have its state: no other step need come, and after the last one none does.
            let Some(resumed_at) = self.open.iter().map(|a| a.resumed_at).max() else { return };
            let over = |s: &&mut Struck| s.detected && s.fault.kind.shows() && s.fault.step < resumed_at;
            self.struck.iter_mut().filter(over).for_each(|s| s.repaired = true);
        }
    }

    /// The run is over, and well: recoveries to a world that had no step left to do are complete.
    pub fn finished(&mut self) -> Vec<Event> {
        let open = std::mem::take(&mut self.open).into_iter().filter(|a| a.steps_redone == 0);
        let done = open.filter_map(|a| {
            let loaded = a.loaded?;
            Some(Event::Recovery(Box::new(Anatomy { first_step: Some(loaded), caught_up: Some(loaded), ..a })))
        });
        done.collect()
    }

    /// A step was committed; the recoveries that are complete with it.
    pub fn step(&mut self, step: u64, at: f64) -> Vec<Event> {
        for struck in &mut self.struck {
            // That a step went on says nothing of a disk.
            let disk = struck.fault.kind == FaultKind::DiskFull;
            // It shows in nothing but the time of steps.
            let passes = matches!(struck.fault.kind, FaultKind::Slow { .. });
            struck.repaired |= step >= struck.fault.step && (passes || struck.detected && !disk);
        }
        let formed = |a: &mut Anatomy| a.loaded.is_some() || a.placed.is_some();
        for anatomy in self.open.iter_mut().filter_map(|a| formed(a).then_some(a)) {
            anatomy.first_step.get_or_insert(at);
            if step >= anatomy.last_committed {
                anatomy.caught_up = Some(at);
            }
        }
        let (done, open) = std::mem::take(&mut self.open).into_iter().partition(|a| a.caught_up.is_some());
        self.open = open;
        let done: Vec<Anatomy> = done;
        done.into_iter().map(|a| Event::Recovery(Box::new(a))).collect()
    }

    /// Somebody saw the wall clock jump, a rank or who leads the run; there is nothing to repair.
    pub fn clock_seen(&mut self, rank: Option<u32>) {
        let clock = |s: &&mut Struck| {
            matches!(s.fault.kind, FaultKind::Clock { .. }) && rank.is_none_or(|rank| rank == s.fault.rank)
        };
        for struck in self.struck.iter_mut().filter(clock) {
            (struck.detected, struck.repaired) = (true, true);
        }
    }

    /// The rank repaired it by itself: it computed the step again.
    pub fn replayed(&mut self, step: u64) {
        let mine = |s: &&mut Struck| !s.detected && s.fault.step <= step && s.fault.kind.spoils_gradients();
        if let Some(struck) = self.struck.iter_mut().find(mine) {
            struck.detected = true;
        }
    }

    /// The checkpoint of `step` could not be written: it names one reason, but every disk that was full by then is in it.
    pub fn checkpoint_failed(&mut self, step: u64) {
        let full = |s: &&mut Struck| s.fault.kind == FaultKind::DiskFull && s.fault.step <= step;
        self.struck.iter_mut().filter(full).for_each(|s| s.detected = true);
    }

    /// A checkpoint was written: what was the matter with the disk is over.
    pub fn checkpoint_written(&mut self) {
        let full = |s: &&mut Struck| s.detected && s.fault.kind == FaultKind::DiskFull;
        self.struck.iter_mut().filter(full).for_each(|s| s.repaired = true);
    }

    /// The first step that a fault which nobody noticed may have spoilt, with all that came after it.
    pub fn unseen(&self) -> Option<u64> {
        let spoils = |kind| {
            matches!(
                kind,
                FaultKind::FlipMoment
                    | FaultKind::FlipWeight
                    | FaultKind::FlipMessage
                    | FaultKind::FlipGradient
                    | FaultKind::FlipDevice
            )
        };
        self.struck.iter().filter(|s| !s.detected && spoils(s.fault.kind)).map(|s| s.fault.step).min()
    }

    /// The run is over and well; were all faults that struck seen and repaired?
    ///
    /// # Errors
    /// What was not.
    pub fn account(&self) -> Result<(), String> {
        if let Some(text) = self.broken.first() {
            return Err(text.clone());
        }
        match self.struck.iter().find(|s| !s.repaired) {
            None => Ok(()),
            Some(s) if !s.detected => Err(format!("the injected fault was not detected: {}", s.fault)),
            Some(s) => Err(format!("the injected fault was detected but not repaired: {}", s.fault)),
        }
    }
}

impl FaultKind {
    /// It ends a world; what is only slow is a matter of diagnosis, and a flipped bit of a gradient is computed away.
    pub fn shows(&self) -> bool {
        !matches!(self, Self::Slow { .. } | Self::FlipGradient | Self::DiskFull | Self::Clock { .. })
    }

    /// A bit of parameters or of the optimizer's state.
    fn flips_state(self) -> bool {
        matches!(self, Self::FlipMoment | Self::FlipWeight)
    }

    /// Whether a trouble of the name `trouble` can be how it shows: that a device errs only those see who compute the same.
    fn shows_as(self, trouble: &str) -> bool {
        self.shows() && (self != Self::FlipDevice || matches!(trouble, "broken device" | "disputed"))
    }

    /// Whether a trouble of the name `trouble` is how it looks first of all.
    fn looks_like(self, trouble: &str) -> bool {
        match trouble {
            "bad message" => self == Self::FlipMessage,
            "corrupt" => self.flips_state(),
            "no progress" | "deadline" => matches!(self, Self::Partition { .. }),
            _ => false,
        }
    }

    /// Its rank can find it by itself, and computes the step again.
    fn spoils_gradients(self) -> bool {
        matches!(self, Self::Nan | Self::FlipGradient)
    }

    /// It is over when a new world computes the step again.
    fn goes_with_its_step(self) -> bool {
        self.spoils_gradients() || self == Self::FlipMessage
    }
}

impl Fault {
    fn concerns(&self, rank: u32) -> bool {
        self.rank == rank || matches!(self.kind, FaultKind::Partition { peer } if peer == rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_seen_although_its_rank_tells_of_it_later() {
        let (kind, detail) = ("bad message".into(), String::new());
        let trouble = Trouble { id: 1, kind, rank: Some(3), host: None, step: 11, detail };
        let fault = |rank, step| Fault { rank, step, kind: FaultKind::Stop };
        let account = |late: Fault| {
            let mut repairs = Repairs::default();
            assert_eq!(repairs.trouble(&trouble, 1.0, None), None);
            repairs.fired(late, 1.001);
            repairs.placed("all", 12, &[], 1.01);
            repairs.step(20, 1.1);
            repairs.account()
        };
        assert_eq!(account(fault(3, 12)), Ok(()));
        assert!(account(fault(2, 12)).is_err(), "another rank's");
        assert!(account(fault(3, 14)).is_err(), "another step's");
    }

    #[test]
    fn a_recovery_that_another_trouble_interrupts_has_parts_that_sum_to_it() {
        let trouble = |id, step| {
            let (kind, detail) = ("exit".into(), String::new());
            Trouble { id, kind, rank: Some(3), host: None, step, detail }
        };
        let mut repairs = Repairs::default();
        let attempt = |repairs: &mut Repairs, told: &Trouble, at: f64| {
            repairs.trouble(told, at, Some(at - 0.25));
            repairs.decided(at);
            repairs.left(at + 0.25);
            repairs.placed("disk", 6, &[], at + 0.5);
            repairs.connected(Process(1), 1, at + 0.75);
            repairs.loaded(Process(1), 10, 1, at + 1.0);
            repairs.step(6, at + 1.25)
        };
        // The second comes while steps are made again.
        assert_eq!(attempt(&mut repairs, &trouble(1, 10), 1.0), []);
        assert_eq!(attempt(&mut repairs, &trouble(2, 10), 3.0), []);
        let done = repairs.step(10, 5.0);
        let anatomies: Vec<_> =
            done.iter().filter_map(|e| if let Event::Recovery(a) = e { Some(a) } else { None }).collect();
        let gaps: Vec<f64> = anatomies
            .iter()
            .map(|anatomy| {
                let phases = anatomy.phases();
                assert!(phases.iter().all(|(_, seconds)| *seconds >= 0.0), "{phases:?}");
                phases.iter().map(|(_, seconds)| seconds).sum()
            })
            .collect();
        assert_eq!(gaps, [5.0 - 0.75, 5.0 - 2.75]);
        let first: Vec<_> = anatomies.iter().map(|anatomy| anatomy.first_step).collect();
        assert_eq!(first, [Some(4.25); 2], "of the world that caught up");
    }

    #[test]
    fn a_checkpoint_that_fails_shows_every_full_disk_that_it_met() {
        let mut repairs = Repairs::default();
        let full = |rank, step| Fault { rank, step, kind: FaultKind::DiskFull };
        [full(2, 9), full(0, 10), full(1, 12)].iter().for_each(|fault| repairs.fired(*fault, 0.1));
        repairs.checkpoint_failed(10);
        repairs.checkpoint_written();
        assert!(repairs.account().unwrap_err().contains("rank 1 in step 12"), "it met a later one");
        repairs.checkpoint_failed(15);
        repairs.checkpoint_written();
        assert_eq!(repairs.account(), Ok(()));
    }

    #[test]
    fn what_nobody_noticed_has_a_first_step() {
        let mut repairs = Repairs::default();
        repairs.fired(Fault { rank: 0, step: 3, kind: FaultKind::DiskFull }, 0.1);
        assert_eq!(repairs.unseen(), None, "it spoils no state");
        [9, 7].iter().for_each(|step| repairs.fired(Fault { rank: 1, step: *step, kind: FaultKind::FlipDevice }, 0.1));
        assert_eq!(repairs.unseen(), Some(7));
        let trouble =
            Trouble { id: 1, kind: "disputed".into(), rank: Some(1), host: None, step: 9, detail: String::new() };
        for _ in 0..2 {
            repairs.trouble(&trouble, 1.0, None);
        }
        assert_eq!(repairs.unseen(), None);
    }

    #[test]
    fn what_spoils_a_step_that_its_world_does_not_end_is_undone() {
        let account = |kind, resumed_at| {
            let mut repairs = Repairs::default();
            repairs.fired(Fault { rank: 1, step: 8, kind }, 0.1);
            repairs.placed("all", resumed_at, &[], 0.2);
            repairs.step(9, 0.3);
            repairs.account()
        };
        for kind in [FaultKind::Nan, FaultKind::FlipMessage] {
            assert_eq!(account(kind, 8), Ok(()));
            assert!(account(kind, 9).is_err(), "the step was committed with it");
        }
    }

    #[test]
    fn a_step_that_a_rank_computes_again_says_nothing_of_messages() {
        let mut repairs = Repairs::default();
        let fault = |kind| Fault { rank: 1, step: 8, kind };
        [FaultKind::FlipMessage, FaultKind::Nan].iter().for_each(|kind| repairs.fired(fault(*kind), 0.1));
        repairs.replayed(8);
        repairs.step(8, 0.2);
        let why = repairs.account().unwrap_err();
        assert!(why.contains("not detected: flip message"), "{why}");
    }

    fn trouble(kind: &str, rank: u32, step: u64) -> Trouble {
        Trouble { id: 1, kind: kind.into(), rank: Some(rank), host: None, step, detail: String::new() }
    }

    #[test]
    fn two_faults_of_a_rank_in_one_step_are_told_apart() {
        let fault = |kind| Fault { rank: 0, step: 3, kind };
        let account = |members: [&[Process]; 2], bad_hash| {
            let mut repairs = Repairs::default();
            repairs.seated(members[0]);
            [FaultKind::FlipMessage, FaultKind::FlipWeight].iter().for_each(|kind| repairs.fired(fault(*kind), 0.1));
            repairs.trouble(&trouble("bad message", 0, 2), 0.2, None);
            if bad_hash {
                repairs.failed_hash(0);
            }
            repairs.placed("all", 3, members[1], 0.3);
            repairs.step(3, 0.4);
            repairs.account()
        };
        let (one, two) = (&[Process(1), Process(2)][..], &[Process(3), Process(2)][..]);
        let why = account([one, one], false).unwrap_err();
        assert!(why.contains("not detected") && why.contains("weight"), "who stays keeps its state: {why}");
        assert_eq!(account([one, one], true), Ok(()), "its hash told");
        assert_eq!(account([one, two], false), Ok(()), "it went with its process");
    }

    #[test]
    fn a_device_that_went_with_its_process_is_undone_once_its_steps_are_made_again() {
        let account = |resumed_at: [u64; 2], kind| {
            let mut repairs = Repairs::default();
            repairs.seated(&[Process(1), Process(2)]);
            repairs.fired(Fault { rank: 1, step: 8, kind }, 0.1);
            repairs.trouble(&trouble("exit", 1, 8), 0.2, None);
            repairs.placed("restart", resumed_at[0], &[Process(1), Process(3)], 0.3);
            repairs.trouble(&trouble("disagree", 0, 11), 0.4, None);
            repairs.placed("back", resumed_at[1], &[Process(1), Process(3)], 0.5);
            repairs.step(12, 0.6);
            repairs.account().is_ok()
        };
        let device = FaultKind::FlipDevice;
        assert!(account([8, 12], device), "its step was made again by another one");
        assert!(account([9, 6], device), "the run went back before it later");
        assert!(!account([9, 12], device), "neither its end nor copies that differ are a check");
        assert!(account([9, 12], FaultKind::Partition { peer: 0 }), "it went with the links");
    }

    #[test]
    fn a_fault_in_the_last_step_is_repaired_once_all_have_its_state() {
        let account = |resumed_at, loaded: u64| {
            let mut repairs = Repairs::default();
            repairs.fired(Fault { rank: 0, step: 12, kind: FaultKind::Kill }, 0.1);
            repairs.trouble(&trouble("exit", 0, 11), 0.2, None);
            repairs.placed("restart", resumed_at, &[], 0.3);
            (0..loaded).for_each(|process| repairs.loaded(Process(process), 0, 2, 0.4));
            (repairs.finished().len(), repairs.account().is_ok())
        };
        assert_eq!(account(13, 2), (1, true));
        assert_eq!(account(13, 1), (0, false), "one has no state");
        assert!(!account(12, 2).1, "the step is to be made again");
    }
}

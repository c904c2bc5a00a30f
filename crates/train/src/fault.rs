//! Faults that a run is asked to suffer (`--inject`): the rank that they strike fires them itself.
//!
//! It says so first, so that the log knows the cause of what follows. Where in the step a fault strikes, (rank, step)
//! alone decide: the same run suffers the same again.

use control::fault::{Fault, FaultKind, Moment};
use events::Event;
use program::{Exchange, Instr, Op, Program, Value};

use crate::rank::Said;

/// The faults of one rank in one world.
#[derive(Default)]
pub struct Faults<'a> {
    due: Vec<Fault>,
    tell: Option<&'a dyn Fn(Said)>,
    /// Work takes so many times as long, up to this step.
    slow: Option<(f64, u64)>,
    /// The next gradient that is summed is spoilt.
    spoilt: Option<Spoilt>,
    /// Batches that are left out.
    pub skips: spec::Skips,
    /// The next checkpoint finds a full disk.
    pub disk_full: bool,
}

/// What is done to a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoilt {
    Nan,
    Bit(u64),
}

/// Which bit of each gradient a broken device flips, as [`flip`] takes it: always the same.
pub const STUCK: u64 = 20;

/// What the executor does for a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strike {
    /// Flip a bit of a moment of what is owned here; which, this number says.
    Moment(u64),
    /// Likewise of a parameter.
    Weight(u64),
    /// From now on this process flips a bit of every gradient, whatever rank it is.
    Device,
    /// Flip a bit of the next message.
    Message(u64),
    /// Lose the next message.
    Lose,
    /// The wall clock of this process shows so many seconds more.
    Clock(i64),
    /// Messages from and to a peer vanish from now on.
    Partition(u32),
}

/// A number that looks random, of two (SplitMix64).
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl<'a> Faults<'a> {
    /// The faults of a rank; `tell` is told of each before it strikes.
    pub fn new(due: Vec<Fault>, tell: &'a dyn Fn(Said)) -> Self {
        Self { due, tell: Some(tell), ..Self::default() }
    }

    /// True if nothing will ever strike.
    pub fn none(&self) -> bool {
        self.due.is_empty() && self.slow.is_none() && self.spoilt.is_none()
    }

    /// What strikes in `step` before instruction `at` of `program`. A killed process does not return.
    pub fn strike(&mut self, step: u64, program: &Program, at: usize) -> Vec<Strike> {
        let mut strikes = Vec::new();
        let due = std::mem::take(&mut self.due);
        let (now, later): (Vec<Fault>, Vec<Fault>) =
            due.into_iter().partition(|fault| self.is_due(fault, step) && at == place(fault, &program.instrs));
        self.due = later;
        self.due.extend(now.iter().filter(|fault| fault.kind == FaultKind::Poison));
        for fault in now {
            let Fault { rank, kind, .. } = fault;
            let number = mix(u64::from(rank) + 1, step);
            self.announce(&fault);
            match kind {
                // Its place is in no step.
                FaultKind::KillAt(Moment::Load) => {}
                FaultKind::Kill | FaultKind::KillAt(Moment::Vote | Moment::Apply | Moment::Gather) => {
                    signal(rustix::process::Signal::KILL);
                }
                FaultKind::KillAt(Moment::HalfBallot) => {
                    // One peer does not get this rank's ballot; then it dies, and the others have seen the vote.
                    strikes.push(Strike::Lose);
                    self.due.push(Fault { kind: FaultKind::KillAt(Moment::Apply), ..fault });
                }
                FaultKind::Stop => signal(rustix::process::Signal::STOP),
                FaultKind::Nan | FaultKind::Poison => self.spoilt = Some(Spoilt::Nan),
                FaultKind::FlipGradient => self.spoilt = Some(Spoilt::Bit(number)),
                FaultKind::FlipDevice => strikes.push(Strike::Device),
                FaultKind::FlipMoment => strikes.push(Strike::Moment(number)),
                FaultKind::FlipWeight => strikes.push(Strike::Weight(number)),
                FaultKind::FlipMessage => strikes.push(Strike::Message(number)),
                FaultKind::Slow { factor_percent, steps } => {
                    self.slow = Some((f64::from(factor_percent) / 100.0, step.saturating_add(steps)));
                }
                FaultKind::DiskFull => self.disk_full = true,
                FaultKind::Clock { seconds } => strikes.push(Strike::Clock(seconds)),
                FaultKind::Partition { peer } => strikes.push(Strike::Partition(peer)),
            }
        }
        strikes
    }

    /// Strikes what is to strike while state is loaded, `step` being next. A killed process does not return.
    pub fn strike_loading(&mut self, step: u64) {
        let due = |fault: &&Fault| fault.kind == FaultKind::KillAt(Moment::Load) && fault.step <= step;
        if let Some(fault) = self.due.iter().find(due) {
            self.announce(fault);
            signal(rustix::process::Signal::KILL);
        }
    }

    /// Strikes in `step`, or in every step that computes the batch that is spoilt.
    fn is_due(&self, fault: &Fault, step: u64) -> bool {
        let batch = step + self.skips.before(step);
        fault.step == if fault.kind == FaultKind::Poison { batch } else { step }
    }

    fn announce(&self, fault: &Fault) {
        let Some(tell) = self.tell else { return };
        let Fault { rank, step, kind } = *fault;
        tell(Said::Event(Event::FaultFired { rank: rank as usize, step, fault: kind.to_string() }));
    }

    /// Spoils a gradient that is about to be summed, if that is due.
    pub fn spoil(&mut self, gradient: &mut [f32]) {
        if gradient.is_empty() {
            return;
        }
        match self.spoilt.take() {
            Some(Spoilt::Nan) => gradient[0] = f32::NAN,
            Some(Spoilt::Bit(number)) => flip(gradient, number),
            None => {}
        }
    }

    /// How much longer than `took` an instruction of `step` is to take.
    pub fn drag(&mut self, step: u64, took: std::time::Duration) -> Option<std::time::Duration> {
        let (factor, until) = self.slow?;
        if step >= until {
            self.slow = None;
            return None;
        }
        Some(took.mul_f64((factor - 1.0).max(0.0)))
    }
}

/// Before which instruction a fault strikes.
fn place(fault: &Fault, instrs: &[Instr]) -> usize {
    let first = |wanted: &dyn Fn(&Op) -> bool| instrs.iter().position(|instr| wanted(&instr.op)).unwrap_or(0);
    let ballot = |op: &Op| matches!(op, Op::Collective { value: Value::Ballot, .. });
    let apply = |op: &Op| matches!(op, Op::Apply);
    match fault.kind {
        FaultKind::Kill | FaultKind::Stop | FaultKind::FlipMessage => {
            mix(u64::from(fault.rank) + 1, fault.step) as usize % instrs.len().max(1)
        }
        FaultKind::KillAt(Moment::Load) => usize::MAX,
        FaultKind::KillAt(Moment::Vote | Moment::HalfBallot) => first(&ballot),
        FaultKind::KillAt(Moment::Apply) => first(&apply),
        FaultKind::KillAt(Moment::Gather) => {
            // The second gather after the update, or what is next where nothing is gathered.
            let update = instrs.iter().rposition(|instr| apply(&instr.op)).unwrap_or(0);
            let gather =
                |op: &Op| matches!(op, Op::Collective { exchange: Exchange::AllGather, value: Value::Params(_), .. });
            let gathers = instrs.iter().enumerate().skip(update).filter(|(_, instr)| gather(&instr.op));
            gathers.map(|(at, _)| at).nth(1).unwrap_or(update)
        }
        _ => 0,
    }
}

/// Flips a bit that `number` chooses.
pub fn flip(data: &mut [f32], number: u64) {
    if data.is_empty() {
        return;
    }
    let at = (number >> 5) as usize % data.len();
    data[at] = f32::from_bits(data[at].to_bits() ^ (1 << (number % 32)));
}

fn signal(signal: rustix::process::Signal) {
    let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_fault_strikes_once_at_its_place_and_says_so_first() {
        let said = RefCell::new(Vec::new());
        let tell = |what| said.borrow_mut().push(what);
        let due = vec![Fault { rank: 1, step: 3, kind: FaultKind::FlipMoment }];
        let mut faults = Faults::new(due, &tell);
        let program = Program { rank: 1, instrs: vec![Instr { op: Op::Vote, chunk: 0, unit: None }; 4] };
        let all = |faults: &mut Faults, step| (0..4).flat_map(|at| faults.strike(step, &program, at)).count();
        assert_eq!((all(&mut faults, 2), all(&mut faults, 3), all(&mut faults, 3)), (0, 1, 0));
        assert!(faults.none());
        let fired = Event::FaultFired { rank: 1, step: 3, fault: "flip moment".into() };
        assert_eq!(*said.borrow(), [Said::Event(fired)]);
    }

    #[test]
    fn a_flip_is_one_bit_and_comes_back() {
        let mut data = vec![1.5f32; 7];
        flip(&mut data, 12345);
        assert_eq!(data.iter().filter(|x| **x != 1.5).count(), 1);
        flip(&mut data, 12345);
        assert_eq!(data, [1.5; 7]);
    }
}

//! Writing down when instructions run (`--profile`): one reading of the clock each, into memory that is there already.

use std::time::{Duration, Instant};

use observe::{Flight, RankRecord, StepRecord};

/// Times of one rank, in nanoseconds of the machine's monotonic clock. Only between [`Recorder::begin`] and
/// [`Recorder::end`] is anything kept.
pub struct Recorder {
    record: RankRecord,
    /// Steps with room for their instructions, touched beforehand: no page fault falls into a span.
    spare: Vec<StepRecord>,
    open: Option<StepRecord>,
    /// One moment, as both clocks tell it: `Instant` hides its number.
    origin: (Instant, u64),
    waited_ns: u64,
}

impl Recorder {
    /// For `steps` steps of a list of `instructions` on `rank`.
    pub fn new(rank: usize, steps: usize, instructions: usize) -> Self {
        let step = || {
            let mut marks = vec![(1, 1); instructions];
            marks.clear();
            StepRecord { marks, ..StepRecord::default() }
        };
        // `Instant` reads the same clock on Linux.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let origin = (Instant::now(), now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64);
        let record = RankRecord { rank, steps: Vec::with_capacity(steps) };
        Self { record, spare: (0..steps).map(|_| step()).collect(), open: None, origin, waited_ns: 0 }
    }

    fn ns(&self, at: Instant) -> u64 {
        self.origin.1 + at.saturating_duration_since(self.origin.0).as_nanos() as u64
    }

    /// `step` begins; `waited_ns` is what the rank has ever waited for others. Nothing if no room is left.
    pub fn begin(&mut self, step: u64, at: Instant, waited_ns: u64) {
        let ns = self.ns(at);
        self.waited_ns = waited_ns;
        self.open = self.spare.pop().map(|spare| StepRecord { step, began_ns: ns, ran_ns: ns, ..spare });
    }

    /// The first instruction begins.
    pub fn run(&mut self, at: Instant) {
        let ns = self.ns(at);
        if let Some(open) = &mut self.open {
            open.ran_ns = ns;
        }
    }

    /// An instruction is over; `waited_ns` tells what the rank has ever waited for others, and is asked for exchanges.
    pub fn mark(&mut self, at: Instant, waited_ns: Option<impl FnOnce() -> u64>) {
        if self.open.is_none() {
            return;
        }
        let total = waited_ns.map_or(self.waited_ns, |total| total());
        let waited = total - std::mem::replace(&mut self.waited_ns, total);
        let ns = self.ns(at);
        if let Some(open) = &mut self.open {
            open.marks.push((ns, waited));
        }
    }

    /// The instruction that is over took this long to move what was posted before.
    pub fn moved(&mut self, took: Duration) {
        if let Some(open) = self.open.as_mut().filter(|_| !took.is_zero()) {
            open.moved.push((open.marks.len().saturating_sub(1), took.as_nanos() as u64));
        }
    }

    /// In the instruction that is over this long went into the update of what is mirrored.
    pub fn late(&mut self, took: Duration) {
        if let Some(open) = self.open.as_mut().filter(|_| !took.is_zero()) {
            open.late.push((open.marks.len().saturating_sub(1), took.as_nanos() as u64));
        }
    }

    /// An exchange starts that runs beside the instructions which follow; give what comes back to [`Recorder::land`].
    pub fn depart(&self, at: Instant) -> Option<Flight> {
        let open = self.open.as_ref()?;
        Some(Flight { instr: open.marks.len(), began_ns: self.ns(at), ended_ns: 0 })
    }

    /// Its result was there; the instruction at hand takes it.
    pub fn land(&mut self, flight: Flight, at: Instant) {
        let ended_ns = self.ns(at);
        if let Some(open) = &mut self.open {
            open.flights.push(Flight { instr: open.marks.len(), ended_ns, ..flight });
        }
    }

    /// The step is over.
    pub fn end(&mut self, at: Instant) {
        let ended_ns = self.ns(at);
        self.record.steps.extend(self.open.take().map(|open| StepRecord { ended_ns, ..open }));
    }

    /// What was recorded.
    pub fn finish(self) -> RankRecord {
        self.record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_steps_inside_the_room_are_kept() {
        let mut recorder = Recorder::new(3, 2, 2);
        let zero = recorder.origin.0;
        let at = |ns: u64| zero + Duration::from_nanos(ns);
        recorder.mark(at(1), None::<fn() -> u64>);
        for step in 5..8 {
            let base = step * 1000;
            recorder.begin(step, at(base), 40);
            recorder.run(at(base + 10));
            let flight = recorder.depart(at(base + 15));
            recorder.mark(at(base + 20), Some(|| 47));
            recorder.mark(at(base + 30), None::<fn() -> u64>);
            recorder.moved(Duration::from_nanos(3));
            flight.into_iter().for_each(|flight| recorder.land(flight, at(base + 30)));
            recorder.end(at(base + 35));
        }
        let (origin, record) = (recorder.origin.1, recorder.finish());
        assert_eq!((record.rank, record.steps.len()), (3, 2), "room for two");
        let last = &record.steps[1];
        let ns = |ns: u64| origin + 6000 + ns;
        assert_eq!((last.step, last.began_ns, last.ran_ns, last.ended_ns), (6, ns(0), ns(10), ns(35)));
        assert_eq!(last.marks, [(ns(20), 7), (ns(30), 0)]);
        assert_eq!(last.moved, [(1, 3)]);
        assert_eq!(last.flights, [Flight { instr: 2, began_ns: ns(15), ended_ns: ns(30) }]);
    }
}

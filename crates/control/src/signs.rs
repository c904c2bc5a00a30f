//! What processes show of themselves: that they live, that they work, and that they wait in vain. Never merged.

use std::collections::HashMap;

use policy::Process;

/// Least time between two times that work is reported.
const WORKING_MS: u64 = 500;

/// Of one process.
#[derive(Debug, Clone, Copy, Default)]
struct Sign {
    /// Its last words.
    at: u64,
    /// Nothing is expected of it any more.
    done: bool,
    /// The work that it had done.
    work: u64,
    /// From when to when it looked for something to arrive or leave, and nothing did; empty: it moves.
    still: (u64, u64),
}

/// Of all processes that something is expected of. Times in milliseconds since the start of the run.
#[derive(Debug, Clone, Default)]
pub struct Signs {
    of: HashMap<Process, Sign>,
    worked_at: u64,
}

impl Signs {
    /// From `now` on a sign of it is expected.
    pub fn expect(&mut self, process: Process, now: u64) {
        self.of.insert(process, Sign { at: now, ..Sign::default() });
    }

    /// Nothing is expected of it any more.
    pub fn forget(&mut self, process: Process) {
        if let Some(sign) = self.of.get_mut(&process) {
            (sign.done, sign.still) = (true, (0, 0));
        }
    }

    /// Whether a sign of it is expected.
    pub fn is_expected(&self, process: Process) -> bool {
        self.of.get(&process).is_some_and(|sign| !sign.done)
    }

    /// All of which one is.
    pub fn expected(&self) -> impl Iterator<Item = Process> + '_ {
        self.of.iter().filter(|(_, sign)| !sign.done).map(|(process, _)| *process)
    }

    /// It said something.
    pub fn heard(&mut self, process: Process, now: u64) {
        let sign = self.of.entry(process).or_default();
        (sign.at, sign.done) = (now, false);
    }

    /// Its heart beat: it has run `work` instructions, and nothing has moved for `still_ms`. True if work is to be reported.
    pub fn beat(&mut self, process: Process, now: u64, work: u64, still_ms: u64) -> bool {
        let sign = self.of.entry(process).or_default();
        sign.still = (now.saturating_sub(still_ms), now);
        let worked = std::mem::replace(&mut sign.work, work) != work;
        let due = worked && now >= self.worked_at + WORKING_MS;
        if due {
            self.worked_at = now;
        }
        due
    }

    /// A new world: who stood still in the one before does so no more.
    pub fn moves(&mut self) {
        self.of.values_mut().for_each(|sign| sign.still = (0, 0));
    }

    /// Nobody could have been heard until `now`: silence counts from now on.
    pub fn excuse(&mut self, now: u64) {
        self.of.values_mut().for_each(|sign| sign.at = now);
    }

    /// Those that have been silent for more than `limit_ms`, and for how long; nothing is expected of them any more.
    pub fn silent(&mut self, now: u64, limit_ms: u64) -> Vec<(Process, u64)> {
        let late = self.of.iter().filter(|(_, sign)| !sign.done && now > sign.at + limit_ms);
        let late: Vec<_> = late.map(|(process, sign)| (*process, now - sign.at)).collect();
        late.iter().for_each(|(process, _)| self.forget(*process));
        late
    }

    /// When it last said anything.
    pub fn last(&self, process: Process) -> Option<u64> {
        self.of.get(&process).map(|sign| sign.at)
    }

    /// For how long nothing has moved at any of `members`, as all of them have seen at one time; 0: something does.
    pub fn still_ms(&self, members: &[Process]) -> u64 {
        let still = || members.iter().map(|process| self.of.get(process).map_or((0, 0), |sign| sign.still));
        let (from, to) = (still().map(|(from, _)| from).max(), still().map(|(_, to)| to).min());
        to.unwrap_or(0).saturating_sub(from.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Process; 3] = [Process(1), Process(2), Process(5)];

    #[test]
    fn nothing_moves_where_all_have_seen_it_at_one_time() {
        let mut signs = Signs::default();
        ALL.iter().for_each(|p| signs.expect(*p, 0));
        assert_eq!(signs.still_ms(&ALL), 0);
        signs.beat(ALL[0], 1000, 7, 400);
        signs.beat(ALL[1], 1050, 7, 900);
        assert_eq!(signs.still_ms(&ALL), 0, "one has not said it");
        signs.beat(ALL[2], 1010, 7, 800);
        assert_eq!(signs.still_ms(&ALL), 400);
        // One that computes holds the others up: they wait, and it is no hang.
        signs.beat(ALL[2], 1100, 8, 0);
        signs.beat(ALL[0], 3000, 7, 2400);
        assert_eq!(signs.still_ms(&ALL), 0);
        // What was seen at another time does not count.
        signs.beat(ALL[2], 3100, 8, 50);
        assert_eq!(signs.still_ms(&ALL), 0);
        assert_eq!(signs.still_ms(&[]), 0);
        for process in ALL {
            signs.beat(process, 4000, 9, 900);
        }
        assert_eq!(signs.still_ms(&ALL), 900);
        signs.moves();
        assert_eq!(signs.still_ms(&ALL), 0);
    }

    #[test]
    fn silence_is_told_once_and_work_seldom() {
        let mut signs = Signs::default();
        signs.expect(ALL[0], 0);
        signs.heard(ALL[1], 900);
        assert_eq!(signs.silent(1000, 500), [(ALL[0], 1000)]);
        assert!(signs.silent(1000, 500).is_empty());
        assert_eq!((signs.last(ALL[0]), signs.last(ALL[1]), signs.last(ALL[2])), (Some(0), Some(900), None));
        assert!(signs.beat(ALL[1], 1000, 5, 0) && !signs.beat(ALL[1], 1100, 6, 0) && !signs.beat(ALL[1], 1600, 6, 0));
        assert!(signs.beat(ALL[1], 1700, 7, 0));
    }
}

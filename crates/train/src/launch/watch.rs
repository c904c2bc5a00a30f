//! What the parent makes of the events that it hears: the goodput ledger, and who holds the others up.

use std::time::Instant;

use events::{Event, Work};
use observe::goodput::{Account, Ledger};
use observe::straggler::Detector;

/// Watches one run.
pub struct Watch {
    began: Instant,
    ledger: Ledger,
    detector: Detector,
    /// Of each rank, what it does alike with others.
    alike: Vec<Option<u64>>,
}

impl Watch {
    /// From `began` on.
    pub fn new(began: Instant) -> Self {
        Self { began, ledger: Ledger::default(), detector: Detector::default(), alike: Vec::new() }
    }

    /// Takes in an event; what the log and the person are told then.
    pub fn take(&mut self, event: &Event) -> Vec<Event> {
        if let Event::Work(work) = event {
            return self.work(work);
        }
        self.ledger.take(self.began.elapsed().as_secs_f64(), event);
        if matches!(event, Event::World(_)) {
            self.alike.clear();
        }
        vec![event.clone()]
    }

    /// Takes in what happened `at` seconds after the beginning, before this process was there.
    pub fn recall(&mut self, at: f64, event: &Event) {
        self.ledger.take(at, event);
    }

    fn work(&mut self, work: &Work) -> Vec<Event> {
        if self.alike.len() != work.ranks {
            self.alike = vec![None; work.ranks];
        }
        let Some(place) = self.alike.get_mut(work.rank) else { return Vec::new() };
        if place.replace(work.alike) != Some(work.alike) {
            // A rank of this world speaks for the first time: until all have, there is nothing to compare.
            let groups: Vec<usize> = self.alike.iter().map(|alike| alike.map_or(usize::MAX, |a| a as usize)).collect();
            self.detector = Detector::new(groups);
        }
        // A machine that others keep busy makes nobody a slow rank.
        let own_s = work.own_s - work.core_wait_s;
        let found = self.detector.take(work.step, work.rank, own_s, work.step_s);
        found.into_iter().map(Event::Straggler).collect()
    }

    /// What became of the time until now.
    pub fn account(&self) -> Account {
        self.ledger.account(self.began.elapsed().as_secs_f64())
    }
}

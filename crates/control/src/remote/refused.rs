//! How long an agent asks again after refusals, and what it says meanwhile. Pure.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Refusals in a row for at least so long are for good.
const PATIENCE: Duration = Duration::from_secs(30);
/// Refusals further apart than this are not in a row.
const GAP: Duration = Duration::from_secs(15);
/// A complaint is said again after so long.
const AGAIN: Duration = Duration::from_secs(60);
/// Complaints that are remembered.
const COMPLAINTS_MAX: usize = 64;

/// Refusals in a row.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    row: Option<(Instant, Instant, usize)>,
}

impl Refusals {
    /// Another one came. A host that is gone is known to be after `silence`; the agent asks for `patience` at most, if it
    /// has a limit. The answer: how often and for how long, if that is enough.
    pub fn another(
        &mut self,
        now: Instant,
        silence: Duration,
        patience: Option<Duration>,
    ) -> Option<(usize, Duration)> {
        let in_row = self.row.filter(|(_, last, _)| now.duration_since(*last) <= GAP);
        let (first, _, n) = in_row.unwrap_or((now, now, 0));
        self.row = Some((first, now, n + 1));
        let limit = PATIENCE.max(silence.saturating_mul(2));
        let limit = patience.map_or(limit, |patience| limit.min(patience));
        let since = now.duration_since(first);
        (since >= limit && n > 0).then_some((n + 1, since))
    }

    /// A controller was there a moment ago, and refused.
    pub fn lately(&self, now: Instant) -> bool {
        self.row.is_some_and(|(_, last, _)| now.duration_since(last) <= GAP)
    }

    /// It was let in.
    pub fn clear(&mut self) {
        self.row = None;
    }
}

/// What was said lately.
#[derive(Debug, Default)]
pub(super) struct Complaints {
    said: HashMap<String, Instant>,
}

impl Complaints {
    /// Whether to say it: it was not said in the last minute.
    pub fn is_new(&mut self, text: &str, now: Instant) -> bool {
        if self.said.get(text).is_some_and(|at| now.duration_since(*at) < AGAIN) {
            return false;
        }
        if self.said.len() >= COMPLAINTS_MAX {
            self.said.clear();
        }
        self.said.insert(text.into(), now);
        true
    }

    /// All is well again: what comes next is news.
    pub fn clear(&mut self) {
        self.said.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn refusals_in_a_row_are_enough_after_a_bounded_time() {
        let now = Instant::now();
        let ends = |silence, patience| {
            let mut refusals = Refusals::default();
            (0..1000).step_by(5).find(|at| refusals.another(now + s(*at), s(silence), patience).is_some())
        };
        assert_eq!(ends(3, None), Some(30));
        // An agent that was started again is refused until its predecessor is known to be gone.
        assert_eq!(ends(60, None), Some(120));
        assert_eq!(ends(60, Some(s(10))), Some(10));
        // Once is never enough.
        assert_eq!(Refusals::default().another(now, s(0), Some(s(0))), None);
    }

    #[test]
    fn refusals_far_apart_are_not_in_a_row() {
        let now = Instant::now();
        let mut refusals = Refusals::default();
        assert_eq!(refusals.another(now, s(3), None), None);
        assert_eq!(refusals.another(now + s(3600), s(3), None), None);
        refusals.clear();
        assert_eq!(refusals.another(now + s(3601), s(3), None), None);
    }

    #[test]
    fn complaints_that_take_turns_are_said_once_a_minute() {
        let now = Instant::now();
        let mut complaints = Complaints::default();
        let said =
            (0..600).filter(|i| complaints.is_new(["a", "b"][i % 2], now + Duration::from_millis(500) * *i as u32));
        assert_eq!(said.count(), 10);
        complaints.clear();
        assert!(complaints.is_new("a", now + s(300)));
    }
}

//! A world that does not get on: when its members are asked where they stand, and what follows from the verdict.
//!
//! Two kinds of evidence. That all ranks wait and nothing moves between any of them is a hang after a moment: whoever still
//! computes, reads or writes is not counted as waiting, however slow it is. That there is no progress although somebody does
//! something becomes one only after a long time.

use super::{Phase, Policy};
use crate::action::Action;

/// How long a verdict may take after a dump.
const VERDICT_MS: u64 = 1_000;
/// Where something moved after all the members are not asked again before.
const ASK_AGAIN_MS: u64 = 1_000;

/// The members are asked where they stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    at: u64,
    /// Because nothing moves: the limit that the verdict must confirm.
    still: Option<u64>,
}

impl Policy {
    /// Whether there was a step or work of late.
    pub(super) fn hang(&mut self, now: u64) {
        let limit = self.guard.progress_floor_ms.max((self.guard.progress_factor * self.longest_step_ms as f64) as u64);
        let idle = now.saturating_sub(self.progress_at);
        match self.asked {
            None if idle > limit => {
                self.ask(now, None, format!("no step for {idle} ms, the limit is {limit} ms"));
            }
            Some(Asked { still: None, .. }) if idle <= limit => self.asked = None,
            Some(Asked { at, .. }) if now > at + VERDICT_MS => {
                let reason = format!("no step for {idle} ms, the limit is {limit} ms, and nobody can be named");
                self.verdict(now, &[], &reason, 0);
            }
            _ => {}
        }
    }

    /// All wait, and nothing has moved for `ms`. The longest step stands for how slow this run's machines and links are.
    pub(super) fn still(&mut self, now: u64, ms: u64) {
        let limit = self.guard.still_floor_ms + self.longest_step_ms;
        if ms < limit
            || self.phase != Phase::Running
            || !self.is_whole()
            || self.asked.is_some()
            || now < self.moved_until
        {
            return;
        }
        let text = format!("all ranks wait and nothing has moved between them for {ms} ms, the limit is {limit} ms");
        self.ask(now, Some(limit), text);
    }

    fn ask(&mut self, now: u64, still: Option<u64>, reason: String) {
        let Some(generation) = self.world().map(|w| w.generation) else { return };
        self.asked = Some(Asked { at: now, still });
        self.act(Action::Dump { generation }, reason);
    }

    pub(super) fn verdict(&mut self, now: u64, ranks: &[u32], reason: &str, still_ms: u64) {
        let Some(asked) = self.asked.take().filter(|_| self.phase == Phase::Running) else { return };
        if asked.still.is_some_and(|limit| still_ms < limit) {
            self.moved_until = now + ASK_AGAIN_MS;
            return;
        }
        let process = ranks.first().and_then(|rank| self.process(*rank));
        self.trouble(now, "no progress", process, reason.into());
    }
}

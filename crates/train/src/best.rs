//! The best validation so far, and when to stop for want of a better one. Pure.
//!
//! Each checkpoint carries it ([`checkpoint::Meta::validations`]), since it decides where a run ends.

use checkpoint::Validations;
use serde::{Deserialize, Serialize};

/// Validations seen so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Step and loss (nats per token) of the best one.
    pub best: Option<(u64, f64)>,
    /// Validations since.
    pub since: u64,
}

impl Best {
    /// Takes in a validation; true if it is a new best. An equal loss is not, nor is one that is not finite.
    pub fn observe(&mut self, step: u64, loss: f64) -> bool {
        let better = loss.is_finite() && self.best.is_none_or(|(_, best)| loss < best);
        if better {
            *self = Self { best: Some((step, loss)), since: 0 };
        } else {
            self.since += 1;
        }
        better
    }

    /// True after `patience` validations without a new best; 0: never.
    pub fn exhausted(&self, patience: u64) -> bool {
        patience > 0 && self.since >= patience
    }

    /// What a run knew after step `done`, from its validations in any order; the last word on a step counts. For checkpoints of
    /// older versions, which do not say it themselves.
    pub fn replay(validations: impl Iterator<Item = (u64, f64)>, done: u64) -> Self {
        let by_step: std::collections::BTreeMap<u64, f64> = validations.filter(|(step, _)| *step <= done).collect();
        let mut best = Self::default();
        for (step, loss) in by_step {
            best.observe(step, loss);
        }
        best
    }
}

impl From<Best> for Validations {
    fn from(Best { best, since }: Best) -> Self {
        Self { best, since }
    }
}

impl From<Validations> for Best {
    fn from(Validations { best, since }: Validations) -> Self {
        Self { best, since }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_is_never_the_best() {
        let mut best = Best::default();
        assert!(!best.observe(1, f64::NAN) && !best.observe(2, f64::INFINITY));
        assert_eq!(best, Best { best: None, since: 2 });
        assert!(best.observe(3, 7.0) && !best.observe(4, f64::NAN));
        assert_eq!(best, Best { best: Some((3, 7.0)), since: 1 });
    }

    #[test]
    fn a_resumed_run_knows_what_the_uninterrupted_one_knew() {
        let seen = [(2, 3.0), (4, 2.0), (6, 2.5), (4, 2.0), (8, 2.0)];
        let best = Best::replay(seen.into_iter(), 6);
        assert_eq!(best, Best { best: Some((4, 2.0)), since: 1 });
        assert!(!best.exhausted(2) && !best.exhausted(0));
        assert!(Best::replay(seen.into_iter(), 8).exhausted(2), "an equal loss is no new best");
    }
}

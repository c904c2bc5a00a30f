//! Gradients computed twice: the way to see a bit that flips while they are made.
//!
//! The numbers do not depend on time, so two passes over a step give the same bits, or a machine was at fault in one of them. Each
//! rank compares what it brings to the sums; who differs says so in the ballot, and the step is computed until two passes agree.
//! (A fault that is the same in every pass is not seen: another rank would have to compute these leaves.)

use twox_hash::XxHash3_64;

/// The comparison of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recheck {
    /// The step is one that is computed twice.
    on: bool,
    /// Hash over what this pass brought to the sums so far.
    now: u64,
    /// That of the pass before.
    before: Option<u64>,
    /// The ranks that differed in the last pass.
    pub differ: Vec<u32>,
    /// Two passes agreed.
    settled: bool,
}

impl Recheck {
    /// Before the first of two passes.
    pub fn first() -> Self {
        Self { on: true, ..Self::default() }
    }

    /// A gradient that this rank brings to a sum.
    pub(super) fn see(&mut self, gradient: &[f32]) {
        if self.on {
            self.now = XxHash3_64::oneshot_with_seed(self.now, kernels::bytes(gradient));
        }
    }

    /// The pass has brought all: true if it differs from the one before.
    pub(super) fn differs(&self) -> bool {
        self.on && self.before.is_some_and(|before| before != self.now)
    }

    /// All ballots are in, `differ` among them; true if the step must not be applied yet.
    pub(super) fn close(&mut self, differ: &[u32]) -> bool {
        if !self.on {
            return false;
        }
        self.settled = self.before.is_some() && differ.is_empty();
        self.before = Some(std::mem::take(&mut self.now));
        self.differ = differ.to_vec();
        !self.settled
    }

    /// The step wants another pass.
    pub fn again(&self) -> bool {
        self.on && !self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One pass that brings `gradient`.
    fn pass(recheck: &mut Recheck, gradient: &[f32], others: &[u32]) -> (bool, bool) {
        recheck.see(gradient);
        let differs = recheck.differs();
        (differs, recheck.close(others))
    }

    #[test]
    fn two_equal_passes_settle_a_step() {
        let mut recheck = Recheck::first();
        assert_eq!(pass(&mut recheck, &[1.0, 2.0], &[]), (false, true));
        assert!(recheck.again());
        assert_eq!(pass(&mut recheck, &[1.0, 2.0], &[]), (false, false));
        assert!(!recheck.again());
    }

    #[test]
    fn a_flipped_bit_asks_for_another_pass_whichever_it_was_in() {
        for spoilt in 0..2 {
            let mut recheck = Recheck::first();
            let gradient = |n: i32| if n == spoilt { [1.0, 2.0000002] } else { [1.0, 2.0] };
            pass(&mut recheck, &gradient(0), &[]);
            let (differs, _) = pass(&mut recheck, &gradient(1), &[3]);
            assert!(differs && recheck.again() && recheck.differ == [3]);
            let last = pass(&mut recheck, &gradient(2), if spoilt == 0 { &[] } else { &[3] });
            assert_eq!(last, (spoilt == 1, spoilt == 1));
        }
    }

    #[test]
    fn it_is_silent_where_it_is_off() {
        let mut recheck = Recheck::default();
        assert_eq!(pass(&mut recheck, &[1.0], &[]), (false, false));
        assert!(!recheck.again());
    }
}

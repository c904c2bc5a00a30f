//! How much of a step is a rank's own work: what is left of it without the time in which it waited for others, or had no core.

use events::Work;
use fabric::{CoreWait, Endpoint};

use crate::exec::Executor;

/// Counts from step to step. All in nanoseconds since the rank began.
#[derive(Debug, Default)]
pub struct OwnWork {
    core_wait: CoreWait,
    /// At the beginning of the step: waited in exchanges; of that, for a core; waited for a core in all.
    before: [u64; 3],
}

impl OwnWork {
    fn now(&mut self, endpoint: &Endpoint) -> [u64; 3] {
        [endpoint.waited_ns(), endpoint.core_wait_ns(), self.core_wait.ns()]
    }

    /// A step begins.
    pub fn begin(&mut self, endpoint: &Endpoint) {
        self.before = self.now(endpoint);
    }

    /// It took `step_s` seconds. None where the rank is alone: only who is not can hold others up.
    pub fn end(&mut self, executor: &Executor, step: u64, step_s: f64) -> Option<Work> {
        let place = &executor.place;
        let ranks = executor.run.layout.world();
        if ranks == 1 {
            return None;
        }
        let (now, before) = (self.now(&executor.comm.endpoint), self.before);
        let [waited_s, core_in_wait_s, core_s] = [0, 1, 2].map(|i| 1e-9 * now[i].saturating_sub(before[i]) as f64);
        let parts = [place.at.pp, place.data_cells.len(), place.contexts.len(), place.cells.len()];
        let alike = parts.into_iter().fold(0, |sum, part| sum << 16 | part as u64);
        let core_wait_s = (core_s - core_in_wait_s).max(0.0);
        Some(Work { rank: place.rank, ranks, alike, step, own_s: step_s - waited_s, core_wait_s, step_s })
    }
}

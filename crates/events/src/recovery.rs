//! Trouble and what was done about it.

use serde::{Deserialize, Serialize};

/// Something that a run does not do by itself was noticed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Trouble {
    /// Counts the run's troubles from 1; [`crate::Event::Decided`] and [`Anatomy`] refer to it.
    pub id: u64,
    /// What it is, a word of the policy: exit, silence, no progress, corrupt, not finite, ...
    #[serde(rename = "what")]
    pub kind: String,
    /// The rank that it points to, in the layout of the moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// That rank's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The last committed step when it was noticed.
    pub step: u64,
    /// A sentence: what was seen.
    pub detail: String,
    /// Milliseconds since the deliberate fault behind it struck; none where there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_fault_ms: Option<f64>,
}

/// A world was formed: ranks got their places.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct World {
    /// Ascends with every world of a run.
    pub generation: u64,
    /// How many ranks it has.
    pub ranks: usize,
    /// The layout, as a line for the person.
    pub layout: String,
    /// Where the state comes from: fresh, disk, peers.
    pub origin: String,
}

/// What one recovery took, from the fault to the moment from which the run is where it had been.
///
/// Moments are seconds since the run began, each at or after the one before it; none: it is not known, or did not happen.
/// [`Anatomy::phases`] makes durations of them that sum to the whole.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Anatomy {
    /// The trouble that it answers.
    pub id: u64,
    /// Why: what was wrong, and with whom.
    pub cause: String,
    /// What was done: the policy's action.
    pub remedy: String,
    /// The fault struck. Known only of deliberate faults and of what says so itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<f64>,
    /// Where no fault is known: all was well then, as far as it showed (the rank's last words, or the last step).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_sign: Option<f64>,
    /// Somebody noticed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detected: Option<f64>,
    /// The policy had answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<f64>,
    /// Every rank that is left had said what it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aborted: Option<f64>,
    /// Every rank of the new world had its place (a process, a layout).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<f64>,
    /// All links of the new world were up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<f64>,
    /// Every rank had its state, verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loaded: Option<f64>,
    /// The first step of the new world was committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_step: Option<f64>,
    /// The last step that had been committed before was committed again; the same moment as `first_step` where none was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caught_up: Option<f64>,
    /// Bytes of state that came from peers or disk.
    pub bytes_moved: u64,
    /// Committed steps that were computed again.
    pub steps_redone: u64,
    /// The first step that the new world computed.
    pub resumed_at: u64,
    /// The last step committed before the fault.
    pub last_committed: u64,
}

impl Anatomy {
    /// The moments in order, with their names.
    pub fn moments(&self) -> [(&'static str, Option<f64>); 9] {
        let first = if self.fault.is_some() { ("fault", self.fault) } else { ("last sign", self.last_sign) };
        [
            first,
            ("detected", self.detected),
            ("decided", self.decided),
            ("aborted", self.aborted),
            ("placed", self.placed),
            ("connected", self.connected),
            ("loaded", self.loaded),
            ("first step", self.first_step),
            ("caught up", self.caught_up),
        ]
    }

    /// (what ended, seconds that it took since the moment known before it, never negative); the seconds sum to the last known moment
    /// less the first.
    pub fn phases(&self) -> Vec<(&'static str, f64)> {
        let mut known: Vec<_> = self.moments().into_iter().filter_map(|(name, at)| at.map(|at| (name, at))).collect();
        // Logs of before have moments of an attempt that another trouble ended: such a part took nothing.
        for i in 1..known.len() {
            known[i].1 = known[i].1.max(known[i - 1].1);
        }
        known.windows(2).map(|pair| (pair[1].0, pair[1].1 - pair[0].1)).collect()
    }

    /// Seconds from the first known moment to the first committed step; none where the run did not get there.
    pub fn seconds(&self) -> Option<f64> {
        let first = self.moments().into_iter().find_map(|(_, at)| at)?;
        Some(self.first_step? - first)
    }
}

/// The run's numbers were changed on purpose: part of the run's definition, also a line of `interventions.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Intervention {
    /// The step from which it holds, whoever computes that step.
    pub step: u64,
    /// `skip`: batches are left out; `reload`: values of the recipe are others.
    pub action: String,
    /// What changes, for the person.
    pub detail: String,
    /// Who asked: a rule of the policy, or a person.
    pub by: String,
    /// What a run file has to say to be changed in the same way, as `key=value`: the list of `train.skip` or `train.changes` with
    /// this change alone. None: an older version wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
}

/// What a rank did in a step, for who compares ranks; not part of the log.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// The rank.
    pub rank: usize,
    /// Ranks of its world.
    pub ranks: usize,
    /// Ranks with the same number do equal work.
    pub alike: u64,
    /// The step.
    pub step: u64,
    /// Seconds of the step in which it did not wait for others.
    pub own_s: f64,
    /// Seconds of that in which it could have run and had no core: the machine was busy with others.
    #[serde(default)]
    pub core_wait_s: f64,
    /// Seconds of the whole step.
    pub step_s: f64,
}

/// A rank holds the others up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Straggler {
    /// The rank, in the layout of the moment.
    pub rank: usize,
    /// The last step that was looked at.
    pub step: u64,
    /// Its own work over that of its peers, median: 2 is twice as slow.
    pub slowdown: f64,
    /// The share of a step that it costs the run, 0 to 1.
    pub share: f64,
    /// A sentence with the figures.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_of_an_attempt_before_makes_no_negative_part() {
        let (fault, loaded, first_step, caught_up) = (Some(1.0), Some(9.0), Some(3.25), Some(10.0));
        let anatomy = Anatomy { fault, loaded, first_step, caught_up, ..Anatomy::default() };
        assert_eq!(anatomy.phases(), [("loaded", 8.0), ("first step", 0.0), ("caught up", 1.0)]);
    }

    #[test]
    fn phases_sum_to_the_gap() {
        let anatomy = Anatomy {
            fault: Some(1.0),
            detected: Some(1.5),
            aborted: Some(2.0),
            first_step: Some(4.25),
            ..Anatomy::default()
        };
        let phases = anatomy.phases();
        assert_eq!(phases, [("detected", 0.5), ("aborted", 0.5), ("first step", 2.25)]);
        assert_eq!(phases.iter().map(|(_, s)| s).sum::<f64>(), anatomy.seconds().unwrap());
    }
}

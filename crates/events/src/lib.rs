//! The typed event log: every part writes it, every reader reads it.
//!
//! One JSON object per line, tagged by `kind`, with a schema version. Times are seconds.

mod profile;
mod recovery;
pub mod regular;
mod restore;
pub mod wall;

use serde::{Deserialize, Serialize};

pub use profile::{Profile, ProfileRow};
pub use recovery::{Anatomy, Intervention, Straggler, Trouble, Work, World};
pub use restore::restore;

/// Version of the objects below; raised when a reader would have to change.
pub const SCHEMA: u32 = 1;

/// Something that happened in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// A line for the person: a fallback, a warning.
    Notice {
        /// The sentence.
        text: String,
    },
    /// A rank runs.
    RankStarted {
        /// The rank.
        rank: usize,
        /// Its process.
        pid: u32,
    },
    /// A step was committed.
    Step(Step),
    /// Loss on held-out sequences.
    Validation {
        /// The last committed step.
        step: u64,
        /// The held-out set; none: the one that decides what is best.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        set: Option<String>,
        /// Nats per token.
        loss: f64,
        /// Bits per byte of text; none where the data do not tell the bytes behind their tokens.
        bits_per_byte: Option<f64>,
        /// Tokens with a target.
        tokens: u64,
        /// No earlier one was better.
        best: bool,
        /// Its checkpoint is written, and stays while none is better (`checkpoint.best`).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        kept: bool,
    },
    /// Text that the model wrote.
    Sample {
        /// The last committed step.
        step: u64,
        /// The prompt and what followed.
        text: String,
    },
    /// A checkpoint exists: its manifest is written.
    Checkpoint {
        /// The last committed step in it.
        step: u64,
        /// Its folder.
        path: String,
        /// Bytes of state.
        bytes: u64,
        /// Time that the ranks waited.
        seconds: f64,
        /// Time from the copy to the manifest, if it was written in the background.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        written_s: Option<f64>,
    },
    /// A checkpoint could not be written; the run goes on and tries again.
    CheckpointFailed {
        /// The step.
        step: u64,
        /// Why.
        reason: String,
        /// The step after which it is tried again.
        retry_at: u64,
    },
    /// A hash per tensor (`--digest-every`).
    TensorHashes {
        /// The last committed step.
        step: u64,
        /// (name/state, hex), in canonical order.
        hashes: Vec<(String, String)>,
    },
    /// The digest of the state.
    Digest {
        /// The last committed step.
        step: u64,
        /// 64 hex digits.
        digest: String,
        /// Version of the numerics that made it.
        numerics_version: u32,
    },
    /// A rank has written down when each of its instructions ran (`--profile`).
    SpansRecorded {
        /// The rank.
        rank: usize,
        /// Its file.
        path: String,
        /// Steps in it.
        steps: u64,
    },
    /// Where the time of a step goes (`--profile`).
    Profile(Profile),
    /// A rank ended its list.
    RankFinished(RankReport),
    /// A rank could not go on.
    Failed {
        /// The rank.
        rank: usize,
        /// Exit code that fits: 4 diverged, 6 not saved, 7 something that the run was given cannot be used, 70 internal.
        code: i32,
        /// Why.
        reason: String,
    },
    /// A deliberate fault is about to strike (`--inject`); its rank says so before it does.
    FaultFired {
        /// The rank, in the layout of the moment.
        rank: usize,
        /// The step that would be committed next.
        step: u64,
        /// What happens.
        fault: String,
    },
    /// Something is wrong.
    Trouble(Trouble),
    /// The policy's answer.
    Decided {
        /// The trouble that it answers; 0: none, an operator asked.
        id: u64,
        /// What is done.
        action: String,
        /// Why this.
        reason: String,
    },
    /// Ranks got their places.
    World(World),
    /// A recovery is complete: the run is where it had been.
    Recovery(Box<Anatomy>),
    /// A step was computed again before anything was committed.
    Replayed {
        /// The step.
        step: u64,
        /// Why.
        reason: String,
    },
    /// A spare has computed the gradients of a step again, from the checkpoint before it, and they are what the ranks had.
    Checked {
        /// The step.
        step: u64,
        /// Leaves: gradients of a cell, over all that one rank has of it.
        leaves: u64,
        /// The spare's process, as the controller numbers it.
        process: u64,
        /// Seconds that it took, beside the ranks' work.
        seconds: f64,
    },
    /// The wall clock of a process jumped: it has moved otherwise than the clock that does not. Nothing waits or measures by it.
    ClockJumped {
        /// The rank; none: the process that leads the run.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<usize>,
        /// By so many seconds.
        seconds: f64,
    },
    /// The run's numbers were changed on purpose.
    Intervention(Intervention),
    /// A rank holds the others up.
    Straggler(Straggler),
    /// What a rank did in a step.
    Work(Work),
}

/// How evenly the rows of a step went to the experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// Rows of the fullest expert over the mean, of the worst layer.
    pub max_over_mean: f64,
    /// (max - mean) / mean, mean over the layers (MaxVio of arXiv 2408.15664).
    pub max_vio: f64,
    /// Copies of a row that travel to ranks with its experts, mean; 0 where every rank has all experts.
    pub copies_per_token: f64,
    /// Auxiliary loss without its coefficient; it is not part of the step's loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aux_loss: Option<f64>,
}

/// One committed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counts from 1.
    pub step: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Nats per token, over the step's tokens with a target; of no meaning where there is none.
    pub loss: f64,
    /// Tokens with a target; none: a log of before it was counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub targets: Option<u64>,
    /// Global norm of the gradient of the mean loss, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens of the step.
    pub tokens: u64,
    /// Duration of the step.
    pub seconds: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Tokens per second and rank.
    pub tokens_per_s_rank: f64,
    /// Model FLOPs over the measured peak of the same cores, 0 to 1.
    pub mfu: f64,
    /// Only with experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertLoad>,
}

/// What a rank did, counted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Largest resident memory of its process, in bytes.
    pub peak_bytes: u64,
    /// Resident memory of its process before the rank had any state, in bytes.
    #[serde(default)]
    pub base_bytes: u64,
    /// Memory that the program of the rank was planned to take beyond it; 0 where ranks share a process.
    #[serde(default)]
    pub planned_bytes: u64,
    /// Worlds that its process was in, one for each recovery or reload that it lived through and one: the plan is the
    /// largest of theirs, and what moving state from one to the next took is not in it.
    #[serde(default)]
    pub worlds: u64,
    /// Instructions executed.
    pub instructions: u64,
    /// Units (microbatches of data cells) taken backward.
    pub units: u64,
    /// Gradients (each of one bucket of one leaf) that it computed to check another rank's.
    #[serde(default)]
    pub leaves_checked: u64,
    /// Most bytes kept for backward at once, between two instructions of a training step.
    #[serde(default)]
    pub peak_kept: u64,
    /// Bytes of parameters, moments and summed gradients that stay over a step.
    #[serde(default)]
    pub state_bytes: u64,
    /// Most bytes at once of parameters that are gathered for their use, summed over the chunks.
    #[serde(default)]
    pub gathered_bytes: u64,
    /// Most bytes at once of gradients before their sums over ranks, summed over the chunks.
    #[serde(default)]
    pub leaves_bytes: u64,
    /// Bytes of buffers for the values of a step, in use or spare.
    #[serde(default)]
    pub buffers_bytes: u64,
    /// (axis and operation, calls, bytes sent), groups of one left out.
    pub traffic: Vec<(String, u64, u64)>,
    /// (class, seconds): where the rank's time went.
    pub time: Vec<(String, f64)>,
}

impl Event {
    /// The event as one JSON line, with the schema version and the seconds since the run began.
    pub fn to_line(&self, seconds: f64) -> String {
        let mut value = serde_json::to_value(self).expect("events are plain data");
        let object = value.as_object_mut().expect("events are objects");
        object.insert("schema".into(), SCHEMA.into());
        object.insert("t".into(), ((seconds * 1e6).round() / 1e6).into());
        value.to_string()
    }

    /// Reads what [`Event::to_line`] wrote.
    ///
    /// # Errors
    /// If the line is no event of this schema.
    pub fn from_line(line: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(line)
    }

    /// Reads what [`Event::to_line`] wrote: (seconds since the run began, event).
    ///
    /// # Errors
    /// If the line is no event of this schema, or has no time.
    pub fn timed(line: &str) -> Result<(f64, Self), serde_json::Error> {
        #[derive(Deserialize)]
        struct Timed {
            t: f64,
            #[serde(flatten)]
            event: Event,
        }
        serde_json::from_str::<Timed>(line).map(|timed| (timed.t, timed.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_back() {
        let event = Event::Notice { text: "a \"quoted\" word\nand a line".into() };
        let line = event.to_line(1.5);
        assert!(!line.contains('\n') && line.contains("\"schema\":1"));
        assert_eq!(Event::from_line(&line).unwrap(), event);
        assert_eq!(Event::timed(&line).unwrap(), (1.5, event));
    }

    #[test]
    fn a_trouble_keeps_its_kind() {
        let event = Event::Trouble(Trouble { id: 1, kind: "exit".into(), rank: Some(2), ..Trouble::default() });
        assert_eq!(Event::from_line(&event.to_line(0.0)).unwrap(), event);
    }
}

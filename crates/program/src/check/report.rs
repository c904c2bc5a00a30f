//! What the checker found out about lists that are sound.

use spec::{Layout, Unit};

use crate::instr::{Axis, Pass, Value};
use crate::placement::{STATES, State};

/// The axes in the order of the counts of a [`RankReport`].
pub const AXES: [Axis; 11] = [
    Axis::Tp,
    Axis::Cp,
    Axis::Pp,
    Axis::Dp,
    Axis::Shard,
    Axis::Replica,
    Axis::ExpertDp,
    Axis::ExpertShard,
    Axis::ExpertReplica,
    Axis::World,
    Axis::Ep,
];

/// Unit costs: a layer forward takes this many ticks, half in attention, half in the
/// feed-forward; so does each part of backward. Everything else is free.
pub const TICKS_PER_LAYER: u64 = 2;

/// A stretch of uninterrupted work on one chunk and unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The direction.
    pub pass: Pass,
    /// The chunk.
    pub chunk: usize,
    /// The unit.
    pub unit: Option<Unit>,
    /// First tick.
    pub start: u64,
    /// First tick after it.
    pub end: u64,
}

/// One rank's share of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Length of its list.
    pub instructions: usize,
    /// Collectives and sends per axis, as in [`AXES`].
    pub exchanges: [u64; AXES.len()],
    /// Bytes sent per axis, as in [`AXES`].
    pub bytes: [u64; AXES.len()],
    /// Bytes sent of each state, as in [`STATES`].
    pub moved: [u64; 4],
    /// Ticks of work.
    pub busy: u64,
    /// Most activations alive at once, in layers x microbatches.
    pub peak_activations: usize,
    /// Most bytes kept for backward at once, between two instructions.
    pub peak_kept: u64,
    /// Its work, ascending.
    pub spans: Vec<Span>,
}

impl RankReport {
    /// Bytes sent of a state.
    pub fn sent(&self, state: State) -> u64 {
        STATES.iter().position(|s| *s == state).map_or(0, |i| self.moved[i])
    }

    /// Counts `bytes` of `value` as sent.
    pub(super) fn moves(&mut self, value: Value, bytes: u64) {
        if let Some(i) = STATES.iter().position(|s| value.state() == Some(*s)) {
            self.moved[i] += bytes;
        }
    }

    /// First tick of its pipeline work.
    pub fn start(&self) -> u64 {
        self.spans.first().map_or(0, |s| s.start)
    }

    /// First tick after its pipeline work.
    pub fn end(&self) -> u64 {
        self.spans.last().map_or(0, |s| s.end)
    }

    /// Idle share of the time between its first and its last pipeline work.
    pub fn idle(&self) -> f64 {
        let window = self.end() - self.start();
        if window == 0 { 0.0 } else { (window - self.busy) as f64 / window as f64 }
    }
}

/// A step under unit costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// By rank.
    pub ranks: Vec<RankReport>,
    /// Ticks from the first to the last pipeline work of any rank.
    pub ticks: u64,
    /// Idle share of all ranks, each over the time of its pipeline (one data position).
    pub bubble: f64,
    /// The largest peak of activations of a rank, in layers x microbatches.
    pub peak_activations: usize,
}

impl Report {
    pub(super) fn new(ranks: Vec<RankReport>, layout: &Layout) -> Self {
        let (mut idle, mut time) = (0, 0);
        for pipeline in ranks.chunks(layout.pp * layout.cp * layout.tp) {
            let start = pipeline.iter().map(RankReport::start).min().unwrap_or(0);
            let end = pipeline.iter().map(RankReport::end).max().unwrap_or(0);
            time += (end - start) * pipeline.len() as u64;
            idle += pipeline.iter().map(|r| end - start - r.busy).sum::<u64>();
        }
        Self {
            ticks: ranks.iter().map(RankReport::end).max().unwrap_or(0),
            bubble: if time == 0 { 0.0 } else { idle as f64 / time as f64 },
            peak_activations: ranks.iter().map(|r| r.peak_activations).max().unwrap_or(0),
            ranks,
        }
    }

    /// Bytes that all ranks send, per axis as in [`AXES`].
    pub fn bytes(&self) -> [u64; AXES.len()] {
        self.ranks.iter().fold([0; AXES.len()], |sum, r| std::array::from_fn(|i| sum[i] + r.bytes[i]))
    }
}

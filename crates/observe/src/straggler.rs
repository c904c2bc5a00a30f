//! Who holds the others up: from the own work of each rank, step by step. Pure.
//!
//! A rank's own work is the time in which it does not wait for others. Ranks that do the same work (of one pipeline stage) are
//! peers; in each step a rank's slowdown is its work over the median of its peers. It is named when its slowdown was high in
//! most of the last steps, and far beyond what the spread of its steps explains: noise moves from rank to rank, a slow host stays. What it costs is what the
//! slowest peer group would save at the median, as a share of the step.
//!
//! The thresholds: a tenth over the median is suspicious (Greyhound, ATC'25); jobs straggle from 1.1 on (SMon, OSDI'25).

use std::collections::{BTreeMap, VecDeque};

use events::Straggler;

/// Steps that are looked at together.
const WINDOW: usize = 10;
/// Of these so many must agree.
const AGREE: usize = 8;
/// A rank that works so much longer than its peers' median, in the median of the window, is slow.
const SLOW: f64 = 1.2;
/// In a single step so much counts as slow.
const SLOW_STEP: f64 = 1.08;
/// The median's excess is so many standard deviations of a median, by the spread of all ranks' steps.
const SIGMAS: f64 = 6.0;
/// Steps of a world that do not count: caches and allocators warm up.
const WARM_UP: u64 = 3;
/// Steps before a rank is named again.
const QUIET: u64 = 200;

/// Own work of the ranks in the last steps.
#[derive(Debug, Clone, Default)]
pub struct Detector {
    /// Peer group of each rank: ranks of one number do the same work.
    groups: Vec<usize>,
    /// Of each rank, the last slowdowns.
    slowdowns: Vec<VecDeque<f64>>,
    /// Of each rank, the last shares of a step that it cost.
    costs: Vec<VecDeque<f64>>,
    /// Of steps that are not complete yet, what came: own seconds and the step's seconds.
    open: BTreeMap<u64, Vec<Option<(f64, f64)>>>,
    seen: u64,
    named: BTreeMap<usize, u64>,
}

impl Detector {
    /// For a world in which rank r does the work of peer group `groups[r]`. A new world begins anew.
    pub fn new(groups: Vec<usize>) -> Self {
        let ranks = groups.len();
        Self { groups, slowdowns: vec![VecDeque::new(); ranks], costs: vec![VecDeque::new(); ranks], ..Self::default() }
    }

    /// Rank `rank` worked `own` seconds itself in `step`, which took `whole`. Says who is slow, when the last rank's word of a
    /// step has come.
    pub fn take(&mut self, step: u64, rank: usize, own: f64, whole: f64) -> Vec<Straggler> {
        let ranks = self.groups.len();
        if rank >= ranks || !own.is_finite() || own <= 0.0 {
            return Vec::new();
        }
        let words = self.open.entry(step).or_insert_with(|| vec![None; ranks]);
        words[rank] = Some((own, whole.max(own)));
        if words.iter().any(Option::is_none) {
            // A rank that left a gap leaves the step out.
            while self.open.len() > 2 * WINDOW {
                self.open.pop_first();
            }
            return Vec::new();
        }
        let words: Vec<(f64, f64)> = self.open.remove(&step).into_iter().flatten().flatten().collect();
        self.open = self.open.split_off(&step);
        self.seen += 1;
        if self.seen <= WARM_UP {
            return Vec::new();
        }
        self.complete(step, &words)
    }

    fn complete(&mut self, step: u64, words: &[(f64, f64)]) -> Vec<Straggler> {
        for (rank, &(own, whole)) in words.iter().enumerate() {
            let peers = (0..words.len()).filter(|&other| other != rank && self.groups[other] == self.groups[rank]);
            let mut of_peers: Vec<f64> = peers.map(|peer| words[peer].0).collect();
            // Without peers there is nothing to compare with.
            let usual = if of_peers.is_empty() { own } else { median(&mut of_peers) };
            push(&mut self.slowdowns[rank], own / usual);
            push(&mut self.costs[rank], ((own - usual) / whole).max(0.0));
        }
        if self.slowdowns[0].len() < WINDOW {
            return Vec::new();
        }
        let of = |values: &VecDeque<f64>| median(&mut values.iter().copied().collect::<Vec<_>>());
        let medians: Vec<f64> = self.slowdowns.iter().map(of).collect();
        let off = |(slow, median): (&VecDeque<f64>, &f64)| slow.iter().map(|s| (s - median).abs()).collect::<Vec<_>>();
        let mut off: Vec<f64> = self.slowdowns.iter().zip(&medians).flat_map(off).collect();
        // A median of n values deviates by 1.253 of their deviation over the root of n, which is 1.4826 of the median one.
        let deviation = 1.253 * 1.4826 * median(&mut off) / (WINDOW as f64).sqrt();
        let mut found = Vec::new();
        for (rank, &slowdown) in medians.iter().enumerate() {
            let agree = self.slowdowns[rank].iter().filter(|s| **s > SLOW_STEP).count();
            let clear = slowdown >= SLOW && slowdown - 1.0 >= SIGMAS * deviation;
            let due = self.named.get(&rank).is_none_or(|last| step >= last + QUIET);
            if agree < AGREE || !clear || !due {
                continue;
            }
            self.named.insert(rank, step);
            let own_ms = 1000.0 * words[rank].0;
            let detail = format!(
                "{own_ms:.0} ms of own work in this step; in {agree} of the last {WINDOW} it worked longer than its peers"
            );
            found.push(Straggler { rank, step, slowdown, share: of(&self.costs[rank]), detail });
        }
        found
    }
}

fn push(values: &mut VecDeque<f64>, value: f64) {
    values.push_back(value);
    if values.len() > WINDOW {
        values.pop_front();
    }
}

/// Of a non-empty list.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let mid = values.len() / 2;
    if values.len() % 2 == 1 { values[mid] } else { (values[mid - 1] + values[mid]) / 2.0 }
}

#[cfg(test)]
mod tests;

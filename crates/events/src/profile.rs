//! Where the time of a step goes.

use serde::{Deserialize, Serialize};

/// The time of profiled steps, by what it was spent on. All times are means per step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// The first profiled step.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// How many were profiled.
    pub steps: u64,
    /// Threads of a rank.
    pub threads: usize,
    /// Measured peak of one rank's cores, GFLOP/s.
    pub peak_gflops: f64,
    /// Measured memory bandwidth of one rank's cores while all ranks stream, GB/s.
    pub bandwidth_gb_s: f64,
    /// Wall time of a step, by rank.
    pub step_s: Vec<f64>,
    /// What it was spent on; over all rows, a rank's seconds add up to its wall time.
    pub rows: Vec<ProfileRow>,
}

/// One line of a [`Profile`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileRow {
    /// The kind of work: forward, backward, exchange, waiting, ...
    pub group: String,
    /// What it is.
    pub name: String,
    /// Seconds that it holds a rank up, by rank.
    pub rank_s: Vec<f64>,
    /// Seconds in which it ran beside other work, by rank: not part of the sum.
    pub hidden_s: Vec<f64>,
    /// Instructions of all ranks.
    pub calls: f64,
    /// Model FLOPs of all ranks.
    pub flops: f64,
    /// Bytes of all ranks: touched in memory, or sent in an exchange.
    pub bytes: f64,
    /// FLOPs over time x peak, 0 to 1; for products.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_peak: Option<f64>,
    /// Bytes over time x bandwidth; for what streams memory. Above 1 where a cache serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_bandwidth: Option<f64>,
}

impl Profile {
    /// Mean seconds of a step over the ranks.
    pub fn step_mean_s(&self) -> f64 {
        mean(&self.step_s)
    }
}

impl ProfileRow {
    /// Mean seconds over the ranks.
    pub fn mean_s(&self) -> f64 {
        mean(&self.rank_s)
    }

    /// Mean hidden seconds over the ranks.
    pub fn hidden_mean_s(&self) -> f64 {
        mean(&self.hidden_s)
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

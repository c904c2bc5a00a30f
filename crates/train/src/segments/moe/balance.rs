//! Keeping the experts busy alike: the auxiliary loss of a unit, and balancing biases.

use program::Bucket;
use spec::moe::AuxScope;
use spec::tensors::{Home, Role};
use spec::{Grid, Moe, Unit};

use crate::buffers::{Memory, POOLED};
use crate::error::TrainError;
use crate::segments::Env;
use crate::state::ChunkState;

/// What the auxiliary loss of one unit and layer is made of: `factor x sum_e fractions_e x (sum of scores of e)`.
pub(super) struct Balance {
    /// f_e.
    fractions: Vec<f64>,
    /// Experts / rows of the scope x tokens of the unit that have a target: its weight in the step.
    factor: f64,
}

impl Balance {
    pub fn of(
        env: &Env,
        moe: &Moe,
        memory: &Memory,
        chunk: usize,
        unit: Unit,
        layer: usize,
    ) -> Result<Self, TrainError> {
        let saved = &memory.saved[&(chunk, unit)];
        let (scope, layers, per_row) = match moe.aux_scope {
            AuxScope::Layer => (layer, 1, moe.per_token),
            AuxScope::Pooled => (POOLED, env.model.layers, 1),
        };
        let missing = || TrainError::Internal(format!("no router counts of layer {layer}"));
        let counts = saved.counts.get(&scope).ok_or_else(missing)?;
        // Every row of the scope was counted once for each of its experts.
        let rows = counts.iter().map(|count| f64::from(*count)).sum::<f64>() / moe.per_token as f64;
        debug_assert!(rows >= (layers * env.rows_local()) as f64);
        let fraction = |count: &f32| f64::from(*count) / (rows * per_row as f64);
        let factor = moe.experts as f64 / rows * saved.targets;
        Ok(Self { fractions: counts.iter().map(fraction).collect(), factor })
    }

    /// The share of rows whose scores sum to `sums`, by expert.
    pub fn value(&self, sums: &[f64]) -> f64 {
        self.fractions.iter().zip(sums).map(|(f, sum)| f * sum).sum::<f64>() * self.factor
    }

    /// Gradient of the loss with respect to the scores of every row, by expert; f_e carries none.
    pub fn gradient(&self, coefficient: f64) -> Vec<f32> {
        self.fractions.iter().map(|f| (f * coefficient * self.factor) as f32).collect()
    }
}

/// What a router did with one sequence on one sequence slice.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Group of data cells and microbatch: what an auxiliary loss is taken over.
    pub unit: (usize, usize),
    /// The layer.
    pub layer: usize,
    /// The sequence, in the batch.
    pub sequence: usize,
    /// The context cell and tensor cell of the slice.
    pub slice: (usize, usize),
    /// Rows of the slice.
    pub rows: usize,
    /// Of these, rows of each expert.
    pub counts: Vec<u64>,
    /// Sums of their scores, by expert.
    pub scores: Vec<f64>,
}

/// What the router of `layer` did with the hosted rows of `unit`, before they are forgotten.
pub fn routing(env: &Env, grid: &Grid, memory: &mut Memory, chunk: usize, unit: Unit, layer: usize) -> Vec<Routing> {
    let (Some(moe), Some(routed)) = (&env.model.moe, &memory.layer(chunk, unit, layer).routed) else {
        return Vec::new();
    };
    let shape = super::shape(moe);
    let mut all = Vec::new();
    for (lane, (cell, context)) in env.lanes.iter().enumerate() {
        let first = grid.sequences(Unit { cell, ..unit }).start;
        for i in 0..env.place.num_cells() {
            for (number, rows) in env.place.cell_rows(lane, i).into_iter().enumerate() {
                let mut counts = vec![0; moe.experts];
                let chosen = &routed.chosen[rows.start * moe.per_token..rows.end * moe.per_token];
                chosen.iter().for_each(|e| counts[*e as usize] += 1);
                all.push(Routing {
                    unit: (cell / grid.ep, unit.mb),
                    layer,
                    sequence: first + number,
                    slice: (context, env.place.cells.start + i),
                    rows: rows.len(),
                    counts,
                    scores: kernels::score_sums(&shape, &routed.scores, &[rows]),
                });
            }
        }
    }
    all
}

/// Balancing biases move by `rate` towards the mean load: up where an expert had fewer tokens, down where it had more.
pub fn move_biases(chunk: &mut ChunkState, loads: &[Vec<u64>], rate: f64) {
    let biases: Vec<_> = chunk.held.iter().filter(|held| held.tensor.role == Role::RouterBias).cloned().collect();
    let Some(bucket) = chunk.find(Bucket::Norms) else { return };
    let owned = chunk.buckets[bucket].owned.clone();
    let (params, kept) = chunk.kept_mut(bucket);
    for held in biases {
        let Home::Layer(layer) = held.tensor.home else { continue };
        let Some(counts) = loads.get(layer) else { continue };
        let total: u64 = counts.iter().sum();
        for (e, count) in counts.iter().enumerate() {
            let at = held.at.start + e;
            // Integers: mean - count has the sign of total - experts x count.
            let step = match (count * counts.len() as u64).cmp(&total) {
                std::cmp::Ordering::Less => rate as f32,
                std::cmp::Ordering::Equal => continue,
                std::cmp::Ordering::Greater => -(rate as f32),
            };
            if owned.contains(&at) {
                params[at - kept.start] += step;
            }
        }
    }
}

//! The model's math, segment by segment: reads registers and parameters, writes registers,
//! saved activations and gradient accumulators. No communication here.
//!
//! Row-parallel products (output and down projections, input gradients of column-parallel
//! ones) are leaves of the sum over tensor cells: one product per hosted cell, pushed onto
//! the tree. Everything else is free of the cells: hosted cells stand side by side.
//! Weight gradients go lane by lane, each into its own accumulator.

mod attention;
mod embed;
mod head;
mod mlp;
mod moe;
mod norm;
mod products;

use std::ops::Range;

pub use head::keep_input;
use kernels::{Ctx, RopeTable};
pub use moe::{Routing, add_shared, add_shared_backward, dispatch, move_biases, routing};
use program::instr::{Mode, Pass, Segment};
use spec::tensors::Role;
use spec::{Lanes, Model, Unit};

use self::products::{add_weight_grad, linear, linears};
use crate::buffers::Memory;
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::place::Place;
use crate::state::ChunkState;

/// What every segment reads.
pub struct Env<'a> {
    /// How to compute.
    pub ctx: &'a Ctx,
    /// The model's shape.
    pub model: &'a Model,
    /// What this rank hosts.
    pub place: &'a Place,
    /// Its lanes of the unit.
    pub lanes: Lanes,
    /// The ranks that share the experts of the unit.
    pub group: dispatch::GroupRanks,
    /// Rotary angles.
    pub rope: &'a RopeTable,
    /// Whether gradients are wanted.
    pub mode: Mode,
    /// A deliberate fault.
    pub mutant: Option<Mutant>,
}

impl<'a> Env<'a> {
    /// What the segments of `unit` read on the rank at `place`.
    pub fn new(
        ctx: &'a Ctx,
        model: &'a Model,
        place: &'a Place,
        unit: Unit,
        rope: &'a RopeTable,
        mode: Mode,
        mutant: Option<Mutant>,
    ) -> Self {
        Self { ctx, model, place, lanes: place.lanes(unit), group: place.group, rope, mode, mutant }
    }
}

impl Env<'_> {
    /// Rows of the unit.
    pub fn rows(&self) -> usize {
        self.lanes.len() * self.place.rows_lane()
    }

    /// Rows of the unit in the hosted sequence slices.
    pub fn rows_local(&self) -> usize {
        self.lanes.len() * self.place.rows_lane_local()
    }

    /// Normed rows are computed again for the backward: all of them are here, and their norm costs less than their memory.
    fn norms_again(&self) -> bool {
        self.place.rows_lane_local() == self.place.rows_lane()
    }

    /// The rows of lane number `lane`.
    fn lane_rows(&self, lane: usize) -> Range<usize> {
        let rows = self.place.rows_lane();
        lane * rows..(lane + 1) * rows
    }

    /// Every pair of a lane and a hosted tensor cell.
    fn lane_cells(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let cells = self.place.num_cells();
        (0..self.lanes.len()).flat_map(move |lane| (0..cells).map(move |i| (lane, i)))
    }
}

/// What a backward does at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Weight gradients and input gradients.
    Whole,
    /// Input gradients; it keeps what the weight gradients need.
    Input,
}

/// Runs one segment of `unit` on `chunk`.
///
/// # Errors
/// If a register that the segment reads is empty: a program that the checker should have refused.
pub fn run(
    env: &Env,
    chunk: &mut ChunkState,
    memory: &mut Memory,
    unit: Unit,
    pass: Pass,
    segment: Segment,
) -> Result<(), TrainError> {
    use Pass::{Backward, BackwardInput, BackwardWeight, Forward, Recompute, RecomputeKept};
    match (pass, segment) {
        (Forward, Segment::Embed) => embed::forward(env, chunk, memory, unit),
        (Backward, Segment::Embed) => embed::backward(env, chunk, memory, unit),
        (Forward, Segment::AttnNorm(layer)) => norm::attn_forward(env, chunk, memory, unit, layer),
        (Backward, Segment::AttnNorm(layer)) => norm::attn_backward(env, chunk, memory, unit, layer),
        (Forward | Recompute, Segment::Qkv(layer)) => attention::qkv_forward(env, chunk, memory, unit, layer),
        (Backward, Segment::Qkv(layer)) => attention::qkv_backward(env, chunk, memory, unit, layer, Part::Whole),
        (BackwardInput, Segment::Qkv(layer)) => attention::qkv_backward(env, chunk, memory, unit, layer, Part::Input),
        (BackwardWeight, Segment::Qkv(layer)) => attention::qkv_backward_weight(env, chunk, memory, unit, layer),
        (Recompute, Segment::AttnNorm(layer)) => norm::attn_again(env, chunk, memory, unit, layer),
        (Forward | Recompute | RecomputeKept, Segment::Attn(layer)) => {
            attention::forward(env, chunk, memory, unit, layer, pass)
        }
        (Backward, Segment::Attn(layer)) => attention::backward(env, chunk, memory, unit, layer, Part::Whole),
        (BackwardInput, Segment::Attn(layer)) => attention::backward(env, chunk, memory, unit, layer, Part::Input),
        (BackwardWeight, Segment::Attn(layer)) => attention::backward_weight(env, chunk, memory, unit, layer),
        (Forward | Recompute, Segment::MlpNorm(layer)) => norm::mlp_forward(env, chunk, memory, unit, layer),
        (Backward, Segment::MlpNorm(layer)) => norm::mlp_backward(env, chunk, memory, unit, layer),
        (Forward | RecomputeKept, Segment::Mlp(layer)) => mlp::forward(env, chunk, memory, unit, layer, pass),
        (Backward, Segment::Mlp(layer)) => mlp::backward(env, chunk, memory, unit, layer, Part::Whole),
        (BackwardInput, Segment::Mlp(layer)) => mlp::backward(env, chunk, memory, unit, layer, Part::Input),
        (BackwardWeight, Segment::Mlp(layer)) => mlp::backward_weight(env, chunk, memory, unit, layer),
        (BackwardWeight, Segment::Down(layer)) => mlp::down_weight(env, chunk, memory, unit, layer),
        (Forward, Segment::Route(layer)) => moe::route(env, chunk, memory, unit, layer),
        (Backward, Segment::Route(layer)) => moe::route_backward(env, chunk, memory, unit, layer),
        (Recompute, Segment::Route(layer)) => moe::route_again(memory, unit, chunk.chunk, layer),
        (Forward, Segment::Experts(layer)) => moe::forward(env, chunk, memory, unit, layer),
        (RecomputeKept, Segment::Experts(layer)) => moe::forward_again(env, chunk, memory, unit, layer),
        (Backward, Segment::Experts(layer)) => moe::backward(env, chunk, memory, unit, layer),
        (Forward, Segment::Residual(layer)) => norm::residual(env, memory, unit, chunk.chunk, layer),
        (Forward, Segment::HeadNorm) => norm::head_forward(env, chunk, memory, unit),
        (Backward, Segment::HeadNorm) => norm::head_backward(env, chunk, memory, unit),
        (Forward, Segment::Logits(block)) => head::logits(env, chunk, memory, unit, block),
        (Forward, Segment::Loss(block)) => head::loss(env, chunk, memory, unit, block),
        (Forward | Backward, Segment::Down(_))
        | (Backward, Segment::Residual(_) | Segment::Logits(_) | Segment::Loss(_))
        | (BackwardInput | BackwardWeight | Recompute | RecomputeKept, _) => {
            Err(TrainError::Internal(format!("there is no {pass:?} of {segment:?}")))
        }
    }
}

/// The value of a register, or the error that names it.
pub(crate) fn need<T>(register: &mut Option<T>, what: &str) -> Result<T, TrainError> {
    register.take().ok_or_else(|| TrainError::Internal(format!("the register `{what}` is read before it is written")))
}

/// The gradient of the residual stream over all rows: gathered, or (group of one) the local one.
fn grad_rows(memory: &mut Memory) -> Result<GradRows, TrainError> {
    match memory.regs.grad_rows.take() {
        Some(rows) => Ok(GradRows { rows, gathered: true }),
        None => Ok(GradRows { rows: need(&mut memory.regs.grad, "grad")?, gathered: false }),
    }
}

/// See [`grad_rows`]; `release` puts it back where it belongs.
struct GradRows {
    rows: Vec<f32>,
    gathered: bool,
}

impl GradRows {
    /// The rows for later; the local gradient is about to be added to, so it leaves a copy.
    fn keep(self, memory: &mut Memory) -> Vec<f32> {
        if self.gathered {
            return self.rows;
        }
        let mut kept = memory.pool.take(self.rows.len());
        kept.copy_from_slice(&self.rows);
        self.release(memory);
        kept
    }

    fn release(self, memory: &mut Memory) {
        if self.gathered {
            memory.pool.give(self.rows);
        } else {
            memory.regs.grad = Some(self.rows);
        }
    }
}

/// Where each (layer, role) stands in a vector of all norms of a chunk.
pub type NormPlaces = Vec<((usize, Role), Range<usize>)>;

/// The places of the norm tensors (and routers) of a chunk, and the length of the vector of all of them.
pub fn norm_layout(chunk: &ChunkState) -> (NormPlaces, usize) {
    let mut at = 0;
    let mut all = Vec::new();
    for held in chunk.held.iter().filter(|h| h.tensor.role.is_norm_like()) {
        let layer = match held.tensor.home {
            spec::tensors::Home::Layer(layer) => layer,
            _ => 0,
        };
        all.push(((layer, held.tensor.role), at..at + held.at.len()));
        at += held.at.len();
    }
    (all, at)
}

/// Stores the norm gradient of a lane and hosted tensor cell into its place in the cell's leaf vector.
fn store_norm_leaf(
    env: &Env,
    chunk: &ChunkState,
    memory: &mut Memory,
    (lane, i): (usize, usize),
    norm: (usize, Role),
    fill: impl FnOnce(&mut [f32]),
) {
    let (places, len) = norm_layout(chunk);
    let at = places.into_iter().find(|(key, _)| *key == norm).expect("a chunk lays out its norms").1;
    let (lanes, cells) = (env.lanes.len(), env.place.num_cells());
    let leaves = &mut memory.regs.norm_leaves;
    if leaves.len() != cells {
        leaves.clear();
        leaves.resize_with(cells, Vec::new);
    }
    leaves[i].resize(lanes * len, 0.0);
    fill(&mut leaves[i][lane * len + at.start..lane * len + at.end]);
}

//! Buffers that live between instructions: a pool, the registers, and what backward keeps.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

use program::Value;
use program::shelf::Key;
use spec::{Leaf, Unit};

use crate::segments::dispatch::{Sent, Work};

/// Loose buffers that are kept.
const LOOSE_MAX: usize = 64;

/// Reuses buffers: training takes the same sizes at every step. A buffer whose size depends on the routers is *loose*: it has
/// room for more than it holds, and serves any size that fits.
#[derive(Debug, Default)]
pub struct Pool {
    free: HashMap<usize, Vec<Vec<f32>>>,
    loose: Vec<Vec<f32>>,
}

impl Pool {
    /// A buffer of `len` numbers of unknown value.
    pub fn take(&mut self, len: usize) -> Vec<f32> {
        self.free.get_mut(&len).and_then(Vec::pop).unwrap_or_else(|| vec![0.0; len])
    }

    /// A loose buffer of `len` numbers of unknown value: the smallest that has room; where none has, the largest makes way
    /// for a larger one.
    pub fn take_loose(&mut self, len: usize) -> Vec<f32> {
        if len == 0 {
            return Vec::new();
        }
        let by_room = |(_, buffer): &(usize, &Vec<f32>)| buffer.capacity();
        let fits = self.loose.iter().enumerate().filter(|(_, buffer)| buffer.capacity() > len).min_by_key(by_room);
        if let Some((at, _)) = fits {
            let mut buffer = self.loose.swap_remove(at);
            // Only what is missing is filled.
            buffer.resize(len, 0.0);
            return buffer;
        }
        if let Some((at, _)) = self.loose.iter().enumerate().max_by_key(by_room) {
            self.loose.swap_remove(at);
        }
        let mut buffer = vec![0.0; program::memory::loose_room(len)];
        buffer.truncate(len);
        buffer
    }

    /// True if a buffer is loose.
    pub fn is_loose(buffer: &Vec<f32>) -> bool {
        buffer.capacity() > buffer.len()
    }

    /// Bytes of what is spare.
    pub fn bytes(&self) -> u64 {
        let exact = self.free.iter().map(|(len, buffers)| 4 * (len * buffers.len()) as u64);
        exact.chain(self.loose.iter().map(|buffer| 4 * buffer.capacity() as u64)).sum()
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Vec<f32>) {
        if Self::is_loose(&buffer) {
            if self.loose.len() < LOOSE_MAX {
                self.loose.push(buffer);
            }
        } else if !buffer.is_empty() {
            self.free.entry(buffer.len()).or_default().push(buffer);
        }
    }
}

/// Tokens in rows: whole sequences of a data cell as they are read, or the lanes of a unit ([lane, sequence, position]).
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    /// Input ids.
    pub ids: Vec<u32>,
    /// Target ids, or [`data::IGNORE`].
    pub targets: Vec<u32>,
    /// Where each position's document begins in its sequence.
    pub doc_start: Vec<u32>,
    /// Rotary positions.
    pub positions: Vec<u32>,
    /// Bytes of text of each target; empty: ids below 256 are bytes.
    pub target_bytes: Vec<u32>,
}

impl Tokens {
    /// Whole sequences, one after another.
    pub fn of(sequences: impl Iterator<Item = data::Sequence>) -> Self {
        let mut out = Self::default();
        for sequence in sequences {
            out.ids.extend(sequence.tokens);
            out.targets.extend(sequence.targets);
            out.doc_start.extend(sequence.doc_start);
            out.positions.extend(sequence.positions);
            out.target_bytes.extend(sequence.target_bytes);
        }
        out
    }

    /// Appends the rows `rows` of `from`.
    pub fn extend(&mut self, from: &Self, rows: Range<usize>) {
        self.ids.extend(&from.ids[rows.clone()]);
        self.targets.extend(&from.targets[rows.clone()]);
        self.doc_start.extend(&from.doc_start[rows.clone()]);
        self.positions.extend(&from.positions[rows.clone()]);
        if !from.target_bytes.is_empty() {
            self.target_bytes.extend(&from.target_bytes[rows]);
        }
    }

    /// Bytes of text that the target of row `row` stands for.
    pub fn bytes(&self, row: usize) -> u64 {
        self.target_bytes.get(row).map_or_else(|| u64::from(self.targets[row] < 256), |&bytes| u64::from(bytes))
    }
}

/// Finished subtrees of a sum over the tensor cells.
pub type Partials = Vec<(Range<usize>, Vec<f32>)>;

/// The values in flight between the instructions of one unit on one chunk. A segment takes
/// what an instruction before it left here.
#[derive(Debug, Default)]
pub struct Registers {
    /// Residual stream (forward), local rows.
    pub x: Option<Vec<f32>>,
    /// Normed rows, local.
    pub normed: Option<Vec<f32>>,
    /// Normed rows, all of the unit.
    pub rows: Option<Vec<f32>>,
    /// Partial outputs, all rows.
    pub partials: Option<Partials>,
    /// Their sum, local rows.
    pub reduced: Option<Vec<f32>>,
    /// Gradient of the residual stream (backward), local rows.
    pub grad: Option<Vec<f32>>,
    /// The same, all rows; `None` in a group of one, where `grad` has them all.
    pub grad_rows: Option<Vec<f32>>,
    /// With context cells: keys and values of all of them, [2, data cell, sequence, position, width].
    pub keys: Option<Vec<f32>>,
    /// Gradients of the own queries (backward).
    pub d_q: Option<Vec<f32>>,
    /// Gradients of all keys and values, subtrees over the query cells.
    pub key_partials: Option<Partials>,
    /// Gradients of the own keys and values.
    pub d_keys: Option<[Vec<f32>; 2]>,
    /// Token counts of the chunk's routers over the tensor positions, on their way over the context positions.
    pub router_counts: Option<Vec<f32>>,
    /// Norm gradients per hosted tensor cell: by lane, the chunk's norms side by side.
    pub norm_leaves: Vec<Vec<f32>>,
    /// Logits of the block under way, one buffer per hosted cell.
    pub logits: Vec<Vec<f32>>,
    /// Softmax statistics of the block, by cell and then row; all cells after the gather.
    pub stats: Vec<kernels::XentStat>,
    /// Partial gradients of the head's rows, subtrees with all rows, filled block by block.
    pub head_partials: Partials,
}

impl Registers {
    /// True if nothing is in flight; statistics are scratch that the next block overwrites.
    pub fn is_empty(&self) -> bool {
        let Self { x, normed, rows, partials, reduced, grad, grad_rows, norm_leaves, logits, head_partials, .. } = self;
        let Self { keys, d_q, key_partials, d_keys, router_counts, stats: _, .. } = self;
        [x, normed, rows, reduced, grad, grad_rows, keys, d_q, router_counts].into_iter().all(Option::is_none)
            && [partials, key_partials].into_iter().all(Option::is_none)
            && d_keys.is_none()
            && [norm_leaves, logits].into_iter().all(Vec::is_empty)
            && head_partials.is_empty()
    }
}

/// What the input part of the attention's backward leaves for the gradient of its output projection.
#[derive(Debug, Default)]
pub struct AttnWeights {
    /// Gradient of the residual stream, all rows.
    pub dy: Vec<f32>,
    /// Attention output.
    pub o: Vec<f32>,
}

/// What it leaves for the gradients of query, key and value projections.
#[derive(Debug, Default)]
pub struct QkvWeights {
    /// Normed rows, all.
    pub n: Vec<f32>,
    /// Gradients of queries, keys and values.
    pub dq: Vec<f32>,
    /// See `dq`.
    pub dk: Vec<f32>,
    /// See `dq`.
    pub dv: Vec<f32>,
}

/// What the input part of the feed-forward's backward leaves for the gradient of its down projection.
#[derive(Debug, Default)]
pub struct DownWeights {
    /// Gradient of the residual stream, all rows.
    pub dy: Vec<f32>,
    /// The activation.
    pub act: Vec<f32>,
}

/// What it leaves for the gradients of gate and up.
#[derive(Debug, Default)]
pub struct MlpWeights {
    /// Normed rows, all.
    pub n: Vec<f32>,
    /// Gradients of gate and up.
    pub d_gate: Vec<f32>,
    /// See `d_gate`.
    pub d_up: Vec<f32>,
}

/// What one layer keeps of a unit between forward and backward.
#[derive(Debug, Default)]
pub struct LayerSaved {
    /// Residual stream before the attention's norm, local rows.
    pub x_attn: Vec<f32>,
    /// 1 / rms of those rows.
    pub inv_attn: Vec<f32>,
    /// Normed rows, all.
    pub n_attn: Vec<f32>,
    /// Queries and keys before their norms (QK-norm only).
    pub qk_raw: Option<[Vec<f32>; 2]>,
    /// 1 / rms of every query and key head (QK-norm only).
    pub qk_inv: Option<[Vec<f32>; 2]>,
    /// Rotated queries.
    pub q: Vec<f32>,
    /// Rotated keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// Attention output.
    pub o: Vec<f32>,
    /// Log-sum-exp of every row and head.
    pub lse: Vec<f32>,
    /// Residual stream before the feed-forward's norm, local rows.
    pub x_mlp: Vec<f32>,
    /// 1 / rms of those rows.
    pub inv_mlp: Vec<f32>,
    /// Normed rows, all.
    pub n_mlp: Vec<f32>,
    /// Gate before SiLU.
    pub gate: Vec<f32>,
    /// Up.
    pub up: Vec<f32>,
    /// The router's choice (experts only); then `gate` and `up` have a row per slot.
    pub routed: Option<Routed>,
    /// Left by the input part of the attention's backward.
    pub attn_weights: Option<AttnWeights>,
    /// Likewise.
    pub qkv_weights: Option<QkvWeights>,
    /// Left by the input part of the feed-forward's backward.
    pub mlp_weights: Option<MlpWeights>,
    /// Likewise.
    pub down_weights: Option<DownWeights>,
}

impl LayerSaved {
    fn buffers(&self) -> impl Iterator<Item = &Vec<f32>> {
        let Self { x_attn, inv_attn, n_attn, qk_raw, qk_inv, q, k, v, o, lse, x_mlp, inv_mlp, n_mlp, gate, up, .. } =
            self;
        let pairs = qk_raw.iter().chain(qk_inv).flatten();
        let attn = self.attn_weights.iter().flat_map(|w| [&w.dy, &w.o]);
        let qkv = self.qkv_weights.iter().flat_map(|w| [&w.n, &w.dq, &w.dk, &w.dv]);
        let mlp = self.mlp_weights.iter().flat_map(|w| [&w.n, &w.d_gate, &w.d_up]);
        let down = self.down_weights.iter().flat_map(|w| [&w.dy, &w.act]);
        let plain = [x_attn, inv_attn, n_attn, q, k, v, o, lse, x_mlp, inv_mlp, n_mlp, gate, up];
        let routed = self.routed.iter().flat_map(|r| r.shared.iter().chain(&r.work.parcels).chain([&r.scores]));
        plain.into_iter().chain(pairs).chain(attn).chain(qkv).chain(mlp).chain(down).chain(routed)
    }

    /// All it keeps, in one order, to put away and back.
    fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Vec<f32>> {
        let Self { x_attn, inv_attn, n_attn, qk_raw, qk_inv, q, k, v, o, lse, x_mlp, inv_mlp, n_mlp, gate, up, .. } =
            self;
        let pairs = qk_raw.iter_mut().chain(qk_inv).flatten();
        let plain = [x_attn, inv_attn, n_attn, q, k, v, o, lse, x_mlp, inv_mlp, n_mlp, gate, up];
        let routed = self.routed.iter_mut().flat_map(|r| r.shared.iter_mut().chain([&mut r.scores]));
        plain.into_iter().chain(pairs).chain(routed)
    }

    /// All it keeps, for reuse.
    fn into_buffers(self) -> impl Iterator<Item = Vec<f32>> {
        let Self { x_attn, inv_attn, n_attn, qk_raw, qk_inv, q, k, v, o, lse, x_mlp, inv_mlp, n_mlp, gate, up, .. } =
            self;
        let pairs = qk_raw.into_iter().chain(qk_inv).flatten();
        let attn = self.attn_weights.into_iter().flat_map(|w| [w.dy, w.o]);
        let qkv = self.qkv_weights.into_iter().flat_map(|w| [w.n, w.dq, w.dk, w.dv]);
        let mlp = self.mlp_weights.into_iter().flat_map(|w| [w.n, w.d_gate, w.d_up]);
        let down = self.down_weights.into_iter().flat_map(|w| [w.dy, w.act]);
        let plain = [x_attn, inv_attn, n_attn, q, k, v, o, lse, x_mlp, inv_mlp, n_mlp, gate, up];
        let routed = self.routed.into_iter().flat_map(|r| r.shared.into_iter().chain(r.work.parcels).chain([r.scores]));
        plain.into_iter().chain(pairs).chain(attn).chain(qkv).chain(mlp).chain(down).chain(routed)
    }

    /// Size of all it keeps.
    pub fn bytes(&self) -> u64 {
        self.buffers().map(|b| 4 * b.len() as u64).sum()
    }
}

/// What a router made of a unit's local rows.
#[derive(Debug, Default)]
pub struct Routed {
    /// Scores, rows x experts.
    pub scores: Vec<f32>,
    /// Chosen experts, rows x per_token, ascending.
    pub chosen: Vec<u32>,
    /// Their gates.
    pub gates: Vec<f32>,
    /// Local rows of each expert.
    pub counts: Vec<u64>,
    /// Gradient of the gates.
    pub d_gates: Vec<f32>,
    /// Gate and up of the shared expert.
    pub shared: Vec<Vec<f32>>,
    /// What this rank's experts work on.
    pub work: Work,
    /// What each rank of the group was sent; empty where one hosts it.
    pub sent: Vec<Sent>,
    /// By member: outputs, or gradients of rows and then of their gates, that go back to the ranks that sent them.
    pub returned: Vec<Vec<f32>>,
    /// By member: gradients of the outputs of rows that were sent here.
    pub dy: Vec<Vec<f32>>,
}

impl Routed {
    /// What a second forward starts from, and the rest.
    fn choice(self) -> (Self, Self) {
        let Self { scores, chosen, gates, counts, mut work, sent, shared, .. } = self;
        // Rows that were sent here are sent again.
        let rest = Self { shared, work: work.take_parcels(), ..Self::default() };
        (Self { scores, chosen, gates, counts, work, sent, ..Self::default() }, rest)
    }
}

/// The key in [`Saved::counts`] of the counts of all layers together.
pub const POOLED: usize = usize::MAX;

/// What a chunk keeps of a unit.
#[derive(Debug, Default)]
pub struct Saved {
    /// By layer.
    pub layers: HashMap<usize, LayerSaved>,
    /// Input of the final norm, local rows (last chunk).
    pub x_head: Vec<f32>,
    /// 1 / rms of those rows.
    pub inv_head: Vec<f32>,
    /// Normed rows, all.
    pub n_head: Vec<f32>,
    /// Rows of each expert over the whole unit, by layer, and [`POOLED`] (only for an auxiliary loss).
    pub counts: HashMap<usize, Vec<f32>>,
    /// Tokens of the whole unit that have a target (with `counts`).
    pub targets: f64,
}

/// Sums over the tokens of one leaf, and of more of them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LossSum {
    /// Nats.
    pub nats: f64,
    /// Tokens with a target.
    pub tokens: u64,
    /// Of those, bytes of text (the rest ends documents).
    pub bytes: u64,
}

impl LossSum {
    /// Bits per byte of text; none where the bytes are not `known`.
    pub fn bits_per_byte(&self, known: bool) -> Option<f64> {
        (known && self.bytes > 0).then(|| self.nats / std::f64::consts::LN_2 / self.bytes as f64)
    }

    /// Adds another sum.
    pub fn add(&mut self, other: &Self) {
        self.nats += other.nats;
        self.tokens += other.tokens;
        self.bytes += other.bytes;
    }
}

/// The memory of a rank between instructions.
#[derive(Debug, Default)]
pub struct Memory {
    /// Spare buffers.
    pub pool: Pool,
    /// In flight: the registers of the chunk and unit at hand, see [`Memory::turn_to`].
    pub regs: Registers,
    /// Whose registers those are.
    at_hand: Option<(usize, Unit)>,
    /// The registers of other chunks and units, where something is in flight.
    waiting: HashMap<(usize, Unit), Registers>,
    /// Kept for backward, by chunk and unit.
    pub saved: HashMap<(usize, Unit), Saved>,
    /// Tokens of the units under way.
    pub tokens: HashMap<Unit, Tokens>,
    /// Loss sums, by leaf.
    pub losses: HashMap<Leaf, LossSum>,
    /// Rows of each expert of the step so far on the hosted slices, by layer.
    pub loads: BTreeMap<usize, Vec<u64>>,
    /// Shares of the auxiliary loss, by leaf, layer and tensor cell.
    pub aux: BTreeMap<(Leaf, usize, usize), f64>,
    /// What chunks of this rank have handed to others of its chunks, by kind and the chunk that gave it.
    pub handed: HashMap<(Value, usize), VecDeque<Vec<f32>>>,
    /// Rows sent to ranks with their experts, all layers of the step so far.
    pub copies: u64,
}

impl Memory {
    /// Makes `regs` those of `unit` on `chunk`: lists may leave one in the middle and go on with another.
    pub fn turn_to(&mut self, chunk: usize, unit: Unit) {
        let key = (chunk, unit);
        if self.at_hand == Some(key) {
            return;
        }
        if let Some(left) = self.at_hand.replace(key)
            && !self.regs.is_empty()
        {
            self.waiting.insert(left, std::mem::take(&mut self.regs));
        }
        if let Some(back) = self.waiting.remove(&key) {
            self.regs = back;
        }
    }

    /// The chunks and units with something in flight: none at the end of a program.
    pub fn in_flight(&self) -> Vec<(usize, Unit)> {
        let here = self.at_hand.filter(|_| !self.regs.is_empty());
        self.waiting.keys().copied().chain(here).collect()
    }

    /// True once a layer of `chunk` has kept something of `unit`.
    pub fn begun(&self, chunk: usize, unit: Unit) -> bool {
        self.saved.get(&(chunk, unit)).is_some_and(|saved| !saved.layers.is_empty())
    }

    /// What `layer` of `chunk` has kept of `unit`.
    pub fn layer(&mut self, chunk: usize, unit: Unit, layer: usize) -> &mut LayerSaved {
        self.saved.entry((chunk, unit)).or_default().layers.entry(layer).or_default()
    }

    /// The same, taken out so that the pool and the registers are free meanwhile; [`Memory::put_layer`] puts it back.
    pub fn take_layer(&mut self, chunk: usize, unit: Unit, layer: usize) -> LayerSaved {
        std::mem::take(self.layer(chunk, unit, layer))
    }

    /// Puts back what [`Memory::take_layer`] took.
    pub fn put_layer(&mut self, chunk: usize, unit: Unit, layer: usize, kept: LayerSaved) {
        *self.layer(chunk, unit, layer) = kept;
    }

    /// What a layer whose forward is over has kept, to be put away; [`Memory::put_back`] undoes it.
    pub fn put_away(&mut self, key: Key) -> Vec<Vec<f32>> {
        self.layer(key.chunk, key.unit, key.layer).buffers_mut().map(std::mem::take).collect()
    }

    /// Puts back what [`Memory::put_away`] gave, in its order.
    pub fn put_back(&mut self, key: Key, buffers: Vec<Vec<f32>>) {
        let places = self.layer(key.chunk, key.unit, key.layer).buffers_mut();
        places.zip(buffers).for_each(|(place, buffer)| *place = buffer);
    }

    /// Drops what a layer kept: validation has no backward.
    pub fn forget_layer(&mut self, chunk: usize, unit: Unit, layer: usize) {
        let saved = self.saved.get_mut(&(chunk, unit)).and_then(|s| s.layers.remove(&layer));
        saved.unwrap_or_default().into_buffers().for_each(|buffer| self.pool.give(buffer));
    }

    /// Drops what the attention of a layer kept, or (`all`) all that the layer kept but its input.
    pub fn drop_kept(&mut self, chunk: usize, unit: Unit, layer: usize, all: bool) {
        let Some(kept) = self.saved.get_mut(&(chunk, unit)).and_then(|s| s.layers.get_mut(&layer)) else { return };
        let dropped = if all {
            // A router's choice is kept with its scores: it is small, and other ranks have counted on it.
            let routed = kept.routed.take().map(Routed::choice);
            let input = LayerSaved { x_attn: std::mem::take(&mut kept.x_attn), ..LayerSaved::default() };
            let mut dropped = std::mem::replace(kept, input);
            if let Some((choice, rest)) = routed {
                (kept.routed, dropped.routed) = (Some(choice), Some(rest));
            }
            dropped
        } else {
            LayerSaved {
                n_attn: std::mem::take(&mut kept.n_attn),
                qk_raw: kept.qk_raw.take(),
                qk_inv: kept.qk_inv.take(),
                q: std::mem::take(&mut kept.q),
                k: std::mem::take(&mut kept.k),
                v: std::mem::take(&mut kept.v),
                o: std::mem::take(&mut kept.o),
                lse: std::mem::take(&mut kept.lse),
                ..LayerSaved::default()
            }
        };
        dropped.into_buffers().for_each(|buffer| self.pool.give(buffer));
    }

    /// Bytes kept for the backward of `unit` on `chunk`.
    pub fn kept_bytes(&self, chunk: usize, unit: Unit) -> u64 {
        let Some(saved) = self.saved.get(&(chunk, unit)) else { return 0 };
        let head = [&saved.x_head, &saved.inv_head, &saved.n_head].map(|b| 4 * b.len() as u64);
        saved.layers.values().map(LayerSaved::bytes).chain(head).sum()
    }

    /// Ends a layer of which nothing is kept any more.
    pub fn settle_layer(&mut self, chunk: usize, unit: Unit, layer: usize) {
        if let Some(saved) = self.saved.get_mut(&(chunk, unit))
            && saved.layers.get(&layer).is_some_and(|kept| kept.bytes() == 0)
        {
            saved.layers.remove(&layer);
        }
    }
}

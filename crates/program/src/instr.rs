//! The instructions of a step: what a rank computes, sends, receives and sums, in order.
//!
//! A program is data. The executor in `train` runs it and nothing else; the checker proves
//! it before it runs; later the planner prices it and the simulator times it.

use std::fmt;
use std::ops::Range;

use spec::{Class, Unit};

use crate::buckets::Bucket;

/// Whole blocks of so many tokens go through the output projection and loss together: the product's inner block, so that
/// blocks do not change sums.
const TOKENS: usize = 256;
/// Most logits that exist at a time, where [`TOKENS`] rows have no more: the fewer the blocks, the seldomer the projection's
/// weights are packed and its gradients pass the memory.
const LOGITS: usize = 4 << 20;

/// How the output projection and loss cut the rows of a unit: into blocks that do not cross lanes, so that each lane's sum
/// over its rows is that of the lane alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBlocks {
    rows_lane: usize,
    most: usize,
}

impl TokenBlocks {
    /// Of lanes of `rows_lane` rows each, with logits for `vocab` (padded) tokens of the vocabulary.
    pub fn new(rows_lane: usize, vocab: usize) -> Self {
        let most = TOKENS * (LOGITS / vocab / TOKENS).max(1);
        Self { rows_lane, most: most.min(rows_lane.max(1)) }
    }

    /// Most rows of a block.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Blocks of a lane.
    pub fn per_lane(&self) -> usize {
        self.rows_lane.div_ceil(self.most)
    }

    /// The rows of block `block` of the unit.
    pub fn rows(&self, block: usize) -> Range<usize> {
        let (first, at) = (block / self.per_lane() * self.rows_lane, block % self.per_lane() * self.most);
        first + at..first + self.rows_lane.min(at + self.most)
    }
}

/// The direction of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Towards the loss.
    Forward,
    /// Towards the input; weight gradients add up here.
    Backward,
    /// [`Pass::Backward`] without the weight gradients; keeps what they need.
    BackwardInput,
    /// Those weight gradients.
    BackwardWeight,
    /// Forward a second time, before the backward: for what the next segment needs as well.
    Recompute,
    /// Forward a second time, only for what the backward of the segment reads: it leaves nothing.
    RecomputeKept,
}

/// A piece of the model's math between two exchanges.
///
/// The residual stream and the norms live on sequence slices; attention, feed-forward and
/// logits live on heads, feed-forward width and vocabulary of the hosted tensor cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Segment {
    /// Token embedding out of the hosted vocabulary slices; backward adds to its gradient.
    Embed,
    /// RMSNorm before the attention of a layer.
    AttnNorm(usize),
    /// With context cells: query, key, value and rotation, which an exchange parts from the rest of [`Segment::Attn`]. Their
    /// weight part is one of its own in any case.
    Qkv(usize),
    /// Query, key, value, rotation, attention, output projection; with context cells the last two. Its weight part is that of
    /// the output projection.
    Attn(usize),
    /// The attention's output joins the residual stream; RMSNorm before the feed-forward.
    MlpNorm(usize),
    /// SwiGLU feed-forward; its weight part is that of gate and up.
    Mlp(usize),
    /// The down projection of the feed-forward: a weight part of its own.
    Down(usize),
    /// Scores, choice and gates of a layer's experts; lives on sequence slices.
    Route(usize),
    /// Whole experts on the rows that chose them, and their sum; lives on sequence slices.
    Experts(usize),
    /// The feed-forward's output joins the residual stream (forward only).
    Residual(usize),
    /// Final RMSNorm.
    HeadNorm,
    /// Logits of one block ([`TokenBlocks`]) and their softmax statistics.
    Logits(usize),
    /// Loss of the block, and (training) its gradient into the output projection and the hidden rows.
    Loss(usize),
}

/// The ranks that take part in an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Same data, context and pipeline position.
    Tp,
    /// Same data, pipeline and tensor position.
    Cp,
    /// Same pipeline and tensor position: all that hold the same parameters.
    Dp,
    /// Those of `Dp` that share one set of shards.
    Shard,
    /// Those of `Dp` with the same shard.
    Replica,
    /// Same pipeline and tensor position, same place in the group of data positions that share experts: all that hold the
    /// same ones.
    ExpertDp,
    /// Those of `ExpertDp` that share one set of shards.
    ExpertShard,
    /// Those of `ExpertDp` with the same shard.
    ExpertReplica,
    /// Same data, context and tensor position; used pairwise.
    Pp,
    /// All ranks.
    World,
    /// Same pipeline and tensor position, data positions that host one group of data cells: they share its experts.
    Ep,
}

impl Axis {
    /// All that hold the parameters of a class.
    pub fn holders(class: Class) -> Self {
        if class == Class::Experts { Self::ExpertDp } else { Self::Dp }
    }

    /// Those of them that share one set of shards.
    pub fn shard(class: Class) -> Self {
        if class == Class::Experts { Self::ExpertShard } else { Self::Shard }
    }

    /// Those with the same shard.
    pub fn replica(class: Class) -> Self {
        if class == Class::Experts { Self::ExpertReplica } else { Self::Replica }
    }
}

/// What an exchange carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// Normed rows: sequence slices gathered to whole sequences (forward, tp).
    Rows,
    /// Partial outputs over the tensor cells, summed and scattered to sequence slices (tp).
    Partial,
    /// Gradient rows of the residual stream, gathered to whole sequences (backward, tp).
    GradRows,
    /// Partial input gradients over the tensor cells, summed and scattered (tp).
    GradPartial,
    /// Keys and values of a layer: from the context cells of a rank to those of all (forward, and again for backward: kept
    /// for all they would grow with the context axis).
    KeyValues(usize),
    /// Their gradients over the query cells, summed; each rank gets those of its keys.
    KeyValueGrads(usize),
    /// Softmax statistics of one block of tokens over the vocabulary slices (tp).
    Stats,
    /// Norm and QK-norm gradients of a chunk: summed over the tensor cells, on every rank (tp).
    NormGrads,
    /// Rows of a layer with experts to the ranks that work on those (forward, ep; how many is up to the router).
    Dispatch(usize),
    /// One vector per row and rank back: the sum over its experts there (forward, ep).
    Combine(usize),
    /// Gradients of those outputs, to the same ranks (backward, ep).
    DispatchGrad(usize),
    /// Gradients of rows and gates back (backward, ep).
    CombineGrad(usize),
    /// Rows of each expert in the layers of a chunk, for an auxiliary loss (forward, tp, then ep).
    RouterCounts,
    /// Gradients of whole experts, which have a leaf per sequence slice: summed over the tensor cells when a data cell
    /// ends, on every rank (tp).
    SliceGrads,
    /// The residual stream between two chunks (pp); with it the router counts of a pooled auxiliary loss.
    Activation,
    /// Its gradient (pp).
    ActivationGrad,
    /// Weight gradients of a bucket over the cells (d, c): summed, of one microbatch or of the whole step; on owners only
    /// or on all (dp), then from owners to their replicas (replica).
    Grads(Bucket),
    /// The output projection's share of a tied embedding's gradient, swapped for the input's share (pp).
    TiedGrads,
    /// The gradients of the step that a rank updates with, to the rank that mirrors its state (world; each sends to one and
    /// receives from one, see [`crate::mirror`]).
    MirrorGrads,
    /// Parameters of a bucket from their owners: updated ones at the end of a step (zero 1 and 2), or just in time (zero 3).
    Params(Bucket),
    /// Loss, norm and flags of every rank (world).
    Ballot,
}

impl Value {
    /// True for rows of the stream between the tensor positions, which may be posted.
    pub fn of_rows(self) -> bool {
        matches!(self, Self::Rows | Self::Partial | Self::GradRows | Self::GradPartial)
    }

    /// True for the residual stream of a microbatch and its gradient between two chunks. The router counts of a pooled
    /// auxiliary loss travel with them, and with nothing else that goes from rank to rank.
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Activation | Self::ActivationGrad)
    }

    fn scope(self) -> Scope {
        match self {
            Self::Grads(_) | Self::Params(_) => Scope::Bucket,
            Self::TiedGrads | Self::MirrorGrads | Self::Ballot => Scope::Step,
            Self::Rows
            | Self::Partial
            | Self::GradRows
            | Self::GradPartial
            | Self::KeyValues(_)
            | Self::KeyValueGrads(_)
            | Self::Stats
            | Self::NormGrads
            | Self::Dispatch(_)
            | Self::Combine(_)
            | Self::DispatchGrad(_)
            | Self::CombineGrad(_)
            | Self::RouterCounts
            | Self::SliceGrads
            | Self::Activation
            | Self::ActivationGrad => Scope::Unit,
        }
    }
}

/// How a collective moves its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Exchange {
    /// Parts to all.
    AllGather,
    /// Ordered sum, each part to its owner.
    ReduceScatter,
    /// Ordered sum to all.
    AllReduce,
    /// To one other member each.
    Shift,
    /// Something else to everyone; `bytes` is the most that a rank may send.
    AllToAll,
}

/// One operation. Exchanges with a group of one stay in the program and carry no bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Take in tokens, targets and document starts of the unit.
    Load,
    /// Run a segment.
    Compute(Pass, Segment),
    /// Let go of what backward would read, because it will be computed again: of the attention, or
    /// ([`Segment::Residual`]) of the whole layer but its input.
    Drop(Segment),
    /// Exchange along an axis; `bytes` is what this rank sends.
    Collective {
        /// How.
        exchange: Exchange,
        /// What.
        value: Value,
        /// With whom.
        axis: Axis,
        /// Bytes that this rank sends.
        bytes: u64,
    },
    /// This rank's share of an exchange leaves, and what comes for it finds its place; nothing is waited for. The
    /// collective that follows on the same chunk with the same value takes the result. Over the tensor axis those of
    /// [`Value::of_rows`] may be posted.
    Post {
        /// How.
        exchange: Exchange,
        /// What.
        value: Value,
        /// With whom.
        axis: Axis,
    },
    /// Send to one rank; never waits for the receiver. Two chunks of one rank hand over without bytes.
    Send {
        /// What.
        value: Value,
        /// The receiver's rank.
        to: usize,
        /// Size.
        bytes: u64,
    },
    /// Receive from one rank.
    Recv {
        /// What.
        value: Value,
        /// The sender's rank.
        from: usize,
        /// Size.
        bytes: u64,
    },
    /// The cell's weight gradients of this bucket are complete: push them onto the tree over data cells.
    Close {
        /// The data cell.
        cell: usize,
        /// The bucket.
        bucket: Bucket,
    },
    /// Free the gathered parameters of a bucket (zero 3).
    Release(Bucket),
    /// All ranks derive one decision from the same ballots (after the exchange of [`Value::Ballot`]).
    Vote,
    /// Update the parameters of the chunk; nothing is overwritten before the vote.
    Apply,
}

/// Whether an operation is about one microbatch, or about all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// One microbatch: the instruction must name it.
    Unit,
    /// The whole step: the instruction names none.
    Step,
    /// A bucket's gradients or parameters, which leave and come inside a microbatch or at the end of the step.
    Bucket,
}

impl Op {
    /// What the operation is about. The checker asks for it, and the executor counts on it.
    pub fn scope(&self) -> Scope {
        match self {
            Self::Load | Self::Compute(..) | Self::Drop(_) | Self::Close { .. } => Scope::Unit,
            Self::Release(_) => Scope::Bucket,
            Self::Vote | Self::Apply => Scope::Step,
            Self::Collective { value, .. }
            | Self::Post { value, .. }
            | Self::Send { value, .. }
            | Self::Recv { value, .. } => value.scope(),
        }
    }
}

/// An operation with what it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Instr {
    /// What to do.
    pub op: Op,
    /// The chunk of layers that it concerns; 0 for the vote.
    pub chunk: usize,
    /// The microbatch of a data cell that it concerns. The exchanges of buckets inside a microbatch meet between
    /// different cells; see [`crate::buckets::slots`].
    pub unit: Option<Unit>,
}

/// One rank's list for one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The rank.
    pub rank: usize,
    /// In order of execution.
    pub instrs: Vec<Instr>,
}

/// What a program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// A training step.
    Train,
    /// Loss of validation sequences: forward only, no vote.
    Eval,
}

impl fmt::Display for Instr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.op {
            Op::Load => write!(f, "load")?,
            Op::Compute(Pass::Forward, s) => write!(f, "forward {s:?}")?,
            Op::Compute(Pass::Backward, s) => write!(f, "backward {s:?}")?,
            Op::Compute(Pass::BackwardInput, s) => write!(f, "backward input {s:?}")?,
            Op::Compute(Pass::BackwardWeight, s) => write!(f, "backward weight {s:?}")?,
            Op::Compute(Pass::Recompute, s) => write!(f, "recompute {s:?}")?,
            Op::Compute(Pass::RecomputeKept, s) => write!(f, "recompute kept {s:?}")?,
            Op::Drop(s) => write!(f, "drop {s:?}")?,
            Op::Collective { exchange, value, axis, bytes } => write!(f, "{exchange:?} {value:?} {axis:?} {bytes} B")?,
            Op::Post { exchange, value, axis } => write!(f, "post {exchange:?} {value:?} {axis:?}")?,
            Op::Send { value, to, bytes } => write!(f, "send {value:?} -> {to} {bytes} B")?,
            Op::Recv { value, from, bytes } => write!(f, "recv {value:?} <- {from} {bytes} B")?,
            Op::Close { cell, bucket } => write!(f, "close {bucket:?} of cell {cell}")?,
            Op::Release(bucket) => write!(f, "release {bucket:?}")?,
            Op::Vote => write!(f, "vote")?,
            Op::Apply => write!(f, "apply")?,
        }
        write!(f, " | chunk {}", self.chunk)?;
        match self.unit {
            Some(Unit { cell, mb }) => write!(f, " | cell {cell} mb {mb}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_blocks_cut_lanes_at_whole_inner_blocks() {
        for (rows_lane, vocab, most) in [
            (2048, 256, 2048),
            (2048, 4096, 1024),
            (1000, 8192, 512),
            (700, 128 << 10, 256),
            (96, 64, 96),
            (300, 1 << 30, 256),
        ] {
            let blocks = TokenBlocks::new(rows_lane, vocab);
            assert_eq!(blocks.most(), most, "{rows_lane} rows, {vocab} tokens");
            let all: Vec<_> = (0..3 * blocks.per_lane()).map(|block| blocks.rows(block)).collect();
            let mut next = 0;
            for rows in all {
                assert_eq!(rows.start, next, "{rows_lane} rows, {vocab} tokens");
                assert!(rows.start % rows_lane % TOKENS == 0 && rows.len() <= most);
                assert_eq!(rows.start / rows_lane, (rows.end - 1) / rows_lane, "it crosses lanes");
                next = rows.end;
            }
            assert_eq!(next, 3 * rows_lane);
        }
    }
}

//! What an instruction amounts to, from shapes alone: model FLOPs, or the bytes that it cannot avoid to touch.
//!
//! FLOPs are those of [`spec::Model::flops_per_token`], cut into segments: over all ranks of a step they add up to it. A
//! product of [m, k] and [k, n] is 2 m k n; attention is causal, so half of its two products counts. Bytes are those of
//! float32 vectors that a segment without products must read or write once; what a cache keeps of them is not guessed.

use spec::{Class, Grid, Layout, Model};

use crate::buckets::ChunkPlan;
use crate::instr::{Instr, Op, Pass, Segment, TokenBlocks};

/// Bytes of an element.
const FLOAT: f64 = 4.0;
/// AdamW reads gradient, parameter and two moments, and writes all but the gradient.
const UPDATE_PASSES: f64 = 7.0;

/// What bounds an instruction, and how much of it there is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Work {
    /// Floating-point operations of products.
    Flops(f64),
    /// Bytes of memory, read and written.
    Bytes(f64),
    /// Bytes sent to other ranks.
    Sent(f64),
    /// Nothing that a formula tells.
    Unknown,
}

/// The work of instructions of one model, grid and layout.
#[derive(Debug, Clone)]
pub struct Costs<'a> {
    model: &'a Model,
    layout: &'a Layout,
    /// Tokens of one unit on a rank.
    tokens: f64,
    /// How the head cuts them.
    blocks: TokenBlocks,
    /// There are context cells.
    context: bool,
    seq: f64,
    /// Elements that each holder updates, by chunk.
    updated: Vec<Vec<usize>>,
}

impl<'a> Costs<'a> {
    /// The costs for sequences of `seq` tokens.
    pub fn new(model: &'a Model, grid: &Grid, layout: &'a Layout, seq: usize) -> Self {
        let updated = |chunk| {
            let first = layout.coords(0);
            let plan = ChunkPlan::new(model, grid, layout, chunk, first);
            let buckets = || plan.buckets.iter().filter(|b| b.parameters);
            let holders = (0..layout.holders()).map(|i| layout.holders_of(Class::Common).nth(first, i));
            holders.map(|at| buckets().map(|b| b.owned(at).len()).sum()).collect()
        };
        let updated = (0..layout.chunks()).map(updated).collect();
        Self {
            model,
            layout,
            tokens: (grid.ep / layout.group * grid.microbatch * seq / layout.cp) as f64,
            blocks: TokenBlocks::new(grid.microbatch * seq / grid.cp, model.vocab_padded()),
            context: grid.cp > 1,
            seq: seq as f64,
            updated,
        }
    }

    /// The work of `instr` on `rank`.
    pub fn of(&self, rank: usize, instr: &Instr) -> Work {
        match instr.op {
            Op::Compute(pass, segment) => self.segment(pass, segment),
            Op::Apply => {
                let elements = self.updated[instr.chunk][self.layout.holder(self.layout.coords(rank))];
                Work::Bytes(FLOAT * UPDATE_PASSES * elements as f64)
            }
            Op::Collective { bytes, .. } | Op::Send { bytes, .. } | Op::Recv { bytes, .. } => Work::Sent(bytes as f64),
            Op::Load | Op::Drop(_) | Op::Post { .. } | Op::Close { .. } | Op::Release(_) | Op::Vote => Work::Unknown,
        }
    }

    fn segment(&self, pass: Pass, segment: Segment) -> Work {
        let m = self.model;
        let [hidden, ffn, vocab] = [m.hidden, m.ffn, m.vocab].map(|n| n as f64);
        let (heads, kv_heads) = ((m.heads * m.head_dim) as f64, (m.kv_heads * m.head_dim) as f64);
        let tp = self.layout.tp as f64;
        let moe = m.moe.as_ref();
        let experts = moe.map_or(0.0, |moe| moe.experts as f64);
        let inner = moe.map_or(0.0, |moe| (moe.per_token * moe.ffn + moe.shared_ffn) as f64);
        // The gradient of a product is two products.
        let products = if pass == Pass::Backward { 2.0 } else { 1.0 };
        let whole = FLOAT * self.tokens * hidden;
        let slice = whole / tp;
        match segment {
            Segment::Qkv(_) => Work::Flops(products * self.tokens * 2.0 * hidden * (heads + 2.0 * kv_heads) / tp),
            Segment::Attn(_) => {
                // Where the output is not asked for, the output projection is left out.
                let apart = self.context || pass == Pass::BackwardWeight;
                let inputs = if apart { 0.0 } else { heads + 2.0 * kv_heads };
                let output = if pass == Pass::RecomputeKept { 0.0 } else { heads };
                let projections = products * 2.0 * hidden * (output + inputs);
                // Scores have no weights: the input part has all of their gradient.
                let of_scores = match pass {
                    Pass::Forward | Pass::Recompute | Pass::RecomputeKept => 1.0,
                    Pass::Backward | Pass::BackwardInput => 2.0,
                    Pass::BackwardWeight => 0.0,
                };
                let scores = of_scores * 2.0 * self.seq * heads;
                Work::Flops(self.tokens * (projections + scores) / tp)
            }
            Segment::Mlp(_) => {
                let matrices = if matches!(pass, Pass::RecomputeKept | Pass::BackwardWeight) { 2.0 } else { 3.0 };
                Work::Flops(products * self.tokens * 2.0 * matrices * hidden * ffn / tp)
            }
            Segment::Down(_) => Work::Flops(products * self.tokens * 2.0 * hidden * ffn / tp),
            // The choice is not made again.
            Segment::Route(_) if pass == Pass::Recompute => Work::Unknown,
            Segment::Route(_) => Work::Flops(products * self.tokens * 2.0 * hidden * experts / tp),
            // At balance; how many rows choose the experts of a rank is known only when it runs.
            Segment::Experts(_) => {
                let matrices = if pass == Pass::RecomputeKept { 2.0 } else { 3.0 };
                Work::Flops(products * self.tokens * 2.0 * matrices * hidden * inner / tp)
            }
            Segment::Logits(block) => Work::Flops(2.0 * self.rows(block) * hidden * vocab / tp),
            // Its gradient, into the output projection and into the rows.
            Segment::Loss(block) => Work::Flops(4.0 * self.rows(block) * hidden * vocab / tp),
            // Rows of the table, and of the output or of its gradient.
            Segment::Embed => Work::Bytes((1.0 + products) * whole),
            Segment::AttnNorm(_) | Segment::HeadNorm => Work::Bytes(2.0 * products * slice),
            // Forward also adds to the stream that it reads, backward to its gradient.
            Segment::MlpNorm(_) => Work::Bytes(4.0 * slice),
            Segment::Residual(_) => Work::Bytes(3.0 * slice),
        }
    }

    /// Rows of a block of the head.
    fn rows(&self, block: usize) -> f64 {
        self.blocks.rows(block).len() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{layout, model};
    use crate::{Mode, lower_all_parts};
    use spec::Schedule;

    const SEQ: usize = 96;

    /// FLOPs of every rank.
    fn flops(ranks: [usize; 3], microbatch: usize) -> Vec<f64> {
        let model = model(4);
        let grid = Grid::new(&model, 4 * microbatch, SEQ, microbatch, Some(2), 2).unwrap();
        let layout = layout(&model, &grid, ranks, Schedule::OneFOneB, None);
        let costs = Costs::new(&model, &grid, &layout, SEQ);
        let programs = lower_all_parts(&model, &grid, &layout, SEQ, Mode::Train);
        let of = |rank, instr| match costs.of(rank, instr) {
            Work::Flops(flops) => flops,
            _ => 0.0,
        };
        programs.iter().map(|p| p.instrs.iter().map(|instr| of(p.rank, instr)).sum()).collect()
    }

    #[test]
    fn segments_add_up_to_the_formula_of_the_model() {
        for microbatch in [1, 3] {
            for ranks in [[1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 2, 2]] {
                let want = model(4).flops_per_token(SEQ) * (4 * microbatch * SEQ) as f64;
                let got: f64 = flops(ranks, microbatch).iter().sum();
                assert!((got - want).abs() < 1e-9 * want, "{ranks:?} x {microbatch}: {got} is not {want}");
            }
        }
    }

    #[test]
    fn the_last_stage_has_the_head() {
        let of = flops([1, 1, 2], 1);
        let model = model(4);
        let head = (6 * model.hidden * model.vocab * 4 * SEQ) as f64;
        assert!((of[1] - of[0] - head).abs() < 1.0, "{of:?}");
    }

    #[test]
    fn shards_of_the_update_add_up() {
        let model = model(2);
        let grid = Grid::new(&model, 4, SEQ, 1, Some(2), 2).unwrap();
        let whole = layout(&model, &grid, [2, 1, 1], Schedule::OneFOneB, None);
        let sharded = Layout { zero: 1, shard: 2, ..whole.clone() };
        let apply = Instr { op: Op::Apply, chunk: 0, unit: None };
        let bytes = |layout: &Layout, rank| match Costs::new(&model, &grid, layout, SEQ).of(rank, &apply) {
            Work::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        };
        let all = ChunkPlan::new(&model, &grid, &whole, 0, whole.coords(0)).parameters;
        assert_eq!(bytes(&whole, 0), 28.0 * all as f64);
        assert_eq!(bytes(&sharded, 0) + bytes(&sharded, 1), bytes(&whole, 1));
        assert!(bytes(&sharded, 0) < bytes(&whole, 0));
    }
}

//! The buffers of a rank's step, one by one: what each instruction takes out of the pool of spare buffers and gives back.
//!
//! The pool finds a buffer by its length and never frees one, so what it takes is, for each length, the most that are in use
//! at once. This is told to the byte for dense models without context cells, where no length depends on the data.

use std::collections::HashMap;

use spec::tree::Counter;
use spec::{Grid, Layout, Model, Recompute, Unit};

use crate::buckets::{Bucket, ChunkPlan};
use crate::instr::{Instr, Op, Pass, Program, Segment, TOKEN_BLOCK, Value, block_rows};
use crate::shelf::{Move, Shelf};

/// Buffers of which each length is used again.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    /// By length: in use, and the most that were.
    lengths: HashMap<usize, (usize, usize)>,
    /// Numbers in use, and the most that were.
    used: (usize, usize),
}

impl Spare {
    /// A buffer of `len` numbers comes into use.
    pub fn take(&mut self, len: usize) {
        let (now, most) = self.lengths.entry(len).or_default();
        *now += 1;
        *most = (*most).max(*now);
        self.used.0 += len;
        self.used.1 = self.used.1.max(self.used.0);
    }

    /// One is spare.
    pub fn give(&mut self, len: usize) {
        if let Some((now, _)) = self.lengths.get_mut(&len).filter(|(now, _)| *now > 0) {
            *now -= 1;
            self.used.0 -= len;
        }
    }

    /// Numbers in all of them.
    pub fn elements(&self) -> u64 {
        self.lengths.iter().map(|(len, (_, most))| (len * most) as u64).sum()
    }

    fn all(&mut self, take: &[usize], give: &[usize]) {
        take.iter().for_each(|len| self.take(*len));
        give.iter().for_each(|len| self.give(*len));
    }
}

/// Lengths of the buffers of one unit on a rank.
struct Lengths {
    /// Rows of the stream, local and whole, and 1 / rms of the local ones.
    local: usize,
    whole: usize,
    inv: usize,
    /// Queries, keys (or values), log-sum-exp; feed-forward.
    q: usize,
    kv: usize,
    lse: usize,
    inner: usize,
    /// 1 / rms of every query and key head, with QK-norm.
    heads: Option<[usize; 2]>,
}

/// A rank's buffers as its list goes.
struct Flow<'a> {
    model: &'a Model,
    grid: &'a Grid,
    layout: &'a Layout,
    rank: usize,
    len: Lengths,
    /// Whole rows are the local ones, and normed ones are not kept.
    alone: bool,
    /// Nodes of a sum over the tensor cells that are not exchanged yet.
    partials: HashMap<(usize, Option<Unit>), usize>,
    spare: Spare,
}

/// Bytes of the buffers of the rank that runs `program`, and of those in use at once at most: what one arena could not do
/// without, however well its places were given. `None` where lengths depend on the routers, or with context cells.
pub(crate) fn bytes(model: &Model, grid: &Grid, layout: &Layout, seq: usize, program: &Program) -> Option<(u64, u64)> {
    if model.moe.is_some() || grid.cp > 1 {
        return None;
    }
    let rows = grid.microbatch * seq;
    let (heads, kv_heads) = (model.heads / layout.tp, model.kv_heads / layout.tp);
    let len = Lengths {
        local: rows / layout.tp * model.hidden,
        whole: rows * model.hidden,
        inv: rows / layout.tp,
        q: rows * heads * model.head_dim,
        kv: rows * kv_heads * model.head_dim,
        lse: rows * heads,
        inner: rows * model.ffn / layout.tp,
        heads: model.qk_norm.then_some([rows * heads, rows * kv_heads]),
    };
    let (rank, alone) = (program.rank, layout.tp == 1);
    let mut flow = Flow { model, grid, layout, rank, len, alone, partials: HashMap::new(), spare: Spare::default() };
    let shelf = if layout.offload.activations() { Shelf::new(program) } else { Shelf::default() };
    let mut leaving = None;
    for (at, instr) in program.instrs.iter().enumerate() {
        for step in shelf.before(at) {
            leaving.take().into_iter().for_each(|layer| flow.spare.all(&[], &flow.kept(layer)));
            match step {
                Move::Store(key) => leaving = Some(key.layer),
                Move::Want(key) => flow.spare.all(&flow.kept(key.layer), &[]),
                Move::Take(_) => {}
            }
        }
        flow.run(instr, rows);
    }
    Some((4 * flow.spare.elements(), 4 * flow.spare.used.1 as u64))
}

impl Flow<'_> {
    /// What a layer has kept once its forward is over.
    fn kept(&self, layer: usize) -> Vec<usize> {
        let mut kept = vec![self.len.local];
        if self.layout.recompute[layer] != Recompute::Full {
            kept.extend(self.around());
            kept.extend(self.mlp());
            if self.layout.recompute[layer] == Recompute::None {
                kept.extend(self.attn());
            }
        }
        kept
    }

    /// The norms of a layer beside their first input.
    fn around(&self) -> [usize; 3] {
        [self.len.inv, self.len.local, self.len.inv]
    }

    /// Normed rows, where they are kept.
    fn normed(&self) -> Option<usize> {
        (!self.alone).then_some(self.len.whole)
    }

    fn mlp(&self) -> Vec<usize> {
        [self.len.inner; 2].into_iter().chain(self.normed()).collect()
    }

    fn attn(&self) -> Vec<usize> {
        let Lengths { q, kv, lse, heads, .. } = self.len;
        let norms = heads.into_iter().flat_map(|[of_q, of_k]| [q, of_q, kv, of_k]);
        [q, kv, kv, q, lse].into_iter().chain(norms).chain(self.normed()).collect()
    }

    /// A sum over the hosted tensor cells, `len` numbers each; its nodes.
    fn sum(&mut self, len: usize) -> usize {
        let mut sum = Counter::new(self.grid.tp);
        for cell in self.layout.tensor_cells(self.layout.coords(self.rank).tp, self.grid.tp) {
            self.spare.take(len);
            sum.push(cell..cell + 1, (), |(), ()| {}).into_iter().for_each(|()| self.spare.give(len));
        }
        sum.into_nodes().len()
    }

    fn partial(&mut self, instr: &Instr) {
        let nodes = self.sum(self.len.whole);
        self.partials.insert((instr.chunk, instr.unit), nodes);
    }

    fn run(&mut self, instr: &Instr, rows: usize) {
        let Lengths { local, whole, .. } = self.len;
        match instr.op {
            Op::Compute(pass, segment) => self.compute(instr, pass, segment, rows),
            Op::Drop(Segment::Attn(_)) => self.spare.all(&[], &self.attn()),
            Op::Drop(_) => self.spare.all(&[], &[self.attn(), self.mlp(), self.around().to_vec()].concat()),
            Op::Collective { value: Value::Rows, .. } if !self.alone => self.spare.all(&[whole], &[local]),
            Op::Collective { value: Value::GradRows, .. } if !self.alone => self.spare.take(whole),
            Op::Collective { value: Value::Partial | Value::GradPartial, .. } => {
                let nodes = self.partials.remove(&(instr.chunk, instr.unit)).unwrap_or(1);
                if !self.alone || nodes > 1 {
                    self.spare.all(&[local], &vec![whole; nodes]);
                }
            }
            Op::Send { value: Value::Activation | Value::ActivationGrad, to, .. } if to != self.rank => {
                self.spare.give(local);
            }
            Op::Recv { value: Value::Activation | Value::ActivationGrad, from, .. } if from != self.rank => {
                self.spare.take(local);
            }
            // Between two chunks of this rank a copy is handed over.
            Op::Send { value: Value::TiedGrads, to, .. } if to == self.rank => self.spare.take(self.tied(instr)),
            Op::Recv { value: Value::TiedGrads, from, .. } => {
                let len = self.tied(instr);
                if from != self.rank {
                    self.spare.take(len);
                }
                self.spare.give(len);
            }
            _ => {}
        }
    }

    /// Numbers of a chunk's use of a tied embedding that this rank updates.
    fn tied(&self, instr: &Instr) -> usize {
        let at = self.layout.coords(self.rank);
        let plan = ChunkPlan::new(self.model, self.grid, self.layout, instr.chunk, at);
        let bucket = if instr.chunk == 0 { Bucket::Embed } else { Bucket::Head };
        plan.find(bucket).map_or(0, |i| plan.buckets[i].owned(at).len())
    }

    fn compute(&mut self, instr: &Instr, pass: Pass, segment: Segment, rows: usize) {
        use Pass::{Backward, BackwardInput, BackwardWeight, Forward, Recompute, RecomputeKept};
        let Lengths { local, whole, inv, q, kv, lse, inner, heads } = self.len;
        // Whole normed rows that are not kept are given back, and made again.
        let [normed, again, again_inv, released] = match self.alone {
            true => [vec![whole], vec![whole, inv], vec![inv], vec![]],
            false => [vec![], vec![], vec![], vec![whole]],
        };
        match (pass, segment) {
            (Forward, Segment::Embed) => {
                self.spare.take(whole);
                self.partials.insert((instr.chunk, instr.unit), 1);
            }
            (Forward, Segment::AttnNorm(_) | Segment::MlpNorm(_) | Segment::HeadNorm)
            | (Recompute, Segment::MlpNorm(_)) => self.spare.all(&[local, inv], &[]),
            (Recompute, Segment::AttnNorm(layer)) => {
                let full = self.layout.recompute[layer] == spec::Recompute::Full;
                self.spare.all(&[local, inv], &[]);
                // The one that it had goes.
                if !full {
                    self.spare.give(inv);
                }
            }
            (Forward | Recompute | RecomputeKept, Segment::Attn(_)) => {
                self.spare.all(&[q, kv, kv], &normed);
                if let Some([of_q, of_k]) = heads {
                    self.spare.all(&[q, of_q, kv, of_k], &[]);
                }
                self.spare.all(&[q, lse], &[]);
                if pass != RecomputeKept {
                    self.partial(instr);
                }
            }
            (Forward | RecomputeKept, Segment::Mlp(_)) => {
                self.spare.all(&[inner, inner], &normed);
                if pass != RecomputeKept {
                    self.spare.take(inner);
                    self.partial(instr);
                    self.spare.give(inner);
                }
            }
            (Forward, Segment::Logits(block)) => self.logits(block, rows, true),
            (Forward, Segment::Loss(block)) => {
                let len = block_rows(rows, block).len() * self.model.hidden;
                let nodes = self.sum(len);
                if block == 0 {
                    self.spare.all(&vec![whole; nodes], &[]);
                }
                self.spare.all(&[], &vec![len; nodes]);
                self.logits(block, rows, false);
                if block_rows(rows, block).end == rows {
                    self.spare.give(whole);
                    self.partials.insert((instr.chunk, instr.unit), nodes);
                }
            }
            (Backward, Segment::HeadNorm) => self.spare.all(&[local], &[local, inv, local]),
            (Backward | BackwardInput, Segment::Mlp(_)) => {
                self.spare.all(&again, &again_inv);
                self.spare.take(inner);
                self.partial(instr);
                match pass {
                    Backward => self.spare.all(&[], &[released, vec![whole, inner, inner, inner]].concat()),
                    _ => self.spare.all(&normed, &[]),
                }
            }
            (BackwardWeight, Segment::Mlp(_)) => self.spare.all(&[], &[whole, inner, whole, inner, inner]),
            (Backward, Segment::MlpNorm(_) | Segment::AttnNorm(_)) => self.spare.all(&[], &[local, inv, local]),
            (Backward | BackwardInput, Segment::Attn(_)) => {
                self.spare.all(&[q, q, kv, kv], &[q, kv, kv, lse, q]);
                match pass {
                    Backward => self.spare.all(&[], &[released, vec![q]].concat()),
                    _ => self.spare.all(&normed, &[]),
                }
                if let Some([of_q, of_k]) = heads {
                    self.spare.all(&[q], &[q, of_q, q]);
                    self.spare.all(&[kv], &[kv, of_k, kv]);
                }
                self.spare.all(&again, &again_inv);
                self.partial(instr);
                if pass == Backward {
                    self.spare.all(&[], &[whole, q, kv, kv]);
                }
            }
            (BackwardWeight, Segment::Attn(_)) => self.spare.all(&[], &[whole, q, whole, q, kv, kv]),
            (Backward, Segment::Embed) => self.spare.all(&[], &[released, vec![local]].concat()),
            _ => {}
        }
    }

    /// The logits of a block, by hosted cell, come or go.
    fn logits(&mut self, block: usize, rows: usize, come: bool) {
        let len = block_rows(rows, block).len().min(TOKEN_BLOCK) * self.model.vocab_padded() / self.grid.tp;
        let all = vec![len; self.grid.tp / self.layout.tp];
        match come {
            true => self.spare.all(&all, &[]),
            false => self.spare.all(&[], &all),
        }
    }
}

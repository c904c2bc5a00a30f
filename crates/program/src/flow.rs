//! The buffers of a rank's step, one by one: what each instruction takes out of the pool of spare buffers and gives back.
//!
//! The pool finds a buffer by its length and never frees one, so what it takes is, for each length, the most that are in use
//! at once. This is told to the byte where no length depends on the data. Where rows travel between the ranks that share
//! experts, it is told as if the routers were in balance, or as if all rows chose this rank's experts ([`Load`]).

mod experts;
mod spare;

use std::collections::{HashMap, HashSet};

use spec::moe::AuxScope;
use spec::tree::Counter;
use spec::{Grid, Layout, Model, Recompute, Unit};

use self::experts::Experts;
pub(crate) use self::spare::Spare;
pub use self::spare::loose_room;
use crate::buckets::{Bucket, ChunkPlan};
use crate::instr::{Instr, Op, Pass, Program, Segment, TokenBlocks, Value};
use crate::shelf::{Move, Shelf};

/// How rows spread over the ranks that share experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Every expert is chosen as often as any other.
    Balanced,
    /// All rows of a group choose the experts of the rank that is asked about.
    Worst,
}

/// Lengths of the buffers of one unit on a rank.
struct Lengths {
    /// How the head cuts the rows.
    blocks: TokenBlocks,
    /// Rows of the unit.
    rows: usize,
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
    /// With context cells: keys and values of all of them.
    keys: Option<usize>,
    /// Experts whose counts travel with the stream.
    pooled: usize,
}

impl Lengths {
    fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize) -> Self {
        let rows_lane = grid.microbatch * seq / grid.cp;
        let rows = grid.ep / layout.group * (grid.cp / layout.cp) * rows_lane;
        let (heads, kv_heads) = (model.heads / layout.tp, model.kv_heads / layout.tp);
        let kv = rows * kv_heads * model.head_dim;
        let pooled = model.moe.as_ref().filter(|moe| moe.aux_loss > 0.0 && moe.aux_scope == AuxScope::Pooled);
        Self {
            blocks: TokenBlocks::new(rows_lane, model.vocab_padded()),
            rows,
            local: rows / layout.tp * model.hidden,
            whole: rows * model.hidden,
            inv: rows / layout.tp,
            q: rows * heads * model.head_dim,
            kv,
            lse: rows * heads,
            inner: rows * model.ffn / layout.tp,
            heads: model.qk_norm.then_some([rows * heads, rows * kv_heads]),
            keys: (grid.cp > 1).then_some(2 * kv * layout.cp),
            pooled: pooled.map_or(0, |moe| moe.experts),
        }
    }
}

/// Numbers that the experts of a layer keep of a unit in the rows that other ranks sent, with routers in balance.
pub(crate) fn parcels(model: &Model, grid: &Grid, layout: &Layout, seq: usize) -> usize {
    Experts::new(model, grid, layout, seq, Load::Balanced).map_or(0, |experts| experts.parcels())
}

/// A rank's buffers as its list goes.
struct Flow<'a> {
    model: &'a Model,
    grid: &'a Grid,
    layout: &'a Layout,
    rank: usize,
    len: Lengths,
    experts: Option<Experts>,
    /// Whole rows are the local ones, and normed ones are not kept.
    alone: bool,
    /// Nodes of a sum over the tensor cells that are not exchanged yet.
    partials: HashMap<(usize, Option<Unit>), usize>,
    /// Likewise of key gradients over the context cells.
    keys: HashMap<(usize, Option<Unit>), usize>,
    /// Exchanges over the tensor axis that have their buffers already.
    posted: HashSet<(usize, Value)>,
    spare: Spare,
}

/// Bytes of the buffers of the rank that runs `program`, and of those in use at once at most: what one arena could not do
/// without, however well its places were given.
pub(crate) fn bytes(
    model: &Model,
    grid: &Grid,
    layout: &Layout,
    seq: usize,
    program: &Program,
    load: Load,
) -> (u64, u64) {
    let mut flow = Flow {
        model,
        grid,
        layout,
        rank: program.rank,
        len: Lengths::new(model, grid, layout, seq),
        experts: Experts::new(model, grid, layout, seq, load),
        alone: layout.tp == 1,
        partials: HashMap::new(),
        keys: HashMap::new(),
        posted: HashSet::new(),
        spare: Spare::default(),
    };
    let shelf = if layout.offload.activations() { Shelf::new(program) } else { Shelf::default() };
    // Loose buffers that one step leaves serve the next one.
    let steps = if layout.group > 1 { 2 } else { 1 };
    for _ in 0..steps {
        let mut leaving = None;
        for (at, instr) in program.instrs.iter().enumerate() {
            for step in shelf.before(at) {
                leaving.take().into_iter().for_each(|layer| flow.kept(layer, false));
                match step {
                    Move::Store(key) => leaving = Some(key.layer),
                    Move::Want(key) => flow.kept(key.layer, true),
                    Move::Take(_) => {}
                }
            }
            flow.run(instr);
        }
    }
    (4 * flow.spare.elements(), 4 * flow.spare.most())
}

impl Flow<'_> {
    /// What a layer has kept once its forward is over comes, or goes.
    fn kept(&mut self, layer: usize, come: bool) {
        let full = self.layout.recompute[layer] == Recompute::Full;
        let mut kept = vec![self.len.local];
        if !full {
            kept.extend(self.around());
            if self.layout.recompute[layer] == Recompute::None {
                kept.extend(self.attn());
            }
            match &self.experts {
                Some(_) => kept.push(self.len.local),
                None => kept.extend(self.mlp()),
            }
        }
        match come {
            true => self.spare.all(&kept, &[]),
            false => self.spare.all(&[], &kept),
        }
        if let Some(experts) = &self.experts {
            experts.kept(&mut self.spare, full, come);
        }
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

    fn run(&mut self, instr: &Instr) {
        let Lengths { local, whole, kv, keys, pooled, .. } = self.len;
        match instr.op {
            Op::Compute(pass, segment) => self.compute(instr, pass, segment),
            Op::Drop(Segment::Attn(_)) => self.spare.all(&[], &self.attn()),
            Op::Drop(_) => {
                self.spare.all(&[], &[self.attn(), self.around().to_vec()].concat());
                match &self.experts {
                    Some(experts) => {
                        self.spare.give(local);
                        experts.drop(&mut self.spare);
                    }
                    None => self.spare.all(&[], &self.mlp()),
                }
            }
            Op::Post { value, .. } if value.of_rows() => {
                match value {
                    Value::Rows => self.spare.all(&[whole], &[local]),
                    Value::GradRows => self.spare.take(whole),
                    _ => self.spare.take(local),
                }
                self.posted.insert((instr.chunk, value));
            }
            Op::Collective { value: value @ (Value::Rows | Value::GradRows), .. } if !self.alone => {
                let here = self.posted.remove(&(instr.chunk, value));
                let goes = vec![local; usize::from(!here && value == Value::Rows)];
                self.spare.all(&vec![whole; usize::from(!here)], &goes);
            }
            Op::Collective { value: value @ (Value::Partial | Value::GradPartial), .. } => {
                let nodes = self.partials.remove(&(instr.chunk, instr.unit)).unwrap_or(1);
                if !self.alone || nodes > 1 {
                    let here = self.posted.remove(&(instr.chunk, value));
                    let come = vec![local; usize::from(!here)];
                    self.spare.all(&come, &vec![whole; nodes]);
                }
            }
            Op::Collective { value: Value::KeyValues(_), .. } => self.spare.all(keys.as_slice(), &[]),
            Op::Collective { value: Value::KeyValueGrads(_), .. } => {
                let nodes = self.keys.remove(&(instr.chunk, instr.unit)).unwrap_or(0);
                self.spare.take(2 * kv);
                self.spare.all(&[], &vec![keys.unwrap_or(0); nodes]);
                self.spare.all(&[kv, kv], &[2 * kv]);
            }
            Op::Collective {
                value: value @ (Value::Dispatch(_) | Value::Combine(_) | Value::DispatchGrad(_) | Value::CombineGrad(_)),
                ..
            } => {
                if let Some(experts) = &self.experts {
                    experts.travel(&mut self.spare, value, local);
                }
            }
            // With router counts behind it the stream is copied.
            Op::Send { value: Value::Activation | Value::ActivationGrad, to, .. } if pooled > 0 => {
                self.spare.all(&[local + pooled], &[local]);
                if to != self.rank {
                    self.spare.give(local + pooled);
                }
            }
            Op::Recv { value: Value::Activation | Value::ActivationGrad, from, .. } if pooled > 0 => {
                if from != self.rank {
                    self.spare.take(local + pooled);
                }
                self.spare.all(&[local], &[local + pooled]);
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

    fn compute(&mut self, instr: &Instr, pass: Pass, segment: Segment) {
        use Pass::{Backward, BackwardInput, BackwardWeight, Forward, Recompute, RecomputeKept};
        let Lengths { local, whole, inv, q, kv, lse, inner, rows, keys, .. } = self.len;
        let context = keys.is_some();
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
            (Forward | Recompute, Segment::Qkv(_)) => self.qkv(&normed),
            (Forward | Recompute | RecomputeKept, Segment::Attn(_)) => {
                if !context {
                    self.qkv(&normed);
                }
                self.spare.all(&[q, lse], keys.as_slice());
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
            (Forward, Segment::Logits(block)) => self.logits(block, true),
            (Forward, Segment::Loss(block)) => {
                let len = self.len.blocks.rows(block).len() * self.model.hidden;
                let nodes = self.sum(len);
                if block == 0 {
                    self.spare.all(&vec![whole; nodes], &[]);
                }
                self.spare.all(&[], &vec![len; nodes]);
                self.logits(block, false);
                if self.len.blocks.rows(block).end == rows {
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
            (BackwardWeight, Segment::Mlp(_)) => self.spare.all(&[], &[whole, inner, inner]),
            (BackwardWeight, Segment::Down(_)) => self.spare.all(&[], &[whole, inner]),
            (Backward, Segment::MlpNorm(_) | Segment::AttnNorm(_)) => self.spare.all(&[], &[local, inv, local]),
            (Backward | BackwardInput, Segment::Attn(_)) => {
                self.spare.all(&[q, q], &[]);
                match keys {
                    Some(keys) => {
                        let mut sum = Counter::new(self.grid.cp);
                        let at = self.layout.coords(self.rank).cp;
                        for context in self.layout.context_cells(at, self.grid.cp) {
                            self.spare.take(keys);
                            let spent = sum.push(context..context + 1, (), |(), ()| {});
                            spent.into_iter().for_each(|()| self.spare.give(keys));
                        }
                        self.keys.insert((instr.chunk, instr.unit), sum.into_nodes().len());
                        self.spare.give(keys);
                    }
                    None => self.spare.all(&[kv, kv], &[]),
                }
                self.spare.all(&[], &[q, kv, kv, lse, q]);
                match pass {
                    Backward => self.spare.all(&[], &[released, vec![q]].concat()),
                    _ => self.spare.all(&normed, &[]),
                }
                if !context {
                    self.qkv_backward(instr, pass);
                }
            }
            (Backward | BackwardInput, Segment::Qkv(_)) => self.qkv_backward(instr, pass),
            (BackwardWeight, Segment::Attn(_)) => self.spare.all(&[], &[whole, q]),
            (BackwardWeight, Segment::Qkv(_)) => self.spare.all(&[], &[whole, q, kv, kv]),
            (_, Segment::Route(_) | Segment::Experts(_)) => {
                if let Some(experts) = &self.experts {
                    experts.compute(&mut self.spare, pass, segment, local);
                }
            }
            (Backward, Segment::Embed) => self.spare.all(&[], &[released, vec![local]].concat()),
            _ => {}
        }
    }

    /// Queries, keys and values out of the normed rows.
    fn qkv(&mut self, normed: &[usize]) {
        let Lengths { q, kv, heads, .. } = self.len;
        self.spare.all(&[q, kv, kv], normed);
        if let Some([of_q, of_k]) = heads {
            self.spare.all(&[q, of_q, kv, of_k], &[]);
        }
    }

    fn qkv_backward(&mut self, instr: &Instr, pass: Pass) {
        let Lengths { whole, inv, q, kv, heads, .. } = self.len;
        if let Some([of_q, of_k]) = heads {
            self.spare.all(&[q], &[q, of_q, q]);
            self.spare.all(&[kv], &[kv, of_k, kv]);
        }
        if self.alone {
            self.spare.all(&[whole, inv], &[inv]);
        }
        self.partial(instr);
        if pass == Pass::Backward {
            self.spare.all(&[], &[whole, q, kv, kv]);
        }
    }

    /// The logits of a block, by hosted cell, come or go.
    fn logits(&mut self, block: usize, come: bool) {
        let len = self.len.blocks.rows(block).len() * self.model.vocab_padded() / self.grid.tp;
        let all = vec![len; self.grid.tp / self.layout.tp];
        match come {
            true => self.spare.all(&all, &[]),
            false => self.spare.all(&[], &all),
        }
    }
}

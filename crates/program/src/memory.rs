//! The memory that a rank will take, from its program and shapes alone.
//!
//! Buffers of one length are used again and never given back, so what a kind of buffer takes is the sum over its lengths of
//! the most that are alive at once; the program tells when each comes and goes. Gradients and buffers are told exactly, but
//! for those whose length is up to the routers, where rows travel between ranks ([`Plan::uneven`]).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use spec::tree::Counter;
use spec::{Accumulate, Class, Coords, Grid, Layout, Model, Unit};

use crate::buckets::{Bucket, BucketPlan, ChunkPlan};
pub use crate::flow::loose_room;
use crate::flow::{self, Load, Spare};
use crate::instr::{Axis, Exchange, Instr, Op, Pass, Program, Segment, Value};
use crate::kept::Kept;
use crate::mirror::Mirrors;
use crate::packed::Packed;
use crate::shelf::Shelf;

/// Bytes of an element.
const FLOAT: u64 = 4;

/// Bytes that a rank takes, by what for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Plan {
    /// Parameters that stay over a step.
    pub parameters: u64,
    /// Moments of what the rank owns; offloaded: those of the largest bucket, of the rank or mirrored. What is read ahead of
    /// its use is in the system's cache.
    pub optimizer: u64,
    /// Gradients: accumulators, finished leaves, their sums; and gathered parameters, which come out of the same buffers.
    pub gradients: u64,
    /// Most gradients of leaves at once.
    pub leaves: u64,
    /// What it mirrors of another rank: parameters, moments, gradients.
    pub mirrors: u64,
    /// What forward keeps for backward, at most.
    pub activations: u64,
    /// The copy of parameters and moments that a checkpoint is written from beside the steps.
    pub copy: u64,
    /// The stream, and what the segments use inside.
    pub in_flight: u64,
    /// The largest right operand of a product, which is packed.
    pub scratch: u64,
    /// Weights that stay packed.
    pub packed: u64,
    /// Rings between this rank and those that it exchanges with, activations that wait for room in them, and gradients that others
    /// send before this rank adds them up.
    pub messages: u64,
    /// What a process takes at work whatever its shapes are; told by who runs it.
    pub at_work: u64,
    /// Of activations and what is in flight, most that is in use at once; the rest is buffers that wait for their length.
    pub at_once: u64,
    /// What buffers take beyond that if all rows of a group choose this rank's experts: the rest is told as if the routers were
    /// in balance. 0 where rows do not travel.
    pub uneven: u64,
}

impl Plan {
    /// The plan of the rank that runs `program`; between two ranks that exchange there are two rings of `ring` bytes.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize, program: &Program, ring: u64) -> Self {
        let at = layout.coords(program.rank);
        let mut plan = Self {
            activations: {
                let shelf = if layout.offload.activations() { Shelf::new(program) } else { Shelf::default() };
                shelf.most_kept(program, &Kept::new(model, grid, layout, seq))
            },
            messages: 2 * ring * peers(layout, program.rank) + outbox(program, ring),
            scratch: FLOAT * right_operand(model, grid, layout, seq) as u64,
            packed: Packed::new(model, grid, layout, program).bytes(model, grid, layout, program),
            ..Self::default()
        };
        plan.messages += early_rows(grid, layout, seq, model.hidden, program);
        let buffers = |load| flow::bytes(model, grid, layout, seq, program, load);
        let (all, at_once) = buffers(Load::Balanced);
        plan.at_once = at_once;
        plan.in_flight = all.saturating_sub(plan.activations);
        if layout.group > 1 {
            plan.uneven = buffers(Load::Worst).0.saturating_sub(all);
        }
        for chunk in layout.chunks_of(at.pp) {
            let chunk_plan = ChunkPlan::new(model, grid, layout, chunk, at);
            let mut moments = Vec::new();
            for bucket in chunk_plan.buckets.iter().filter(|b| b.parameters) {
                let owned = bucket.owned(at).len();
                plan.parameters += FLOAT * if layout.zero == 3 { owned } else { bucket.at.len() } as u64;
                moments.push(2 * FLOAT * owned as u64);
                plan.copy += 3 * FLOAT * bucket.part(at).len() as u64;
            }
            match layout.offload.optimizer() {
                true => plan.optimizer = moments.into_iter().fold(plan.optimizer, u64::max),
                false => plan.optimizer += moments.iter().sum::<u64>(),
            }
            let mut grads = Grads::new(grid, layout, program.rank, &chunk_plan);
            program.instrs.iter().filter(|instr| instr.chunk == chunk).for_each(|instr| grads.run(instr));
            plan.gradients += FLOAT * grads.spare.elements();
            plan.leaves += FLOAT * grads.most as u64;
            if layout.tp * layout.cp * layout.pp * layout.group > 1 {
                plan.messages += FLOAT * grads.early_most as u64;
            }
        }
        if let Some(mirrors) = Mirrors::of(layout) {
            let ward = layout.coords(mirrors.ward(layout, program.rank));
            for chunk in layout.chunks_of(ward.pp) {
                let of = |b: &BucketPlan| b.owned(ward).len() as u64;
                let buckets = ChunkPlan::new(model, grid, layout, chunk, ward).buckets;
                let kept = buckets.iter().filter(|b| b.parameters && layout.mirrors(b.bucket.class())).map(of);
                for elements in kept {
                    plan.mirrors += 2 * FLOAT * elements;
                    match layout.offload.optimizer() {
                        true => plan.optimizer = plan.optimizer.max(2 * FLOAT * elements),
                        false => plan.mirrors += 2 * FLOAT * elements,
                    }
                }
            }
        }
        plan
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        let state = self.parameters + self.optimizer + self.gradients + self.mirrors;
        state
            + self.activations
            + self.copy
            + self.in_flight
            + self.scratch
            + self.packed
            + self.messages
            + self.at_work
    }
}

/// Numbers of the largest right operand of a product: weights that are used together, or the rows of a lane.
fn right_operand(model: &Model, grid: &Grid, layout: &Layout, seq: usize) -> usize {
    let heads = (model.heads + 2 * model.kv_heads) * model.head_dim / layout.tp;
    let inner = 2 * model.moe.as_ref().map_or(model.ffn, |moe| moe.ffn.max(moe.shared_ffn)) / layout.tp;
    let vocab = model.vocab_padded() / grid.tp;
    model.hidden * heads.max(inner).max(vocab).max(grid.microbatch * seq / grid.cp)
}

/// Most bytes of activations that may have been sent without having been received, beyond what a ring holds: the next stage
/// has those of a unit when its gradient comes back.
fn outbox(program: &Program, ring: u64) -> u64 {
    let (mut sent, mut now, mut most) = (HashMap::new(), 0, 0);
    for instr in &program.instrs {
        match instr.op {
            Op::Send { value: Value::Activation, bytes, .. } => {
                sent.insert((instr.chunk, instr.unit), bytes);
                now += bytes;
            }
            Op::Recv { value: Value::ActivationGrad, .. } => {
                now -= sent.remove(&(instr.chunk, instr.unit)).unwrap_or(0);
            }
            _ => {}
        }
        most = most.max(now);
    }
    most.saturating_sub(ring)
}

/// Most bytes of partial sums of rows that others have posted before this rank adds them up, where they are not added as they
/// come: any other exchange takes them out of the rings.
fn early_rows(grid: &Grid, layout: &Layout, seq: usize, hidden: usize, program: &Program) -> u64 {
    let cells: Vec<_> = (0..layout.tp).map(|t| std::iter::once(layout.tensor_cells(t, grid.tp)).collect()).collect();
    let posts = |instr: &Instr| matches!(instr.op, Op::Post { value: Value::GradPartial | Value::Partial, .. });
    if spec::tree::is_of_two(grid.tp, &cells) || !program.instrs.iter().any(posts) {
        return 0;
    }
    let mine = layout.coords(program.rank).tp;
    let nodes =
        |(t, cells): (usize, &Vec<_>)| if t == mine { 0 } else { spec::tree::subtrees_of(grid.tp, cells).len() };
    let local = grid.ep / layout.group * grid.microbatch * seq / layout.cp / layout.tp * hidden;
    FLOAT * (cells.iter().enumerate().map(nodes).sum::<usize>() * local) as u64
}

/// Ranks that `rank` exchanges more with than ballots.
fn peers(layout: &Layout, rank: usize) -> u64 {
    let at = layout.coords(rank);
    let groups = [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Ep].into_iter().flat_map(|axis| axis.members(layout, at));
    let chunks = layout.chunks_of(at.pp).flat_map(|c| [c.saturating_sub(1), (c + 1).min(layout.chunks() - 1)]);
    let line = chunks.map(|c| layout.rank(Coords { pp: layout.chunk_pp(c), ..at }));
    let mirror = Mirrors::of(layout).map(|m| [m.mirror(layout, rank), m.ward(layout, rank)]);
    let all: HashSet<usize> = groups.chain(line).chain(mirror.into_iter().flatten()).collect();
    all.into_iter().filter(|peer| *peer != rank).count() as u64
}

/// The most that two neighbouring buckets take: one is in use, the next one is on its way.
pub(crate) fn two_neighbours(buckets: &[u64]) -> u64 {
    buckets.windows(2).map(|pair| pair[0] + pair[1]).chain(buckets.first().copied()).max().unwrap_or(0)
}

/// The gradients of one chunk as the program goes.
struct Grads<'a> {
    grid: &'a Grid,
    layout: &'a Layout,
    rank: usize,
    plan: &'a ChunkPlan,
    /// Lanes of a unit, and those of its first data cell.
    lanes: usize,
    contexts: usize,
    /// Elements of all hosted cells' gradients that have a leaf per slice; 0: they have none.
    slices: usize,
    spare: Spare,
    /// Accumulators: leaf, lane, bucket (the last one: slices).
    open: HashSet<(Unit, usize, usize)>,
    closed: Vec<Counter<()>>,
    /// Buckets that have a sum, or the gradients of the step.
    sums: HashMap<usize, usize>,
    /// Buckets whose parameters are on their way into a buffer.
    posted: HashSet<Bucket>,
    /// Elements of accumulators and leaves, and the most.
    now: usize,
    most: usize,
    /// Elements that others have sent early of sums that are not built in place, by bucket, and the most: any other exchange
    /// takes them out of the rings.
    early: HashMap<Bucket, usize>,
    early_most: usize,
}

impl<'a> Grads<'a> {
    fn new(grid: &'a Grid, layout: &'a Layout, rank: usize, plan: &'a ChunkPlan) -> Self {
        let contexts = grid.cp / layout.cp;
        let per_slice: usize = plan.buckets.iter().filter(|b| b.bucket.is_per_slice()).map(|b| b.at.len()).sum();
        Self {
            grid,
            layout,
            rank,
            plan,
            lanes: grid.ep / layout.group * contexts,
            contexts,
            slices: if grid.tp > 1 { per_slice * grid.tp / layout.tp } else { 0 },
            spare: Spare::default(),
            open: HashSet::new(),
            closed: plan.buckets.iter().map(|b| Counter::new(b.bucket.leaves(grid))).collect(),
            sums: HashMap::new(),
            posted: HashSet::new(),
            now: 0,
            most: 0,
            early: HashMap::new(),
            early_most: 0,
        }
    }

    fn len(&self, bucket: usize) -> usize {
        self.plan.buckets.get(bucket).map_or(self.slices, |b| b.at.len())
    }

    /// The lanes that add to a bucket.
    fn lanes_of(&self, bucket: Bucket) -> usize {
        if bucket.class() == Class::Experts { self.contexts } else { self.lanes }
    }

    fn begin(&mut self, leaf: Unit, lanes: usize, bucket: usize) {
        (0..lanes).for_each(|lane| self.begin_one(leaf, lane, bucket));
    }

    fn end(&mut self, len: usize) {
        self.spare.give(len);
        self.now -= len;
    }

    /// Something adds to the accumulators of `bucket`.
    fn add(&mut self, leaf: Unit, bucket: Bucket) {
        let Some(at) = self.plan.find(bucket) else { return };
        match bucket.is_per_slice() && self.slices > 0 {
            true => self.begin(leaf, self.lanes_of(bucket), self.plan.buckets.len()),
            false => self.begin(leaf, self.lanes_of(bucket), at),
        }
    }

    fn run(&mut self, instr: &Instr) {
        let leaf = instr.unit.map(|unit| match self.grid.accumulate {
            Accumulate::Local => Unit { mb: 0, ..unit },
            Accumulate::Reduced => unit,
        });
        match (instr.op, leaf) {
            (Op::Compute(Pass::Backward | Pass::BackwardWeight, segment), Some(leaf)) => {
                let buckets = match segment {
                    Segment::Embed => [Some(Bucket::Embed), None],
                    Segment::Qkv(l) | Segment::Attn(l) | Segment::Mlp(l) | Segment::Down(l) => {
                        [Some(Bucket::Layer(l)), None]
                    }
                    Segment::Experts(l) => [Some(Bucket::Experts(l)), Some(Bucket::Shared(l))],
                    _ => [None, None],
                };
                buckets.into_iter().flatten().for_each(|bucket| self.add(leaf, bucket));
            }
            (Op::Compute(Pass::Forward, Segment::Loss(_)), Some(leaf)) => self.add(leaf, Bucket::Head),
            (Op::Collective { value: Value::NormGrads, .. }, Some(leaf)) => self.add(leaf, Bucket::Norms),
            (Op::Collective { value: Value::SliceGrads, .. }, Some(leaf)) if self.slices > 0 => self.sum_slices(leaf),
            (Op::Close { cell, bucket }, Some(leaf)) => self.close(Unit { cell, ..leaf }, bucket),
            (Op::Collective { value: Value::Grads(bucket), exchange, .. }, _) => {
                self.early.remove(&bucket);
                self.sum(exchange, bucket);
            }
            (Op::Post { value: Value::Grads(bucket), exchange, .. }, _) => self.post(exchange, bucket),
            (Op::Post { value: Value::Params(bucket), .. }, _) => {
                self.plan.find(bucket).into_iter().for_each(|at| self.spare.take(self.len(at)));
                self.posted.insert(bucket);
            }
            (Op::Collective { value: Value::Params(bucket), .. }, _)
                if self.layout.zero == 3 && !self.posted.remove(&bucket) =>
            {
                self.plan.find(bucket).into_iter().for_each(|at| self.spare.take(self.len(at)));
            }
            (Op::Release(bucket), _) => {
                self.plan.find(bucket).into_iter().for_each(|at| self.spare.give(self.len(at)));
            }
            (Op::Apply, _) => {
                let totals: Vec<usize> = self.sums.drain().map(|(_, len)| len).collect();
                totals.into_iter().for_each(|len| self.spare.give(len));
            }
            _ => {}
        }
    }

    /// Lane by lane the slices are copied out, then their sums go into the accumulators.
    fn sum_slices(&mut self, leaf: Unit) {
        let slices = self.plan.buckets.len();
        for lane in 0..self.lanes {
            if self.open.remove(&(leaf, lane, slices)) {
                self.end(self.slices);
            }
        }
        let plan = self.plan;
        for (at, bucket) in plan.buckets.iter().enumerate().filter(|(_, b)| b.bucket.is_per_slice()) {
            self.begin(leaf, self.lanes_of(bucket.bucket), at);
        }
    }

    fn close(&mut self, leaf: Unit, bucket: Bucket) {
        let Some(at) = self.plan.find(bucket) else { return };
        let len = self.len(at);
        let place = self.layout.coords(self.rank);
        let contexts = self.layout.context_cells(place.cp, self.grid.cp);
        for lane in 0..self.lanes_of(bucket) {
            self.begin_one(leaf, lane, at);
            self.open.remove(&(leaf, lane, at));
            let cell = match bucket.class() {
                Class::Common => leaf.cell + lane / contexts.len(),
                Class::Experts => leaf.cell / self.grid.ep,
            };
            let node = cell * self.grid.cp + contexts.start + lane % contexts.len();
            for () in self.closed[at].push(node..node + 1, (), |(), ()| {}) {
                self.end(len);
            }
        }
    }

    fn begin_one(&mut self, leaf: Unit, lane: usize, bucket: usize) {
        if self.open.insert((leaf, lane, bucket)) {
            let len = self.len(bucket);
            self.spare.take(len);
            self.now += len;
            self.most = self.most.max(self.now);
        }
    }

    /// Between two ranks with a leaf each the sum is built in the leaf, which was posted.
    fn in_place(&self, exchange: Exchange, bucket: Bucket) -> bool {
        self.layout.ranks_per_host.is_none()
            && exchange == Exchange::AllReduce
            && spec::tree::is_of_two(bucket.leaves(self.grid), &bucket.leaves_of(self.grid, self.layout))
    }

    /// The leaves of the others may come from now on.
    fn post(&mut self, exchange: Exchange, bucket: Bucket) {
        let Some(at) = self.plan.find(bucket).filter(|_| !self.in_place(exchange, bucket)) else { return };
        let (plan, place) = (&self.plan.buckets[at], self.layout.coords(self.rank));
        let nodes = |cells: &Vec<_>| spec::tree::subtrees_of(bucket.leaves(self.grid), cells).len();
        let mut of_holder: Vec<usize> = bucket.leaves_of(self.grid, self.layout).iter().map(nodes).collect();
        of_holder.swap_remove(plan.holders.number(place));
        self.early.insert(bucket, of_holder.iter().sum::<usize>() * plan.part(place).len());
        self.early_most = self.early_most.max(self.early.values().sum());
    }

    /// A sum over the holders, or (`AllGather`) to the replicas.
    fn sum(&mut self, exchange: Exchange, bucket: Bucket) {
        let Some(at) = self.plan.find(bucket) else { return };
        let (plan, place) = (&self.plan.buckets[at], self.layout.coords(self.rank));
        let (len, owned, part) = (plan.at.len(), plan.owned(place).len(), plan.part(place).len());
        if exchange == Exchange::AllGather {
            self.spare.take(owned);
            self.sums.insert(at, owned).into_iter().for_each(|sum| self.spare.give(sum));
            return;
        }
        let leaves = std::mem::replace(&mut self.closed[at], Counter::new(bucket.leaves(self.grid))).into_nodes().len();
        let alone = plan.holders.count == 1 || self.in_place(exchange, bucket);
        let sum = match (alone, exchange) {
            (true, _) => len,
            (false, Exchange::AllReduce) => owned,
            (false, _) => part,
        };
        if alone {
            // The one leaf is the sum.
            self.now -= leaves * len;
        } else {
            self.spare.take(sum);
            (0..leaves).for_each(|_| self.end(len));
        }
        match self.sums.entry(at) {
            Entry::Occupied(_) => self.spare.give(sum),
            Entry::Vacant(none) => {
                none.insert(sum);
            }
        }
    }
}

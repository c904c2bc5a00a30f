//! Lowering: model, grid and layout to one instruction list per rank.

mod pairs;
mod shard;

use std::collections::{HashSet, VecDeque};

use spec::schedule::Turn;
use spec::{Coords, Grid, Layout, Model, Recompute, Run, Unit};

use crate::buckets::{Bucket, slots};
use crate::bytes::Sizes;
use crate::instr::{Axis, Exchange, Instr, Mode, Op, Pass, Program, Segment, Value};
use crate::schedule::{Task, tasks};

/// The program of `rank` for one step of `run`.
pub fn lower(run: &Run, rank: usize, mode: Mode) -> Program {
    lower_parts(&run.model, &run.grid, &run.layout, run.train.seq, rank, mode)
}

/// The programs of all ranks for one step of `run`.
pub fn lower_all(run: &Run, mode: Mode) -> Vec<Program> {
    lower_all_parts(&run.model, &run.grid, &run.layout, run.train.seq, mode)
}

/// [`lower`] without a run file.
pub fn lower_parts(model: &Model, grid: &Grid, layout: &Layout, seq: usize, rank: usize, mode: Mode) -> Program {
    Lowering::new(model, grid, layout, seq, mode).rank(rank)
}

/// [`lower_all`] without a run file.
pub fn lower_all_parts(model: &Model, grid: &Grid, layout: &Layout, seq: usize, mode: Mode) -> Vec<Program> {
    let lowering = Lowering::new(model, grid, layout, seq, mode);
    (0..layout.world()).map(|rank| lowering.rank(rank)).collect()
}

/// What the lists of all ranks share; see [`Lowering::rank`].
pub struct Lowering<'a> {
    model: &'a Model,
    grid: &'a Grid,
    layout: &'a Layout,
    mode: Mode,
    sizes: Sizes,
    /// Exchanges of backward over the tensor axis run beside weight gradients.
    beside: bool,
}

impl<'a> Lowering<'a> {
    /// Prepares the sizes once for all ranks.
    pub fn new(model: &'a Model, grid: &'a Grid, layout: &'a Layout, seq: usize, mode: Mode) -> Self {
        Self { model, grid, layout, mode, sizes: Sizes::new(model, grid, layout, seq), beside: layout.overlaps_tp() }
    }

    /// The program of one rank, in the order of the layout's schedule.
    pub fn rank(&self, rank: usize) -> Program {
        let at = self.layout.coords(rank);
        self.rank_in_order(rank, &tasks(self.layout, at.pp, &slots(self.grid, self.layout, at)))
    }

    /// The program of one rank that does `tasks` in the order given.
    pub fn rank_in_order(&self, rank: usize, tasks: &[Task]) -> Program {
        let at = self.layout.coords(rank);
        let reading = shard::Reading::new(self, tasks);
        let mut list = List {
            with: self,
            at,
            chunk: 0,
            unit: None,
            reading,
            posted: None,
            owed: VecDeque::new(),
            instrs: Vec::with_capacity(self.length(tasks)),
        };
        let mut met = HashSet::new();
        let mut begins = Vec::with_capacity(tasks.len() + 1);
        for (number, task) in tasks.iter().enumerate() {
            let Task { turn, chunk, unit } = *task;
            begins.push(list.instrs.len());
            (list.chunk, list.unit) = (chunk, Some(unit));
            if turn == Turn::Forward && list.works() && met.insert(unit) {
                list.push(Op::Load);
            }
            list.begin(number, task);
            match turn {
                Turn::Forward => list.forward(),
                _ if self.mode == Mode::Eval => {}
                Turn::Backward => list.backward(Pass::Backward),
                Turn::BackwardInput => list.backward(Pass::BackwardInput),
                Turn::BackwardWeight => list.weights(),
            }
            list.end();
        }
        begins.push(list.instrs.len());
        if self.layout.pairs_tp() && self.mode == Mode::Train {
            list.instrs = in_pairs(tasks, &begins, &list.instrs);
        }
        list.unit = None;
        list.step_end();
        Program { rank, instrs: list.instrs }
    }

    /// At least the length of the list of `tasks`, but for a few instructions, so that it grows in place.
    fn length(&self, tasks: &[Task]) -> usize {
        let last = self.layout.chunks() - 1;
        let of_task = |task: &Task| {
            let head = match task.turn {
                Turn::Forward => self.mode == Mode::Eval,
                Turn::Backward | Turn::BackwardInput => self.mode == Mode::Train,
                Turn::BackwardWeight => false,
            };
            let blocks = if head && task.chunk == last { 3 * self.sizes.blocks() } else { 0 };
            self.layout.stages[task.chunk].len() * PER_LAYER + blocks + PER_TASK
        };
        let buckets: usize = (0..self.layout.chunks()).map(|c| self.sizes.buckets(c).count()).max().unwrap_or(0);
        tasks.iter().map(of_task).sum::<usize>() + (8 + 3 * buckets) * self.layout.vpp
    }
}

/// The lists of tasks, which begin at `begins`: a backward and the forward that follows it in turns.
fn in_pairs(tasks: &[Task], begins: &[usize], instrs: &[Instr]) -> Vec<Instr> {
    let of = |number: usize| &instrs[begins[number]..begins[number + 1]];
    let (mut out, mut number) = (Vec::with_capacity(2 * instrs.len()), 0);
    while number < tasks.len() {
        let turns = tasks[number..].iter().take(2).map(|task| task.turn);
        if turns.eq([Turn::Backward, Turn::Forward]) {
            out.extend(pairs::in_turns(of(number), of(number + 1)));
            number += 2;
        } else {
            out.extend_from_slice(of(number));
            number += 1;
        }
    }
    out
}

/// Most instructions of a layer in one direction, its recomputation included.
const PER_LAYER: usize = 34;
/// Most instructions around the layers of a task, without the token blocks.
const PER_TASK: usize = 16;

/// The list of one rank as it grows; `chunk` and `unit` are those of the task at hand.
struct List<'a> {
    with: &'a Lowering<'a>,
    at: Coords,
    chunk: usize,
    unit: Option<Unit>,
    reading: shard::Reading,
    /// The sum over the cells that has left last and is not taken yet, where sums are taken early.
    posted: Option<(usize, Option<Unit>, Bucket)>,
    /// Weight parts whose input parts are done, for exchanges to run beside.
    owed: VecDeque<Segment>,
    instrs: Vec<Instr>,
}

impl List<'_> {
    fn push(&mut self, op: Op) {
        self.instrs.push(Instr { op, chunk: self.chunk, unit: self.unit });
    }

    fn forward_of(&mut self, segment: Segment) {
        self.push(Op::Compute(Pass::Forward, segment));
    }

    fn backward_of(&mut self, segment: Segment) {
        self.push(Op::Compute(Pass::Backward, segment));
    }

    fn collective(&mut self, exchange: Exchange, value: Value, axis: Axis, bytes: u64) {
        self.push(Op::Collective { exchange, value, axis, bytes });
    }

    /// Sequence slices to whole sequences.
    fn gather(&mut self, value: Value) {
        if !self.owed.is_empty() {
            self.post_rows(Exchange::AllGather, value);
            self.pay(1);
        }
        self.collective(Exchange::AllGather, value, Axis::Tp, self.with.sizes.rows());
    }

    /// An exchange over the tensor axis leaves.
    fn post_rows(&mut self, exchange: Exchange, value: Value) {
        self.push(Op::Post { exchange, value, axis: Axis::Tp });
    }

    /// At most `count` of the weight parts that are owed.
    fn pay(&mut self, count: usize) {
        for segment in self.owed.drain(..count.min(self.owed.len())).collect::<Vec<_>>() {
            self.push(Op::Compute(Pass::BackwardWeight, segment));
        }
    }

    /// Keys and values of the own context cells to those of all.
    fn gather_keys(&mut self, layer: usize) {
        self.collective(Exchange::AllGather, Value::KeyValues(layer), Axis::Cp, self.with.sizes.keys());
    }

    /// Partial sums over the tensor cells to sequence slices.
    fn scatter(&mut self, value: Value) {
        self.collective(Exchange::ReduceScatter, value, Axis::Tp, self.with.sizes.partial(self.at.tp));
    }

    /// The same of the input gradients of a segment, beside the first `count` of the weight parts that are owed.
    fn scatter_beside(&mut self, count: usize) {
        if !self.owed.is_empty() {
            self.post_rows(Exchange::ReduceScatter, Value::GradPartial);
            self.pay(count);
        }
        self.scatter(Value::GradPartial);
    }

    /// Rows of experts between the ranks of a group, where there are several.
    fn travel(&mut self, value: Value) {
        if self.with.sizes.travels() {
            self.collective(Exchange::AllToAll, value, Axis::Ep, self.with.sizes.travel(value));
        }
    }

    fn is_last(&self) -> bool {
        self.chunk + 1 == self.with.layout.chunks()
    }

    /// The rank of `chunk` at this data, context and tensor position.
    fn rank_of(&self, chunk: usize) -> usize {
        let layout = self.with.layout;
        layout.rank(Coords { pp: layout.chunk_pp(chunk), ..self.at })
    }

    /// A message to the rank of `chunk`.
    fn send(&mut self, value: Value, chunk: usize, bytes: u64) {
        let to = self.rank_of(chunk);
        self.push(Op::Send { value, to, bytes: self.between(to, bytes) });
    }

    /// `bytes`, unless `peer` is this rank: what stays on a rank is no message.
    fn between(&self, peer: usize, bytes: u64) -> u64 {
        if peer == self.with.layout.rank(self.at) { 0 } else { bytes }
    }

    /// A message from the rank of `chunk`.
    fn recv(&mut self, value: Value, chunk: usize, bytes: u64) {
        let from = self.rank_of(chunk);
        self.push(Op::Recv { value, from, bytes: self.between(from, bytes) });
    }

    fn forward(&mut self) {
        let with = self.with;
        if self.chunk == 0 {
            self.bucket(Bucket::Embed, |list| {
                list.forward_of(Segment::Embed);
                list.collective(Exchange::ReduceScatter, Value::Partial, Axis::Tp, with.sizes.partial_embed());
            });
        } else if self.works() {
            self.recv(Value::Activation, self.chunk - 1, with.sizes.activation(with.mode));
        }
        for layer in with.layout.stages[self.chunk].clone() {
            self.bucket(Bucket::Layer(layer), |list| list.forward_layer(layer));
            if with.model.moe.is_some() {
                self.experts(layer, |list| {
                    list.forward_of(Segment::Route(layer));
                    list.travel(Value::Dispatch(layer));
                    list.forward_of(Segment::Experts(layer));
                    list.travel(Value::Combine(layer));
                    list.forward_of(Segment::Residual(layer));
                    list.drop_layer(layer);
                });
            }
        }
        if self.works() && with.sizes.has_router_counts(with.mode) {
            self.collective(Exchange::AllGather, Value::RouterCounts, Axis::Tp, with.sizes.router_counts(self.chunk));
            if with.sizes.has_context() {
                let bytes = with.sizes.router_counts_context(self.chunk);
                self.collective(Exchange::AllGather, Value::RouterCounts, Axis::Cp, bytes);
            }
            if with.sizes.travels() {
                let bytes = with.sizes.router_counts_ep(self.chunk);
                self.collective(Exchange::AllGather, Value::RouterCounts, Axis::Ep, bytes);
            }
        }
        if !self.is_last() && self.works() {
            self.send(Value::Activation, self.chunk + 1, with.sizes.activation(with.mode));
        } else if self.is_last() && with.mode == Mode::Eval {
            self.bucket(Bucket::Head, Self::head);
        }
    }

    /// The layer's attention and, if it is dense, its feed-forward.
    fn forward_layer(&mut self, layer: usize) {
        self.forward_of(Segment::AttnNorm(layer));
        self.gather(Value::Rows);
        if self.with.sizes.has_context() {
            self.forward_of(Segment::Qkv(layer));
            self.gather_keys(layer);
        }
        self.forward_of(Segment::Attn(layer));
        let recompute = self.recompute(layer);
        if recompute == Recompute::Selective {
            self.push(Op::Drop(Segment::Attn(layer)));
        }
        self.scatter(Value::Partial);
        self.forward_of(Segment::MlpNorm(layer));
        if self.with.model.moe.is_none() {
            self.gather(Value::Rows);
            self.forward_of(Segment::Mlp(layer));
            self.scatter(Value::Partial);
            self.forward_of(Segment::Residual(layer));
            self.drop_layer(layer);
        }
    }

    /// Lets go of what the layer kept, if it will be computed again.
    fn drop_layer(&mut self, layer: usize) {
        if self.recompute(layer) == Recompute::Full {
            self.push(Op::Drop(Segment::Residual(layer)));
        }
    }

    /// What of `layer` is computed again; nothing where there is no backward.
    fn recompute(&self, layer: usize) -> Recompute {
        if self.with.mode == Mode::Train { self.with.layout.recompute[layer] } else { Recompute::None }
    }

    /// The forward of a layer's attention a second time, out of the layer's input; `pass` is the attention's.
    fn attention_again(&mut self, layer: usize, pass: Pass) {
        self.push(Op::Compute(Pass::Recompute, Segment::AttnNorm(layer)));
        self.gather(Value::Rows);
        if self.with.sizes.has_context() {
            self.push(Op::Compute(Pass::Recompute, Segment::Qkv(layer)));
            self.gather_keys(layer);
        }
        self.push(Op::Compute(pass, Segment::Attn(layer)));
    }

    /// Final norm, logits and loss. In training the loss leaves its gradient, hence it opens the backward.
    fn head(&mut self) {
        self.forward_of(Segment::HeadNorm);
        self.gather(Value::Rows);
        for block in 0..self.with.sizes.blocks() {
            self.forward_of(Segment::Logits(block));
            self.collective(Exchange::AllGather, Value::Stats, Axis::Tp, self.with.sizes.stats(block));
            self.forward_of(Segment::Loss(block));
        }
    }

    /// The way back; `pass` is that of attention and feed-forward: whole, or the input part.
    fn backward(&mut self, pass: Pass) {
        let with = self.with;
        if self.is_last() {
            self.bucket(Bucket::Head, |list| {
                list.head();
                list.scatter(Value::GradPartial);
                list.backward_of(Segment::HeadNorm);
            });
            self.complete(Bucket::Head);
        } else if self.works() {
            self.recv(Value::ActivationGrad, self.chunk + 1, with.sizes.activation(with.mode));
        }
        for layer in with.layout.stages[self.chunk].clone().rev() {
            // The attention that is computed again leaves the rows of the experts, which come before its own backward.
            let again = self.recompute(layer) == Recompute::Full;
            if again {
                self.open(Bucket::Layer(layer));
                self.if_works(|list| list.layer_again(layer));
            }
            if with.model.moe.is_some() {
                self.experts(layer, |list| {
                    if again {
                        list.travel(Value::Dispatch(layer));
                        list.push(Op::Compute(Pass::RecomputeKept, Segment::Experts(layer)));
                    }
                    list.travel(Value::DispatchGrad(layer));
                    list.backward_of(Segment::Experts(layer));
                    list.travel(Value::CombineGrad(layer));
                    list.backward_of(Segment::Route(layer));
                });
            }
            if !again {
                self.open(Bucket::Layer(layer));
            }
            self.if_works(|list| list.backward_layer(pass, layer));
            self.shut(Bucket::Layer(layer));
            if pass == Pass::Backward {
                self.complete(Bucket::Layer(layer));
            }
        }
        if self.works() {
            let norms = with.sizes.norm_grads(self.chunk, self.at.tp);
            self.collective(Exchange::AllReduce, Value::NormGrads, Axis::Tp, norms);
            if self.chunk == 0 {
                self.gather(Value::GradRows);
                self.backward_of(Segment::Embed);
            } else if !self.beside(pass) {
                self.send(Value::ActivationGrad, self.chunk - 1, with.sizes.activation(with.mode));
            }
        }
        if self.chunk == 0 {
            self.complete(Bucket::Embed);
        }
        if with.sizes.has_slice_grads() {
            if self.works() && with.grid.completes(self.unit.expect("a task has a unit")) {
                let bytes = with.sizes.slice_grads(self.chunk, self.at.tp);
                self.collective(Exchange::AllReduce, Value::SliceGrads, Axis::Tp, bytes);
            }
            for layer in with.layout.stages[self.chunk].clone().rev() {
                shard::feed_forward(with.model, layer).for_each(|bucket| self.complete(bucket));
            }
        }
        self.complete(Bucket::Norms);
    }

    /// The forward of a layer a second time, for what its backward reads; of experts up to the router, whose choice was kept.
    fn layer_again(&mut self, layer: usize) {
        self.attention_again(layer, Pass::Recompute);
        self.scatter(Value::Partial);
        self.push(Op::Compute(Pass::Recompute, Segment::MlpNorm(layer)));
        if self.with.model.moe.is_some() {
            self.push(Op::Compute(Pass::Recompute, Segment::Route(layer)));
        } else {
            self.gather(Value::Rows);
            self.push(Op::Compute(Pass::RecomputeKept, Segment::Mlp(layer)));
        }
    }

    /// True if a backward of one piece is lowered in its two parts, so that exchanges over the tensor axis run beside the
    /// weight part. (A schedule that has two parts puts the second one where nothing else is to do.)
    fn beside(&self, pass: Pass) -> bool {
        self.with.beside && pass == Pass::Backward
    }

    /// The backward of a layer. In two parts the sum of the input gradients of a segment leaves before the weight gradients
    /// of its column-parallel products, and the gather of what the norm makes of it before those of its row-parallel one.
    fn backward_layer(&mut self, pass: Pass, layer: usize) {
        let beside = self.beside(pass);
        let pass = if beside { Pass::BackwardInput } else { pass };
        let (recompute, dense) = (self.recompute(layer), self.with.model.moe.is_none());
        if dense {
            self.gather(Value::GradRows);
            self.push(Op::Compute(pass, Segment::Mlp(layer)));
            self.owe(beside, [Segment::Mlp(layer), Segment::Down(layer)]);
            self.scatter_beside(1);
        }
        self.backward_of(Segment::MlpNorm(layer));
        let leaves = !self.owed.is_empty();
        if leaves {
            self.post_rows(Exchange::AllGather, Value::GradRows);
        }
        if recompute == Recompute::Selective {
            self.attention_again(layer, Pass::RecomputeKept);
        }
        self.pay(1);
        self.gather(Value::GradRows);
        if self.with.sizes.has_context() {
            self.gather_keys(layer);
            self.push(Op::Compute(pass, Segment::Attn(layer)));
            let bytes = self.with.sizes.key_grads(self.at.cp);
            self.collective(Exchange::ReduceScatter, Value::KeyValueGrads(layer), Axis::Cp, bytes);
            self.push(Op::Compute(pass, Segment::Qkv(layer)));
        } else {
            self.push(Op::Compute(pass, Segment::Attn(layer)));
        }
        self.owe(beside, [Segment::Qkv(layer), Segment::Attn(layer)]);
        let first = layer == self.with.layout.stages[self.chunk].start;
        // Experts begin their backward with the slices.
        let gathers = if first { self.chunk == 0 } else { dense };
        self.scatter_beside(if gathers || first { 1 } else { 2 });
        self.backward_of(Segment::AttnNorm(layer));
        if beside && gathers {
            self.post_rows(Exchange::AllGather, Value::GradRows);
        } else if beside && first {
            self.send(Value::ActivationGrad, self.chunk - 1, self.with.sizes.activation(self.with.mode));
        }
        self.pay(1);
    }

    /// The weight parts of what has just been done in its input part, in the order in which exchanges find them.
    fn owe(&mut self, beside: bool, segments: [Segment; 2]) {
        if beside {
            self.owed.extend(segments);
        }
    }

    /// The weight parts of attention and feed-forward. Gradients of experts, norms, embedding and output projection are added
    /// by the input part: experts share their rows' products, the others cost little, and logits never exist for longer than a block.
    fn weights(&mut self) {
        for layer in self.with.layout.stages[self.chunk].clone().rev() {
            let dense =
                [Segment::Mlp(layer), Segment::Down(layer)].into_iter().filter(|_| self.with.model.moe.is_none());
            if self.works() {
                self.owed.extend(dense.chain([Segment::Attn(layer), Segment::Qkv(layer)]));
                self.pay(4);
            }
            self.complete(Bucket::Layer(layer));
        }
    }

    /// From the last unit to the new parameters.
    fn step_end(&mut self) {
        let Lowering { layout, sizes, mode, .. } = self.with;
        if *mode == Mode::Eval {
            self.chunk = 0;
            self.collective(Exchange::AllGather, Value::Ballot, Axis::World, sizes.ballot_eval(self.at));
            return;
        }
        self.sums();
        self.swap_tied();
        self.chunk = 0;
        if layout.mirrored() {
            self.collective(Exchange::Shift, Value::MirrorGrads, Axis::World, sizes.mirror_grads(self.at));
        }
        self.collective(Exchange::AllGather, Value::Ballot, Axis::World, sizes.ballot(self.at));
        self.push(Op::Vote);
        for chunk in layout.chunks_of(self.at.pp) {
            self.chunk = chunk;
            self.push(Op::Apply);
        }
        self.updated_parameters();
    }
}

#[cfg(test)]
mod tests;

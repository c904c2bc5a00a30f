//! The data axis: parameters gathered for their use, gradients on their way to their owners.

use std::collections::HashMap;

use spec::schedule::Turn;
use spec::{Layout, Model, Recompute, Reshard};

use super::{List, Lowering};
use crate::buckets::{Bucket, head_parameters, leave_early, rounds};
use crate::instr::{Axis, Exchange, Mode, Op, Value};
use crate::schedule::Task;
use crate::state::tied_apart;

/// The buckets whose parameters `task` reads, in order, without [`Bucket::Norms`], which all of it reads.
fn reads(model: &Model, layout: &Layout, mode: Mode, task: &Task) -> Vec<Bucket> {
    let chunk = task.chunk;
    let experts = |l| feed_forward(model, l);
    let layers = layout.stages[chunk].clone().flat_map(|l| std::iter::once(Bucket::Layer(l)).chain(experts(l)));
    let head = (chunk + 1 == layout.chunks()).then(|| head_parameters(model, layout));
    match task.turn {
        Turn::Forward => {
            let embed = (chunk == 0).then_some(Bucket::Embed);
            // In training the head opens the backward.
            embed.into_iter().chain(layers).chain(head.filter(|_| mode == Mode::Eval)).collect()
        }
        Turn::Backward | Turn::BackwardInput if mode == Mode::Train => {
            let of_layer = |l| {
                let (mut experts, layer): (Vec<_>, _) = (experts(l).collect(), Bucket::Layer(l));
                experts.insert(if layout.recompute[l] == Recompute::Full { 0 } else { experts.len() }, layer);
                experts
            };
            head.into_iter().chain(layout.stages[chunk].clone().rev().flat_map(of_layer)).collect()
        }
        // Gradients of weights need activations, not weights.
        _ => Vec::new(),
    }
}

/// The buckets of a layer's experts.
pub(super) fn feed_forward(model: &Model, layer: usize) -> impl Iterator<Item = Bucket> + use<> {
    let shared = model.moe.as_ref().filter(|moe| moe.shared_ffn > 0).map(|_| Bucket::Shared(layer));
    shared.into_iter().chain(model.moe.as_ref().map(|_| Bucket::Experts(layer)))
}

/// Which parameters are gathered and freed in the task at hand.
pub(super) struct Reading {
    /// The buckets of the task in the order of their use, and how many of them came.
    order: Vec<Bucket>,
    came: usize,
    /// The task's place among all.
    task: usize,
    /// First and last task that uses a bucket of a chunk; empty: every task gathers and frees.
    kept: HashMap<(usize, Bucket), (usize, usize)>,
}

impl Reading {
    pub(super) fn new(with: &Lowering, tasks: &[Task]) -> Self {
        let mut kept = HashMap::new();
        if with.mode == Mode::Train && with.layout.reshard == Reshard::AfterBackward {
            for (number, task) in tasks.iter().enumerate() {
                let read = reads(with.model, with.layout, with.mode, task);
                let norms = (!read.is_empty()).then_some(Bucket::Norms);
                for bucket in read.into_iter().chain(norms) {
                    kept.entry((task.chunk, bucket)).or_insert((number, number)).1 = number;
                }
            }
        }
        Self { order: Vec::new(), came: 0, task: 0, kept }
    }
}

impl List<'_> {
    /// False in a slot without a data cell: see [`crate::buckets::slots`].
    pub(super) fn works(&self) -> bool {
        self.unit.is_none_or(|unit| self.with.layout.cells[self.at.dp].contains(&unit.cell))
    }

    fn sharded_parameters(&self) -> bool {
        self.with.layout.zero == 3
    }

    /// Opens a task: the parameters that it reads first are gathered.
    pub(super) fn begin(&mut self, number: usize, task: &Task) {
        if !self.sharded_parameters() {
            return;
        }
        self.reading.task = number;
        self.reading.came = 0;
        self.reading.order = reads(self.with.model, self.with.layout, self.with.mode, task);
        if let Some(&first) = self.reading.order.first() {
            self.post_parameters(Bucket::Norms);
            self.post_parameters(first);
            self.gather_parameters(Bucket::Norms);
        }
    }

    /// Closes it.
    pub(super) fn end(&mut self) {
        if self.sharded_parameters() && !self.reading.order.is_empty() {
            self.release(Bucket::Norms);
        }
    }

    /// `work`, which reads the parameters of `bucket`, if this rank has the unit. The next bucket is on its way meanwhile.
    pub(super) fn bucket(&mut self, bucket: Bucket, work: impl FnOnce(&mut Self)) {
        let bucket = if bucket == Bucket::Head { head_parameters(self.with.model, self.with.layout) } else { bucket };
        self.open(bucket);
        self.if_works(work);
        self.shut(bucket);
    }

    /// `work`, which reads the experts of a layer, likewise.
    pub(super) fn experts(&mut self, layer: usize, work: impl FnOnce(&mut Self)) {
        let buckets = || feed_forward(self.with.model, layer);
        let (buckets, ends) = (buckets(), buckets());
        buckets.for_each(|bucket| self.open(bucket));
        self.if_works(work);
        ends.for_each(|bucket| self.shut(bucket));
    }

    /// Before the work that reads `bucket`; others may be opened and shut inside.
    pub(super) fn open(&mut self, bucket: Bucket) {
        if self.sharded_parameters() {
            debug_assert_eq!(self.reading.order[self.reading.came], bucket);
            self.reading.came += 1;
            self.gather_parameters(bucket);
            if let Some(next) = self.reading.order.get(self.reading.came) {
                self.post_parameters(*next);
            }
        }
    }

    /// After it.
    pub(super) fn shut(&mut self, bucket: Bucket) {
        if self.sharded_parameters() {
            self.release(bucket);
        }
    }

    pub(super) fn if_works(&mut self, work: impl FnOnce(&mut Self)) {
        if self.works() {
            work(self);
        }
    }

    /// The task at hand gathers the parameters of `bucket`.
    fn gathers(&self, bucket: Bucket) -> bool {
        let kept = self.reading.kept.get(&(self.chunk, bucket));
        kept.is_none_or(|(first, _)| *first == self.reading.task)
    }

    fn post_parameters(&mut self, bucket: Bucket) {
        // Over hosts a gather has two rounds, which need all members.
        if self.gathers(bucket) && self.with.layout.ranks_per_host.is_none() {
            self.post(Exchange::AllGather, Value::Params(bucket), Axis::shard(bucket.class()));
        }
    }

    fn gather_parameters(&mut self, bucket: Bucket) {
        if self.gathers(bucket) {
            self.params(bucket);
        }
    }

    fn post(&mut self, exchange: Exchange, value: Value, axis: Axis) {
        if axis.size(self.with.layout) > 1 {
            self.push(Op::Post { exchange, value, axis });
        }
    }

    fn params(&mut self, bucket: Bucket) {
        let bytes = self.with.sizes.params(self.chunk, bucket, self.at);
        self.collective(Exchange::AllGather, Value::Params(bucket), Axis::shard(bucket.class()), bytes);
    }

    fn release(&mut self, bucket: Bucket) {
        let kept = self.reading.kept.get(&(self.chunk, bucket));
        if kept.is_none_or(|(_, last)| *last == self.reading.task) {
            self.push(Op::Release(bucket));
        }
    }

    /// The unit has added to the gradient of `bucket`: the end of a cell's leaf. After the last one (where gradients leave
    /// early: of the microbatch) they leave. Their sum over the cells is taken when the next bucket is complete, or else at
    /// the end of the step.
    pub(super) fn complete(&mut self, bucket: Bucket) {
        let Lowering { grid, layout, .. } = self.with;
        let unit = self.unit.expect("a task has a unit");
        let early = leave_early(grid, layout);
        let slot = (unit.cell - layout.cells[self.at.dp].start) / grid.ep + 1;
        let own = grid.unit_cells(layout.cells[self.at.dp].clone()).count();
        let last = if early { slot == rounds(grid, layout) } else { slot == own && grid.completes(unit) };
        self.take_posted();
        if self.works() && grid.completes(unit) {
            self.push(Op::Close { cell: unit.cell, bucket });
        }
        if last {
            let exchange = if early || layout.zero > 0 { Exchange::ReduceScatter } else { Exchange::AllReduce };
            let axis = Axis::holders(bucket.class());
            self.post(exchange, Value::Grads(bucket), axis);
            match axis.size(layout) {
                1 if early => self.sum(bucket, exchange),
                _ => self.posted = early.then_some((self.chunk, self.unit, bucket)),
            }
        }
    }

    /// Takes the sum that has left last, where that is done early.
    fn take_posted(&mut self) {
        let Some((chunk, unit, bucket)) = self.posted.take() else { return };
        let here = (self.chunk, self.unit);
        (self.chunk, self.unit) = (chunk, unit);
        self.sum(bucket, Exchange::ReduceScatter);
        (self.chunk, self.unit) = here;
    }

    fn sum(&mut self, bucket: Bucket, exchange: Exchange) {
        let class = bucket.class();
        let axis = if exchange == Exchange::AllGather { Axis::replica(class) } else { Axis::holders(class) };
        let bytes = self.with.sizes.grads(self.chunk, bucket, self.at, exchange);
        self.collective(exchange, Value::Grads(bucket), axis, bytes);
    }

    /// The sums over the data cells that have not left yet; then, where shards have replicas, to these.
    pub(super) fn sums(&mut self) {
        self.take_posted();
        let Lowering { grid, layout, sizes, .. } = self.with;
        for chunk in layout.chunks_of(self.at.pp) {
            self.chunk = chunk;
            for bucket in sizes.buckets(chunk) {
                match (leave_early(grid, layout), layout.zero) {
                    (false, 0) => self.sum(bucket, Exchange::AllReduce),
                    (false, _) => self.sum(bucket, Exchange::ReduceScatter),
                    (true, _) => {}
                }
            }
        }
        if layout.zero == 0 && !leave_early(grid, layout) {
            return;
        }
        for chunk in layout.chunks_of(self.at.pp) {
            self.chunk = chunk;
            let replicated = |bucket: &Bucket| layout.holders_of(bucket.class()).replicas() > 1;
            sizes.buckets(chunk).filter(replicated).for_each(|bucket| self.sum(bucket, Exchange::AllGather));
        }
    }

    /// The sums of the two uses of a tied embedding, between owners of the same elements.
    pub(super) fn swap_tied(&mut self) {
        let Lowering { model, layout, sizes, .. } = self.with;
        if !tied_apart(model, layout) {
            return;
        }
        // Both chunks may lie on this rank: it sends before it receives.
        let last = layout.chunks() - 1;
        let here = |(here, _): &(usize, usize)| layout.chunk_pp(*here) == self.at.pp;
        let uses: Vec<_> = [(0, last), (last, 0)].into_iter().filter(here).collect();
        for &(here, there) in &uses {
            self.chunk = here;
            self.send(Value::TiedGrads, there, sizes.tied_grads(here, self.at));
        }
        for &(here, there) in &uses {
            self.chunk = here;
            self.recv(Value::TiedGrads, there, sizes.tied_grads(here, self.at));
        }
    }

    /// Updated parameters to all that keep them whole.
    pub(super) fn updated_parameters(&mut self) {
        let Lowering { layout, sizes, .. } = self.with;
        if !matches!(layout.zero, 1 | 2) {
            return;
        }
        for chunk in layout.chunks_of(self.at.pp) {
            self.chunk = chunk;
            for bucket in sizes.buckets(chunk).filter(|b| sizes.has_parameters(chunk, *b)) {
                self.params(bucket);
            }
        }
    }
}

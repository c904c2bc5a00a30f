//! The law of one unit on one chunk: which segments, the exchanges that follow from what each segment reads and leaves,
//! and what must come before what.
//!
//! The stream of a unit is always in one [`Form`]. Wherever a segment leaves another form
//! than the next one reads, exactly one exchange stands between them. (Sequence parallelism:
//! Korthikanti et al., arXiv 2205.05198, section 4.2.2.)

use spec::{Accumulate, CLASSES, Class, Coords, Grid, Layout, Model, Recompute};

use super::touch::order;
use crate::buckets::Bucket;
use crate::bytes::Sizes;
use crate::instr::{Axis, Exchange, Mode, Op, Pass, Segment, Value};

/// How the rows of a unit lie on the tensor positions.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Form {
    /// There are none.
    Nothing,
    /// Each position has its sequence slices.
    Slices,
    /// Each position has all rows.
    Whole,
    /// Each position has a part of the sum of all rows.
    Partial,
    /// Queries of the own context cells, with their keys; backward, the gradients of both.
    OwnKeys,
    /// The same with the keys of all context cells; backward, with a part of the sum of their gradients.
    AllKeys,
}

/// What a segment reads and leaves; `context`: there are context cells.
fn forms(pass: Pass, segment: Segment, context: bool) -> (Form, Form) {
    use Form::{AllKeys, Nothing, OwnKeys, Partial, Slices, Whole};
    match (pass, segment) {
        (Pass::Forward, Segment::Qkv(_)) => (Whole, OwnKeys),
        (Pass::Forward, Segment::Attn(_)) if context => (AllKeys, Partial),
        (_, Segment::Attn(_)) if context => (Whole, AllKeys),
        (_, Segment::Qkv(_)) => (OwnKeys, Partial),
        (Pass::Forward, Segment::Embed) => (Nothing, Partial),
        (_, Segment::Embed) => (Whole, Nothing),
        (_, Segment::AttnNorm(_) | Segment::MlpNorm(_) | Segment::Residual(_) | Segment::HeadNorm) => (Slices, Slices),
        (_, Segment::Route(_) | Segment::Experts(_)) => (Slices, Slices),
        (_, Segment::Attn(_) | Segment::Mlp(_) | Segment::Down(_)) => (Whole, Partial),
        (_, Segment::Logits(_) | Segment::Loss(_)) => (Whole, Whole),
    }
}

/// One thing that a unit does on a chunk.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Due {
    /// The operation; the rank of a message is not filled in.
    pub op: Op,
    /// For a message, the chunk at its other end.
    pub chunk: usize,
    /// The accumulator of weight gradients that it adds to.
    pub adds: Option<Accumulator>,
    /// The entries of the law that must be done before, by index.
    pub after: Vec<usize>,
}

/// Weight gradients of a chunk that are complete or not together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Accumulator {
    /// The input use of the embedding.
    Embed,
    /// Matrices of a layer's attention.
    Attn(usize),
    /// Matrices of a layer's feed-forward.
    Mlp(usize),
    /// Experts of a layer, shared and routed, which backward adds to whole.
    Experts(usize),
    /// All norms (and routers) of the chunk.
    Norms,
    /// The output projection.
    Head,
}

impl Accumulator {
    /// True if it is part of `bucket`.
    pub fn is_of(self, bucket: Bucket) -> bool {
        match self {
            Self::Embed => bucket == Bucket::Embed,
            Self::Attn(layer) | Self::Mlp(layer) => bucket == Bucket::Layer(layer),
            Self::Experts(layer) => [Bucket::Shared(layer), Bucket::Experts(layer)].contains(&bucket),
            Self::Norms => bucket == Bucket::Norms,
            Self::Head => bucket == Bucket::Head,
        }
    }
}

/// All that a unit does on a chunk, in the order of lowering. Any order in which each entry comes after those that it
/// names is as good.
#[derive(Debug, Clone)]
pub(super) struct Law {
    /// The entries.
    pub dues: Vec<Due>,
    /// Each accumulator with the number of entries that add to it, ascending.
    pub accumulators: Vec<(Accumulator, usize)>,
}

impl Law {
    fn new(mut dues: Vec<Due>) -> Self {
        order(&mut dues);
        let mut accumulators: Vec<(Accumulator, usize)> = Vec::new();
        for to in dues.iter().filter_map(|due| due.adds) {
            match accumulators.iter_mut().find(|(known, _)| *known == to) {
                Some((_, count)) => *count += 1,
                None => accumulators.push((to, 1)),
            }
        }
        accumulators.sort_unstable();
        Self { dues, accumulators }
    }
}

/// The laws of all chunks.
pub(super) struct Laws {
    /// By chunk x context position x tensor position: backward in one part, and in two.
    laws: Vec<[Law; 2]>,
    cp: usize,
    tp: usize,
}

impl Laws {
    pub fn new(model: &Model, sizes: &Sizes, layout: &Layout, mode: Mode) -> Self {
        let each = |chunk| {
            let of = move |(cp, tp), split| Law::new(Stream::of(model, sizes, layout, mode, chunk, (cp, tp), split));
            let positions = (0..layout.cp).flat_map(|cp| (0..layout.tp).map(move |tp| (cp, tp)));
            positions.map(move |at| [of(at, false), of(at, true)])
        };
        Self { laws: (0..layout.chunks()).flat_map(each).collect(), cp: layout.cp, tp: layout.tp }
    }

    /// All that a unit does on `chunk` at a context and tensor position, there and back; its backward in one part, or in
    /// two.
    pub fn of(&self, chunk: usize, at: Coords) -> &[Law; 2] {
        &self.laws[(chunk * self.cp + at.cp) * self.tp + at.tp]
    }
}

/// The stream of one unit as it goes through a chunk.
struct Stream<'a> {
    sizes: &'a Sizes,
    cp: usize,
    tp: usize,
    form: Form,
    /// It is the gradient that flows.
    back: bool,
    /// Weight gradients of matrices come at the end.
    split: bool,
    last: Option<Segment>,
    dues: Vec<Due>,
}

impl<'a> Stream<'a> {
    fn of(
        model: &Model,
        sizes: &'a Sizes,
        layout: &Layout,
        mode: Mode,
        chunk: usize,
        (cp, tp): (usize, usize),
        split: bool,
    ) -> Vec<Due> {
        let mut s = Stream { sizes, cp, tp, form: Form::Nothing, back: false, split, last: None, dues: Vec::new() };
        let layers = layout.stages[chunk].clone();
        let (is_first, is_last) = (chunk == 0, chunk + 1 == layout.chunks());
        let bytes = sizes.activation(mode);
        if is_first {
            s.pass(Pass::Forward, Segment::Embed);
        } else {
            s.recv(Value::Activation, chunk - 1, bytes);
        }
        let again = |l: usize| if mode == Mode::Train { layout.recompute[l] } else { Recompute::None };
        for l in layers.clone() {
            let inputs = sizes.has_context().then_some(Segment::Qkv(l));
            let before = [Segment::AttnNorm(l)].into_iter().chain(inputs);
            for segment in before.chain([Segment::Attn(l), Segment::MlpNorm(l)]) {
                s.pass(Pass::Forward, segment);
                if let (Recompute::Selective, Segment::Attn(_)) = (again(l), segment) {
                    s.push(Op::Drop(segment), 0, None);
                }
            }
            if model.moe.is_some() {
                s.pass(Pass::Forward, Segment::Route(l));
                s.travel(Value::Dispatch(l), None);
                s.pass(Pass::Forward, Segment::Experts(l));
                s.travel(Value::Combine(l), None);
            } else {
                s.pass(Pass::Forward, Segment::Mlp(l));
            }
            s.pass(Pass::Forward, Segment::Residual(l));
            if again(l) == Recompute::Full {
                s.push(Op::Drop(Segment::Residual(l)), 0, None);
            }
        }
        if sizes.has_router_counts(mode) {
            // The exchange stands where the stream has left the layers.
            s.become_form(Form::Slices);
            s.exchange(Exchange::AllGather, Value::RouterCounts, sizes.router_counts(chunk), None);
            if sizes.has_context() {
                let (value, bytes) = (Value::RouterCounts, sizes.router_counts_context(chunk));
                s.push(Op::Collective { exchange: Exchange::AllGather, value, axis: Axis::Cp, bytes }, 0, None);
            }
            if sizes.travels() {
                let (value, bytes) = (Value::RouterCounts, sizes.router_counts_ep(chunk));
                s.push(Op::Collective { exchange: Exchange::AllGather, value, axis: Axis::Ep, bytes }, 0, None);
            }
        }
        if is_last {
            s.pass(Pass::Forward, Segment::HeadNorm);
            for block in 0..sizes.blocks() {
                s.pass(Pass::Forward, Segment::Logits(block));
                let stats = sizes.stats(block);
                s.exchange(Exchange::AllGather, Value::Stats, stats, None);
                s.pass(Pass::Forward, Segment::Loss(block));
            }
        } else {
            s.become_form(Form::Slices);
            s.push(Op::Send { value: Value::Activation, to: 0, bytes }, chunk + 1, None);
        }
        if mode == Mode::Eval {
            return s.dues;
        }
        if is_last {
            // The loss leaves a gradient summed over the hosted vocabulary slices, and adds to the projection's.
            s.form = Form::Partial;
            let loss = |due: &&mut Due| matches!(due.op, Op::Compute(_, Segment::Loss(_)));
            s.dues.iter_mut().filter(loss).for_each(|due| due.adds = Some(Accumulator::Head));
        } else {
            s.recv(Value::ActivationGrad, chunk + 1, bytes);
        }
        s.back = true;
        if is_last {
            s.pass(Pass::Backward, Segment::HeadNorm);
        }
        for l in layers.clone().rev() {
            if again(l) == Recompute::Full {
                let last = match model.moe {
                    Some(_) => (Pass::Recompute, Segment::Route(l)),
                    None => (Pass::RecomputeKept, Segment::Mlp(l)),
                };
                s.attention_again(l, Pass::Recompute, &[(Pass::Recompute, Segment::MlpNorm(l)), last]);
                if model.moe.is_some() {
                    s.travel(Value::Dispatch(l), None);
                    s.push(Op::Compute(Pass::RecomputeKept, Segment::Experts(l)), 0, None);
                }
            }
            if model.moe.is_some() {
                s.travel(Value::DispatchGrad(l), None);
                s.pass(Pass::Backward, Segment::Experts(l));
                // The shared expert's gradients are added where the rows are.
                s.travel(Value::CombineGrad(l), Some(Accumulator::Experts(l)));
                s.pass(Pass::Backward, Segment::Route(l));
            } else {
                s.pass(Pass::Backward, Segment::Mlp(l));
            }
            s.pass(Pass::Backward, Segment::MlpNorm(l));
            if again(l) == Recompute::Selective {
                s.attention_again(l, Pass::RecomputeKept, &[]);
            }
            if sizes.has_context() {
                // The keys of all cells were not kept.
                s.become_form(Form::Whole);
                s.keys(l);
            }
            s.pass(Pass::Backward, Segment::Attn(l));
            if sizes.has_context() {
                s.pass(Pass::Backward, Segment::Qkv(l));
            }
            s.pass(Pass::Backward, Segment::AttnNorm(l));
        }
        let norms = sizes.norm_grads(chunk, tp);
        s.exchange(Exchange::AllReduce, Value::NormGrads, norms, Some(Accumulator::Norms));
        if is_first {
            s.pass(Pass::Backward, Segment::Embed);
        } else {
            s.push(Op::Send { value: Value::ActivationGrad, to: 0, bytes }, chunk - 1, None);
        }
        if split {
            for l in layers.rev() {
                let feed_forward = [Segment::Mlp(l), Segment::Down(l)].map(|segment| (segment, Accumulator::Mlp(l)));
                let attention = [Segment::Attn(l), Segment::Qkv(l)].map(|segment| (segment, Accumulator::Attn(l)));
                let dense = feed_forward.into_iter().filter(|_| model.moe.is_none());
                for (segment, adds) in dense.chain(attention) {
                    s.push(Op::Compute(Pass::BackwardWeight, segment), 0, Some(adds));
                }
            }
        }
        s.dues
    }

    /// The attention's forward again, out of the layer's input, and `rest`, while the gradient waits in its form.
    fn attention_again(&mut self, l: usize, pass: Pass, rest: &[(Pass, Segment)]) {
        let waits = (self.form, self.last);
        (self.form, self.back) = (Form::Slices, false);
        self.pass(Pass::Recompute, Segment::AttnNorm(l));
        if self.sizes.has_context() {
            self.pass(Pass::Recompute, Segment::Qkv(l));
        }
        self.pass(pass, Segment::Attn(l));
        rest.iter().for_each(|(pass, segment)| self.pass(*pass, *segment));
        (self.form, self.last) = waits;
        self.back = true;
    }

    fn push(&mut self, op: Op, chunk: usize, adds: Option<Accumulator>) {
        self.dues.push(Due { op, chunk, adds, after: Vec::new() });
    }

    fn recv(&mut self, value: Value, chunk: usize, bytes: u64) {
        self.push(Op::Recv { value, from: 0, bytes }, chunk, None);
        self.form = Form::Slices;
    }

    fn pass(&mut self, pass: Pass, segment: Segment) {
        // A second forward reads and leaves what the first did.
        let first = if matches!(pass, Pass::Recompute | Pass::RecomputeKept) { Pass::Forward } else { pass };
        let (reads, leaves) = forms(first, segment, self.sizes.has_context());
        self.become_form(reads);
        // Gradients of norms travel apart; those of an output projection are added with the loss.
        let adds = match segment {
            Segment::Embed => Some(Accumulator::Embed),
            Segment::Qkv(l) | Segment::Attn(l) => Some(Accumulator::Attn(l)),
            Segment::Mlp(l) => Some(Accumulator::Mlp(l)),
            Segment::Experts(l) => Some(Accumulator::Experts(l)),
            _ => None,
        };
        let in_parts = self.split && matches!(segment, Segment::Qkv(_) | Segment::Attn(_) | Segment::Mlp(_));
        match pass {
            Pass::Backward if in_parts => self.push(Op::Compute(Pass::BackwardInput, segment), 0, None),
            Pass::Backward => self.push(Op::Compute(pass, segment), 0, adds),
            _ => self.push(Op::Compute(pass, segment), 0, None),
        }
        self.form = leaves;
        self.last = Some(segment);
    }

    /// The keys and values of a layer to those of all context cells.
    fn keys(&mut self, layer: usize) {
        let (value, bytes) = (Value::KeyValues(layer), self.sizes.keys());
        self.push(Op::Collective { exchange: Exchange::AllGather, value, axis: Axis::Cp, bytes }, 0, None);
    }

    fn exchange(&mut self, exchange: Exchange, value: Value, bytes: u64, adds: Option<Accumulator>) {
        self.push(Op::Collective { exchange, value, axis: Axis::Tp, bytes }, 0, adds);
    }

    /// Rows of experts between the ranks of a group, if there are several.
    fn travel(&mut self, value: Value, adds: Option<Accumulator>) {
        if self.sizes.travels() {
            let bytes = self.sizes.travel(value);
            self.push(Op::Collective { exchange: Exchange::AllToAll, value, axis: Axis::Ep, bytes }, 0, adds);
        }
    }

    /// The exchange between two forms, if they differ.
    fn become_form(&mut self, to: Form) {
        match (self.form, to) {
            (from, to) if from == to => {}
            (Form::Slices, Form::Whole) => {
                let value = if self.back { Value::GradRows } else { Value::Rows };
                self.exchange(Exchange::AllGather, value, self.sizes.rows(), None);
            }
            (Form::Partial, Form::Slices) => {
                let value = if self.back { Value::GradPartial } else { Value::Partial };
                let embed = self.last == Some(Segment::Embed);
                let bytes = if embed { self.sizes.partial_embed() } else { self.sizes.partial(self.tp) };
                self.exchange(Exchange::ReduceScatter, value, bytes, None);
            }
            (Form::OwnKeys, Form::AllKeys) => {
                if let Some(Segment::Qkv(layer)) = self.last {
                    self.keys(layer);
                }
            }
            (Form::AllKeys, Form::OwnKeys) => {
                if let Some(Segment::Attn(layer)) = self.last {
                    let (value, bytes) = (Value::KeyValueGrads(layer), self.sizes.key_grads(self.cp));
                    let exchange = Exchange::ReduceScatter;
                    self.push(Op::Collective { exchange, value, axis: Axis::Cp, bytes }, 0, None);
                }
            }
            (from, to) => unreachable!("no segment order leads from {from:?} to {to:?}"),
        }
        self.form = to;
    }
}

/// The buckets whose parameters a segment reads.
pub(super) fn reads(model: &Model, layout: &Layout, pass: Pass, segment: Segment) -> [Option<Bucket>; 2] {
    let one_embedding = model.tied && layout.chunks() == 1;
    if pass == Pass::BackwardWeight {
        return [None, None];
    }
    match segment {
        Segment::Embed => [(pass == Pass::Forward).then_some(Bucket::Embed), None],
        Segment::AttnNorm(_) | Segment::MlpNorm(_) | Segment::HeadNorm | Segment::Route(_) => {
            [Some(Bucket::Norms), None]
        }
        Segment::Experts(layer) => {
            let shared = model.moe.as_ref().is_some_and(|moe| moe.shared_ffn > 0);
            [Some(Bucket::Experts(layer)), shared.then_some(Bucket::Shared(layer))]
        }
        Segment::Qkv(layer) | Segment::Attn(layer) => {
            // Backward norms the rows again.
            let norms = model.qk_norm || pass != Pass::Forward;
            [Some(Bucket::Layer(layer)), norms.then_some(Bucket::Norms)]
        }
        Segment::Mlp(layer) => [Some(Bucket::Layer(layer)), (pass != Pass::Forward).then_some(Bucket::Norms)],
        Segment::Residual(_) | Segment::Down(_) => [None, None],
        Segment::Logits(_) | Segment::Loss(_) => [Some(if one_embedding { Bucket::Embed } else { Bucket::Head }), None],
    }
}

/// When the sums of weight gradients over the data cells are taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    /// Sums of a bucket in a step.
    pub count: usize,
    /// They are taken before the next microbatch adds, wherever the list is.
    pub early: bool,
    /// How.
    pub exchange: Exchange,
    /// They then go to the replicas of their owner: of common parameters, of experts.
    spread: [bool; 2],
}

impl Sums {
    pub fn new(grid: &Grid, layout: &Layout) -> Self {
        let reduced = grid.accumulate == Accumulate::Reduced;
        let early = reduced || layout.zero >= 2;
        let everywhere = layout.zero == 0 && !early;
        Self {
            count: if reduced { grid.microbatches } else { 1 },
            early,
            exchange: if everywhere { Exchange::AllReduce } else { Exchange::ReduceScatter },
            spread: CLASSES.map(|class| !everywhere && layout.holders_of(class).replicas() > 1),
        }
    }

    /// True if the sums of `bucket` go to replicas of their owner.
    pub fn spread(&self, bucket: Bucket) -> bool {
        self.spread[usize::from(bucket.class() == Class::Experts)]
    }
}

/// True if `chunk` has one use of a tied embedding and another chunk the other.
pub(super) fn swaps_tied(model: &Model, layout: &Layout, chunk: usize) -> bool {
    model.tied && layout.chunks() > 1 && (chunk == 0 || chunk == layout.chunks() - 1)
}

//! How many bytes a rank sends in each exchange, from shapes alone.
//!
//! All values travel as float32. With `g` members, a vector of `n` elements of which this
//! rank owns `own`, and `s` finished subtrees that it holds ([`spec::tree::subtrees`]):
//!
//! | exchange | elements sent |
//! |---|---|
//! | reduce-scatter (direct exchange) | s (n - own) |
//! | all-gather | own (g - 1) |
//! | all-reduce | both |
//!
//! Over the data axis each bucket ([`crate::buckets`]) travels by itself. Parameters are gathered inside a shard group,
//! sums between the replicas of a shard: there g is the size of that group, and `own` what each sends of it. Of routed
//! experts these groups are those of [`spec::Class::Experts`].
//!
//! One subtree per rank gives the bytes of a ring: n (g - 1) / g for each of the two
//! (Rabenseifner, "Optimization of Collective Reduction Operations", 2004). A group of one
//! sends nothing: then own = n and g - 1 = 0.

use spec::moe::AuxScope;
use spec::tensors::{Cut, Role, STATE_CHUNK};
use spec::tree::{subtrees, subtrees_of};
use spec::{Class, Coords, Grid, Holders, Layout, Model};

use crate::buckets::{Bucket, ChunkPlan};
use crate::instr::{Exchange, Mode, TokenBlocks, Value};
use crate::state::{cells_hosted, hosted, norm_elements};

/// Bytes of an element of every value but the ballot.
const FLOAT: u64 = 4;
/// Bytes of a word on the ballot.
const WORD: u64 = 8;
/// Softmax statistics of one token over one vocabulary slice: maximum, sum of exponentials, target logit.
const STATS: u64 = 3;

/// Sizes over the holders of one bucket on one rank; the same at every tensor position.
#[derive(Debug, Clone)]
struct BucketSizes {
    bucket: Bucket,
    parameters: bool,
    /// Who holds it.
    holders: Holders,
    /// Finished subtrees over its leaves, by holder.
    subtrees: Vec<u64>,
    /// Elements of its gradient.
    gradients: u64,
    /// Elements of the gradient that each holder sums.
    summed: Vec<u64>,
    /// Elements of the parameters by position in a shard group; all 0 where there is only a gradient.
    shards: Vec<u64>,
}

/// Sizes over the holders of one chunk's state on one rank.
#[derive(Debug, Clone)]
struct ChunkSizes {
    /// Elements of the chunk's norm vectors and routers.
    norms: u64,
    /// Elements of the chunk's gradients that have a leaf per slice, of shared and of routed experts; 0 with one tensor
    /// cell.
    slices: [u64; 2],
    /// Layers of the chunk.
    layers: u64,
    buckets: Vec<BucketSizes>,
    /// Words on the ballot about what each holder sums: cut slices.
    ballot_cut: Vec<u64>,
    /// Likewise: whole tensors, which tensor position 0 speaks for.
    ballot_whole: Vec<u64>,
}

/// The sizes of every exchange of one model, grid and layout.
#[derive(Debug, Clone)]
pub struct Sizes {
    layout: Layout,
    /// Elements of the residual stream of one unit.
    stream: u64,
    /// Lanes of one unit on a rank.
    lanes: usize,
    /// How the head cuts the tokens of a unit.
    blocks: TokenBlocks,
    /// Tensor cells that a rank hosts.
    cells_hosted: u64,
    /// Finished subtrees over the tensor cells, by tensor position.
    tp_subtrees: Vec<u64>,
    /// Finished subtrees over the context cells, by context position.
    cp_subtrees: Vec<u64>,
    /// Leaves of a step, by holder.
    leaves: Vec<u64>,
    /// Elements of the keys and values of one unit and layer on one rank; `None` without context cells.
    keys: Option<u64>,
    /// Experts of a layer; 0: dense.
    experts: u64,
    /// Experts chosen for a row, and elements of a row.
    per_token: u64,
    hidden: u64,
    /// Context cells of a unit on a rank.
    contexts: u64,
    /// There is an auxiliary loss.
    aux: bool,
    /// Its counts are pooled over the layers.
    pooled: bool,
    chunks: Vec<ChunkSizes>,
}

impl Sizes {
    /// The sizes for sequences of `seq` tokens.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize) -> Self {
        let (lanes, tokens_lane) = (grid.cp / layout.cp * grid.ep / layout.group, grid.microbatch * seq / grid.cp);
        let kv_width = model.kv_heads / layout.tp * model.head_dim;
        let holders = layout.leaves(grid);
        let count = |leaves, part| subtrees(leaves, part).len() as u64;
        Self {
            layout: layout.clone(),
            stream: (lanes * tokens_lane * model.hidden) as u64,
            lanes,
            blocks: TokenBlocks::new(tokens_lane, model.vocab_padded()),
            cells_hosted: cells_hosted(grid, layout) as u64,
            tp_subtrees: (0..layout.tp).map(|t| count(grid.tp, layout.tensor_cells(t, grid.tp))).collect(),
            cp_subtrees: (0..layout.cp).map(|c| count(grid.cp, layout.context_cells(c, grid.cp))).collect(),
            leaves: holders
                .iter()
                .map(|part| (part.iter().map(|cells| cells.len()).sum::<usize>() * grid.microbatches) as u64)
                .collect(),
            keys: (grid.cp > 1).then_some((2 * lanes * tokens_lane * kv_width) as u64),
            experts: model.moe.as_ref().map_or(0, |moe| moe.experts as u64),
            per_token: model.moe.as_ref().map_or(0, |moe| moe.per_token as u64),
            hidden: model.hidden as u64,
            contexts: (grid.cp / layout.cp) as u64,
            aux: model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0),
            pooled: model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0 && moe.aux_scope == AuxScope::Pooled),
            chunks: (0..layout.chunks()).map(|chunk| ChunkSizes::new(model, grid, layout, chunk)).collect(),
        }
    }

    /// Token blocks of one unit.
    pub fn blocks(&self) -> usize {
        self.lanes * self.blocks.per_lane()
    }

    /// Elements of the residual stream of one unit on one tensor position.
    fn own_rows(&self) -> u64 {
        self.stream / self.layout.tp as u64
    }

    fn tp_peers(&self) -> u64 {
        self.layout.tp as u64 - 1
    }

    /// The residual stream, or its gradient, between two chunks: the sender's sequence slices, and in training the
    /// router counts of a pooled auxiliary loss.
    pub fn activation(&self, mode: Mode) -> u64 {
        let counts = if self.pooled && mode == Mode::Train { self.experts } else { 0 };
        FLOAT * (self.own_rows() + counts)
    }

    /// True if the chunks exchange `RouterCounts`.
    pub fn has_router_counts(&self, mode: Mode) -> bool {
        self.aux && mode == Mode::Train
    }

    /// True if a data cell ends with `SliceGrads`.
    pub fn has_slice_grads(&self) -> bool {
        self.experts > 0
    }

    /// `RouterCounts` of `chunk`: one number per layer and expert, and the unit's targets, to every other position.
    pub fn router_counts(&self, chunk: usize) -> u64 {
        FLOAT * (self.chunks[chunk].layers * self.experts + 1) * self.tp_peers()
    }

    /// The same to every other context position, once they are added up over the tensor positions.
    pub fn router_counts_context(&self, chunk: usize) -> u64 {
        FLOAT * (self.chunks[chunk].layers * self.experts + 1) * (self.layout.cp as u64 - 1)
    }

    /// [`Sizes::router_counts`] over the ranks of a group.
    pub fn router_counts_ep(&self, chunk: usize) -> u64 {
        FLOAT * (self.chunks[chunk].layers * self.experts + 1) * self.ep_peers()
    }

    /// True if several ranks host a group, so that rows travel to the experts and back.
    pub fn travels(&self) -> bool {
        self.layout.group > 1
    }

    fn ep_peers(&self) -> u64 {
        self.layout.group as u64 - 1
    }

    /// The most that a rank sends in an exchange of rows: all of its rows to every other rank of the group, or all of
    /// theirs back. With a row go its terms (expert and gate) and their number, with gradients of rows those of its gates;
    /// ahead goes the count of numbers.
    pub fn travel(&self, value: Value) -> u64 {
        let rows = self.own_rows() / self.hidden;
        let terms = self.per_token.min(self.experts / self.layout.group as u64);
        let (beside_row, head) = match value {
            Value::Dispatch(_) => (1 + 2 * terms, self.contexts * self.cells_hosted),
            Value::CombineGrad(_) => (terms, 0),
            _ => (0, 0),
        };
        self.ep_peers() * (FLOAT * (rows * (self.hidden + beside_row) + head) + WORD)
    }

    /// `SliceGrads` of `chunk`, an all-reduce as [`Sizes::norm_grads`].
    pub fn slice_grads(&self, chunk: usize, tp: usize) -> u64 {
        // The data cells of a lane's group add to one leaf of a routed expert.
        let [shared, routed] = self.chunks[chunk].slices;
        self.all_reduce_tp(self.lanes as u64 * shared + self.contexts * routed, tp)
    }

    /// `Rows` and `GradRows`: the own sequence slices to every other tensor position.
    pub fn rows(&self) -> u64 {
        FLOAT * self.own_rows() * self.tp_peers()
    }

    /// `Partial` and `GradPartial` at tensor position `tp`: the leaves are the tensor cells.
    pub fn partial(&self, tp: usize) -> u64 {
        FLOAT * self.tp_subtrees[tp] * (self.stream - self.own_rows())
    }

    /// `Partial` of the embedding: one rank has the token, all others add zero, so every
    /// rank sends one partial for all its cells.
    pub fn partial_embed(&self) -> u64 {
        FLOAT * (self.stream - self.own_rows())
    }

    /// True if a layer's keys and values are exchanged over the context cells.
    pub fn has_context(&self) -> bool {
        self.keys.is_some()
    }

    /// `KeyValues`: the own keys and values to every other context position.
    pub fn keys(&self) -> u64 {
        FLOAT * self.keys.unwrap_or(0) * (self.layout.cp as u64 - 1)
    }

    /// `KeyValueGrads` at context position `cp`: gradients of all keys, of which a rank owns those of its own; the
    /// leaves are the context cells.
    pub fn key_grads(&self, cp: usize) -> u64 {
        self.cp_subtrees[cp] * self.keys()
    }

    /// `Stats` of token block `block`: one triple per token and hosted cell to every other position.
    pub fn stats(&self, block: usize) -> u64 {
        let tokens = self.blocks.rows(block).len() as u64;
        FLOAT * STATS * tokens * self.cells_hosted * self.tp_peers()
    }

    /// `NormGrads` of `chunk`, an all-reduce of n elements (all lanes) over the tensor cells;
    /// member i of g owns elements n i / g to n (i + 1) / g.
    pub fn norm_grads(&self, chunk: usize, tp: usize) -> u64 {
        self.all_reduce_tp(self.lanes as u64 * self.chunks[chunk].norms, tp)
    }

    fn all_reduce_tp(&self, n: u64, tp: usize) -> u64 {
        let (g, i) = (self.layout.tp as u64, tp as u64);
        let own = n * (i + 1) / g - n * i / g;
        FLOAT * (self.tp_subtrees[tp] * (n - own) + own * self.tp_peers())
    }

    /// `Grads` of a bucket over the cells, of the rank at `at`. A gather goes to the replicas of the shard only.
    ///
    /// # Panics
    /// If the chunk has no such bucket.
    pub fn grads(&self, chunk: usize, bucket: Bucket, at: Coords, exchange: Exchange) -> u64 {
        let sizes = self.bucket(chunk, bucket);
        let holder = sizes.holders.number(at);
        let own = sizes.summed[holder];
        let scatter = sizes.subtrees[holder] * (sizes.gradients - own);
        let gather = own * (sizes.holders.replicas() as u64 - 1);
        FLOAT
            * match exchange {
                Exchange::ReduceScatter => scatter,
                Exchange::AllGather => gather,
                Exchange::AllReduce => scatter + gather,
                Exchange::AllToAll | Exchange::Shift => 0,
            }
    }

    /// `MirrorGrads` of the rank at `at`: what it owns that has no replica.
    pub fn mirror_grads(&self, at: Coords) -> u64 {
        let all = self.layout.chunks_of(at.pp).flat_map(|c| &self.chunks[c].buckets);
        FLOAT * all.filter(|b| self.layout.mirrors(b.bucket.class())).map(|b| b.owned(at)).sum::<u64>()
    }

    /// `TiedGrads` of the rank at `at`: one use's gradient of what it owns of the embedding.
    pub fn tied_grads(&self, chunk: usize, at: Coords) -> u64 {
        let bucket = if chunk == 0 { Bucket::Embed } else { Bucket::Head };
        FLOAT * self.bucket(chunk, bucket).owned(at)
    }

    /// `Params` of a bucket from the rank at `at`: what it owns to the others of its shard group.
    ///
    /// # Panics
    /// If the chunk has no such bucket.
    pub fn params(&self, chunk: usize, bucket: Bucket, at: Coords) -> u64 {
        let sizes = self.bucket(chunk, bucket);
        FLOAT * sizes.owned(at) * (sizes.holders.shard as u64 - 1)
    }

    /// The buckets of `chunk`, in the order of its flat vector.
    pub fn buckets(&self, chunk: usize) -> impl Iterator<Item = Bucket> + '_ {
        self.chunks[chunk].buckets.iter().map(|b| b.bucket)
    }

    /// False for a bucket that is a gradient only.
    ///
    /// # Panics
    /// If the chunk has no such bucket.
    pub fn has_parameters(&self, chunk: usize, bucket: Bucket) -> bool {
        self.bucket(chunk, bucket).parameters
    }

    /// Bytes of a whole bucket: its parameters, or one microbatch's gradient.
    ///
    /// # Panics
    /// If the chunk has no such bucket.
    pub fn whole(&self, chunk: usize, bucket: Bucket) -> u64 {
        FLOAT * self.bucket(chunk, bucket).gradients
    }

    fn bucket(&self, chunk: usize, bucket: Bucket) -> &BucketSizes {
        let found = self.chunks[chunk].buckets.iter().find(|b| b.bucket == bucket);
        found.unwrap_or_else(|| panic!("chunk {chunk} has no bucket {bucket:?}"))
    }

    /// `Ballot` of a training step to every other rank, in 8-byte words.
    ///
    /// 3 of flags and counts; 5 for every leaf whose loss this rank speaks for (cell,
    /// microbatch, sum, tokens, bytes; at tensor position 0 of the last chunk); and for every
    /// slice, or part of one, that it owns and speaks for, 4 of place and one float64 sum of
    /// squares per state chunk. Position 0 speaks for whole tensors, chunk 0 for a tied embedding. With experts 3 of
    /// counts, 5 for every (leaf, hosted layer, hosted tensor cell) of an auxiliary loss, and for every hosted layer 2 of
    /// place and one per expert.
    pub fn ballot(&self, at: Coords) -> u64 {
        let holder = self.layout.holder(at);
        let owned: u64 = self
            .layout
            .chunks_of(at.pp)
            .map(|c| &self.chunks[c])
            .map(|c| c.ballot_cut[holder] + if at.tp == 0 { c.ballot_whole[holder] } else { 0 })
            .sum();
        let layers: u64 = self.layout.chunks_of(at.pp).map(|c| self.chunks[c].layers).sum();
        let aux = if self.aux { 5 * self.leaves[self.layout.holder(at)] * layers * self.cells_hosted } else { 0 };
        let routers = if self.experts > 0 { 3 + aux + layers * (2 + self.experts) } else { 0 };
        self.ballot_of(owned + routers, at)
    }

    /// `Ballot` of an evaluation: the same without gradients.
    pub fn ballot_eval(&self, at: Coords) -> u64 {
        self.ballot_of(0, at)
    }

    fn ballot_of(&self, owned: u64, at: Coords) -> u64 {
        let has_head = self.layout.chunk_pp(self.layout.chunks() - 1) == at.pp;
        let losses = if has_head && at.tp == 0 { self.leaves[self.layout.holder(at)] } else { 0 };
        WORD * (3 + 5 * losses + owned) * (self.layout.world() as u64 - 1)
    }
}

impl BucketSizes {
    /// Elements of the parameters that the rank at `at` owns.
    fn owned(&self, at: Coords) -> u64 {
        self.shards[self.holders.place(at)]
    }
}

impl ChunkSizes {
    fn new(model: &Model, grid: &Grid, layout: &Layout, chunk: usize) -> Self {
        let first = layout.coords(0);
        let plan = ChunkPlan::new(model, grid, layout, chunk, first);
        let len = |range: &std::ops::Range<usize>| range.len() as u64;
        let buckets = plan.buckets.iter().map(|b| BucketSizes {
            bucket: b.bucket,
            parameters: b.parameters,
            holders: b.holders,
            subtrees: (b.bucket.leaves_of(grid, layout).iter())
                .map(|part| subtrees_of(b.bucket.leaves(grid), part).len() as u64)
                .collect(),
            gradients: len(&b.at),
            summed: b.parts.iter().map(len).collect(),
            shards: b.shards.iter().map(|s| if b.parameters { len(s) } else { 0 }).collect(),
        });
        let (mut ballot_cut, mut ballot_whole) = (vec![0; layout.holders()], vec![0; layout.holders()]);
        let mut start = 0;
        for tensor in &plan.tensors {
            let copy = tensor.role == Role::Embed && chunk > 0;
            let words = if tensor.cut == Cut::Whole { &mut ballot_whole } else { &mut ballot_cut };
            for len in hosted(tensor, grid, layout) {
                for bucket in &plan.buckets {
                    for (holder, words) in words.iter_mut().enumerate() {
                        let part = bucket.part(layout.holders_of(Class::Common).nth(first, holder));
                        let owned = part.end.min(start + len).saturating_sub(part.start.max(start));
                        if owned > 0 && !copy {
                            *words += 4 + owned.div_ceil(STATE_CHUNK) as u64;
                        }
                    }
                }
                start += len;
            }
        }
        let sliced = |routed: bool| {
            let all = plan.tensors.iter().filter(|t| grid.tp > 1 && t.role.is_per_slice());
            all.filter(|t| t.role.is_expert() == routed).map(|t| (t.rows * t.cols) as u64).sum()
        };
        Self {
            norms: norm_elements(model, layout, chunk) as u64,
            slices: [sliced(false), sliced(true)],
            layers: layout.stages[chunk].len() as u64,
            buckets: buckets.collect(),
            ballot_cut,
            ballot_whole,
        }
    }
}

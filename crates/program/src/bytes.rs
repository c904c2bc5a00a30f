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
//! One subtree per rank gives the bytes of a ring: n (g - 1) / g for each of the two
//! (Rabenseifner, "Optimization of Collective Reduction Operations", 2004). A group of one
//! sends nothing: then own = n and g - 1 = 0.

use spec::moe::AuxScope;
use spec::tensors::{Cut, Role, STATE_CHUNK};
use spec::tree::{subtrees, subtrees_of};
use spec::{Coords, Grid, Layout, Model};

use crate::instr::{Exchange, Mode, block_rows, blocks_of_lane};
use crate::ownership::owners;
use crate::state::{cells_hosted, chunk_tensors, hosted, norm_elements, slice_lens, tied_apart};

/// Bytes of an element of every value but the ballot.
const FLOAT: u64 = 4;
/// Bytes of a word on the ballot.
const WORD: u64 = 8;
/// Softmax statistics of one token over one vocabulary slice: maximum, sum of exponentials, target logit.
const STATS: u64 = 3;

/// Sizes over the holders of one chunk's state on one rank; the same at every tensor position.
#[derive(Debug, Clone)]
struct ChunkSizes {
    /// Elements of the chunk's norm vectors and routers.
    norms: u64,
    /// Elements of the chunk's gradients that have a leaf per slice; 0 with one tensor cell.
    slices: u64,
    /// Layers of the chunk.
    layers: u64,
    /// Elements of all gradients.
    gradients: u64,
    /// Elements of the gradients that each holder owns.
    gradients_owned: Vec<u64>,
    /// Elements of the parameters that each holder owns.
    parameters_owned: Vec<u64>,
    /// Words on the ballot about what each holder owns: cut slices.
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
    /// Tokens of one lane.
    tokens_lane: usize,
    /// Tensor cells that a rank hosts.
    cells_hosted: u64,
    /// Finished subtrees over the tensor cells, by tensor position.
    tp_subtrees: Vec<u64>,
    /// Finished subtrees over the context cells, by context position.
    cp_subtrees: Vec<u64>,
    /// Finished subtrees over the cells (d, c), by holder.
    dp_subtrees: Vec<u64>,
    /// Leaves of a step, by holder.
    leaves: Vec<u64>,
    /// Elements of the keys and values of one unit and layer on one rank; `None` without context cells.
    keys: Option<u64>,
    /// Elements of the hosted slices of a tied embedding.
    tied: u64,
    /// Experts of a layer; 0: dense.
    experts: u64,
    /// There is an auxiliary loss.
    aux: bool,
    /// Its counts are pooled over the layers.
    pooled: bool,
    chunks: Vec<ChunkSizes>,
}

impl Sizes {
    /// The sizes for sequences of `seq` tokens.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize) -> Self {
        let (lanes, tokens_lane) = (grid.cp / layout.cp, grid.microbatch * seq / grid.cp);
        let kv_width = model.kv_heads / layout.tp * model.head_dim;
        let holders = layout.leaves(grid);
        let count = |leaves, part| subtrees(leaves, part).len() as u64;
        Self {
            layout: layout.clone(),
            stream: (lanes * tokens_lane * model.hidden) as u64,
            lanes,
            tokens_lane,
            cells_hosted: cells_hosted(grid, layout) as u64,
            tp_subtrees: (0..layout.tp).map(|t| count(grid.tp, layout.tensor_cells(t, grid.tp))).collect(),
            cp_subtrees: (0..layout.cp).map(|c| count(grid.cp, layout.context_cells(c, grid.cp))).collect(),
            dp_subtrees: holders.iter().map(|part| subtrees_of(grid.leaves(), part).len() as u64).collect(),
            leaves: holders
                .iter()
                .map(|part| (part.iter().map(|cells| cells.len()).sum::<usize>() * grid.microbatches) as u64)
                .collect(),
            keys: (grid.cp > 1).then_some((2 * lanes * tokens_lane * kv_width) as u64),
            tied: (model.vocab_padded() / layout.tp * model.hidden) as u64,
            experts: model.moe.as_ref().map_or(0, |moe| moe.experts as u64),
            aux: model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0),
            pooled: model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0 && moe.aux_scope == AuxScope::Pooled),
            chunks: (0..layout.chunks()).map(|chunk| ChunkSizes::new(model, grid, layout, chunk)).collect(),
        }
    }

    /// Token blocks of one unit ([`block_rows`]).
    pub fn blocks(&self) -> usize {
        self.lanes * blocks_of_lane(self.tokens_lane)
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

    /// `SliceGrads` of `chunk`, an all-reduce as [`Sizes::norm_grads`].
    pub fn slice_grads(&self, chunk: usize, tp: usize) -> u64 {
        self.all_reduce_tp(self.lanes as u64 * self.chunks[chunk].slices, tp)
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
        let tokens = block_rows(self.tokens_lane, block).len() as u64;
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

    /// `Grads` of `chunk` over the cells (d, c), at holder `holder`; owners by [`owners`].
    ///
    /// A tied embedding whose two uses are on one chunk has two accumulators, each summed
    /// over the cells before the two are added: it counts twice.
    pub fn grads(&self, chunk: usize, holder: usize, exchange: Exchange) -> u64 {
        let sizes = &self.chunks[chunk];
        let own = sizes.gradients_owned[holder];
        let scatter = self.dp_subtrees[holder] * (sizes.gradients - own);
        let gather = own * (self.layout.holders() as u64 - 1);
        FLOAT
            * match exchange {
                Exchange::ReduceScatter => scatter,
                Exchange::AllGather => gather,
                Exchange::AllReduce => scatter + gather,
            }
    }

    /// `TiedGrads`: one use's gradient of all hosted slices of the embedding.
    pub fn tied_grads(&self) -> u64 {
        FLOAT * self.tied
    }

    /// `Params` of `chunk` from holder `holder`: what it owns to every other one.
    pub fn params(&self, chunk: usize, holder: usize) -> u64 {
        FLOAT * self.chunks[chunk].parameters_owned[holder] * (self.layout.holders() as u64 - 1)
    }

    /// `Ballot` of a training step to every other rank, in 8-byte words.
    ///
    /// 3 of flags and counts; 5 for every leaf whose loss this rank speaks for (cell,
    /// microbatch, sum, tokens, bytes; at tensor position 0 of the last chunk); and for every
    /// slice, or part of one, that it owns and speaks for, 4 of place and one float64 sum of
    /// squares per state chunk. Position 0 speaks for whole tensors, chunk 0 for a tied embedding. With experts 2 of
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
        let routers = if self.experts > 0 { 2 + aux + layers * (2 + self.experts) } else { 0 };
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

impl ChunkSizes {
    fn new(model: &Model, grid: &Grid, layout: &Layout, chunk: usize) -> Self {
        let tensors = chunk_tensors(model, layout, chunk);
        let lens = slice_lens(model, grid, layout, chunk);
        let parts = owners(&lens, layout.holders());
        // Two accumulators on one chunk: the tied embedding's slices come first in the flat vector.
        let twice = if model.tied && !tied_apart(model, layout) {
            assert_eq!(tensors[0].role, Role::Embed, "one chunk starts with the embedding");
            tensors[0].slice_len(grid.tp) * cells_hosted(grid, layout)
        } else {
            0
        };
        let (mut ballot_cut, mut ballot_whole) = (vec![0; layout.holders()], vec![0; layout.holders()]);
        let mut start = 0;
        for tensor in &tensors {
            let copy = tensor.role == Role::Embed && chunk > 0;
            let words = if tensor.cut == Cut::Whole { &mut ballot_whole } else { &mut ballot_cut };
            for len in hosted(tensor, grid, layout) {
                for (words, part) in words.iter_mut().zip(&parts) {
                    let owned = part.end.min(start + len).saturating_sub(part.start.max(start));
                    if owned > 0 && !copy {
                        *words += 4 + owned.div_ceil(STATE_CHUNK) as u64;
                    }
                }
                start += len;
            }
        }
        let gradients_of =
            |part: &std::ops::Range<usize>| (part.len() + part.end.min(twice) - part.start.min(twice)) as u64;
        Self {
            norms: norm_elements(model, layout, chunk) as u64,
            slices: if grid.tp > 1 {
                tensors.iter().filter(|t| t.role.is_per_slice()).map(|t| (t.rows * t.cols) as u64).sum()
            } else {
                0
            },
            layers: layout.stages[chunk].len() as u64,
            gradients: (lens.iter().sum::<usize>() + twice) as u64,
            gradients_owned: parts.iter().map(gradients_of).collect(),
            parameters_owned: parts.iter().map(|p| p.len() as u64).collect(),
            ballot_cut,
            ballot_whole,
        }
    }
}

//! Buckets: the pieces in which a chunk's parameters are gathered and its gradients summed.
//!
//! A bucket is what one layer (or the embedding, or the head) needs, so that it can travel while
//! others are computed; its parts are spread over all holders (data and context positions). The norms of all layers of
//! a chunk are one bucket: they are small, and their gradients are complete together.

use std::ops::Range;

use spec::tensors::{Cut, Home, Tensor};
use spec::{Class, Coords, Grid, Holders, Layout, Model};

use crate::ownership::{Balance, owners};
use crate::state::{chunk_tensors, hosted};

/// A piece of a chunk's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bucket {
    /// The input embedding.
    Embed,
    /// The matrices of a layer that tensor cells cut.
    Layer(usize),
    /// The shared expert of a layer, whole. Its gradients have a leaf per sequence slice, and are complete when the
    /// slices are summed.
    Shared(usize),
    /// The routed experts of a layer that a rank holds, whole; slices as above. Where several data positions host a group
    /// of data cells each has experts of its own ([`spec::Class::Experts`]).
    Experts(usize),
    /// The output projection. For a tied embedding on one chunk it has no parameters of its own
    /// ([`Bucket::Embed`] has them), but the gradient of the output use.
    Head,
    /// What else every tensor cell holds whole: norm vectors and routers of all layers of the chunk.
    Norms,
}

impl Bucket {
    /// Who holds it.
    pub fn class(self) -> Class {
        if matches!(self, Self::Experts(_)) { Class::Experts } else { Class::Common }
    }

    /// True if its gradients have a leaf per sequence slice.
    pub fn is_per_slice(self) -> bool {
        matches!(self, Self::Experts(_) | Self::Shared(_))
    }

    /// Leaves of the tree in which its gradients add up.
    pub fn leaves(self, grid: &Grid) -> usize {
        match self.class() {
            Class::Common => grid.leaves(),
            Class::Experts => grid.expert_leaves(),
        }
    }

    /// Which of them each of its holders has, ascending.
    pub fn leaves_of(self, grid: &Grid, layout: &Layout) -> Vec<Vec<Range<usize>>> {
        match self.class() {
            Class::Common => layout.leaves(grid),
            Class::Experts => layout.expert_leaves(grid),
        }
    }
}

/// A bucket as one rank holds it. Elements are counted in the chunk's flat vector: the tensors of
/// [`ChunkPlan::tensors`] in order, then the output use of a tied embedding.
#[derive(Debug, Clone)]
pub struct BucketPlan {
    /// Which.
    pub bucket: Bucket,
    /// Its elements.
    pub at: Range<usize>,
    /// False where only a gradient is there, see [`Bucket::Head`].
    pub parameters: bool,
    /// Who else holds it.
    pub holders: Holders,
    /// Elements by shard: (one for each position in a shard group) what it owns.
    pub shards: Vec<Range<usize>>,
    /// Elements by holder: what it sums, speaks for and writes. The replicas of a shard divide it.
    pub parts: Vec<Range<usize>>,
}

/// The state of one chunk on one rank; the same at every tensor position. Which experts it has depends on the place in a
/// group; their sizes do not.
#[derive(Debug, Clone)]
pub struct ChunkPlan {
    /// Its tensors, bucket by bucket.
    pub tensors: Vec<Tensor>,
    /// Its buckets in the order of the flat vector.
    pub buckets: Vec<BucketPlan>,
    /// Elements of its parameters.
    pub parameters: usize,
    /// Elements of its gradients.
    pub gradients: usize,
}

/// The bucket of a tensor on `chunk`.
fn bucket_of(tensor: &Tensor, chunk: usize) -> Bucket {
    match tensor.home {
        Home::Layer(layer) if tensor.role.is_expert() => Bucket::Experts(layer),
        Home::Layer(layer) if tensor.role.is_per_slice() => Bucket::Shared(layer),
        _ if tensor.cut == Cut::Whole => Bucket::Norms,
        // The copy of a tied embedding is the output projection of the last chunk.
        Home::Embed if chunk > 0 => Bucket::Head,
        Home::Embed => Bucket::Embed,
        Home::Layer(layer) => Bucket::Layer(layer),
        Home::Head => Bucket::Head,
    }
}

impl ChunkPlan {
    /// The plan of `chunk` for the rank at `at`, of which only the place in its group counts.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, chunk: usize, at: Coords) -> Self {
        let mut tensors = chunk_tensors(model, layout, chunk);
        if let Some(moe) = &model.moe {
            let here = layout.experts(at, moe.experts);
            tensors.retain(|t| t.role.expert().is_none_or(|e| here.contains(&e)));
        }
        tensors.sort_by_key(|t| bucket_of(t, chunk));
        let mut balance = Balance::new(layout.holders());
        // Those of experts are others, where ranks of a group share them.
        let mut of_experts = (layout.group > 1).then(|| Balance::new(layout.holders_of(Class::Experts).count));
        let mut buckets: Vec<BucketPlan> = Vec::new();
        let mut at = 0;
        for group in tensors.chunk_by(|a, b| bucket_of(a, chunk) == bucket_of(b, chunk)) {
            let bucket = bucket_of(&group[0], chunk);
            let lens: Vec<usize> = group.iter().flat_map(|t| hosted(t, grid, layout)).collect();
            // Both copies of a tied embedding are cut alike, whatever else their chunks hold.
            let alone = matches!(bucket, Bucket::Embed | Bucket::Head);
            let cut = match (&mut of_experts, bucket.class()) {
                (Some(balance), Class::Experts) => balance.cut(&lens),
                _ if alone => owners(&lens, layout.holders()),
                _ => balance.cut(&lens),
            };
            if alone {
                balance.count(&cut);
            }
            let len: usize = lens.iter().sum();
            buckets.push(BucketPlan::new(layout, bucket, at..at + len, true, &cut));
            at += len;
        }
        let parameters = at;
        if head_parameters(model, layout) == Bucket::Embed {
            let embed = buckets.iter().find(|b| b.bucket == Bucket::Embed).expect("chunk 0 has the embedding");
            let cut: Vec<_> = (0..layout.holders()).map(|i| fine(embed, i)).collect();
            let len = embed.at.len();
            buckets.push(BucketPlan::new(layout, Bucket::Head, at..at + len, false, &cut));
            at += len;
        }
        Self { tensors, buckets, parameters, gradients: at }
    }

    /// The index of a bucket in [`ChunkPlan::buckets`].
    pub fn find(&self, bucket: Bucket) -> Option<usize> {
        self.buckets.iter().position(|b| b.bucket == bucket)
    }
}

/// Part number `i` of a bucket, counted from its start.
fn fine(plan: &BucketPlan, i: usize) -> Range<usize> {
    let part = &plan.parts[position(&plan.holders, i)];
    part.start - plan.at.start..part.end - plan.at.start
}

/// The holder with part number `i`: parts of one shard are neighbours.
fn position(holders: &Holders, i: usize) -> usize {
    i % holders.replicas() * holders.shard + i / holders.replicas()
}

impl BucketPlan {
    fn new(layout: &Layout, bucket: Bucket, at: Range<usize>, parameters: bool, cut: &[Range<usize>]) -> Self {
        let holders = layout.holders_of(bucket.class());
        let replicas = holders.replicas();
        let shards = cut.chunks(replicas).map(|c| at.start + c[0].start..at.start + c[replicas - 1].end).collect();
        let mut parts = vec![0..0; holders.count];
        for (i, range) in cut.iter().enumerate() {
            parts[position(&holders, i)] = at.start + range.start..at.start + range.end;
        }
        Self { bucket, at, parameters, holders, shards, parts }
    }

    /// What the rank at `at` owns: its optimizer state lives there.
    pub fn owned(&self, at: Coords) -> Range<usize> {
        self.shards[self.holders.place(at)].clone()
    }

    /// What it sums, speaks for and writes.
    pub fn part(&self, at: Coords) -> Range<usize> {
        self.parts[self.holders.number(at)].clone()
    }
}

/// True if gradients leave for their owners as soon as a bucket has them, microbatch by microbatch.
pub fn leave_early(grid: &Grid, layout: &Layout) -> bool {
    layout.zero >= 2 || grid.accumulate == spec::Accumulate::Reduced
}

/// The units that the rank at `at` works on, in order.
///
/// Where data positions meet in every microbatch, each has the same number of slots in it; with
/// fewer data cells than others it has slots whose unit names a cell that it does not host: there
/// it takes part in the exchanges and computes nothing. So all pipelines do the same at the same
/// place of their lists, and one waits for another only where it would wait for itself.
pub fn slots(grid: &Grid, layout: &Layout, at: Coords) -> Vec<spec::Unit> {
    let cells = layout.cells[at.dp].clone();
    if !leave_early(grid, layout) {
        return grid.units(cells).collect();
    }
    let rounds = rounds(grid, layout);
    let unit = |mb, round| spec::Unit { cell: cells.start + round * grid.ep, mb };
    (0..grid.microbatches).flat_map(|mb| (0..rounds).map(move |round| unit(mb, round))).collect()
}

/// Most units of a rank in one microbatch.
pub fn rounds(grid: &Grid, layout: &Layout) -> usize {
    layout.cells.iter().map(|cells| grid.unit_cells(cells.clone()).count()).max().unwrap_or(0)
}

/// The bucket with the parameters of the output projection on the last chunk.
pub fn head_parameters(model: &Model, layout: &Layout) -> Bucket {
    if model.tied && layout.chunks() == 1 { Bucket::Embed } else { Bucket::Head }
}

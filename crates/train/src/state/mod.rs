//! The state of one rank: parameters, gradient accumulators and optimizer moments of its chunks.

mod flat;
mod held;
mod packed;
mod tier;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;

use program::buckets::{Bucket, BucketPlan, ChunkPlan};
use spec::tensors::{Role, STATE_CHUNK, Tensor};
use spec::tree::Counter;
use spec::{Run, Unit};

pub use flat::{Flat, Grads};
pub use held::{Held, of_chunk};
pub use packed::PackedWeights;
pub use tier::Tier;
pub(crate) use tier::nameless;

use crate::place::Place;

/// One bucket of a chunk: what this rank keeps of it between instructions.
#[derive(Debug)]
pub struct BucketState {
    /// Which elements, and who owns and sums what.
    pub plan: BucketPlan,
    /// Elements of the flat vector whose optimizer state lives here.
    pub owned: Range<usize>,
    /// Elements that this rank sums over the data cells, speaks for in the vote, and writes.
    pub part: Range<usize>,
    /// The parameters in `owned`, if the others are gathered for their use only (zero 3).
    pub shard: Vec<f32>,
    /// First moments of the elements in `owned`.
    pub moment1: Tier,
    /// Second moments, likewise.
    pub moment2: Tier,
    /// Finished cells, as subtrees; each has the whole bucket.
    pub closed: Counter<Vec<f32>>,
    /// Sums over the data cells of the microbatches so far, of the elements in `part`; empty: none yet.
    pub sum: Vec<f32>,
    /// The gradients of the step, of the elements in `owned`; empty until they are complete.
    pub total: Vec<f32>,
}

impl BucketState {
    /// Its moments will be used soon.
    pub fn want(&self) {
        [&self.moment1, &self.moment2].into_iter().for_each(Tier::want);
    }

    /// They will not.
    pub fn rest(&self) {
        [&self.moment1, &self.moment2].into_iter().for_each(Tier::release);
    }
}

/// Elements that are held beyond parameters and optimizer state, now and at most.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alive {
    now: usize,
    /// Most at once.
    pub peak: usize,
}

/// One chunk of layers on one rank. All flat vectors have the tensors of `held` in order, which is by bucket.
#[derive(Debug)]
pub struct ChunkState {
    /// The chunk.
    pub chunk: usize,
    /// Its tensors.
    pub held: Vec<Held>,
    /// Place of each (layer, role) in `held`; layer-less tensors stand at layer 0.
    index: BTreeMap<(usize, Role), usize>,
    /// Its buckets, in the order of the flat vector.
    pub buckets: Vec<BucketState>,
    /// Parameters; with zero 3 of the buckets that are gathered.
    pub params: Flat,
    /// Those that stay packed for products.
    pub packed: PackedWeights,
    /// Gradient accumulators of the cells under way: the flat vector, then (tied, one copy)
    /// the output use of the embedding.
    pub grads: Grads,
    /// Parameters are gathered for their use and freed (zero 3).
    pub gathers: bool,
    /// Where the output use of a tied embedding stands in `grads`.
    tied_output: Option<Range<usize>>,
    /// Where the gradient of each tensor that has a leaf per slice stands in `slices`; empty with one tensor cell.
    slice_at: BTreeMap<(usize, Role), Range<usize>>,
    /// With several tensor cells, the accumulators of those tensors: a vector per hosted cell, together one more bucket
    /// behind the others in `grads`.
    slices: Vec<Range<usize>>,
    /// Context cells of this rank: the lanes of its first data cell, which have the leaves of a group's routed experts.
    contexts: usize,
    /// Gathered parameters.
    pub gathered: Alive,
}

/// (layer, role) with the layer of layer-less tensors set to 0.
fn slot(tensor: &Tensor) -> (usize, Role) {
    match tensor.home {
        spec::tensors::Home::Layer(layer) => (layer, tensor.role),
        _ => (0, tensor.role),
    }
}

impl ChunkState {
    /// Allocates the state of `chunk` on the rank at `place`; parameters are zero until filled.
    pub fn new(run: &Run, place: &Place, chunk: usize) -> Self {
        Self::build(run, place, chunk, run.layout.zero == 3, |_| true)
    }

    /// Allocates a mirror of it: what the rank at `place` updates and no other rank has, and nothing else.
    pub fn mirror(run: &Run, place: &Place, chunk: usize) -> Self {
        Self::build(run, place, chunk, true, |bucket| run.layout.mirrors(bucket.class()))
    }

    fn build(run: &Run, place: &Place, chunk: usize, gathers: bool, keeps: impl Fn(Bucket) -> bool) -> Self {
        let layout = &run.layout;
        let plan = ChunkPlan::new(&run.model, &run.grid, layout, chunk, place.at);
        let held = held::of_chunk(&run.model, &run.grid, layout, &plan, chunk, place.at.tp);
        let index = held.iter().enumerate().map(|(i, h)| (slot(&h.tensor), i)).collect();
        let tied_output = plan.buckets.iter().find(|b| !b.parameters).map(|b| b.at.clone());
        let mut slice_at = BTreeMap::new();
        let contexts = place.contexts.len();
        if place.grid_tp > 1 {
            let mut at = 0;
            for h in held.iter().filter(|h| h.tensor.role.is_per_slice()) {
                slice_at.insert(slot(&h.tensor), at..at + h.at.len());
                at += h.at.len();
            }
        }
        let (end, each) = (plan.gradients, slice_at.values().map(|at: &Range<usize>| at.end).max().unwrap_or(0));
        let slices = (0..place.num_cells()).map(|i| end + i * each..end + (i + 1) * each).collect();
        let mut starts: Vec<usize> = plan.buckets.iter().map(|b| b.at.start).chain([end]).collect();
        let mut params = Flat::new(&starts);
        if each > 0 {
            starts.push(end + place.num_cells() * each);
        }
        let grads = Grads::new(&starts);
        let buckets = plan.buckets.into_iter().enumerate().map(|(i, plan)| {
            let owned = if keeps(plan.bucket) { plan.owned(place.at) } else { plan.at.start..plan.at.start };
            let kept = if plan.parameters { owned.len() } else { 0 };
            if plan.parameters && !gathers {
                params.put(i, vec![0.0; plan.at.len()]);
            }
            BucketState {
                part: plan.part(place.at),
                shard: vec![0.0; if gathers { kept } else { 0 }],
                moment1: Tier::zeros(kept),
                moment2: Tier::zeros(kept),
                closed: Counter::new(plan.bucket.leaves(&run.grid)),
                sum: Vec::new(),
                total: Vec::new(),
                owned,
                plan,
            }
        });
        let buckets = buckets.collect();
        Self {
            chunk,
            held,
            index,
            buckets,
            params,
            packed: PackedWeights::default(),
            grads,
            gathers,
            tied_output,
            slice_at,
            slices,
            contexts,
            gathered: Alive::default(),
        }
    }

    /// Puts the moments, which are zero, into files in `folder`.
    ///
    /// # Errors
    /// The system's.
    pub fn offload(&mut self, folder: &Path) -> io::Result<()> {
        for bucket in &mut self.buckets {
            for moment in [&mut bucket.moment1, &mut bucket.moment2] {
                *moment = Tier::in_file(folder, moment.len())?;
            }
        }
        Ok(())
    }

    /// The tensor with `role` in `layer` (0 for those outside of the layers).
    pub fn held(&self, layer: usize, role: Role) -> &Held {
        &self.held[self.index[&(layer, role)]]
    }

    /// The hosted parameters of a tensor.
    pub fn param(&self, layer: usize, role: Role) -> &[f32] {
        &self.params[self.held(layer, role).at.clone()]
    }

    /// Where the accumulator of a tensor's use stands in `grads`.
    pub fn grad_range(&self, layer: usize, role: Role) -> Range<usize> {
        match (role, &self.tied_output) {
            // The output use of a tied matrix: apart, or the second copy.
            (Role::LmHead, Some(output)) => output.clone(),
            (Role::LmHead, None) => self.held(0, self.head_role()).at.clone(),
            _ => self.held(layer, role).at.clone(),
        }
    }

    /// The accumulator of lane `lane` and hosted tensor cell `i` of a tensor that has a leaf per slice.
    pub fn slice_grad(&mut self, (lane, i): (usize, usize), layer: usize, role: Role) -> &mut [f32] {
        if self.slice_at.is_empty() {
            let at = self.held(layer, role).at.clone();
            return self.grads.lane(lane, at);
        }
        let (slice, at) = (self.slices[i].start, &self.slice_at[&(layer, role)]);
        self.grads.lane(lane, slice + at.start..slice + at.end)
    }

    /// [`ChunkState::slice_grad`] of several tensors of one bucket.
    pub fn slice_grads(&mut self, (lane, i): (usize, usize), layer: usize, roles: &[Role]) -> Vec<&mut [f32]> {
        let at = |role: &Role| match self.slice_at.get(&(layer, *role)) {
            Some(at) => self.slices[i].start + at.start..self.slices[i].start + at.end,
            None => self.held(layer, *role).at.clone(),
        };
        let at: Vec<_> = roles.iter().map(at).collect();
        self.grads.lane_parts(lane, &at)
    }

    /// Takes the leaves of the tensors that have one per slice, by hosted tensor cell, the `lanes` of `unit` side by
    /// side; empty vectors with one tensor cell.
    pub fn take_slice_leaves(&mut self, unit: Unit, lanes: usize) -> Vec<Vec<f32>> {
        let Some(start) = self.slices.first().filter(|slice| !slice.is_empty()).map(|slice| slice.start) else {
            return vec![Vec::new(); self.slices.len()];
        };
        let mut leaves = vec![Vec::new(); self.slices.len()];
        for lane in 0..lanes {
            let ranges: Vec<_> = self.sliced(lane).map(|(_, at)| at.clone()).collect();
            if ranges.is_empty() {
                continue;
            }
            let all = self.grads.take(unit, lane, self.buckets.len());
            for (leaf, slice) in leaves.iter_mut().zip(&self.slices) {
                let of_slice = &all[slice.start - start..slice.end - start];
                ranges.iter().for_each(|at| leaf.extend_from_slice(&of_slice[at.clone()]));
            }
            self.grads.recycle([all]);
        }
        leaves
    }

    /// Puts the sums over the slices, `lanes` side by side, into the accumulators of the unit at hand.
    pub fn close_slices(&mut self, total: &[f32], lanes: usize) {
        let mut rest = total;
        for lane in 0..lanes {
            let keys: Vec<_> = self.sliced(lane).map(|(key, _)| *key).collect();
            for key in keys {
                let to = self.held[self.index[&key]].at.clone();
                let (sum, after) = rest.split_at(to.len());
                self.grads.lane(lane, to).copy_from_slice(sum);
                rest = after;
            }
        }
    }

    /// The tensors with a leaf per slice that add to lane `lane`, and where they stand in a vector of slices. All data cells
    /// of a group add to its first one's leaf of a routed expert.
    fn sliced(&self, lane: usize) -> impl Iterator<Item = (&(usize, Role), &Range<usize>)> {
        self.slice_at.iter().filter(move |((_, role), _)| lane < self.contexts || !role.is_expert())
    }

    /// The role under which this chunk holds the output projection.
    pub fn head_role(&self) -> Role {
        if self.index.contains_key(&(0, Role::LmHead)) { Role::LmHead } else { Role::Embed }
    }

    /// The index of a bucket.
    pub fn find(&self, bucket: Bucket) -> Option<usize> {
        self.buckets.iter().position(|b| b.plan.bucket == bucket)
    }

    /// Ends bucket number `bucket` of `unit`: the gradients of its first lanes, the leaves `leaves` (ascending), join the
    /// tree over its leaves. `made` is shown each one before.
    pub fn close(
        &mut self,
        bucket: usize,
        unit: Unit,
        leaves: impl Iterator<Item = usize>,
        mut made: impl FnMut(usize, &mut [f32]),
        mut add: impl FnMut(&mut Vec<f32>, &Vec<f32>),
    ) {
        for (lane, leaf) in leaves.enumerate() {
            let mut done = self.grads.take(unit, lane, bucket);
            made(leaf, &mut done);
            let spent = self.buckets[bucket].closed.push(leaf..leaf + 1, done, &mut add);
            self.grads.recycle(spent);
        }
    }

    /// Takes the finished subtrees of a bucket and leaves an empty sum over `leaves`.
    pub fn take_closed(&mut self, bucket: usize, leaves: usize) -> Vec<(Range<usize>, Vec<f32>)> {
        std::mem::replace(&mut self.buckets[bucket].closed, Counter::new(leaves)).into_nodes()
    }

    /// The gradients of the step in bucket number `bucket` are complete. Where this rank has the sums of both uses of a
    /// tied embedding, they are input + output.
    pub fn complete(&mut self, bucket: usize, total: Vec<f32>, add: impl FnOnce(&mut [f32], &[f32])) {
        self.buckets[bucket].total = total;
        if self.tied_output.is_none() {
            return;
        }
        let [Some(input), Some(output)] = [self.find(Bucket::Embed), self.find(Bucket::Head)] else { return };
        let complete = |i: usize| self.buckets[i].owned.is_empty() || !self.buckets[i].total.is_empty();
        if [input, output].contains(&bucket) && complete(input) && complete(output) {
            let output = std::mem::take(&mut self.buckets[output].total);
            add(&mut self.buckets[input].total, &output);
        }
    }

    /// Keeps the gathered parameters of a bucket until they are released; their buffer was counted in
    /// [`ChunkState::gathered`].
    pub fn put_gathered(&mut self, bucket: usize, whole: Vec<f32>) {
        self.params.put(bucket, whole);
    }

    /// Frees the gathered parameters of a bucket.
    pub fn release(&mut self, bucket: usize) {
        self.packed.release(&self.buckets[bucket].plan.at);
        let whole = self.params.take(bucket);
        self.gathered.sub(whole.len());
        self.grads.pool.give(whole);
    }

    /// The parameters that this rank keeps of a bucket, and which: all, or its shard.
    pub fn kept(&self, bucket: usize) -> (&[f32], Range<usize>) {
        let state = &self.buckets[bucket];
        match (self.gathers, state.plan.parameters) {
            (_, false) => (&[], 0..0),
            (true, _) => (&state.shard, state.owned.clone()),
            (false, _) => (&self.params[state.plan.at.clone()], state.plan.at.clone()),
        }
    }

    /// [`ChunkState::kept`], to write.
    pub fn kept_mut(&mut self, bucket: usize) -> (&mut [f32], Range<usize>) {
        let state = &mut self.buckets[bucket];
        match (self.gathers, state.plan.parameters) {
            (_, false) => (&mut [], 0..0),
            (true, _) => (&mut state.shard, state.owned.clone()),
            (false, _) => (&mut self.params[state.plan.at.clone()], state.plan.at.clone()),
        }
    }

    /// Where `elements` of a tensor's slice stand: the bucket, and the place in the flat vector.
    pub fn place_of(&self, tensor: usize, slice: usize, elements: &Range<usize>) -> Option<(usize, Range<usize>)> {
        let held = self.held.iter().find(|held| held.index == tensor)?;
        let first = held.slice(held.slices.clone().position(|s| s == slice)?);
        let at = first.start + elements.start..first.start + elements.end;
        let inside = |bucket: &BucketState| {
            let whole = &bucket.plan.at;
            bucket.plan.parameters && whole.start <= at.start && at.end <= whole.end
        };
        let bucket = self.buckets.iter().position(inside)?;
        (at.end <= first.end).then_some((bucket, at))
    }

    /// The pieces of `range` of the flat vector: (tensor, slice, elements of the slice, where in the flat vector).
    pub fn pieces<'a>(
        &'a self,
        range: &'a Range<usize>,
    ) -> impl Iterator<Item = (&'a Held, usize, Range<usize>, Range<usize>)> + 'a {
        self.held.iter().flat_map(move |held| {
            held.pieces(range).map(move |(slice, elements, at)| {
                debug_assert!(elements.start.is_multiple_of(STATE_CHUNK), "owners cut at state chunks");
                (held, slice, elements, at)
            })
        })
    }

    /// Elements of parameters, moments and summed gradients that stay here over a step; with zero 1 to 3 four for each
    /// owned element, and the parameters of others where these are kept whole.
    pub fn resident(&self) -> usize {
        let bucket = |i: usize| {
            let b = &self.buckets[i];
            let gradients = if b.plan.parameters { b.owned.len() } else { 0 };
            self.kept(i).0.len() + b.moment1.len() + b.moment2.len() + gradients
        };
        (0..self.buckets.len()).map(bucket).sum()
    }
}

impl Alive {
    /// More.
    pub fn add(&mut self, elements: usize) {
        self.now += elements;
        self.peak = self.peak.max(self.now);
    }

    /// Less.
    pub fn sub(&mut self, elements: usize) {
        self.now -= elements;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(sets: &[&str]) -> (Run, ChunkState) {
        let text = "[model]\npreset = \"tiny\"\ntied = true\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 32\n[grid]\ndp = 4\ntp = 2\n";
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        let run = Run::parse(text, "test", &sets, 1).unwrap();
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, 0);
        let state = ChunkState::new(&run, &place, 0);
        (run, state)
    }

    #[test]
    fn parts_cover_the_flat_vector_once() {
        for sets in [&["layout.dp=3"][..], &["layout.dp=4", "layout.zero=1"], &["layout.dp=2", "layout.tp=2"]] {
            let (_, state) = state(sets);
            let end = state.buckets.last().unwrap().plan.at.end;
            let mut seen = vec![0; end];
            let parts = state.buckets.iter().flat_map(|b| b.plan.parts.clone());
            parts.for_each(|r| seen[r].iter_mut().for_each(|n| *n += 1));
            assert!(seen.iter().all(|n| *n == 1), "{sets:?}");
        }
    }

    #[test]
    fn pieces_cover_each_tensor_once() {
        let (_, state) = state(&["layout.dp=3"]);
        let parts = state.buckets.iter().filter(|b| b.plan.parameters).flat_map(|b| b.plan.parts.clone());
        let covered: usize = parts.map(|r| state.pieces(&r).map(|(.., at)| at.len()).sum::<usize>()).sum();
        assert_eq!(covered, state.held.iter().map(|h| h.at.len()).sum::<usize>());
    }

    /// With everything sharded a rank keeps 16 bytes for each parameter that it owns, and all ranks together for all.
    #[test]
    fn sharded_state_is_sixteen_bytes_a_parameter() {
        let sets = ["layout.dp=4", "layout.zero=3", "grid.accumulate=reduced"];
        let (_, state) = state(&sets);
        let all: usize = state.held.iter().map(|h| h.at.len()).sum();
        let owned: usize = state.buckets.iter().filter(|b| b.plan.parameters).map(|b| b.owned.len()).sum();
        assert_eq!(state.resident(), 4 * owned);
        assert!((4 * owned).abs_diff(all) <= 4 * STATE_CHUNK, "{owned} of {all}");
    }
}

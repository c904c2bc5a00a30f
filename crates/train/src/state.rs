//! The state of one rank: parameters, gradient accumulators and optimizer moments of its chunks.

use std::collections::BTreeMap;
use std::ops::Range;

use spec::tensors::{Cut, Role, STATE_CHUNK, Tensor};
use spec::tree::Counter;
use spec::{Layout, Run};

use crate::place::Place;

/// One tensor as a rank holds it: the hosted slices, one after the other, in the chunk's flat vectors.
#[derive(Debug, Clone)]
pub struct Held {
    /// The tensor.
    pub tensor: Tensor,
    /// Its index in canonical order.
    pub index: usize,
    /// Where its hosted slices stand in the flat vector.
    pub at: Range<usize>,
    /// The hosted slices.
    pub slices: Range<usize>,
    /// Elements of one slice.
    pub slice_len: usize,
    /// False for the second copy of a tied matrix: it is not counted, hashed as a replica and never written.
    pub counts: bool,
}

impl Held {
    /// Where hosted slice number `i` stands in the flat vector.
    pub fn slice(&self, i: usize) -> Range<usize> {
        let first = self.at.start + i * self.slice_len;
        first..first + self.slice_len
    }

    /// The pieces of `range` (of the flat vector) in this tensor: (slice, elements of the slice, where in the flat vector).
    pub fn pieces(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> + '_ {
        let range = range.clone();
        self.slices.clone().enumerate().filter_map(move |(i, slice)| {
            let whole = self.slice(i);
            let (lo, hi) = (range.start.max(whole.start), range.end.min(whole.end));
            (lo < hi).then(|| (slice, lo - whole.start..hi - whole.start, lo..hi))
        })
    }
}

/// One chunk of layers on one rank. All flat vectors have the tensors of `held` in order.
#[derive(Debug)]
pub struct ChunkState {
    /// The chunk.
    pub chunk: usize,
    /// Its tensors.
    pub held: Vec<Held>,
    /// Place of each (layer, role) in `held`; layer-less tensors stand at layer 0.
    index: BTreeMap<(usize, Role), usize>,
    /// Parameters.
    pub params: Vec<f32>,
    /// First moments of the elements in `owned`.
    pub moment1: Vec<f32>,
    /// Second moments, likewise.
    pub moment2: Vec<f32>,
    /// Gradient accumulators of the cells at hand, one per lane: the flat vector, then (tied, one copy)
    /// the output use of the embedding. Empty between the last cell of a step and the next step.
    pub grads: Vec<Vec<f32>>,
    /// The data cell of `grads`.
    cell: usize,
    /// Accumulators of the other cells that are open: a schedule may begin one before the last is closed.
    open: BTreeMap<usize, Vec<Vec<f32>>>,
    /// Elements of each.
    pub grads_len: usize,
    /// Finished cells, as subtrees.
    pub closed: Counter<Vec<f32>>,
    /// Summed gradients, after the exchange: flat, the output use added in.
    pub total: Vec<f32>,
    /// Where the output use of a tied embedding stands in `grads`.
    pub tied_output: Option<Range<usize>>,
    /// Elements of the flat vector whose optimizer state lives here.
    pub owned: Range<usize>,
    /// Elements of `grads` that each member of the data group sums.
    pub parts: Vec<Vec<Range<usize>>>,
    /// Elements of the flat vector that each member of the data group owns.
    pub owners: Vec<Range<usize>>,
    spare: Vec<Vec<f32>>,
    /// Where the gradient of each tensor that has a leaf per slice stands in `slices`; empty with one tensor cell.
    slice_at: BTreeMap<(usize, Role), Range<usize>>,
    /// With several tensor cells, the accumulators of those tensors: a vector per hosted cell, behind the others in
    /// `grads` while its data cell is open.
    slices: Vec<Range<usize>>,
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
        let layout: &Layout = &run.layout;
        let canonical = spec::tensors::tensors(&run.model);
        let mut held: Vec<Held> = Vec::new();
        let mut at = 0;
        for tensor in program::chunk_tensors(&run.model, layout, chunk) {
            let index = canonical.iter().position(|t| t.name == tensor.name).expect("a chunk holds canonical tensors");
            let slices = if tensor.cut == Cut::Whole { 0..1 } else { place.cells.clone() };
            let slice_len = tensor.slice_len(place.grid_tp);
            let len = slices.len() * slice_len;
            let second_copy = tensor.role == Role::Embed && chunk > 0;
            held.push(Held { tensor, index, at: at..at + len, slices, slice_len, counts: !second_copy });
            at += len;
        }
        let index = held.iter().enumerate().map(|(i, h)| (slot(&h.tensor), i)).collect::<BTreeMap<_, _>>();
        let one_copy = run.model.tied && layout.chunks() == 1;
        let tied_output = one_copy.then(|| at..at + held[index[&(0, Role::Embed)]].at.len());
        let lens = program::state::slice_lens(&run.model, &run.grid, layout, chunk);
        let owners = program::owners(&lens, layout.holders());
        let parts = owners
            .iter()
            .map(|owned| {
                let mut part = vec![owned.clone()];
                if let Some(output) = &tied_output {
                    let embed = &held[index[&(0, Role::Embed)]].at;
                    let (lo, hi) = (owned.start.max(embed.start), owned.end.min(embed.end));
                    if lo < hi {
                        part.push(output.start + lo - embed.start..output.start + hi - embed.start);
                    }
                }
                part
            })
            .collect();
        let owned = if layout.zero == 0 { 0..at } else { owners[place.holder].clone() };
        let moments = owned.len();
        let grads = at + tied_output.as_ref().map_or(0, Range::len);
        let mut slice_at = BTreeMap::new();
        if place.grid_tp > 1 {
            let mut at = 0;
            for h in held.iter().filter(|h| h.tensor.role.is_per_slice()) {
                slice_at.insert(slot(&h.tensor), at..at + h.at.len());
                at += h.at.len();
            }
        }
        let each = slice_at.values().map(|at: &Range<usize>| at.end).max().unwrap_or(0);
        let slices = (0..place.num_cells()).map(|i| grads + i * each..grads + (i + 1) * each).collect();
        Self {
            chunk,
            held,
            index,
            params: vec![0.0; at],
            moment1: vec![0.0; moments],
            moment2: vec![0.0; moments],
            grads: Vec::new(),
            cell: 0,
            open: BTreeMap::new(),
            grads_len: grads,
            closed: Counter::new(run.grid.leaves()),
            total: Vec::new(),
            tied_output,
            owned,
            parts,
            owners,
            spare: Vec::new(),
            slice_at,
            slices,
        }
    }

    /// The tensor with `role` in `layer` (0 for those outside of the layers).
    pub fn held(&self, layer: usize, role: Role) -> &Held {
        &self.held[self.index[&(layer, role)]]
    }

    /// The hosted parameters of a tensor.
    pub fn param(&self, layer: usize, role: Role) -> &[f32] {
        &self.params[self.held(layer, role).at.clone()]
    }

    /// The hosted parameters of slice number `i` of a tensor.
    pub fn param_slice(&self, layer: usize, role: Role, i: usize) -> &[f32] {
        &self.params[self.held(layer, role).slice(i)]
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
            return &mut self.grads[lane][at];
        }
        let (slice, at) = (self.slices[i].start, &self.slice_at[&(layer, role)]);
        &mut self.grads[lane][slice + at.start..slice + at.end]
    }

    /// The leaves of the tensors that have one per slice, by hosted tensor cell, all lanes side by side; empty vectors
    /// with one tensor cell.
    pub fn slice_leaves(&self) -> Vec<Vec<f32>> {
        let leaf = |at: &Range<usize>| self.grads.iter().flat_map(|grads| &grads[at.clone()]).copied().collect();
        self.slices.iter().map(leaf).collect()
    }

    /// Puts the sums over the slices, all lanes side by side, into the accumulators of the cell.
    pub fn close_slices(&mut self, total: &[f32]) {
        let of_lane = total.len() / self.grads.len();
        for (grads, total) in self.grads.iter_mut().zip(total.chunks_exact(of_lane)) {
            for (key, at) in &self.slice_at {
                grads[self.held[self.index[key]].at.clone()].copy_from_slice(&total[at.clone()]);
            }
        }
    }

    /// The role under which this chunk holds the output projection.
    pub fn head_role(&self) -> Role {
        if self.index.contains_key(&(0, Role::LmHead)) { Role::LmHead } else { Role::Embed }
    }

    /// Makes `grads` the accumulators of `cell`, one for each of its `lanes`: zero, unless it is open.
    pub fn open_cell(&mut self, cell: usize, lanes: usize) {
        if self.cell == cell && !self.grads.is_empty() {
            return;
        }
        if !self.grads.is_empty() {
            self.open.insert(self.cell, std::mem::take(&mut self.grads));
        }
        self.cell = cell;
        self.grads = self.open.remove(&cell).unwrap_or_else(|| {
            let mut fresh = || {
                let mut fresh = self.buffer();
                fresh.fill(0.0);
                fresh.resize(self.slices.last().map_or(fresh.len(), |slice| slice.end), 0.0);
                fresh
            };
            (0..lanes).map(|_| fresh()).collect()
        });
    }

    /// The data cell of `grads`, if it is open.
    pub fn cell_at_hand(&self) -> Option<usize> {
        (!self.grads.is_empty()).then_some(self.cell)
    }

    /// Ends a data cell: the gradients of its lanes, the leaves `leaves` (ascending), join the tree over the cells.
    pub fn close_cell(
        &mut self,
        cell: usize,
        leaves: impl ExactSizeIterator<Item = usize>,
        mut add: impl FnMut(&mut Vec<f32>, &Vec<f32>),
    ) {
        self.open_cell(cell, leaves.len());
        for (leaf, mut done) in leaves.zip(std::mem::take(&mut self.grads)) {
            done.truncate(self.grads_len);
            let spent = self.closed.push(leaf..leaf + 1, done, &mut add);
            self.spare.extend(spent);
        }
    }

    /// A gradient buffer of unknown value.
    pub fn buffer(&mut self) -> Vec<f32> {
        self.spare.pop().unwrap_or_else(|| vec![0.0; self.grads_len])
    }

    /// Takes the finished subtrees and leaves an empty sum.
    pub fn take_closed(&mut self, leaves: usize) -> Vec<(Range<usize>, Vec<f32>)> {
        std::mem::replace(&mut self.closed, Counter::new(leaves)).into_nodes()
    }

    /// Gives gradient buffers back for the next step.
    pub fn recycle(&mut self, buffers: impl IntoIterator<Item = Vec<f32>>) {
        self.spare.extend(buffers.into_iter().filter(|b| !b.is_empty()));
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
    fn owners_cover_the_flat_vector_once() {
        for sets in [&["layout.dp=3"][..], &["layout.dp=4", "layout.zero=1"], &["layout.dp=2", "layout.tp=2"]] {
            let (_, state) = state(sets);
            let mut seen = vec![0; state.grads_len];
            state.parts.iter().flatten().for_each(|r| seen[r.clone()].iter_mut().for_each(|n| *n += 1));
            assert!(seen.iter().all(|n| *n == 1), "{sets:?}");
        }
    }

    #[test]
    fn pieces_cover_each_tensor_once() {
        let (_, state) = state(&["layout.dp=3"]);
        let covered: usize = state.owners.iter().flat_map(|r| state.pieces(r)).map(|(.., at)| at.len()).sum();
        assert_eq!(covered, state.params.len());
    }
}

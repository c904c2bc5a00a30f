//! The tensors of a chunk as a rank holds them: where they stand in its flat vectors. Pure.

use std::ops::Range;

use program::buckets::ChunkPlan;
use spec::tensors::{Cut, Role, Tensor};
use spec::{Grid, Layout, Model};

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

/// The tensors of `chunk` on a rank at tensor position `tp`, in the order of `plan`.
pub fn of_chunk(model: &Model, grid: &Grid, layout: &Layout, plan: &ChunkPlan, chunk: usize, tp: usize) -> Vec<Held> {
    let canonical = spec::tensors::tensors(model);
    let mut at = 0;
    let hold = |tensor: &Tensor| {
        let index = canonical.iter().position(|t| t.name == tensor.name).expect("a chunk holds canonical tensors");
        let slices = if tensor.cut == Cut::Whole { 0..1 } else { layout.tensor_cells(tp, grid.tp) };
        let slice_len = tensor.slice_len(grid.tp);
        let first = at;
        at += slices.len() * slice_len;
        let second_copy = tensor.role == Role::Embed && chunk > 0;
        Held { tensor: tensor.clone(), index, at: first..at, slices, slice_len, counts: !second_copy }
    };
    plan.tensors.iter().map(hold).collect()
}

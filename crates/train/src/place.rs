//! What one rank hosts: its tensor cells, sequence slices and sizes.

use std::ops::Range;

use spec::{Coords, Grid, Layout, Model};

/// Sizes of one rank's part of a microbatch. Row buffers are row-major [sequence, position, width].
#[derive(Debug, Clone)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// Its coordinates.
    pub at: Coords,
    /// Its tensor cells, of `grid_tp`.
    pub cells: Range<usize>,
    /// Tensor cells of the grid.
    pub grid_tp: usize,
    /// Ranks of a tensor group.
    pub tp: usize,
    /// Sequences of a microbatch.
    pub batch: usize,
    /// Positions of a sequence.
    pub seq: usize,
    /// Positions of a sequence in one slice.
    pub seq_cell: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads of one cell.
    pub heads_cell: usize,
    /// Key/value heads of one cell.
    pub kv_heads_cell: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Feed-forward width of one cell.
    pub ffn_cell: usize,
    /// Vocabulary rows of one cell, padding included.
    pub vocab_cell: usize,
    /// Token ids that exist.
    pub vocab: usize,
}

impl Place {
    /// The place of `rank`.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize, rank: usize) -> Self {
        let at = layout.coords(rank);
        Self {
            rank,
            at,
            cells: layout.tensor_cells(at.tp, grid.tp),
            grid_tp: grid.tp,
            tp: layout.tp,
            batch: grid.microbatch,
            seq,
            seq_cell: seq / grid.tp,
            hidden: model.hidden,
            heads_cell: model.heads / grid.tp,
            kv_heads_cell: model.kv_heads / grid.tp,
            head_dim: model.head_dim,
            ffn_cell: model.ffn / grid.tp,
            vocab_cell: model.vocab_padded() / grid.tp,
            vocab: model.vocab,
        }
    }

    /// Hosted tensor cells.
    pub fn num_cells(&self) -> usize {
        self.cells.len()
    }

    /// Rows (tokens) of a microbatch.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Positions of a sequence in the hosted slices.
    pub fn seq_local(&self) -> usize {
        self.seq_cell * self.num_cells()
    }

    /// Rows of a microbatch in the hosted sequence slices.
    pub fn rows_local(&self) -> usize {
        self.batch * self.seq_local()
    }

    /// Width of the hosted query heads.
    pub fn q_width(&self) -> usize {
        self.heads_cell * self.head_dim * self.num_cells()
    }

    /// Width of the hosted key (or value) heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads_cell * self.head_dim * self.num_cells()
    }

    /// Width of the hosted part of the feed-forward.
    pub fn ffn_width(&self) -> usize {
        self.ffn_cell * self.num_cells()
    }

    /// The columns of hosted cell `i` in a buffer whose hosted cells stand side by side.
    pub fn cell_cols(&self, i: usize, cell_width: usize) -> Range<usize> {
        i * cell_width..(i + 1) * cell_width
    }

    /// The rows of hosted slice `i` in a local row buffer, one range per sequence.
    pub fn cell_rows(&self, i: usize) -> Vec<Range<usize>> {
        let first = |b: usize| b * self.seq_local() + i * self.seq_cell;
        (0..self.batch).map(|b| first(b)..first(b) + self.seq_cell).collect()
    }

    /// Which elements of a whole [sequence, position, hidden] buffer each member of the tensor group holds.
    pub fn row_parts(&self) -> Vec<Vec<Range<usize>>> {
        let local = self.seq_local();
        let part = |member: usize, b: usize| {
            let first = (b * self.seq + member * local) * self.hidden;
            first..first + local * self.hidden
        };
        (0..self.tp).map(|member| (0..self.batch).map(|b| part(member, b)).collect()).collect()
    }

    /// First token id of hosted cell `i`, and how many of its rows are real.
    pub fn vocab_part(&self, i: usize) -> (u32, usize) {
        let first = (self.cells.start + i) * self.vocab_cell;
        (first as u32, self.vocab.saturating_sub(first).min(self.vocab_cell))
    }
}

//! What one rank hosts: its lanes, tensor cells, sequence slices and sizes.

use std::ops::Range;

use kernels::Queries;
use program::TokenBlocks;
use spec::grid::zigzag;
use spec::{Coords, Grid, Lanes, Layout, Model, Unit};

use crate::segments::dispatch::GroupRanks;

/// Sizes of one rank's part of a unit. Row buffers are row-major [lane, sequence, position, width]; the positions of a
/// lane are those of its context cell ([`zigzag`]), or the hosted slices of them.
#[derive(Debug, Clone)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// Its coordinates.
    pub at: Coords,
    /// Its data cells.
    pub data_cells: Range<usize>,
    /// The ranks that share a group of data cells and its experts.
    pub group: GroupRanks,
    /// Its context cells, of `grid_cp`.
    pub contexts: Range<usize>,
    /// Context cells of the grid.
    pub grid_cp: usize,
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
    /// Positions of a sequence in one lane.
    pub seq_lane: usize,
    /// Of these, positions in one slice.
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
            data_cells: layout.cells[at.dp].clone(),
            group: GroupRanks { ranks: layout.group, blocks: grid.ep, me: at.dp % layout.group },
            contexts: layout.context_cells(at.cp, grid.cp),
            grid_cp: grid.cp,
            cells: layout.tensor_cells(at.tp, grid.tp),
            grid_tp: grid.tp,
            tp: layout.tp,
            batch: grid.microbatch,
            seq,
            seq_lane: seq / grid.cp,
            seq_cell: seq / grid.cp / grid.tp,
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

    /// The hosted lanes of `unit`.
    pub fn lanes(&self, unit: Unit) -> Lanes {
        // The data cells of the unit's group that are hosted here.
        let group_end = unit.cell / self.group.blocks * self.group.blocks + self.group.blocks;
        Lanes { cells: unit.cell..group_end.min(self.data_cells.end), contexts: self.contexts.clone() }
    }

    /// The leaves of the lanes of `unit`, ascending.
    pub fn leaves(&self, unit: Unit) -> impl Iterator<Item = usize> + use<> {
        let grid_cp = self.grid_cp;
        self.lanes(unit).iter().map(move |(cell, context)| cell * grid_cp + context)
    }

    /// The leaves of routed experts that the first lanes of `unit` have, ascending: one for each context cell of its group.
    pub fn expert_leaves(&self, unit: Unit) -> impl Iterator<Item = usize> + use<> {
        let (group, grid_cp) = (unit.cell / self.group.blocks, self.grid_cp);
        self.contexts.clone().map(move |context| group * grid_cp + context)
    }

    /// The rows of context cell `context` in the whole sequences of a microbatch, in the order of its lane.
    pub fn rows_of_context(&self, context: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (seq, chunks) = (self.seq, zigzag(context, self.grid_cp, self.seq));
        (0..self.batch).flat_map(move |b| chunks.clone().map(|chunk| b * seq + chunk.start..b * seq + chunk.end))
    }

    /// The data cell of row `row` of `unit`, and its row in the whole sequences of that cell's microbatch.
    pub fn whole_row(&self, unit: Unit, row: usize) -> (usize, usize) {
        let (cell, context) = self.lanes(unit).iter().nth(row / self.rows_lane()).expect("a row lies in a lane");
        let (mut at, chunks) = (row % self.rows_lane(), self.rows_of_context(context));
        for rows in chunks {
            if at < rows.len() {
                return (cell, rows.start + at);
            }
            at -= rows.len();
        }
        unreachable!("a lane has as many rows as its chunks")
    }

    /// The place of a cell (d, c) in the tree over the cells.
    pub fn leaf(&self, cell: usize, context: usize) -> usize {
        cell * self.grid_cp + context
    }

    /// Rows (tokens) of one lane.
    pub fn rows_lane(&self) -> usize {
        self.batch * self.seq_lane
    }

    /// How the output projection cuts the rows of a unit.
    pub fn token_blocks(&self) -> TokenBlocks {
        TokenBlocks::new(self.rows_lane(), self.vocab_cell * self.grid_tp)
    }

    /// Positions of a lane's sequence in the hosted slices.
    pub fn seq_local(&self) -> usize {
        self.seq_cell * self.num_cells()
    }

    /// Rows of one lane in the hosted sequence slices.
    pub fn rows_lane_local(&self) -> usize {
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

    /// The rows of hosted slice `i` of a lane in a local row buffer, one range per sequence.
    pub fn cell_rows(&self, lane: usize, i: usize) -> Vec<Range<usize>> {
        let first = |b: usize| (lane * self.batch + b) * self.seq_local() + i * self.seq_cell;
        (0..self.batch).map(|b| first(b)..first(b) + self.seq_cell).collect()
    }

    /// Which elements of a whole [lane, sequence, position, hidden] buffer each member of the tensor group holds.
    pub fn row_parts(&self, lanes: usize) -> Vec<Vec<Range<usize>>> {
        let local = self.seq_local();
        let part = |member: usize, sequence: usize| {
            let first = (sequence * self.seq_lane + member * local) * self.hidden;
            first..first + local * self.hidden
        };
        let sequences = lanes * self.batch;
        (0..self.tp).map(|member| (0..sequences).map(|s| part(member, s)).collect()).collect()
    }

    /// The positions of a sequence whose queries context cell `context` has.
    pub fn queries(&self, context: usize) -> Queries {
        Queries::spans(zigzag(context, self.grid_cp, self.seq))
    }

    /// Which elements of whole keys and values, [2, data cell, sequence, position, width], the context cells `contexts`
    /// have, in the order of the lanes of a unit with `cells` data cells: first all keys, then all values.
    pub fn key_parts(&self, cells: usize, contexts: Range<usize>) -> Vec<Range<usize>> {
        let (width, rows) = (self.kv_width(), self.batch * self.seq);
        let of = |(cell, context): (usize, usize)| {
            self.rows_of_context(context).map(move |r| (cell * rows + r.start) * width..(cell * rows + r.end) * width)
        };
        let both = Lanes { cells: 0..2 * cells, contexts };
        both.iter().flat_map(of).collect()
    }

    /// First token id of hosted cell `i`, and how many of its rows are real.
    pub fn vocab_part(&self, i: usize) -> (u32, usize) {
        let first = (self.cells.start + i) * self.vocab_cell;
        (first as u32, self.vocab.saturating_sub(first).min(self.vocab_cell))
    }
}

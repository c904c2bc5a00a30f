//! Rows to experts and back: grouping, gathering, and the weighted sum of what the experts made of a row.

use std::ops::Range;

use crate::ctx::{Ctx, Rows};
use crate::lanes;
use crate::math::exp;
use crate::simd::by_level;

/// Which rows each expert works on. A slot is one (row, expert); slots stand by expert, then part, then row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    parts: usize,
    /// First slot of each (expert, part), and the end.
    starts: Vec<usize>,
    /// Row of each slot.
    pub rows: Vec<u32>,
    /// Slot of each (row, expert), in the order in which they were given.
    pub slots: Vec<u32>,
}

impl Groups {
    /// Groups the rows of `parts` (each part its row ranges in order) by expert; every row lies in one part.
    ///
    /// Row r goes to the experts `chosen[first[r]..first[r + 1]]`, ascending, each below `experts`; there may be none.
    pub fn new(first: &[u32], chosen: &[u32], experts: usize, parts: &[Vec<Range<usize>>]) -> Self {
        let of = |part: usize| parts[part].iter().cloned().flatten();
        let choices = |row: usize| first[row] as usize..first[row + 1] as usize;
        let mut starts = vec![0; experts * parts.len() + 1];
        for part in 0..parts.len() {
            for e in of(part).flat_map(|row| &chosen[choices(row)]) {
                starts[*e as usize * parts.len() + part + 1] += 1;
            }
        }
        for i in 1..starts.len() {
            starts[i] += starts[i - 1];
        }
        let mut next = starts.clone();
        let (mut rows, mut slots) = (vec![0; chosen.len()], vec![0; chosen.len()]);
        for part in 0..parts.len() {
            for row in of(part) {
                for choice in choices(row) {
                    let at = &mut next[chosen[choice] as usize * parts.len() + part];
                    rows[*at] = row as u32;
                    slots[choice] = *at as u32;
                    *at += 1;
                }
            }
        }
        assert_eq!(starts.last(), Some(&chosen.len()), "the parts cover every row once");
        Self { parts: parts.len(), starts, rows, slots }
    }

    /// The slots of `expert`, all parts.
    pub fn of(&self, expert: usize) -> Range<usize> {
        self.starts[expert * self.parts]..self.starts[(expert + 1) * self.parts]
    }

    /// The slots of `part` of `expert`.
    pub fn of_part(&self, expert: usize, part: usize) -> Range<usize> {
        let at = expert * self.parts + part;
        self.starts[at]..self.starts[at + 1]
    }

    /// Values of (row, choice) in the order of slots.
    pub fn to_slots(&self, values: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; values.len()];
        self.slots.iter().zip(values).for_each(|(slot, value)| out[*slot as usize] = *value);
        out
    }

    /// Inverse of [`Groups::to_slots`].
    pub fn from_slots(&self, values: &[f32]) -> Vec<f32> {
        self.slots.iter().map(|slot| values[*slot as usize]).collect()
    }
}

/// Rows of one width that lie in several pieces, numbered through.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    width: usize,
    /// Each with the number of its first row.
    pieces: Vec<(usize, &'a [f32])>,
}

impl<'a> Pieces<'a> {
    /// Pieces of whole rows.
    pub fn new(width: usize, pieces: impl IntoIterator<Item = &'a [f32]>) -> Self {
        let mut first = 0;
        let pieces = pieces.into_iter().filter(|piece| !piece.is_empty()).map(|piece| {
            assert_eq!(piece.len() % width, 0, "a piece of {} numbers in rows of {width}", piece.len());
            let at = first;
            first += piece.len() / width;
            (at, piece)
        });
        Self { width, pieces: pieces.collect() }
    }

    /// Row `i`.
    fn row(&self, i: usize) -> &'a [f32] {
        // There are as many as ranks share experts: looked at from the last one, no search is shorter.
        let of = self.pieces.iter().rfind(|(first, _)| *first <= i);
        let (first, piece) = of.unwrap_or_else(|| panic!("row {i} of no rows"));
        &piece[(i - first) * self.width..(i - first + 1) * self.width]
    }
}

/// `out[i] = x[rows[i]]`; out: rows.len() x width.
pub fn gather_pieces(ctx: &Ctx, x: &Pieces, rows: &[u32], out: &mut [f32]) {
    let width = x.width;
    assert_eq!(out.len(), rows.len() * width, "{} rows of {width} gathered", rows.len());
    ctx.split_rows(rows.len(), width, Rows(out, width), |r, out| {
        for (out, row) in out.0.chunks_exact_mut(width).zip(&rows[r]) {
            out.copy_from_slice(x.row(*row as usize));
        }
    });
}

/// [`gather_pieces`] where x lies in one piece: any rows x width.
pub fn gather_rows(ctx: &Ctx, x: &[f32], width: usize, rows: &[u32], out: &mut [f32]) {
    gather_pieces(ctx, &Pieces::new(width, [x]), rows, out);
}

/// What each row is made of: its terms are those of `first[row]..first[row + 1]`, ascending by block.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// rows + 1.
    pub first: &'a [u32],
    /// Which row of the operand each term is.
    pub slots: &'a [u32],
    /// Factor of each term; empty: ones.
    pub gates: &'a [f32],
    /// Block of each term; empty: one block.
    pub blocks: &'a [u32],
    /// Blocks; a power of two.
    pub num_blocks: usize,
}

/// Sum of the terms of each row: inside a block `s = 0`, then `s = fma(gate, y[slot], s)` term by term; then the tree over
/// the blocks that have terms (halves of a power of two; where one half has none, the node is the other). Without terms 0.
///
/// out: rows x width.
pub fn combine_pieces(ctx: &Ctx, y: &Pieces, terms: &Terms, out: &mut [f32]) {
    let (rows, width) = (terms.first.len() - 1, y.width);
    assert!(
        out.len() == rows * width
            && (terms.gates.is_empty() || terms.gates.len() == terms.slots.len())
            && (terms.blocks.is_empty() || terms.blocks.len() == terms.slots.len())
            && terms.num_blocks.is_power_of_two(),
        "{rows} rows of {width} combined into {}, {} terms in {} blocks",
        out.len(),
        terms.slots.len(),
        terms.num_blocks
    );
    let work = (terms.first[rows] - terms.first[0]) as usize * width / rows.max(1);
    ctx.split_rows(rows, work, Rows(out, width), |r, out| {
        let mut scratch = vec![0.0; width * terms.num_blocks.ilog2() as usize];
        for (row, out) in r.zip(out.0.chunks_exact_mut(width)) {
            let of_row = terms.first[row] as usize..terms.first[row + 1] as usize;
            node(ctx, y, terms, of_row, 0..terms.num_blocks, out, &mut scratch);
        }
    });
}

/// [`combine_pieces`] where y lies in one piece: any rows x width.
pub fn combine(ctx: &Ctx, y: &[f32], width: usize, terms: &Terms, out: &mut [f32]) {
    combine_pieces(ctx, &Pieces::new(width, [y]), terms, out);
}

/// The node of the tree over `blocks`; `scratch` has a row per level below it.
fn node(
    ctx: &Ctx,
    y: &Pieces,
    terms: &Terms,
    of: Range<usize>,
    blocks: Range<usize>,
    out: &mut [f32],
    scratch: &mut [f32],
) {
    if blocks.len() == 1 || of.is_empty() {
        out.fill(0.0);
        for term in of {
            let slot = terms.slots[term] as usize;
            let gate = terms.gates.get(term).copied().unwrap_or(1.0);
            add_scaled(ctx.level(), gate, y.row(slot), out);
        }
        return;
    }
    let mid = blocks.start + blocks.len() / 2;
    let cut = of.start + terms.blocks[of.clone()].partition_point(|block| (*block as usize) < mid);
    match (cut == of.start, cut == of.end) {
        (true, _) => node(ctx, y, terms, of, mid..blocks.end, out, scratch),
        (_, true) => node(ctx, y, terms, of, blocks.start..mid, out, scratch),
        _ => {
            let (right, below) = scratch.split_at_mut(out.len());
            node(ctx, y, terms, of.start..cut, blocks.start..mid, out, below);
            node(ctx, y, terms, cut..of.end, mid..blocks.end, right, below);
            add_scaled(ctx.level(), 1.0, right, out);
        }
    }
}

by_level! {
    fn add_scaled(gate: f32, y: &[f32], out: &mut [f32]) {
        out.iter_mut().zip(y).for_each(|(o, y)| *o = gate.mul_add(*y, *o));
    }
}

/// What experts make of the gradient of their activation, in one pass and in place, slot by slot. With
/// a = silu(gate) up: d_gates = d_act . a; then with d = g d_act for the slot's gate g: gate becomes
/// d up s (1 + gate (1 - s)), up becomes d gate s, where s = 1 / (1 + e^-gate), and d_act becomes g a, which the gradient of the
/// down projection reads.
///
/// gate, up, d_act: slots x width; gates, d_gates: slots.
pub fn experts_backward(
    ctx: &Ctx,
    gates: &[f32],
    width: usize,
    gate: &mut [f32],
    up: &mut [f32],
    d_act: &mut [f32],
    d_gates: &mut [f32],
) {
    let n = gates.len();
    assert!(
        gate.len() == n * width && up.len() == n * width && d_act.len() == n * width && d_gates.len() == n,
        "experts of {n} slots x {width}: {}, {}, {}, {}",
        gate.len(),
        up.len(),
        d_act.len(),
        d_gates.len()
    );
    let outputs = ((Rows(gate, width), Rows(up, width), Rows(d_act, width)), Rows(d_gates, 1));
    ctx.split_rows(n, 4 * width, outputs, |r, ((gate, up, d_act), d_gates)| {
        let mut scratch = vec![0.0; 2 * width];
        experts_backward_rows(ctx.level(), &gates[r], width, gate.0, up.0, d_act.0, d_gates.0, &mut scratch);
    });
}

by_level! {
    fn experts_backward_rows(
        gates: &[f32],
        width: usize,
        gate: &mut [f32],
        up: &mut [f32],
        d_act: &mut [f32],
        d_gates: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (act, sigma) = scratch.split_at_mut(width);
        let rows = gate.chunks_exact_mut(width).zip(up.chunks_exact_mut(width)).zip(d_act.chunks_exact_mut(width));
        for ((((gate, up), d_act), g_slot), d_gate) in rows.zip(gates).zip(d_gates) {
            for (((act, sigma), &g), &u) in act.iter_mut().zip(sigma.iter_mut()).zip(&*gate).zip(&*up) {
                *sigma = 1.0 / (1.0 + exp(-g));
                *act = g * *sigma * u;
            }
            *d_gate = lanes::dot(d_act, act);
            for ((((gate, up), d_act), act), &sigma) in gate.iter_mut().zip(up).zip(d_act).zip(&*act).zip(&*sigma) {
                let (g, u, d) = (*gate, *up, *d_act * *g_slot);
                *d_act = *act * *g_slot;
                *up = d * (g * sigma);
                *gate = d * u * sigma * g.mul_add(1.0 - sigma, 1.0);
            }
        }
    }
}

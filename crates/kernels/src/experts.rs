//! Rows to experts and back: grouping, gathering, and the weighted sum of what the experts made of a row.

use std::ops::Range;

use crate::ctx::{Ctx, Rows};
use crate::lanes;
use crate::simd::by_level;

/// Which rows each expert works on. A slot is one (row, chosen expert); slots stand by expert, then part, then row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    parts: usize,
    /// First slot of each (expert, part), and the end.
    starts: Vec<usize>,
    /// Row of each slot.
    pub rows: Vec<u32>,
    /// Slot of each (row, choice): rows x per_token.
    pub slots: Vec<u32>,
}

impl Groups {
    /// Groups the rows of `parts` (each part its row ranges in order) by expert; every row lies in one part.
    ///
    /// chosen: rows x per_token, experts ascending, each below `experts`.
    pub fn new(chosen: &[u32], per_token: usize, experts: usize, parts: &[Vec<Range<usize>>]) -> Self {
        let of = |part: usize| parts[part].iter().cloned().flatten();
        let choices = |row: usize| row * per_token..(row + 1) * per_token;
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

/// `out[i] = x[rows[i]]`; x: any rows x width, out: rows.len() x width.
pub fn gather_rows(ctx: &Ctx, x: &[f32], width: usize, rows: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * width, "{} rows of {width} gathered", rows.len());
    ctx.split_rows(rows.len(), width, Rows(out, width), |r, out| {
        for (out, row) in out.0.chunks_exact_mut(width).zip(&rows[r]) {
            out.copy_from_slice(&x[*row as usize * width..(*row as usize + 1) * width]);
        }
    });
}

/// Sum of what the experts made of each row: `out = 0`, then for the row's choices ascending
/// `out = fma(gate, y[slot], out)`; an empty `gates` counts as ones.
///
/// y: slots x width; slots, gates: rows x per_token; out: rows x width.
pub fn combine(ctx: &Ctx, y: &[f32], width: usize, per_token: usize, slots: &[u32], gates: &[f32], out: &mut [f32]) {
    let rows = slots.len() / per_token;
    assert!(out.len() == rows * width && (gates.is_empty() || gates.len() == slots.len()), "{rows} rows combined");
    ctx.split_rows(rows, per_token * width, Rows(out, width), |r, out| {
        for (row, out) in r.zip(out.0.chunks_exact_mut(width)) {
            out.fill(0.0);
            let choices = row * per_token..(row + 1) * per_token;
            for (choice, slot) in choices.clone().zip(&slots[choices]) {
                let slot = *slot as usize;
                let gate = gates.get(choice).copied().unwrap_or(1.0);
                add_scaled(ctx.level(), gate, &y[slot * width..(slot + 1) * width], out);
            }
        }
    });
}

by_level! {
    fn add_scaled(gate: f32, y: &[f32], out: &mut [f32]) {
        out.iter_mut().zip(y).for_each(|(o, y)| *o = gate.mul_add(*y, *o));
    }
}

/// Gradient of the gates, and the gates onto both factors: `d_gates = dot(d_act, act)`, then `act *= gate` (for the
/// gradient of the down projection) and `d_act *= gate`.
///
/// act, d_act: slots x width; gates, d_gates: slots.
pub fn gates_backward(ctx: &Ctx, gates: &[f32], width: usize, act: &mut [f32], d_act: &mut [f32], d_gates: &mut [f32]) {
    let n = gates.len();
    assert!(
        act.len() == n * width && d_act.len() == n * width && d_gates.len() == n,
        "gates of {n} rows x {width}: {}, {}, {}",
        act.len(),
        d_act.len(),
        d_gates.len()
    );
    let outputs = (Rows(act, width), Rows(d_act, width), Rows(d_gates, 1));
    ctx.split_rows(n, 2 * width, outputs, |r, (act, d_act, d_gates)| {
        gates_backward_rows(ctx.level(), &gates[r], width, act.0, d_act.0, d_gates.0);
    });
}

by_level! {
    fn gates_backward_rows(gates: &[f32], width: usize, act: &mut [f32], d_act: &mut [f32], d_gates: &mut [f32]) {
        let rows = act.chunks_exact_mut(width).zip(d_act.chunks_exact_mut(width));
        for (((act, d_act), gate), d_gate) in rows.zip(gates).zip(d_gates) {
            *d_gate = lanes::dot(d_act, act);
            act.iter_mut().for_each(|a| *a *= gate);
            d_act.iter_mut().for_each(|d| *d *= gate);
        }
    }
}

//! Cross-entropy over slices of the vocabulary.

use crate::ctx::{Ctx, Rows};
use crate::lanes;
use crate::math::{exp, ln};
use crate::simd::by_level;

/// Target of a token that has none.
pub const IGNORE: u32 = u32::MAX;

/// What one slice of the vocabulary knows of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct XentStat {
    /// Largest logit of the slice; -inf for an empty slice.
    pub max: f32,
    /// Sum of e^(logit - max) over the slice.
    pub sum: f32,
    /// Logit of the target if it lies in the slice, else 0.
    pub target: f32,
}

impl XentStat {
    /// [max, sum, target], as it travels between ranks.
    pub fn to_array(self) -> [f32; 3] {
        [self.max, self.sum, self.target]
    }

    /// Inverse of [`XentStat::to_array`].
    pub fn from_array([max, sum, target]: [f32; 3]) -> Self {
        XentStat { max, sum, target }
    }
}

/// What the whole vocabulary knows of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct XentTotal {
    /// Largest logit.
    pub max: f32,
    /// Sum of e^(logit - max).
    pub sum: f32,
    /// Logit of the target.
    pub target: f32,
}

impl XentTotal {
    /// -ln softmax(target) = ln(sum) + max - target. Without meaning for a token that has no target.
    pub fn loss(&self) -> f32 {
        ln(self.sum) + self.max - self.target
    }
}

/// Statistics of one slice for a block of tokens.
///
/// logits: rows x width, of which the first `valid` columns count; `first` is the global id of column 0; targets: rows
/// of global ids or [`IGNORE`]; out: rows.
pub fn xent_stats(
    ctx: &Ctx,
    logits: &[f32],
    width: usize,
    valid: usize,
    first: u32,
    targets: &[u32],
    out: &mut [XentStat],
) {
    let rows = targets.len();
    assert!(
        valid <= width && logits.len() == rows * width && out.len() == rows,
        "cross-entropy of {} logits, {rows} rows x {width}, {valid} valid, {} stats",
        logits.len(),
        out.len()
    );
    ctx.split_rows(rows, 4 * width, Rows(out, 1), |r, out| {
        for (row, out) in r.zip(out.0) {
            let logits = &logits[row * width..row * width + valid];
            let target = column(targets[row], first, valid).map_or(0.0, |c| logits[c]);
            let (max, sum) = stats(ctx.level(), logits);
            *out = XentStat { max, sum, target };
        }
    });
}

/// Column of the target, if the slice has it.
fn column(target: u32, first: u32, valid: usize) -> Option<usize> {
    let column = target.checked_sub(first)? as usize;
    (target != IGNORE && column < valid).then_some(column)
}

by_level! {
    fn stats(logits: &[f32]) -> (f32, f32) {
        let max = lanes::max(logits);
        let mut acc = [0.0f32; lanes::LANES];
        let (chunks, tail) = logits.as_chunks::<{ lanes::LANES }>();
        for x in chunks {
            for l in 0..lanes::LANES {
                acc[l] += exp(x[l] - max);
            }
        }
        for (l, x) in tail.iter().enumerate() {
            acc[l] += exp(x - max);
        }
        (max, lanes::tree(&acc))
    }
}

/// Combines the stats of one token over the slices, in the order of the slices.
///
/// max is exact; each sum is rescaled by e^(max_t - max), then sum(lo..hi) = sum(lo..mid) + sum(mid..hi) with mid - lo
/// the largest power of two below hi - lo.
pub fn xent_combine(stats: &[XentStat]) -> XentTotal {
    let max = stats.iter().fold(f32::NEG_INFINITY, |m, s| lanes::larger(s.max, m));
    let (sum, target) = combine(stats, max);
    XentTotal { max, sum, target }
}

fn combine(stats: &[XentStat], max: f32) -> (f32, f32) {
    match stats {
        [] => (0.0, 0.0),
        [one] => (one.sum * exp(one.max - max), one.target),
        _ => {
            let (a, b) = stats.split_at(stats.len().next_power_of_two() / 2);
            let ((sum_a, target_a), (sum_b, target_b)) = (combine(a, max), combine(b, max));
            (sum_a + sum_b, target_a + target_b)
        }
    }
}

/// In place: logits become softmax - onehot(target), not scaled; rows with [`IGNORE`] and padding columns become 0.
///
/// Shapes as [`xent_stats`]; totals: rows.
pub fn xent_grad(
    ctx: &Ctx,
    logits: &mut [f32],
    width: usize,
    valid: usize,
    first: u32,
    targets: &[u32],
    totals: &[XentTotal],
) {
    let rows = targets.len();
    assert!(
        valid <= width && logits.len() == rows * width && totals.len() == rows,
        "cross-entropy gradient of {} logits, {rows} rows x {width}, {valid} valid, {} totals",
        logits.len(),
        totals.len()
    );
    ctx.split_rows(rows, 2 * width, Rows(logits, width), |r, logits| {
        for (i, row) in r.enumerate() {
            let logits = &mut logits.0[i * width..(i + 1) * width];
            if targets[row] == IGNORE {
                logits.fill(0.0);
                continue;
            }
            let (logits, padding) = logits.split_at_mut(valid);
            padding.fill(0.0);
            softmax(ctx.level(), logits, totals[row].max, 1.0 / totals[row].sum);
            if let Some(c) = column(targets[row], first, valid) {
                logits[c] -= 1.0;
            }
        }
    });
}

by_level! {
    fn softmax(logits: &mut [f32], max: f32, inv_sum: f32) {
        for x in logits {
            *x = exp(*x - max) * inv_sum;
        }
    }
}

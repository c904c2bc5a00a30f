//! The router of a mixture of experts: scores, choice, gates, and their gradient. One row is one token.

use crate::ctx::{Ctx, Rows};
use crate::lanes;
use crate::math::exp;
use crate::simd::by_level;

/// The shape of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterShape {
    /// Experts.
    pub experts: usize,
    /// Experts chosen for each row, at most `experts`.
    pub per_token: usize,
    /// Scores are sigmoids of each logit; else a softmax over all.
    pub sigmoid: bool,
    /// Gates are the chosen scores divided by their sum; else the scores.
    pub renorm: bool,
}

/// Chooses experts: those with the largest score + bias, of equal ones the lower index; NaN is never larger.
///
/// logits, scores: rows x experts; bias: experts, or empty; chosen, gates: rows x per_token, experts ascending. The
/// bias is not in the gates.
pub fn route(
    ctx: &Ctx,
    shape: &RouterShape,
    logits: &[f32],
    bias: &[f32],
    scores: &mut [f32],
    chosen: &mut [u32],
    gates: &mut [f32],
) {
    let RouterShape { experts, per_token, .. } = *shape;
    assert!((1..=experts).contains(&per_token), "{per_token} of {experts} experts");
    let rows = logits.len() / experts;
    assert!(
        logits.len() == rows * experts
            && scores.len() == logits.len()
            && chosen.len() == rows * per_token
            && gates.len() == chosen.len()
            && (bias.is_empty() || bias.len() == experts),
        "router of {rows} rows x {experts}: {} logits, {} biases, {} scores, {} chosen, {} gates",
        logits.len(),
        bias.len(),
        scores.len(),
        chosen.len(),
        gates.len()
    );
    let outputs = (Rows(scores, experts), Rows(chosen, per_token), Rows(gates, per_token));
    ctx.split_rows(rows, 8 * experts, outputs, |r, (scores, chosen, gates)| {
        let logits = &logits[r.start * experts..r.end * experts];
        scores_of(ctx.level(), shape.sigmoid, experts, logits, scores.0);
        let rows = scores.0.chunks_exact(experts).zip(chosen.0.chunks_exact_mut(per_token));
        for ((scores, chosen), gates) in rows.zip(gates.0.chunks_exact_mut(per_token)) {
            choose(scores, bias, chosen);
            let sum = if shape.renorm { chosen.iter().map(|e| scores[*e as usize]).sum() } else { 1.0 };
            gates.iter_mut().zip(chosen.iter()).for_each(|(gate, e)| *gate = scores[*e as usize] / sum);
        }
    });
}

by_level! {
    fn scores_of(sigmoid: bool, experts: usize, logits: &[f32], scores: &mut [f32]) {
        for (logits, scores) in logits.chunks_exact(experts).zip(scores.chunks_exact_mut(experts)) {
            if sigmoid {
                scores.iter_mut().zip(logits).for_each(|(s, l)| *s = 1.0 / (1.0 + exp(-l)));
                continue;
            }
            let max = lanes::max(logits);
            scores.iter_mut().zip(logits).for_each(|(s, l)| *s = exp(l - max));
            let sum = lanes::sum(scores);
            scores.iter_mut().for_each(|s| *s /= sum);
        }
    }
}

/// The experts with the largest biased scores, ascending.
fn choose(scores: &[f32], bias: &[f32], chosen: &mut [u32]) {
    let value = |e: u32| scores[e as usize] + bias.get(e as usize).copied().unwrap_or(0.0);
    // An insertion into the few best so far: `chosen[..n]`, best first.
    let mut n = 0;
    for e in 0..scores.len() as u32 {
        let mut at = n;
        while at > 0 && value(e) > value(chosen[at - 1]) {
            at -= 1;
        }
        if at == chosen.len() {
            continue;
        }
        n = (n + 1).min(chosen.len());
        chosen[at..n].rotate_right(1);
        chosen[at] = e;
    }
    chosen.sort_unstable();
}

/// Gradient of [`route`] with the choice held fixed.
///
/// d_gates: rows x per_token; aux: experts, the gradient of an auxiliary loss with respect to every row's normalised
/// scores (softmax: the scores), or empty; d_logits: rows x experts, stored.
#[allow(clippy::too_many_arguments)] // a gradient is its operands
pub fn route_backward(
    ctx: &Ctx,
    shape: &RouterShape,
    scores: &[f32],
    chosen: &[u32],
    gates: &[f32],
    d_gates: &[f32],
    aux: &[f32],
    d_logits: &mut [f32],
) {
    let RouterShape { experts, per_token, .. } = *shape;
    let rows = scores.len() / experts;
    let narrow = rows * per_token;
    assert!(
        d_logits.len() == rows * experts
            && [chosen.len(), gates.len(), d_gates.len()] == [narrow; 3]
            && (aux.is_empty() || aux.len() == experts),
        "router gradient of {rows} rows x {experts}"
    );
    ctx.split_rows(rows, 4 * experts, Rows(d_logits, experts), |r, d_logits| {
        let (wide, narrow) = (r.start * experts..r.end * experts, r.start * per_token..r.end * per_token);
        let (chosen, gates, d_gates) = (&chosen[narrow.clone()], &gates[narrow.clone()], &d_gates[narrow]);
        backward(ctx.level(), shape, &scores[wide], chosen, gates, d_gates, aux, d_logits.0);
    });
}

by_level! {
    fn backward(
        shape: &RouterShape,
        scores: &[f32],
        chosen: &[u32],
        gates: &[f32],
        d_gates: &[f32],
        aux: &[f32],
        d_logits: &mut [f32],
    ) {
        let RouterShape { experts, per_token, sigmoid, renorm } = *shape;
        let narrow = chosen.chunks_exact(per_token).zip(gates.chunks_exact(per_token));
        let rows = scores.chunks_exact(experts).zip(d_logits.chunks_exact_mut(experts));
        for (((scores, d), (chosen, gates)), d_gates) in rows.zip(narrow).zip(d_gates.chunks_exact(per_token)) {
            // First the gradient of the scores, in place.
            match (aux.is_empty(), sigmoid) {
                (true, _) => d.fill(0.0),
                (false, false) => d.copy_from_slice(aux),
                (false, true) => {
                    let sum = lanes::sum(scores);
                    let mean = lanes::dot(scores, aux) / sum;
                    d.iter_mut().zip(aux).for_each(|(d, a)| *d = (a - mean) / sum);
                }
            }
            let (mut sum, mut inner) = (1.0, 0.0);
            if renorm {
                sum = chosen.iter().map(|e| scores[*e as usize]).sum();
                inner = gates.iter().zip(d_gates).map(|(g, d)| g * d).sum();
            }
            for (e, d_gate) in chosen.iter().zip(d_gates) {
                d[*e as usize] += (d_gate - inner) / sum;
            }
            if sigmoid {
                d.iter_mut().zip(scores).for_each(|(d, s)| *d *= s * (1.0 - s));
            } else {
                let mean = lanes::dot(scores, d);
                d.iter_mut().zip(scores).for_each(|(d, s)| *d = s * (*d - mean));
            }
        }
    }
}

/// Sums of the normalised scores over the rows of `rows`, in f64, rows ascending; experts.
pub fn score_sums(shape: &RouterShape, scores: &[f32], rows: &[std::ops::Range<usize>]) -> Vec<f64> {
    let mut sums = vec![0.0; shape.experts];
    for row in rows.iter().cloned().flatten() {
        let scores = &scores[row * shape.experts..(row + 1) * shape.experts];
        let total = if shape.sigmoid { scores.iter().map(|s| f64::from(*s)).sum() } else { 1.0 };
        sums.iter_mut().zip(scores).for_each(|(sum, s)| *sum += f64::from(*s) / total);
    }
    sums
}

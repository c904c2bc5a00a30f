//! A mixture of experts as loops over all experts in f64.

use crate::{Mat, RouterShape};

/// Gates of one row, 0 where an expert is not chosen; `scores` and choice as [`crate::route`] has them.
pub fn gates(shape: &RouterShape, logits: &[f32], bias: &[f32]) -> Vec<f64> {
    let logits: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, l| m.max(*l));
    let raw: Vec<f64> =
        logits.iter().map(|l| if shape.sigmoid { 1.0 / (1.0 + (-l).exp()) } else { (l - max).exp() }).collect();
    let total = if shape.sigmoid { 1.0 } else { raw.iter().sum() };
    let scores: Vec<f64> = raw.iter().map(|s| s / total).collect();
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let value = |e: usize| scores[e] + f64::from(bias.get(e).copied().unwrap_or(0.0));
    order.sort_by(|a, b| value(*b).total_cmp(&value(*a)).then(a.cmp(b)));
    let chosen = &order[..shape.per_token];
    let sum: f64 = if shape.renorm { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
    (0..scores.len()).map(|e| if chosen.contains(&e) { scores[e] / sum } else { 0.0 }).collect()
}

/// y = sum over experts of gate x down(silu(gate x) up x) for one row; matrices [out, in], by expert.
pub fn experts(x: &[f32], gates: &[f64], up_gate_down: &[[Mat; 3]]) -> Vec<f64> {
    let times = |w: &Mat, x: &[f64]| -> Vec<f64> {
        (0..w.rows).map(|i| (0..w.cols).map(|j| f64::from(w.at(i, j)) * x[j]).sum()).collect()
    };
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let mut y = vec![0.0; x.len()];
    for (gate, [w_up, w_gate, w_down]) in gates.iter().zip(up_gate_down).filter(|(gate, _)| **gate != 0.0) {
        let (g, u) = (times(w_gate, &x), times(w_up, &x));
        let act: Vec<f64> = g.iter().zip(&u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        y.iter_mut().zip(times(w_down, &act)).for_each(|(y, o)| *y += gate * o);
    }
    y
}

//! Attention with the full row of scores, in f64.

use crate::AttnShape;

/// Weights of query `n` of sequence `b` over all keys; zero where it may not look.
fn weights(s: &AttnShape, q: &[f32], k: &[f32], doc_start: &[u32], b: usize, n: usize, h: usize) -> (Vec<f64>, f64) {
    let (d, g) = (s.head_dim, h / (s.heads / s.kv_heads));
    let row = b * s.queries.len() + n;
    let i = s.queries.positions().nth(n).expect("a query has a position");
    let q = &q[(row * s.heads + h) * d..][..d];
    let seen = doc_start[row] as usize..i + 1;
    let score = |j: usize| {
        let k = &k[((b * s.seq + j) * s.kv_heads + g) * d..][..d];
        q.iter().zip(k).map(|(&q, &k)| q as f64 * k as f64).sum::<f64>() / (d as f64).sqrt()
    };
    let scores: Vec<f64> = (0..s.seq).map(|j| if seen.contains(&j) { score(j) } else { f64::NEG_INFINITY }).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    (scores.iter().map(|s| (s - max).exp() / sum).collect(), max + sum.ln())
}

/// (o, lse); shapes as [`crate::attention()`].
pub fn attention(s: &AttnShape, q: &[f32], k: &[f32], v: &[f32], doc_start: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let d = s.head_dim;
    let mut o = vec![0.0; q.len()];
    let mut lse = vec![0.0; s.rows() * s.heads];
    for b in 0..s.batch {
        for n in 0..s.queries.len() {
            for h in 0..s.heads {
                let (p, l) = weights(s, q, k, doc_start, b, n, h);
                let at = (b * s.queries.len() + n) * s.heads + h;
                lse[at] = l as f32;
                for e in 0..d {
                    o[at * d + e] = (0..s.seq).map(|j| p[j] * v[kv_at(s, b, j, h) + e] as f64).sum::<f64>() as f32;
                }
            }
        }
    }
    (o, lse)
}

/// First element of key j for query head h.
fn kv_at(s: &AttnShape, b: usize, j: usize, h: usize) -> usize {
    ((b * s.seq + j) * s.kv_heads + h / (s.heads / s.kv_heads)) * s.head_dim
}

/// (dq, dk, dv); shapes as [`crate::attention_backward()`].
pub fn attention_backward(
    s: &AttnShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    d_o: &[f32],
    doc_start: &[u32],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let d = s.head_dim;
    let (mut dq, mut dk, mut dv) = (vec![0.0f64; q.len()], vec![0.0f64; k.len()], vec![0.0f64; v.len()]);
    for b in 0..s.batch {
        for n in 0..s.queries.len() {
            for h in 0..s.heads {
                let (p, _) = weights(s, q, k, doc_start, b, n, h);
                let at = ((b * s.queries.len() + n) * s.heads + h) * d;
                let dp: Vec<f64> = (0..s.seq)
                    .map(|j| (0..d).map(|e| d_o[at + e] as f64 * v[kv_at(s, b, j, h) + e] as f64).sum())
                    .collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for j in 0..s.seq {
                    let ds = p[j] * (dp[j] - mean) / (d as f64).sqrt();
                    let kv = kv_at(s, b, j, h);
                    for e in 0..d {
                        dq[at + e] += ds * k[kv + e] as f64;
                        dk[kv + e] += ds * q[at + e] as f64;
                        dv[kv + e] += p[j] * d_o[at + e] as f64;
                    }
                }
            }
        }
    }
    let round = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
    (round(dq), round(dk), round(dv))
}

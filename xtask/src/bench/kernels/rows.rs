//! Kernels beside the products, on the sizes of a shape: attention by arithmetic, the others by memory.

use std::cell::RefCell;

use kernels::{
    Acc, AdamW, AttnShape, Queries, XentStat, adamw, add_assign, attention, attention_backward, rms_norm,
    rms_norm_backward, swiglu, swiglu_backward, xent_combine, xent_grad, xent_stats,
};

use super::{Bench, Limit, Measured, model, normal};
use crate::bench::shapes::Shape;

/// Parameters of the update that is measured: more than the caches hold.
const UPDATED: usize = 16 << 20;

/// Measures the kernels of `shape`.
pub fn measure(bench: &Bench, shape: &Shape) -> Result<(), String> {
    let model = model(shape)?;
    attentions(bench, shape, &model);
    let tokens = shape.seq * shape.batch;
    norms(bench, shape, tokens, model.hidden);
    activations(bench, shape, tokens, model.ffn);
    let blocks = program::TokenBlocks::new(tokens, model.vocab_padded());
    losses(bench, shape, blocks.most(), model.vocab_padded());
    if shape.name == "L" {
        update(bench, shape);
    }
    Ok(())
}

fn attentions(bench: &Bench, shape: &Shape, model: &spec::Model) {
    let spec::Model { heads, kv_heads, head_dim, .. } = *model;
    let (batch, seq) = (shape.batch, shape.seq);
    let attn = AttnShape { batch, seq, queries: Queries::all(seq), heads, kv_heads, head_dim };
    let (wide, narrow) = (attn.rows() * heads * head_dim, attn.keys() * kv_heads * head_dim);
    let (q, k, v, d_o) = (normal(1, wide), normal(2, narrow), normal(3, narrow), normal(4, wide));
    let docs = vec![0; attn.rows()];
    let (mut o, mut lse) = (vec![0.0; wide], vec![0.0; attn.rows() * heads]);
    // Two products over the half of seq x seq that a causal mask leaves; five of them backward.
    let work = 2e-9 * (batch * heads * seq * seq * head_dim) as f64;
    let size = format!("{batch} x {seq}, {heads}/{kv_heads} x {head_dim}");
    let what =
        |kernel, work| Measured { shape: shape.name, kernel, size: size.clone(), limit: Limit::Arithmetic, work };
    bench.alone(&what("attention", work), || attention(&bench.ctx, &attn, &q, &k, &v, &docs, &mut o, &mut lse));
    let (mut dq, mut dk, mut dv) = (vec![0.0; wide], vec![0.0; narrow], vec![0.0; narrow]);
    bench.alone(&what("attention backward", 2.5 * work), || {
        attention_backward(&bench.ctx, &attn, &q, &k, &v, &o, &lse, &d_o, &docs, &mut dq, &mut dk, &mut dv);
    });
}

/// 10^9 bytes of `arrays` arrays of `n` floats.
fn bytes(arrays: usize, n: usize) -> f64 {
    4e-9 * (arrays * n) as f64
}

fn norms(bench: &Bench, shape: &Shape, rows: usize, h: usize) {
    let n = rows * h;
    let (x, dy, w) = (normal(1, n), normal(2, n), normal(3, h));
    let (mut y, mut inv) = (vec![0.0; n], vec![0.0; rows]);
    let what = |kernel, arrays| Measured {
        shape: shape.name,
        kernel,
        size: format!("{rows} x {h}"),
        limit: Limit::Memory,
        work: bytes(arrays, n),
    };
    bench.alone(&what("norm", 2), || rms_norm(&bench.ctx, &x, &w, 1e-5, &mut y, &mut inv));
    bench.alone(&what("norm backward", 4), || rms_norm_backward(&bench.ctx, &x, &w, &inv, &dy, &mut y, Acc::Add));
    bench.alone(&what("add", 3), || add_assign(&bench.ctx, &mut y, &x));
}

fn activations(bench: &Bench, shape: &Shape, rows: usize, width: usize) {
    let n = rows * width;
    let (gate, up, d) = (normal(1, n), normal(2, n), normal(3, n));
    let (mut act, mut d_up) = (vec![0.0; n], vec![0.0; n]);
    let what = |kernel, arrays| Measured {
        shape: shape.name,
        kernel,
        size: format!("{rows} x {width}"),
        limit: Limit::Memory,
        work: bytes(arrays, n),
    };
    bench.alone(&what("swiglu", 3), || swiglu(&bench.ctx, &gate, &up, &mut act));
    bench.alone(&what("swiglu backward", 5), || swiglu_backward(&bench.ctx, &gate, &up, &d, &mut act, &mut d_up));
}

fn losses(bench: &Bench, shape: &Shape, rows: usize, vocab: usize) {
    let n = rows * vocab;
    // The gradient is taken in place, over and over: its values stay finite.
    let logits = RefCell::new(normal(1, n));
    let targets = vec![3; rows];
    let mut stats = vec![XentStat::default(); rows];
    let what = |kernel, arrays| Measured {
        shape: shape.name,
        kernel,
        size: format!("{rows} x {vocab}"),
        limit: Limit::Memory,
        work: bytes(arrays, n),
    };
    bench.alone(&what("loss", 1), || {
        xent_stats(&bench.ctx, &logits.borrow(), vocab, vocab, 0, &targets, &mut stats);
    });
    let totals: Vec<_> = stats.iter().map(|s| xent_combine(std::slice::from_ref(s))).collect();
    bench.alone(&what("loss gradient", 2), || {
        xent_grad(&bench.ctx, &mut logits.borrow_mut(), vocab, vocab, 0, &targets, &totals);
    });
}

fn update(bench: &Bench, shape: &Shape) {
    let n = UPDATED;
    let (mut p, g) = (normal(1, n), normal(2, n));
    let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
    let step = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 0.5,
        correction2: 0.5,
        grad_scale: 1.0,
    };
    let what = Measured {
        shape: shape.name,
        kernel: "adamw",
        size: format!("{} Mi", n >> 20),
        limit: Limit::Memory,
        work: bytes(7, n),
    };
    bench.alone(&what, || adamw(&bench.ctx, &step, &mut p, &g, &mut m, &mut v));
}

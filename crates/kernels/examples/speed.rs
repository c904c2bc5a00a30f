//! Throughput of the kernels on one thread (or as many as the first argument says), per instruction path.

use std::hint::black_box;
use std::time::Instant;

use kernels::{
    Acc, AdamW, AttnShape, Ctx, Mat, MatMut, Queries, Simd, XentStat, adamw, attention, attention_backward,
    fill_normal, measure_peak, product, rms_norm, rms_norm_backward, swiglu, swiglu_backward, xent_grad, xent_stats,
};

/// Shortest time of one call, in seconds, over about 0.2 s.
fn time(mut f: impl FnMut()) -> f64 {
    f();
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < 0.2 {
        let one = Instant::now();
        f();
        best = best.min(one.elapsed().as_secs_f64());
    }
    best
}

fn normal(stream: u64, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    fill_normal(&Ctx::new(Simd::detect(), 1), 1, stream, 0, 1.0, &mut out);
    out
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1);
    for simd in Simd::available() {
        let ctx = Ctx::new(simd, threads);
        let peak = measure_peak(simd, threads);
        println!("{simd}, {threads} threads: peak {peak:.1} GFLOP/s");
        products(&ctx, peak);
        attentions(&ctx);
        rows(&ctx);
    }
}

fn products(ctx: &Ctx, peak: f64) {
    let shapes = [
        (32, 64, 64),
        (32, 16, 64),
        (256, 256, 256),
        (1024, 512, 512),
        (1024, 1408, 512),
        (1024, 512, 1408),
        (2048, 1408, 512),
        (512, 512, 2048),
        (2048, 8192, 1408),
    ];
    for (m, n, k) in shapes {
        let (x, w, dy) = (normal(1, m * k), normal(2, n * k), normal(3, m * n));
        let (mut y, mut dx, mut dw) = (vec![0.0; m * n], vec![0.0; m * k], vec![0.0; n * k]);
        let (xm, wm, dym) = (Mat::new(&x, m, k), Mat::new(&w, n, k), Mat::new(&dy, m, n));
        let flops = 2e-9 * (m * n * k) as f64;
        let forward = time(|| product(ctx, xm, wm.t(), MatMut::new(&mut y, m, n), Acc::Store));
        let input = time(|| product(ctx, dym, wm, MatMut::new(&mut dx, m, k), Acc::Store));
        let weight = time(|| product(ctx, dym.t(), xm, MatMut::new(&mut dw, n, k), Acc::Add));
        let share = |t: f64| format!("{:6.1} ({:2.0}%)", flops / t, 100.0 * flops / t / peak);
        println!(
            "  product rows {m} out {n} in {k}: y {}  dx {}  dw {}  GFLOP/s",
            share(forward),
            share(input),
            share(weight)
        );
    }
}

fn attentions(ctx: &Ctx) {
    for (batch, seq, heads, kv_heads, head_dim) in [(4, 256, 8, 4, 64), (1, 2048, 8, 4, 64), (4, 64, 4, 2, 16)] {
        let shape = AttnShape { batch, seq, queries: Queries::all(seq), heads, kv_heads, head_dim };
        let (wide, narrow) = (shape.rows() * heads * head_dim, shape.rows() * kv_heads * head_dim);
        let (q, k, v, d_o) = (normal(1, wide), normal(2, narrow), normal(3, narrow), normal(4, wide));
        let docs = vec![0; shape.rows()];
        let (mut o, mut lse) = (vec![0.0; wide], vec![0.0; shape.rows() * heads]);
        let forward = time(|| attention(ctx, &shape, &q, &k, &v, &docs, &mut o, &mut lse));
        let (mut dq, mut dk, mut dv) = (vec![0.0; wide], vec![0.0; narrow], vec![0.0; narrow]);
        let backward =
            time(|| attention_backward(ctx, &shape, &q, &k, &v, &o, &lse, &d_o, &docs, &mut dq, &mut dk, &mut dv));
        // Causal: half of seq x seq.
        let flops = 2e-9 * (batch * heads * seq * seq * head_dim) as f64;
        println!(
            "  attention batch {batch} seq {seq} heads {heads} kv {kv_heads} dim {head_dim}: forward {:.3} ms {:.1}, \
             backward {:.3} ms {:.1} causal GFLOP/s",
            forward * 1e3,
            flops / forward,
            backward * 1e3,
            2.5 * flops / backward
        );
    }
}

fn rows(ctx: &Ctx) {
    let (rows, h) = (1024, 1024);
    let n = rows * h;
    let (x, dy, w) = (normal(1, n), normal(2, n), normal(3, h));
    let (mut y, mut z, mut inv) = (vec![0.0; n], vec![0.0; n], vec![0.0; rows]);
    let report = |what: &str, t: f64| println!("  {what}: {:.2} ns an element", t * 1e9 / n as f64);
    report("rms_norm", time(|| rms_norm(ctx, &x, &w, 1e-5, &mut y, &mut inv)));
    report("rms_norm_backward", time(|| rms_norm_backward(ctx, &x, &w, &inv, &dy, &mut y, Acc::Add)));
    report("swiglu", time(|| swiglu(ctx, &x, &dy, &mut y)));
    report("swiglu_backward", time(|| swiglu_backward(ctx, &x, &dy, &x, &mut y, &mut z)));
    let targets = vec![3; rows];
    let mut stats = vec![XentStat::default(); rows];
    report("xent_stats", time(|| xent_stats(ctx, &x, h, h, 0, &targets, &mut stats)));
    let totals: Vec<_> = stats.iter().map(|s| kernels::xent_combine(std::slice::from_ref(s))).collect();
    report("xent_grad", time(|| xent_grad(ctx, &mut y, h, h, 0, &targets, &totals)));
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
    let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
    report("adamw", time(|| adamw(ctx, &step, &mut y, &dy, &mut m, &mut v)));
    report("fill_normal", time(|| fill_normal(ctx, 1, 2, 3, 1.0, &mut z)));
    black_box(&z);
}

//! Every kernel against its textbook twin.

mod common;

use common::{close, documents, normal};
use kernels::{
    Acc, AdamW, AdamWState, AttnShape, Ctx, IGNORE, Mat, MatMut, Queries, RopeTable, Simd, XentStat, adamw,
    adamw_parts, add_assign, attention, attention_backward, checksum, embed, embed_backward, fill_normal, naive,
    product, rms_norm, rms_norm_backward, rms_norm_weight_grad, rope, rope_backward, sum_squares, swiglu,
    swiglu_backward, uniform_u64, xent_combine, xent_grad, xent_stats,
};

fn ctx() -> Ctx {
    Ctx::new(Simd::detect(), 2)
}

#[test]
fn product_matches() {
    for (m, n, k) in [(1, 1, 1), (32, 64, 16), (37, 53, 300), (130, 1100, 70), (5, 7, 0), (3, 4, 600)] {
        let (a, b) = (normal(1, m * k), normal(2, k * n));
        let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
        for acc in [Acc::Store, Acc::Add] {
            let (mut c, mut twin) = (normal(3, m * n), normal(3, m * n));
            product(&ctx(), a, b, MatMut::new(&mut c, m, n), acc);
            naive::product(a, b, &mut twin, acc);
            close("product", &c, &twin, 2e-5);
        }
    }
}

#[test]
fn norm_matches() {
    for (rows, h) in [(1, 1), (5, 20), (9, 128), (33, 70)] {
        let (x, w, dy) = (normal(1, rows * h), normal(2, h), normal(3, rows * h));
        let (mut y, mut inv) = (vec![0.0; rows * h], vec![0.0; rows]);
        rms_norm(&ctx(), &x, &w, 1e-5, &mut y, &mut inv);
        close("norm", &y, &naive::rms_norm(&x, &w, 1e-5), 1e-6);

        let twin = naive::rms_norm_backward(&x, &w, 1e-5, &dy);
        let mut dx = vec![f32::NAN; rows * h];
        rms_norm_backward(&ctx(), &x, &w, &inv, &dy, &mut dx, Acc::Store);
        // With one column the gradient is a difference of equals.
        close("norm dx", &dx, &twin, if h == 1 { 1e-3 } else { 1e-5 });
        let stored = dx.clone();
        rms_norm_backward(&ctx(), &x, &w, &inv, &dy, &mut dx, Acc::Add);
        close("norm dx added", &dx, &stored.iter().map(|d| 2.0 * d).collect::<Vec<_>>(), 1e-6);

        let mut dw = vec![f32::NAN; h];
        for ranges in [&[0..rows, 0..0][..], &[0..rows / 3, rows / 2..rows], &[]] {
            rms_norm_weight_grad(&ctx(), &x, &inv, &dy, h, ranges, &mut dw);
            close("norm dw", &dw, &naive::rms_norm_weight_grad(&x, h, 1e-5, &dy, ranges), 1e-5);
        }
    }
}

#[test]
fn rope_matches() {
    for (head_dim, heads, theta) in [(2, 1, 10_000.0), (20, 3, 10_000.0), (64, 2, 1_000_000.0)] {
        let positions = [0, 1, 2, 77, 4095];
        let table = RopeTable::new(head_dim, theta, 4096);
        let x = normal(1, positions.len() * heads * head_dim);
        let (mut y, mut twin) = (x.clone(), x.clone());
        rope(&ctx(), &table, &positions, heads, &mut y);
        naive::rope(head_dim, theta, &positions, heads, &mut twin, false);
        close("rope", &y, &twin, 1e-6);
        rope_backward(&ctx(), &table, &positions, heads, &mut y);
        naive::rope(head_dim, theta, &positions, heads, &mut twin, true);
        close("rope and back", &y, &twin, 1e-6);
        close("rope and back", &y, &x, 1e-6);
    }
}

#[test]
fn attention_matches() {
    let shapes = [
        (1, 1, 1, 1, 8, vec![1], Queries::all(1)),
        (2, 70, 4, 2, 20, vec![30, 40], Queries::all(70)),
        (1, 200, 2, 1, 16, vec![5, 60, 70, 65], Queries::all(200)),
        (1, 200, 2, 1, 16, vec![5, 60, 70, 65], Queries::spans([50..100, 100..150])),
        (2, 280, 4, 2, 20, vec![90, 190], Queries::spans([70..140, 210..280])),
        (1, 130, 3, 3, 64, vec![130], Queries::all(130)),
        (2, 65, 2, 2, 128, vec![64, 1], Queries::all(65)),
    ];
    for (batch, seq, heads, kv_heads, head_dim, lengths, queries) in shapes {
        let shape = AttnShape { batch, seq, queries, heads, kv_heads, head_dim };
        let starts = documents(&lengths);
        let docs = queries.positions().map(|at| starts[at]).collect::<Vec<_>>().repeat(batch);
        let (wide, narrow) = (shape.rows() * heads * head_dim, shape.keys() * kv_heads * head_dim);
        let (q, k, v, d_o) = (normal(1, wide), normal(2, narrow), normal(3, narrow), normal(4, wide));
        let (mut o, mut lse) = (vec![f32::NAN; wide], vec![f32::NAN; shape.rows() * heads]);
        attention(&ctx(), &shape, &q, &k, &v, &docs, &mut o, &mut lse);
        let (o_twin, lse_twin) = naive::attention(&shape, &q, &k, &v, &docs);
        close("attention", &o, &o_twin, 3e-6);
        close("attention lse", &lse, &lse_twin, 3e-6);

        let (mut dq, mut dk, mut dv) = (vec![f32::NAN; wide], vec![f32::NAN; narrow], vec![f32::NAN; narrow]);
        attention_backward(&ctx(), &shape, &q, &k, &v, &o, &lse, &d_o, &docs, &mut dq, &mut dk, &mut dv);
        let (dq_twin, dk_twin, dv_twin) = naive::attention_backward(&shape, &q, &k, &v, &d_o, &docs);
        close("attention dq", &dq, &dq_twin, 3e-5);
        close("attention dk", &dk, &dk_twin, 3e-5);
        close("attention dv", &dv, &dv_twin, 3e-5);
    }
}

/// The twins' own gradients, against central differences of their forward passes.
#[test]
fn twins_match_differences() {
    let (rows, h, step) = (2, 6, 1e-3f32);
    let (x, w, dy) = (normal(1, rows * h), normal(2, h), normal(3, rows * h));
    let difference = |x: &[f32], i: usize, f: &dyn Fn(&[f32]) -> f64| {
        let (mut up, mut down) = (x.to_vec(), x.to_vec());
        up[i] += step;
        down[i] -= step;
        ((f(&up) - f(&down)) / (up[i] as f64 - down[i] as f64)) as f32
    };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum::<f64>();
    let check = |what: &str, x: &[f32], grad: &[f32], f: &dyn Fn(&[f32]) -> f64| {
        let found: Vec<f32> = (0..x.len()).map(|i| difference(x, i, f)).collect();
        close(what, grad, &found, 2e-3);
    };
    let dx = naive::rms_norm_backward(&x, &w, 1e-5, &dy);
    check("norm dx", &x, &dx, &|x| dot(&naive::rms_norm(x, &w, 1e-5), &dy));
    let dw = naive::rms_norm_weight_grad(&x, h, 1e-5, &dy, std::slice::from_ref(&(0..rows)));
    check("norm dw", &w, &dw, &|w| dot(&naive::rms_norm(&x, w, 1e-5), &dy));

    let (gate, up) = (normal(4, 12), normal(5, 12));
    let (d_gate, d_up) = naive::swiglu_backward(&gate, &up, &dy);
    check("swiglu gate", &gate, &d_gate, &|g| dot(&naive::swiglu(g, &up), &dy));
    check("swiglu up", &up, &d_up, &|u| dot(&naive::swiglu(&gate, u), &dy));

    let logits = normal(6, 10);
    let grad = naive::xent_grad(&logits, 5, 4, &[2, 0]);
    check("xent", &logits, &grad, &|x| naive::xent_loss(x, 5, 4, &[2, 0]).iter().sum());

    let shape = AttnShape { batch: 1, seq: 5, queries: Queries::all(5), heads: 2, kv_heads: 1, head_dim: 2 };
    let docs = documents(&[2, 3]);
    let (q, k, v, d_o) = (normal(7, 20), normal(8, 10), normal(9, 10), normal(10, 20));
    let (dq, dk, dv) = naive::attention_backward(&shape, &q, &k, &v, &d_o, &docs);
    check("attention dq", &q, &dq, &|q| dot(&naive::attention(&shape, q, &k, &v, &docs).0, &d_o));
    check("attention dk", &k, &dk, &|k| dot(&naive::attention(&shape, &q, k, &v, &docs).0, &d_o));
    check("attention dv", &v, &dv, &|v| dot(&naive::attention(&shape, &q, &k, v, &docs).0, &d_o));
}

#[test]
fn swiglu_matches() {
    let n = 1003;
    let gate: Vec<f32> = normal(1, n).iter().map(|g| g * 4.0).collect();
    let (up, d_act) = (normal(2, n), normal(3, n));
    let (mut act, mut d_gate, mut d_up) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
    swiglu(&ctx(), &gate, &up, &mut act);
    close("swiglu", &act, &naive::swiglu(&gate, &up), 1e-6);
    swiglu_backward(&ctx(), &gate, &up, &d_act, &mut d_gate, &mut d_up);
    let twin = naive::swiglu_backward(&gate, &up, &d_act);
    close("swiglu d_gate", &d_gate, &twin.0, 1e-6);
    close("swiglu d_up", &d_up, &twin.1, 1e-6);
}

#[test]
fn xent_matches() {
    let (rows, slices, width) = (7, 3, 40);
    // Real columns of each slice: whole, partly padding, all padding.
    for valid in [[40, 40, 17], [40, 3, 0]] {
        let vocabulary: usize = valid.iter().sum();
        let logits: Vec<f32> = normal(1, rows * slices * width).iter().map(|x| x * 5.0).collect();
        let mut targets: Vec<u32> = (0..rows).map(|r| (r * 31 % vocabulary) as u32).collect();
        targets[3] = IGNORE;
        let slice = |t: usize| -> Vec<f32> {
            (0..rows).flat_map(|r| logits[(r * slices + t) * width..][..width].to_vec()).collect()
        };
        let mut stats = vec![XentStat::default(); slices * rows];
        for (t, out) in stats.chunks_mut(rows).enumerate() {
            xent_stats(&ctx(), &slice(t), width, valid[t], (t * width) as u32, &targets, out);
        }
        let of_row = |r: usize| -> Vec<XentStat> { (0..slices).map(|t| stats[t * rows + r]).collect() };
        let totals: Vec<_> = (0..rows).map(|r| xent_combine(&of_row(r))).collect();
        let twin = naive::xent_loss(&logits, slices * width, vocabulary, &targets);
        for r in (0..rows).filter(|&r| targets[r] != IGNORE) {
            close("loss", &[totals[r].loss()], &[twin[r] as f32], 1e-6);
        }
        let twin = naive::xent_grad(&logits, slices * width, vocabulary, &targets);
        for t in 0..slices {
            let mut grad = slice(t);
            xent_grad(&ctx(), &mut grad, width, valid[t], (t * width) as u32, &targets, &totals);
            for r in 0..rows {
                close("grad", &grad[r * width..][..width], &twin[(r * slices + t) * width..][..width], 1e-6);
            }
        }
    }
}

#[test]
fn embed_matches() {
    let (vocabulary, h, first) = (11, 6, 5u32);
    let ids = [5, 7, 7, 15, 16, 0, 7, IGNORE];
    let (w, dx) = (normal(1, vocabulary * h), normal(2, ids.len() * h));
    let mut out = vec![f32::NAN; ids.len() * h];
    embed(&ctx(), &ids, &w, h, first, &mut out);
    close("embed", &out, &naive::embed(&ids, &w, h, first), 0.0);
    let (mut dw, mut twin) = (normal(3, vocabulary * h), normal(3, vocabulary * h));
    embed_backward(&ctx(), &ids, &dx, h, first, &mut dw);
    naive::embed_backward(&ids, &dx, h, first, &mut twin);
    close("embed dw", &dw, &twin, 0.0);
    let mut out = [1.0];
    embed(&ctx(), &[0], &[-0.0], 1, 0, &mut out);
    assert!(out[0].is_sign_positive(), "-0 becomes +0");
}

#[test]
fn optimizer_and_sums_match() {
    let n = 517;
    let step = AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 0.19,
        correction2: 0.0975,
        grad_scale: 0.5,
    };
    let g = normal(1, n);
    let (mut p, mut m) = (normal(2, n), normal(3, n));
    let mut v: Vec<f32> = normal(4, n).iter().map(|v| v * v).collect();
    let (mut p1, mut m1, mut v1) = (p.clone(), m.clone(), v.clone());
    adamw(&ctx(), &step, &mut p, &g, &mut m, &mut v);
    naive::adamw(&step, &mut p1, &g, &mut m1, &mut v1);
    close("p", &p, &p1, 1e-6);
    close("m", &m, &m1, 1e-6);
    close("v", &v, &v1, 1e-6);

    // Parts with decays of their own, a hole between them, and checksums of what is left.
    for threads in [1, 3] {
        let ctx = Ctx::new(Simd::detect(), threads);
        let (mut p2, mut m2) = (normal(2, n), normal(3, n));
        let mut v2: Vec<f32> = normal(4, n).iter().map(|v| v * v).collect();
        let (first, second) = (n / 3, n / 2);
        let [mut p3, mut m3, mut v3] = [p2.clone(), m2.clone(), v2.clone()];
        for (at, weight_decay) in [(0..first, 0.0), (second..n, step.weight_decay)] {
            let step = AdamW { weight_decay, ..step };
            adamw(&ctx, &step, &mut p3[at.clone()], &g[at.clone()], &mut m3[at.clone()], &mut v3[at]);
        }
        let parts = [(0..first, 0.0), (second..n, step.weight_decay)];
        let state = AdamWState { p: &mut p2, m: &mut m2, v: &mut v2 };
        let sums = adamw_parts(&ctx, &step, &parts, state, &g, 100, true);
        assert!(p2 == p3 && m2 == m3 && v2 == v3, "{threads} threads");
        let blocks = p2.chunks(100).zip(m2.chunks(100)).zip(v2.chunks(100));
        let expected: Vec<_> = blocks.map(|((p, m), v)| [p, m, v].map(|x| checksum(&ctx, x))).collect();
        assert_eq!(sums, expected);
    }

    let sum: f64 = g.iter().map(|&g| g as f64 * g as f64).sum();
    assert!((sum_squares(&ctx(), &g) - sum).abs() < 1e-12 * sum);
    let expected: Vec<f32> = p.iter().zip(&g).map(|(p, g)| p + g).collect();
    add_assign(&ctx(), &mut p, &g);
    close("sum", &p, &expected, 0.0);
}

#[test]
fn normal_numbers_are_normal() {
    let n = 1 << 20;
    let mut x = vec![0.0; n];
    fill_normal(&ctx(), 3, 4, 5, 2.0, &mut x);
    let moment = |k: i32| x.iter().map(|&x| (x as f64 / 2.0).powi(k)).sum::<f64>() / n as f64;
    // Five deviations of each estimate.
    let bound = |variance: f64| 5.0 * (variance / n as f64).sqrt();
    assert!(moment(1).abs() < bound(1.0));
    assert!((moment(2) - 1.0).abs() < bound(2.0));
    assert!(moment(3).abs() < bound(15.0));
    assert!((moment(4) - 3.0).abs() < bound(96.0));
    // About 7e-10 of the numbers lie beyond 6.17.
    assert!(x.iter().all(|x| x.abs() / 2.0 < 6.17));
    let lag: f64 = x.windows(2).map(|w| w[0] as f64 * w[1] as f64 / 4.0).sum::<f64>() / n as f64;
    assert!(lag.abs() < bound(1.0));
}

#[test]
fn streams_have_no_marked_elements() {
    // The first elements of many streams: each of 64 classes of the high bits is hit about equally often.
    for index in 0..8 {
        let mut hits = [0i32; 64];
        for stream in 0..1 << 14 {
            hits[(uniform_u64(1, stream, index) >> 58) as usize] += 1;
        }
        assert!(hits.iter().all(|h| (h - 256).abs() < 6 * 16), "index {index}: {hits:?}");
    }
}

/// A diverged run must show: no kernel turns NaN into a number.
#[test]
fn nan_is_not_lost() {
    let ctx = ctx();
    for at in [0, 5, 30, 66] {
        let mut x = normal(1, 67);
        x[at] = f32::NAN;
        let mut stats = [XentStat::default()];
        xent_stats(&ctx, &x, 67, 67, 0, &[3], &mut stats);
        assert!(xent_combine(&stats).loss().is_nan());

        let (mut y, w) = (vec![0.0; 67], vec![1.0; 67]);
        rms_norm(&ctx, &x, &w, 1e-5, &mut y, &mut [0.0]);
        assert!(y.iter().all(|y| y.is_nan()));
        swiglu(&ctx, &x, &w, &mut y);
        assert!(y[at].is_nan());
        assert!(sum_squares(&ctx, &x).is_nan());

        let shape = AttnShape { batch: 1, seq: 67, queries: Queries::all(67), heads: 1, kv_heads: 1, head_dim: 1 };
        let mut lse = vec![0.0; 67];
        attention(&ctx, &shape, &w, &x, &w, &[0; 67], &mut y, &mut lse);
        assert!(y[at..].iter().chain(&lse[at..]).all(|y| y.is_nan()));
    }
}

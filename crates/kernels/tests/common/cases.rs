//! One call of every kernel on fixed inputs: (ctx, offset) -> all outputs. The offset shifts every buffer.

use kernels::{
    Acc, AdamW, AttnShape, Ctx, Groups, IGNORE, Mat, MatMut, Queries, RopeTable, RouterShape, Terms, XentStat, adamw,
    add_assign, attention, attention_backward, combine, embed, embed_backward, experts_backward, fill_normal, product,
    rms_norm, rms_norm_backward, rms_norm_weight_grad, rope, rope_backward, route, route_backward, sum_squares, swiglu,
    swiglu_backward, swiglu_gradients, xent_combine, xent_grad, xent_stats,
};

use super::{documents, normal, shifted};

/// A kernel call and the checksum of its bits.
pub struct Case {
    pub name: &'static str,
    pub run: fn(&Ctx, usize) -> Vec<f32>,
    pub golden: u64,
}

/// Big enough that three threads get work, odd enough that every tail is met.
const ROWS: usize = 601;
const H: usize = 203;

pub const CASES: &[Case] = &[
    Case { name: "product", run: product_all, golden: 0x53a7_d63b_0295_1777 },
    Case { name: "rms_norm", run: norm_all, golden: 0xe62f_83b3_cea2_cd17 },
    Case { name: "rope", run: rope_all, golden: 0xfe23_4edd_4378_cf11 },
    Case { name: "attention", run: attention_all, golden: 0x52f7_5a39_9535_a7f8 },
    Case { name: "swiglu", run: swiglu_all, golden: 0xb57d_3689_1372_f987 },
    Case { name: "xent", run: xent_all, golden: 0x8d18_644e_d690_ed75 },
    Case { name: "embed", run: embed_all, golden: 0x3db0_4ea1_2d64_2c78 },
    Case { name: "adamw", run: adamw_all, golden: 0x46be_072a_2c11_b982 },
    Case { name: "sums", run: sums_all, golden: 0xb7f4_e405_9c2d_88f0 },
    Case { name: "fill_normal", run: normal_all, golden: 0x0a7d_35e5_aaea_c2f7 },
    Case { name: "experts", run: experts_all, golden: 0xd969_7af2_e38d_5dec },
];

/// Inputs `n` long at an offset, and an output full of NaN to be overwritten.
fn input(stream: u64, n: usize, offset: usize) -> Vec<f32> {
    shifted(&normal(stream, n), offset)
}

fn output(n: usize, offset: usize) -> Vec<f32> {
    vec![f32::NAN; n + offset]
}

fn product_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (m, n, k) in [(190, 70, 530), (70, 1030, 64), (5, 3, 256)] {
        let (x, w, dy) = (input(1, m * k, at), input(2, n * k, at), input(3, m * n, at));
        let (xm, wm, dym) = (Mat::new(&x[at..], m, k), Mat::new(&w[at..], n, k), Mat::new(&dy[at..], m, n));
        let (mut y, mut dx, mut dw) = (output(m * n, at), output(m * k, at), input(4, n * k, at));
        product(ctx, xm, wm.t(), MatMut::new(&mut y[at..], m, n), Acc::Store);
        product(ctx, dym, wm, MatMut::new(&mut dx[at..], m, k), Acc::Store);
        product(ctx, dym.t(), xm, MatMut::new(&mut dw[at..], n, k), Acc::Add);
        all.extend([&y[at..], &dx[at..], &dw[at..]].concat());
    }
    all
}

fn norm_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let n = ROWS * H;
    let (x, w, dy) = (input(1, n, at), input(2, H, at), input(3, n, at));
    let (mut y, mut inv, mut dx, mut dw) = (output(n, at), output(ROWS, at), output(n, at), output(H, at));
    rms_norm(ctx, &x[at..], &w[at..], 1e-5, &mut y[at..], &mut inv[at..]);
    rms_norm_backward(ctx, &x[at..], &w[at..], &inv[at..], &dy[at..], &mut dx[at..], Acc::Store);
    rms_norm_backward(ctx, &x[at..], &w[at..], &inv[at..], &x[at..], &mut dx[at..], Acc::Add);
    rms_norm_weight_grad(ctx, &x[at..], &inv[at..], &dy[at..], H, &[0..100, 150..ROWS], &mut dw[at..]);
    [&y[at..], &inv[at..], &dx[at..], &dw[at..]].concat()
}

fn rope_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let (heads, head_dim) = (5, 20);
    let table = RopeTable::new(head_dim, 10_000.0, 1000);
    let positions: Vec<u32> = (0..ROWS as u32).map(|i| i * 37 % 1000).collect();
    let mut x = input(1, ROWS * heads * head_dim, at);
    rope(ctx, &table, &positions, heads, &mut x[at..]);
    let forward = x[at..].to_vec();
    rope_backward(ctx, &table, &positions, heads, &mut x[at..]);
    [&forward, &x[at..]].concat()
}

fn attention_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (seq, head_dim, lengths) in [(150, 20, vec![10, 60, 75, 5]), (65, 64, vec![65])] {
        let shape = AttnShape { batch: 2, seq, queries: Queries::all(seq), heads: 4, kv_heads: 2, head_dim };
        let docs = documents(&lengths).repeat(2);
        let (wide, narrow) = (shape.rows() * 4 * head_dim, shape.rows() * 2 * head_dim);
        let (q, k, v, d_o) = (input(1, wide, at), input(2, narrow, at), input(3, narrow, at), input(4, wide, at));
        let (mut o, mut lse) = (output(wide, at), output(shape.rows() * 4, at));
        let (mut dq, mut dk, mut dv) = (output(wide, at), output(narrow, at), output(narrow, at));
        let (q, k, v, d_o) = (&q[at..], &k[at..], &v[at..], &d_o[at..]);
        attention(ctx, &shape, q, k, v, &docs, &mut o[at..], &mut lse[at..]);
        let (o, lse) = (&o[at..], &lse[at..]);
        let (dq1, dk1, dv1) = (&mut dq[at..], &mut dk[at..], &mut dv[at..]);
        attention_backward(ctx, &shape, q, k, v, o, lse, d_o, &docs, dq1, dk1, dv1);
        all.extend([o, lse, &dq[at..], &dk[at..], &dv[at..]].concat());
    }
    all
}

fn swiglu_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let n = ROWS * H;
    let (gate, up, d_act) = (input(1, n, at), input(2, n, at), input(3, n, at));
    let (mut act, mut d_gate, mut d_up) = (output(n, at), output(n, at), output(n, at));
    swiglu(ctx, &gate[at..], &up[at..], &mut act[at..]);
    swiglu_backward(ctx, &gate[at..], &up[at..], &d_act[at..], &mut d_gate[at..], &mut d_up[at..]);
    let all = [&act[at..], &d_gate[at..], &d_up[at..]].concat();
    // In one pass and in place: the same bits.
    let (mut gate, mut up, mut d_act) = (gate, up, d_act);
    swiglu_gradients(ctx, &mut gate[at..], &mut up[at..], &mut d_act[at..]);
    let in_place = [&d_act[at..], &gate[at..], &up[at..]].concat();
    assert!(in_place.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits()), "swiglu in place differs");
    all
}

fn xent_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let valid = H - 9;
    let mut logits = input(1, ROWS * H, at);
    let targets: Vec<u32> = (0..ROWS as u32).map(|i| if i % 50 == 49 { IGNORE } else { 100 + i * 7 % 250 }).collect();
    let mut stats = vec![XentStat::default(); ROWS];
    xent_stats(ctx, &logits[at..], H, valid, 100, &targets, &mut stats);
    // Five slices that share their numbers: the tree is not a chain.
    let totals: Vec<_> = stats
        .iter()
        .map(|s| xent_combine(&[0.0, 1.0, -2.0, 0.5, 3.0].map(|d| XentStat { max: s.max + d, ..*s })))
        .collect();
    xent_grad(ctx, &mut logits[at..], H, valid, 100, &targets, &totals);
    let numbers = totals.iter().flat_map(|t| [t.max, t.sum, t.target, t.loss()]);
    stats.iter().flat_map(|s| [s.max, s.sum, s.target]).chain(numbers).chain(logits[at..].to_vec()).collect()
}

fn embed_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let ids: Vec<u32> = (0..ROWS as u32).map(|i| i * i % 41).collect();
    let (w, dx) = (input(1, 30 * H, at), input(2, ROWS * H, at));
    let (mut out, mut dw) = (output(ROWS * H, at), input(3, 30 * H, at));
    embed(ctx, &ids, &w[at..], H, 5, &mut out[at..]);
    embed_backward(ctx, &ids, &dx[at..], H, 5, &mut dw[at..]);
    [&out[at..], &dw[at..]].concat()
}

fn experts_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let (experts, k) = (37, 3);
    let mut all = Vec::new();
    for sigmoid in [false, true] {
        let shape = RouterShape { experts, per_token: k, sigmoid, renorm: true };
        let (n, slots) = (ROWS * experts, ROWS * k);
        let (logits, bias, aux, d_gates) =
            (input(1, n, at), input(2, experts, at), input(3, experts, at), input(4, slots, at));
        let (mut scores, mut chosen, mut gates) = (output(n, at), vec![0; slots], output(slots, at));
        route(ctx, &shape, &logits[at..], &bias[at..], &mut scores[at..], &mut chosen, &mut gates[at..]);
        let mut d_logits = output(n, at);
        let d = &mut d_logits[at..];
        route_backward(ctx, &shape, &scores[at..], &chosen, &gates[at..], &d_gates[at..], &aux[at..], d);
        let first: Vec<u32> = (0..=ROWS).map(|row| (row * k) as u32).collect();
        let groups = Groups::new(&first, &chosen, experts, &[std::iter::once(0..ROWS).collect()]);
        let (y, mut out) = (input(5, slots * H, at), output(ROWS * H, at));
        let terms = Terms { first: &first, slots: &groups.slots, gates: &gates[at..], blocks: &[], num_blocks: 1 };
        combine(ctx, &y[at..], H, &terms, &mut out[at..]);
        let [mut gate, mut up, mut d_act] = [6, 7, 8].map(|seed| input(seed, slots * H, at));
        let mut dg = output(slots, at);
        let (g, u, d) = (&mut gate[at..], &mut up[at..], &mut d_act[at..]);
        experts_backward(ctx, &gates[at..], H, g, u, d, &mut dg[at..]);
        all.extend([&scores[at..], &gates[at..], &d_logits[at..], &out[at..]].concat());
        all.extend([&gate[at..], &up[at..], &d_act[at..], &dg[at..]].concat());
    }
    all
}

fn adamw_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let n = ROWS * H;
    let step = AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: 0.19,
        correction2: 0.0975,
        grad_scale: 0.7,
    };
    let (mut p, g, mut m) = (input(1, n, at), input(2, n, at), input(3, n, at));
    let mut v: Vec<f32> = input(4, n, at).iter().map(|v| v * v).collect();
    adamw(ctx, &step, &mut p[at..], &g[at..], &mut m[at..], &mut v[at..]);
    [&p[at..], &m[at..], &v[at..]].concat()
}

fn sums_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let n = ROWS * H;
    let (mut a, b) = (input(1, n, at), input(2, n, at));
    let squares = sum_squares(ctx, &b[at..]).to_bits();
    add_assign(ctx, &mut a[at..], &b[at..]);
    let halves = [f32::from_bits((squares >> 32) as u32), f32::from_bits(squares as u32)];
    [&a[at..], &halves].concat()
}

fn normal_all(ctx: &Ctx, at: usize) -> Vec<f32> {
    let mut out = output(ROWS * H, at);
    fill_normal(ctx, 11, 12, 13, 0.02, &mut out[at..]);
    out[at..].to_vec()
}

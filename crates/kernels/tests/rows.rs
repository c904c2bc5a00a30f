//! Rows are free: computing a row with others, or alone, gives the same bits.

mod common;

use std::ops::Range;

use common::{documents, normal, same, teams};
use kernels::{
    Acc, AttnShape, Ctx, Queries, RopeTable, Simd, XentStat, XentTotal, attention, attention_backward, embed,
    fill_normal, rms_norm, rms_norm_backward, rope, sum_squares, swiglu, swiglu_backward, uniform_u64, xent_combine,
    xent_grad, xent_stats,
};

const ROWS: usize = 67;
const H: usize = 83;
/// Subsets that are computed on their own.
const PARTS: [Range<usize>; 6] = [0..1, 0..ROWS, 1..2, 30..47, 66..67, 13..66];

fn elements(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}

#[test]
fn norm() {
    let (x, w, dy) = (normal(1, ROWS * H), normal(2, H), normal(3, ROWS * H));
    let run = |ctx: &Ctx, rows: &Range<usize>| {
        let (x, dy) = (&x[elements(rows, H)], &dy[elements(rows, H)]);
        let (mut y, mut inv, mut dx) = (vec![0.0; x.len()], vec![0.0; rows.len()], vec![0.0; x.len()]);
        rms_norm(ctx, x, &w, 1e-6, &mut y, &mut inv);
        rms_norm_backward(ctx, x, &w, &inv, dy, &mut dx, Acc::Store);
        (y, dx)
    };
    compare_rows(H, &[run], |(y, dx)| vec![y, dx]);
}

/// Runs every part on every team and compares with the rows of the whole.
fn compare_rows<T>(width: usize, runs: &[impl Fn(&Ctx, &Range<usize>) -> T], outputs: impl Fn(T) -> Vec<Vec<f32>>) {
    for run in runs {
        let whole = outputs(run(&Ctx::new(Simd::Scalar, 1), &(0..ROWS)));
        for ctx in teams() {
            for part in &PARTS {
                for (found, whole) in outputs(run(&ctx, part)).iter().zip(&whole) {
                    same(&format!("rows {part:?} with {ctx:?}"), found, &whole[elements(part, width)]);
                }
            }
        }
    }
}

#[test]
fn swiglu_rope_embed() {
    let (gate, up, d_act) = (normal(1, ROWS * H), normal(2, ROWS * H), normal(3, ROWS * H));
    let run = |ctx: &Ctx, rows: &Range<usize>| {
        let e = elements(rows, H);
        let (mut act, mut d_gate, mut d_up) = (vec![0.0; e.len()], vec![0.0; e.len()], vec![0.0; e.len()]);
        swiglu(ctx, &gate[e.clone()], &up[e.clone()], &mut act);
        swiglu_backward(ctx, &gate[e.clone()], &up[e.clone()], &d_act[e], &mut d_gate, &mut d_up);
        vec![act, d_gate, d_up]
    };
    compare_rows(H, &[run], |o| o);

    let (heads, head_dim) = (3, 10);
    let table = RopeTable::new(head_dim, 1e4, ROWS);
    let positions: Vec<u32> = (0..ROWS as u32).rev().collect();
    let x = normal(4, ROWS * heads * head_dim);
    let run = |ctx: &Ctx, rows: &Range<usize>| {
        let mut x = x[elements(rows, heads * head_dim)].to_vec();
        rope(ctx, &table, &positions[rows.clone()], heads, &mut x);
        vec![x]
    };
    compare_rows(heads * head_dim, &[run], |o| o);

    let w = normal(5, ROWS * H);
    let run = |ctx: &Ctx, rows: &Range<usize>| {
        let mut out = vec![0.0; rows.len() * H];
        embed(ctx, &positions[rows.clone()], &w, H, 3, &mut out);
        vec![out]
    };
    compare_rows(H, &[run], |o| o);
}

#[test]
fn rope_heads_are_free() {
    let (heads, head_dim) = (4, 12);
    let table = RopeTable::new(head_dim, 1e4, ROWS);
    let positions: Vec<u32> = (0..ROWS as u32).collect();
    let ctx = Ctx::new(Simd::detect(), 1);
    let mut x = normal(1, ROWS * heads * head_dim);
    let mut part = columns(&x, heads * head_dim, 12..36);
    rope(&ctx, &table, &positions, heads, &mut x);
    rope(&ctx, &table, &positions, 2, &mut part);
    same("two heads of four", &part, &columns(&x, heads * head_dim, 12..36));
}

#[test]
fn xent() {
    let logits = normal(1, ROWS * H);
    let targets: Vec<u32> = (0..ROWS as u32).map(|r| r % 80).collect();
    // Padding of the slice is free too: the same columns in a wider row.
    let run = |padding: usize| {
        let (logits, targets) = (&logits, &targets);
        move |ctx: &Ctx, rows: &Range<usize>| {
            let width = H + padding;
            let mut padded = vec![f32::NAN; rows.len() * width];
            for (p, x) in padded.chunks_mut(width).zip(logits[elements(rows, H)].chunks(H)) {
                p[..H].copy_from_slice(x);
            }
            let mut stats = vec![XentStat::default(); rows.len()];
            xent_stats(ctx, &padded, width, H, 0, &targets[rows.clone()], &mut stats);
            let totals: Vec<XentTotal> = stats.iter().map(|s| xent_combine(std::slice::from_ref(s))).collect();
            xent_grad(ctx, &mut padded, width, H, 0, &targets[rows.clone()], &totals);
            assert!(padded.chunks(width).all(|row| row[H..].iter().all(|&p| p == 0.0)), "padding becomes 0");
            let grad = columns(&padded, width, 0..H);
            let losses = totals.iter().flat_map(|t| std::iter::repeat_n(t.loss(), H)).collect();
            vec![grad, losses]
        }
    };
    compare_rows(H, &[run(0), run(5)], |o| o);
}

#[test]
fn combined_stats_follow_the_tree() {
    let stat = |t: usize| XentStat { max: t as f32, sum: 1.0 + 0.1 * t as f32, target: 0.0 };
    let stats: Vec<_> = (0..7).map(stat).collect();
    let scaled: Vec<f32> = stats.iter().map(|s| s.sum * kernels::math::exp(s.max - 6.0)).collect();
    let s = &scaled;
    let expected = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + s[6]);
    same("seven slices", &[xent_combine(&stats).sum], &[expected]);
}

#[test]
fn streams_are_free_of_their_start() {
    let whole = normal(9, 1000);
    for ctx in teams() {
        for start in [0, 1, 17, 512, 999] {
            let mut part = vec![0.0; 1000 - start];
            fill_normal(&ctx, 7, 9, start as u64, 1.0, &mut part);
            same("stream", &part, &whole[start..]);
        }
    }
    assert_ne!(uniform_u64(1, 2, 3), uniform_u64(2, 1, 3));
    assert_ne!(uniform_u64(1, 2, 3), uniform_u64(1, 3, 2));
}

#[test]
fn sum_of_squares_has_one_shape() {
    for n in [0, 1, 15, 16, 17, 1000] {
        let x = normal(1, n);
        let mut lanes = [0.0f64; 16];
        for (i, &x) in x.iter().enumerate() {
            lanes[i % 16] = (x as f64).mul_add(x as f64, lanes[i % 16]);
        }
        let l = |i: usize| lanes[i] + lanes[i + 8];
        let m = |i: usize| l(i) + l(i + 4);
        let expected = (m(0) + m(2)) + (m(1) + m(3));
        for ctx in teams() {
            assert_eq!(sum_squares(&ctx, &x).to_bits(), expected.to_bits(), "{n} elements with {ctx:?}");
        }
    }
}

#[test]
fn chunks_are_squared_one_by_one() {
    let x = normal(9, 200_001);
    for ctx in teams() {
        let found = kernels::chunk_squares(&ctx, &x, 16_384);
        let expected: Vec<f64> = x.chunks(16_384).map(|chunk| sum_squares(&ctx, chunk)).collect();
        assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "with {ctx:?}");
        assert_eq!(found.len(), 13);
    }
}

fn columns(x: &[f32], width: usize, range: Range<usize>) -> Vec<f32> {
    x.chunks(width).flat_map(|row| row[range.clone()].to_vec()).collect()
}

struct Attention {
    shape: AttnShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    docs: Vec<u32>,
}

impl Attention {
    fn new(batch: usize, lengths: &[usize]) -> Self {
        let seq = lengths.iter().sum();
        let shape = AttnShape { batch, seq, queries: Queries::all(seq), heads: 6, kv_heads: 3, head_dim: 12 };
        let rows = shape.rows();
        let (q, k, v, d_o) = (normal(1, rows * 72), normal(2, rows * 36), normal(3, rows * 36), normal(4, rows * 72));
        Attention { shape, q, k, v, d_o, docs: documents(lengths).repeat(batch) }
    }

    /// o, lse, dq, dk, dv.
    fn run(&self, ctx: &Ctx) -> [Vec<f32>; 5] {
        let Attention { shape, q, k, v, d_o, docs } = self;
        let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; shape.rows() * shape.heads]);
        let (mut dq, mut dk, mut dv) = (o.clone(), vec![f32::NAN; k.len()], vec![f32::NAN; k.len()]);
        attention(ctx, shape, q, k, v, docs, &mut o, &mut lse);
        attention_backward(ctx, shape, q, k, v, &o, &lse, d_o, docs, &mut dq, &mut dk, &mut dv);
        [o, lse, dq, dk, dv]
    }
}

#[test]
fn attention_heads_and_sequences_are_free() {
    let whole = Attention::new(3, &[40, 100]);
    let expected = whole.run(&Ctx::new(Simd::Scalar, 1));
    let rows = 140..280;
    for ctx in teams() {
        // One sequence of three, two groups of three.
        let wide = |x: &[f32]| columns(&x[elements(&rows, 72)], 72, 24..72);
        let narrow = |x: &[f32]| columns(&x[elements(&rows, 36)], 36, 12..36);
        let part = Attention {
            shape: AttnShape { batch: 1, heads: 4, kv_heads: 2, ..whole.shape },
            q: wide(&whole.q),
            k: narrow(&whole.k),
            v: narrow(&whole.v),
            d_o: wide(&whole.d_o),
            docs: whole.docs[rows.clone()].to_vec(),
        };
        let [o, lse, dq, dk, dv] = part.run(&ctx);
        same("o", &o, &wide(&expected[0]));
        same("lse", &lse, &columns(&expected[1][elements(&rows, 6)], 6, 2..6));
        same("dq", &dq, &wide(&expected[2]));
        same("dk", &dk, &narrow(&expected[3]));
        same("dv", &dv, &narrow(&expected[4]));
    }
}

/// A query's row is the same whichever others are computed with it, at whatever positions its tile begins.
#[test]
fn attention_queries_are_free() {
    let lengths = [70, 90, 60];
    let whole = Attention::new(2, &lengths);
    let (seq, chunk) = (220, 55);
    let expected = whole.run(&Ctx::new(Simd::Scalar, 1));
    for spans in [[0..chunk, 3 * chunk..seq], [chunk..2 * chunk, 2 * chunk..3 * chunk], [7..7, 99..101]] {
        let queries = Queries::spans(spans);
        let pick = |x: &[f32], width: usize| -> Vec<f32> {
            let rows = (0..2).flat_map(|b| queries.positions().map(move |at| b * seq + at));
            rows.flat_map(|row| x[row * width..(row + 1) * width].to_vec()).collect()
        };
        let part = Attention {
            shape: AttnShape { queries, ..whole.shape },
            q: pick(&whole.q, 72),
            k: whole.k.clone(),
            v: whole.v.clone(),
            d_o: pick(&whole.d_o, 72),
            docs: queries.positions().map(|at| whole.docs[at]).collect::<Vec<_>>().repeat(2),
        };
        for ctx in teams() {
            let found = part.run(&ctx);
            for (i, width) in [(0, 72), (1, 6), (2, 72)] {
                same(&format!("{queries:?}, output {i}"), &found[i], &pick(&expected[i], width));
            }
        }
    }
}

/// What stands before a document, and how much follows it, changes nothing for it at the same positions.
#[test]
fn attention_documents_are_free() {
    let lengths = [70, 90, 75];
    let (first, second) = (elements(&(0..70), 1), elements(&(70..160), 1));
    let whole = Attention::new(1, &lengths);
    let expected = whole.run(&Ctx::new(Simd::Scalar, 1));
    // Other numbers in the first document; the last one cut short.
    let mut other = Attention::new(1, &[70, 90, 3]);
    for (x, width) in [(&mut other.q, 72), (&mut other.k, 36), (&mut other.v, 36), (&mut other.d_o, 72)] {
        x[elements(&first, width)].iter_mut().for_each(|x| *x = *x * 3.0 + 1.0);
    }
    // Its first document split in two.
    other.docs[..70].copy_from_slice(&documents(&[30, 40]));
    for ctx in teams() {
        let found = other.run(&ctx);
        for (i, width) in [72, 6, 72, 36, 36].into_iter().enumerate() {
            let range = elements(&second, width);
            same(&format!("output {i}"), &found[i][range.clone()], &expected[i][range]);
        }
    }
}

//! Routers and experts: twins, gradients by differences, rows that are free, and grouping by its definition.

mod common;

use std::ops::Range;

use common::{close, normal, same, teams};
use kernels::{
    Acc, Ctx, Groups, Mat, MatMut, Pieces, RouterShape, Simd, Terms, combine, experts_backward, gather_pieces,
    gather_rows, naive, product, route, route_backward, score_sums, swiglu, swiglu_backward,
};
use proptest::prelude::*;

const ROWS: usize = 67;

fn ctx() -> Ctx {
    Ctx::new(Simd::detect(), 2)
}

fn shapes() -> Vec<RouterShape> {
    let sizes = [(1, 1), (4, 2), (5, 5), (40, 3)];
    let all = sizes.into_iter().flat_map(|(experts, per_token)| {
        [(false, true), (false, false), (true, true), (true, false)].map(|(sigmoid, renorm)| RouterShape {
            experts,
            per_token,
            sigmoid,
            renorm,
        })
    });
    all.collect()
}

/// (scores, chosen, gates)
fn routed(ctx: &Ctx, shape: &RouterShape, logits: &[f32], bias: &[f32]) -> (Vec<f32>, Vec<u32>, Vec<f32>) {
    let rows = logits.len() / shape.experts;
    let mut scores = vec![f32::NAN; logits.len()];
    let (mut chosen, mut gates) = (vec![0; rows * shape.per_token], vec![f32::NAN; rows * shape.per_token]);
    route(ctx, shape, logits, bias, &mut scores, &mut chosen, &mut gates);
    (scores, chosen, gates)
}

#[test]
fn router_matches() {
    for shape in shapes() {
        let logits = normal(1, ROWS * shape.experts);
        for bias in [Vec::new(), normal(2, shape.experts).iter().map(|b| 0.1 * b).collect()] {
            let (_, chosen, gates) = routed(&ctx(), &shape, &logits, &bias);
            for row in 0..ROWS {
                let at = row * shape.per_token..(row + 1) * shape.per_token;
                let twin = naive::gates(&shape, &logits[row * shape.experts..(row + 1) * shape.experts], &bias);
                let mut dense = vec![0.0; shape.experts];
                chosen[at.clone()].iter().zip(&gates[at]).for_each(|(e, gate)| dense[*e as usize] = *gate);
                close("gates", &dense, &twin.iter().map(|g| *g as f32).collect::<Vec<_>>(), 1e-6);
            }
        }
    }
}

#[test]
fn equal_scores_go_to_the_lower_index_and_nan_does_not_hang() {
    let shape = RouterShape { experts: 4, per_token: 2, sigmoid: false, renorm: true };
    let (_, chosen, gates) = routed(&ctx(), &shape, &[1.0; 4], &[]);
    assert_eq!((chosen, gates), (vec![0, 1], vec![0.5, 0.5]));
    assert_eq!(routed(&ctx(), &shape, &[0.0, 2.0, 1.0, 2.0], &[]).1, [1, 3]);
    // The bias chooses, and is not in the gates.
    let (_, chosen, gates) = routed(&ctx(), &shape, &[0.0; 4], &[0.0, 0.0, 1.0, 1.0]);
    assert_eq!((chosen, gates), (vec![2, 3], vec![0.5, 0.5]));
    let chosen = routed(&ctx(), &shape, &[f32::NAN; 4], &[]).1;
    assert!(chosen[0] < chosen[1] && chosen[1] < 4);
}

/// The loss whose gradient is taken: gates against fixed numbers, and normalised scores against an auxiliary vector.
fn loss(shape: &RouterShape, logits: &[f32], d_gates: &[f32], aux: &[f32]) -> f64 {
    let (scores, _, gates) = routed(&ctx(), shape, logits, &[]);
    let main: f64 = gates.iter().zip(d_gates).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
    let rows = 0..logits.len() / shape.experts;
    let sums = score_sums(shape, &scores, &[rows]);
    main + aux.iter().zip(sums).map(|(a, s)| f64::from(*a) * s).sum::<f64>()
}

#[test]
fn router_gradient_is_the_difference_quotient() {
    for shape in shapes() {
        let (rows, e) = (3, shape.experts);
        let logits = normal(3, rows * e);
        let (d_gates, aux) = (normal(4, rows * shape.per_token), normal(5, e));
        for aux in [Vec::new(), aux] {
            let (scores, chosen, gates) = routed(&ctx(), &shape, &logits, &[]);
            let mut d = vec![f32::NAN; rows * e];
            route_backward(&ctx(), &shape, &scores, &chosen, &gates, &d_gates, &aux, &mut d);
            for at in 0..rows * e {
                let moved = |by: f32| {
                    let mut logits = logits.clone();
                    logits[at] += by;
                    // Only where the choice stays.
                    (routed(&ctx(), &shape, &logits, &[]).1 == chosen).then(|| loss(&shape, &logits, &d_gates, &aux))
                };
                let Some((up, down)) = moved(1e-2).zip(moved(-1e-2)) else { continue };
                let want = (up - down) / 2e-2;
                assert!(
                    (f64::from(d[at]) - want).abs() < 2e-3 * (1.0 + want.abs()),
                    "{shape:?} {at}: {} {want}",
                    d[at]
                );
            }
        }
    }
}

/// `first` of rows that all have `k` choices.
fn even(rows: usize, k: usize) -> Vec<u32> {
    (0..=rows).map(|row| (row * k) as u32).collect()
}

/// Forward of all experts on `x` through the kernels, rows x h.
fn mixture(ctx: &Ctx, x: &[f32], chosen: &[u32], gates: &[f32], k: usize, w: &[[Vec<f32>; 3]], h: usize) -> Vec<f32> {
    let rows = x.len() / h;
    let ffn = w[0][0].len() / h;
    let first = even(rows, k);
    let groups = Groups::new(&first, chosen, w.len(), &[std::iter::once(0..rows).collect()]);
    let slots = rows * k;
    let (mut gathered, mut y) = (vec![0.0; slots * h], vec![0.0; slots * h]);
    gather_rows(ctx, x, h, &groups.rows, &mut gathered);
    for (e, [up, gate, down]) in w.iter().enumerate() {
        let slots = groups.of(e);
        let n = slots.len();
        let x = Mat::new(&gathered[slots.start * h..slots.end * h], n, h);
        let (mut g, mut u, mut act) = (vec![0.0; n * ffn], vec![0.0; n * ffn], vec![0.0; n * ffn]);
        product(ctx, x, Mat::new(gate, ffn, h).t(), MatMut::new(&mut g, n, ffn), Acc::Store);
        product(ctx, x, Mat::new(up, ffn, h).t(), MatMut::new(&mut u, n, ffn), Acc::Store);
        swiglu(ctx, &g, &u, &mut act);
        let out = MatMut::new(&mut y[slots.start * h..slots.end * h], n, h);
        product(ctx, Mat::new(&act, n, ffn), Mat::new(down, h, ffn).t(), out, Acc::Store);
    }
    let mut out = vec![0.0; rows * h];
    let terms = Terms { first: &first, slots: &groups.slots, gates, blocks: &[], num_blocks: 1 };
    combine(ctx, &y, h, &terms, &mut out);
    out
}

fn weights(experts: u64, h: usize, ffn: usize) -> Vec<[Vec<f32>; 3]> {
    (0..experts).map(|e| std::array::from_fn(|i| normal(10 + 3 * e + i as u64, h * ffn))).collect()
}

#[test]
fn experts_match_and_rows_are_free() {
    let (h, ffn, k) = (19, 23, 2);
    let shape = RouterShape { experts: 5, per_token: k, sigmoid: false, renorm: true };
    let (x, logits, w) = (normal(1, ROWS * h), normal(2, ROWS * 5), weights(5, h, ffn));
    let (_, chosen, gates) = routed(&ctx(), &shape, &logits, &[]);
    let whole = mixture(&Ctx::new(Simd::Scalar, 1), &x, &chosen, &gates, k, &w, h);
    for row in 0..ROWS {
        let dense = naive::gates(&shape, &logits[row * 5..row * 5 + 5], &[]);
        let mats: Vec<[Mat; 3]> = w
            .iter()
            .map(|[up, gate, down]| [Mat::new(up, ffn, h), Mat::new(gate, ffn, h), Mat::new(down, h, ffn)])
            .collect();
        let twin: Vec<f32> =
            naive::experts(&x[row * h..row * h + h], &dense, &mats).iter().map(|y| *y as f32).collect();
        close("mixture", &whole[row * h..row * h + h], &twin, 1e-4);
    }
    for ctx in teams() {
        for part in [0..1, 0..ROWS, 13..66, 66..67] {
            let of = |n: usize| part.start * n..part.end * n;
            let (chosen, gates) = (&chosen[of(k)], &gates[of(k)]);
            same("a part of the rows", &mixture(&ctx, &x[of(h)], chosen, gates, k, &w, h), &whole[of(h)]);
        }
    }
}

#[test]
fn one_pass_over_the_slots_has_the_bits_of_its_steps() {
    let (n, width) = (9, 21);
    let (gates, gate, up, d_act) = (normal(1, n), normal(2, n * width), normal(3, n * width), normal(4, n * width));
    for ctx in teams() {
        let (mut g, mut u, mut d, mut dg) = (gate.clone(), up.clone(), d_act.clone(), vec![f32::NAN; n]);
        experts_backward(&ctx, &gates, width, &mut g, &mut u, &mut d, &mut dg);
        let scaled = |x: &[f32]| x.iter().enumerate().map(|(i, x)| x * gates[i / width]).collect::<Vec<_>>();
        let [mut act, mut d_gate, mut d_up] = std::array::from_fn(|_| vec![f32::NAN; n * width]);
        swiglu(&ctx, &gate, &up, &mut act);
        swiglu_backward(&ctx, &gate, &up, &scaled(&d_act), &mut d_gate, &mut d_up);
        same("act", &d, &scaled(&act));
        same("d_gate", &g, &d_gate);
        same("d_up", &u, &d_up);
        for (row, dg) in dg.iter().enumerate() {
            let of_row = row * width..(row + 1) * width;
            let dot: f64 = of_row.map(|i| f64::from(act[i]) * f64::from(d_act[i])).sum();
            close("gate", &[*dg], &[dot as f32], 1e-5);
        }
    }
}

#[test]
fn pieces_are_numbered_through() {
    let x = normal(1, 12 * 3);
    let rows = [11, 0, 4, 5, 4, 9];
    let mut want = vec![0.0; rows.len() * 3];
    gather_rows(&ctx(), &x, 3, &rows, &mut want);
    for cuts in [[0, 12], [5, 5], [4, 9]] {
        let (a, b) = (cuts[0] * 3, cuts[1] * 3);
        let mut out = vec![f32::NAN; rows.len() * 3];
        gather_pieces(&ctx(), &Pieces::new(3, [&x[..a], &x[a..b], &x[b..]]), &rows, &mut out);
        same("gathered from pieces", &out, &want);
    }
}

/// The tree over blocks, written out; `None`: no terms.
fn tree(y: &[f32], terms: &[(u32, u32, f32)], blocks: Range<u32>) -> Option<f32> {
    let here: Vec<_> = terms.iter().filter(|(block, ..)| blocks.contains(block)).collect();
    if here.is_empty() {
        return None;
    }
    if blocks.len() == 1 {
        return Some(here.iter().fold(0.0, |s, (_, slot, gate)| gate.mul_add(y[*slot as usize], s)));
    }
    let mid = blocks.start + blocks.len() as u32 / 2;
    match (tree(y, terms, blocks.start..mid), tree(y, terms, mid..blocks.end)) {
        (Some(left), Some(right)) => Some(left + right),
        (left, right) => left.or(right),
    }
}

/// Whoever holds which aligned blocks: adding up at the holders first and then over the holders gives the same bits.
#[test]
fn terms_add_up_in_the_tree_over_blocks_whoever_holds_them() {
    let (rows, slots) = (200, 64);
    let y = normal(1, slots);
    let gates = normal(2, rows * 8);
    let pick = normal(3, rows * 16);
    for num_blocks in [1usize, 2, 8] {
        let (mut first, mut all) = (vec![0u32], Vec::new());
        for row in 0..rows {
            let of_row = (0..8).filter(|i| pick[row * 16 + i] > 0.3);
            all.extend(of_row.map(|i| {
                let slot = (pick[row * 16 + 8 + i].abs() * 20.0) as u32 % slots as u32;
                (i as u32 * num_blocks as u32 / 8, slot, gates[row * 8 + i])
            }));
            first.push(all.len() as u32);
        }
        let of = |row: usize| &all[first[row] as usize..first[row + 1] as usize];
        let want: Vec<f32> = (0..rows).map(|r| tree(&y, of(r), 0..num_blocks as u32).unwrap_or(0.0)).collect();
        let (blocks, terms_slots): (Vec<u32>, Vec<u32>) = all.iter().map(|t| (t.0, t.1)).unzip();
        let terms_gates: Vec<f32> = all.iter().map(|t| t.2).collect();
        for ctx in teams() {
            let mut out = vec![f32::NAN; rows];
            let terms = Terms { first: &first, slots: &terms_slots, gates: &terms_gates, blocks: &blocks, num_blocks };
            combine(&ctx, &y, 1, &terms, &mut out);
            same("tree over blocks", &out, &want);
        }
        // Two holders of half of the blocks each, then the tree over the two.
        let half = (num_blocks as u32 / 2).max(1);
        for row in 0..rows {
            let nodes: Vec<f32> =
                [0..half, half..num_blocks as u32].into_iter().filter_map(|b| tree(&y, of(row), b)).collect();
            let sum = nodes.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0);
            same("held in halves", &[sum], &want[row..=row]);
        }
    }
}

proptest! {
    /// Slots of (expert, part) hold the rows of the part that chose the expert, ascending, whatever the choice: experts
    /// and parts without rows too.
    #[test]
    fn groups_are_what_they_say(
        seed in proptest::collection::vec(0u32..6, 0..40),
        cut in 0usize..40,
        k in 1usize..3,
    ) {
        let rows = seed.len();
        let chosen: Vec<u32> = seed.iter().flat_map(|e| (0..k as u32).map(move |i| (e + i) % 6)).collect::<Vec<_>>()
            .chunks(k).flat_map(|c| { let mut c = c.to_vec(); c.sort_unstable(); c }).collect();
        let cut = cut.min(rows);
        let parts: Vec<Vec<Range<usize>>> = vec![vec![cut..rows], vec![0..cut / 2, cut / 2..cut], vec![]];
        let groups = Groups::new(&even(rows, k), &chosen, 6, &parts);
        for e in 0..6u32 {
            for (p, ranges) in parts.iter().enumerate() {
                let want: Vec<u32> = ranges.iter().cloned().flatten()
                    .filter(|row| chosen[row * k..(row + 1) * k].contains(&e)).map(|row| row as u32).collect();
                prop_assert_eq!(&groups.rows[groups.of_part(e as usize, p)], &want[..]);
            }
        }
        for (choice, slot) in groups.slots.iter().enumerate() {
            prop_assert_eq!(groups.rows[*slot as usize] as usize, choice / k);
            prop_assert!(groups.of(chosen[choice] as usize).contains(&(*slot as usize)));
        }
        let values: Vec<f32> = (0..chosen.len()).map(|i| i as f32).collect();
        prop_assert_eq!(groups.from_slots(&groups.to_slots(&values)), values);
    }
}

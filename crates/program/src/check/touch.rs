//! What each operation of a unit reads and writes on its chunk, and the order that follows: an operation comes after the
//! last one that wrote what it reads, and after all that read or wrote what it writes. So a value is made before it is
//! used, used by whom it is meant for, and gone afterwards.

use std::collections::HashMap;

use super::law::Due;
use crate::instr::{Op, Pass, Segment, Value};

/// A place where a unit has a value on a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Slot {
    /// The residual stream; at the end of the last chunk, the head's input.
    Stream,
    /// Normed rows, local, then all.
    Normed,
    Rows,
    /// Partial sums, then their sum.
    Partials,
    Reduced,
    /// Gradient of the residual stream, local, then all rows.
    Grad,
    GradRows,
    /// Norm gradients of the tensor cells.
    Leaves,
    /// Keys and values of all context cells; gradients of queries, keys and values.
    Keys,
    KeyGrads,
    /// What the head keeps, and its block under way.
    Head,
    Logits,
    /// What a layer's segments keep: norm before attention, attention, norm before feed-forward, feed-forward.
    AttnNorm(usize),
    Attn(usize),
    MlpNorm(usize),
    Mlp(usize),
    /// Router counts of the whole unit, for the auxiliary loss.
    Counts,
    /// What the weight parts of a layer's backward need.
    AttnWeights(usize),
    QkvWeights(usize),
    MlpWeights(usize),
    DownWeights(usize),
}

/// Reads, and writes: who takes a value away writes its place.
type Touch = (Vec<Slot>, Vec<Slot>);

fn touch(op: &Op) -> Touch {
    use Slot::*;
    match *op {
        Op::Compute(pass, segment) => compute(pass, segment),
        Op::Drop(Segment::Attn(l)) => (vec![], vec![Attn(l)]),
        Op::Drop(Segment::Residual(l)) => (vec![], vec![AttnNorm(l), Attn(l), MlpNorm(l), Mlp(l)]),
        // Counts over all layers travel along, where there are any.
        Op::Recv { value: Value::Activation, .. } => (vec![], vec![Stream, Counts]),
        Op::Send { value: Value::Activation, .. } => (vec![Counts], vec![Stream]),
        Op::Recv { .. } => (vec![], vec![Grad, Counts]),
        Op::Send { .. } => (vec![Counts], vec![Grad]),
        Op::Collective { value, .. } => match value {
            Value::Rows => (vec![], vec![Normed, Rows]),
            Value::GradRows => (vec![Grad], vec![GradRows]),
            Value::Partial | Value::GradPartial => (vec![], vec![Partials, Reduced]),
            Value::Stats => (vec![], vec![Logits]),
            // It reads what the routers of all layers kept: the stream has left them.
            Value::RouterCounts => (vec![Stream], vec![Counts]),
            Value::KeyValues(l) => (vec![Attn(l)], vec![Keys]),
            Value::KeyValueGrads(_) => (vec![], vec![KeyGrads]),
            Value::Dispatch(l) => (vec![], vec![Mlp(l)]),
            Value::DispatchGrad(l) => (vec![Grad], vec![Mlp(l)]),
            Value::Combine(l) => (vec![], vec![Mlp(l), Reduced]),
            Value::CombineGrad(l) => (vec![Grad], vec![Mlp(l), Reduced]),
            _ => (vec![], vec![Leaves]),
        },
        _ => (vec![], vec![]),
    }
}

fn compute(pass: Pass, segment: Segment) -> Touch {
    use Pass::{Backward, BackwardInput, BackwardWeight, Forward, Recompute, RecomputeKept};
    use Slot as S;
    match (pass, segment) {
        (Forward, Segment::Embed) => (vec![], vec![S::Partials]),
        (Forward, Segment::AttnNorm(l)) => (vec![], vec![S::Stream, S::Reduced, S::Normed, S::AttnNorm(l)]),
        (Forward | Recompute | RecomputeKept, Segment::Qkv(l)) => (vec![], vec![S::Rows, S::Attn(l)]),
        (Forward | Recompute, Segment::Attn(l)) => (vec![], vec![S::Rows, S::Keys, S::Attn(l), S::Partials]),
        (RecomputeKept, Segment::Attn(l)) => (vec![], vec![S::Rows, S::Keys, S::Attn(l)]),
        (Recompute, Segment::AttnNorm(l)) => (vec![], vec![S::Normed, S::AttnNorm(l)]),
        (RecomputeKept, Segment::Mlp(l)) => (vec![], vec![S::Rows, S::Mlp(l)]),
        (Forward | Recompute, Segment::MlpNorm(l)) => {
            (vec![S::AttnNorm(l)], vec![S::Reduced, S::Normed, S::MlpNorm(l)])
        }
        (Forward | Recompute, Segment::Mlp(l)) => (vec![], vec![S::Rows, S::Mlp(l), S::Partials]),
        (Forward | Recompute, Segment::Route(l)) => (vec![], vec![S::Normed, S::Mlp(l)]),
        (RecomputeKept, Segment::Experts(l)) => (vec![], vec![S::Mlp(l)]),
        (Forward, Segment::Experts(l)) => (vec![], vec![S::Mlp(l), S::Reduced]),
        (Forward, Segment::Residual(l)) => (vec![S::MlpNorm(l)], vec![S::Reduced, S::Stream]),
        (Forward, Segment::HeadNorm) => (vec![], vec![S::Stream, S::Normed, S::Head]),
        (Forward, Segment::Logits(_)) => (vec![], vec![S::Rows, S::Head, S::Logits]),
        (Forward, Segment::Loss(_)) => (vec![], vec![S::Head, S::Logits, S::Partials]),
        (Backward, Segment::HeadNorm) => (vec![], vec![S::Reduced, S::Head, S::Grad, S::Leaves]),
        (Backward, Segment::Mlp(l)) => (vec![S::Grad, S::MlpNorm(l)], vec![S::GradRows, S::Mlp(l), S::Partials]),
        (BackwardInput, Segment::Mlp(l)) => {
            let weights = [S::MlpWeights(l), S::DownWeights(l)];
            (vec![S::Grad, S::MlpNorm(l)], [&[S::GradRows, S::Mlp(l), S::Partials][..], &weights].concat())
        }
        (BackwardWeight, Segment::Mlp(l)) => (vec![], vec![S::MlpWeights(l)]),
        (BackwardWeight, Segment::Down(l)) => (vec![], vec![S::DownWeights(l)]),
        (_, Segment::Experts(l)) => (vec![S::Grad], vec![S::Mlp(l), S::Reduced]),
        (_, Segment::Route(l)) => (vec![S::Counts], vec![S::Mlp(l), S::Reduced, S::Leaves]),
        (_, Segment::MlpNorm(l)) => (vec![], vec![S::Reduced, S::MlpNorm(l), S::Grad, S::Leaves]),
        // Without context cells nothing is ever written to the two places of keys.
        (Backward, Segment::Attn(l)) => {
            (vec![S::Grad, S::AttnNorm(l)], vec![S::GradRows, S::Keys, S::KeyGrads, S::Attn(l), S::Partials, S::Leaves])
        }
        (BackwardInput, Segment::Attn(l)) => (
            vec![S::Grad, S::AttnNorm(l)],
            [
                &[S::GradRows, S::Keys, S::KeyGrads, S::Attn(l), S::Partials, S::Leaves][..],
                &[S::AttnWeights(l), S::QkvWeights(l)],
            ]
            .concat(),
        ),
        (Backward, Segment::Qkv(l)) => (vec![S::AttnNorm(l)], vec![S::KeyGrads, S::Attn(l), S::Partials, S::Leaves]),
        (BackwardInput, Segment::Qkv(l)) => {
            (vec![S::AttnNorm(l)], vec![S::KeyGrads, S::Attn(l), S::QkvWeights(l), S::Partials, S::Leaves])
        }
        (BackwardWeight, Segment::Attn(l)) => (vec![], vec![S::AttnWeights(l)]),
        (BackwardWeight, Segment::Qkv(l)) => (vec![], vec![S::QkvWeights(l)]),
        (_, Segment::AttnNorm(l)) => (vec![], vec![S::Reduced, S::AttnNorm(l), S::Grad, S::Leaves]),
        (_, Segment::Embed) => (vec![], vec![S::GradRows, S::Grad]),
        (_, Segment::HeadNorm | Segment::Logits(_) | Segment::Loss(_) | Segment::Residual(_) | Segment::Down(_)) => {
            (vec![], vec![])
        }
    }
}

/// Fills in what each entry comes after.
pub(super) fn order(dues: &mut [Due]) {
    let mut written: HashMap<Slot, usize> = HashMap::new();
    let mut read: HashMap<Slot, Vec<usize>> = HashMap::new();
    let counts = |due: &Due| matches!(due.op, Op::Collective { value: Value::RouterCounts, .. });
    let counted = dues.iter().any(counts);
    for (i, due) in dues.iter_mut().enumerate() {
        let (mut reads, mut writes) = touch(&due.op);
        if !counted {
            [&mut reads, &mut writes].into_iter().for_each(|slots| slots.retain(|slot| *slot != Slot::Counts));
        }
        let mut after: Vec<usize> = reads.iter().chain(&writes).filter_map(|slot| written.get(slot).copied()).collect();
        after.extend(writes.iter().flat_map(|slot| read.remove(slot).unwrap_or_default()));
        after.sort_unstable();
        after.dedup();
        due.after = after;
        for slot in reads {
            read.entry(slot).or_default().push(i);
        }
        for slot in writes {
            written.insert(slot, i);
        }
    }
}

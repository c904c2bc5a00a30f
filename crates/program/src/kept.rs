//! How many bytes an instruction keeps for backward, or lets go, from shapes alone.
//!
//! Where rows travel between the ranks of a group, what experts keep is told as if the routers were in balance; rows that came
//! from other ranks are kept as they came.
//!
//! What is in flight between two instructions, and what a segment uses inside, is not counted: it lasts for one segment.

use spec::{Grid, Layout, Model, Recompute};

use crate::bytes::Sizes;
use crate::instr::{Instr, Op, Pass, Segment, Value};

/// Bytes of an element.
const FLOAT: i64 = 4;

/// Sizes of what one unit keeps on a rank. All tensor positions host equally many cells.
#[derive(Debug, Clone)]
pub struct Kept {
    /// The norm before the attention: its input, and 1 / rms of its rows.
    attn_norm: [i64; 2],
    attn: i64,
    /// The part of it that [`Segment::Qkv`] keeps, and of that what its backward lets go; 0 without context cells.
    qkv: [i64; 2],
    mlp_norm: i64,
    mlp: i64,
    /// There are experts: what a router keeps, and the experts after it.
    moe: bool,
    router: i64,
    experts: i64,
    /// Rows that other ranks sent.
    parcels: i64,
    /// What the weight parts of backward need.
    attn_weights: i64,
    qkv_weights: i64,
    mlp_weights: i64,
    down_weights: i64,
    /// There are context cells.
    context: bool,
    /// Input of the final norm, 1 / rms of its rows, all normed rows.
    head: [i64; 3],
    /// The last layer and token block of the model.
    last_layer: usize,
    last_block: usize,
    recompute: Vec<Recompute>,
}

impl Kept {
    /// The sizes for sequences of `seq` tokens.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, seq: usize) -> Self {
        let int = |n: usize| n as i64;
        let tp = int(layout.tp);
        let rows = int(grid.ep / layout.group * grid.microbatch * seq / layout.cp);
        let (local, hidden) = (rows / tp, int(model.hidden));
        let (heads, kv_heads) = (int(model.heads) / tp, int(model.kv_heads) / tp);
        let (q, kv, ffn) = (heads * int(model.head_dim), kv_heads * int(model.head_dim), int(model.ffn) / tp);
        let (router, experts) = model.moe.as_ref().map_or((0, 0), |moe| {
            let inner = int(moe.per_token * moe.ffn + moe.shared_ffn);
            (FLOAT * local * (hidden + int(moe.experts)), FLOAT * local * 2 * inner)
        });
        let context = grid.cp > 1;
        // Normed rows that are not gathered are computed again.
        let normed = if tp == 1 { 0 } else { hidden };
        // Queries and keys before their norm, and 1 / rms of each head.
        let norms = if model.qk_norm { q + kv + heads + kv_heads } else { 0 };
        let qkv = |elements: i64| if context { FLOAT * rows * elements } else { 0 };
        Self {
            attn_norm: [FLOAT * local * hidden, FLOAT * local],
            attn: FLOAT * rows * (normed + 2 * q + 2 * kv + heads + norms),
            qkv: [qkv(normed + q + 2 * kv + norms), qkv(normed + norms)],
            mlp_norm: FLOAT * local * (hidden + 1),
            mlp: FLOAT * rows * (normed + 2 * ffn),
            moe: model.moe.is_some(),
            router,
            experts,
            parcels: FLOAT * int(crate::flow::parcels(model, grid, layout, seq)),
            attn_weights: FLOAT * rows * (hidden + q),
            qkv_weights: FLOAT * rows * (hidden + q + 2 * kv),
            mlp_weights: FLOAT * rows * (hidden + 2 * ffn),
            down_weights: FLOAT * rows * (hidden + ffn),
            context,
            head: [FLOAT * local * hidden, FLOAT * local, FLOAT * rows * hidden],
            last_layer: model.layers - 1,
            last_block: Sizes::new(model, grid, layout, seq).blocks() - 1,
            recompute: layout.recompute.clone(),
        }
    }

    /// Bytes that `instr` of a training step adds to what is kept.
    pub fn change(&self, instr: &Instr) -> i64 {
        use Pass::{Backward, BackwardInput, BackwardWeight, Forward, Recompute, RecomputeKept};
        let [input, inv] = self.attn_norm;
        match instr.op {
            Op::Drop(Segment::Attn(_)) => -self.attn,
            // Of experts the router's scores stay, for its choice is not made again.
            Op::Drop(_) if self.moe => -(inv + self.attn + self.mlp_norm + input + self.experts + self.parcels),
            Op::Collective { value: Value::Dispatch(_), .. } => self.parcels,
            Op::Collective { value: Value::CombineGrad(_), .. } => -self.parcels,
            Op::Drop(_) => -(inv + self.attn + self.mlp_norm + self.mlp),
            Op::Compute(pass, segment) => match (pass, segment) {
                (Forward, Segment::AttnNorm(_)) => input + inv,
                (Recompute, Segment::AttnNorm(l)) if self.recompute[l] == spec::Recompute::Full => inv,
                (Forward | Recompute, Segment::Qkv(_)) => self.qkv[0],
                (Forward | Recompute | RecomputeKept, Segment::Attn(_)) => self.attn - self.qkv[0],
                (Forward | Recompute, Segment::MlpNorm(_)) => self.mlp_norm,
                (Forward | RecomputeKept, Segment::Mlp(_)) => self.mlp,
                (Forward, Segment::Route(_)) => self.router,
                (Recompute, Segment::Route(_)) => input,
                (Forward | RecomputeKept, Segment::Experts(_)) => self.experts,
                (Backward, Segment::Experts(_)) => -self.experts,
                (Backward, Segment::Route(_)) => -self.router,
                (Forward, Segment::Residual(l)) if l == self.last_layer => self.head[0],
                (Forward, Segment::HeadNorm) => self.head[1],
                (Forward, Segment::Logits(0)) => self.head[2],
                (Forward, Segment::Loss(block)) if block == self.last_block => -self.head[2],
                (Backward, Segment::HeadNorm) => -self.head[0] - self.head[1],
                (Backward, Segment::Mlp(_)) => -self.mlp,
                (BackwardInput, Segment::Mlp(_)) => self.mlp_weights + self.down_weights - self.mlp,
                (BackwardWeight, Segment::Mlp(_)) => -self.mlp_weights,
                (BackwardWeight, Segment::Down(_)) => -self.down_weights,
                (Backward, Segment::MlpNorm(_)) => -self.mlp_norm,
                (Backward, Segment::Attn(_)) => self.qkv[1] - self.attn,
                (BackwardInput, Segment::Attn(_)) if self.context => self.attn_weights + self.qkv[1] - self.attn,
                (BackwardInput, Segment::Attn(_)) => self.attn_weights + self.qkv_weights - self.attn,
                (BackwardWeight, Segment::Attn(_)) => -self.attn_weights,
                (Backward, Segment::Qkv(_)) => -self.qkv[1],
                (BackwardInput, Segment::Qkv(_)) => self.qkv_weights - self.qkv[1],
                (BackwardWeight, Segment::Qkv(_)) => -self.qkv_weights,
                (Backward, Segment::AttnNorm(_)) => -input - inv,
                _ => 0,
            },
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check;
    use crate::{Mode, lower_all_parts, testing};
    use spec::Schedule;

    /// Peaks of all ranks of `p` positions with a layer each, 8 units.
    fn peaks(schedule: Schedule, p: usize, recompute: Recompute) -> (Vec<u64>, Kept) {
        let model = testing::model(p);
        let grid = Grid::new(&model, 8, 32, 1, Some(1), 1).unwrap();
        let mut layout = testing::layout(&model, &grid, [1, 1, p], schedule, None);
        layout.recompute = vec![recompute; p];
        let programs = lower_all_parts(&model, &grid, &layout, 32, Mode::Train);
        let report = check(&programs, &model, &grid, &layout, 32, Mode::Train).unwrap();
        (report.ranks.iter().map(|r| r.peak_kept).collect(), Kept::new(&model, &grid, &layout, 32))
    }

    #[test]
    fn all_that_is_kept_is_let_go() {
        for (schedule, recompute) in [
            (Schedule::OneFOneB, Recompute::None),
            (Schedule::ZbH1, Recompute::Selective),
            (Schedule::ZbH1, Recompute::Full),
        ] {
            let model = testing::model(4);
            let grid = Grid::new(&model, 8, 32, 1, Some(2), 2).unwrap();
            let mut layout = testing::layout(&model, &grid, [1, 2, 2], schedule, None);
            layout.recompute = vec![recompute; 4];
            let kept = Kept::new(&model, &grid, &layout, 32);
            for program in lower_all_parts(&model, &grid, &layout, 32, Mode::Train) {
                let left: i64 = program.instrs.iter().map(|instr| kept.change(instr)).sum();
                assert_eq!(left, 0, "{schedule} {recompute} rank {}", program.rank);
            }
        }
    }

    #[test]
    fn full_recompute_keeps_the_inputs_and_one_layer() {
        for p in 2..=4 {
            let (none, kept) = peaks(Schedule::OneFOneB, p, Recompute::None);
            let (full, _) = peaks(Schedule::OneFOneB, p, Recompute::Full);
            let layer = (kept.attn_norm[1] + kept.attn + kept.mlp_norm + kept.mlp) as u64;
            let input = kept.attn_norm[0] as u64;
            // Position 0 has p units of a layer in flight (arXiv 2205.05198, equation 5); then only their inputs.
            assert_eq!(none[0], p as u64 * (input + layer));
            assert_eq!(full[0], p as u64 * input + layer);
        }
    }

    /// The unit's share in the first position of ZB-H1 is 1F1B's; the last puts off p - 1 weight parts
    /// (arXiv 2401.10241, section 2.3: (p - i + 1) M_B + (i - 1) M_W).
    #[test]
    fn weights_put_off_are_kept() {
        let p = 4;
        let (peak, kept) = peaks(Schedule::ZbH1, p, Recompute::None);
        let unit = (kept.attn_norm[0] + kept.attn_norm[1] + kept.attn + kept.mlp_norm + kept.mlp) as u64;
        let weights = (kept.attn_weights + kept.qkv_weights + kept.mlp_weights + kept.down_weights) as u64;
        for (i, peak) in peak.iter().enumerate().take(p - 1) {
            // An input part leaves more than it found before its norms are done: at most a unit's share above.
            let formula = (p - i) as u64 * unit + i as u64 * weights;
            assert!((formula..=formula + weights).contains(peak), "position {i}: {peak}, formula {formula}");
        }
    }
}

//! Random layouts, and closed forms.

use proptest::prelude::*;
use spec::layout::LayoutRequest;
use spec::{Accumulate, Reshard, Unit};

use super::*;
use crate::buckets::ChunkPlan;
use crate::instr::{Exchange, Op, Scope, Value};

/// `parts` positive numbers that add up to `total`, from any `seed`.
fn uneven(total: usize, parts: usize, seed: &[usize]) -> Vec<usize> {
    let mut counts = vec![1; parts];
    for i in 0..total - parts {
        counts[seed[i % seed.len()] % parts] += 1;
    }
    counts
}

prop_compose! {
    fn cases()(
        grid_dp in 1usize..7,
        microbatches in 1usize..6,
        microbatch in 1usize..3,
        grid_tp in prop_oneof![Just(1usize), Just(2), Just(4)],
        tp_halvings in 0usize..3,
        [grid_cp_doublings, cp_doublings] in prop_oneof![Just([0u32, 0]), Just([1, 0]), Just([1, 1]), Just([2, 1]), Just([2, 2])],
        pp in 1usize..5,
        vpp in 1usize..4,
        extra_layers in 0usize..4,
        schedule in prop_oneof![
            Just(Schedule::GPipe),
            Just(Schedule::OneFOneB),
            Just(Schedule::Interleaved),
            Just(Schedule::ZbH1),
            Just(Schedule::ZbV),
            Just(Schedule::DualPipeV)
        ],
        zero in 0usize..4,
        flags in any::<[bool; 5]>(),
        experts in prop::option::weighted(0.3, (any::<[bool; 3]>(), 0usize..3)),
        dp_seed in 0usize..6,
        seed in proptest::collection::vec(0usize..100, 8),
        eval in prop::bool::weighted(0.2),
    ) -> Case {
        let [tied, qk_norm, even, reduced, keep] = flags;
        let each = if schedule == Schedule::Interleaved { vpp } else { schedule.chunks().0 };
        let chunks = pp * if pp > 1 { each } else { 1 };
        let moe = experts.map(|([shared, aux, pooled], _)| testing::moe(shared, aux, pooled));
        let model = Model { tied, qk_norm, moe, ..testing::model(chunks + extra_layers) };
        // Groups of data cells.
        let ep = experts.map_or(1, |(_, doublings)| 1 << doublings);
        let grid_dp = grid_dp * ep;
        let batch = grid_dp * microbatches * microbatch;
        let grid = Grid::new(&model, batch, SEQ, microbatch, Some(grid_dp), grid_tp).unwrap();
        let grid = grid.with_context(1 << grid_cp_doublings, SEQ).unwrap().with_experts(&model, ep).unwrap();
        let reduced = reduced || (zero > 1 && microbatches > 1);
        let grid = Grid { accumulate: if reduced { Accumulate::Reduced } else { Accumulate::Local }, ..grid };
        // Whole groups on a data position, or equal parts of one.
        let groups = grid_dp / ep;
        let fits = |n: &usize| groups.is_multiple_of(*n) || n.is_multiple_of(groups) && grid_dp.is_multiple_of(*n);
        let positions: Vec<usize> = (1..=grid_dp).filter(|n| ep == 1 || fits(n)).collect();
        let even = even || ep > 1;
        let (dp, tp) = (positions[dp_seed % positions.len()], grid_tp >> tp_halvings.min(grid_tp.ilog2() as usize));
        let holders = dp << cp_doublings;
        let shards: Vec<usize> = (1..=holders).filter(|n| holders.is_multiple_of(*n)).collect();
        let request = LayoutRequest {
            zero,
            cp: 1 << cp_doublings,
            shard: (zero > 0).then(|| shards[seed[0] % shards.len()]),
            reshard: if keep { Reshard::AfterBackward } else { Reshard::Always },
            vpp: (schedule == Schedule::Interleaved && pp > 1).then_some(vpp),
            cells: (!even).then(|| uneven(grid_dp, dp, &seed)),
            stages: (!even).then(|| uneven(model.layers, chunks, &seed)),
            ..testing::request([dp, tp, pp], schedule, None)
        };
        let layout = Layout::resolve(&request, &grid, &model, 1).unwrap();
        Case::new(model, grid, layout, if eval { Mode::Eval } else { Mode::Train })
    }
}

proptest! {
    #[test]
    fn what_is_lowered_passes(case in cases()) {
        let report = case.check();
        prop_assert!(report.is_ok(), "{}: {}", case.layout, report.unwrap_err().iter().map(|v| v.to_string()).collect::<Vec<_>>().join("\n"));
        let report = report.unwrap();
        let layers = case.layout.stages.iter().map(|s| s.len()).sum::<usize>() as u64;
        let units = case.layout.cells.iter().map(|cells| case.grid.units(cells.clone()).count() as u64).sum::<u64>();
        let passes = if case.mode == Mode::Train { 3 } else { 1 };
        let busy: u64 = report.ranks.iter().map(|r| r.busy).sum();
        prop_assert_eq!(busy, layers * units * passes * TICKS_PER_LAYER * (case.layout.cp * case.layout.tp) as u64);
    }

    /// Any one instruction lost is found, and nothing panics.
    #[test]
    fn any_loss_is_found(case in cases(), pick in any::<[prop::sample::Index; 2]>()) {
        let mut case = case;
        let rank = pick[0].index(case.programs.len());
        let at = pick[1].index(case.programs[rank].instrs.len());
        let lost = case.programs[rank].instrs.remove(at);
        prop_assert!(case.check().is_err(), "{}: without `{lost}` of rank {rank}", case.layout);
    }

    /// Any one instruction twice is found.
    #[test]
    fn any_echo_is_found(case in cases(), pick in any::<[prop::sample::Index; 2]>()) {
        let mut case = case;
        let rank = pick[0].index(case.programs.len());
        let at = pick[1].index(case.programs[rank].instrs.len());
        let echo = case.programs[rank].instrs[at];
        case.programs[rank].instrs.insert(at, echo);
        prop_assert!(case.check().is_err(), "{}: with `{echo}` of rank {rank} twice", case.layout);
    }

    /// What an instruction is about is proved, too: a microbatch's work names its microbatch, and no other; what is of the
    /// whole step names none. The executor counts on it.
    #[test]
    fn any_wrong_name_is_found(case in cases(), pick in any::<[prop::sample::Index; 2]>(), lost in any::<bool>()) {
        let mut case = case;
        let (rank, local) = (pick[0].index(case.programs.len()), case.grid.accumulate == Accumulate::Local);
        let list = &mut case.programs[rank].instrs;
        let at = pick[1].index(list.len());
        let instr = list[at];
        let another = Unit { cell: 0, mb: case.grid.microbatches };
        list[at].unit = match (instr.op.scope(), instr.unit) {
            (Scope::Unit, Some(_)) if lost => None,
            // A close names its cell itself, and the microbatch where each is summed by itself.
            (Scope::Unit, Some(_)) if local && matches!(instr.op, Op::Close { .. }) => None,
            (Scope::Unit, Some(unit)) => Some(Unit { mb: (unit.mb + 1) % (case.grid.microbatches + 1), ..unit }),
            (Scope::Step, None) => Some(another),
            (Scope::Bucket, Some(_)) if !local && matches!(instr.op, Op::Collective { value: Value::Grads(_), .. }) => None,
            (Scope::Bucket, _) => return Ok(()),
            (scope, unit) => panic!("`{instr}` is lowered with {unit:?}, and is of {scope:?}"),
        };
        prop_assert!(case.check().is_err(), "{}: `{instr}` of rank {rank} with {:?}", case.layout, case.programs[rank].instrs[at].unit);
    }

    /// Sizes follow the shapes of the exchange, summed over the group: the whole vector to
    /// every other member for a gather; every finished subtree but each owner's own for a sum.
    #[test]
    fn sizes_add_up_over_the_group(case in cases()) {
        let Case { model, grid, layout, .. } = &case;
        prop_assume!(model.moe.is_none());
        let sizes = Sizes::new(model, grid, layout, SEQ);
        let (tp, cp, holders) = (layout.tp as u64, layout.cp as u64, layout.holders() as u64);
        let stream = 4 * (grid.microbatch * SEQ / layout.cp * model.hidden) as u64;
        prop_assert_eq!(sizes.rows() * tp, stream * (tp - 1));
        prop_assert_eq!(sizes.activation(Mode::Train) * tp, stream);
        // Tensor cells are powers of two here: one subtree a rank, the bytes of a ring.
        prop_assert_eq!(sizes.partial(0) * tp, stream * (tp - 1));
        prop_assert_eq!(sizes.partial_embed() * tp, stream * (tp - 1));
        // Keys and values of all positions; cells are powers of two: one subtree a rank.
        let keys = if grid.cp > 1 { 4 * (2 * grid.microbatch * SEQ * model.kv_heads * model.head_dim) as u64 / tp } else { 0 };
        prop_assert_eq!(sizes.keys() * cp, keys * (cp - 1));
        prop_assert_eq!(sizes.key_grads(0) * cp, keys * (cp - 1));
        for chunk in 0..layout.chunks() {
            let plan = ChunkPlan::new(model, grid, layout, chunk, layout.coords(0));
            let place = |i| layout.holders_of(spec::Class::Common).nth(layout.coords(0), i);
            let (shard, replicas) = (layout.shard as u64, layout.replicas() as u64);
            for (bucket, b) in plan.buckets.iter().map(|b| (b.bucket, b)) {
                let len = 4 * b.at.len() as u64;
                let over = |of: &dyn Fn(usize) -> u64| (0..layout.holders()).map(of).sum::<u64>();
                let params = over(&|i| sizes.params(chunk, bucket, place(i)));
                prop_assert_eq!(params, if b.parameters { replicas * len * (shard - 1) } else { 0 });
                let spread = over(&|i| sizes.grads(chunk, bucket, place(i), Exchange::AllGather));
                prop_assert_eq!(spread, len * (replicas - 1));
                if grid.leaves() == layout.holders() {
                    let sums = over(&|i| sizes.grads(chunk, bucket, place(i), Exchange::ReduceScatter));
                    prop_assert_eq!(sums, len * (holders - 1));
                }
            }
            let twice = if model.tied && layout.pp == 1 { model.vocab_padded() / layout.tp * model.hidden } else { 0 };
            prop_assert_eq!(plan.gradients, plan.parameters + twice);
            let norms: u64 = (0..layout.tp).map(|i| sizes.norm_grads(chunk, i)).sum();
            let lanes = (grid.cp / layout.cp) as u64;
            let want = 4 * lanes * crate::state::norm_elements(model, layout, chunk) as u64;
            prop_assert_eq!(norms, 2 * want * (tp - 1));
        }
    }
}

/// The report of `p` positions with `m` units and `v` chunks of one layer each.
fn report(schedule: Schedule, p: usize, m: usize, v: Option<usize>) -> Report {
    let model = testing::model(p * v.unwrap_or(schedule.chunks().0));
    let grid = Grid::new(&model, m, SEQ, 1, Some(1), 1).unwrap();
    let layout = testing::layout(&model, &grid, [1, 1, p], schedule, v);
    Case::new(model, grid, layout, Mode::Train).check().unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-12
}

#[test]
fn bubbles_are_the_closed_forms() {
    for p in 2..=6 {
        for m in 1..=13 {
            // Share of the total: arXiv 1811.06965, section 2.3.
            let want = (p - 1) as f64 / (m + p - 1) as f64;
            for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
                let report = report(schedule, p, m, None);
                assert!(close(report.bubble, want), "{schedule} p {p} m {m}: {}", report.bubble);
                assert!(close(report.ranks[0].idle(), want), "{schedule} p {p} m {m}: rank 0");
            }
        }
    }
}

#[test]
fn interleaving_divides_the_bubble() {
    for p in 2..=6 {
        for v in 2..=4 {
            for m in 1..=3 * p {
                let report = report(Schedule::Interleaved, p, m, Some(v));
                // Idle over ideal time: arXiv 2104.04473, section 2.2.2, and for any number of
                // units from p on; with fewer, a unit is late by p - m at each of the v - 1 returns.
                let ratio = report.bubble / (1.0 - report.bubble);
                let want = (p - 1 + (v - 1) * p.saturating_sub(m)) as f64 / (v * m) as f64;
                assert!(close(ratio, want), "p {p} v {v} m {m}: {ratio}");
            }
        }
    }
}

#[test]
fn activations_are_the_closed_forms() {
    for p in 2..=6 {
        for m in 1..=13 {
            let peaks =
                |schedule, v| report(schedule, p, m, v).ranks.iter().map(|r| r.peak_activations).collect::<Vec<_>>();
            assert_eq!(peaks(Schedule::GPipe, None), vec![m; p]);
            assert_eq!(peaks(Schedule::OneFOneB, None), (0..p).map(|i| m.min(p - i)).collect::<Vec<_>>());
            if m % p == 0 && m > p {
                // Position i warms up with 2 (p - 1 - i) + (v - 1) p forwards and does one more.
                let want: Vec<_> = (0..p).map(|i| 2 * (p - 1 - i) + p + 1).collect();
                assert_eq!(peaks(Schedule::Interleaved, Some(2)), want, "p {p} m {m}");
            }
        }
    }
}

/// With equal times of the three parts (a tick each per chunk of one layer here is TICKS_PER_LAYER).
#[test]
fn zero_bubbles_are_the_closed_forms() {
    for p in 2..=6 {
        for m in 2 * p..=3 * p {
            let idle = |schedule| {
                let report = report(schedule, p, m, None);
                let work = report.ranks[0].busy;
                let layer = if schedule == Schedule::ZbH1 { 1 } else { 2 };
                assert_eq!(work, (layer * 3 * m) as u64 * TICKS_PER_LAYER);
                let window = |r: &RankReport| r.end() - r.start() - r.busy;
                (report.ticks - work, report.ranks.iter().map(window).max().unwrap())
            };
            // (p - 1) (T_F + T_B - T_W), arXiv 2401.10241, table 2: a third of 1F1B's (p - 1) (T_F + T_B + T_W).
            let ramp = (p - 1) as u64 * TICKS_PER_LAYER;
            assert_eq!(idle(Schedule::ZbH1), (ramp, ramp), "zb-h1 p {p} m {m}");
            // No bubble between the first and the last work of a position; the ramp alone makes the step longer.
            assert_eq!(idle(Schedule::ZbV), (ramp, 0), "zbv p {p} m {m}");
            // (PP / 2 - 1) (F&B + B - 3 W) with PP = 2 p chunks: forward and backward, which are not overlapped here,
            // cost F&B = T_F + T_B, and the first has been seen by then: B - 2 W + T_F.
            assert_eq!(idle(Schedule::DualPipeV), (ramp, ramp), "dualpipe-v p {p} m {m}");
        }
    }
}

#[test]
fn activations_of_zero_bubbles_are_the_closed_forms() {
    for p in 2..=6 {
        for m in [2 * p, 3 * p + 1] {
            let peaks =
                |schedule| report(schedule, p, m, None).ranks.iter().map(|r| r.peak_activations).collect::<Vec<_>>();
            // Units of one layer: p on every position; of two chunks, 2 p (1F1B's on position 0) and 2 p + 1.
            assert_eq!(peaks(Schedule::ZbH1), vec![p; p], "p {p} m {m}");
            assert_eq!(peaks(Schedule::ZbV), vec![2 * p; p], "p {p} m {m}");
            assert_eq!(peaks(Schedule::DualPipeV), vec![2 * p + 1; p], "p {p} m {m}");
        }
    }
}

use super::*;
use crate::buckets::ChunkPlan;
use crate::testing;
use spec::Schedule;

/// The list of rank 0 as text, for one tiny layout.
#[test]
fn the_smallest_step_reads_like_the_definition() {
    let model = testing::model(1);
    let grid = Grid::new(&model, 1, 32, 1, Some(1), 2).unwrap();
    let mut layout = testing::layout(&model, &grid, [1, 2, 1], Schedule::GPipe, None);
    let lowered = |layout: &Layout| -> Vec<String> {
        lower_parts(&model, &grid, layout, 32, 0, Mode::Train).instrs.iter().map(|i| i.to_string()).collect()
    };
    let beside = lowered(&layout);
    layout.tp_overlap = false;
    let text = lowered(&layout);
    // 32 tokens x 32 wide = 1024 elements, half of them own; 3 x 32 norm elements.
    let unit = " | chunk 0 | cell 0 mb 0";
    let want = [
        "load",
        "forward Embed",
        "ReduceScatter Partial Tp 2048 B",
        "forward AttnNorm(0)",
        "AllGather Rows Tp 2048 B",
        "forward Attn(0)",
        "ReduceScatter Partial Tp 2048 B",
        "forward MlpNorm(0)",
        "AllGather Rows Tp 2048 B",
        "forward Mlp(0)",
        "ReduceScatter Partial Tp 2048 B",
        "forward Residual(0)",
        "forward HeadNorm",
        "AllGather Rows Tp 2048 B",
        "forward Logits(0)",
        "AllGather Stats Tp 384 B",
        "forward Loss(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward HeadNorm",
        "close Head of cell 0",
        "AllGather GradRows Tp 2048 B",
        "backward Mlp(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward MlpNorm(0)",
        "AllGather GradRows Tp 2048 B",
        "backward Attn(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward AttnNorm(0)",
        "close Layer(0) of cell 0",
        "AllReduce NormGrads Tp 384 B",
        "AllGather GradRows Tp 2048 B",
        "backward Embed",
        "close Embed of cell 0",
        "close Norms of cell 0",
    ]
    .map(|line| format!("{line}{unit}"));
    assert_eq!(text[..want.len()], want);
    let parts = [
        "backward input Mlp(0)",
        "post ReduceScatter GradPartial Tp",
        "backward weight Mlp(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward MlpNorm(0)",
        "post AllGather GradRows Tp",
        "backward weight Down(0)",
        "AllGather GradRows Tp 2048 B",
        "backward input Attn(0)",
        "post ReduceScatter GradPartial Tp",
        "backward weight Qkv(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward AttnNorm(0)",
        "post AllGather GradRows Tp",
        "backward weight Attn(0)",
    ]
    .map(|line| format!("{line}{unit}"));
    // The feed-forward's backward is the 22nd instruction, the end of the layer the 29th.
    assert_eq!(beside, [&text[..21], &parts, &text[28..]].concat());
    let end: Vec<&str> = text[want.len()..].iter().map(|s| s.split(" | ").next().unwrap()).collect();
    let buckets = ["Embed", "Layer(0)", "Head", "Norms"].map(|b| format!("AllReduce Grads({b}) Dp 0 B"));
    assert_eq!(end[..4], buckets);
    assert!(end[4].starts_with("AllGather Ballot World"));
    assert_eq!(end[5..], ["vote", "apply"]);
}

fn run(layout: &str) -> Run {
    let text = format!(
        "[model]\npreset = \"tiny\"\ntied = true\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 32\n[grid]\ndp = 4\ntp = 2\n[layout]\n{layout}"
    );
    Run::parse(&text, "test", &[], 1).unwrap()
}

/// A run file, its ranks one by one or all at once.
#[test]
fn runs_are_lowered_and_sound() {
    for layout in
        ["", "dp = 3\ntp = 2\npp = 2\nschedule = \"1f1b\"\nzero = 1\n", "pp = 2\nschedule = \"interleaved\"\n"]
    {
        let run = run(layout);
        for mode in [Mode::Train, Mode::Eval] {
            let all = lower_all(&run, mode);
            assert_eq!(all.len(), run.layout.world());
            for (rank, program) in all.iter().enumerate() {
                assert_eq!(*program, lower(&run, rank, mode));
            }
            let report = crate::check(&all, &run.model, &run.grid, &run.layout, run.train.seq, mode);
            assert!(report.is_ok(), "{}: {report:?}", run.layout);
        }
    }
}

/// Sizes over uneven data cells, counted by hand: 3 ranks host 2, 1 and 1 of 4 cells.
#[test]
fn gradients_over_uneven_cells() {
    let model = testing::model(1);
    let grid = Grid::new(&model, 4, 32, 1, Some(4), 1).unwrap();
    let layout = testing::layout(&model, &grid, [3, 1, 1], Schedule::GPipe, None);
    assert_eq!(layout.cells, [0..2, 2..3, 3..4]);
    let plan = ChunkPlan::new(&model, &grid, &layout, 0, layout.coords(0));
    for rank in 0..3 {
        let program = lower_parts(&model, &grid, &layout, 32, rank, Mode::Train);
        let grads = program.instrs.iter().filter_map(|i| match i.op {
            Op::Collective { value: Value::Grads(_), bytes, .. } => Some(bytes),
            _ => None,
        });
        // Each rank holds one finished subtree: two cells are one pair.
        let part: usize = plan.buckets.iter().map(|b| b.parts[rank].len()).sum();
        let want = 4 * ((plan.gradients - part) + 2 * part);
        assert_eq!(grads.sum::<u64>(), want as u64, "rank {rank}");
    }
}

/// What travels and when, of `rank`: gathers, releases and sums, and what is posted of them (`>`, `^`), beside the layers at
/// work.
fn data_axis(model: &Model, grid: &Grid, layout: &Layout, rank: usize) -> String {
    let word = |i: &Instr| match i.op {
        Op::Post { value: Value::Params(b), .. } => Some(format!(">{}", short(b))),
        Op::Post { value: Value::Grads(b), .. } => Some(format!("^{}", short(b))),
        Op::Collective { value: Value::Params(b), .. } => Some(format!("+{}", short(b))),
        Op::Release(b) => Some(format!("-{}", short(b))),
        Op::Collective { value: Value::Grads(b), exchange, .. } => {
            Some(format!("{}{}", if exchange == Exchange::AllGather { "spread " } else { "sum " }, short(b)))
        }
        Op::Compute(Pass::Forward, Segment::Mlp(l)) => Some(format!("f{l}")),
        Op::Compute(Pass::Backward, Segment::Mlp(l)) => Some(format!("b{l}")),
        Op::Compute(Pass::Forward, Segment::Logits(_)) => Some("head".into()),
        Op::Vote => Some("vote".into()),
        _ => None,
    };
    let list = lower_parts(model, grid, layout, 32, rank, Mode::Train);
    list.instrs.iter().filter_map(word).collect::<Vec<_>>().join(" ")
}

fn short(bucket: Bucket) -> String {
    match bucket {
        Bucket::Layer(l) => l.to_string(),
        other => format!("{other:?}"),
    }
}

/// Parameters are posted one layer ahead and go after their use; a gradient leaves as soon as the last cell has added to it, and
/// its sum is taken when the next one leaves.
#[test]
fn shards_are_gathered_ahead_and_sums_leave_at_once() {
    let model = testing::model(2);
    let grid = Grid { accumulate: spec::Accumulate::Reduced, ..Grid::new(&model, 2, 32, 1, Some(2), 1).unwrap() };
    let mut layout = testing::layout(&model, &grid, [2, 1, 1], Schedule::GPipe, None);
    (layout.zero, layout.shard) = (3, 2);
    assert_eq!(
        data_axis(&model, &grid, &layout, 0),
        ">Norms >Embed +Norms +Embed >0 -Embed +0 >1 f0 -0 +1 f1 -1 -Norms \
         >Norms >Head +Norms +Head >1 head -Head ^Head +1 >0 b1 -1 sum Head ^1 +0 b0 -0 sum 1 ^0 sum 0 ^Embed sum Embed ^Norms -Norms \
         sum Norms vote"
    );
    layout.reshard = spec::Reshard::AfterBackward;
    assert_eq!(
        data_axis(&model, &grid, &layout, 0),
        ">Norms >Embed +Norms +Embed >0 -Embed +0 >1 f0 +1 f1 \
         >Head +Head head -Head ^Head b1 -1 sum Head ^1 b0 -0 sum 1 ^0 sum 0 ^Embed sum Embed ^Norms -Norms \
         sum Norms vote"
    );
    (layout.zero, layout.shard) = (2, 1);
    let text = data_axis(&model, &grid, &layout, 1);
    assert!(
        text.ends_with(
            "sum Norms spread Embed spread 0 spread 1 spread Head spread Norms vote +Embed +0 +1 +Head +Norms"
        ),
        "{text}"
    );
}

/// Bytes of all ranks over the data axis in a step, by bucket.
fn data_bytes(model: &Model, grid: &Grid, layout: &Layout, bucket: Bucket) -> u64 {
    let of = |instr: Instr| match instr.op {
        Op::Collective { value: Value::Params(b) | Value::Grads(b), bytes, .. } if b == bucket => bytes,
        _ => 0,
    };
    lower_all_parts(model, grid, layout, 32, Mode::Train).into_iter().flat_map(|p| p.instrs).map(of).sum()
}

/// ZeRO (arXiv 1910.02054, section 7): plain data parallelism moves 2 elements per parameter and step, full sharding 3: a
/// gather forward, one backward, a sum. What only one direction reads is gathered once; microbatches repeat all three.
#[test]
fn full_sharding_moves_one_and_a_half_times_plain_data_parallelism() {
    let model = testing::model(3);
    for (dp, microbatches) in [(2, 1), (4, 1), (2, 3)] {
        let batch = dp * microbatches;
        let grid = Grid::new(&model, batch, 32, 1, Some(dp), 1).unwrap();
        let grid = Grid { accumulate: spec::Accumulate::Reduced, ..grid };
        let local = Grid { accumulate: spec::Accumulate::Local, ..grid.clone() };
        let plain = testing::layout(&model, &grid, [dp, 1, 1], Schedule::GPipe, None);
        let sharded = |reshard| Layout { zero: 3, shard: dp, reshard, ..plain.clone() };
        let times = |layout: &Layout, bucket| {
            data_bytes(&model, &grid, layout, bucket) as f64 / data_bytes(&model, &local, &plain, bucket) as f64
        };
        let m = microbatches as f64;
        let always = sharded(spec::Reshard::Always);
        for layer in 0..3 {
            assert_eq!(times(&always, Bucket::Layer(layer)), 1.5 * m, "dp {dp}, {microbatches} microbatches");
        }
        // The embedding is read forward only, the output projection in the backward's head only.
        assert_eq!([Bucket::Embed, Bucket::Head].map(|b| times(&always, b)), [m; 2]);
        // Gathered once per step, and summed for every microbatch.
        let kept = sharded(spec::Reshard::AfterBackward);
        assert_eq!(times(&kept, Bucket::Layer(0)), (1.0 + m) / 2.0);
    }
}

/// A rank with fewer cells than another takes part in what it has no cell for.
#[test]
fn a_slot_without_a_cell_only_exchanges() {
    let model = testing::model(1);
    let grid = Grid { accumulate: spec::Accumulate::Reduced, ..Grid::new(&model, 6, 32, 1, Some(3), 1).unwrap() };
    let mut layout = testing::layout(&model, &grid, [2, 1, 1], Schedule::GPipe, None);
    (layout.zero, layout.shard) = (3, 2);
    let strip = |text: String| text.replace("head ", "").replace("f0 ", "").replace("b0 ", "");
    let [two, one] = [0, 1].map(|rank| data_axis(&model, &grid, &layout, rank));
    assert_eq!((two.matches("f0").count(), one.matches("f0").count()), (4, 2));
    assert_eq!(strip(two), strip(one));
}

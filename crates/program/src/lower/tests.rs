use super::*;
use crate::testing;
use spec::Schedule;

/// The list of rank 0 as text, for one tiny layout.
#[test]
fn the_smallest_step_reads_like_the_definition() {
    let model = testing::model(1);
    let grid = Grid::new(&model, 1, 32, 1, Some(1), 2).unwrap();
    let layout = testing::layout(&model, &grid, [1, 2, 1], Schedule::GPipe, None);
    let text: Vec<String> =
        lower_parts(&model, &grid, &layout, 32, 0, Mode::Train).instrs.iter().map(|i| i.to_string()).collect();
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
        "AllGather GradRows Tp 2048 B",
        "backward Mlp(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward MlpNorm(0)",
        "AllGather GradRows Tp 2048 B",
        "backward Attn(0)",
        "ReduceScatter GradPartial Tp 2048 B",
        "backward AttnNorm(0)",
        "AllReduce NormGrads Tp 384 B",
        "AllGather GradRows Tp 2048 B",
        "backward Embed",
        "close cell 0",
    ]
    .map(|line| format!("{line}{unit}"));
    assert_eq!(text[..want.len()], want);
    let end: Vec<&str> = text[want.len()..].iter().map(|s| s.split(" | ").next().unwrap()).collect();
    assert_eq!(end[0], "AllReduce Grads Dp 0 B");
    assert!(end[1].starts_with("AllGather Ballot World"));
    assert_eq!(end[2..], ["vote", "apply"]);
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
    let lens = crate::state::slice_lens(&model, &grid, &layout, 0);
    let parts = crate::owners(&lens, 3);
    let total: usize = lens.iter().sum();
    for (rank, part) in parts.iter().enumerate() {
        let program = lower_parts(&model, &grid, &layout, 32, rank, Mode::Train);
        let grads = program.instrs.iter().find_map(|i| match i.op {
            Op::Collective { value: Value::Grads, bytes, .. } => Some(bytes),
            _ => None,
        });
        // Each rank holds one finished subtree: two cells are one pair.
        let want = 4 * ((total - part.len()) + 2 * part.len());
        assert_eq!(grads, Some(want as u64), "rank {rank}");
    }
}

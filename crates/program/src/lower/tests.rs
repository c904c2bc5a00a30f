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

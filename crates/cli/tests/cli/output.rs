//! What is printed: the lines of the contract, the objects of `--json`, and nobody listening.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::common::{Lab, Out};

/// A step line, read back.
#[derive(Debug, PartialEq)]
struct StepLine {
    step: u64,
    steps: u64,
    loss: f64,
    grad_norm: f64,
    lr: f64,
    rate: f64,
    rate_rank: f64,
    mfu: f64,
    ms: f64,
}

/// Strictly: `step 12/200 | loss 3.1415 | grad_norm 0.98 | lr 3.00e-04 | tok/s 12345 | tok/s/rank 3086 | mfu 61.2% | 333 ms`.
fn parse(line: &str) -> Option<StepLine> {
    let mut parts = line.split(" | ");
    let mut part = |start: &str, end: &str| parts.next()?.strip_prefix(start)?.strip_suffix(end);
    let (step, steps) = part("step ", "")?.split_once('/')?;
    let parsed = StepLine {
        step: step.parse().ok()?,
        steps: steps.parse().ok()?,
        loss: decimal(part("loss ", "")?, 4)?,
        grad_norm: decimal(part("grad_norm ", "")?, 2)?,
        lr: scientific(part("lr ", "")?)?,
        rate: decimal(part("tok/s ", "")?, 0)?,
        rate_rank: decimal(part("tok/s/rank ", "")?, 0)?,
        mfu: decimal(part("mfu ", "%")?, 1)?,
        ms: decimal(part("", " ms")?, 0)?,
    };
    parts.next().is_none().then_some(parsed)
}

/// Digits with exactly `places` behind the point.
fn decimal(text: &str, places: usize) -> Option<f64> {
    let (whole, rest) = if places == 0 { (text, "") } else { text.split_once('.')? };
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    (!whole.is_empty() && digits(whole) && digits(rest) && rest.len() == places).then(|| text.parse().ok())?
}

/// Such as 3.00e-04.
fn scientific(text: &str) -> Option<f64> {
    let (digits, power) = text.split_once('e')?;
    let sign_and_two = power.len() == 3 && (power.starts_with('-') || power.starts_with('+'));
    decimal(digits, 2).filter(|_| sign_and_two)?;
    text.parse().ok()
}

/// The objects of `--json`; every line must be one.
#[track_caller]
fn objects(out: &Out) -> Vec<serde_json::Value> {
    let lines = out.stdout.lines().map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(value.is_object() && value["kind"].is_string(), "{line}");
        assert_eq!(value["schema"].as_u64(), Some(1), "{line}");
        value
    });
    lines.collect()
}

#[test]
fn the_parser_of_step_lines_is_strict() {
    let good =
        "step 12/200 | loss 2.7315 | grad_norm 0.98 | lr 3.00e-04 | tok/s 12345 | tok/s/rank 3086 | mfu 61.2% | 333 ms";
    let step = parse(good).unwrap();
    assert_eq!((step.step, step.steps, step.loss, step.lr, step.mfu, step.ms), (12, 200, 2.7315, 3e-4, 61.2, 333.0));
    let bad =
        [("2.7315", "2.73"), ("3.00e-04", "3.00e-4"), ("61.2%", "61.2"), (" ms", "ms"), ("12345", "1e4"), (" | ", "|")];
    for (from, to) in bad {
        assert_eq!(parse(&good.replacen(from, to, 1)), None, "{to}");
    }
    assert_eq!(parse(&format!("{good} | more")), None);
}

#[test]
fn step_lines_are_those_of_the_contract() {
    for (sets, ranks) in [(&["layout.threads=1"][..], 1.0), (&["layout.dp=2", "layout.tp=2"][..], 4.0)] {
        let out = Lab::new().train("out", &[], sets).expect(0);
        let lines = out.stdout.lines().filter(|line| line.starts_with("step "));
        let steps: Vec<_> = lines.map(|line| parse(line).unwrap_or_else(|| panic!("{line}"))).collect();
        assert_eq!(steps.iter().map(|s| (s.step, s.steps)).collect::<Vec<_>>(), [(1, 4), (2, 4), (3, 4), (4, 4)]);
        // Warm-up over 2 steps to 3e-3, then half a cosine to 0.
        assert_eq!(steps.iter().map(|s| s.lr).collect::<Vec<_>>(), [1.5e-3, 3e-3, 1.5e-3, 0.0]);
        for step in &steps {
            assert!((4.0..6.0).contains(&step.loss) && step.grad_norm > 0.0, "{step:?}");
            assert!((step.rate / ranks - step.rate_rank).abs() <= 1.0, "{step:?}");
            // 8 sequences of 16 tokens; both sides are rounded.
            assert!((step.rate * step.ms / 1000.0 - 128.0).abs() <= 0.6 * step.rate / 1000.0 + 1.0, "{step:?}");
            assert!(step.mfu < 100.0, "{step:?}");
        }
    }
}

#[test]
fn json_is_one_object_a_line_and_ends_with_the_digest() {
    let lab = Lab::new();
    let sets = ["layout.dp=2", "checkpoint.every=2", "train.eval_every=2"];
    let out = lab.train("out", &["--json", "--digest-every", "2"], &sets).expect(0);
    let all = objects(&out);
    let count = |kind: &str| all.iter().filter(|value| value["kind"] == kind).count();
    let wanted = [("step", 4), ("validation", 2), ("checkpoint", 2), ("tensor_hashes", 2), ("rank_started", 2)];
    for (kind, times) in wanted.into_iter().chain([("rank_finished", 2), ("goodput", 1), ("digest", 1)]) {
        assert_eq!(count(kind), times, "{kind}: {out}");
    }
    let last = all.last().unwrap();
    assert_eq!((&last["kind"], last["step"].as_u64()), (&"digest".into(), Some(4)), "{out}");
    let text = Lab::new().train("out", &[], &["layout.dp=2"]).expect(0);
    assert_eq!(last["digest"], text.digest().as_str(), "text and JSON tell the same");
    // The log holds the same events.
    let log = fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    for kind in ["step", "validation", "checkpoint", "rank_started", "rank_finished", "digest"] {
        assert_eq!(log.matches(&format!("\"kind\":\"{kind}\"")).count(), count(kind), "{kind}: {log}");
    }
    let summary: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(lab.path("out/summary.json")).unwrap()).unwrap();
    assert_eq!((&summary["digest"], &summary["ended"]), (&last["digest"], &"finished".into()));
}

/// The classes of time must add up to the wall time within 1 %.
fn adds_up(wall: f64, parts: impl Iterator<Item = f64>) {
    let sum: f64 = parts.sum();
    assert!((sum - wall).abs() <= 0.01 * wall, "{sum} is not {wall}");
}

#[test]
fn the_goodput_split_adds_up_to_the_wall_time() {
    for layout in ["layout.dp=1", "layout.dp=2"] {
        let out = Lab::new().train("out", &["--json"], &["train.steps=20", layout]).expect(0);
        let all = objects(&out);
        let goodput = all.iter().find(|value| value["kind"] == "goodput").unwrap();
        let parts = goodput["time_s"].as_array().unwrap().iter().map(|part| part[1].as_f64().unwrap());
        adds_up(goodput["wall_s"].as_f64().unwrap(), parts);
        assert_eq!(goodput["restarts"].as_u64(), Some(0));
    }
    let out = Lab::new().train("out", &[], &["train.steps=100", "layout.threads=1"]).expect(0);
    let tail: Vec<_> = out.stdout.lines().rev().take(3).collect();
    assert_eq!(tail[1], "restarts 0");
    let (wall, split) = tail[2].strip_prefix("wall ").and_then(|line| line.split_once(" s = ")).unwrap();
    let (split, goodput) = split.split_once(" | goodput ").unwrap();
    let part = |text: &str| text.rsplit(' ').nth(1).unwrap().parse::<f64>().unwrap();
    let wall: f64 = wall.parse().unwrap();
    // Each of the parts is rounded to 10 ms.
    let sum: f64 = split.split(" + ").map(part).sum();
    assert!((sum - wall).abs() <= 0.01 * wall + 0.005 * 7.0, "{}", tail[2]);
    let train = split.split(" + ").find(|text| text.starts_with("train ")).map(part).unwrap();
    let percent: f64 = goodput.trim_end_matches('%').parse().unwrap();
    assert!((percent - 100.0 * train / wall).abs() < 2.0, "{}", tail[2]);
}

#[test]
fn a_run_that_diverges_says_so_and_exits_4() {
    let lab = Lab::new();
    let sets = ["train.lr=1e30", "train.warmup=0", "train.clip=0", "train.steps=40", "layout.dp=2"];
    let out = lab.train("out", &["--json"], &sets).expect(4);
    let error = objects(&out).pop().unwrap();
    assert_eq!((&error["kind"], error["exit_code"].as_i64()), (&"error".into(), Some(4)), "{out}");
    for word in ["diverged at step ", "train.lr", "nothing was applied"] {
        assert!(error["error"].as_str().unwrap().contains(word), "{out}");
    }
    assert!(fs::read_to_string(lab.path("out/summary.json")).unwrap().contains("diverged"));
}

#[test]
fn nobody_listening_is_no_reason_to_stop() {
    for layout in ["layout.dp=1", "layout.dp=2"] {
        let lab = Lab::new();
        let words = ["train", "run.toml", "--run-dir", "out", "--set", "train.steps=20", layout];
        let mut command = lab.command(&words);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // As `2>&1 | head -1` does: one line is read, then both pipes are closed.
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        drop(child.stderr.take());
        assert!(first.contains("parameters"), "{first}");
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let summary = fs::read_to_string(lab.path("out/summary.json")).unwrap();
        assert!(summary.contains("\"finished\""), "{summary}");
        assert!(lab.path("out/checkpoints/step-00000020/manifest.json").exists());
    }
}

#[test]
fn an_error_with_nobody_listening_keeps_its_exit_code() {
    let lab = Lab::new();
    let mut command = lab.command(&["train", "run.toml", "--run-dir", "out", "--set", "layout.dp=9"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

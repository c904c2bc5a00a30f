//! `train --profile`: the table adds up, the trace is whole, the digest is the same.

use std::collections::HashMap;
use std::fs;

use serde_json::Value;

use crate::common::{Lab, Out, same_tree};

const STEPS: &str = "train.steps=7";

/// Settings, ranks, and rows (group, name) that must be there.
type Case = (&'static [&'static str], usize, &'static [(&'static str, &'static str)]);

/// The profile of a `--json` run.
#[track_caller]
fn profile(out: &Out) -> Value {
    let objects = out.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let found: Vec<_> = objects.filter(|o| o["kind"] == "profile").collect();
    assert_eq!(found.len(), 1, "{out}");
    found.into_iter().next().unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// The rows of every rank add up to its step, and what was exchanged is there.
fn adds_up(profile: &Value, ranks: usize, wanted: &[(&str, &str)]) {
    let steps = numbers(&profile["step_s"]);
    assert_eq!(steps.len(), ranks);
    let rows = profile["rows"].as_array().unwrap();
    for (rank, step) in steps.iter().enumerate() {
        let sum = |wanted: &dyn Fn(&Value) -> bool| -> f64 {
            rows.iter().filter(|row| wanted(row)).map(|row| numbers(&row["rank_s"])[rank]).sum()
        };
        let (all, other) = (sum(&|_| true), sum(&|row| row["group"] == "other"));
        assert!((all - step).abs() < 1e-9, "rank {rank}: {all} is not {step}");
        // On a busy machine a rank may be put aside for a moment between two instructions.
        assert!(other < 0.02 * step + 1e-3, "rank {rank}: {other} of {step} is unexplained");
    }
    for (group, name) in wanted {
        let found = rows.iter().find(|row| row["group"] == *group && row["name"] == *name);
        let row = found.unwrap_or_else(|| panic!("no {group} {name} in {profile:#}"));
        assert!(row["rank_s"].as_array().unwrap().iter().any(|s| s.as_f64() > Some(0.0)), "{row}");
    }
}

/// A slice of the trace: name, begin and end in microseconds.
type Slice = (String, f64, f64);

/// Parses a trace, checks that slices nest and arrows have both ends in slices of different ranks; the slices by rank
/// and the number of arrows.
fn trace(text: &str) -> (HashMap<u64, Vec<Slice>>, usize) {
    let trace: Value = serde_json::from_str(text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let mut slices: HashMap<u64, Vec<Slice>> = HashMap::new();
    let (mut starts, mut ends, mut beside) = (HashMap::new(), HashMap::new(), HashMap::new());
    for event in events {
        let (pid, ts) = (event["pid"].as_u64().unwrap(), event["ts"].as_f64());
        match event["ph"].as_str().unwrap() {
            "X" => {
                let (ts, dur) = (ts.unwrap(), event["dur"].as_f64().unwrap());
                assert!(dur >= 0.0 && event["cat"].is_string(), "{event}");
                slices.entry(pid).or_default().push((event["name"].as_str().unwrap().into(), ts, ts + dur));
            }
            "s" => assert!(starts.insert(event["id"].to_string(), (pid, ts.unwrap())).is_none(), "{event}"),
            "f" => assert!(ends.insert(event["id"].to_string(), (pid, ts.unwrap())).is_none(), "{event}"),
            // What ran beside the instructions has a track of its own.
            "b" => assert!(beside.insert(event["id"].to_string(), ts.unwrap()).is_none(), "{event}"),
            "e" => {
                assert!(beside.remove(&event["id"].to_string()).is_some_and(|begin| begin <= ts.unwrap()), "{event}")
            }
            other => assert_eq!(other, "M"),
        }
    }
    assert!(beside.is_empty(), "{beside:?}");
    const ROUNDING: f64 = 1e-3;
    for slices in slices.values_mut() {
        // Outer ones first: a stack of open slices holds each next one.
        slices.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.2.total_cmp(&a.2)));
        let mut open: Vec<f64> = Vec::new();
        for (name, begin, end) in slices.iter() {
            open.retain(|outer| *outer > *begin + ROUNDING);
            assert!(open.last().is_none_or(|outer| *end <= outer + ROUNDING), "{name} does not nest");
            open.push(*end);
        }
    }
    assert_eq!(starts.len(), ends.len());
    let inside =
        |(pid, ts): (u64, f64)| slices[&pid].iter().any(|(_, a, b)| *a - ROUNDING <= ts && ts <= *b + ROUNDING);
    for (id, start) in &starts {
        let end = ends.get(id).unwrap_or_else(|| panic!("arrow {id} has one end"));
        assert!(start.0 != end.0 && start.1 <= end.1 && inside(*start) && inside(*end), "{start:?} -> {end:?}");
    }
    (slices, starts.len())
}

#[test]
fn the_profile_adds_up_and_the_trace_is_whole_under_every_axis() {
    let plain = Lab::new().train("out", &[], &[STEPS]).expect(0).digest();
    let cases: [Case; 5] = [
        (&["layout.threads=1"], 1, &[("sums", "data cells onto the tree"), ("data", "tokens of a microbatch")]),
        (&["layout.dp=2"], 2, &[("exchange", "all-reduce grads (dp)")]),
        (&["layout.pp=2", "layout.schedule=zb-h1"], 2, &[("backward", "mlp input"), ("backward", "mlp weight")]),
        (&["layout.tp=2"], 2, &[("exchange", "reduce-scatter partial (tp)"), ("exchange", "all-gather rows (tp)")]),
        (
            &["layout.dp=2", "layout.pp=2", "layout.zero=1", "layout.transport=tcp"],
            4,
            &[
                ("exchange", "receive activation (pp)"),
                ("waiting", "for the pipeline (bubble)"),
                ("exchange", "all-gather params (shard)"),
            ],
        ),
    ];
    for (layout, ranks, wanted) in cases {
        let lab = Lab::new();
        let sets: Vec<_> = layout.iter().copied().chain([STEPS]).collect();
        let out = lab.train("out", &["--json", "--profile", "--profile-steps", "3"], &sets).expect(0);
        assert!(out.stdout.lines().last().unwrap().contains(&plain), "{layout:?} {out}");
        let profile = profile(&out);
        assert_eq!((&profile["first"], &profile["last"], &profile["steps"]), (&4.into(), &6.into(), &3.into()));
        let always = [
            ("forward", "mlp"),
            ("backward", "attn norm"),
            ("vote", "gradient norm and ballots"),
            ("optimizer", "update of parameters and moments"),
        ];
        adds_up(&profile, ranks, &[wanted, &always].concat());
        let mut beside = Vec::new();
        if layout.contains(&"layout.dp=2") {
            beside.push("grads (dp)");
        }
        if layout.contains(&"layout.tp=2") {
            beside.extend(["reduce-scatter grad partial (tp)", "all-gather grad rows (tp)"]);
        }
        for exchange in beside {
            let rows = profile["rows"].as_array().unwrap();
            let found = rows.iter().find(|row| {
                let name = row["name"].as_str().unwrap();
                name.ends_with(exchange) && !name.starts_with("post")
            });
            let found = found.unwrap_or_else(|| panic!("{profile:#}"));
            // Whoever posts last may find all of it there.
            assert!(numbers(&found["hidden_s"]).iter().any(|hidden| *hidden > 0.0), "{found}");
        }
        let (slices, arrows) = trace(&fs::read_to_string(lab.path("out/trace/trace.json")).unwrap());
        assert_eq!(slices.len(), ranks);
        for slices in slices.values() {
            assert_eq!(slices.iter().filter(|s| s.0.starts_with("step ")).count(), 3);
        }
        assert_eq!(arrows > 0, ranks > 1);
    }
}

#[test]
fn the_table_is_for_a_person_and_sums_to_the_step() {
    let out = Lab::new().train("out", &["--profile", "--profile-warmup", "1"], &["layout.dp=2"]).expect(0);
    assert!(out.stdout.contains("\nprofile of steps 2 to 4\n"), "{out}");
    assert!(out.stdout.contains("arrows: ") && out.stdout.contains("/out/trace/trace.json"), "{out}");
    let mut lines = out.stdout.lines().skip_while(|line| !line.starts_with("where a step's time goes"));
    assert!(lines.next().unwrap().contains("means over steps 2 to 4 | 2 ranks of 1 thread"), "{out}");
    let head: Vec<_> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["mean", "ms", "share", "rank", "0", "rank", "1"]);
    let row = |line: &str| -> Vec<f64> {
        let numbers: String = line.chars().skip(42).collect();
        numbers.split_whitespace().map_while(|word| word.trim_end_matches('%').parse().ok()).collect()
    };
    let mut sums = [0.0; 4];
    for line in lines {
        let row = row(line);
        if line.starts_with("step ") {
            for (at, (sum, step)) in sums.iter().zip(&row).enumerate() {
                // Each of some 30 lines is rounded.
                assert!((sum - step).abs() < 0.02 * step + 0.005 * 30.0 + if at == 1 { 1.5 } else { 0.0 }, "{out}");
            }
            return;
        }
        sums.iter_mut().zip(&row[..4]).for_each(|(sum, value)| *sum += value);
    }
    panic!("no line of the step: {out}");
}

#[test]
fn a_window_without_a_step_is_refused_and_a_short_run_is_told() {
    let lab = Lab::new();
    let before = lab.tree();
    let out = lab.train("out", &["--profile", "--profile-warmup", "4"], &[]).expect(2);
    out.says(&["--profile-warmup 4", "train.steps = 4", "lower --profile-warmup"]);
    lab.train("out", &["--profile", "--profile-steps", "0"], &[]).expect(2).says(&["--profile-steps is 0"]);
    lab.train("out", &["--profile-steps", "2"], &[]).expect(2).says(&["--profile"]);
    same_tree(&before, &lab.tree());
    // Ended by patience before the window: said, and no trace.
    let sets = ["train.steps=40", "train.eval_every=1", "train.patience=1", "train.lr=0.0"];
    let out = lab.train("out", &["--profile", "--profile-warmup", "30"], &sets).expect(0);
    assert!(out.stdout.contains("no profile: the run ended before step 31"), "{out}");
    assert!(!lab.path("out/trace/trace.json").exists());
}

#[test]
fn a_resumed_run_warms_up_again() {
    let lab = Lab::new();
    lab.train("out", &[], &["train.steps=8", "checkpoint.every=4", "layout.dp=2"]).expect(0);
    fs::remove_dir_all(lab.path("out/checkpoints/step-00000008")).unwrap();
    let args = ["--resume", "--json", "--profile", "--profile-warmup", "2"];
    let profile = profile(&lab.train("out", &args, &["train.steps=8", "checkpoint.every=4"]).expect(0));
    assert_eq!((&profile["first"], &profile["last"]), (&7.into(), &8.into()));
    adds_up(&profile, 1, &[("forward", "attn")]);
}

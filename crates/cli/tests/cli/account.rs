//! `goodput` and `diagnose`.

use std::path::Path;

use crate::common::Lab;

#[test]
fn every_second_of_a_run_is_accounted_for() {
    let lab = Lab::new();
    lab.train("out", &[], &["train.steps=8", "layout.dp=2", "checkpoint.every=4"]).expect(0);
    let out = lab.lockstep(&["goodput", "out", "--json"]).expect(0);
    let account: serde_json::Value = serde_json::from_str(out.stdout.trim()).unwrap();
    let run = &account["run"];
    let (wall, sum) = sums(run);
    assert!((sum - wall).abs() <= 0.01 * wall, "{account}");
    assert_eq!(
        (run["steps"].as_u64(), run["steps_redone"].as_u64(), run["sessions"].as_u64()),
        (Some(8), Some(0), Some(1))
    );
    assert!(run["goodput"].as_f64().unwrap() > 0.0 && account["lines_unread"] == 0, "{account}");
    let text = lab.lockstep(&["goodput", "out"]).expect(0).stdout;
    assert!(text.contains("8 steps, 0 redone | started 1 times | 0 recoveries"), "{text}");
    lab.lockstep(&["goodput", "nowhere"]).expect(2).says(&["nowhere", "events.jsonl", "run directory"]);
    lab.lockstep(&["goodput", "out", "--window", "0"]).expect(2).says(&["--window 0", "above 0"]);
}

fn sums(account: &serde_json::Value) -> (f64, f64) {
    let parts = account["time_s"].as_array().unwrap().iter().map(|part| part[1].as_f64().unwrap());
    (account["wall_s"].as_f64().unwrap(), parts.sum())
}

#[test]
fn flight_records_are_judged() {
    let lab = Lab::new();
    lab.lockstep(&["diagnose", "."]).expect(2).says(&["no flight records", "fr_trace_rank_0.json"]);
    let dumps = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/nvrx_fr_traces/lock_gil_2nd");
    if !dumps.is_dir() {
        eprintln!("skipped: {} is not there", dumps.display());
        return;
    }
    let out = lab.lockstep(&["diagnose", &dumps.display().to_string()]).expect(0);
    let words = ["16 records", "rank 10 did not join nccl:all_to_all", "rank 15 did not join nccl:all_to_all"];
    assert!(words.iter().all(|word| out.stdout.contains(word)), "{}", out.stdout);
    let out = lab.lockstep(&["diagnose", &dumps.display().to_string(), "--json"]).expect(0);
    let object: serde_json::Value = serde_json::from_str(out.stdout.trim()).unwrap();
    assert_eq!(object["verdict"]["culprits"][1]["rank"], 15);
}

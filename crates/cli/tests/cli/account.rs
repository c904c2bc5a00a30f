//! `goodput` and `diagnose`.

use std::path::Path;
use std::time::Instant;

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
    // Lines that a full disk lost.
    let log = std::fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    let kept = |line: &&str| ![3, 4, 5, 7].iter().any(|n| line.contains(&format!("\"step\":{n},\"steps\":8")));
    let kept: Vec<_> = log.lines().filter(kept).collect();
    assert_eq!(kept.len() + 4, log.lines().count(), "{log}");
    lab.write("out/events.jsonl", kept.join("\n"));
    let text = lab.lockstep(&["goodput", "out"]).expect(0).stdout;
    assert!(text.contains("events.jsonl lacks steps 3 to 5, 7:"), "{text}");
    lab.lockstep(&["goodput", "nowhere"]).expect(2).says(&["nowhere", "events.jsonl", "run directory"]);
    lab.lockstep(&["goodput", "out", "--window", "0"]).expect(2).says(&["--window 0", "above 0"]);
}

/// The wall clock is moved there and back, once around a recovery: it is seen, and nothing else comes of it.
#[test]
fn a_wall_clock_that_jumps_changes_nothing() {
    let sets = ["train.steps=24", "checkpoint.every=6", "layout.dp=2", "layout.transport=tcp"];
    let want = Lab::new().train("out", &[], &sets[..2]).expect(0).digest();
    let jumps = [("+86400", 4), ("-172800", 9), ("+3600", 12), ("-7", 24)];
    for (kill, restarts) in [("", 0), (",kill:1@9", 1)] {
        let faults: Vec<_> = jumps.iter().map(|(seconds, step)| format!("clock:{seconds}@{step}")).collect();
        let lab = Lab::new();
        let began = Instant::now();
        let out = lab.train("out", &["--inject", &(faults.join(",") + kill)], &sets).expect(0);
        let outside = began.elapsed().as_secs_f64();
        assert_eq!(out.digest(), want, "{out}");
        assert!(out.stdout.contains(&format!("\nrestarts {restarts}\n")), "{out}");
        let troubles = out.stdout.lines().filter(|line| line.starts_with("trouble ")).count();
        assert_eq!(troubles, restarts, "nothing else is detected: {out}");
        // Each is seen by both ranks, unless they were busy dying, and by the process that leads them.
        for (seconds, step) in jumps {
            let fired = format!("suffers clock {seconds} s in step {step}");
            assert!(out.stdout.matches(&fired).count() > 0, "{fired}: {out}");
            let seen = format!("the wall clock jumped by {seconds}.0 s, as ");
            assert!(out.stdout.matches(&seen).count() >= 3 - 2 * restarts, "{seen}: {out}");
        }
        let account = lab.lockstep(&["goodput", "out", "--json"]).expect(0).stdout;
        let account: serde_json::Value = serde_json::from_str(account.trim()).unwrap();
        let (wall, sum) = sums(&account["run"]);
        assert!((sum - wall).abs() <= 0.01 * wall, "{account}");
        assert!(wall <= outside && wall > 0.0 && outside < 60.0, "{wall} of {outside}: {account}");
        assert_eq!(account["run"]["sessions"], 1, "{account}");
        let times = |line: &str| events::Event::timed(line).map(|(t, _)| t);
        let log = std::fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
        let times: Vec<f64> = log.lines().map(|line| times(line).unwrap()).collect();
        assert!(times.is_sorted() && times.iter().all(|t| *t <= outside), "{times:?}");
    }
    let refused = Lab::new().train("out", &["--inject", "clock:+3600@99"], &sets);
    refused.expect(2).says(&["clock:+3600@99 can never strike", "to 24"]);
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

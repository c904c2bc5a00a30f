//! Deaths: of the parent, whose ranks go with it, and of a rank, which ends the run.

use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Lab, SLOW, gone_within, hold, runs, send};

/// At once, but for a machine that others keep busy.
const LIMIT: Duration = Duration::from_secs(20);

/// Kills the parent when it has come to `at_step` (0: when the ranks run); the ranks must go.
fn orphans(at_step: u64, sets: &[&str]) {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &[], sets);
    let pids = run.ranks(4);
    if at_step > 0 {
        run.wait_for_step(at_step);
    }
    assert!(pids.iter().all(|pid| runs(*pid)), "{pids:?} should run");
    run.signal(Signal::KILL);
    gone_within(LIMIT, &pids);
    assert_eq!(run.end().code(), None);
}

#[test]
fn ranks_die_with_a_parent_that_is_killed_shm() {
    orphans(2, &["train.steps=100000", "layout.dp=2", "layout.pp=2"]);
    orphans(0, &[&SLOW[..], &["layout.dp=4"]].concat());
}

#[test]
fn ranks_die_with_a_parent_that_is_killed_tcp() {
    orphans(2, &["train.steps=100000", "layout.dp=2", "layout.tp=2", "layout.transport=tcp"]);
    orphans(0, &[&SLOW[..], &["layout.dp=4", "layout.transport=tcp"]].concat());
}

#[test]
fn ranks_die_with_a_parent_that_stands_still() {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &[], &["train.steps=100000", "layout.dp=2"]);
    let pids = run.ranks(2);
    run.wait_for_step(1);
    run.signal(Signal::STOP);
    run.signal(Signal::KILL);
    gone_within(LIMIT, &pids);
    drop(run);
}

/// Kills a rank of a run that repairs nothing; it ends with the rank's name, the signal, and no process left.
fn killed(victim: usize, sets: &[&str]) {
    let lab = Lab::new();
    let own = ["train.steps=100000", "checkpoint.every=2", "guard.restarts_max=0"];
    let mut run = lab.start_train("out", &[], &[&own, sets].concat());
    let pids = run.ranks(4);
    run.wait_for_step(4);
    send(pids[victim], Signal::KILL);
    let out = run.end().expect(5);
    out.says(&["ended without finishing", "--resume", "guard.restarts_max = 0"]);
    gone_within(Duration::ZERO, &pids);
    let summary = std::fs::read_to_string(lab.path("out/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["ended"], "failed");
    let reason = summary["reason"].as_str().unwrap();
    assert!(reason.contains(&format!("rank {victim} ")), "{reason}");
}

#[test]
fn a_killed_rank_ends_a_run_that_repairs_nothing() {
    killed(1, &["layout.dp=2", "layout.pp=2"]);
    killed(0, &["layout.dp=2", "layout.tp=2"]);
    killed(3, &["layout.dp=2", "layout.pp=2", "layout.transport=tcp"]);
}

#[test]
fn a_killed_run_goes_on_from_its_last_checkpoint() {
    let sets = ["train.steps=200", "checkpoint.every=2"];
    let whole = Lab::new().train("out", &[], &sets).expect(0).digest();
    let lab = Lab::new();
    let mut run = lab.start_train("out", &["--inject", &hold(0, 4, None)], &[&sets[..], &["layout.dp=2"]].concat());
    run.wait_for(|line| line.starts_with("checkpoint of step 4 "));
    run.signal(Signal::KILL);
    assert_eq!(run.end().code(), None);
    assert_eq!(lab.train("out", &["--resume"], &[&sets[..], &["layout.pp=2"]].concat()).expect(0).digest(), whole);
}

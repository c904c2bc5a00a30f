//! How soon a fault is noticed, whom it is laid at, and what is not taken for one.

use std::process::{Child, Command};

use serde_json::Value;

use crate::common::Lab;

/// The troubles that the events of a run tell.
fn troubles(lab: &Lab, dir: &str) -> Vec<Value> {
    let log = std::fs::read_to_string(lab.path(dir).join("events.jsonl")).unwrap();
    let events = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["kind"] == "trouble").collect()
}

#[test]
fn a_cut_link_is_named_by_both_ends_long_before_a_hang_without_evidence() {
    let undisturbed = Lab::new().train("out", &[], &["train.steps=40"]).expect(0).digest();
    for sets in [&["layout.dp=2", "layout.pp=2"][..], &["layout.dp=3", "layout.transport=tcp"]] {
        let lab = Lab::new();
        let out = lab.train("out", &["--inject", "partition:0-1@19"], &[&["train.steps=40"], sets].concat()).expect(0);
        assert_eq!(out.digest(), undisturbed, "{out}");
        let found = troubles(&lab, "out");
        assert_eq!((found.len(), found[0]["what"].as_str()), (1, Some("no progress")), "{found:?}");
        let detail = found[0]["detail"].as_str().unwrap();
        assert!(detail.contains("rank 0 does not reach rank 1") || detail.contains("rank 1 does not reach rank 0"));
        // A second or so; the machine may be busy. guard.progress_floor_ms is 20 s.
        let ms = found[0]["since_fault_ms"].as_f64().unwrap();
        assert!((700.0..10_000.0).contains(&ms), "{ms} ms: {found:?}");
    }
}

/// Keeps the cores busy while it lives.
struct Busy(Vec<Child>);

impl Busy {
    fn new(count: usize) -> Self {
        let spin = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        Self((0..count).map(|_| spin()).collect())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(|child| {
            let _ = child.kill();
            let _ = child.wait();
        });
    }
}

#[test]
fn slow_is_not_stuck_and_a_busy_machine_is_no_fault() {
    let lab = Lab::new();
    let _busy = Busy::new(6);
    let slow = ["--inject", "slow:1@5x4:6"];
    // Limits a tenth of the usual ones.
    let sets = ["train.steps=30", "layout.dp=2", "layout.pp=2", "guard.still_floor_ms=300"];
    let out = lab.train("out", &slow, &sets).expect(0);
    assert!(out.stdout.contains("\nrestarts 0\n"), "{out}");
    assert!(troubles(&lab, "out").is_empty(), "{out}");
}

/// A batch without which the run goes on, from its newest checkpoint: the same run as one that was told so from the start.
#[test]
fn batches_left_out_are_an_intervention_and_part_of_the_run() {
    let lab = Lab::new();
    let sets = ["train.steps=14", "layout.dp=2", "checkpoint.every=5", "checkpoint.keep=9"];
    let with = [&sets[..], &["guard.skip_batches=1"]].concat();
    let out = lab.train("out", &["--inject", "poison:1@8"], &with).expect(0);
    let line = std::fs::read_to_string(lab.path("out/interventions.jsonl")).unwrap();
    let told: Value = serde_json::from_str(line.trim()).unwrap();
    assert_eq!((told["step"].as_u64(), told["action"].as_str()), (Some(6), Some("skip")), "{line}");
    let set = told["detail"].as_str().unwrap();
    assert_eq!(set, "train.skip=[\"6+3\"]");
    let again = lab.train("again", &[], &["train.steps=14", set]).expect(0);
    assert_eq!(again.digest(), out.digest(), "{out}");
    let plain = lab.train("plain", &[], &["train.steps=14"]).expect(0);
    assert_ne!(plain.digest(), out.digest());
    // The last checkpoint has left them out, whether the run file says so or not; not others.
    assert_eq!(lab.train("out", &["--resume"], &sets).expect(0).digest(), out.digest());
    let others = [&sets[..], &["train.skip=[\"4+1\"]"]].concat();
    lab.train("out", &["--resume"], &others).expect(2).says(&["train.skip"]);
    // One of before the intervention is of this run.
    for step in [10, 14] {
        std::fs::remove_dir_all(lab.path(&format!("out/checkpoints/step-{step:08}"))).unwrap();
    }
    let resumed = lab.train("out", &["--resume"], &[&sets[..], &[set]].concat()).expect(0);
    assert_eq!(resumed.digest(), out.digest(), "{resumed}");
    let refused = lab.train("new", &["--inject", "poison:1@8"], &sets).expect(2);
    refused.says(&["guard.skip_batches"]);
}

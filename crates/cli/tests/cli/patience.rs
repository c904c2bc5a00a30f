//! Where a run ends early (`train.patience`) depends on its validations alone, never on its log.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Lab, Out, copy, gone_within};

/// Ends after step 26: the best validation is that of step 20.
const SETS: [&str; 9] = [
    "train.steps=40",
    "train.lr=0.1",
    "train.schedule=constant",
    "train.eval_every=1",
    "train.eval_sequences=8",
    "train.patience=6",
    "checkpoint.every=1",
    "checkpoint.keep=99",
    "layout.dp=2",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SETS[..], more].concat()
}

/// The step after which it ended, and the digest.
fn end(lab: &Lab, dir: &str, out: &Out) -> (String, String) {
    let summary = fs::read_to_string(lab.path(dir).join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    (summary["ended"].as_str().unwrap_or_default().to_owned(), out.digest())
}

/// The run `out` to its end, without a disturbance.
fn undisturbed(lab: &Lab, more: &[&str]) -> (String, String) {
    let out = lab.train("out", &[], &with(more)).expect(0);
    let told = end(lab, "out", &out);
    assert_eq!(told.0, "ended after step 26: no better validation", "{out}");
    told
}

/// `dir` becomes the folder of the run `out` as it was when `step` was its last checkpoint.
fn as_it_was(lab: &Lab, dir: &str, step: u64) {
    copy(&lab.path("out"), &lab.path(dir));
    forget_after(&lab.path(dir).join("checkpoints"), step);
}

fn forget_after(checkpoints: &std::path::Path, step: u64) {
    for (saved, path) in checkpoint::list(checkpoints).unwrap() {
        if saved > step {
            fs::remove_dir_all(path).unwrap();
        }
    }
}

#[test]
fn a_resume_ends_where_the_undisturbed_run_did_whatever_became_of_its_log() {
    let lab = Lab::new();
    let told = undisturbed(&lab, &[]);
    // In a row of validations that bring nothing better, after the best one, and when the run has ended.
    for (step, layout) in [(5, "layout.pp=2"), (24, "layout.tp=2"), (26, "layout.dp=4")] {
        for damage in ["deleted", "a bit", "a line less"] {
            let dir = format!("{step} {damage}");
            as_it_was(&lab, &dir, step);
            let log = lab.path(&dir).join("events.jsonl");
            let text = fs::read_to_string(&log).unwrap();
            // That of the step that was best until then.
            let best = if step == 5 { 3 } else { 20 };
            let line = text.lines().find(|l| l.contains("\"validation\"") && l.contains(&format!("\"step\":{best},")));
            let line = line.unwrap();
            match damage {
                "a bit" => {
                    // 3.3101 becomes 7.3101, 2.8907 becomes 6.8907.
                    let (at, mut bytes) =
                        (text.find(line).unwrap() + line.find("\"loss\":").unwrap() + 7, text.clone().into_bytes());
                    bytes[at] ^= 4;
                    fs::write(&log, bytes).unwrap();
                }
                "a line less" => fs::write(&log, text.replace(line, "")).unwrap(),
                _ => fs::remove_file(&log).unwrap(),
            }
            let out = lab.train(&dir, &["--resume"], &with(&["layout.dp=1", layout])).expect(0);
            assert_eq!(end(&lab, &dir, &out), told, "{dir}: {out}");
        }
    }
}

#[test]
fn a_chain_of_stops_whose_log_is_deleted_each_time_ends_at_the_same_step() {
    let lab = Lab::new();
    let told = undisturbed(&lab, &[]);
    let mut args: &[&str] = &[];
    for (stop, layout) in [(2, "layout.dp=2"), (9, "layout.dp=4"), (21, "layout.dp=3")] {
        let mut run = lab.start_train("chain", args, &with(&[layout]));
        run.wait_for_step(stop);
        run.signal(Signal::TERM);
        let out = run.end();
        fs::remove_file(lab.path("chain/events.jsonl")).unwrap();
        args = &["--resume"];
        if out.code() == Some(0) {
            // It was faster than the signal.
            assert_eq!(end(&lab, "chain", &out), told, "{out}");
        } else {
            out.expect(3);
        }
    }
    let out = lab.train("chain", args, &with(&[])).expect(0);
    assert_eq!(end(&lab, "chain", &out), told, "{out}");
}

#[test]
fn a_run_goes_on_from_its_store_when_its_folder_is_lost_and_ends_at_the_same_step() {
    let lab = Lab::new();
    let store = format!("checkpoint.store=file://{}", lab.path("store").display());
    let told = undisturbed(&lab, &[&store]);
    forget_after(&lab.path("store"), 24);
    fs::remove_dir_all(lab.path("out")).unwrap();
    let out = lab.train("out", &["--resume"], &with(&[&store, "layout.dp=4"])).expect(0);
    assert_eq!(end(&lab, "out", &out), told, "{out}");
}

/// The log knows more than the checkpoint: ranks have stepped on after it was written, and all of them died.
#[test]
fn ranks_that_go_back_to_a_checkpoint_know_what_it_knew() {
    let lab = Lab::new();
    let told = undisturbed(&lab, &[]);
    for background in ["checkpoint.background=false", "checkpoint.background=true"] {
        let other = Lab::new();
        let sets = with(&["checkpoint.every=3", background]);
        let out = other.train("out", &["--inject", "kill:0@26,kill:1@26"], &sets).expect(0);
        assert_eq!(end(&other, "out", &out), told, "{out}");
    }
}

/// Nobody has checked the steps of the only checkpoint, and the first step after it shows a broken device.
#[test]
fn a_resumed_run_that_is_set_back_to_its_start_has_seen_no_validation() {
    let lab = Lab::new();
    let told = undisturbed(&lab, &[]);
    let limits =
        ["guard.stopped_timeout_ms=600000", "guard.heartbeat_timeout_ms=600000", "guard.progress_floor_ms=600000"];
    let sets = with(&[&["layout.dp=4", "guard.recompute_every=4", "checkpoint.every=6"][..], &limits].concat());
    let mut run = lab.start_train("back", &["--inject", "flip:2@5:device,stop:0@7"], &sets);
    let pids = run.ranks(4);
    run.wait_for(|line| line.contains("rank 0 suffers stop"));
    run.signal(Signal::KILL);
    gone_within(Duration::from_secs(60), &pids);
    let out = lab.train("back", &["--resume", "--inject", "flip:2@7:device"], &sets).expect(0);
    assert!(out.stdout.contains("from the start of the run"), "{out}");
    assert_eq!(end(&lab, "back", &out), told, "{out}");
}

/// As an older version left it: the validations stand in the log alone.
#[test]
fn a_checkpoint_of_an_older_version_takes_its_validations_from_the_log() {
    let lab = Lab::new();
    let told = undisturbed(&lab, &[]);
    as_it_was(&lab, "old", 24);
    let folder = checkpoint::step_dir(&lab.path("old/checkpoints"), 24);
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    let known = manifest["meta"].as_object_mut().unwrap().remove("validations").unwrap();
    let text = text.replace(&format!(",\"validations\":{known}"), "");
    let sum = manifest["checksum"].as_str().unwrap();
    let blank = text.replacen(sum, &"0".repeat(64), 1);
    let text = text.replacen(sum, &blake3::hash(blank.as_bytes()).to_hex(), 1);
    fs::write(path, text).unwrap();
    let out = lab.train("old", &["--resume"], &with(&[])).expect(0);
    assert!(out.stdout.contains("was written by an older version"), "{out}");
    assert_eq!(end(&lab, "old", &out), told, "{out}");
}

//! Changes of what a run is (`lockstep reload` of the recipe, batches left out): each holds from a step on, for whoever computes that
//! step, and an equal record is an equal digest.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Lab, Out, gone_within};

/// Rank 0 stands still in step 8, with the checkpoint of step 6 on disk: what is asked of the run then has a step that is known.
const SETS: [&str; 6] = [
    "train.steps=24",
    "layout.dp=2",
    "checkpoint.every=6",
    "guard.stopped_timeout_ms=600000",
    "guard.heartbeat_timeout_ms=600000",
    "guard.progress_floor_ms=600000",
];
const RELOAD: [&str; 5] = ["reload", "out", "--set", "train.lr=1e-4", "train.clip=0.5"];
const RECORD: &str = "train.changes=[\"8: train.lr=0.0001\", \"8: train.clip=0.5\"]";

fn record(lab: &Lab) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(lab.path("out/interventions.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The digest of the run that has `record` from its start, and that nothing disturbs.
fn with_record(record: &str) -> String {
    Lab::new().train("out", &[], &["train.steps=24", record]).expect(0).digest()
}

fn without() -> String {
    Lab::new().train("out", &[], &["train.steps=24"]).expect(0).digest()
}

/// The run with a changed recipe from step 8 on, to its end; `faults` strike it later.
fn reloaded(lab: &Lab, faults: &str, more: &[&str]) -> Out {
    let inject = format!("stop:0@8{faults}");
    let mut run = lab.start_train("out", &["--inject", &inject], &[&SETS[..], more].concat());
    run.wait_for(|line| line.contains("rank 0 suffers stop"));
    let answer = lab.lockstep(&RELOAD).expect(0);
    assert!(answer.stdout.contains("from step 8 on: train.lr=0.0001 train.clip=0.5"), "{answer}");
    run.end()
}

#[test]
fn a_recipe_that_is_changed_at_work_is_one_that_was_planned_from_the_start() {
    let lab = Lab::new();
    let out = reloaded(&lab, "", &[]).expect(0);
    assert_eq!(record(&lab)[0]["set"], RECORD);
    assert_eq!(out.digest(), with_record(RECORD), "{out}");
    assert_ne!(out.digest(), without());
    // The run file in the folder says the same.
    let file = lab.path("out/run.toml");
    let again =
        lab.lockstep(&["train", file.to_str().unwrap(), "--run-dir", "again", "--set", "layout.dp=1"]).expect(0);
    assert_eq!(again.digest(), out.digest());
}

/// Steps 6 and 7 of the checkpoint and the step before the change are computed again, as they were.
#[test]
fn all_ranks_die_after_a_change_and_go_back_to_before_it() {
    for background in ["checkpoint.background=false", "checkpoint.background=true"] {
        let lab = Lab::new();
        let out = reloaded(&lab, ",kill:0@11,kill:1@11", &[background]).expect(0);
        assert_eq!(out.digest(), with_record(RECORD), "{out}");
    }
}

/// The parent is killed as soon as the change is answered; the run goes on from the checkpoint of step 6.
fn killed_after_the_answer() -> Lab {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &["--inject", "stop:0@8"], &SETS);
    let pids = run.ranks(2);
    run.wait_for(|line| line.contains("rank 0 suffers stop"));
    lab.lockstep(&RELOAD).expect(0);
    run.signal(Signal::KILL);
    drop(run.end());
    gone_within(Duration::from_secs(60), &pids);
    // It may have come to later ones.
    for step in [12, 18, 24] {
        let _ = fs::remove_dir_all(checkpoint::step_dir(&lab.path("out/checkpoints"), step));
    }
    lab
}

#[test]
fn a_change_that_was_answered_outlives_the_process_that_answered() {
    for file in ["run.toml", "out/run.toml"] {
        let lab = killed_after_the_answer();
        fs::remove_file(lab.path("out/events.jsonl")).unwrap();
        let args =
            ["train", file, "--run-dir", "out", "--resume", "--set", "train.steps=24", "layout.dp=1", "layout.pp=2"];
        let out = lab.lockstep(&args).expect(0);
        assert_eq!(out.digest(), with_record(RECORD), "{out}");
        assert_eq!(record(&lab).len(), 1);
        // What is in the last checkpoint is not asked for again.
        let again = lab.lockstep(&args).expect(0);
        assert_eq!(again.digest(), out.digest());
    }
}

#[test]
fn a_record_that_cannot_be_read_or_is_contradicted_is_refused() {
    let lab = killed_after_the_answer();
    let sets = |more: &'static str| [&SETS[..], &[more]].concat();
    let path = lab.path("out/interventions.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("0.0001", "0.0003")).unwrap();
    let before = lab.tree();
    lab.train("out", &["--resume"], &SETS).expect(2).says(&["line 1", "interventions.jsonl", "checksum"]);
    fs::write(&path, &text).unwrap();
    let other = "train.changes=[\"3: train.lr=0.5\"]";
    lab.train("out", &["--resume"], &sets(other)).expect(2).says(&[
        "has not gone through",
        "3: train.lr=0.5",
        "run file",
    ]);
    fs::write(&path, text.replace("0.0001", "0.0003")).unwrap();
    crate::common::same_tree(&before, &lab.tree());
    // Who takes the line away takes the change back, as long as no state has gone through it.
    fs::write(&path, "").unwrap();
    assert_eq!(lab.train("out", &["--resume"], &SETS).expect(0).digest(), without());
}

#[test]
fn a_change_that_cannot_be_written_down_is_refused_and_the_run_goes_on() {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &["--inject", "stop:0@8"], &SETS);
    run.wait_for(|line| line.contains("rank 0 suffers stop"));
    let path = lab.path("out/interventions.jsonl");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    lab.lockstep(&RELOAD).expect(2).says(&["interventions.jsonl", "it is a folder"]);
    let out = run.end().expect(0);
    assert_eq!(out.digest(), without(), "{out}");
}

#[test]
fn a_folder_is_lost_and_the_store_knows_the_changes_that_its_checkpoints_have_gone_through() {
    let lab = Lab::new();
    let store = format!("checkpoint.store=file://{}", lab.path("store").display());
    let more = [&store[..], "checkpoint.keep=9"];
    let out = reloaded(&lab, "", &more).expect(0);
    let forget = |after: u64| {
        for (step, path) in checkpoint::list(&lab.path("store")).unwrap() {
            if step > after {
                fs::remove_dir_all(path).unwrap();
            }
        }
        fs::remove_dir_all(lab.path("out")).unwrap();
    };
    let resume = || lab.train("out", &["--resume"], &[&SETS[..], &more, &["layout.dp=4"]].concat()).expect(0);
    forget(12);
    let resumed = resume();
    assert_eq!(resumed.digest(), out.digest(), "{resumed}");
    // It stands in the new folder, too.
    assert_eq!(record(&lab)[0]["set"], RECORD);
    // One from before the change knows nothing of it, and nobody else does.
    forget(6);
    let resumed = resume();
    assert_eq!(resumed.digest(), without(), "{resumed}");
}

/// The ranks that wrote it did not hear of the change before they died, as far as the record tells.
#[test]
fn a_checkpoint_that_was_computed_without_a_change_is_passed_over() {
    let lab = killed_after_the_answer();
    let other = Lab::new();
    let sets = [&SETS[..], &["checkpoint.keep=9"]].concat();
    let plain = other.train("out", &[], &sets).expect(0);
    for step in [12, 18] {
        let [from, to] = [&other, &lab].map(|lab| checkpoint::step_dir(&lab.path("out/checkpoints"), step));
        crate::common::copy(&from, &to);
    }
    let out = lab.train("out", &["--resume"], &SETS).expect(0);
    assert!(out.stdout.contains("the checkpoint of step 18 is passed over: it was computed without"), "{out}");
    assert!(out.stdout.contains("going on after step 6 ") && out.stdout.contains("[12, 18] are set aside"), "{out}");
    assert_eq!(out.digest(), with_record(RECORD), "{out}");
    assert_ne!(out.digest(), plain.digest());
}

/// Batches are left out from step 7 on, and the parent is killed.
#[test]
fn batches_that_are_left_out_stay_so_after_a_death_under_the_run_file_of_before() {
    let lab = Lab::new();
    let sets = ["train.steps=24", "layout.dp=2", "checkpoint.every=6"];
    let with = [&sets[..], &["guard.skip_batches=1"]].concat();
    let mut run = lab.start_train("out", &["--inject", "poison:1@8"], &with);
    run.wait_for(|line| line.starts_with("intervention from step 7"));
    run.signal(Signal::KILL);
    drop(run.end());
    let set = record(&lab)[0]["set"].as_str().unwrap().to_owned();
    assert_eq!(set, "train.skip=[\"7+2\"]");
    let out = lab.train("out", &["--resume"], &[&sets[..], &["layout.dp=1", "layout.tp=2"]].concat()).expect(0);
    assert_eq!(out.digest(), with_record(&set), "{out}");
}

/// Older versions changed the run file at a reload, and the step in their record could be wrong.
#[test]
fn a_folder_of_an_older_version_goes_on_by_its_run_file() {
    let lab = Lab::new();
    let sets = [&SETS[..], &["checkpoint.keep=9", "train.lr=1e-4"]].concat();
    let out = lab.train("out", &[], &sets).expect(0);
    for step in [18, 24] {
        fs::remove_dir_all(checkpoint::step_dir(&lab.path("out/checkpoints"), step)).unwrap();
    }
    let old =
        "{\"step\":8,\"action\":\"reload\",\"detail\":\"train.lr=1e-4, from world 2 on\",\"by\":\"lockstep reload\"}\n";
    fs::write(lab.path("out/interventions.jsonl"), old).unwrap();
    let file = lab.path("out/run.toml");
    let resumed = lab.lockstep(&["train", file.to_str().unwrap(), "--run-dir", "out", "--resume"]).expect(0);
    assert_eq!(resumed.digest(), out.digest(), "{resumed}");
}

//! Checkpoints beside the steps, the slower tier, and what is left when everything dies in the middle of a write.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{Lab, hold, send};

/// Steps of milliseconds, and a rank that begins to write so much later that steps pass meanwhile.
const SETS: [&str; 4] = ["train.steps=300", "layout.dp=2", "checkpoint.background=true", "checkpoint.stagger_ms=150"];

fn digest() -> String {
    Lab::new().train("out", &[], &["train.steps=300", "layout.dp=2"]).expect(0).digest()
}

fn attempts(lab: &Lab) -> Vec<PathBuf> {
    let found = fs::read_dir(lab.path("out/checkpoints")).into_iter().flatten().flatten().map(|entry| entry.path());
    found.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("writing-")).collect()
}

/// An attempt of which rank 0 has written its part and rank 1 has not.
fn half_written(lab: &Lab) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let part = |at: PathBuf, rank: &str| {
        let steps = fs::read_dir(at).into_iter().flatten().flatten();
        steps.flat_map(|step| fs::read_dir(step.path()).into_iter().flatten().flatten()).any(|file| {
            let name = file.file_name().into_string().unwrap();
            name.starts_with("part-") && name.contains(rank) && !name.ends_with(".tmp")
        })
    };
    while !attempts(lab).into_iter().any(|at| part(at.clone(), "part-00000") && !part(at, "part-00001")) {
        assert!(Instant::now() < deadline, "no write is seen under way");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn checkpoints_beside_the_steps_are_whole_and_change_nothing() {
    let lab = Lab::new();
    let out = lab.train("out", &[], &[&SETS[..], &["checkpoint.every=100", "checkpoint.keep=9"]].concat()).expect(0);
    assert_eq!(out.digest(), digest());
    assert!(
        out.stdout.contains("checkpoint of step 100 | ") && out.stdout.contains("written beside the steps"),
        "{out}"
    );
    let verified = lab.lockstep(&["ckpt", "verify", "out"]).expect(0);
    assert_eq!(verified.stdout.lines().filter(|line| line.starts_with("good: step ")).count(), 3, "{verified}");
    assert!(attempts(&lab).is_empty());
    // From any of them, under another layout, the same end.
    for step in [200, 300] {
        fs::remove_dir_all(lab.path(&format!("out/checkpoints/step-{step:08}"))).unwrap();
    }
    let sets = ["train.steps=300", "layout.tp=2", "checkpoint.background=true"];
    assert_eq!(lab.train("out", &["--resume"], &sets).expect(0).digest(), digest());
}

#[test]
fn one_that_is_due_too_early_is_skipped_aloud() {
    let lab = Lab::new();
    let out = lab.train("out", &[], &[&SETS[..], &["checkpoint.every=1", "checkpoint.keep=9"]].concat()).expect(0);
    assert_eq!(out.digest(), digest());
    assert!(out.stdout.contains("is skipped: that of step 1 is still being written"), "{out}");
    lab.lockstep(&["ckpt", "verify", "out"]).expect(0);
}

/// Killed for good, parent or rank, while half of a checkpoint is on disk.
fn killed_in_the_middle(victim: Option<usize>) {
    let lab = Lab::new();
    // The second rank writes later than the first, so the test sees checkpoints of which only one part is there.
    let sets = ["train.steps=300", "layout.dp=2", "checkpoint.background=true", "checkpoint.stagger_ms=1000"];
    let inject = hold(0, 41, None);
    let mut run = lab.start_train("out", &["--inject", &inject], &[&sets[..], &["checkpoint.every=5"]].concat());
    let pids = run.ranks(2);
    run.wait_for(|line| line.starts_with("checkpoint of step ") && line.contains("written beside the steps"));
    half_written(&lab);
    match victim {
        None => run.signal(Signal::KILL),
        Some(rank) => send(pids[rank], Signal::KILL),
    }
    run.end();
    // Nothing of it passes for a checkpoint, and the one before is whole.
    lab.lockstep(&["ckpt", "verify", "out"]).expect(0);
    let out = lab.train("out", &["--resume"], &SETS).expect(0);
    assert!(out.stdout.contains("going on after step "), "{out}");
    assert_eq!(out.digest(), digest());
    assert!(attempts(&lab).is_empty(), "the rest of the dead attempt is still there");
    lab.lockstep(&["ckpt", "verify", "out"]).expect(0);
}

#[test]
fn everything_is_killed_in_the_middle_of_a_write() {
    killed_in_the_middle(None);
}

#[test]
fn a_rank_is_killed_in_the_middle_of_a_write() {
    killed_in_the_middle(Some(1));
    killed_in_the_middle(Some(0));
}

#[test]
fn the_interval_follows_from_cost_and_failures() {
    let lab = Lab::new();
    let sets = ["checkpoint.every=auto", "checkpoint.failures_per_host_day=1e6", "checkpoint.stagger_ms=0"];
    let out = lab.train("out", &[], &[&SETS[..], &sets].concat()).expect(0);
    assert_eq!(out.digest(), digest());
    assert!(out.stdout.contains("checkpoint of step 10 | "), "{out}");
    for word in ["checkpoint.every = \"auto\": the next one in ", "holds the run up for", "one in 86.4 ms", "Daly"] {
        assert!(out.stdout.contains(word), "{word:?}: {out}");
    }
}

#[test]
fn the_store_has_copies_and_steps_in_where_the_disk_rots() {
    let lab = Lab::new();
    let store = format!("checkpoint.store=file://{}", lab.path("away/run").display());
    let sets =
        [&["train.steps=60", "layout.dp=2", "checkpoint.every=20", "checkpoint.keep=2"], &[&*store][..]].concat();
    let out = lab.train("out", &[], &sets).expect(0);
    assert!(out.stdout.contains("checkpoint of step 60 | ") && out.stdout.contains("MB copied to "), "{out}");
    let step = |at: &str, step: u64| lab.path(&format!("{at}/step-{step:08}"));
    lab.lockstep(&["ckpt", "verify", step("away/run", 60).to_str().unwrap()]).expect(0);
    assert!(!step("away/run", 20).exists() && step("away/run", 40).exists());
    // Another run may not use it.
    let refused = lab.train("other", &[], &sets).expect(2);
    refused.says(&["checkpoint.store", "holds checkpoints already", "--resume"]);
    assert!(!lab.path("other").exists());
    let rot = |folder: PathBuf| {
        let mut found: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
        found.retain(|path| path.extension().is_some_and(|end| end == "safetensors"));
        found.sort();
        let mut bytes = fs::read(&found[0]).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&found[0], bytes).unwrap();
    };
    // The local one of step 60 rots: the copy of the same step is next.
    rot(step("out/checkpoints", 60));
    let resumed = lab.train("out", &["--resume"], &sets).expect(0);
    assert!(
        resumed.stdout.contains("checkpoint of step 60 is passed over") && resumed.stdout.contains("is corrupt in ")
    );
    assert!(
        resumed.stdout.contains("going on after step 60 of ") && resumed.stdout.contains(" in the store"),
        "{resumed}"
    );
    assert_eq!(resumed.digest(), out.digest());
    // And if that rots too, an older one is.
    rot(step("away/run", 60));
    let resumed = lab.train("out", &["--resume"], &sets).expect(0);
    assert!(resumed.stdout.contains("the copy of step 60 in the store is passed over"), "{resumed}");
    assert!(resumed.stdout.contains("going on after step 40 of "), "{resumed}");
    assert_eq!(resumed.digest(), out.digest());
    assert!(step("out/checkpoints", 60).with_extension("damaged").exists());
    assert!(step("away/run", 60).with_extension("damaged").exists());
    lab.lockstep(&["ckpt", "verify", step("away/run", 60).to_str().unwrap()]).expect(0);
}

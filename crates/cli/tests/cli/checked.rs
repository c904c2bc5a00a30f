//! Everything dies at once: what a resume knows of steps that nobody has checked.

use std::fs;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Lab, Out, gone_within};

/// Nothing takes a rank that stands still for dead.
const SETS: [&str; 7] = [
    "train.steps=24",
    "layout.dp=4",
    "guard.recompute_every=4",
    "checkpoint.keep=9",
    "guard.stopped_timeout_ms=600000",
    "guard.heartbeat_timeout_ms=600000",
    "guard.progress_floor_ms=600000",
];

fn undisturbed() -> String {
    Lab::new().train("out", &[], &["train.steps=24"]).expect(0).digest()
}

/// Trains until rank 0 stands still in step `last` + 1, then kills everything.
fn died(lab: &Lab, last: u64, inject: &str, every: &str) {
    let inject = format!("{inject}stop:0@{}", last + 1);
    let mut run = lab.start_train("out", &["--inject", &inject], &[&SETS[..], &[every]].concat());
    let pids = run.ranks(4);
    run.wait_for(|line| line.contains("rank 0 suffers stop"));
    run.signal(Signal::KILL);
    gone_within(Duration::from_secs(60), &pids);
}

fn resumed(lab: &Lab, args: &[&str], every: &str) -> Out {
    lab.train("out", args, &[&SETS[..], &[every]].concat()).expect(0)
}

/// Rank 2's device errs from step 5 on, which would show in step 8.
#[test]
fn a_device_that_is_still_broken_shows_in_the_first_step_and_what_it_made_is_computed_again() {
    let (lab, every) = (Lab::new(), "checkpoint.every=2");
    died(&lab, 6, "flip:2@5:device,", every);
    let out = resumed(&lab, &["--resume", "--inject", "flip:2@7:device"], every);
    assert!(
        out.stdout.contains("steps 5 to 6 were not checked before the run ended: step 7, the first one, is checked")
    );
    assert!(out.stdout.contains("--resume=checked goes on after step 4 instead"), "{out}");
    assert!(
        out.stdout.contains("broken device of rank 2") && out.stdout.contains("from the checkpoint of step 4"),
        "{out}"
    );
    assert_eq!(out.digest(), undisturbed(), "{out}");
}

/// It is another machine that goes on: nothing shows that it was broken.
#[test]
fn who_does_not_trust_unchecked_steps_goes_on_from_before_them() {
    let (lab, every) = (Lab::new(), "checkpoint.every=2");
    died(&lab, 6, "flip:2@5:device,", every);
    // What a checkpoint says of itself is enough.
    fs::remove_file(lab.path("out/checkpoints/held.json")).unwrap();
    let out = resumed(&lab, &["--resume=checked"], every);
    assert!(
        out.stdout.contains("the checkpoint of step 6 is passed over (--resume=checked): checks agreed up to step 4")
    );
    assert!(out.stdout.contains("going on after step 4 ") && out.stdout.contains("steps [6] are set aside"), "{out}");
    assert_eq!(out.digest(), undisturbed(), "{out}");
    // Its last step was checked.
    let again = resumed(&lab, &["--resume=checked"], every);
    assert!(again.stdout.contains("going on after step 24 "), "{again}");
    lab.train("out", &["--resume=newer"], &SETS).expect(2).says(&["newer", "checked"]);
}

/// Step 8 was checked after the checkpoint of step 6: that stands in the run's folder, and is not taken from torn words.
#[test]
fn a_check_that_came_after_a_checkpoint_counts_for_it() {
    let (lab, every) = (Lab::new(), "checkpoint.every=3");
    died(&lab, 8, "", every);
    let held = lab.path("out/checkpoints/held.json");
    let written = fs::read_to_string(&held).unwrap();
    let other = Lab::new();
    crate::common::copy(&lab.path("out"), &other.path("out"));
    let out = resumed(&lab, &["--resume"], every);
    assert!(out.stdout.contains("going on after step 6 ") && !out.stdout.contains("not checked before"), "{out}");
    fs::write(other.path("out/checkpoints/held.json"), &written[..written.len() / 2]).unwrap();
    let torn = resumed(&other, &["--resume"], every);
    assert!(torn.stdout.contains("steps 5 to 6 were not checked before the run ended"), "{torn}");
    for word in ["held.json is damaged", "none counts as checked", "held.json.damaged"] {
        assert!(torn.stdout.contains(word), "{word:?}: {torn}");
    }
    // What it said must stay is not known: all that was there then does, and it is told once.
    assert!(other.path("out/checkpoints/step-00000003/manifest.json").exists(), "{torn}");
    assert!(other.path("out/checkpoints/held.json.damaged").exists());
    let again = resumed(&other, &["--resume"], every);
    assert!(!again.stdout.contains("is damaged"), "{again}");
    assert_eq!((out.digest(), torn.digest()), (undisturbed(), undisturbed()));
}

/// Two ranks, every fifth step checked, a checkpoint after each step; dead once step `last` is on disk.
const PAIR: [&str; 9] = [
    "train.steps=24",
    "layout.dp=2",
    "guard.recompute_every=5",
    "checkpoint.every=1",
    "checkpoint.background=false",
    "checkpoint.keep=20",
    "guard.stopped_timeout_ms=600000",
    "guard.heartbeat_timeout_ms=600000",
    "guard.progress_floor_ms=600000",
];

fn pair_died(lab: &Lab, args: &[&str], last: u64, inject: &str) -> String {
    let inject = format!("{inject}stop:0@{}", last + 1);
    let mut run = lab.start_train("out", &[args, &["--inject", &inject]].concat(), &PAIR);
    let pids = run.ranks(2);
    run.wait_for(|line| line.contains("rank 0 suffers stop"));
    run.signal(Signal::KILL);
    let out = run.end();
    // Among them those of ranks that came later.
    gone_within(Duration::from_secs(60), &pids);
    out.stdout
}

/// Rank 1 erred in steps that nobody had checked when it died; that its successor agrees in step 15 says nothing of them.
#[test]
fn later_checks_do_not_vouch_for_steps_whose_maker_is_gone() {
    let lab = Lab::new();
    let said = pair_died(&lab, &[], 17, "flip:1@12:device,kill:1@14,");
    assert!(said.contains("steps 11 to 13 of rank 1 were not checked before it ended"), "{said}");
    let out = lab.train("out", &["--resume=checked"], &PAIR).expect(0);
    assert!(out.stdout.contains("nobody could check step 11 any more"), "{out}");
    assert!(out.stdout.contains("going on after step 10 "), "{out}");
    assert_eq!(out.digest(), undisturbed(), "{out}");
}

/// Who went on from such steps and dies again has not made them good.
#[test]
fn a_resume_from_unchecked_steps_does_not_vouch_for_them() {
    let lab = Lab::new();
    pair_died(&lab, &[], 12, "flip:1@12:device,");
    let said = pair_died(&lab, &["--resume"], 14, "");
    assert!(said.contains("steps 11 to 12 were not checked before the run ended"), "{said}");
    let out = lab.train("out", &["--resume=checked"], &PAIR).expect(0);
    assert!(out.stdout.contains("going on after step 10 "), "{out}");
    assert_eq!(out.digest(), undisturbed(), "{out}");
}

/// Rank 1 erred in a step that nobody had checked when it ended. Its copies of the norms show it at last, and by then it is in checkpoints, too:
/// the run goes back to before what was never checked.
#[test]
fn copies_that_differ_take_the_run_back_to_before_what_was_never_checked() {
    let lab = Lab::new();
    let sets = [
        "train.steps=24",
        "layout.dp=2",
        "layout.tp=2",
        "layout.zero=1",
        "checkpoint.every=2",
        "guard.recompute_every=5",
    ];
    let out = lab.train("out", &["--inject", "flip:1@8:device,kill:1@9"], &sets).expect(0);
    assert!(out.stdout.contains("as some were not checked"), "{out}");
    assert_eq!(out.digest(), undisturbed(), "{out}");
}

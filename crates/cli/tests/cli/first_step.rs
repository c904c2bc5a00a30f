//! A bit that changes in memory in the first step of a world: at a run's start, after a resume, after a recovery.

use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Lab, Out, gone_within};

/// With and without another holder of what each rank updates.
const MIRROR: [&str; 2] = ["layout.mirror=true", "layout.mirror=false"];

/// Under which gradients can be sharded, too.
const RUN: [&str; 2] = ["train.steps=24", "grid.accumulate=reduced"];

fn undisturbed() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| Lab::new().train("out", &[], &RUN).expect(0).digest())
}

/// The run in `lab` goes to its end through `recoveries`, by a flip that was found, to the digest of an undisturbed one.
fn found(lab: &Lab, args: &[&str], recoveries: usize, sets: &[&str]) -> Out {
    let out = lab.train("out", args, &[&RUN[..], sets].concat()).expect(0);
    assert_eq!(out.digest(), undisturbed(), "{sets:?} {out}");
    assert_eq!(out.stdout.matches("\nrecovered in ").count(), recoveries, "{sets:?} {out}");
    assert!(out.stdout.lines().any(|l| l.starts_with("trouble") && l.contains(": corrupt of rank")), "{sets:?} {out}");
    out
}

#[test]
fn a_bit_that_flips_before_the_first_vote_of_a_run_is_found() {
    for (layout, zero, what) in [
        (&["layout.dp=2", "layout.tp=2"][..], "layout.zero=1", "weight"),
        (&["layout.dp=2", "layout.tp=2"], "layout.zero=2", "weight"),
        // So large that the loss is none.
        (&["layout.dp=2"], "layout.zero=1", "weight"),
        (&["layout.dp=4"], "layout.zero=2", "moment"),
        (&["layout.dp=2"], "layout.zero=0", "weight"),
        (&["layout.dp=2"], "layout.zero=3", "weight"),
    ] {
        let inject = format!("flip:1@1:{what}");
        found(&Lab::new(), &["--inject", &inject], 1, &[layout, &[zero]].concat());
    }
}

#[test]
fn a_bit_that_flips_before_the_first_vote_after_a_resume_is_found() {
    for (zero, flip) in [(1, "flip:0@13:weight"), (2, "flip:1@13:moment")] {
        let (lab, zero) = (Lab::new(), format!("layout.zero={zero}"));
        let sets = ["layout.dp=2", "layout.tp=2", "checkpoint.every=12", &zero];
        // Nothing takes a rank that stands still for dead.
        let still = ["guard.stopped_timeout_ms=600000", "guard.heartbeat_timeout_ms=600000"];
        let more = ["guard.progress_floor_ms=600000"];
        let mut run = lab.start_train("out", &["--inject", "stop:0@14"], &[&RUN, &sets[..], &still, &more].concat());
        let pids = run.ranks(4);
        run.wait_for(|line| line.contains("rank 0 suffers stop"));
        run.signal(Signal::KILL);
        gone_within(Duration::from_secs(60), &pids);
        let dead = Lab::new();
        for mirror in MIRROR {
            let _ = std::fs::remove_dir_all(dead.path("out"));
            crate::common::copy(&lab.path("out"), &dead.path("out"));
            let out = found(&dead, &["--resume", "--inject", flip], 1, &[&sets[..], &[mirror]].concat());
            assert!(out.stdout.contains("going on after step 12 "), "{out}");
        }
    }
}

#[test]
fn a_bit_that_flips_before_the_first_vote_after_a_recovery_is_found() {
    for (zero, what, mirror) in [(1, "moment", MIRROR[0]), (2, "weight", MIRROR[1])] {
        let zero = format!("layout.zero={zero}");
        // These two miss each other's ballots of step 3 only: it is decided, and the world after it begins with step 4.
        let inject = format!("partition:7-2@3,flip:3@4:{what}");
        let out = found(&Lab::new(), &["--inject", &inject], 2, &["layout.dp=4", "layout.tp=2", &zero, mirror]);
        assert!(out.stdout.contains("decided: form world 2, because all 8 ranks; state of step 3 from"), "{out}");
        assert!(out.stdout.contains(": corrupt of rank 3 "), "{out}");
    }
}

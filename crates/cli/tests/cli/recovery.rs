//! Ranks that die or stand still while a run goes on: the same digest, and a recovery that is told.

use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Lab, Out, gone_within, hold, send};

const STEPS: &str = "train.steps=120";

fn undisturbed() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| Lab::new().train("out", &[], &[STEPS]).expect(0).digest())
}

/// Strikes rank `victim` after a step; the run ends well with the digest of one that nothing happened to.
fn struck(victim: usize, signal: Signal, sets: &[&str]) -> Out {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &["--inject", &hold(victim, 5, None)], &[&[STEPS], sets].concat());
    let pids = run.ranks(4);
    run.wait_for_step(5);
    send(pids[victim], signal);
    let out = run.end().expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    assert!(out.stdout.contains("\nrestarts 1\n"), "{out}");
    let recovered =
        out.stdout.lines().find(|line| line.starts_with("recovered in ")).unwrap_or_else(|| panic!("{out}"));
    assert!(recovered.contains(&format!("rank {victim}")), "{recovered}");
    assert!(recovered.contains(" 0 steps redone"), "{recovered}");
    gone_within(Duration::from_secs(20), &pids);
    let summary = std::fs::read_to_string(lab.path("out/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["recoveries"].as_array().map(Vec::len), Some(1), "{summary}");
    out
}

#[test]
fn a_killed_rank_is_started_again_shm() {
    struck(1, Signal::KILL, &["layout.dp=2", "layout.pp=2"]);
    struck(0, Signal::KILL, &["layout.dp=2", "layout.tp=2"]);
}

#[test]
fn a_killed_rank_is_started_again_tcp() {
    struck(3, Signal::KILL, &["layout.dp=2", "layout.pp=2", "layout.transport=tcp"]);
}

#[test]
fn a_rank_that_stands_still_is_named_and_replaced() {
    let out = struck(2, Signal::STOP, &["layout.dp=2", "layout.pp=2"]);
    assert!(out.stdout.lines().any(|l| l.starts_with("trouble 1: stopped of rank 2")), "{out}");
}

#[test]
fn a_spare_takes_the_place() {
    struck(1, Signal::KILL, &["layout.dp=4", "guard.spares=1"]);
}

#[test]
fn the_others_go_on_while_a_place_is_empty() {
    let out = struck(3, Signal::KILL, &["layout.dp=4", "guard.respawn_after_ms=500"]);
    let worlds: Vec<_> = out.stdout.lines().filter(|l| l.starts_with("world ")).collect();
    assert!(worlds[0].starts_with("world 2 of 3 ranks"), "{worlds:?}");
}

#[test]
fn a_link_to_a_rank_that_is_gone_is_cut_for_nobody_and_that_is_told() {
    let undisturbed = Lab::new().train("out", &[], &["train.steps=16"]).expect(0).digest();
    // Two ranks go on from step 4.
    let sets = ["train.steps=16", "layout.dp=3", "guard.respawn_after_ms=600000"];
    let inject = "kill:2@4,partition:0-2@8,partition:2-1@9,slow:2@10x2";
    let out = Lab::new().train("out", &["--inject", inject], &sets).expect(0);
    assert_eq!(out.digest(), undisturbed, "{out}");
    let told = |text: &str| out.stdout.lines().any(|line| line.contains(text) && line.contains("strikes nobody"));
    assert!(told("partition from rank 2 of rank 0 in step 8"), "{out}");
    assert!(told("partition from rank 1 of rank 2 in step 9") && told("slow x2 of rank 2 in step 10"), "{out}");
    assert!(out.stdout.contains("\nrestarts 1\n"), "{out}");
}

#[test]
fn two_runs_in_one_folder_are_refused() {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &[], &["train.steps=100000", "layout.dp=2", "checkpoint.every=2"]);
    run.wait_for_step(4);
    let out = lab.train("out", &["--resume"], &["train.steps=100000", "layout.dp=2"]).expect(2);
    out.says(&["another run is at work in", "--run-dir"]);
    run.wait_for_step(6);
}

#[test]
fn the_controller_is_built_again_while_ranks_step_on() {
    let lab = Lab::new();
    let out = lab.train("out", &["--inject", "controller@9,controller@60"], &[STEPS, "layout.dp=2", "layout.pp=2"]);
    let out = out.expect(0);
    assert_eq!(out.digest(), undisturbed(), "{out}");
    assert_eq!(out.stdout.matches("another one goes on from journal.jsonl").count(), 2, "{out}");
    assert!(out.stdout.contains("\nrestarts 0\n"), "{out}");
}

#[test]
fn a_fault_that_can_never_strike_is_refused_before_anything_is_written() {
    let lab = Lab::new();
    let before = lab.tree();
    for (inject, sets, word) in [
        ("kill:1@7", &[][..], "layout.dp"),
        ("kill:9@3", &["layout.dp=2"], "no rank 9"),
        ("nan:0@7", &["layout.dp=2"], "from step 1 to 4"),
        ("boom:0@7", &["layout.dp=2"], "expected kill:R@S"),
        ("kill:1@2", &["layout.dp=2", "layout.transport=threads"], "layout.transport"),
    ] {
        lab.train("out", &["--inject", inject], sets).expect(2).says(&[word]);
    }
    assert!(lab.tree() == before);
}

#[test]
fn a_run_changes_its_layout_and_keeps_its_numbers() {
    let lab = Lab::new();
    let until = hold(0, 5, None);
    let mut run = lab.start_train("out", &["--inject", &until], &["train.steps=100", "layout.dp=2", "layout.pp=2"]);
    run.wait_for_step(5);
    lab.lockstep(&["reload", "out", "--set", "grid.dp=2"]).expect(2).says(&["goes on unchanged", "grid.dp"]);
    lab.lockstep(&["reload", "out", "--set", "layout.dp=8"]).expect(2).says(&["goes on unchanged", "layout.dp = 8"]);
    lab.lockstep(&["reload", "out", "--set", "layout.dp=3", "layout.pp=1"]).expect(0);
    run.wait_for(|line| line.starts_with("world 2 of 3 ranks"));
    let out = run.end().expect(0);
    assert_eq!(out.digest(), Lab::new().train("out", &[], &["train.steps=100"]).expect(0).digest());
    assert_eq!(std::fs::read_to_string(lab.path("out/interventions.jsonl")).unwrap(), "");
    lab.lockstep(&["reload", "out", "--set", "layout.dp=2"]).expect(2).says(&["no run is at work"]);
}

#[test]
fn a_run_is_handed_over_to_another_binary() {
    let lab = Lab::new();
    let (new, old) = (lab.path("lockstep-new"), env!("CARGO_BIN_EXE_lockstep"));
    std::fs::copy(old, &new).unwrap();
    let sets = ["train.steps=3000", "layout.dp=2", "layout.pp=2", "layout.zero=1", "guard.spares=1"];
    // Until the first of them is replaced.
    let mut run = lab.start_train("out", &["--inject", &hold(0, 5, None)], &sets);
    run.wait_for_step(5);
    let refused = |script: &str, word: &str| {
        let path = lab.path("other");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        lab.lockstep(&["reload", "out", "--binary", path.to_str().unwrap()])
            .expect(2)
            .says(&["goes on unchanged", word]);
    };
    refused("#!/bin/sh\necho hello\n", "does not say what it is");
    refused("#!/bin/sh\necho '{\"version\":\"9\",\"protocol\":1,\"numerics_version\":999}'\n", "numerics version 999");
    refused("#!/bin/sh\necho '{\"version\":\"9\",\"protocol\":77,\"numerics_version\":1}'\n", "protocol 77");
    lab.lockstep(&["reload", "out", "--binary", "nowhere"]).expect(2).says(&["nowhere"]);
    lab.lockstep(&["reload", "out", "--binary", new.to_str().unwrap()]).expect(0);
    run.wait_for(|line| line.contains("all rank processes are of"));
    let log = std::fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    let events: Vec<_> = log.lines().filter_map(|line| events::Event::from_line(line).ok()).collect();
    let mut pids = [0; 4];
    for event in &events {
        if let events::Event::RankStarted { rank, pid } = event {
            pids[*rank] = *pid;
        }
    }
    for pid in pids {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        assert_eq!(exe, new.canonicalize().unwrap(), "process {pid}");
    }
    let out = run.end().expect(0);
    assert_eq!(out.digest(), Lab::new().train("out", &[], &["train.steps=3000"]).expect(0).digest());
    // No step was done twice, no failure is counted, and no step was lost: one that was committed while its world ended is told
    // before the next one.
    let log = std::fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    let (mut last, mut worlds) = (0, 0);
    for event in log.lines().filter_map(|line| events::Event::from_line(line).ok()) {
        match event {
            events::Event::Step(step) => {
                assert_eq!(step.step, last + 1);
                assert!(step.seconds > 0.0 && step.loss > 0.0, "{step:?}");
                last = step.step;
            }
            events::Event::World(world) => {
                worlds += 1;
                assert_eq!(world.origin, format!("peers, step {last}"));
            }
            _ => {}
        }
    }
    assert!(last == 3000 && worlds >= 4, "{last} {worlds}");
    assert!(!out.stdout.contains("trouble"), "{out}");
}

#[test]
fn a_changed_learning_rate_is_an_intervention() {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &[], &["train.steps=400", "layout.dp=2"]);
    run.wait_for_step(5);
    lab.lockstep(&["reload", "out", "--set", "train.lr=1e-4"]).expect(0);
    run.wait_for(|line| line.starts_with("intervention from step "));
    run.end().expect(0);
    let written = std::fs::read_to_string(lab.path("out/interventions.jsonl")).unwrap();
    assert!(written.contains("train.lr=0.0001"), "{written}");
}

/// What 24 steps come to that nothing disturbs.
fn digest_of_24() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| Lab::new().train("out", &[], &["train.steps=24"]).expect(0).digest())
}

/// Asks for `faults` in a run of 24 steps; all are survived, told and accounted for.
fn injected(faults: &str, recoveries: usize, sets: &[&str]) -> Out {
    injected_in(&Lab::new(), faults, recoveries, sets)
}

fn injected_in(lab: &Lab, faults: &str, recoveries: usize, sets: &[&str]) -> Out {
    let out = lab.train("out", &["--inject", faults], &[&["train.steps=24"], sets].concat()).expect(0);
    assert_eq!(out.digest(), digest_of_24(), "{out}");
    assert_eq!(out.stdout.matches("\nrecovered in ").count(), recoveries, "{out}");
    let struck = faults.split(',').count();
    assert_eq!(out.stdout.matches("\nfault: rank ").count(), struck, "{out}");
    out
}

/// Its writer waits while the run diverges, and goes on when the world has ended: what it writes then is of no use any more.
#[test]
fn a_checkpoint_that_is_being_written_when_the_run_goes_back_before_it_becomes_none() {
    let lab = Lab::new();
    let writer = ["checkpoint.background=true", "checkpoint.stagger_ms=4000"];
    let sets = ["train.steps=44", "checkpoint.every=40", "layout.dp=2"];
    let all = [&sets[..], &writer, &["guard.skip_batches=1"]].concat();
    let out = lab.train("out", &["--inject", "poison:1@43"], &all).expect(0);
    assert!(!out.stdout.contains("already") && !out.stdout.contains("NOT written"), "{out}");
    // On a very busy machine the writer may be done before the run diverges: then that is what the run goes back to.
    let before = out.stdout.split("\nintervention from ").next().unwrap();
    let (from, skip) = match before.contains("checkpoint of step 40 | ") {
        false => ("step 1: ", "train.skip=[\"1+43\"]"),
        true => ("step 41: ", "train.skip=[\"41+3\"]"),
    };
    assert!(out.stdout.contains(&format!("\nintervention from {from}")), "{out}");
    // What there is of step 40 is of the steps that the run has gone.
    let other = Lab::new();
    other.train("out", &[], &[&sets[..], &[skip]].concat()).expect(0);
    let digest = |lab: &Lab| {
        let manifest = std::fs::read_to_string(lab.path("out/checkpoints/step-00000040/manifest.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&manifest).unwrap()["digest"].clone()
    };
    assert_eq!(digest(&lab), digest(&other), "{out}");
}

const FOUR: [&str; 2] = ["layout.dp=2", "layout.pp=2"];

#[test]
fn every_kind_of_fault_is_survived() {
    injected("kill:1@7", 1, &FOUR);
    injected("stop:2@12", 1, &FOUR);
    injected("nan:0@15", 0, &FOUR);
    injected("flip:3@17", 1, &FOUR);
    injected("flip:3@17:weight", 1, &FOUR);
    injected("flip:0@9:message", 1, &FOUR);
    injected("slow:1@4x3:2", 0, &FOUR);
}

#[test]
fn a_flipped_bit_of_a_gradient_is_computed_away_where_gradients_are_computed_twice() {
    for layout in [&FOUR[..], &["layout.dp=2", "layout.zero=1"]] {
        let out = injected("flip:1@8:gradient", 0, &[layout, &["guard.recompute_every=4"]].concat());
        assert!(out.stdout.contains("\nstep 8 replayed: the gradients of ranks [1] came out differently"), "{out}");
    }
    let refused =
        Lab::new().train("out", &["--inject", "flip:1@3:gradient"], &["layout.dp=2", "guard.recompute_every=4"]);
    refused.expect(2).says(&["nobody would notice flip gradient of rank 1 in step 3", "guard.recompute_every = 4"]);
}

/// A device that makes the same error each time: its own rank computes the same again, only another rank sees it.
#[test]
fn a_device_that_always_errs_is_found_by_another_rank_and_replaced() {
    let every = ["guard.recompute_every=4"];
    let lab = Lab::new();
    let out = injected_in(&lab, "flip:2@8:device", 1, &[&["layout.dp=4"][..], &every].concat());
    assert!(out.stdout.contains("broken device of rank 2"), "{out}");
    let log = std::fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    let checked = |line| match events::Event::from_line(line) {
        Ok(events::Event::RankFinished(report)) => Some(report.leaves_checked),
        _ => None,
    };
    let checked: Vec<_> = log.lines().filter_map(checked).collect();
    assert!(checked.len() == 4 && checked.iter().all(|n| *n > 0), "{checked:?}");
    // Of two nobody can say which of them errs: they are replaced in turn, until both agree.
    for victim in 0..2 {
        let sets = [&["layout.dp=2", "layout.zero=1"][..], &every].concat();
        injected(&format!("flip:{victim}@8:device"), 1 + victim, &sets);
    }
    injected("flip:3@8:device", 1, &[&["layout.dp=3", "layout.pp=2"][..], &every].concat());
    let refused = |sets: &[&str]| {
        Lab::new().train("out", &["--inject", "flip:1@8:device"], &[&["train.steps=24"], sets].concat()).expect(2)
    };
    refused(&["layout.dp=2"]).says(&["nobody would notice flip device of rank 1", "guard.recompute_every = 0"]);
    let both = ["--inject", "flip:0@5:device,flip:1@5:device"];
    let sets = ["layout.dp=2", "guard.recompute_every=4", "train.steps=24"];
    Lab::new()
        .train("out", &both, &sets)
        .expect(2)
        .says(&["flip device of rank 0 in step 5 and flip device of rank 1"]);
    // The last step is checked in any case.
    injected("flip:1@22:device", 1, &["layout.dp=4", "guard.recompute_every=20"]);
    refused(&["layout.pp=2", "guard.recompute_every=1"]).says(&["nobody would notice", "raise layout.dp"]);
}

/// A device that errs from a step on that nobody checks: what it may have spoilt is computed again, from before the last check.
#[test]
fn steps_that_a_broken_device_may_have_spoilt_are_computed_again() {
    let every = ["guard.recompute_every=4", "checkpoint.every=2"];
    let lab = Lab::new();
    let store = lab.path("far").display().to_string();
    let store = format!("checkpoint.store=\"file://{store}\"");
    let sets = [&["layout.dp=4", "checkpoint.keep=1", &store][..], &every].concat();
    let out = injected_in(&lab, "flip:2@6:device", 1, &sets);
    assert!(
        out.stdout.contains("steps 5 to 7 were not checked (guard.recompute_every = 4) and are computed again"),
        "{out}"
    );
    assert!(out.stdout.contains("3 steps redone") && out.stdout.contains("disk"), "{out}");
    assert!(out.stdout.contains("checkpoints of steps [6] are set aside"), "{out}");
    assert!(lab.path("out/checkpoints/step-00000006.damaged").is_dir(), "{out}");
    // Whenever the copies were made: none is of a spoilt step.
    for step in std::fs::read_dir(lab.path("far")).unwrap().map(|entry| entry.unwrap().path()) {
        let name = step.file_name().unwrap().to_string_lossy().into_owned();
        let beside = lab.path("out/checkpoints").join(&name);
        assert!(!name.contains("damaged") || name.starts_with("step-00000006.damaged"), "{name}");
        if beside.is_dir() && !name.contains("damaged") {
            lab.lockstep(&["ckpt", "diff", step.to_str().unwrap(), beside.to_str().unwrap()]).expect(0);
        }
    }
    let account = lab.lockstep(&["goodput", "out", "--json"]).expect(0).stdout;
    let account: serde_json::Value = serde_json::from_str(account.lines().next().unwrap()).unwrap();
    assert_eq!(account["run"]["steps_redone"], 3, "{account}");
    // Nothing from before: all of it again, and that is said.
    let out = injected("flip:1@3:device", 1, &["layout.dp=4", "guard.recompute_every=4", "checkpoint.every=0"]);
    assert!(out.stdout.contains("there is no checkpoint from before them"), "{out}");
    // Of two nobody can tell which it is: back twice, if it is the second. A checkpoint beside the steps is void.
    for victim in 0..2 {
        let sets = [&["layout.dp=2", "layout.zero=1", "checkpoint.background=true"][..], &every].concat();
        injected(&format!("flip:{victim}@5:device"), 1 + victim, &sets);
    }
}

/// A check was clean, the device breaks after it, another trouble sets the run back to before both.
#[test]
fn a_check_from_before_the_run_went_back_vouches_for_nothing() {
    // Nobody mirrors a shard, and there is no checkpoint: one death takes the run back to its start.
    let sets = ["layout.dp=4", "layout.zero=1", "layout.mirror=false", "checkpoint.every=0", "guard.recompute_every=6"];
    let out = injected("flip:1@7:device,kill:0@9", 2, &sets);
    assert!(out.stdout.contains(": from the start of the run"), "{out}");
    assert!(out.stdout.contains("steps 1 to 5 were not checked (guard.recompute_every = 6)"), "{out}");
}

/// The ranks check nothing themselves; a spare does, in its own time, and the run goes back to before what it found.
#[test]
fn a_spare_finds_what_the_ranks_do_not_check() {
    let steps = "train.steps=300";
    let want = Lab::new().train("out", &[], &[steps]).expect(0).digest();
    let sets = [steps, "guard.spares=1", "checkpoint.every=5", "checkpoint.background=true"];
    let lab = Lab::new();
    let trained = |lab: &Lab, inject: &str, layout: &[&str]| {
        let out = lab.train("out", &["--inject", inject], &[layout, &sets].concat()).expect(0);
        assert_eq!(out.digest(), want, "{out}");
        out
    };
    // Steps after a checkpoint wait, so that a spare has the time to compute one of them again.
    let out = trained(&lab, &hold(0, 11, Some(40)), &["layout.dp=2"]);
    assert!(out.stdout.contains("restarts 0") && out.stdout.contains("leaves computed again in"), "{out}");
    let summary = std::fs::read_to_string(lab.path("out/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    let steps = out.stdout.matches("checked by a spare").count() as u64;
    assert_eq!(summary["checked_by_spares"]["steps"], steps, "{summary}");
    assert_eq!(summary["checked_by_spares"]["leaves"], 4 * steps, "{summary}");
    // Named by the spare, then found by the other rank in the step that is computed again.
    let inject = format!("flip:1@8:device,{}", hold(0, 11, None));
    let out = trained(&Lab::new(), &inject, &["layout.dp=2"]);
    assert!(out.stdout.contains("disputed of rank 1") && out.stdout.contains("broken device of rank 1"), "{out}");
    assert!(out.stdout.contains("restarts 2"), "{out}");
    // No other rank has its state: the spare finds it again.
    let inject = format!("{inject},{}", hold(0, 40, Some(60)));
    let out = trained(&Lab::new(), &inject, &["layout.pp=2"]);
    assert!(out.stdout.contains("disputed of rank 1") && out.stdout.contains("broken device of rank 1"), "{out}");
}

/// Each rank's own shard has a bad piece, and the other one mirrors it: nothing comes from disk.
#[test]
fn corrupt_pieces_on_two_ranks_come_from_each_other() {
    for what in ["moment", "weight"] {
        let faults = format!("flip:0@8:{what},flip:1@8:{what}");
        let out = injected(&faults, 1, &["layout.dp=2", "layout.zero=1"]);
        assert!(out.stdout.contains("all 2 ranks; state of step 7 from 2 of the 2 ranks before"), "{out}");
    }
}

#[test]
fn shrinking_keeps_who_holds_what_the_others_lack() {
    for victim in 0..4 {
        let out = injected(&format!("kill:{victim}@5"), 1, &[&FOUR[..], &["guard.respawn_after_ms=60000"]].concat());
        assert!(out.stdout.contains("2 of 4 ranks, over the same grid; state of step 4 from"), "{out}");
    }
}

#[test]
fn many_faults_in_one_run() {
    injected("nan:1@8,kill:2@8", 1, &FOUR);
    injected("kill:1@7,stop:2@12,nan:0@15,flip:3@17", 3, &FOUR);
    injected("kill:1@7,kill:0@12,kill:1@18", 3, &["layout.dp=2", "layout.transport=tcp"]);
}

/// The second rank dies while the world that answers the first death loads: what the first world held is not given up.
#[test]
fn a_rank_killed_in_the_recovery_of_another_one_costs_nothing() {
    // Of no piece both holders die.
    let zero = &["layout.dp=4", "layout.zero=1"][..];
    for (second, sets) in [(2, &["layout.dp=2", "layout.pp=2"][..]), (3, zero)] {
        let lab = Lab::new();
        let faults = format!("kill:1@7,kill:{second}@7:load");
        let inject = ["--inject", &faults];
        let out = lab.train("out", &inject, &[&[STEPS], sets].concat()).expect(0);
        assert_eq!(out.digest(), undisturbed(), "{out}");
        assert!(out.stdout.contains("\nrestarts 2\n"), "{out}");
        let worlds: Vec<_> = out.stdout.lines().filter(|line| line.starts_with("world ")).collect();
        assert!(worlds.len() == 2 && worlds.iter().all(|world| world.contains("state from peers")), "{worlds:?}");
        let redone = out.stdout.lines().filter(|line| line.starts_with("recovered in "));
        assert!(redone.clone().count() > 0 && redone.clone().all(|line| line.contains(" 0 steps redone")), "{out}");
    }
}

//! Being asked to stop: a checkpoint at the step, exit 3, and nothing lost.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::{Signal, kill_process_group};

use crate::common::{Lab, Out, SLOW, gone_within, hold, send};

/// Many, of milliseconds: a test that waits for a core must still meet the run at work.
const STEPS: &str = "train.steps=300";

fn uninterrupted() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| Lab::new().train("out", &[], &[STEPS]).expect(0).digest())
}

/// The steps that have a checkpoint.
fn saved(lab: &Lab) -> Vec<u64> {
    let found = fs::read_dir(lab.path("out/checkpoints")).unwrap().map(|e| e.unwrap().file_name());
    let mut steps: Vec<_> = found.filter_map(|n| n.to_str()?.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort();
    steps
}

/// A run under `layout` that was stopped by `signal` after its third step. Nothing holds ranks that are threads: one that is done
/// before the signal comes must be as any other, and is run again.
fn stopped(signal: Signal, layout: &[&str]) -> (Lab, Out) {
    let until = hold(0, 3, None);
    let processes = !layout.is_empty() && !layout.contains(&"layout.transport=threads");
    let args = if processes { vec!["--inject", &until] } else { Vec::new() };
    for _ in 0..10 {
        let lab = Lab::new();
        let mut run = lab.start_train("out", &args, &[&[STEPS], layout].concat());
        run.wait_for_step(3);
        run.signal(signal);
        let out = run.end();
        if out.code() != Some(0) || processes {
            return (lab, out.expect(3));
        }
        assert_eq!(out.digest(), uninterrupted(), "{out}");
    }
    panic!("ten runs of {STEPS} were done before they could be stopped");
}

/// Stops a run under `layout` by `signal`, then goes on under `next`.
fn stop_and_go_on(signal: Signal, layout: &[&str], next: &[&str]) {
    let (lab, out) = stopped(signal, layout);
    let last = out.stdout.lines().filter_map(|line| line.strip_prefix("step ")?.split('/').next()?.parse().ok()).max();
    let last: u64 = last.unwrap();
    assert!((3..300).contains(&last), "{out}");
    assert_eq!(saved(&lab), [last], "{out}");
    assert!(out.digest() != uninterrupted());
    let summary = fs::read_to_string(lab.path("out/summary.json")).unwrap();
    assert!(summary.contains(&format!("stopped after step {last}")), "{summary}");
    let out = lab.train("out", &["--resume"], &[&[STEPS], next].concat()).expect(0);
    assert!(out.stdout.contains(&format!("going on after step {last} ")), "{out}");
    assert!(out.stdout.contains(&format!("\nstep {}/300 ", last + 1)), "{out}");
    assert!(!out.stdout.contains(&format!("\nstep {last}/300 ")), "{out}");
    assert_eq!(out.digest(), uninterrupted());
    let summary = fs::read_to_string(lab.path("out/summary.json")).unwrap();
    assert!(summary.contains("\"finished\"") && summary.contains(uninterrupted()), "{summary}");
}

#[test]
fn sigterm_stops_processes_after_a_checkpoint() {
    stop_and_go_on(Signal::TERM, &["layout.dp=2", "layout.pp=2"], &["layout.tp=2"]);
}

#[test]
fn sigint_stops_processes_after_a_checkpoint() {
    stop_and_go_on(Signal::INT, &["layout.dp=2", "layout.zero=1", "layout.transport=tcp"], &[]);
}

#[test]
fn sigterm_stops_threads_after_a_checkpoint() {
    stop_and_go_on(Signal::TERM, &["layout.dp=2", "layout.transport=threads"], &["layout.dp=3", "layout.zero=1"]);
    stop_and_go_on(Signal::TERM, &[], &["layout.pp=2"]);
}

/// A device errs, and no check comes before the stop: the run takes one more step, which is checked, and leaves nothing spoilt.
#[test]
fn a_stop_waits_for_a_checked_step() {
    let lab = Lab::new();
    let sets = [STEPS, "layout.dp=4", "guard.recompute_every=250", "checkpoint.every=0"];
    let mut run = lab.start_train("out", &["--inject", "flip:1@3:device"], &sets);
    run.wait_for_step(8);
    run.signal(Signal::TERM);
    let out = run.end().expect(3);
    assert!(out.stdout.contains("broken device of rank 1"), "{out}");
    let out = lab.train("out", &["--resume"], &[STEPS]).expect(0);
    assert_eq!(out.digest(), uninterrupted());
}

#[test]
fn a_hangup_stops_processes_after_a_checkpoint() {
    stop_and_go_on(Signal::HUP, &["layout.dp=2", "layout.pp=2"], &["layout.tp=2"]);
}

/// The terminal and the shell both tell of a session that is gone, to the whole group; some supervisor adds a word.
#[test]
fn a_dropped_session_stops_a_run_as_one_signal_does() {
    for also in [Signal::HUP, Signal::TERM] {
        let lab = Lab::new();
        let words = ["train", "run.toml", "--run-dir", "out", "--set=train.steps=2000", "--set=layout.dp=2"];
        let mut command = lab.command(&words);
        command.process_group(0);
        let mut run = lab.start_command(command);
        let pids = run.ranks(2);
        run.wait_for_step(3);
        for signal in [Signal::HUP, Signal::CONT, also] {
            kill_process_group(run.group(), signal).unwrap();
        }
        let out = run.end().expect(3);
        assert_eq!(saved(&lab).len(), 1, "{out}");
        assert!(!out.stdout.contains("trouble"), "no rank dies of it: {out}");
        gone_within(Duration::from_secs(20), &pids);
    }
}

/// `nohup` asks for a run that outlives its session.
#[test]
fn a_hangup_that_is_ignored_stays_ignored() {
    let lab = Lab::new();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_lockstep")]);
    command.args(["train", "run.toml", "--run-dir", "out", "--set", STEPS, "layout.dp=2"]);
    let mut run = lab.start_command(command);
    run.wait_for_step(3);
    run.signal(Signal::HUP);
    assert_eq!(run.end().expect(0).digest(), uninterrupted());
}

#[test]
fn a_signal_to_every_process_stops_as_one_to_the_parent() {
    // Ctrl-C at a terminal, `timeout` and service managers signal the whole group.
    for signal in [Signal::TERM, Signal::INT] {
        let lab = Lab::new();
        let mut run = lab.start_train("out", &["--inject", &hold(0, 3, None)], &["train.steps=2000", "layout.dp=2"]);
        let pids = run.ranks(2);
        run.wait_for_step(3);
        pids.iter().for_each(|pid| send(*pid, signal));
        run.signal(signal);
        let out = run.end().expect(3);
        assert_eq!(saved(&lab).len(), 1, "{out}");
    }
}

#[test]
fn a_stop_before_the_first_step_stops_after_it() {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &["--inject", &hold(0, 1, None)], &["train.steps=2000", "layout.dp=2"]);
    run.wait_for(|line| line.starts_with("rank "));
    run.signal(Signal::TERM);
    let out = run.end().expect(3);
    assert!(saved(&lab)[0] < 100, "{out}");
}

#[test]
fn a_second_signal_ends_at_once() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let lab = Lab::new();
        let mut run = lab.start_train("out", &[], &[&SLOW[..], &["layout.dp=2"]].concat());
        let pids = run.ranks(2);
        // Both in one step: it takes seconds.
        run.signal(signal);
        // Two that wait to be taken in are one.
        run.taken_in(signal);
        run.signal(signal);
        let out = run.end().expect(code);
        assert!(!out.stdout.contains("\nstep 1/"), "the step was too short for this test: {out}");
        gone_within(Duration::from_secs(20), &pids);
        assert!(saved(&lab).is_empty());
    }
}

/// Somebody removes the folder of a run at work: it is said, and what can be written again is.
#[test]
fn a_run_survives_that_its_folder_is_removed() {
    let lab = Lab::new();
    let mut run = lab.start_train("out", &[], &[STEPS, "layout.dp=2", "checkpoint.every=20", "checkpoint.keep=9"]);
    run.wait_for_step(22);
    // At once: a removal entry by entry would meet what the run writes meanwhile.
    fs::rename(lab.path("out"), lab.path("removed")).unwrap();
    fs::remove_dir_all(lab.path("removed")).unwrap();
    let out = run.end().expect(0);
    assert!(out.stdout.contains("was REMOVED while the run is at work"), "{out}");
    assert_eq!(out.digest(), uninterrupted());
    for name in ["run.toml", "journal.jsonl", "interventions.jsonl", "summary.json", "run.lock"] {
        assert!(lab.path("out").join(name).exists(), "{name}: {out}");
    }
    let events = fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    let steps = events.lines().filter(|line| line.contains("\"kind\":\"step\"")).count();
    assert_eq!(steps, 300, "no line is lost: {events}");
    assert!(lab.path("out/checkpoints/step-00000300/manifest.json").exists(), "{out}");
    let resumed = lab.train("out", &["--resume"], &[STEPS]).expect(0);
    assert!(resumed.stdout.contains("going on after step 300 of "), "{resumed}");
}

//! Ranks keep to cores of their own, out of those that the caller leaves them.

use std::fs;
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::common::{Lab, Out, SLOW};

/// The cores that this test may use.
fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// The only line about cores.
#[track_caller]
fn sentence(out: &Out) -> &str {
    let lines: Vec<_> = out.stdout.lines().filter(|line| line.contains("pinned")).collect();
    assert_eq!(lines.len(), 1, "{out}");
    lines[0]
}

#[test]
fn each_rank_process_keeps_to_its_own_cores() {
    let cores = allowed();
    if cores.len() < 2 {
        return println!("skipped: it needs two cores");
    }
    let lab = Lab::new();
    let mut running = lab.start_train("out", &[], &[&SLOW[..], &["layout.dp=2"]].concat());
    let ranks = running.ranks(2);
    running.wait_for_step(1);
    let held = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
    };
    let held: Vec<_> = ranks.iter().map(held).collect();
    assert_ne!(held[0], held[1]);
    if cores == [0, 1] {
        assert_eq!(held, ["0", "1"]);
    }
    running.signal(rustix::process::Signal::KILL);
}

#[test]
fn what_is_not_allowed_is_not_used_and_off_is_off() {
    let one = *allowed().last().unwrap();
    // A process inherits the cores of the thread that starts it, as under `taskset`.
    let on_one = |sets: &'static [&'static str]| {
        let body = move || {
            let mut set = CpuSet::new();
            set.set(one);
            sched_setaffinity(None, &set).unwrap();
            Lab::new().train("out", &[], sets).expect(0)
        };
        thread::spawn(body).join().unwrap()
    };
    let alone = on_one(&["layout.threads=1"]);
    assert_eq!(sentence(&alone), format!("pinned: rank 0 to core {one} (layout.pin)"));
    let crowded = on_one(&["layout.dp=2"]);
    assert_eq!(sentence(&crowded), "ranks are not pinned: 2 of them, and 1 core allowed");
    let off = Lab::new().train("out", &[], &["layout.dp=2", "layout.pin=off"]).expect(0);
    assert_eq!(sentence(&off), "ranks are not pinned to cores (layout.pin = off)");
    assert_eq!((crowded.digest(), off.digest()), (alone.digest(), alone.digest()));
}

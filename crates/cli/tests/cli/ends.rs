//! How a run ends when somebody is struck while others are done, and what it goes back to when nobody lived to tell of a checkpoint.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::Lab;

/// One rank tells the digest once all have agreed on it. From then on nothing may change the end, whoever is struck.
#[test]
fn a_run_ends_well_whoever_is_struck_once_the_digest_is_known() {
    let lab = Lab::new();
    let sets = ["train.steps=6", "layout.dp=4"];
    let want = lab.train("plain", &[], &sets[..1]).expect(0).digest();
    for (n, signal) in [Signal::KILL, Signal::STOP, Signal::KILL, Signal::STOP].into_iter().enumerate() {
        let mut run = lab.start_train(&format!("struck-{n}"), &[], &sets);
        let ranks = run.ranks(4);
        let log = lab.path(&format!("struck-{n}/events.jsonl"));
        while !std::fs::read_to_string(&log).unwrap_or_default().contains("\"kind\":\"digest\"") {
            std::thread::sleep(Duration::from_micros(200));
        }
        // All of them, or all but the first: some may have said that they are done, some be about to, some be gone.
        let all = ranks.iter().skip(n / 2).filter_map(|rank| Pid::from_raw(*rank as i32));
        for rank in all {
            let _ = kill_process(rank, signal);
        }
        let out = run.end().expect(0);
        assert_eq!(out.digest(), want, "{out}");
    }
}

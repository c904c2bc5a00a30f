//! A disk that is full, or refuses, when a checkpoint is due: the run goes on.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags};

use crate::common::{Lab, copy, hold, same_tree, tree};

/// A small file system in memory; gone when dropped.
struct SmallDisk {
    at: PathBuf,
}

fn mount(args: &[&str], at: &Path) -> bool {
    let mut command = Command::new("mount");
    command.args(args).arg(at).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

impl SmallDisk {
    /// `None` (said aloud) where mounting is not allowed.
    fn new(at: PathBuf, kib: u32) -> Option<Self> {
        fs::create_dir_all(&at).unwrap();
        if mount(&["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"], &at) {
            return Some(Self { at });
        }
        println!("skipped: mounting a tmpfs is refused here (it needs root)");
        None
    }

    fn grow(&self) {
        assert!(mount(&["-o", "remount,size=16m"], &self.at), "the disk cannot be made larger");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

/// The checkpoint of this run has 0.7 MB.
const SETS: [&str; 3] = ["train.steps=60", "checkpoint.every=2", "layout.dp=2"];

fn whole() -> String {
    Lab::new().train("out", &[], &SETS).expect(0).digest()
}

/// Every line of `events.jsonl`, which must all be whole; `path` is the run directory.
fn events(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path.join("events.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

fn kinds<'e>(events: &'e [serde_json::Value], kind: &str) -> Vec<&'e serde_json::Value> {
    events.iter().filter(|event| event["kind"] == kind).collect()
}

#[test]
fn a_full_disk_is_retried_until_there_is_space() {
    let lab = Lab::new();
    // Room for one checkpoint, not for the next one beside it.
    let Some(disk) = SmallDisk::new(lab.path("out/checkpoints"), 1000) else { return };
    let mut run = lab.start_train("out", &[], &SETS);
    run.wait_for(|line| line.starts_with("checkpoint of step 2 | "));
    let failed = run.wait_for(|line| line.starts_with("checkpoint of step 4 "));
    for word in ["FAILED", "the run goes on", "tries again after step 5", "No space left", "free some space"] {
        assert!(failed.contains(word), "{word:?} is not in {failed}");
    }
    run.wait_for_step(7);
    disk.grow();
    run.wait_for(|line| line.starts_with("checkpoint of step ") && !line.contains("FAILED"));
    let out = run.end().expect(0);
    assert_eq!(out.digest(), whole());
    let events = events(&lab.path("out"));
    let failures = kinds(&events, "checkpoint_failed");
    assert_eq!((failures[0]["step"].as_u64(), failures[0]["retry_at"].as_u64()), (Some(4), Some(5)));
    assert!(failures[0]["reason"].as_str().unwrap().contains("No space left"));
    // Tried again at every step, not only when the next one was due.
    assert_eq!(failures[1]["step"].as_u64(), Some(5));
    assert_eq!(kinds(&events, "checkpoint").last().unwrap()["step"].as_u64(), Some(60));
    assert!(fs::read_to_string(lab.path("out/summary.json")).unwrap().contains("\"finished\""));
}

#[test]
fn a_disk_that_stays_full_ends_the_run_after_all_steps() {
    let lab = Lab::new();
    let sets = ["train.steps=4", "checkpoint.every=2", "layout.dp=2", "checkpoint.last_wait_s=2"];
    let Some(disk) = SmallDisk::new(lab.path("out/checkpoints"), 1000) else { return };
    let out = lab.train("out", &[], &sets).expect(6);
    let words = ["last checkpoint", "step 4", "out/checkpoints", "6 tries and 2 s", "No space left", "step 2"];
    out.says(&words);
    out.says(&["free some space", "--resume", "checkpoint.last_wait_s"]);
    assert!(out.stdout.contains("step 4/4 "), "{out}");
    let (events, summary) = (events(&lab.path("out")), fs::read_to_string(lab.path("out/summary.json")).unwrap());
    assert_eq!(kinds(&events, "step").len(), 4);
    assert_eq!(kinds(&events, "checkpoint_failed").len(), 6);
    assert!(summary.contains("\"failed\"") && summary.contains("No space left"), "{summary}");
    // The older checkpoint is whole: with space, nothing but two steps is lost.
    disk.grow();
    let resumed = lab.train("out", &["--resume"], &sets).expect(0);
    assert!(resumed.stdout.contains("going on after step 2 "), "{resumed}");
    assert_eq!(resumed.digest(), Lab::new().train("out", &[], &sets).expect(0).digest());
}

/// What would be removed once the last checkpoint is there is removed before it.
#[test]
fn the_last_checkpoint_gets_the_room_that_it_would_make() {
    let lab = Lab::new();
    let sets = ["train.steps=6", "checkpoint.every=2", "layout.dp=2"];
    // Room for two of them, and two are kept.
    let Some(_disk) = SmallDisk::new(lab.path("out/checkpoints"), 1800) else { return };
    let out = lab.train("out", &[], &sets).expect(0);
    assert!(out.stdout.contains("checkpoint of step 6 FAILED"), "{out}");
    assert!(out.stdout.contains("checkpoints of steps [2] are removed now"), "{out}");
    assert_eq!(out.digest(), Lab::new().train("out", &[], &sets).expect(0).digest());
    assert!(lab.path("out/checkpoints/step-00000004").exists(), "nothing else went");
    let resumed = lab.train("out", &["--resume"], &sets).expect(0);
    assert!(resumed.stdout.contains("going on after step 6 "), "{resumed}");
}

#[test]
fn the_last_checkpoint_goes_to_the_slower_tier_where_the_disk_stays_full() {
    let lab = Lab::new();
    let store = format!("checkpoint.store=\"file://{}\"", lab.path("far").display());
    let sets = ["train.steps=4", "checkpoint.every=2", "layout.dp=2", &store];
    let Some(_disk) = SmallDisk::new(lab.path("out/checkpoints"), 1000) else { return };
    let out = lab.train("out", &[], &sets).expect(0);
    assert!(out.stdout.contains("the last checkpoint, of step 4, is in checkpoint.store ALONE"), "{out}");
    assert!(lab.path("out/checkpoints/step-00000002").exists() && !lab.path("out/checkpoints/step-00000004").exists());
    let resumed = lab.train("out", &["--resume"], &sets).expect(0);
    assert!(resumed.stdout.contains("going on after step 4 ") && resumed.stdout.contains("in the store"), "{resumed}");
    assert_eq!(resumed.digest(), out.digest());
}

#[test]
fn a_full_disk_under_the_whole_run_directory() {
    let lab = Lab::new();
    let Some(disk) = SmallDisk::new(lab.path("out"), 500) else { return };
    let mut run = lab.start_train("out", &[], &SETS);
    run.wait_for(|line| line.contains("FAILED"));
    run.wait_for_step(8);
    disk.grow();
    let out = run.end().expect(0);
    assert_eq!(out.digest(), whole());
    // Lines may be missing from the log, but none is torn.
    let events = events(&lab.path("out"));
    assert_eq!(kinds(&events, "digest").len(), 1);
    assert!(fs::read_to_string(lab.path("out/summary.json")).unwrap().contains("\"finished\""));
}

#[test]
fn a_step_that_cannot_be_written_leaves_the_others_alone() {
    let lab = Lab::new();
    let sets = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "layout.dp=2"];
    let digest = lab.train("out", &[], &sets).expect(0).digest();
    let again = Lab::new();
    copy(&lab.path("out"), &again.path("out"));
    let checkpoints = again.path("out/checkpoints");
    for step in ["step-00000004", "step-00000006"] {
        fs::remove_dir_all(checkpoints.join(step)).unwrap();
    }
    // A file where the folder of step 4 should be: no checkpoint can be written there.
    fs::write(checkpoints.join("step-00000004"), "mine").unwrap();
    let second = tree(&checkpoints.join("step-00000002"));
    let out = again.train("out", &["--resume"], &sets).expect(0);
    assert!(out.stdout.contains("checkpoint of step 4 FAILED, the run goes on"), "{out}");
    assert!(out.stdout.contains("checkpoint of step 5 | "), "{out}");
    assert_eq!(out.digest(), digest);
    assert_eq!(fs::read_to_string(checkpoints.join("step-00000004")).unwrap(), "mine");
    same_tree(&second, &tree(&checkpoints.join("step-00000002")));
}

/// Whom nothing belongs to.
const NOBODY: u32 = 65_534;

/// The journal and the run's folder may not be written any more when another controller takes over; as root anything may.
#[test]
fn a_folder_that_becomes_read_only_ends_no_run_whose_controller_is_replaced() {
    let lab = Lab::new();
    let root = rustix::process::geteuid().is_root();
    let command = |args: &[&str]| {
        let mut command = lab.command(args);
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    };
    if !command(&["--version"]).stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
        println!("skipped: another user may not run the binary here");
        return;
    }
    if root {
        chown(lab.path("."), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let sets = ["--set=train.steps=600", "--set=layout.dp=2"];
    let inject = format!("controller@500,{}", hold(0, 6, Some(60)));
    let train = ["train", "run.toml", "--run-dir", "out", "--inject", &inject, sets[0], sets[1]];
    let mut run = lab.start_command(command(&train));
    run.wait_for_step(5);
    let allow = |name: &str, mode| fs::set_permissions(lab.path(name), fs::Permissions::from_mode(mode)).unwrap();
    allow("out/journal.jsonl", 0o444);
    allow("out", 0o555);
    let out = run.end().expect(0);
    allow("out", 0o755);
    assert!(out.stdout.contains("another one goes on from journal.jsonl"), "{out}");
    assert_eq!(out.digest(), Lab::new().train("out", &[], &["train.steps=600"]).expect(0).digest());
}

/// Milliseconds between the beginnings of two ranks' writes.
const BESIDE: [&str; 6] = [
    "train.steps=600",
    "checkpoint.every=30",
    "layout.dp=2",
    "checkpoint.background=true",
    "checkpoint.stagger_ms=100",
    "checkpoint.keep=20",
];

/// A file stands where the folder of checkpoints was: no rank can leave its part, nor that it has none.
#[test]
fn a_folder_that_refuses_everything_for_a_while_costs_only_what_was_due_then() {
    let lab = Lab::new();
    let (folder, away) = (lab.path("out/checkpoints"), lab.path("away"));
    let mut run = lab.start_train("out", &["--inject", &hold(0, 31, Some(60))], &BESIDE);
    run.wait_for(|line| line.starts_with("checkpoint of step 30 | "));
    fs::write(&away, "in the way").unwrap();
    // At once: somebody would make the folder again that is gone for a moment.
    let change_places = || rustix::fs::renameat_with(CWD, &folder, CWD, &away, RenameFlags::EXCHANGE).unwrap();
    change_places();
    let failed = run.wait_for(|line| line.contains("FAILED"));
    change_places();
    assert!(failed.contains("rank 0 could not write its part: ") && failed.contains("the run goes on"), "{failed}");
    run.wait_for(|line| line.starts_with("checkpoint of step ") && line.contains("written beside the steps"));
    let out = run.end().expect(0);
    assert!(!out.stdout.contains("no progress") && !out.stdout.contains("world 2"), "{out}");
    assert_eq!(out.digest(), Lab::new().train("out", &[], &["train.steps=600", "layout.dp=2"]).expect(0).digest());
}

/// Only rank 1 finds the folder refusing: rank 0 hears of it and waits no longer for its part.
#[test]
fn a_part_that_can_never_come_is_not_waited_for() {
    let lab = Lab::new();
    let folder = lab.path("out/checkpoints");
    // Long enough to put another folder in its place.
    let sets = [&BESIDE[..], &["checkpoint.stagger_ms=2000"]].concat();
    let mut run = lab.start_train("out", &["--inject", &hold(0, 31, Some(150))], &sets);
    run.wait_for(|line| line.starts_with("checkpoint of step 30 | "));
    let part = |at: &Path| {
        let name = at.file_name().unwrap().to_string_lossy().into_owned();
        let steps = fs::read_dir(at).into_iter().flatten().flatten().flat_map(|step| fs::read_dir(step.path()));
        let mut names = steps.flatten().flatten().map(|file| file.file_name().into_string().unwrap());
        name.starts_with("writing-") && names.any(|name| name.starts_with("part-00000") && name.ends_with("json"))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !fs::read_dir(&folder).unwrap().flatten().any(|entry| part(&entry.path())) {
        assert!(Instant::now() < deadline, "no part of rank 0 is seen");
        std::thread::sleep(Duration::from_millis(1));
    }
    if !mount(&["-t", "tmpfs", "-o", "ro", "tmpfs"], &folder) {
        println!("skipped: mounting a tmpfs is refused here (it needs root)");
        run.end();
        return;
    }
    let gone = SmallDisk { at: folder };
    run.wait_for(|line| line.contains("rank 1 has no part of the checkpoint of step "));
    drop(gone);
    let failed = run.wait_for(|line| line.contains("FAILED"));
    assert!(failed.contains("rank 1 has no part of it") && failed.contains("the run goes on"), "{failed}");
    run.wait_for(|line| line.starts_with("checkpoint of step ") && line.contains("written beside the steps"));
    let out = run.end().expect(0);
    assert!(!out.stdout.contains("no progress") && !out.stdout.contains("world 2"), "{out}");
}

/// No byte fits on the disk: the run does not begin, and nothing of it is left.
#[test]
fn a_disk_that_is_full_before_the_run_begins_is_named() {
    let lab = Lab::new();
    let Some(disk) = SmallDisk::new(lab.path("disk"), 64) else { return };
    let mut filler = fs::File::create(lab.path("disk/filler")).unwrap();
    while std::io::Write::write(&mut filler, &[7; 4096]).is_ok_and(|n| n > 0) {}
    let before = tree(&lab.path("disk"));
    for args in
        [&["train", "run.toml", "--run-dir", "disk/out"][..], &["train", "run.toml", "--run-dir", "disk/out", "--json"]]
    {
        let out = lab.lockstep(args).expect(2);
        let said = format!("{}{}", out.stdout, out.stderr);
        let folder = lab.path("disk/out");
        for word in [folder.to_str().unwrap(), "No space left", "nothing was started", "--run-dir"] {
            assert!(said.contains(word), "{word:?}: {out}");
        }
        same_tree(&before, &tree(&lab.path("disk")));
    }
    drop(disk);
}

/// A controller that is started again where nothing can be written any more. Its ranks step on under nobody.
#[test]
fn a_controller_on_a_disk_that_became_read_only_says_so() {
    let mut cluster = crate::cluster::Cluster::new(None, 1, &["layout.dp=2", "train.steps=100000"]);
    let Some(disk) = SmallDisk::new(cluster.lab.path("run"), 16_000) else { return };
    let mut controller = cluster.controller();
    let agent = cluster.agent(1, 2, &[]);
    controller.wait_for_step(3);
    controller.signal(rustix::process::Signal::KILL);
    drop(controller.end());
    assert!(mount(&["-o", "remount,ro"], &disk.at), "the disk cannot be made read-only");
    let args = cluster.controller_args("127.0.0.1:0", &[]);
    let out = cluster.lab.lockstep(&args.iter().map(String::as_str).collect::<Vec<_>>()).expect(2);
    let folder = cluster.lab.path("run");
    out.says(&[folder.to_str().unwrap(), "Read-only file system", "nothing was started", "make room or writable"]);
    drop(agent);
}

/// The other rank has not begun to write when its death ends the run: the folder in which they would have written goes with it.
#[test]
fn no_folder_of_an_unfinished_checkpoint_is_left_when_a_run_ends() {
    let lab = Lab::new();
    let sets = [
        "train.steps=100000",
        "layout.dp=2",
        "checkpoint.every=2",
        "checkpoint.background=true",
        "checkpoint.stagger_ms=600000",
        "guard.restarts_max=0",
    ];
    let mut run = lab.start_train("out", &[], &sets);
    let pids = run.ranks(2);
    run.wait_for_step(4);
    let writing = || {
        let names = fs::read_dir(lab.path("out/checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("writing-")).count()
    };
    // The first rank writes at once.
    let deadline = Instant::now() + Duration::from_secs(60);
    while writing() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(writing(), 1);
    crate::common::send(pids[1], rustix::process::Signal::KILL);
    let out = run.end().expect(5);
    assert_eq!(writing(), 0, "{out}");
}

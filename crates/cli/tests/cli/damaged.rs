//! Resuming: from whole checkpoints, from damaged ones, and from those of another run.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::common::{Lab, copy, same_tree, tree};

/// 8 steps with a checkpoint every 2, all kept.
const SETS: [&str; 3] = ["train.steps=8", "checkpoint.every=2", "checkpoint.keep=9"];

/// The finished run, made once: its folder and its digest.
fn finished() -> &'static (Lab, String) {
    static RUN: OnceLock<(Lab, String)> = OnceLock::new();
    RUN.get_or_init(|| {
        let lab = Lab::new();
        let out = lab.train("out", &[], &[&SETS[..], &["layout.dp=2"]].concat()).expect(0);
        let digest = out.digest();
        (lab, digest)
    })
}

/// A copy of it as it was after step 6: with checkpoints 2, 4 and 6.
fn interrupted() -> Lab {
    let lab = Lab::new();
    copy(&finished().0.path("out"), &lab.path("out"));
    fs::remove_dir_all(step(&lab, 8)).unwrap();
    lab
}

fn step(lab: &Lab, step: u64) -> PathBuf {
    lab.path(&format!("out/checkpoints/step-{step:08}"))
}

/// A shard of the checkpoint whose name begins like this.
fn shard(lab: &Lab, of: u64, start: &str) -> PathBuf {
    let mut found: Vec<_> = fs::read_dir(step(lab, of)).unwrap().map(|e| e.unwrap().path()).collect();
    found.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with(start));
    found.sort();
    found.swap_remove(0)
}

/// Resumes under another layout; the end must be that of the run that nobody interrupted.
#[track_caller]
fn resumes(lab: &Lab, words: &[&str]) {
    let out = lab.train("out", &["--resume"], &[&SETS[..], &["layout.tp=2", "layout.zero=1"]].concat()).expect(0);
    assert_eq!(out.digest(), finished().1, "{out}");
    for word in words {
        assert!(out.stdout.contains(word), "{word:?} is not said: {out}");
    }
    // Events tell it too, and every line of both lives can be read.
    let events = fs::read_to_string(lab.path("out/events.jsonl")).unwrap();
    assert!(events.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "{events}");
    for word in words {
        assert!(events.contains(word), "{word:?} is not in events.jsonl");
    }
}

/// `--resume` refuses, names all `words` and touches nothing.
#[track_caller]
fn refused(lab: &Lab, sets: &[&str], words: &[&str]) {
    let before = lab.tree();
    let out = lab.train("out", &["--resume"], &[&SETS[..], sets].concat()).expect(2);
    out.says(words);
    same_tree(&before, &lab.tree());
}

/// What was in the checkpoint of step 6 is still there, under another name.
#[track_caller]
fn kept_aside(lab: &Lab, damaged: &crate::common::Tree) {
    same_tree(damaged, &tree(&step(lab, 6).with_extension("damaged")));
    assert!(step(lab, 6).join("manifest.json").exists(), "step 6 was written again");
}

#[test]
fn a_run_goes_on_from_its_newest_checkpoint() {
    let lab = interrupted();
    resumes(&lab, &["going on after step 6 of "]);
    // A finished run that is resumed has nothing to do and says the same.
    resumes(&lab, &["going on after step 8 of "]);
}

#[test]
fn a_flipped_bit_names_tensor_and_file_and_is_passed_over() {
    let lab = interrupted();
    let path = shard(&lab, 6, "layer-0001");
    let name = path.file_name().unwrap().to_str().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 5;
    bytes[last] ^= 0x10;
    fs::write(&path, &bytes).unwrap();
    let damaged = tree(&step(&lab, 6));
    resumes(
        &lab,
        &["checkpoint of step 6 is passed over", "model.layers.1.", name, "chunk", "going on after step 4 of "],
    );
    kept_aside(&lab, &damaged);
}

#[test]
fn a_flipped_bit_in_a_header_is_found() {
    let lab = interrupted();
    let path = shard(&lab, 6, "embed");
    let name = path.file_name().unwrap().to_str().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let damaged = tree(&step(&lab, 6));
    resumes(&lab, &["checkpoint of step 6 is passed over", name, "header", "going on after step 4 of "]);
    kept_aside(&lab, &damaged);
}

#[test]
fn a_truncated_shard_is_passed_over_and_kept() {
    let lab = interrupted();
    let path = shard(&lab, 6, "layer-0002");
    let size = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(size - 100).unwrap();
    let damaged = tree(&step(&lab, 6));
    let name = path.file_name().unwrap().to_str().unwrap();
    let bytes = format!("it has {} bytes, {size} were written", size - 100);
    resumes(&lab, &["checkpoint of step 6 is passed over", name, &bytes, "going on after step 4 of ", ".damaged"]);
    kept_aside(&lab, &damaged);
}

#[test]
fn a_torn_manifest_is_passed_over_and_kept() {
    let lab = interrupted();
    let path = step(&lab, 6).join("manifest.json");
    let text = fs::read(&path).unwrap();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    let damaged = tree(&step(&lab, 6));
    resumes(&lab, &["checkpoint of step 6 is passed over", "manifest.json", "going on after step 4 of "]);
    kept_aside(&lab, &damaged);
}

#[test]
fn a_changed_manifest_is_passed_over() {
    let lab = interrupted();
    let path = step(&lab, 6).join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"step\":6", "\"step\":7", 1)).unwrap();
    let damaged = tree(&step(&lab, 6));
    resumes(&lab, &["checkpoint of step 6 is passed over", "checksum", "going on after step 4 of "]);
    kept_aside(&lab, &damaged);
}

#[test]
fn a_missing_shard_is_passed_over_twice() {
    let lab = interrupted();
    fs::remove_file(shard(&lab, 6, "head")).unwrap();
    let damaged = tree(&step(&lab, 6));
    resumes(&lab, &["checkpoint of step 6 is passed over", "cannot be found", "going on after step 4 of "]);
    kept_aside(&lab, &damaged);
    // The same again: the first one that was kept stays, and so does the second.
    fs::remove_dir_all(step(&lab, 8)).unwrap();
    fs::remove_file(shard(&lab, 6, "embed")).unwrap();
    let second = tree(&step(&lab, 6));
    resumes(&lab, &["checkpoint of step 6 is passed over", "going on after step 4 of "]);
    kept_aside(&lab, &damaged);
    same_tree(&second, &tree(&step(&lab, 6).with_extension("damaged-2")));
}

#[test]
fn an_unfinished_checkpoint_is_no_checkpoint() {
    let lab = interrupted();
    fs::remove_file(step(&lab, 6).join("manifest.json")).unwrap();
    resumes(&lab, &["going on after step 4 of "]);
}

#[test]
fn without_a_complete_checkpoint_all_are_named() {
    let lab = interrupted();
    for of in [2, 4, 6] {
        fs::remove_file(shard(&lab, of, "embed")).unwrap();
    }
    refused(&lab, &[], &["no complete checkpoint", "step-00000002", "step-00000004", "step-00000006", "--run-dir"]);
    fs::remove_dir_all(lab.path("out/checkpoints")).unwrap();
    refused(&lab, &[], &["no complete checkpoint", "events.jsonl tells of checkpoints", "without --resume"]);
    fs::remove_dir_all(lab.path("out")).unwrap();
    refused(&lab, &[], &["no complete checkpoint", "without --resume"]);
}

#[test]
fn a_checkpoint_of_another_run_names_the_difference() {
    let lab = interrupted();
    refused(
        &lab,
        &["model.ffn=128"],
        &["another run", "model.ffn = 96", "model.ffn = 128", "run.toml", "another --run-dir"],
    );
    refused(&lab, &["train.seed=7"], &["another run", "train.seed = 1", "train.seed = 7"]);
    refused(&lab, &["grid.dp=2"], &["another run", "grid.dp = 4", "grid.dp = 2"]);
    refused(&lab, &["train.steps=5"], &["train.steps = 8", "train.steps = 5"]);
    refused(&lab, &["data.seed=5"], &["data.seed = 1", "data.seed = 5"]);
    // What is no part of the definition may change.
    let sets = [&SETS[..], &["layout.dp=4", "layout.zero=1", "checkpoint.every=1"]].concat();
    assert_eq!(lab.train("out", &["--resume"], &sets).expect(0).digest(), finished().1);
}

#[test]
fn a_run_directory_with_something_in_it_is_left_alone() {
    let lab = interrupted();
    let before = lab.tree();
    let sets = [&SETS[..], &["train.seed=3"]].concat();
    for sets in [&SETS[..], &sets] {
        lab.train("out", &[], sets).expect(2).says(&["out", "holds something", "--resume", "another --run-dir"]);
    }
    lab.train("run.toml", &[], &[]).expect(2).says(&["run.toml", "not a folder", "another --run-dir"]);
    lab.train("run.toml/x", &[], &[]).expect(2).says(&["run.toml/x", "another --run-dir"]);
    same_tree(&before, &lab.tree());
    fs::create_dir_all(lab.path("new/checkpoints")).unwrap();
    lab.train("new", &[], &["train.steps=2"]).expect(0);
}

#[test]
fn a_run_that_has_no_checkpoint_yet_starts_again_in_its_folder() {
    let (lab, sets) = (Lab::new(), [&SETS[..], &["checkpoint.every=0", "layout.dp=2"]].concat());
    let fatal = [&sets[..], &["guard.restarts_max=0"]].concat();
    lab.train("out", &["--inject", "kill:1@3"], &fatal).expect(5).says(&["no checkpoint to --resume from"]);
    // Whoever forgets what was begun here is told, and nothing is touched.
    let before = lab.tree();
    lab.train("out", &[], &sets).expect(2).says(&["has no checkpoint yet", "--resume", "its beginning", "--run-dir"]);
    refused(&lab, &["train.seed=7"], &["another run", "train.seed = 1", "train.seed = 7", "run.toml"]);
    same_tree(&before, &lab.tree());
    resumes(&lab, &["there is no checkpoint under", "the run starts from its beginning"]);
}

#[test]
fn a_run_killed_before_it_wrote_anything_starts_with_and_without_resume() {
    for args in [&["--resume"][..], &[]] {
        let lab = Lab::new();
        fs::create_dir_all(lab.path("out/checkpoints")).unwrap();
        lab.write("out/run.lock", "");
        lab.train("out", args, &["train.steps=2"]).expect(0);
    }
}

/// A pipe that nobody writes to blocks whoever opens it.
#[test]
fn what_is_no_file_in_a_run_folder_is_refused_and_not_waited_for() {
    let lab = interrupted();
    for name in
        ["events.jsonl", "run.toml", "run.lock", "journal.jsonl", "checkpoints/timeline", "checkpoints/held.json"]
    {
        let path = lab.path("out").join(name);
        let aside = path.with_extension("before");
        let had = fs::rename(&path, &aside).is_ok();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        for args in [&["--resume"][..], &[]] {
            lab.train("out", args, &SETS).expect(2).says(&[name, "a named pipe", "move it away"]);
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        lab.train("out", &["--resume"], &SETS).expect(2).says(&[name, "a folder", "move it away"]);
        fs::remove_dir(&path).unwrap();
        if had {
            fs::rename(&aside, &path).unwrap();
        }
    }
    resumes(&lab, &["going on after step 6 of "]);
}

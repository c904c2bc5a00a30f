//! What a run trains on: the text in the binary, and what it says of what it read.

use std::path::Path;

use crate::common::{Lab, Out};

/// A run file of the project.
fn config(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(name).display().to_string()
}

/// Runs the binary on a machine that never built a crate.
fn fresh(lab: &Lab, args: &[&str]) -> Out {
    std::fs::create_dir_all(lab.path("nothing")).unwrap();
    let mut command = lab.command(args);
    command.env("CARGO_HOME", lab.path("nothing")).env("HOME", lab.path("nothing"));
    lab.start_command(command).end()
}

#[test]
fn the_first_command_has_its_text_where_nothing_was_ever_built() {
    let lab = Lab::new();
    for name in ["demo.toml", "long.toml", "austen.toml"] {
        let stats = fresh(&lab, &["data", "stats", &config(name)]).expect(0);
        assert!(stats.stdout.starts_with("269 documents, 40242"), "{name}: {stats}");
    }
    // The demo's own run file, for one step.
    let one = ["train.steps=1", "train.warmup=0", "train.eval_sequences=1"].map(|set| format!("--set={set}"));
    let words = ["train", &config("demo.toml"), "--run-dir", "out", &one[0], &one[1], &one[2]];
    let out = fresh(&lab, &words).expect(0);
    assert!(out.stdout.contains("data: six novels of Jane Austen, 269 documents, 4,024,205 bytes"), "{out}");
    out.digest();
}

#[test]
fn crates_that_are_not_there_are_refused_and_nothing_takes_their_place() {
    let lab = Lab::new();
    let out = fresh(&lab, &["train", "run.toml", "--run-dir", "out", "--set=data.source=cargo"]).expect(2);
    out.says(&["data.source = \"cargo\"", "cargo fetch --locked", "data.source = \"austen\""]);
    assert!(!lab.path("out").exists());
}

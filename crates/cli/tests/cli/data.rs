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
        assert!(stats.stdout.starts_with("269 documents, 4024474 tokens, 4024205 bytes"), "{name}: {stats}");
    }
    // The demo's own run file, for one step.
    let one = ["train.steps=1", "train.warmup=0", "train.eval_sequences=1"].map(|set| format!("--set={set}"));
    let words = ["train", &config("demo.toml"), "--run-dir", "out", &one[0], &one[1], &one[2]];
    let out = fresh(&lab, &words).expect(0);
    assert!(out.stdout.contains("data: six novels of Jane Austen, 269 documents, 4,024,205 bytes"), "{out}");
    assert!(out.stdout.contains("(data.validation = 0.05: 6.4% held out)"), "{out}");
    out.digest();
}

#[test]
fn crates_that_are_not_there_are_refused_and_nothing_takes_their_place() {
    let lab = Lab::new();
    let out = fresh(&lab, &["train", "run.toml", "--run-dir", "out", "--set=data.source=cargo"]).expect(2);
    out.says(&["data.source = \"cargo\"", "cargo fetch --locked", "data.source = \"austen\""]);
    assert!(!lab.path("out").exists());
}

#[test]
fn the_share_that_is_held_out_of_large_documents_is_the_one_asked_for_and_is_told() {
    let lab = Lab::new();
    // Novels: 22 % of them were once held out where 5 % were asked for.
    for (name, kilobytes) in [("a", 883), ("b", 883), ("c", 433), ("d", 467), ("e", 685), ("f", 674)] {
        let line = |n: usize| format!("line {n:05} of the novel {name}, with some words to fill it up\n");
        let text: String = (0..kilobytes * 10 / 5).map(line).collect();
        std::fs::create_dir_all(lab.path("novels")).unwrap();
        lab.write(&format!("novels/{name}.txt"), text);
    }
    let sets =
        ["data.source=text", "data.paths=[\"novels\"]", "data.validation=0.05", "train.steps=1", "train.warmup=0"];
    for seed in 1..=4 {
        let seed = format!("data.seed={seed}");
        let out = lab.train(&seed, &[], &[&sets[..], &[&seed]].concat()).expect(0);
        let line = out.stdout.lines().find(|line| line.starts_with("data: validation: ")).expect("a line");
        assert!(line.contains("(data.validation = 0.05: 5.0% held out, the ends of 6 large documents)"), "{line}");
    }
}

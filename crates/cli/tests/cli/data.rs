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

#[test]
fn keys_that_do_nothing_are_refused_and_nothing_is_written() {
    let lab = Lab::new();
    lab.write("a.txt", "enough text for a few sequences of a small run ".repeat(20));
    let refused = |sets: &[&str], words: &[&str]| {
        lab.train("out", &[], sets).expect(2).says(words);
        let sets: Vec<String> = sets.iter().map(|set| format!("--set={set}")).collect();
        let check = ["check", "run.toml"].into_iter().chain(sets.iter().map(String::as_str)).collect::<Vec<_>>();
        lab.lockstep(&check).expect(2).says(words);
        assert!(!lab.path("out").exists());
    };
    let paths = "data.paths=[\"a.txt\"]";
    refused(&[paths], &["data.paths has no effect", "data.source = \"synthetic\"", "\"text\"", "\"tokens\""]);
    refused(
        &[paths, "data.source=text", "data.tokenizer=tokenizer.json"],
        &["data.tokenizer has no effect", "feeds bytes", "lockstep data tokenize --tokenizer"],
    );
    refused(
        &["train.decay=1", "train.sample_tokens=9"],
        &["train.decay has no effect", "set train.schedule to wsd", "train.sample_tokens has no effect"],
    );
    // The source that is the default has no paths, either.
    lab.write("run.toml", crate::common::NANO.replace("source = \"synthetic\"", "paths = [\"a.txt\"]"));
    refused(&[], &["data.paths has no effect", "data.source = \"austen\"", "run.toml"]);
}

#[test]
fn bytes_are_not_fed_to_a_model_of_tokens() {
    let lab = Lab::new();
    lab.train("byte", &[], &[]).expect(0);
    lab.lockstep(&["ckpt", "export", "byte", "--hf", "hf"]).expect(0);
    lab.write("a.txt", "enough text for a few sequences of a small run ".repeat(20));
    let sets = ["model.from=hf", "data.source=text", "data.paths=[\"a.txt\"]"];
    lab.train("bytes", &[], &sets).expect(0);
    lab.write("hf/tokenizer.json", "{}");
    let words = ["feeds bytes", "tokenizer.json", "lockstep data tokenize --tokenizer hf/tokenizer.json", "\"tokens\""];
    lab.train("tokens", &[], &sets).expect(2).says(&words);
    assert!(!lab.path("tokens").exists());
}

#[test]
fn a_run_says_what_it_read_as_what_and_refuses_what_is_no_text() {
    let lab = Lab::new();
    std::fs::create_dir_all(lab.path("set/data")).unwrap();
    let line = |n: usize| format!("{{\"id\": {n}, \"score\": NaN, \"text\": \"document number {n} of a set\"}}\n");
    lab.write("set/data/train.JSONL", (0..90).map(line).collect::<String>());
    lab.write("set/README.md", "about the set");
    let sets = ["data.source=text", "data.paths=[\"set\"]"];
    let out = lab.train("out", &[], &sets).expect(0);
    for said in [
        "data: read as JSON lines, the text in field `text`: 1 file (.JSONL 1), 90 documents",
        "data: left out: 1 file such as README or LICENSE (set/README.md)",
    ] {
        assert!(out.stdout.contains(said), "{said}: {out}");
    }
    lab.write("set/data/logo.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR");
    lab.train("image", &[], &sets).expect(2).says(&["logo.png", "a PNG image", "leave the file out"]);
    assert!(!lab.path("image").exists());
}

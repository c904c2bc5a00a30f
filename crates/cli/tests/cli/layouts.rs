//! One definition, one digest: under every layout, transport and instruction path.

use std::sync::OnceLock;

use crate::common::{Lab, Out};

/// The digest of one rank, computed once.
fn one_rank() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| train(&[], &["layout.threads=1"]).digest())
}

fn train(args: &[&str], sets: &[&str]) -> Out {
    Lab::new().train("out", args, sets).expect(0)
}

#[track_caller]
fn same(args: &[&str], sets: &[&str]) {
    assert_eq!(train(args, sets).digest(), one_rank(), "{args:?} {sets:?}");
}

#[test]
fn data_layouts() {
    same(&[], &["layout.dp=2"]);
    same(&[], &["layout.dp=3"]);
    same(&[], &["layout.dp=4", "layout.zero=1"]);
    same(&[], &["layout.dp=2", "layout.cells=[1, 3]", "layout.zero=1"]);
}

#[test]
fn tensor_and_pipeline_layouts() {
    same(&[], &["layout.tp=2"]);
    same(&[], &["layout.pp=2"]);
    same(&[], &["layout.pp=2", "layout.schedule=gpipe", "layout.stages=[1, 3]"]);
    same(&[], &["layout.pp=2", "layout.schedule=interleaved"]);
    same(&[], &["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1"]);
}

#[test]
fn transports_threads_and_instruction_paths() {
    same(&[], &["layout.dp=2", "layout.transport=tcp"]);
    same(&[], &["layout.dp=2", "layout.tp=2", "layout.transport=threads"]);
    same(&[], &["layout.dp=2", "cluster.ranks_per_host=1"]);
    same(&[], &["layout.threads=2"]);
    same(&[], &["layout.tp=2", "layout.threads=2"]);
    same(&["--simd", "scalar"], &[]);
    same(&["--simd", "scalar"], &["layout.pp=2"]);
}

#[test]
fn a_changed_definition_changes_the_digest() {
    let changes = ["train.seed=2", "data.seed=2", "train.lr=2e-3", "grid.dp=8", "model.tied=false", "train.steps=5"];
    let mut digests: Vec<_> = changes.iter().map(|set| train(&[], &[set]).digest()).collect();
    digests.push(one_rank().to_owned());
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), changes.len() + 1);
}

#[test]
fn hashes_of_every_tensor_agree_step_by_step() {
    let hashes = |sets: &[&str]| {
        let out = train(&["--digest-every", "2"], sets);
        let lines = out.stdout.lines().filter(|line| line.starts_with("hash "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let one = hashes(&[]);
    assert!(one.iter().any(|line| line.starts_with("hash 2 model.embed_tokens.weight/param ")), "{one:#?}");
    assert_eq!(one.iter().filter(|line| line.starts_with("hash 4 ")).count(), one.len() / 2);
    assert_eq!(one, hashes(&["layout.dp=2", "layout.pp=2", "layout.zero=1"]));
    assert_ne!(one, hashes(&["train.seed=2"]));
}

#[test]
fn without_a_run_directory_one_is_made_under_runs() {
    let lab = Lab::new();
    let out = lab.lockstep(&["train", "run.toml", "--set", "train.steps=2", "layout.dp=2"]).expect(0);
    let made: Vec<_> = std::fs::read_dir(lab.path("runs")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(made.len(), 1);
    let name = made[0].file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("run-") && name.ends_with('Z'), "{name}");
    assert!(out.stdout.contains(&format!("run directory runs/{name}")), "{out}");
    for file in ["run.toml", "events.jsonl", "interventions.jsonl", "summary.json", "checkpoints/step-00000002"] {
        assert!(made[0].join(file).exists(), "{file}");
    }
    // The resolved copy says where each value is from, and is itself a run file of the same run.
    let resolved = std::fs::read_to_string(made[0].join("run.toml")).unwrap();
    for line in
        ["dp = 2  # --set layout.dp=2", "hidden = 32  # preset nano", "seq = 16  # run.toml", "pp = 1  # default"]
    {
        assert!(resolved.contains(line), "{line}: {resolved}");
    }
    lab.write("run.toml", resolved);
    assert_eq!(lab.train("again", &[], &[]).expect(0).digest(), out.digest());
}

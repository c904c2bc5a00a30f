//! `lockstep ckpt`: what it finds, what it makes, and its exit codes.

use std::fs;
use std::path::PathBuf;

use crate::common::{Lab, Out, same_tree};

const SETS: [&str; 4] = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "layout.dp=2"];

fn trained() -> Lab {
    let lab = Lab::new();
    lab.train("out", &[], &SETS).expect(0);
    lab
}

fn objects(out: &Out) -> Vec<serde_json::Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    out.stdout.lines().map(parse).inspect(|o: &serde_json::Value| assert_eq!(o["schema"], 1, "{o}")).collect()
}

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/data/dcp")
}

#[test]
fn verify_names_file_tensor_and_chunk_and_fails() {
    let lab = trained();
    let out = lab.lockstep(&["ckpt", "verify", "out", "--json", "--jobs", "2"]).expect(0);
    let verified = &objects(&out)[0];
    assert_eq!((verified["kind"].as_str(), verified["good"].as_bool()), (Some("verified"), Some(true)));
    assert!(verified["gb_per_s"].as_f64().unwrap() > 0.0 && verified["threads"] == 2);
    let folder = lab.path("out/checkpoints/step-00000004");
    let name = "head.t0.c000000.norm.param.safetensors";
    let mut bytes = fs::read(folder.join(name)).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(folder.join(name), bytes).unwrap();
    let newest = lab.lockstep(&["ckpt", "verify", "out", "--newest"]).expect(0);
    assert!(newest.stdout.starts_with("good: step 6") && newest.stdout.lines().count() == 1, "{newest}");
    let before = lab.tree();
    for args in [&["ckpt", "verify", "out/checkpoints/step-00000004"][..], &["ckpt", "verify", "out"]] {
        let out = lab.lockstep(args).expect(2);
        for word in ["moment2 of model.norm.weight", "chunk 0", name, "DAMAGED: step 4", "1 problems"] {
            assert!(out.stdout.contains(word), "{word:?}: {out}");
        }
    }
    let out = lab.lockstep(&["ckpt", "verify", "out/checkpoints/step-00000004", "--json"]).expect(2);
    assert_eq!(objects(&out)[0]["bad"][0]["tensor"], "model.norm.weight");
    // The newest is not there in full: that is not passed over in silence.
    fs::remove_file(lab.path("out/checkpoints/step-00000006").join(name)).unwrap();
    let out = lab.lockstep(&["ckpt", "verify", "out", "--newest"]).expect(2);
    assert!(out.stdout.contains("DAMAGED: step 6") && out.stdout.contains(name), "{out}");
    let listed = objects(&lab.lockstep(&["ckpt", "ls", "out", "--json"]).expect(2));
    assert_eq!(listed.iter().map(|o| o["step"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 4, 6]);
    fs::write(lab.path("out/checkpoints/step-00000006").join(name), "").unwrap();
    assert_eq!(before.len(), lab.tree().len(), "looking writes nothing");
}

#[test]
fn diff_tells_what_differs_and_by_how_much() {
    let lab = trained();
    let [two, six] = [2, 6].map(|step| format!("out/checkpoints/step-{step:08}"));
    let out = lab.lockstep(&["ckpt", "diff", &six, "out"]).expect(0);
    assert!(out.stdout.contains("all state is equal, bit for bit"), "{out}");
    let out = lab.lockstep(&["ckpt", "diff", &two, &six, "--json"]).expect(1);
    let found = objects(&out);
    let (last, rows) = found.split_last().unwrap();
    assert_eq!((last["kind"].as_str(), last["differing"].as_u64()), (Some("compared"), Some(rows.len() as u64)));
    assert!(rows.iter().all(|row| row["count"].as_u64().unwrap() > 0 && row["max_abs"].as_f64().unwrap() > 0.0));
}

#[test]
fn reshard_proves_layouts_and_rewrites_for_other_tensor_cells() {
    let lab = trained();
    let before = lab.tree();
    let out = lab.lockstep(&["ckpt", "reshard", "out", "--set", "layout.dp=4", "layout.zero=1"]).expect(0);
    assert!(out.stdout.contains("nothing to rewrite") && out.stdout.contains("4 ranks"), "{out}");
    lab.lockstep(&["ckpt", "reshard", "out", "--set", "grid.tp=1"]).expect(2).says(&["grid.tp = 1", "--out"]);
    same_tree(&before, &lab.tree());
    lab.lockstep(&["ckpt", "reshard", "out", "--set", "grid.tp=1", "--out", "one"]).expect(0);
    lab.lockstep(&["ckpt", "diff", "out", "one"]).expect(0);
    lab.lockstep(&["ckpt", "verify", "one"]).expect(0);
    lab.lockstep(&["ckpt", "reshard", "out", "--set", "grid.tp=1", "--out", "one"]).expect(2).says(&["another --out"]);
    // A run of that grid goes on from it.
    let resumed = lab.train("one", &["--resume"], &[&SETS[..], &["grid.tp=1"]].concat()).expect(0);
    assert!(resumed.stdout.contains("going on after step 6 of "), "{resumed}");
    // There and back is the same digest.
    lab.lockstep(&["ckpt", "reshard", "one", "--set", "grid.tp=2", "--out", "two"]).expect(0);
    let digests = ["out", "two"].map(|dir| {
        objects(&lab.lockstep(&["ckpt", "verify", dir, "--json"]).expect(0))[0]["digest"].as_str().unwrap().to_owned()
    });
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn an_average_is_exported_evaluated_and_no_state_of_the_run() {
    let lab = trained();
    let paths = [2, 4, 6].map(|step| format!("out/checkpoints/step-{step:08}"));
    let args = ["ckpt", "average", &paths[0], &paths[1], &paths[2], "--out", "mean"];
    let out = lab.lockstep(&args).expect(0);
    assert!(out.stdout.contains("steps 2, 4, 6 in float64, moments of step 6"), "{out}");
    lab.lockstep(&["ckpt", "verify", "mean"]).expect(0);
    let found = objects(&lab.lockstep(&["ckpt", "diff", "mean", &paths[2], "--json"]).expect(1));
    assert!(found.iter().all(|o| o["kind"] != "differs" || o["state"] == "param"), "the moments are those of step 6");
    lab.lockstep(&["ckpt", "export", "mean", "--hf", "hf"]).expect(0);
    lab.write("batch.json", r#"{"input_ids": [[1, 2, 3, 4, 5, 6, 7, 8]]}"#);
    let out = lab.lockstep(&["eval", "--model", "hf", "--batch", "batch.json"]).expect(0);
    assert!(out.stdout.contains("loss "), "{out}");
    lab.train("mean", &["--resume"], &SETS).expect(2).says(&["another run", "average.steps"]);
    // The mean of one checkpoint with itself is that checkpoint.
    lab.lockstep(&["ckpt", "average", &paths[1], &paths[1], "--out", "same"]).expect(0);
    lab.lockstep(&["ckpt", "diff", "same", &paths[1]]).expect(0);
}

#[test]
fn an_imported_folder_trains_as_if_the_run_named_it() {
    let lab = trained();
    lab.lockstep(&["ckpt", "export", "out", "--hf", "hf"]).expect(0);
    lab.lockstep(&["ckpt", "import", "hf", "run.toml", "--set", "train.steps=4", "--out", "in"]).expect(0);
    lab.lockstep(&["ckpt", "verify", "in"]).expect(0);
    let resumed = lab.train("in", &["--resume"], &["train.steps=4"]).expect(0);
    assert!(resumed.stdout.contains("going on after step 0 of "), "{resumed}");
    let named = lab.train("named", &[], &["train.steps=4", "model.from=hf"]).expect(0);
    assert_eq!(resumed.digest(), named.digest());
    let other =
        lab.lockstep(&["ckpt", "import", "hf", "run.toml", "--set", "model.hidden=64", "--out", "no"]).expect(2);
    assert!(!lab.path("no").exists(), "{other}");
}

#[test]
fn foreign_checkpoints_are_listed_and_their_structure_checked() {
    let lab = Lab::new();
    let dcp = fixture();
    let dcp = dcp.to_str().unwrap();
    let out = lab.lockstep(&["ckpt", "ls", dcp]).expect(0);
    for word in ["model.model.embed_tokens.weight | float32 [12, 4]", "note | bytes", "torch DCP", "structure only"] {
        assert!(out.stdout.contains(word), "{word:?}: {out}");
    }
    let verified = &objects(&lab.lockstep(&["ckpt", "verify", dcp, "--json"]).expect(0))[0];
    assert_eq!((verified["good"].as_bool(), verified["hashes"].as_bool()), (Some(true), Some(false)));
    fs::create_dir(lab.path("cut")).unwrap();
    for name in [".metadata", "__0_0.distcp"] {
        fs::copy(fixture().join(name), lab.path("cut").join(name)).unwrap();
    }
    fs::File::options().write(true).open(lab.path("cut/__0_0.distcp")).unwrap().set_len(4000).unwrap();
    let out = lab.lockstep(&["ckpt", "verify", "cut"]).expect(2);
    assert!(out.stdout.contains("__0_0.distcp") && out.stdout.contains("it is cut off"), "{out}");
    lab.lockstep(&["ckpt", "verify", "run.toml"]).expect(2).says(&["neither a run's folder"]);
    // Plain safetensors: a shard of our own is one.
    lab.train("out", &[], &["train.steps=2"]).expect(0);
    lab.lockstep(&["ckpt", "export", "out", "--hf", "hf"]).expect(0);
    let out = lab.lockstep(&["ckpt", "verify", "hf"]).expect(0);
    assert!(out.stdout.contains("complete: safetensors of hf") && out.stdout.contains("structure only"), "{out}");
    let path = lab.path("hf/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    lab.lockstep(&["ckpt", "verify", "hf"]).expect(2);
}

/// What the damage is, and nothing half made.
#[test]
fn damaged_input_is_named_and_leaves_nothing_behind() {
    let lab = trained();
    let paths = [2, 4, 6].map(|step| format!("out/checkpoints/step-{step:08}"));
    let name = "head.t0.c000000.norm.param.safetensors";
    let file = lab.path(&paths[0]).join(name);
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    // Found in the middle of the work.
    let before = lab.tree();
    lab.lockstep(&["ckpt", "average", &paths[1], &paths[0], "--out", "mean"]).expect(0);
    lab.lockstep(&["ckpt", "average", &paths[1], &paths[0], "--out", "mean"]).expect(2).says(&["another --out"]);
    fs::remove_dir_all(lab.path("mean")).unwrap();
    lab.lockstep(&["ckpt", "average", &paths[0], &paths[0], "--out", "mean"]).expect(2).says(&["model.norm", name]);
    same_tree(&before, &lab.tree());
    // The only ones there are, cut short.
    for path in &paths {
        fs::write(lab.path(path).join(name), "").unwrap();
    }
    let before = lab.tree();
    for args in [
        &["ckpt", "diff", "out", "out"][..],
        &["ckpt", "average", "out", "out", "--out", "mean"],
        &["ckpt", "export", "out", "--hf", "hf"],
    ] {
        lab.lockstep(args).expect(2).says(&["every checkpoint of out is damaged", "step 6", "step 2", name]);
    }
    same_tree(&before, &lab.tree());
}

//! Words on the command line, and the errors that a person, or a program, gets.

use std::fs;
use std::process::Command;

use crate::common::{Lab, NANO, Out, same_tree};

/// The error of a command with `--json`: the one object of its kind, the last line; nothing else is said.
#[track_caller]
fn error_of(out: &Out) -> serde_json::Value {
    assert_eq!(out.stderr, "", "{out}");
    let objects: Vec<serde_json::Value> =
        out.stdout.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {out}"))).collect();
    let last = objects.last().unwrap_or_else(|| panic!("nothing is said: {out}")).clone();
    assert_eq!((&last["kind"], last["schema"].as_u64()), (&"error".into(), Some(1)), "{out}");
    assert_eq!(last["exit_code"].as_i64(), out.code().map(i64::from), "{out}");
    assert_eq!(objects.iter().filter(|object| object["kind"] == "error").count(), 1, "{out}");
    last
}

#[test]
fn all_settings_that_are_wrong_are_told_at_once_with_their_places() {
    let lab = Lab::new();
    lab.write("run.toml", NANO.replace("warmup = 2", "warmup = 20\nlr_mn = 0.1").replace("dp = 4", "dp = \"four\""));
    let before = lab.tree();
    let (train, check) = (["train", "run.toml"], ["check", "run.toml"]);
    let sets = ["--set", "layout.transport=udp", "layout.zero=9"];
    let out = lab.lockstep(&[&train[..], &sets].concat()).expect(2);
    out.says(&[
        "error: 5 settings are wrong:",
        "1. train.warmup = 20 is longer than the run: train.steps = 4",
        "set at: run.toml:13 (train.warmup), run.toml:9 (train.steps)",
        "2. unknown key `train.lr_mn` (run.toml:14); did you mean `train.lr_min`?",
        "3. `grid.dp` = \"four\" (run.toml:17): expected a whole number",
        "4. `layout.transport` = \"udp\" (--set layout.transport=udp)",
        "5. layout.zero = 9",
        "set at: --set layout.zero=9 (layout.zero)",
    ]);
    assert_eq!(lab.lockstep(&[&check[..], &sets].concat()).expect(2).stderr, out.stderr, "check and train agree");
    let object = error_of(&lab.lockstep(&[&train[..], &sets, &["--json"]].concat()).expect(2));
    let each = object["errors"].as_array().unwrap();
    assert_eq!(each.len(), 5, "{object}");
    assert!(each[2].as_str().unwrap().starts_with("`grid.dp` = \"four\" (run.toml:17)"), "{object}");
    same_tree(&before, &lab.tree());
}

#[test]
fn a_minimum_above_the_peak_of_the_learning_rate_is_refused() {
    let lab = Lab::new();
    let out = lab.train("out", &[], &["train.lr_min=1e-2"]).expect(2);
    out.says(&["train.lr_min = 0.01 is above train.lr = 0.003", "--set train.lr_min=1e-2", "run.toml:12 (train.lr)"]);
    assert!(!lab.path("out").exists());
}

#[test]
fn seeds_from_the_upper_half_of_64_bits_are_seeds() {
    let lab = Lab::new();
    let seed = "9223372036854775808";
    let first = lab.train("out", &[], &[&format!("train.seed={seed}"), "layout.dp=2"]).expect(0).digest();
    // The run's own file says the same, and the run goes on by it.
    let text = fs::read_to_string(lab.path("out/run.toml")).unwrap();
    assert!(text.contains(&format!("seed = \"{seed}\"")), "{text}");
    let again = lab.lockstep(&["train", "out/run.toml", "--run-dir", "again", "--set", "layout.dp=1"]).expect(0);
    assert_eq!(again.digest(), first);
    lab.write("run.toml", NANO.replace("[grid]", &format!("seed = {seed}\n[grid]")));
    assert_eq!(lab.train("file", &[], &[]).expect(0).digest(), first);
    lab.train("out2", &[], &["train.seed=18446744073709551616"]).expect(2).says(&["18446744073709551615"]);
}

#[test]
fn the_run_file_may_stand_behind_the_words_of_set() {
    let lab = Lab::new();
    let of = |args: &[&str]| lab.lockstep(args).expect(0).digest();
    let sets = ["--set", "train.steps=2", "layout.dp=2"];
    let wanted = of(&[&["train", "run.toml", "--run-dir", "a"][..], &sets].concat());
    assert_eq!(of(&[&["train", "--run-dir", "b"][..], &sets, &["run.toml"]].concat()), wanted);
    lab.lockstep(&[&["check"][..], &sets, &["run.toml"]].concat()).expect(0);
    lab.lockstep(&["ckpt", "reshard", "--set", "layout.dp=2", "a"]).expect(0);
    // A file that is not there is still the run file.
    let none = lab.lockstep(&[&["train"][..], &sets, &["no.toml"]].concat()).expect(2);
    none.says(&["cannot read the run file no.toml"]);
    lab.lockstep(&["train", "--set", "run.toml"]).expect(2).says(&["a value is required", "--set <KEY=VALUE>"]);
}

#[test]
fn with_json_every_command_tells_its_error_as_an_object() {
    let lab = Lab::new();
    lab.write("token", "0123456789abcdef0123\n");
    let before = lab.tree();
    for args in [
        &["train", "no.toml", "--json"][..],
        &["train", "--json"],
        &["train", "run.toml", "--json", "--nonsense"],
        &["train", "run.toml", "--json", "--digest-every", "often"],
        &["train", "run.toml", "--json", "--simd", "sse9"],
        &["train", "run.toml", "--json", "--inject", "kill:1@2"],
        &["controller", "run.toml", "--json"],
        &["controller", "run.toml", "--json", "--run-dir", "out", "--listen", "0.0.0.0:0"],
        &["check", "no.toml", "--json"],
        &["check", "run.toml", "--json", "--program", "--rank", "7"],
        &["ckpt", "ls", "nowhere", "--json"],
        &["ckpt", "--json", "verify", "nowhere"],
        &["ckpt", "diff", "nowhere", "neither", "--json"],
        &["ckpt", "reshard", "nowhere", "--json"],
        &["ckpt", "average", "nowhere", "neither", "--out", "out", "--json"],
        &["ckpt", "import", "nowhere", "run.toml", "--out", "out", "--json"],
        &["ckpt", "export", "nowhere", "--hf", "out", "--json"],
        &["goodput", "nowhere", "--json"],
        &["diagnose", "nowhere", "--json"],
        &["eval", "--model", "nowhere", "--batch", "none.json", "--json"],
        &["data", "stats", "nowhere", "--json"],
        &["doctor", "--json", "--nonsense"],
    ] {
        let out = lab.lockstep(args).expect(2);
        let error = error_of(&out);
        assert!(!error["error"].as_str().unwrap().starts_with("error"), "{out}");
    }
    same_tree(&before, &lab.tree());
    // Without it an error is text, and help is no error.
    assert!(lab.lockstep(&["train", "no.toml"]).expect(2).stderr.starts_with("error: "));
    assert!(lab.lockstep(&["train", "--json", "--help"]).expect(0).stdout.contains("Usage"));
}

#[test]
fn nothing_that_help_hides_is_suggested() {
    let lab = Lab::new();
    for args in [&["rank"][..], &["__ran"], &["__abot"], &["about"], &["train", "run.toml", "--mutan", "x"]] {
        let out = lab.lockstep(args).expect(2);
        for hidden in ["__rank", "__about", "'--mutant'"] {
            assert!(!out.stderr.contains(hidden), "{out}");
        }
    }
    lab.lockstep(&["trian", "run.toml"]).expect(2).says(&["similar", "train"]);
    lab.lockstep(&["train", "run.toml", "--run-dri", "x"]).expect(2).says(&["similar", "--run-dir"]);
}

/// Runs the binary behind `prelude`, a line of a shell.
fn behind(lab: &Lab, prelude: &str, args: &[&str]) -> Out {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{prelude}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_lockstep")]).args(args);
    lab.start_command(command).end()
}

#[test]
fn a_file_that_may_not_grow_is_an_error_with_a_name() {
    let lab = Lab::new();
    // Nothing can be written at all: the run does not begin, and leaves nothing.
    let before = lab.tree();
    let out = behind(&lab, "ulimit -f 0", &["train", "run.toml", "--run-dir", "out"]).expect(2);
    let folder = lab.path("out");
    out.says(&["the run directory", folder.to_str().unwrap(), "run.toml: File too large", "--run-dir"]);
    same_tree(&before, &lab.tree());
    // Logs and what ranks share can, in 2.1 MB, the files of a checkpoint cannot. In blocks of 512 bytes.
    let sets = ["--set", "checkpoint.last_wait_s=0", "checkpoint.every=2", "layout.threads=1"];
    let sets = [&sets[..], &["model.preset=demo", "model.ffn=2048"]].concat();
    let out =
        behind(&lab, "ulimit -f 4200", &[&["train", "run.toml", "--run-dir", "out"][..], &sets].concat()).expect(6);
    assert!(out.stdout.contains("checkpoint of step 2 FAILED") && out.stdout.contains("File too large"), "{out}");
    // A resume that cannot write leaves the run file that is there.
    lab.train("whole", &[], &["checkpoint.every=2"]).expect(0);
    let before = lab.tree();
    behind(&lab, "ulimit -f 0", &["train", "run.toml", "--run-dir", "whole", "--resume"])
        .expect(2)
        .says(&["whole", "run.toml: File too large"]);
    same_tree(&before, &lab.tree());
}

#[test]
fn a_best_validation_says_whether_it_is_kept() {
    let lab = Lab::new();
    let out = lab.train("out", &[], &["train.eval_every=1"]).expect(0);
    assert!(out.stdout.contains(" | best so far, not kept (checkpoint.best)\n"), "{out}");
    let out = lab.train("kept", &[], &["train.eval_every=1", "checkpoint.best=true"]).expect(0);
    assert!(out.stdout.contains(" | best so far, its checkpoint is kept\n"), "{out}");
    assert!(lab.path("kept/checkpoints/best.json").exists());
}

#[test]
fn a_store_is_where_its_url_says() {
    let lab = Lab::new();
    let root = lab.path("with space");
    let url = format!("checkpoint.store=file://{}", root.display().to_string().replace(' ', "%20"));
    lab.train("out", &[], &[&url]).expect(0);
    assert!(root.join("step-00000004/manifest.json").exists());
    lab.train("no", &[], &["checkpoint.store=file:///a%2"]).expect(2).says(&["checkpoint.store", "%25"]);
}

#[test]
fn a_part_of_inject_that_is_empty_is_refused() {
    let lab = Lab::new();
    for inject in ["kill:1@3,,", "kill:1@3,", ",kill:1@3", ",", "kill:1@3, ,stop:0@2"] {
        lab.train("out", &["--inject", inject], &["layout.dp=2"]).expect(2).says(&["empty part", "kill:R@S"]);
    }
    assert!(!lab.path("out").exists());
}

#[test]
fn a_fault_while_state_is_loaded_needs_a_recovery() {
    let lab = Lab::new();
    let out = lab.train("out", &["--inject", "kill:1@3:load"], &["layout.dp=2"]).expect(70);
    out.says(&["never struck", "no recovery came from which step 3", "kill:1@3"]);
    lab.train("both", &["--inject", "kill:0@3,kill:1@3:load"], &["layout.dp=2", "layout.pp=2"]).expect(0);
}

#[test]
fn a_number_of_threads_has_a_limit() {
    let lab = Lab::new();
    lab.train("out", &[], &[]).expect(0);
    for jobs in ["0", "1025", "99999999", "-1", "many"] {
        lab.lockstep(&["ckpt", "verify", "out", &format!("--jobs={jobs}")]).expect(2).says(&["--jobs", "1 to 1024"]);
    }
    let out = lab.lockstep(&["ckpt", "verify", "out", "--jobs", "1000"]).expect(0);
    assert!(!out.stdout.contains("1000 threads"), "there is less to read: {out}");
}

#[test]
fn checkpoints_of_two_models_are_not_averaged_and_none_is_blamed() {
    let lab = Lab::new();
    lab.train("a", &[], &[]).expect(0);
    lab.train("b", &[], &["model.ffn=64"]).expect(0);
    lab.train("c", &[], &["model.rope_theta=500.0"]).expect(0);
    for (pair, what) in
        [(["a", "b"], "model.ffn = "), (["b", "a"], "model.ffn = "), (["a", "c"], "model.rope_theta = ")]
    {
        let out = lab.lockstep(&["ckpt", "average", pair[0], pair[1], "--out", "mean"]).expect(2);
        out.says(&[
            "are of two models",
            what,
            &format!("{}/checkpoints", pair[0]),
            &format!("{}/checkpoints", pair[1]),
        ]);
        assert!(!out.stderr.contains("moved") && !lab.path("mean").exists(), "{out}");
    }
}

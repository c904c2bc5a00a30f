//! Bad input: exit 2, nothing written, and a message with operands and remedy.

use crate::common::{Lab, same_tree};

/// Trains with `sets` on top of the run file; the message must hold `words`. `check` must say no less, unless it
/// is about data.
#[track_caller]
fn refused(lab: &Lab, sets: &[&str], words: &[&str]) {
    let before = lab.tree();
    let out = lab.train("out", &[], sets).expect(2);
    out.says(words);
    assert!(out.stderr.starts_with("error: "), "{out}");
    same_tree(&before, &lab.tree());
    if !sets.iter().any(|set| set.starts_with("data.")) {
        let sets: Vec<_> = sets.iter().map(|set| format!("--set={set}")).collect();
        let words: Vec<_> = ["check", "run.toml"].into_iter().chain(sets.iter().map(String::as_str)).collect();
        assert_eq!(lab.lockstep(&words).expect(2).stderr, out.stderr, "check and train agree");
        same_tree(&before, &lab.tree());
    }
}

/// The run file itself is `text`.
#[track_caller]
fn refused_file(text: &str, words: &[&str]) {
    let lab = Lab::new();
    lab.write("run.toml", text);
    refused(&lab, &[], words);
}

#[test]
fn unknown_keys_name_the_nearest_known_one() {
    let lab = Lab::new();
    refused(&lab, &["layout.dpp=2"], &["layout.dpp", "did you mean `layout.dp`", "--set layout.dpp=2"]);
    refused(&lab, &["trian.steps=2"], &["trian.steps", "did you mean `train.steps`"]);
    refused(&lab, &["steps=2"], &["`steps`", "did you mean `train.steps`"]);
    refused(&lab, &["layout.dp"], &["layout.dp", "key=value", "such as layout.dp=2"]);
    refused_file("[train]\nlearning_rate = 1.0\n", &["train.learning_rate", "run.toml", "did you mean"]);
    refused_file("[gird]\n", &["gird", "did you mean `grid`"]);
    refused_file("train = 3\n", &["`train` = 3", "a section"]);
    refused_file("[train.steps]\nn = 3\n", &["train.steps", "whole number"]);
}

#[test]
fn values_of_the_wrong_kind_say_what_fits() {
    let lab = Lab::new();
    refused(&lab, &["train.steps=ten"], &["train.steps", "\"ten\"", "a whole number"]);
    refused(&lab, &["train.steps=-3"], &["train.steps", "-3", "a whole number"]);
    refused(&lab, &["train.batch=8Q"], &["train.batch", "8Q", "a whole number"]);
    refused(&lab, &["train.lr=nan"], &["train.lr", "nan", "a number"]);
    refused(&lab, &["model.tied=1"], &["model.tied", "true or false"]);
    refused(&lab, &["layout.schedule=3f3b"], &["layout.schedule", "3f3b", "gpipe, 1f1b, interleaved"]);
    refused(&lab, &["layout.threads=1025"], &["layout.threads = 1025", "1024", "cores"]);
    refused(&lab, &["layout.transport=udp"], &["layout.transport", "udp", "shm, tcp, threads"]);
    refused(&lab, &["layout.pin=yes"], &["layout.pin", "yes", "auto, off"]);
    refused(&lab, &["layout.cells=[2, -2]"], &["layout.cells", "-2", "a list of whole numbers"]);
    refused(&lab, &["data.source=web"], &["data.source", "web", "austen, cargo, synthetic, text"]);
    refused(&lab, &["train.schedule=step"], &["train.schedule", "step", "cosine, linear, constant"]);
    refused(&lab, &["model.preset=huge"], &["model.preset", "huge", "nano, tiny, demo"]);
}

#[test]
fn run_files_that_are_none() {
    refused_file("[model\npreset = 3", &["run.toml", "not valid TOML", "line 1"]);
    refused_file("[train]\nsteps = 1\nsteps = 2\n", &["run.toml", "duplicate key", "line 3"]);
    refused_file("", &["model.hidden", "model.preset", "nano, tiny"]);
    refused_file("[model]\npreset = \"nano\"\n", &["`train.steps` is not set"]);
    let lab = Lab::new();
    let before = lab.tree();
    lab.lockstep(&["train", "no.toml"]).expect(2).says(&["no.toml", "No such file"]);
    lab.lockstep(&["train", "."]).expect(2).says(&["cannot read the run file .", "directory"]);
    lab.write("run.toml", [0xff, 0xfe, 0x00]);
    lab.lockstep(&["train", "run.toml"]).expect(2).says(&["run.toml", "UTF-8"]);
    lab.lockstep(&["train"]).expect(2).says(&["required"]);
    lab.lockstep(&["trian", "run.toml"]).expect(2).says(&["trian", "similar", "train"]);
    lab.write("run.toml", crate::common::NANO);
    same_tree(&before, &lab.tree());
}

#[test]
fn layouts_that_the_grid_does_not_hold() {
    let lab = Lab::new();
    refused(&lab, &["grid.dp=1", "layout.dp=2"], &["layout.dp = 2", "grid.dp = 1", "raise grid.dp"]);
    refused(&lab, &["layout.dp=5"], &["layout.dp = 5", "grid.dp = 4", "set layout.dp to at most 4"]);
    refused(&lab, &["layout.tp=4"], &["layout.tp = 4 does not divide grid.tp = 2", "[1, 2]"]);
    refused(
        &lab,
        &["grid.cp=2", "layout.cp=4"],
        &["layout.cp = 4 does not divide grid.cp = 2", "[1, 2]", "multiple of 4"],
    );
    refused(&lab, &["layout.cp=2"], &["layout.cp = 2 does not divide grid.cp = 1", "raise grid.cp to a multiple of 2"]);
    refused(&lab, &["grid.tp=1", "layout.tp=2"], &["grid.tp = 1", "raise grid.tp to 2"]);
    refused(&lab, &["layout.pp=5"], &["layout.pp = 5", "4 layers", "at most 4"]);
    refused(
        &lab,
        &["layout.pp=4", "layout.schedule=interleaved"],
        &["layout.vpp = 2", "8 chunks of 4 layers", "layout.pp to at most 2"],
    );
    refused(&lab, &["layout.pp=2", "layout.vpp=2"], &["layout.vpp = 2", "1f1b", "interleaved"]);
    refused(&lab, &["layout.zero=4"], &["layout.zero = 4", "0 (replicated", "3 (parameters too)"]);
    let whole = ["layout.zero = 2", "accumulate = local", "MB", "set grid.accumulate to \"reduced\""];
    refused(&lab, &["layout.dp=2", "layout.zero=2"], &whole);
    refused(&lab, &["layout.dp=2", "layout.shard=1"], &["layout.shard = 1", "set layout.zero to 1"]);
    let odd = ["layout.dp=4", "layout.zero=1", "layout.shard=3"];
    refused(&lab, &odd, &["layout.shard = 3 does not divide layout.dp = 4 x layout.cp = 1", "[1, 2, 4]"]);
    refused(&lab, &["layout.dp=2", "layout.cells=[1, 2]"], &["[1, 2]", "2 numbers", "4 data cells", "adding up to 3"]);
    refused(&lab, &["layout.dp=2", "layout.cells=[4, 0]"], &["[4, 0]", "at least 1", "[2, 2]"]);
    refused(&lab, &["layout.cells=[2, 2]"], &["layout.cells = [2, 2]", "1 numbers", "layout.dp 1"]);
    refused(&lab, &["layout.pp=2", "layout.stages=[1, 4]"], &["[1, 4]", "4 layers", "adding up to 5", "[2, 2]"]);
    refused(&lab, &["layout.pp=2", "layout.stages=[4]"], &["layout.stages = [4]", "2 numbers"]);
    refused(&lab, &["cluster.ranks_per_host=3", "layout.dp=4"], &["ranks_per_host = 3", "4 ranks", "[1, 2, 4]"]);
}

#[test]
fn optimizer_state_without_room() {
    let lab = Lab::new();
    refused(
        &lab,
        &["layout.offload_folder=\"/tmp\""],
        &["layout.offload_folder", "layout.offload = none", "to optimizer"],
    );
    refused(&lab, &["layout.offload=moments"], &["layout.offload", "none", "optimizer+activations"]);
    let before = lab.tree();
    let no_folder = ["layout.offload=optimizer", "layout.offload_folder=\"/proc/none\""];
    lab.train("out", &[], &no_folder).expect(2).says(&["/proc/none is not a folder", "layout.offload_folder"]);
    let large = ["layout.offload=optimizer", "model.ffn=4_000_000_000", "layout.threads=1"];
    lab.train("out", &[], &large).expect(2).says(&["need", "bytes, and", "are free", "layout.offload to none"]);
    same_tree(&before, &lab.tree());
}

#[test]
fn grids_that_do_not_divide() {
    let lab = Lab::new();
    refused(&lab, &["grid.tp=3"], &["grid.tp = 3 does not divide model.heads = 4", "[1, 2]"]);
    refused(&lab, &["grid.tp=4"], &["grid.tp = 4 does not divide model.kv_heads = 2", "[1, 2]"]);
    refused(&lab, &["model.kv_heads=3"], &["model.kv_heads = 3 does not divide model.heads = 4", "[1, 2, 4]"]);
    refused(&lab, &["train.seq=18"], &["2 x grid.tp = 4 does not divide train.seq = 18", "[1]"]);
    refused(
        &lab,
        &["grid.cp=3"],
        &["2 x grid.cp x grid.tp = 12 does not divide train.seq = 16", "[1, 2, 4]", "multiple of 12, such as 24"],
    );
    refused(&lab, &["grid.cp=8"], &["= 32 does not divide train.seq = 16", "train.seq 16, grid.cp 8, grid.tp 2", "32"]);
    refused(&lab, &["train.seq=15"], &["train.seq = 15", "16"]);
    refused(&lab, &["model.ffn=97"], &["grid.tp = 2 does not divide model.ffn = 97"]);
    refused(&lab, &["grid.microbatch=3"], &["grid.microbatch = 3 does not divide train.batch = 8", "[1, 2, 4, 8]"]);
    refused(&lab, &["grid.dp=3"], &["grid.dp = 3 does not divide the 8 microbatches", "[1, 2, 4, 8]", "multiple of 3"]);
    refused(&lab, &["model.head_dim=7"], &["model.head_dim = 7", "odd", "6 or 8"]);
}

#[test]
fn sizes_and_rates_out_of_range() {
    let lab = Lab::new();
    for key in ["model.hidden", "model.layers", "model.heads", "model.kv_heads", "model.ffn", "model.vocab"] {
        refused(&lab, &[&format!("{key}=0")], &[&format!("{key} = 0"), "at least 1"]);
    }
    for key in ["train.batch", "train.seq", "grid.dp", "grid.cp", "grid.tp", "grid.microbatch", "train.steps"] {
        refused(&lab, &[&format!("{key}=0")], &[&format!("{key} = 0"), &format!("set {key} to at least 1")]);
    }
    for key in
        ["layout.dp", "layout.cp", "layout.tp", "layout.pp", "layout.vpp", "layout.threads", "cluster.ranks_per_host"]
    {
        refused(&lab, &[&format!("{key}=0")], &[&format!("{key} = 0"), &format!("set {key} to at least 1")]);
    }
    refused(&lab, &["train.beta1=1.0"], &["train.beta1 = 1", "below 1", "0.9"]);
    refused(&lab, &["train.beta2=-0.1"], &["train.beta2 = -0.1", "0.95"]);
    refused(&lab, &["train.eps=0"], &["train.eps = 0", "above 0", "1e-8"]);
    refused(&lab, &["train.lr=-1"], &["train.lr = -1"]);
    refused(&lab, &["train.warmup=9"], &["train.warmup = 9", "train.steps = 4"]);
    refused(&lab, &["train.warmup=3", "train.decay=2"], &["train.warmup = 3", "train.decay = 2", "train.steps = 4"]);
    refused(&lab, &["train.clip=-1"], &["train.clip = -1"]);
    refused(&lab, &["model.norm_eps=-1"], &["norm_eps -1"]);
    refused(&lab, &["data.validation=1.5"], &["data.validation = 1.5", "below 1"]);
    refused(&lab, &["model.vocab=100"], &["model.vocab >= 257", "it is 100", "data.eod to false"]);
}

#[test]
fn numbers_too_large_to_count_with() {
    let lab = Lab::new();
    let large = i64::MAX.to_string();
    for key in ["layout.dp", "layout.tp", "layout.pp", "train.batch", "train.seq", "grid.dp", "model.vocab"] {
        refused(&lab, &[&format!("{key}={large}")], &[key, &large]);
    }
    refused(&lab, &[&format!("layout.dp={large}"), &format!("layout.pp={large}")], &["layout.dp", &large]);
    refused(&lab, &[&format!("layout.cells=[{large}, {large}, {large}]"), "layout.dp=3"], &["layout.cells", &large]);
    refused(&lab, &["train.batch=9000000000T"], &["train.batch", "9000000000T"]);
}

#[test]
fn data_that_cannot_be_trained_on() {
    let lab = Lab::new();
    let text = "data.source=text";
    lab.write("empty.txt", "");
    lab.write("short.txt", "a word");
    lab.write("nul.txt", vec![0; 4000]);
    std::fs::create_dir(lab.path("bare")).unwrap();
    refused(&lab, &[text], &["data.paths", "text files or folders"]);
    refused(&lab, &[text, "data.paths=a.txt"], &["data.paths", "\"a.txt\"", "a list of texts"]);
    refused(&lab, &[text, "data.paths=[\"no.txt\"]"], &["no.txt", "data.paths", "No such file"]);
    refused(&lab, &[text, "data.paths=[\"empty.txt\"]"], &["empty.txt", "0 bytes"]);
    refused(&lab, &[text, "data.paths=[\"nul.txt\"]"], &["nul.txt", "4000 bytes", "NUL"]);
    refused(&lab, &[text, "data.paths=[\"bare\"]"], &["bare", "0 bytes", "folder"]);
    refused(&lab, &[text, "data.paths=[\"/dev/null\"]"], &["/dev/null", "neither a file nor a folder"]);
    refused(&lab, &[text, "data.paths=[\"run.toml/x\"]"], &["run.toml/x", "Not a directory"]);
    refused(
        &lab,
        &[text, "data.paths=[\"short.txt\"]", "data.validation=0"],
        &["short.txt", "6 bytes", "16 needed", "lower train.seq"],
    );
    let both = ["data.paths=[\"run.toml\"]", "data.validation_paths=[\"run.toml\"]"];
    refused(&lab, &[text, both[0], both[1]], &["holds out all", "run.toml", "at least one"]);
}

#[test]
fn words_on_the_command_line() {
    let lab = Lab::new();
    let before = lab.tree();
    lab.train("out", &["--simd", "sse9"], &[]).expect(2).says(&["sse9", "scalar, avx2 or avx512"]);
    lab.train("out", &["--digest-every", "often"], &[]).expect(2).says(&["--digest-every", "often"]);
    lab.lockstep(&["train", "run.toml", "--resume"]).expect(2).says(&["--run-dir"]);
    let rank = lab.lockstep(&["check", "run.toml", "--program", "--rank", "7"]).expect(2);
    rank.says(&["--rank 7", "0 to 0"]);
    same_tree(&before, &lab.tree());
}

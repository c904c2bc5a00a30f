//! Every process of a run reads the same data, or gets no place in it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::process::Signal;

use crate::common::{Lab, NANO, Out, Running, same_tree, send};
use crate::tokens::{folder, megatron};

const BASE: [&str; 4] = ["train.steps=240", "train.batch=8", "layout.dp=2", "guard.stopped_timeout_ms=1000"];

/// Steps that take long enough to do something meanwhile.
const SLOWLY: [&str; 2] = ["--inject", "slow:0@3x60:6"];

/// A lab with eight documents in the folder `d`.
fn lab() -> Lab {
    let lab = Lab::new();
    fs::create_dir(lab.path("d")).unwrap();
    (0..8).for_each(|i| lab.write(&format!("d/{i}.txt"), format!("the cat {i} sat on a mat\n").repeat(40)));
    lab.write("run.toml", NANO.replace("source = \"synthetic\"", "source = \"text\"\npaths = [\"d\"]"));
    lab
}

fn add(lab: &Lab) {
    lab.write("d/1a.txt", "another text that somebody copied in\n".repeat(50));
}

/// A run of two ranks that has begun, with the processes of its ranks.
fn begun(lab: &Lab, more: &[&str]) -> (Running, Vec<u32>) {
    let mut run = lab.start_train("run", &SLOWLY, &[&BASE[..], more].concat());
    let pids = run.ranks(2);
    run.wait_for_step(3);
    (run, pids)
}

/// What the same run comes to when nobody disturbs it.
fn expected(lab: &Lab, more: &[&str]) -> String {
    lab.train("alone", &[], &[&BASE[..], more].concat()).expect(0).digest()
}

#[track_caller]
fn both_values(out: &Out) {
    out.says(&["documents 9 there, 8 in the run", "bytes ", "blake3 ", "is not of this run", "--resume"]);
}

#[test]
fn a_newcomer_that_would_read_other_data_gets_no_place_and_the_others_go_on() {
    let lab = lab();
    let want = expected(&lab, &[]);
    let (mut run, pids) = begun(&lab, &[]);
    add(&lab);
    send(pids[1], Signal::KILL);
    let line = run.wait_for(|line| line.contains("place nothing on host"));
    assert!(line.contains("documents 9 there, 8 in the run"), "{line}");
    let out = run.end().expect(0);
    assert_eq!(out.digest(), want, "{out}");
    assert!(out.stdout.contains("world 2 of 1 ranks"), "{out}");
}

#[test]
fn a_run_of_which_nobody_is_left_ends_and_goes_on_when_its_data_are_back() {
    let lab = lab();
    let more = ["checkpoint.every=2"];
    let want = expected(&lab, &more);
    let (run, pids) = begun(&lab, &more);
    add(&lab);
    pids.iter().for_each(|pid| send(*pid, Signal::KILL));
    let out = run.end().expect(7);
    both_values(&out);
    // Not before.
    lab.train("run", &["--resume"], &[&BASE[..], &more].concat()).expect(2).says(&["text hash"]);
    fs::remove_file(lab.path("d/1a.txt")).unwrap();
    let out = lab.train("run", &["--resume"], &[&BASE[..], &more].concat()).expect(0);
    assert_eq!(out.digest(), want, "{out}");
}

#[test]
fn data_that_cannot_be_read_any_more_end_no_rank_that_has_read_them() {
    let lab = lab();
    let want = expected(&lab, &[]);
    let (mut run, pids) = begun(&lab, &[]);
    fs::rename(lab.path("d"), lab.path("elsewhere")).unwrap();
    send(pids[0], Signal::KILL);
    let line = run.wait_for(|line| line.contains("place nothing on host"));
    assert!(line.contains("cannot read d"), "{line}");
    let out = run.end().expect(0);
    assert_eq!(out.digest(), want, "{out}");
}

/// A controller for `hosts` agents, and where it listens.
fn controller(lab: &Lab, hosts: &str, more: &[&str]) -> (Running, String) {
    let dir = lab.path("run").display().to_string();
    let own = ["controller", "run.toml", "--run-dir", &dir, "--hosts", hosts, "--listen", "127.0.0.1:0"];
    let sets = ["--set=layout.dp=2", "--set=layout.transport=tcp", "--set=guard.restarts_max=20"];
    let mut controller = lab.start(&[&own[..], &sets, more].concat());
    let line = controller.wait_for(|line| line.contains("agents call "));
    (controller, line.rsplit(' ').next().unwrap().to_owned())
}

/// An agent with one place whose working directory, and so whose data, are those of `lab`.
fn agent(lab: &Lab, at: &str, host: &str) -> Running {
    lab.start(&["agent", "--controller", at, "--host", host, "--ranks", "1"])
}

#[test]
fn agents_with_different_copies_are_refused_with_both_values() {
    let (here, there) = (lab(), lab());
    // Of the same number of documents and bytes.
    there.write("d/3.txt", "the dog 3 sat on a mat\n".repeat(40));
    let (run, at) = controller(&here, "2", &[]);
    let agents = [agent(&here, &at, "h1"), agent(&there, &at, "h2")];
    let out = run.end().expect(7);
    out.says(&["on host h2 is not of this run", "blake3 ", " there, ", " in the run"]);
    assert!(!out.stderr.contains("documents 8 there"), "what is alike is not told: {out}");
    assert!(!here.path("run/checkpoints").join("step-00000004").exists(), "{out}");
    for agent in agents {
        assert!(agent.end().expect(7).stdout.contains("is not of this run"));
    }
}

#[test]
fn a_host_that_comes_with_other_data_into_a_run_at_work_gets_no_rank() {
    let (here, there) = (lab(), lab());
    let sets = ["--set=train.steps=240", "--set=train.batch=8"];
    let want = here.train("alone", &[], &["train.steps=240", "train.batch=8"]).expect(0).digest();
    add(&there);
    let (mut run, at) = controller(&here, "2", &[&SLOWLY[..], &sets].concat());
    let (stays, goes) = (agent(&here, &at, "h1"), agent(&here, &at, "h2"));
    run.wait_for_step(3);
    goes.signal(Signal::KILL);
    drop(goes);
    run.wait_for(|line| line.contains("host h2 is gone"));
    let comes = agent(&there, &at, "h2");
    let line = run.wait_for(|line| line.contains("place nothing on host h2"));
    assert!(line.contains("documents 9 there, 8 in the run"), "{line}");
    let out = run.end().expect(0);
    assert_eq!(out.digest(), want, "{out}");
    drop((stays.end().expect(0), comes.end().expect(0)));
}

/// A run on the token folder `ids` that holds nothing out.
fn on_tokens(lab: &Lab) -> Vec<&'static str> {
    let documents: Vec<Vec<u16>> = (0..40).map(|d| (0..50).map(|i| (d * 7 + i * i) % 250).collect()).collect();
    folder(lab, "ids", &documents, 257);
    vec!["data.source=tokens", "data.paths=[\"ids\"]", "data.eod=false", "data.validation=0"]
}

#[test]
fn a_token_folder_that_was_overwritten_is_noticed_at_resume() {
    let lab = Lab::new();
    let sets = on_tokens(&lab);
    let short = [&sets[..], &["checkpoint.every=1"]].concat();
    lab.train("run", &[], &short).expect(0);
    let longer = [&short[..], &["train.steps=4"]].concat();
    fs::remove_dir_all(lab.path("run/checkpoints/step-00000004")).unwrap();
    let before = lab.tree();
    let refused = |words: &[&str]| {
        lab.train("run", &["--resume"], &longer).expect(2).says(words);
        lab.train("new", &[], &longer).code()
    };
    let write =
        |path: &Path, at: u64| fs::File::options().write(true).open(path).unwrap().write_all_at(&[77], at).unwrap();
    write(&lab.path("ids/tokens.bin"), 100);
    assert_eq!(refused(&["ids/tokens.bin", "header.json says", "blake3"]), Some(2));
    // The same number of other tokens behind a header of their own: only the checkpoint knows.
    let documents: Vec<Vec<u16>> = (0..40).map(|d| (0..50).map(|i| (d * 9 + i * i) % 250).collect()).collect();
    fs::remove_dir_all(lab.path("ids")).unwrap();
    folder(&lab, "ids", &documents, 257);
    lab.train("run", &["--resume"], &longer).expect(2).says(&[
        "belongs to another run",
        "text hash",
        " there, ",
        " here",
    ]);
    fs::remove_dir_all(lab.path("ids")).unwrap();
    on_tokens(&lab);
    same_tree(&before, &lab.tree());
    lab.train("run", &["--resume"], &longer).expect(0);
}

#[test]
fn tokens_that_are_written_over_under_a_run_end_it_before_they_are_applied() {
    let lab = Lab::new();
    let more = [&on_tokens(&lab)[..], &["checkpoint.every=2", "checkpoint.background=false"]].concat();
    let want = expected(&lab, &more);
    for threads in [false, true] {
        let dir = if threads { "threads" } else { "run" };
        let transport = if threads { "layout.transport=threads" } else { "layout.transport=shm" };
        let sets = [&BASE[..], &more, &[transport]].concat();
        let inject = if threads { &[][..] } else { &SLOWLY[..] };
        let mut run = lab.start_train(dir, inject, &sets);
        run.wait_for_step(3);
        let file = fs::File::options().write(true).read(true).open(lab.path("ids/tokens.bin")).unwrap();
        let mut old = vec![0; 4000];
        file.read_exact_at(&mut old, 0).unwrap();
        file.write_all_at(&vec![9; 4000], 0).unwrap();
        run.end().expect(7).says(&["ids/tokens.bin was written to", "--resume"]);
        file.write_all_at(&old, 0).unwrap();
        let out = lab.train(dir, &["--resume"], &sets).expect(0);
        assert_eq!(out.digest(), want, "{out}");
    }
}

#[test]
fn token_files_that_are_replaced_under_a_run_change_nothing_in_it() {
    let lab = Lab::new();
    let more = on_tokens(&lab);
    let want = expected(&lab, &more);
    let (mut run, pids) = begun(&lab, &more);
    fs::rename(lab.path("ids"), lab.path("old")).unwrap();
    let documents: Vec<Vec<u16>> = (0..40).map(|d| (0..50).map(|i| (d * 9 + i * i) % 250).collect()).collect();
    folder(&lab, "ids", &documents, 257);
    send(pids[0], Signal::KILL);
    let line = run.wait_for(|line| line.contains("place nothing on host"));
    assert!(line.contains("blake3") && !line.contains("documents"), "{line}");
    assert_eq!(run.end().expect(0).digest(), want);
}

#[test]
fn ids_that_the_model_does_not_have_are_refused_before_anything_is_written() {
    let lab = Lab::new();
    let with = |id: u16| (0..4).map(|d| (0..50).map(|i| if (d, i) == (2, 7) { id } else { i }).collect()).collect();
    let documents: Vec<Vec<u16>> = with(60_000);
    folder(&lab, "ids", &documents, 257);
    megatron(&lab, "mega", 8, &documents);
    megatron(&lab, "signed", 3, &with(0xffff));
    let before = lab.tree();
    let refused = |path: &str, words: &[&str]| {
        let paths = format!("data.paths=[\"{path}\"]");
        let sets = ["data.source=tokens", &paths, "data.eod=false", "data.validation=0"];
        let out = lab.train("run", &[], &sets).expect(2);
        out.says(&["token 107 (token 7 of document 2)"]);
        out.says(words);
    };
    refused("ids", &["ids/tokens.bin", "id 60000", "by header.json ids are below 257", "tokenize again"]);
    refused("mega", &["mega.bin", "id 60000", "by model.vocab ids are below 257", "at least 60001"]);
    refused("signed", &["signed.bin", "id -1 ", "padding"]);
    same_tree(&before, &lab.tree());
}

#[test]
fn data_without_a_target_are_neither_trained_on_nor_scored() {
    let lab = Lab::new();
    megatron(&lab, "ones", 8, &vec![vec![7]; 400]);
    // The first held-out sequences have nothing to predict, the last one has.
    let mut held = vec![vec![7]; 64];
    held.push(vec![1, 2, 3]);
    megatron(&lab, "held", 8, &held);
    megatron(&lab, "good", 8, &vec![(0..50).collect(); 8]);
    lab.train("run", &[], &[]).expect(0);
    lab.lockstep(&["ckpt", "export", "run", "--hf", "hf"]).expect(0);
    lab.write("masked.json", r#"{"input_ids": [[1, 2, 3, 4]], "labels": [[-100, -100, -100, -100]]}"#);
    let before = lab.tree();
    let tokens = ["data.source=tokens", "data.eod=false", "data.validation=0"];
    let train = |more: &[&str]| lab.train("none", &[], &[&tokens[..], more].concat());
    train(&["data.paths=[\"ones\"]"]).expect(2).says(&["nothing to train on in tokens of ones", "data.masks"]);
    let held = ["data.paths=[\"good\"]", "data.validation_paths=[\"held\"]", "train.eval_sequences=2"];
    train(&held).expect(2).says(&["validation would score nothing", "first 2 of 5", "train.eval_sequences"]);
    train(&["data.paths=[\"good\"]", "data.validation_paths=[\"ones\"]"]).expect(2).says(&["nothing to validate on"]);
    for args in [&["--batch", "masked.json"][..], &["--data", "ones", "--seq", "8"]] {
        for json in [&[][..], &["--json"]] {
            let out = lab.lockstep(&[&["eval", "--model", "hf"], args, json].concat()).expect(2);
            let told = if json.is_empty() { &out.stderr } else { &out.stdout };
            assert!(!out.stdout.contains("perplexity") && told.contains("nothing to"), "{out}");
        }
    }
    same_tree(&before, &lab.tree());
}

#[test]
fn a_step_without_a_target_has_no_loss_and_says_so() {
    let lab = Lab::new();
    let mut documents = vec![vec![7]; 800];
    documents.push(vec![1, 2]);
    megatron(&lab, "few", 8, &documents);
    let sets = ["data.source=tokens", "data.paths=[\"few\"]", "data.eod=false", "data.validation=0", "train.batch=8"];
    let out = lab.train("run", &[], &sets).expect(0);
    let (with, without) = ("| loss 5.", "| loss none (no token of its batch has a target) |");
    let steps: Vec<_> = out.stdout.lines().filter(|line| line.starts_with("step ")).collect();
    assert!(steps.len() == 4 && steps.iter().all(|line| line.contains(with) != line.contains(without)), "{out}");
    assert!(steps.iter().any(|line| line.contains(without)), "{out}");
    let json = lab.train("json", &["--json"], &sets).expect(0);
    let of = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
    let steps: Vec<_> = json.stdout.lines().map(of).filter(|event| event["kind"] == "step").collect();
    let none = |step: &&serde_json::Value| step["targets"] == 0;
    assert!(steps.iter().any(|step| none(&step)) && steps.iter().all(|step| step["targets"].is_u64()), "{steps:?}");
}

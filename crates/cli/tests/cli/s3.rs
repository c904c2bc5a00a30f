//! `checkpoint.store = "s3://..."`.

use crate::common::Lab;

const STORE: &str = "checkpoint.store=s3://bucket/runs/one";

#[cfg(not(feature = "s3"))]
#[test]
fn without_the_feature_it_is_refused_before_anything_is_written() {
    let lab = Lab::new();
    let before = lab.tree();
    lab.train("out", &[], &["train.steps=2", STORE]).expect(2).says(&[
        "s3://bucket/runs/one",
        "--features s3",
        "file://",
    ]);
    crate::common::same_tree(&before, &lab.tree());
}

#[cfg(feature = "s3")]
#[path = "../../../checkpoint/tests/fake_s3/mod.rs"]
mod fake_s3;

/// A run whose disk is lost goes on from the bucket to the same digest.
#[cfg(feature = "s3")]
#[test]
fn a_run_goes_on_from_a_bucket() {
    let (lab, server) = (Lab::new(), fake_s3::Server::start());
    let settings = server.settings();
    let sets = ["checkpoint.every=3", "layout.dp=2", STORE];
    let train_in = |dir: &str, sets: &[&str], args: &[&str], settings: &[(String, String)]| {
        let mut command = lab.command(&[&["train", "run.toml", "--run-dir", dir], args, &["--set"], sets].concat());
        command.envs(settings.iter().cloned());
        lab.start_command(command).end()
    };
    let train = |sets: &[&str], args: &[&str]| train_in("out", sets, args, &settings);
    // The server is ill at first: requests are tried again.
    server.bucket.lock().unwrap().sick = 2;
    train(&[&sets[..], &["train.steps=6"]].concat(), &[]).expect(0);
    assert!(server.bucket.lock().unwrap().objects.contains_key("bucket/runs/one/step-00000006/manifest.json"));
    std::fs::remove_dir_all(lab.path("out")).unwrap();
    train(&[&sets[..], &["train.steps=6"]].concat(), &[]).expect(2).says(&[
        "s3://bucket/runs/one",
        "holds checkpoints already",
        "--resume",
    ]);
    let resumed = train(&[&sets[..], &["train.steps=6"]].concat(), &["--resume"]).expect(0);
    assert!(
        resumed.stdout.contains("going on after step 6 of ") && resumed.stdout.contains(" in the store"),
        "{resumed}"
    );
    let undisturbed = Lab::new().train("out", &[], &["train.steps=6"]).expect(0);
    assert_eq!(resumed.digest(), undisturbed.digest());
    // Away for good.
    let gone = [("AWS_ENDPOINT".to_owned(), "http://127.0.0.1:9".to_owned())];
    let away: Vec<_> = settings.iter().filter(|(name, _)| name != "AWS_ENDPOINT").cloned().chain(gone).collect();
    train_in("other", &sets, &["--resume"], &away).expect(2).says(&["checkpoint.store", "s3://bucket/runs/one"]);
}

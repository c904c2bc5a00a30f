//! Early stop, the best marker, samples and exclusions from decay, under different layouts.

mod common;

use common::{train, train_in};
use events::Event;
use train::rank::Ended;

const SPLIT: [&str; 4] = ["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1"];

fn with<'a>(sets: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [sets, more].concat()
}

/// Diverges enough that validations get worse, without overflowing.
const WORSE: [&str; 6] = [
    "train.steps=12",
    "train.lr=1.0",
    "train.schedule=constant",
    "train.eval_every=1",
    "train.patience=3",
    "train.clip=0",
];

fn validations(events: &[Event]) -> Vec<(u64, f64)> {
    let of = |e: &Event| match e {
        Event::Validation { step, set: None, loss, .. } => Some((*step, *loss)),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn early_stop_is_the_same_under_every_layout_and_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let one = train_in(
        folder.path(),
        &with(&WORSE, &["checkpoint.every=1", "checkpoint.keep=20", "checkpoint.background=false"]),
        None,
    );
    let Ended::Exhausted(last) = one.ended else { panic!("it ended as {:?}", one.ended) };
    assert!(last < 12, "{:?}", validations(&one.events));
    let split = train(&with(&WORSE, &SPLIT));
    assert_eq!((split.digest(), &split.ended), (one.digest(), &one.ended));

    let middle = checkpoint::step_dir(folder.path(), last - 1);
    let other = tempfile::tempdir().unwrap();
    let resumed = train_in(other.path(), &with(&WORSE, &["layout.pp=2"]), Some(&middle));
    assert_eq!((resumed.digest(), &resumed.ended), (one.digest(), &one.ended));
}

#[test]
fn the_best_checkpoint_is_marked_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["train.patience=0", "checkpoint.best=true", "checkpoint.keep=1", "checkpoint.background=false"];
    let told = train_in(folder.path(), &with(&WORSE, &sets), None);
    let seen = validations(&told.events);
    let best = seen.iter().copied().reduce(|a, b| if b.1 < a.1 { b } else { a }).unwrap();
    let marker: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("best.json")).unwrap()).unwrap();
    assert_eq!((marker["step"].as_u64(), marker["validation_loss"].as_f64()), (Some(best.0), Some(best.1)));
    let kept: Vec<u64> = checkpoint::list(folder.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(kept, [best.0, 12], "the best and the newest");
}

#[test]
fn further_sets_are_validated_and_decide_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("held.txt");
    std::fs::write(&path, "A text that no model here has seen. ".repeat(40)).unwrap();
    let sets = format!("data.validation_sets=[\"other={}\"]", path.display());
    let of = |told: &common::Told| {
        told.events.iter().find_map(|e| match e {
            Event::Validation { set: Some(name), loss, best, .. } => Some((name.clone(), *loss, *best)),
            _ => None,
        })
    };
    let one = train(&[&sets]);
    let (name, loss, best) = of(&one).expect("a second validation");
    assert!(name == "other" && loss > 0.0 && !best);
    assert_eq!(of(&train(&with(&[&sets], &SPLIT))), Some((name, loss, best)));
    assert_eq!(one.digest(), train(&[]).digest(), "what is held out beside does not touch the run");
}

#[test]
fn samples_do_not_depend_on_the_layout() {
    let sets = ["train.sample_every=3", "train.sample_tokens=8"];
    let text = |told: common::Told| {
        told.events.iter().find_map(|e| match e {
            Event::Sample { text, .. } => Some(text.clone()),
            _ => None,
        })
    };
    let one = text(train(&sets)).expect("a sample");
    assert!(one.starts_with("The ") && one.len() > 4, "{one}");
    assert_eq!(text(train(&with(&sets, &SPLIT))), Some(one));
}

#[test]
fn exclusion_from_decay_changes_the_run_and_no_pattern_changes_nothing() {
    let base = train(&[]);
    assert_ne!(train(&["train.no_decay=[\"embed_tokens\"]"]).digest(), base.digest());
    assert_eq!(train(&["train.no_decay=[\"no such tensor\"]"]).digest(), base.digest());
}

//! Copies in the slower tier: whole or none, tried again, and the last good one stays.

mod common;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use checkpoint::store::{Store, Uploader};
use checkpoint::{Checkpoint, CheckpointError, MANIFEST, Retention, list, newest, retain, step_dir};
use common::State;

fn flip(folder: &Path) {
    let path = folder.join(&Checkpoint::open(folder).unwrap().files()[0].name);
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 4;
    fs::write(path, bytes).unwrap();
}

fn steps(root: &Path) -> Vec<u64> {
    list(root).unwrap().into_iter().map(|(step, _)| step).collect()
}

fn within(limit: Duration, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < deadline, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_copy_is_whole_and_damage_does_not_spread() {
    let (state, root, away) = (State::new(2, 1), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let from = Checkpoint::open(&state.save(root.path(), 3)).unwrap();
    let store = Store::folder(&away.path().join("deep/er"));
    assert!(store.put(&from).unwrap() > 0);
    let copy = newest(store.root().unwrap()).unwrap().checkpoint.unwrap();
    assert!(copy.verify().good());
    assert_eq!(copy.meta(), from.meta());
    assert_eq!(store.put(&from).unwrap(), 0, "the same is not copied again");
    // The copy rots: it is set aside, and made again.
    flip(copy.path());
    assert!(store.put(&from).unwrap() > 0);
    assert!(newest(store.root().unwrap()).unwrap().checkpoint.unwrap().verify().good());
    assert!(copy.path().with_extension("damaged").join(MANIFEST).exists());
    // The original rots: the good copy is not touched.
    flip(from.path());
    assert!(matches!(store.put(&from).unwrap_err(), CheckpointError::Corrupt { .. }));
    assert!(newest(store.root().unwrap()).unwrap().checkpoint.unwrap().verify().good());
}

#[test]
fn what_is_not_trusted_any_more_is_none_and_is_kept() {
    let (state, root, away) = (State::new(2, 1), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = Store::folder(away.path());
    for step in [2, 4, 6] {
        store.put(&Checkpoint::open(&state.save(root.path(), step)).unwrap()).unwrap();
    }
    assert_eq!(store.distrust(3).unwrap(), [4, 6]);
    assert_eq!(store.steps().unwrap(), [2]);
    assert!(step_dir(away.path(), 6).with_extension("damaged").join(MANIFEST).exists());
    assert_eq!(store.distrust(3).unwrap(), [0; 0]);
}

#[test]
fn a_store_that_is_away_is_tried_again_while_newer_ones_come() {
    let (state, root, away) = (State::new(1, 1), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // A file where the folder should be.
    let place = away.path().join("store");
    fs::write(&place, "").unwrap();
    let retention = Retention { keep: 2, ..Retention::default() };
    let uploader = Uploader::start(root.path(), Store::folder(&place), retention, || ()).unwrap();
    state.save(root.path(), 1);
    uploader.push(1, Vec::new());
    let mut words = Vec::new();
    within(Duration::from_secs(20), || {
        words.extend(uploader.words());
        words.iter().any(|word: &String| word.contains("next try in 1 s"))
    });
    assert_eq!(uploader.pending(), [1], "what is not copied must stay");
    assert!(!uploader.wait(Duration::from_millis(20)));
    fs::remove_file(&place).unwrap();
    for step in 2..=4 {
        state.save(root.path(), step);
        uploader.push(step, Vec::new());
    }
    assert!(uploader.wait(Duration::from_secs(30)));
    assert!(uploader.pending().is_empty());
    assert_eq!(steps(&place), [3, 4]);
    assert!(newest(&place).unwrap().checkpoint.unwrap().verify().good());
    let words = uploader.words();
    assert!(words.last().unwrap().starts_with("checkpoint of step 4 | "), "{words:?}");
}

#[test]
fn the_last_good_one_is_never_removed() {
    let (state, root) = (State::new(1, 1), tempfile::tempdir().unwrap());
    for step in 1..=6 {
        state.save(root.path(), step);
    }
    let keep = |keep| Retention { keep, keep_every: 4, also: vec![2] };
    for step in [5, 6] {
        flip(&step_dir(root.path(), step));
    }
    // 5 and 6 open and are rotten: 4 is the newest good one, kept twice over.
    retain(root.path(), &keep(2)).unwrap();
    assert_eq!(steps(root.path()), [2, 4, 5, 6]);
    flip(&step_dir(root.path(), 4));
    retain(root.path(), &Retention { keep: 1, ..Retention::default() }).unwrap();
    assert_eq!(steps(root.path()), [2, 6], "2 is the only good one");
    assert!(Checkpoint::open(&step_dir(root.path(), 2)).unwrap().verify().good());
}

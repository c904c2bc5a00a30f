//! Writers that do not talk: a checkpoint comes of it when all have left their part, and of nothing less.

mod common;

use std::fs;
use std::time::{Duration, Instant};

use checkpoint::{Attempt, Checkpoint, CheckpointError, MANIFEST, Snapshot, list, newest, step_dir};
use common::{NoSync, Rng, State};

fn attempt(root: &std::path::Path, step: u64, token: u64) -> Attempt {
    Attempt { root: root.into(), step, token, writers: 3 }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

#[test]
fn three_writers_and_a_committer_make_the_same_checkpoint_as_one() {
    let (state, mut rng) = (State::new(2, 5), Rng(6));
    let root = tempfile::tempdir().unwrap();
    let attempt = attempt(root.path(), 4, 9);
    let dealt = state.deal(3, &mut rng);
    std::thread::scope(|scope| {
        for (writer, pieces) in dealt.iter().enumerate() {
            let mut snapshot = Snapshot::default();
            snapshot.take(pieces);
            let (attempt, state) = (&attempt, &state);
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(10 * (2 - writer as u64)));
                attempt.write_to(&NoSync, writer, &state.tensors, state.tp, &snapshot.pieces()).unwrap();
            });
        }
        let files = attempt.collect(Instant::now() + Duration::from_secs(20), &|| false).unwrap();
        let folder = attempt.commit_to(&NoSync, &state.tensors, &state.meta(4), files).unwrap();
        assert_eq!(folder, step_dir(root.path(), 4));
    });
    let found = Checkpoint::open(&step_dir(root.path(), 4)).unwrap();
    assert!(found.verify().good());
    let other = tempfile::tempdir().unwrap();
    let whole = Checkpoint::open(&state.save(other.path(), 4)).unwrap();
    assert_eq!(found.meta().digest, whole.meta().digest);
    // Nothing else is left, in the root or in the folder.
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    assert_eq!(fs::read_dir(found.path()).unwrap().count(), found.files().len() + 1);
}

#[test]
fn a_part_that_does_not_come_leaves_no_checkpoint_and_the_older_one() {
    let state = State::new(1, 5);
    let root = tempfile::tempdir().unwrap();
    state.save(root.path(), 2);
    let first = attempt(root.path(), 4, 1);
    let dealt = state.deal(3, &mut Rng(2));
    for writer in [0, 2] {
        first.write_to(&NoSync, writer, &state.tensors, state.tp, &dealt[writer]).unwrap();
    }
    let error = first.collect(soon(), &|| false).unwrap_err();
    assert!(error.contains("the part of rank 1 of 3 did not come"), "{error}");
    assert!(first.collect(Instant::now() + Duration::from_secs(60), &|| true).is_err(), "given up is not waited for");
    assert_eq!(newest(root.path()).unwrap().checkpoint.unwrap().meta().step, 2);
    assert_eq!(list(root.path()).unwrap().len(), 1);
    // The next try is not touched by what is left of this one, and takes it away.
    let second = attempt(root.path(), 4, 2);
    second.sweep();
    for (writer, pieces) in dealt.iter().enumerate() {
        second.write_to(&NoSync, writer, &state.tensors, state.tp, pieces).unwrap();
    }
    // A writer of the world that is gone comes late.
    first.write_to(&NoSync, 1, &state.tensors, state.tp, &dealt[0]).unwrap();
    let files = second.collect(soon(), &|| false).unwrap();
    second.commit_to(&NoSync, &state.tensors, &state.meta(4), files).unwrap();
    assert!(newest(root.path()).unwrap().checkpoint.unwrap().verify().good());
    attempt(root.path(), 6, 3).sweep();
    fs::create_dir(root.path().join("writing-mine")).unwrap();
    attempt(root.path(), 6, 3).sweep();
    let mut names: Vec<_> = fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["step-00000002", "step-00000004", "writing-mine"]);
}

#[test]
fn a_step_that_has_a_checkpoint_is_not_written_again() {
    let state = State::new(1, 5);
    let root = tempfile::tempdir().unwrap();
    let folder = state.save(root.path(), 4);
    let before = fs::read(folder.join(MANIFEST)).unwrap();
    let attempt = Attempt { writers: 1, ..attempt(root.path(), 4, 1) };
    let error = attempt.write_to(&NoSync, 0, &state.tensors, state.tp, &state.pieces()).unwrap_err();
    assert!(matches!(error, CheckpointError::Exists { step: 4, .. }), "{error}");
    let error = attempt.collect(soon(), &|| false).unwrap_err();
    assert!(error.contains("already has a checkpoint"), "{error}");
    assert_eq!(fs::read(folder.join(MANIFEST)).unwrap(), before);
}

#[test]
fn damaged_words_and_missing_files_are_no_checkpoint() {
    let state = State::new(1, 5);
    let root = tempfile::tempdir().unwrap();
    let attempt = Attempt { writers: 1, ..attempt(root.path(), 4, 1) };
    attempt.write_to(&NoSync, 0, &state.tensors, state.tp, &state.pieces()).unwrap();
    let folder = step_dir(&root.path().join("writing-0000000000000001"), 4);
    let word = folder.join("part-00000-of-00001.json");
    let good = fs::read(&word).unwrap();
    for (bytes, says) in [(&good[..good.len() / 2], "unclear"), (b"", "no room"), (b"[1]", "unclear")] {
        fs::write(&word, bytes).unwrap();
        let error = attempt.collect(soon(), &|| false).unwrap_err();
        assert!(error.contains(says) && error.contains("rank 0"), "{error}");
    }
    fs::write(&word, &good).unwrap();
    let files = attempt.collect(soon(), &|| false).unwrap();
    let lost = files[1].name.clone();
    fs::remove_file(folder.join(&lost)).unwrap();
    let error = attempt.commit_to(&NoSync, &state.tensors, &state.meta(4), files).unwrap_err();
    assert!(error.to_string().contains(&lost), "{error}");
    assert!(list(root.path()).unwrap().is_empty());
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "the space is given back");
}

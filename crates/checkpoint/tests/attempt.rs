//! Writers that do not talk: a checkpoint comes of it when all have left their part, and of nothing less.

mod common;

use std::fs;
use std::time::{Duration, Instant};

use checkpoint::{
    Attempt, Checkpoint, CheckpointError, MANIFEST, Meta, Snapshot, Timeline, go_back, list, newest, step_dir,
};
use common::{NoSync, Rng, State};

fn attempt(root: &std::path::Path, step: u64, token: u64) -> Attempt {
    Attempt { root: root.into(), step, token, writers: 3, timeline: Timeline::of(root) }
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
        assert_eq!((folder.path, folder.aside), (step_dir(root.path(), 4), None));
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

/// All that one writer does.
fn whole(attempt: &Attempt, state: &State) -> Result<checkpoint::Committed, CheckpointError> {
    attempt.write_to(&NoSync, 0, &state.tensors, state.tp, &state.pieces()).unwrap();
    let files = attempt.collect(soon(), &|| false).unwrap();
    attempt.commit_to(&NoSync, &state.tensors, &state.meta(attempt.step), files)
}

#[test]
fn a_checkpoint_in_the_place_of_another_one_stays_if_it_is_the_same_and_else_is_set_aside() {
    let (state, other) = (State::new(1, 5), State::new(1, 6));
    let root = tempfile::tempdir().unwrap();
    let one = |token| Attempt { writers: 1, ..attempt(root.path(), 4, token) };
    let folder = whole(&one(1), &state).unwrap().path;
    let before = fs::metadata(folder.join(MANIFEST)).unwrap().modified().unwrap();
    assert_eq!(whole(&one(2), &state).unwrap().aside, None);
    assert_eq!(fs::metadata(folder.join(MANIFEST)).unwrap().modified().unwrap(), before);
    let aside = whole(&one(3), &other).unwrap().aside.unwrap();
    assert!(Checkpoint::open(&aside).unwrap().verify().good());
    let digest = |root: &std::path::Path| Checkpoint::open(&step_dir(root, 4)).unwrap().meta().digest.clone();
    let wanted = tempfile::tempdir().unwrap();
    other.save(wanted.path(), 4);
    assert_eq!(digest(root.path()), digest(wanted.path()));
    // One that is the same, but damaged, is no reason to stay.
    let file = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).find(|p| !p.ends_with(MANIFEST)).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    assert!(whole(&one(4), &other).unwrap().aside.is_some());
    assert!(Checkpoint::open(&folder).unwrap().verify().good());
}

#[test]
fn the_same_state_with_another_past_is_another_checkpoint() {
    let state = State::new(1, 5);
    let root = tempfile::tempdir().unwrap();
    let one = |token| Attempt { writers: 1, ..attempt(root.path(), 4, token) };
    let commit = |token, meta: Meta| {
        let attempt = one(token);
        attempt.write_to(&NoSync, 0, &state.tensors, state.tp, &state.pieces()).unwrap();
        attempt.commit_to(&NoSync, &state.tensors, &meta, attempt.collect(soon(), &|| false).unwrap()).unwrap().aside
    };
    assert_eq!(commit(1, Meta { validations: None, ..state.meta(4) }), None);
    assert!(commit(2, state.meta(4)).is_some());
    assert_eq!(commit(3, state.meta(4)), None);
    let definition = state.meta(4).definition + "skip = [\"3+1\"]\n";
    assert!(commit(4, Meta { definition, ..state.meta(4) }).is_some());
}

#[test]
fn what_is_written_of_a_timeline_that_is_no_more_becomes_no_checkpoint() {
    let state = State::new(1, 5);
    let root = tempfile::tempdir().unwrap();
    let one = |step, token| Attempt { writers: 1, ..attempt(root.path(), step, token) };
    let (early, late, never) = (one(2, 1), one(4, 2), one(6, 3));
    whole(&early, &state).unwrap();
    whole(&late, &state).unwrap();
    never.write_to(&NoSync, 0, &state.tensors, state.tp, &state.pieces()).unwrap();
    let files = never.collect(soon(), &|| false).unwrap();
    assert_eq!(go_back(root.path(), 2).unwrap(), [4]);
    let error = never.commit_to(&NoSync, &state.tensors, &state.meta(6), files).unwrap_err();
    assert!(matches!(error, CheckpointError::WentBack { step: 6 }), "{error}");
    assert!(matches!(whole(&one_of(&early, 4, 5), &state), Err(CheckpointError::WentBack { step: 4 })));
    let steps = || list(root.path()).unwrap().into_iter().map(|(step, _)| step).collect::<Vec<_>>();
    assert_eq!(steps(), [2]);
    // The new one writes the same steps.
    whole(&one(4, 6), &state).unwrap();
    assert_eq!(steps(), [2, 4]);
    assert_eq!(go_back(root.path(), 4).unwrap(), [0; 0]);
}

/// Another attempt of the same timeline.
fn one_of(attempt: &Attempt, step: u64, token: u64) -> Attempt {
    Attempt { step, token, ..attempt.clone() }
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

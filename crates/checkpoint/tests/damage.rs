//! Whatever happens to the bytes on disk, the answer is a named error or the right values.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, CheckpointError, MANIFEST, newest};
use common::{Rng, State, bits};
use proptest::prelude::*;

/// A root with complete checkpoints of steps 1 and 2; returns the folder of step 2.
fn two(state: &State, root: &Path) -> PathBuf {
    state.save(root, 1);
    state.save(root, 2)
}

fn flip(path: &Path, at: usize, bit: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1 << bit;
    fs::write(path, bytes).unwrap();
}

/// Reads everything; the values must be right where there is no error.
fn read_all(checkpoint: &Checkpoint, state: &State) -> Vec<CheckpointError> {
    let mut errors = Vec::new();
    for (tensor, kind, slice, values) in &state.slices {
        let mut out = vec![0.0; values.len()];
        match checkpoint.read(*tensor, *kind, *slice, 0..values.len(), &mut out) {
            Ok(()) => assert_eq!(bits(&out), bits(values)),
            Err(error) => errors.push(error),
        }
    }
    errors
}

fn tiny() -> State {
    let model = spec::Model { hidden: 8, layers: 1, ffn: 16, vocab: 64, head_dim: 4, ..common::model() };
    State::of(&model, 1, 3)
}

/// The manifest cut off at every byte: a named error, and the older checkpoint is used.
#[test]
fn a_torn_manifest_is_never_taken() {
    let state = tiny();
    let root = tempfile::tempdir().unwrap();
    let folder = two(&state, root.path());
    let manifest = folder.join(MANIFEST);
    let whole = fs::read(&manifest).unwrap();
    let file = fs::File::options().write(true).open(&manifest).unwrap();
    for len in (0..whole.len()).rev() {
        file.set_len(len as u64).unwrap();
        let error = Checkpoint::open(&folder).unwrap_err();
        assert!(matches!(error, CheckpointError::Manifest { older: Some(1), .. }), "cut at {len}: {error}");
    }
    let found = newest(root.path()).unwrap();
    assert_eq!(found.checkpoint.unwrap().meta().step, 1);
    assert_eq!(found.skipped.len(), 1);
    fs::write(&manifest, &whole).unwrap();
    assert_eq!(newest(root.path()).unwrap().checkpoint.unwrap().meta().step, 2);
    fs::remove_file(&manifest).unwrap();
    assert!(matches!(Checkpoint::open(&folder).unwrap_err(), CheckpointError::NotACheckpoint { .. }));
}

/// One bit of the manifest flipped, all over it (every byte: a test of the parser).
#[test]
fn a_flipped_bit_in_the_manifest_is_found() {
    let state = tiny();
    let root = tempfile::tempdir().unwrap();
    let folder = two(&state, root.path());
    let manifest = folder.join(MANIFEST);
    let whole = fs::read(&manifest).unwrap();
    for at in (0..whole.len()).step_by(13) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&manifest, &bytes).unwrap();
        let error = Checkpoint::open(&folder).unwrap_err();
        assert!(matches!(error, CheckpointError::Manifest { older: Some(1), .. }), "byte {at}: {error}");
    }
}

#[test]
fn a_truncated_or_missing_shard_is_named() {
    let state = State::new(2, 1);
    let root = tempfile::tempdir().unwrap();
    let folder = two(&state, root.path());
    let name = Checkpoint::open(&folder).unwrap().files()[2].name.clone();
    let path = folder.join(&name);
    let bytes = fs::read(&path).unwrap();
    for len in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        let error = Checkpoint::open(&folder).unwrap_err();
        assert!(matches!(&error, CheckpointError::File { older: Some(1), .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&name) && text.contains(&format!("{len} bytes")) && text.contains("step 1"), "{text}");
    }
    fs::remove_file(&path).unwrap();
    let error = Checkpoint::open(&folder).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("cannot be found"), "{error}");
    assert_eq!(newest(root.path()).unwrap().checkpoint.unwrap().meta().step, 1);
}

/// A shard that shrinks or goes after the checkpoint was opened.
#[test]
fn a_shard_lost_while_open_is_named() {
    let state = State::new(1, 2);
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&two(&state, root.path())).unwrap();
    let name = checkpoint.files()[1].name.clone();
    let path = checkpoint.path().join(&name);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
    let errors = read_all(&checkpoint, &state);
    assert!(!errors.is_empty() && errors.iter().all(|error| error.to_string().contains(&name)), "{errors:?}");
    fs::remove_file(&path).unwrap();
    assert!(read_all(&checkpoint, &state).iter().all(|error| error.to_string().contains(&name)));
    assert!(!checkpoint.verify().good());
}

/// A flipped bit anywhere in the data: reading names just the piece it is in, and so does verify.
#[test]
fn a_flipped_bit_in_the_data_names_the_tensor() {
    let state = State::new(2, 3);
    let root = tempfile::tempdir().unwrap();
    let folder = two(&state, root.path());
    let mut rng = Rng(4);
    for _ in 0..24 {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let file = &checkpoint.files()[rng.below(checkpoint.files().len())];
        let piece = &file.pieces[rng.below(file.pieces.len())];
        let at = piece.offset as usize + rng.below(piece.elements.len() * 4);
        let bit = rng.below(8);
        flip(&folder.join(&file.name), at, bit);
        let mut errors = read_all(&checkpoint, &state);
        assert_eq!(errors.len(), 1);
        let report = checkpoint.verify();
        assert_eq!((report.problems.len(), report.digest), (1, None));
        let bad: Vec<_> = report.tensors.iter().filter(|tensor| tensor.bad_chunks > 0).collect();
        assert_eq!((bad.len(), &bad[0].name, bad[0].kind, bad[0].bad_chunks), (1, &piece.tensor, piece.kind, 1));
        errors.extend(report.problems);
        for error in errors {
            let CheckpointError::Corrupt { place, older, file: path } = &error else { panic!("{error}") };
            assert_eq!((&place.tensor, place.kind, place.slice), (&piece.tensor, piece.kind, piece.slice));
            assert_eq!(place.chunk, (at - piece.offset as usize) / 4 / checkpoint::STATE_CHUNK);
            assert!(path.ends_with(&file.name) && *older == Some(1));
            let text = error.to_string();
            assert!(text.contains(&piece.tensor) && text.contains("go on from there"), "{text}");
        }
        flip(&folder.join(&file.name), at, bit);
    }
}

/// A flipped bit at every byte of a header: an error that names the file, never a panic.
#[test]
fn a_flipped_bit_in_a_header_names_the_file() {
    let state = tiny();
    let root = tempfile::tempdir().unwrap();
    let folder = two(&state, root.path());
    let file = Checkpoint::open(&folder).unwrap().files()[0].clone();
    let path = folder.join(&file.name);
    for at in 0..file.pieces[0].offset as usize {
        flip(&path, at, at % 8);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let errors = read_all(&checkpoint, &state);
        assert_eq!(errors.len(), file.pieces.len());
        let report = checkpoint.verify();
        // The data behind the header is still what was written.
        assert!(report.digest.is_some() && report.problems.len() == 1);
        for error in errors.iter().chain(&report.problems) {
            assert!(matches!(error, CheckpointError::File { older: Some(1), .. }), "byte {at}: {error}");
            assert!(error.to_string().contains(&file.name));
        }
        flip(&path, at, at % 8);
    }
}

#[test]
fn a_renamed_folder_is_refused() {
    let state = tiny();
    let root = tempfile::tempdir().unwrap();
    let folder = two(&state, root.path());
    fs::rename(&folder, root.path().join("step-00000003")).unwrap();
    let error = Checkpoint::open(&root.path().join("step-00000003")).unwrap_err();
    assert!(error.to_string().contains("of step 2"), "{error}");
    fs::rename(root.path().join("step-00000003"), root.path().join("best")).unwrap();
    Checkpoint::open(&root.path().join("best")).unwrap();
}

#[test]
fn ranges_that_are_not_there_are_refused() {
    let state = State::new(2, 3);
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&two(&state, root.path())).unwrap();
    let kind = checkpoint::Kind::Param;
    let len = state.slices[0].3.len();
    for (tensor, slice, elements, out) in [
        (0, 0, 0..len + 1, len + 1),
        (0, 2, 0..1, 1),
        (999, 0, 0..1, 1),
        (0, 0, 0..2, 1),
        (0, 0, usize::MAX..usize::MAX, 0),
    ] {
        let error = checkpoint.read(tensor, kind, slice, elements, &mut vec![0.0; out]).unwrap_err();
        assert!(matches!(error, CheckpointError::NoSuchState(_)), "{error}");
    }
    checkpoint.read(0, kind, 0, 5..5, &mut []).unwrap();
}

proptest! {
    #[test]
    fn random_bytes_are_no_manifest(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(MANIFEST), bytes).unwrap();
        let error = Checkpoint::open(root.path()).unwrap_err();
        let named = matches!(&error, CheckpointError::Manifest { .. });
        prop_assert!(named, "{}", error);
    }
}

//! What is written under one sharding is read, bit for bit, under any other.

mod common;

use checkpoint::{
    Checkpoint, CheckpointError, HashPiece, Kind, STATE_CHUNK, chunk_hashes, commit, write_pieces, write_unhashed,
};
use common::{NUMERICS, Rng, State, bits};
use proptest::prelude::*;
use spec::tensors::Cut;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_sharding_is_read_by_any_other(seed: u64, tp in 1usize..3, ranks in 1usize..5) {
        let state = State::new(tp, seed);
        let mut rng = Rng(seed ^ 1);
        let root = tempfile::tempdir().unwrap();
        let folder = state.save_dealt(root.path(), 24, &state.deal(ranks, &mut rng));
        let checkpoint = Checkpoint::open(&folder).unwrap();
        for piece in state.deal(3, &mut rng).concat() {
            let mut out = vec![0.0; piece.data.len()];
            checkpoint.read(piece.tensor, piece.kind, piece.slice, piece.elements.clone(), &mut out).unwrap();
            prop_assert_eq!(bits(&out), bits(piece.data));
        }
        for (tensor, kind, slice, values) in &state.slices {
            let mut ends = [rng.below(values.len() + 1), rng.below(values.len() + 1)];
            ends.sort_unstable();
            let range = ends[0]..ends[1];
            let mut out = vec![0.0; range.len()];
            checkpoint.read(*tensor, *kind, *slice, range.clone(), &mut out).unwrap();
            prop_assert_eq!(bits(&out), bits(&values[range]));
        }
    }

    #[test]
    fn the_same_pieces_give_the_same_files(seed: u64) {
        let state = State::new(2, seed);
        let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let dealt = state.deal(2, &mut Rng(seed));
        let folders = roots.each_ref().map(|root| state.save_dealt(root.path(), 3, &dealt));
        for entry in folders[0].read_dir().unwrap() {
            let name = entry.unwrap().file_name();
            let files = folders.each_ref().map(|folder| std::fs::read(folder.join(&name)).unwrap());
            prop_assert!(files[0] == files[1], "{:?}", name);
        }
    }
}

#[test]
fn whole_tensors_are_put_together_from_their_slices() {
    let state = State::new(2, 5);
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&state.save(root.path(), 1)).unwrap();
    for (i, tensor) in state.tensors.iter().enumerate() {
        assert_eq!(checkpoint.tensor_index(&tensor.name), Some(i));
        let whole = checkpoint.read_tensor(i, Kind::Moment2).unwrap();
        for (_, _, slice, values) in state.slices.iter().filter(|s| s.0 == i && s.1 == Kind::Moment2) {
            let (rows, cols) = tensor.slice(*slice, 2);
            for (r, row) in rows.enumerate() {
                let want = &values[r * cols.len()..(r + 1) * cols.len()];
                assert_eq!(bits(&whole[row * tensor.cols..][cols.clone()]), bits(want), "{}", tensor.name);
            }
        }
    }
}

/// The files are plain safetensors with the promised names.
#[test]
fn files_are_safetensors() {
    let state = State::new(2, 6);
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&state.save(root.path(), 24)).unwrap();
    assert!(checkpoint.path().ends_with("step-00000024"));
    let mut found = 0;
    for file in checkpoint.files() {
        let bytes = std::fs::read(checkpoint.path().join(&file.name)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for piece in &file.pieces {
            let (tensor, slice) = (&piece.tensor, piece.slice);
            let (start, end) = (piece.elements.start, piece.elements.end);
            let view = tensors.tensor(&format!("{}/{tensor}/t{slice}/e{start}-{end}", piece.kind)).unwrap();
            let number = checkpoint.tensor_index(tensor).unwrap();
            let want = state.slices.iter().find(|s| (s.0, s.1, s.2) == (number, piece.kind, slice)).unwrap();
            let want: Vec<u8> = want.3[start..end].iter().flat_map(|value| value.to_le_bytes()).collect();
            assert!(view.data() == want);
            found += 1;
        }
    }
    assert_eq!(found, state.slices.len());
    let names: Vec<_> = checkpoint.files().iter().map(|file| file.name.as_str()).collect();
    assert!(names.contains(&"layer-0001.t1.c000000.self_attn-q_proj.param.safetensors"), "{names:?}");
}

#[test]
fn commit_takes_every_chunk_once_and_only_once() {
    let state = State::new(2, 7);
    let root = tempfile::tempdir().unwrap();
    let write = |pieces: &[_]| write_pieces(root.path(), 2, &state.tensors, 2, pieces).unwrap();
    let commit = |files| commit(root.path(), &state.tensors, &state.meta(2), files);

    let mut pieces = state.pieces();
    let lost = pieces.remove(10);
    let error = commit(write(&pieces)).unwrap_err();
    let CheckpointError::Missing(place) = &error else { panic!("{error}") };
    assert_eq!((place.tensor.as_str(), place.kind), (state.tensors[lost.tensor].name.as_str(), lost.kind));

    let mut files = write(&state.pieces());
    let mut again = files[0].clone();
    again.name.insert(0, 'x');
    files.push(again);
    assert!(matches!(commit(files.clone()).unwrap_err(), CheckpointError::Twice(_)));
    files.last_mut().unwrap().name.remove(0);
    assert!(commit(files).unwrap_err().to_string().contains("two shards"));

    let mut twice = state.pieces();
    twice.push(twice[3].clone());
    let error = write_pieces(root.path(), 2, &state.tensors, 2, &twice).unwrap_err();
    assert!(matches!(error, CheckpointError::Twice(_)), "{error}");
}

/// A rank hashes all that it holds, and writes parts of it.
#[test]
fn hashes_may_come_from_larger_pieces() {
    let state = State::new(2, 11);
    let root = tempfile::tempdir().unwrap();
    let whole = |(tensor, kind, slice, values): &(usize, Kind, usize, Vec<f32>)| {
        let hashes = chunk_hashes(values);
        HashPiece { tensor: *tensor, kind: *kind, slice: *slice, first_chunk: 0, hashes }
    };
    let mut hashed: Vec<_> = state.slices.iter().map(whole).collect();
    let parts: Vec<_> = state.deal(3, &mut Rng(12)).concat();
    let write = |step| write_unhashed(root.path(), step, &state.tensors, 2, &parts).unwrap();
    let files = write(2).with(&state.tensors, &hashed).unwrap();
    let want = write_pieces(root.path(), 3, &state.tensors, 2, &parts).unwrap();
    assert_eq!(files, want);
    commit(root.path(), &state.tensors, &state.meta(2), files).unwrap();
    // The last chunk of a piece is not known.
    let cut = hashed.iter_mut().find(|piece| piece.hashes.len() > 1).unwrap();
    let lost = cut.hashes.len() - 1;
    cut.hashes.truncate(lost);
    let (tensor, kind) = (state.tensors[cut.tensor].name.clone(), cut.kind);
    let error = write(4).with(&state.tensors, &hashed).unwrap_err();
    let CheckpointError::Missing(place) = &error else { panic!("{error}") };
    assert_eq!((&place.tensor, place.kind), (&tensor, kind));
    assert!(write(5).with(&state.tensors, &[]).is_err());
}

#[test]
fn pieces_off_the_chunk_boundary_are_refused() {
    let state = State::new(1, 8);
    let root = tempfile::tempdir().unwrap();
    let mut piece = state.pieces().into_iter().find(|piece| piece.data.len() > STATE_CHUNK).unwrap();
    piece.elements = 0..STATE_CHUNK - 1;
    piece.data = &piece.data[..STATE_CHUNK - 1];
    let error = write_pieces(root.path(), 1, &state.tensors, 1, &[piece]).unwrap_err();
    assert!(matches!(error, CheckpointError::Piece { .. }), "{error}");
    assert!(root.path().read_dir().unwrap().next().is_none());
}

#[test]
fn a_committed_step_is_not_overwritten() {
    let state = State::new(1, 9);
    let root = tempfile::tempdir().unwrap();
    state.save(root.path(), 4);
    let error = write_pieces(root.path(), 4, &state.tensors, 1, &state.pieces()).unwrap_err();
    assert!(matches!(error, CheckpointError::Exists { step: 4, .. }), "{error}");
    checkpoint::discard(root.path(), 4).unwrap();
    state.save(root.path(), 4);
}

#[test]
fn another_run_or_model_is_named() {
    let state = State::new(2, 10);
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&state.save(root.path(), 4)).unwrap();
    let check = |definition: &str, tensors: &[_], tp, numerics| {
        checkpoint.check_model(definition, tensors, tp, numerics).map_err(|error| error.to_string())
    };
    let same = common::DEFINITION;
    check(same, &state.tensors, 2, NUMERICS).unwrap();

    let error = check(same, &state.tensors, 2, NUMERICS + 1).unwrap_err();
    assert!(error.contains("numerics version 7"), "{error}");
    let error = check(&same.replace("0.001", "0.002"), &state.tensors, 2, NUMERICS).unwrap_err();
    assert!(error.contains("line 4") && error.contains("lr = 0.002"), "{error}");
    let error = check(&format!("{same}more\n"), &state.tensors, 2, NUMERICS).unwrap_err();
    assert!(error.contains("line 5") && error.contains("more"), "{error}");

    let mut wider = state.tensors.clone();
    wider[5].rows *= 2;
    let error = check(same, &wider, 2, NUMERICS).unwrap_err();
    assert!(error.contains(&wider[5].name), "{error}");
    let error = check(same, &state.tensors, 1, NUMERICS).unwrap_err();
    assert!(error.contains("embed_tokens") && error.contains("2 slices"), "{error}");
    let mut fewer = state.tensors.clone();
    let gone = fewer.remove(6);
    let error = check(same, &fewer, 2, NUMERICS).unwrap_err();
    assert!(error.contains(&gone.name) && error.contains("absent here"), "{error}");
    assert_eq!(gone.cut, Cut::Whole);
}

/// A tail that nobody wrote, a file that went before the commit, leftovers of another attempt.
#[test]
fn commit_looks_at_tails_files_and_leftovers() {
    let state = State::new(1, 11);
    let root = tempfile::tempdir().unwrap();
    let write = |pieces: &[_]| write_pieces(root.path(), 2, &state.tensors, 1, pieces).unwrap();
    let commit = |files| commit(root.path(), &state.tensors, &state.meta(2), files);

    let mut pieces = state.pieces();
    let last = pieces.iter_mut().rev().find(|piece| piece.data.len() > STATE_CHUNK).unwrap();
    last.elements = 0..STATE_CHUNK;
    last.data = &last.data[..STATE_CHUNK];
    let CheckpointError::Missing(place) = commit(write(&pieces)).unwrap_err() else { panic!("wrong error") };
    assert_eq!((&place.tensor, place.chunk), (&state.tensors[last_index(&state)].name, 1));

    let files = write(&state.pieces());
    let path = checkpoint::step_dir(root.path(), 2).join(&files[1].name);
    std::fs::remove_file(&path).unwrap();
    let error = commit(files).unwrap_err();
    assert!(matches!(&error, CheckpointError::File { path: lost, .. } if *lost == path), "{error}");

    // Pieces cut otherwise leave files of other names.
    write(&state.cut(|len, _| {
        (0..len.div_ceil(STATE_CHUNK)).skip(1).map(|c| c * STATE_CHUNK..len.min((c + 1) * STATE_CHUNK)).collect()
    }));
    let folder = commit(write(&state.pieces())).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert_eq!(folder.read_dir().unwrap().count(), checkpoint.files().len() + 1);
    assert!(checkpoint.verify().good());
}

fn last_index(state: &State) -> usize {
    state.tensors.iter().rposition(|tensor| tensor.slice_len(state.tp) > STATE_CHUNK).unwrap()
}

//! The digest: any order, any sharding, every bit.

mod common;

use checkpoint::{
    Checkpoint, Digest, DigestBuilder, DigestError, HashPiece, Kind, PieceRef, STATE_CHUNK, chunk_hashes,
    decode_pieces, encode_pieces,
};
use common::{NUMERICS, Rng, State};
use proptest::prelude::*;

fn hash_pieces(pieces: &[PieceRef<'_>]) -> Vec<HashPiece> {
    pieces
        .iter()
        .map(|piece| HashPiece {
            tensor: piece.tensor,
            kind: piece.kind,
            slice: piece.slice,
            first_chunk: piece.elements.start / STATE_CHUNK,
            hashes: chunk_hashes(piece.data),
        })
        .collect()
}

fn fold(state: &State, pieces: &[HashPiece], cursor: u64) -> Result<Digest, DigestError> {
    let mut builder = DigestBuilder::new(&state.tensors, state.tp, NUMERICS);
    pieces.iter().try_for_each(|piece| builder.put_piece(piece))?;
    builder.finish(cursor)
}

fn digest(state: &State) -> Digest {
    fold(state, &hash_pieces(&state.pieces()), 5).unwrap()
}

/// The digest written out plainly, from the bytes up.
fn naive(state: &State, cursor: u64) -> String {
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let mut total = Vec::new();
    text(&mut total, "lockstep digest 1");
    total.extend(NUMERICS.to_le_bytes());
    for (i, tensor) in state.tensors.iter().enumerate() {
        for kind in ["param", "moment1", "moment2"] {
            let mut bytes = Vec::new();
            text(&mut bytes, "lockstep tensor 1");
            text(&mut bytes, &tensor.name);
            text(&mut bytes, kind);
            for size in [tensor.rows, tensor.cols, tensor.slices(state.tp)] {
                bytes.extend((size as u64).to_le_bytes());
            }
            for slice in state.slices.iter().filter(|slice| slice.0 == i && slice.1.label() == kind) {
                for chunk in slice.3.chunks(STATE_CHUNK) {
                    let chunk: Vec<u8> = chunk.iter().flat_map(|value| value.to_le_bytes()).collect();
                    bytes.extend(blake3::hash(&chunk).as_bytes());
                }
            }
            total.extend(blake3::hash(&bytes).as_bytes());
        }
    }
    total.extend(cursor.to_le_bytes());
    blake3::hash(&total).to_string()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Any sharding, in any order, over the wire, with replicas, gives the digest of the naive twin.
    #[test]
    fn order_and_sharding_do_not_matter(seed: u64, tp in 1usize..3) {
        let state = State::new(tp, seed);
        let mut rng = Rng(seed);
        let mut pieces = hash_pieces(&state.deal(2, &mut rng).concat());
        pieces.extend(hash_pieces(&state.deal(3, &mut rng)[0]));
        for i in (1..pieces.len()).rev() {
            pieces.swap(i, rng.below(i + 1));
        }
        let sent = decode_pieces(&encode_pieces(&pieces)).unwrap();
        prop_assert_eq!(&sent, &pieces);
        prop_assert_eq!(fold(&state, &sent, 77).unwrap().to_string(), naive(&state, 77));
    }

    #[test]
    fn one_bit_changes_the_digest_and_one_tensor(seed: u64) {
        let mut state = State::new(2, seed % 4);
        let before = digest(&state);
        let mut rng = Rng(seed);
        let i = rng.below(state.slices.len());
        let (tensor, kind, _, values) = &mut state.slices[i];
        let (at, bit) = (rng.below(values.len()), rng.below(32));
        values[at] = f32::from_bits(values[at].to_bits() ^ 1 << bit);
        let name = (state.tensors[*tensor].name.clone(), *kind);
        let after = digest(&state);
        prop_assert_ne!(before.total, after.total);
        let changed: Vec<_> = before.tensors.iter().zip(&after.tensors).filter(|(a, b)| a.hash != b.hash).collect();
        prop_assert_eq!(changed.len(), 1);
        prop_assert_eq!((changed[0].0.name.clone(), changed[0].0.kind), name);
    }

    #[test]
    fn replicas_that_disagree_are_named(seed: u64) {
        let state = State::new(2, 1);
        let mut pieces = hash_pieces(&state.pieces());
        let mut rng = Rng(seed);
        let mut other = pieces[rng.below(pieces.len())].clone();
        let chunk = rng.below(other.hashes.len());
        other.hashes[chunk] = blake3::hash(b"other bits");
        let (name, kind, slice) = (state.tensors[other.tensor].name.clone(), other.kind, other.slice);
        pieces.push(other);
        let error = fold(&state, &pieces, 5).unwrap_err();
        let DigestError::Disagree(place) = error else { panic!("{error}") };
        prop_assert_eq!((place.tensor, place.kind, place.slice, place.chunk), (name, kind, slice, chunk));
    }

    #[test]
    fn damaged_pieces_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut: u16) {
        let _ = decode_pieces(&bytes);
        let state = State::new(2, 1);
        let mut encoded = encode_pieces(&hash_pieces(&state.pieces()));
        encoded.truncate(usize::from(cut) % encoded.len());
        encoded.extend(&bytes);
        if let Ok(pieces) = decode_pieces(&encoded) {
            let _ = fold(&state, &pieces, 5);
        }
    }
}

#[test]
fn a_missing_chunk_is_named() {
    let state = State::new(2, 2);
    let mut pieces = hash_pieces(&state.pieces());
    let last = pieces.iter_mut().rev().find(|piece| piece.hashes.len() > 1 && piece.slice == 1).unwrap();
    last.hashes.pop();
    let (name, kind, chunk) = (state.tensors[last.tensor].name.clone(), last.kind, last.hashes.len());
    let DigestError::Missing(place) = fold(&state, &pieces, 5).unwrap_err() else { panic!("wrong error") };
    assert_eq!((place.tensor, place.kind, place.slice, place.chunk), (name, kind, 1, chunk));
}

#[test]
fn state_that_is_not_there_is_refused() {
    let state = State::new(2, 2);
    let mut builder = DigestBuilder::new(&state.tensors, 2, NUMERICS);
    let hash = [blake3::hash(b"")];
    for (tensor, slice, first) in [(99, 0, 0), (0, 2, 0), (0, 0, 1000), (0, 0, usize::MAX)] {
        let error = builder.put(tensor, Kind::Param, slice, first, &hash).unwrap_err();
        assert!(matches!(error, DigestError::NoSuchState(_)), "{error}");
    }
}

#[test]
fn cursor_and_numerics_are_part_of_it() {
    let state = State::new(1, 3);
    let pieces = hash_pieces(&state.pieces());
    assert_ne!(fold(&state, &pieces, 5).unwrap().total, fold(&state, &pieces, 6).unwrap().total);
    let mut builder = DigestBuilder::new(&state.tensors, 1, NUMERICS + 1);
    pieces.iter().for_each(|piece| builder.put_piece(piece).unwrap());
    assert_ne!(builder.finish(5).unwrap().total, fold(&state, &pieces, 5).unwrap().total);
}

/// The digest of the ranks, of the manifest and of the bytes on disk are one.
#[test]
fn the_checkpoint_has_the_digest_of_the_state() {
    let state = State::new(2, 4);
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&state.save(root.path(), 9)).unwrap();
    let want = fold(&state, &hash_pieces(&state.pieces()), 9 * 32).unwrap();
    assert_eq!(checkpoint.meta().digest, Some(want.to_string()));
    let report = checkpoint.verify();
    assert!(report.good(), "{:?}", report.problems);
    assert_eq!(report.digest, Some(want.total));

    let mut meta = state.meta(10);
    meta.digest = Some(blake3::hash(b"other").to_string());
    let files = checkpoint::write_pieces(root.path(), 10, &state.tensors, 2, &state.pieces()).unwrap();
    let error = checkpoint::commit(root.path(), &state.tensors, &meta, files).unwrap_err();
    assert!(matches!(error, checkpoint::CheckpointError::DigestDiffers { step: 10, .. }), "{error}");
    assert_eq!(checkpoint::list(root.path()).unwrap().len(), 1);
}

//! The parsers under hostile input: bytes that are wrong although all checksums are right.

use proptest::prelude::*;
use serde_json::Value;
use spec::tensors::{Cut, STATE_CHUNK};

use crate::hash::Hash;
use crate::header;
use crate::manifest::{FileEntry, Manifest, Meta, PieceEntry};
use crate::tensor::{Kind, TensorEntry};

const LEN: usize = STATE_CHUNK + 64;

fn file(name: &str, slice: usize) -> FileEntry {
    let elements = 0..LEN;
    let names: Vec<_> = Kind::ALL.map(|kind| (header::piece_name("w", kind, slice, &elements), LEN)).into();
    let bytes = header::encode(&names).unwrap();
    let piece = |(i, kind): (usize, Kind)| PieceEntry {
        tensor: "w".into(),
        kind,
        slice,
        elements: elements.clone(),
        offset: (bytes.len() + i * LEN * 4) as u64,
        hashes: vec![Hash::from_bytes([7; 32]); 2],
    };
    FileEntry {
        name: name.into(),
        bytes: (bytes.len() + 3 * LEN * 4) as u64,
        header_hash: blake3::hash(&bytes),
        pieces: Kind::ALL.into_iter().enumerate().map(piece).collect(),
    }
}

fn manifest() -> Manifest {
    let definition = format!("checksum = {}", "0".repeat(64));
    let (digest, taken_unix_ms) = (Some("0".repeat(64)), Some(1));
    let meta = Meta {
        validations: None,
        step: 3,
        cursor: 9,
        definition,
        numerics_version: 1,
        tp: 2,
        digest,
        taken_unix_ms,
        checked: Some(2),
        unseen: Some(1),
    };
    let tensor = TensorEntry { name: "w".into(), rows: 2, cols: LEN, cut: Cut::Rows, slices: 2 };
    Manifest::new(meta, vec![tensor], vec![file("a", 0), file("b", 1)])
}

/// The text with its checksum made right, as an enemy would.
fn reseal(mut value: Value) -> String {
    let zeros = "0".repeat(64);
    value["checksum"] = zeros.clone().into();
    // Put the checksum first: it must come before other texts of 64 zeros.
    let mut text = format!("{{\"checksum\":\"{zeros}\"");
    for (key, value) in value.as_object().unwrap().iter().filter(|(key, _)| *key != "checksum") {
        text += &format!(",{}:{value}", Value::from(key.as_str()));
    }
    text.push('}');
    let checksum = blake3::hash(text.as_bytes()).to_string();
    text.replacen(&zeros, &checksum, 1)
}

/// The number of nodes below and including `value`; calls `change` on node `at`.
fn visit(value: &mut Value, at: &mut usize, change: &Value) {
    if *at == 0 {
        *value = change.clone();
    }
    *at = at.wrapping_sub(1);
    match value {
        Value::Array(all) => all.iter_mut().for_each(|value| visit(value, at, change)),
        Value::Object(all) => all.values_mut().for_each(|value| visit(value, at, change)),
        _ => {}
    }
}

#[test]
fn a_good_manifest_comes_back() {
    let manifest = manifest();
    let text = manifest.seal();
    let (back, index) = Manifest::parse(text.as_bytes()).unwrap();
    assert_eq!((back.meta, back.tensors, back.files), (manifest.meta, manifest.tensors, manifest.files));
    assert_eq!(index.len(), 6);
    Manifest::parse(reseal(serde_json::from_str(&text).unwrap()).as_bytes()).unwrap();
}

#[test]
fn every_cut_and_every_flipped_bit_of_a_manifest_is_found() {
    let good = manifest().seal().into_bytes();
    for at in 0..good.len() {
        assert!(Manifest::parse(&good[..at]).is_err(), "cut at {at}");
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            assert!(Manifest::parse(&bytes).is_err(), "byte {at}, bit {bit}");
        }
    }
}

#[test]
fn unknown_keys_and_other_schemas_are_refused() {
    let good: Value = serde_json::from_str(&manifest().seal()).unwrap();
    for pointer in ["", "/meta", "/tensors/0", "/files/1", "/files/0/pieces/2"] {
        let mut value = good.clone();
        value.pointer_mut(pointer).unwrap()["surprise"] = 1.into();
        let error = Manifest::parse(reseal(value).as_bytes()).unwrap_err();
        assert!(error.contains("surprise"), "{error}");
    }
    let mut value = good.clone();
    value["schema"] = 2.into();
    let error = Manifest::parse(reseal(value).as_bytes()).unwrap_err();
    assert!(error.contains("schema 2"), "{error}");
}

#[test]
fn only_plain_file_names_are_taken() {
    let good: Value = serde_json::from_str(&manifest().seal()).unwrap();
    for name in ["../a", "/etc/passwd", "x/a", "..", ".", "", "a/", "b", "manifest.json"] {
        let mut value = good.clone();
        value["files"][0]["name"] = name.into();
        let error = Manifest::parse(reseal(value).as_bytes()).unwrap_err();
        assert!(error.contains("name of"), "{name}: {error}");
    }
}

#[test]
fn pieces_have_all_hashes_and_lie_inside_their_file() {
    let good = manifest();
    let parse = |manifest: &Manifest| Manifest::parse(manifest.seal().as_bytes()).map(|_| ());
    let mut bad = good.clone();
    bad.files[0].pieces[1].hashes.pop();
    assert!(parse(&bad).unwrap_err().contains("1 hashes"));
    for offset in [0, good.files[1].bytes - LEN as u64 * 4 + 1, u64::MAX] {
        let mut bad = good.clone();
        bad.files[1].pieces[2].offset = offset;
        assert!(parse(&bad).unwrap_err().contains("lie inside"), "{offset}");
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<u64>().prop_map(Value::from),
        (0u64..5).prop_map(Value::from),
        prop_oneof![Just(u64::MAX), Just(1 << 63), Just(1 << 62), Just(1 << 61), Just(STATE_CHUNK as u64)]
            .prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        prop_oneof![Just("w"), Just("cols"), Just("whole"), Just("param"), Just("a")].prop_map(Value::from),
        Just(Value::Array(vec![])),
        Just(serde_json::json!({})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Some nodes replaced under a right checksum: never a panic; what is taken tiles all state.
    #[test]
    fn a_forged_manifest_never_panics(changes in proptest::collection::vec((0usize..100, any_value()), 1..4)) {
        let mut value: Value = serde_json::from_str(&manifest().seal()).unwrap();
        for (at, change) in changes {
            visit(&mut value, &mut at.clone(), &change);
        }
        if !value.is_object() {
            return Ok(());
        }
        if let Ok((manifest, index)) = Manifest::parse(reseal(value).as_bytes()) {
            for (tensor, entry) in manifest.tensors.iter().enumerate() {
                for kind in Kind::ALL {
                    for slice in 0..entry.slices {
                        let spots = &index[&(tensor, kind, slice)];
                        let len: usize = spots.iter().map(|spot| spot.elements.len()).sum();
                        prop_assert_eq!(len, entry.slice_len());
                    }
                }
            }
        }
    }

    /// Any bytes as a header whose hash is right: never a panic.
    #[test]
    fn random_headers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut file = file("a", 0);
        file.header_hash = blake3::hash(&bytes);
        prop_assert!(header::check(&bytes, &file).is_err());
    }

    /// A good header with bytes replaced, under a right hash: never a panic.
    #[test]
    fn forged_headers_never_panic(
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..4),
        digits in any::<bool>(),
    ) {
        let mut file = file("a", 0);
        let names: Vec<_> =
            file.pieces.iter().map(|p| (header::piece_name("w", p.kind, 0, &p.elements), LEN)).collect();
        let good = header::encode(&names).unwrap();
        prop_assert_eq!(header::check(&good, &file), Ok(()));
        let mut bytes = good;
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = if digits { b'0' + byte % 10 } else { byte };
        }
        file.header_hash = blake3::hash(&bytes);
        let _ = header::check(&bytes, &file);
    }
}

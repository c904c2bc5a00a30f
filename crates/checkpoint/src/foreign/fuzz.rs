//! The readers of foreign files under hostile input: an error or a structure, never a panic, and little memory.

use std::path::PathBuf;

use proptest::prelude::*;

use super::{dcp, look};

/// Made by torch 2.11: a float32 matrix [12, 4], a bfloat16 vector [4], a scalar tensor, a float and a text.
fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/dcp")
}

fn metadata() -> Vec<u8> {
    std::fs::read(fixture().join(".metadata")).unwrap()
}

#[test]
fn a_folder_of_torch_is_listed() {
    let structure = look(&fixture()).unwrap().unwrap();
    assert_eq!((structure.format, &structure.problems), ("torch DCP", &Vec::new()));
    let rows: Vec<_> = structure.tensors.iter().map(|t| (t.name.as_str(), t.dtype.as_str(), t.shape.clone())).collect();
    let want = [
        ("model.model.embed_tokens.weight", "float32", Some(vec![12, 4])),
        ("model.model.norm.weight", "bfloat16", Some(vec![4])),
        ("note", "bytes", None),
        ("optim.lr", "bytes", None),
        ("optim.step", "int64", Some(vec![])),
    ];
    assert_eq!(rows, want);
    let size = std::fs::metadata(fixture().join("__0_0.distcp")).unwrap().len();
    assert_eq!(structure.files, [("__0_0.distcp".to_string(), size)]);
}

#[test]
fn a_cut_file_and_a_missing_one_are_problems() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(".metadata"), metadata()).unwrap();
    let problems = look(folder.path()).unwrap().unwrap().problems;
    assert!(problems.len() == 1 && problems[0].contains("cannot be found"), "{problems:?}");
    std::fs::write(folder.path().join("__0_0.distcp"), [0; 100]).unwrap();
    let problems = look(folder.path()).unwrap().unwrap().problems;
    assert!(problems.len() == 1 && problems[0].contains("cut off"), "{problems:?}");
    std::fs::remove_file(folder.path().join(".metadata")).unwrap();
    let error = look(folder.path()).unwrap_err().to_string();
    assert!(error.contains("not complete"), "{error}");
}

#[test]
fn every_cut_of_the_metadata_is_an_error() {
    let good = metadata();
    for len in 0..good.len() {
        assert!(dcp::read(&good[..len], &fixture()).is_err(), "cut at {len}");
    }
}

#[test]
fn what_runs_code_is_only_a_name() {
    // cos\nsystem\n (S'true'... of protocol 0 is not read at all; protocol 2's call is an object.
    let call = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.";
    let error = dcp::read(call, &fixture()).unwrap_err();
    assert!(error.contains("does not hold"), "{error}");
    assert!(dcp::read(b"cos\nsystem\n(S'true'\ntR.", &fixture()).unwrap_err().contains("not one of plain data"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Some bytes of a good file replaced, a part repeated or left out: never a panic.
    #[test]
    fn mutated_metadata_never_panics(
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6),
        cut in proptest::option::of((any::<usize>(), 0usize..40)),
        twice in proptest::option::of((any::<usize>(), 0usize..60)),
    ) {
        let mut bytes = metadata();
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if let Some((at, len)) = twice {
            let at = at % bytes.len();
            let part = bytes[at..bytes.len().min(at + len)].to_vec();
            bytes.splice(at..at, part);
        }
        if let Some((at, len)) = cut {
            let at = at % bytes.len();
            bytes.drain(at..bytes.len().min(at + len));
        }
        let _ = dcp::read(&bytes, &fixture());
    }

    #[test]
    fn random_bytes_are_no_metadata(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(dcp::read(&bytes, &fixture()).is_err());
    }
}

//! Parsers of headers and indexes under garbage: an error, never a panic.

use proptest::prelude::*;
use safetensors::Dtype;

use super::index::Index;
use super::shard::{header, parse};

/// A good file: two tensors of bfloat16.
fn good() -> Vec<u8> {
    let mut file = header(Dtype::BF16, &[("a", vec![3]), ("b.weight", vec![2, 2])]).unwrap();
    file.extend([7; 14]);
    file
}

#[test]
fn a_good_file_is_parsed() {
    let (file, entries) = (good(), parse(&good()).unwrap());
    assert_eq!(entries.keys().collect::<Vec<_>>(), ["a", "b.weight"]);
    assert_eq!((&entries["b.weight"].shape[..], entries["b.weight"].bytes.end), (&[2, 2][..], file.len()));
    assert_eq!(entries["a"].bytes.len(), 6);
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300), text in ".{0,200}") {
        prop_assert!(parse(&bytes).is_err());
        let with_length = |text: &[u8]| [&(text.len() as u64).to_le_bytes(), text].concat();
        let _ = parse(&with_length(&bytes));
        let _ = parse(&with_length(text.as_bytes()));
        let _ = Index::parse(&bytes);
        let _ = Index::parse(text.as_bytes());
    }

    /// Bytes replaced, removed or doubled: every tensor still lies inside the file.
    #[test]
    fn damaged_files(changes in prop::collection::vec((any::<usize>(), any::<u8>(), 0..4u8), 1..5)) {
        let mut file = good();
        for (at, byte, kind) in changes {
            let at = at % file.len();
            match kind {
                0 => file[at] = byte,
                1 => file[at] = b'0' + byte % 10,
                2 => { file.remove(at); }
                _ => file.insert(at, file[at]),
            }
        }
        if let Ok(entries) = parse(&file) {
            for entry in entries.values() {
                prop_assert!(entry.bytes.start <= entry.bytes.end && entry.bytes.end <= file.len());
            }
        }
    }

    /// Numbers that no file can have.
    #[test]
    fn any_numbers(numbers in prop::collection::vec(prop_oneof![0..20u64, any::<u64>(), Just(u64::MAX / 8)], 8)) {
        let [a, b, c, d, e, f, g, length] = numbers[..] else { unreachable!() };
        let text = format!(
            r#"{{"a":{{"dtype":"U8","shape":[{a},{b}],"data_offsets":[{c},{d}]}},"b":{{"dtype":"F64","shape":[{e}],"data_offsets":[{f},{g}]}}}}"#
        );
        for length in [text.len() as u64, length] {
            let _ = parse(&[&length.to_le_bytes(), text.as_bytes()].concat());
        }
    }

    #[test]
    fn damaged_indexes(at: usize, byte: u8, file in ".{0,12}") {
        let text = serde_json::json!({"metadata": {"total_size": 8}, "weight_map": {"a": file, "b": "x.safetensors"}});
        let mut bytes = text.to_string().into_bytes();
        if let Ok(index) = Index::parse(&bytes) {
            prop_assert!(index.files().iter().all(|file| !file.contains('/') && *file != ".." && !file.is_empty()));
        }
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = Index::parse(&bytes);
    }
}

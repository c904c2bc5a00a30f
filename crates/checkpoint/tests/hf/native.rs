//! Export of a checkpoint of this crate, cut in slices.

use std::fs;

use checkpoint::hf::{Dtype, ExportOptions, HfError, HfFolder, bf16_bits, export_checkpoint};
use checkpoint::{Checkpoint, Kind};
use spec::Model;
use spec::hf::Style;

use crate::build::{config_json, stored_in};
use crate::common::{State, model};

/// State with finite values and rows of padding that are not zero: they must not come out.
fn state(tp: usize) -> State {
    let mut state = State::new(tp, 11);
    for value in state.slices.iter_mut().flat_map(|slice| &mut slice.3) {
        *value = if value.is_finite() { value.clamp(-1e30, 1e30) } else { 0.5 };
    }
    state
}

#[test]
fn slices_become_whole_tensors() {
    for tp in [1, 2, 4] {
        let (state, model) = (state(tp), model());
        let root = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&state.save(root.path(), 3)).unwrap();
        for (dtype, shard_bytes_max) in [(Dtype::F32, u64::MAX), (Dtype::F32, 200_000), (Dtype::Bf16, 200_000)] {
            let out = root.path().join(format!("{dtype:?}-{shard_bytes_max}/deep"));
            let options = ExportOptions { dtype, shard_bytes_max };
            let json = config_json(&model, None, options, Style::Hf5);
            export_checkpoint(&checkpoint, &model, &out, &json, options).unwrap();
            let stored = stored_in(&out);
            assert_eq!(stored.len(), state.tensors.len());
            for (number, tensor) in state.tensors.iter().enumerate() {
                let whole = checkpoint.read_tensor(number, Kind::Param).unwrap();
                let bytes: Vec<u8> = match dtype {
                    Dtype::F32 => whole.iter().flat_map(|value| value.to_le_bytes()).collect(),
                    _ => whole.iter().flat_map(|value| bf16_bits(*value).to_le_bytes()).collect(),
                };
                let real = tensor.real_len() * dtype.bytes();
                assert!(stored[&tensor.name].bytes == bytes[..real], "{}", tensor.name);
            }
            HfFolder::open(&out, &model).unwrap().check_finite().unwrap();
        }
    }
}

#[test]
fn what_cannot_be_exported_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let good = model();
    let options = ExportOptions { dtype: Dtype::Bf16, shard_bytes_max: 200_000 };
    let json = config_json(&good, None, options, Style::Public);
    let mut state = state(2);
    let at = state.slices.iter().position(|slice| slice.0 == 9 && slice.1 == Kind::Param).unwrap();
    for (value, step) in [(f32::NAN, 1), (f32::NEG_INFINITY, 2), (f32::MAX, 3)] {
        state.slices[at].3[5] = value;
        let checkpoint = Checkpoint::open(&state.save(root.path(), step)).unwrap();
        let out = root.path().join("out");
        let error = export_checkpoint(&checkpoint, &good, &out, &json, options).unwrap_err();
        let fits = match &error {
            HfError::NotFinite { tensor, row: 0, col: 5, .. } => !value.is_finite() && *tensor == state.tensors[9].name,
            HfError::TooLarge { tensor, row: 0, col: 5, .. } => value.is_finite() && *tensor == state.tensors[9].name,
            _ => false,
        };
        assert!(fits, "{error}");
        assert!(!out.exists());
    }
    state.slices[at].3[5] = 1.0;
    let folder = state.save(root.path(), 4);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    // Another model.
    let other = Model { ffn: good.ffn * 2, ..good.clone() };
    let other_json = config_json(&other, None, options, Style::Public);
    let error = export_checkpoint(&checkpoint, &other, &root.path().join("o"), &other_json, options).unwrap_err();
    assert!(matches!(&error, HfError::OtherModel { tensor, .. } if tensor.contains("gate_proj")), "{error}");
    // A config of another model, or none.
    for text in [other_json.as_str(), "{}"] {
        let error = export_checkpoint(&checkpoint, &good, &root.path().join("o"), text, options).unwrap_err();
        assert!(matches!(error, HfError::Config { .. }), "{error}");
    }
    // A folder with something in it.
    let full = root.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("notes.txt"), "mine").unwrap();
    let error = export_checkpoint(&checkpoint, &good, &full, &json, options).unwrap_err();
    assert!(matches!(error, HfError::NotEmpty { .. }), "{error}");
    assert_eq!(fs::read_dir(&full).unwrap().count(), 1);
    // A corrupt source.
    let file = folder.join(&checkpoint.files()[1].name);
    let mut bytes = fs::read(&file).unwrap();
    let piece = checkpoint.files()[1].pieces.iter().find(|piece| piece.kind == Kind::Param).unwrap();
    bytes[piece.offset as usize] ^= 1;
    fs::write(&file, bytes).unwrap();
    let empty = root.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let error = export_checkpoint(&checkpoint, &good, &empty, &json, options).unwrap_err();
    assert!(matches!(&error, HfError::Source { tensor, .. } if *tensor == piece.tensor), "{error}");
    assert!(error.to_string().contains("corrupt"), "{error}");
    assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
}

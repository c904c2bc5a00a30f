//! Import and export under every type, cut and shard size, against a naive reader.

use std::fs;

use checkpoint::hf::{Dtype, ExportOptions, HfError, HfFolder, bf16_bits, copy_companions, export_to};
use proptest::prelude::*;
use safetensors::Dtype as Stored;
use spec::Model;
use spec::hf::Style;

use crate::build::{config_json, decode, model, naive, stored_in, weights, write, write_shards};
use crate::common::{NoSync, Rng, bits};

fn copy(folder: &HfFolder, model: &Model, out: &std::path::Path, options: ExportOptions) -> Result<usize, HfError> {
    let json = config_json(model, None, options, Style::Public);
    let written = export_to(&NoSync, out, model, &json, options, &mut |tensor, rows, values| {
        let cols = folder.tensors()[tensor].cols;
        Ok(folder.read(tensor, 0, 1, rows.start * cols..rows.end * cols, values)?)
    })?;
    assert_eq!(written.parameters, spec::tensors::parameters(model));
    Ok(written.files)
}

#[test]
fn every_slice_is_that_of_a_naive_reader() {
    for (dtype, seed) in [(Stored::F32, 1), (Stored::BF16, 2), (Stored::F16, 3)] {
        let model = model(false, true);
        let stored = weights(&model, dtype, seed);
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = stored.split_at(7);
        write_shards(dir.path(), &[b, a]);
        let folder = HfFolder::open(dir.path(), &model).unwrap();
        assert_eq!((folder.files(), folder.dtype(3).stored_name()), (2, dtype.to_string()));
        folder.check_finite().unwrap();
        let mut rng = Rng(seed);
        for (number, tensor) in folder.tensors().iter().enumerate() {
            let whole = naive(tensor, &stored[number]);
            for tp in [1, 2, 4] {
                for t in 0..tp {
                    let (rows, cols) = tensor.slice(t, tp);
                    let slice: Vec<f32> =
                        rows.flat_map(|row| whole[row * tensor.cols..][cols.clone()].to_vec()).collect();
                    let mut out = vec![f32::NAN; slice.len()];
                    folder.read(number, t, tp, 0..slice.len(), &mut out).unwrap();
                    assert_eq!(bits(&out), bits(&slice), "{} {t} of {tp}", tensor.name);
                    for _ in 0..8 {
                        let mut ends = [rng.below(slice.len() + 1), rng.below(slice.len() + 1)];
                        ends.sort_unstable();
                        let range = ends[0]..ends[1];
                        let mut out = vec![f32::NAN; range.len()];
                        folder.read(number, t, tp, range.clone(), &mut out).unwrap();
                        assert_eq!(bits(&out), bits(&slice[range]), "{} {t} of {tp}", tensor.name);
                    }
                }
            }
        }
    }
}

trait StoredName {
    fn stored_name(self) -> String;
}

impl StoredName for Dtype {
    fn stored_name(self) -> String {
        match self {
            Dtype::F32 => "F32".into(),
            Dtype::Bf16 => "BF16".into(),
            Dtype::F16 => "F16".into(),
        }
    }
}

#[test]
fn parts_that_are_not_there_are_refused() {
    let model = model(false, false);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &weights(&model, Stored::F32, 4));
    let folder = HfFolder::open(dir.path(), &model).unwrap();
    let mut out = [0.0; 4];
    // (tensor, t, tp, elements): no tensor, no slice, a cut that leaves rows over, a range
    // past the end, backwards, of another length.
    let last = folder.tensors().len();
    let [past, backwards] = [(128 * 24 - 3, 128 * 24 + 1), (8, 4)];
    for (tensor, t, tp, (start, end)) in [
        (last, 0, 1, (0, 4)),
        (0, 2, 2, (0, 4)),
        (0, 0, 0, (0, 4)),
        (0, 0, 5, (0, 4)),
        (0, 0, 1, past),
        (0, 0, 1, backwards),
        (0, 0, 1, (0, 3)),
    ] {
        let error = folder.read(tensor, t, tp, start..end, &mut out).unwrap_err();
        assert!(matches!(error, HfError::NoSuchPart(_)), "{error}");
    }
}

#[test]
fn one_type_to_itself_is_byte_equal() {
    let types = [(Stored::F32, Dtype::F32), (Stored::BF16, Dtype::Bf16), (Stored::F16, Dtype::F16)];
    for ((stored_type, dtype), tied) in types.into_iter().flat_map(|types| [(types, false), (types, true)]) {
        let model = model(tied, true);
        let stored = weights(&model, stored_type, 5);
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &stored);
        let folder = HfFolder::open(dir.path(), &model).unwrap();
        for shard_bytes_max in [u64::MAX, 6000, 1, 0] {
            let out = tempfile::tempdir().unwrap();
            let options = ExportOptions { dtype, shard_bytes_max };
            let files = copy(&folder, &model, out.path(), options).unwrap();
            let expected = stored.iter().map(|s| (s.name.clone(), s.clone())).collect();
            assert_eq!(stored_in(out.path()), expected);
            let mut names: Vec<_> =
                fs::read_dir(out.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            if shard_bytes_max == u64::MAX {
                assert_eq!(names, ["config.json", "model.safetensors"]);
                continue;
            }
            assert_eq!(names.len(), files + 2);
            assert_eq!(names[1], format!("model-00001-of-{files:05}.safetensors"));
            for name in &names[1..=files] {
                let bytes = fs::read(out.path().join(name)).unwrap();
                let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
                assert!(header.data_len() as u64 <= shard_bytes_max || header.tensors().len() == 1);
                assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
            }
            let index = fs::read_to_string(out.path().join("model.safetensors.index.json")).unwrap();
            let index: serde_json::Value = serde_json::from_str(&index).unwrap();
            let bytes: usize = stored.iter().map(|s| s.bytes.len()).sum();
            assert_eq!(index["metadata"]["total_size"], bytes);
            assert_eq!(index["weight_map"].as_object().unwrap().len(), stored.len());
            let again = HfFolder::open(out.path(), &model).unwrap();
            assert_eq!((again.files(), again.notes()), (files, &[][..]));
        }
    }
}

/// Nearest bfloat16 by search among the two neighbours, in exact arithmetic of f64.
fn naive_bf16(value: f32) -> u16 {
    let down = (value.to_bits() >> 16) as u16;
    let of = |bits: u16| f64::from(decode(Stored::BF16, &bits.to_le_bytes()));
    let up = down + 1; // away from zero; past the largest finite value it is infinite
    // For the distance, infinity stands where the next value would be.
    let up_value = if of(up).is_finite() { of(up) } else { 2f64.powi(128).copysign(f64::from(value)) };
    let (below, above) = ((f64::from(value) - of(down)).abs(), (up_value - f64::from(value)).abs());
    if below < above || (below == above && down.is_multiple_of(2)) { down } else { up }
}

proptest! {
    #[test]
    fn bf16_is_the_nearest_value_ties_to_even(any: u32, low in prop::sample::select(vec![0x8000u32, 0x7fff, 0x8001, 0, 0xffff])) {
        for bits in [any, any & 0xffff_0000 | low] {
            let value = f32::from_bits(bits);
            if value.is_finite() {
                prop_assert_eq!(bf16_bits(value), naive_bf16(value), "{:x}", bits);
            } else {
                let rounded = decode(Stored::BF16, &bf16_bits(value).to_le_bytes());
                prop_assert_eq!(rounded.is_nan(), value.is_nan());
                prop_assert_eq!(rounded.is_sign_negative(), value.is_sign_negative());
            }
        }
    }
}

#[test]
fn bf16_by_hand() {
    let cases = [
        (0x3f80_8000, 0x3f80), // tie, down to even
        (0x3f81_8000, 0x3f82), // tie, up to even
        (0x3f80_8001, 0x3f81),
        (0x3f80_7fff, 0x3f80),
        (0x7f7f_7fff, 0x7f7f), // the largest that stays finite
        (0x7f7f_8000, 0x7f80), // infinite
        (0xff7f_ffff, 0xff80),
        (0x8000_0000, 0x8000), // -0
        (0x0000_8000, 0x0000), // half of the smallest subnormal: tie to even
        (0x0000_8001, 0x0001),
        (0x7f80_0000, 0x7f80),
    ];
    for (bits, want) in cases {
        assert_eq!(bf16_bits(f32::from_bits(bits)), want, "{bits:x}");
    }
    // A NaN whose payload lies in the bits that are cut off must not become infinite.
    assert!(bf16_bits(f32::from_bits(0x7f80_0001)) & 0x7fff > 0x7f80);
}

#[test]
fn all_float16_values_are_read_exactly() {
    let model = Model { hidden: 2, ffn: 65536 / 2, ..model(false, false) };
    let mut stored = weights(&model, Stored::F16, 6);
    let up = stored.iter().position(|s| s.name == "model.layers.0.mlp.up_proj.weight").unwrap();
    let all = (0..=u16::MAX).map(|bits| if bits & 0x7c00 == 0x7c00 { 0 } else { bits });
    stored[up].bytes = all.flat_map(u16::to_le_bytes).collect();
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &stored);
    let folder = HfFolder::open(dir.path(), &model).unwrap();
    let mut out = vec![0.0; 65536];
    folder.read(up, 0, 1, 0..65536, &mut out).unwrap();
    assert_eq!(bits(&out), bits(&naive(&folder.tensors()[up], &stored[up])));
}

#[test]
fn the_tokenizer_comes_along() {
    let [from, to] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for name in ["tokenizer.json", "generation_config.json", "README.md", "model.safetensors"] {
        fs::write(from.path().join(name), name).unwrap();
    }
    let copied = copy_companions(from.path(), to.path()).unwrap();
    assert_eq!(copied, ["generation_config.json", "tokenizer.json"]);
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 2);
    assert_eq!(fs::read_to_string(to.path().join("tokenizer.json")).unwrap(), "tokenizer.json");
    assert!(copy_companions(from.path(), &to.path().join("nowhere")).is_err());
}

/// Longer than a run, so that reading crosses runs and gives memory back in between.
#[test]
fn long_slices_are_read_in_runs() {
    let model = Model { hidden: 1030, ffn: 604, ..model(true, false) };
    let stored = weights(&model, Stored::BF16, 8);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &stored);
    let folder = HfFolder::open(dir.path(), &model).unwrap();
    for part in ["mlp.down_proj", "mlp.up_proj"] {
        let name = format!("model.layers.1.{part}.weight");
        let number = stored.iter().position(|stored| stored.name == name).unwrap();
        let tensor = &folder.tensors()[number];
        let whole = naive(tensor, &stored[number]);
        for t in 0..2 {
            let (rows, cols) = tensor.slice(t, 2);
            let slice: Vec<f32> = rows.flat_map(|row| whole[row * tensor.cols..][cols.clone()].to_vec()).collect();
            assert!(slice.len() > 1 << 18);
            let mut out = vec![f32::NAN; slice.len() - 7];
            folder.read(number, t, 2, 7..slice.len(), &mut out).unwrap();
            assert!(bits(&out) == bits(&slice[7..]), "{name} {t}");
        }
    }
}

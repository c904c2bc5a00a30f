//! Folders made with the safetensors library alone, and a naive reader.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use checkpoint::hf::ExportOptions;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use spec::Model;
use spec::hf::{Export, HfConfig, Style};
use spec::tensors::{Tensor, tensors};

use crate::common::Rng;

pub fn model(tied: bool, qk_norm: bool) -> Model {
    Model {
        hidden: 24,
        layers: 2,
        heads: 4,
        kv_heads: 4,
        head_dim: 6,
        ffn: 40,
        vocab: 70,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        qk_norm,
        tied,
        init_std: 0.02,
        moe: None,
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Finite random weights of every tensor of `model`.
pub fn weights(model: &Model, dtype: Dtype, seed: u64) -> Vec<Stored> {
    let mut rng = Rng(seed);
    tensors(model)
        .iter()
        .map(|tensor| {
            let shape = match tensor.name.ends_with("norm.weight") {
                true => vec![tensor.cols],
                false => vec![tensor.real_rows, tensor.cols],
            };
            let bytes = (0..tensor.real_len()).flat_map(|_| value(dtype, &mut rng)).collect();
            Stored { name: tensor.name.clone(), dtype, shape, bytes }
        })
        .collect()
}

/// Any finite bits.
fn value(dtype: Dtype, rng: &mut Rng) -> Vec<u8> {
    loop {
        let bytes = rng.next().to_le_bytes()[..dtype.bitsize() / 8].to_vec();
        if decode(dtype, &bytes).is_finite() {
            return bytes;
        }
    }
}

/// The value of one element, by the definition of its type.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        Dtype::BF16 => f32::from_le_bytes([0, 0, bytes[0], bytes[1]]),
        Dtype::F16 => {
            let bits = u16::from_le_bytes(bytes.try_into().unwrap());
            let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), f32::from(bits & 1023) / 1024.0);
            let size = match exponent {
                0 => fraction * 2f32.powi(-14),
                31 if fraction == 0.0 => f32::INFINITY,
                31 => f32::NAN,
                _ => (1.0 + fraction) * 2f32.powi(exponent - 15),
            };
            if sign == 1 { -size } else { size }
        }
        _ => panic!("no such type in these tests"),
    }
}

/// The whole tensor with its padding rows, in float32.
pub fn naive(tensor: &Tensor, stored: &Stored) -> Vec<f32> {
    let mut values: Vec<f32> =
        stored.bytes.chunks(stored.dtype.bitsize() / 8).map(|bytes| decode(stored.dtype, bytes)).collect();
    values.resize(tensor.rows * tensor.cols, 0.0);
    values
}

pub fn file(stored: &[Stored]) -> Vec<u8> {
    let views = stored.iter().map(|s| (s.name.clone(), TensorView::new(s.dtype, s.shape.clone(), &s.bytes).unwrap()));
    serialize(views, None).unwrap()
}

/// One file.
pub fn write(dir: &Path, stored: &[Stored]) {
    fs::write(dir.join("model.safetensors"), file(stored)).unwrap();
}

/// Shards `a.safetensors`, `b.safetensors`, ... and an index.
pub fn write_shards(dir: &Path, shards: &[&[Stored]]) {
    let mut map = BTreeMap::new();
    for (shard, name) in shards.iter().zip('a'..) {
        let name = format!("{name}.safetensors");
        fs::write(dir.join(&name), file(shard)).unwrap();
        map.extend(shard.iter().map(|stored| (stored.name.clone(), name.clone())));
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Every tensor of every safetensors file in a folder, by name.
pub fn stored_in(dir: &Path) -> BTreeMap<String, Stored> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in file.tensors() {
            let stored = Stored {
                name: name.clone(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: view.data().to_vec(),
            };
            assert!(all.insert(name, stored).is_none());
        }
    }
    all
}

pub fn config_json(model: &Model, base: Option<&HfConfig>, options: ExportOptions, style: Style) -> String {
    let dtype = options.dtype.name();
    Export { style, dtype, max_positions: 64, eos_token_id: None, base }.config_json(model)
}

//! Writing a folder: rows come from any source, block by block.
//!
//! Tensors go to shards in canonical order, as many as fit; inside a file they lie by name,
//! as the safetensors library writes them.

use std::error::Error;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, json};
use spec::Model;
use spec::hf::HfConfig;
use spec::moe::AuxScope;
use spec::tensors::{Tensor, tensors};

use super::convert::{Dtype, first_not_finite, narrow};
use super::error::HfError;
use super::index::Index;
use super::{CONFIG, INDEX, SINGLE, file_shape, shard};
use crate::storage::{Disk, Storage, write_whole};

/// Size of a shard unless another is asked for, bytes.
pub const SHARD_BYTES_MAX: u64 = 5_000_000_000;

/// Elements that are asked of the source at once (4 MiB), or one row.
const BLOCK_ELEMENTS: usize = 1 << 20;

/// How to write a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportOptions {
    /// Type of the stored weights.
    pub dtype: Dtype,
    /// No shard has more bytes of data than this, unless a single tensor does.
    pub shard_bytes_max: u64,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { dtype: Dtype::F32, shard_bytes_max: SHARD_BYTES_MAX }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// Files of weights.
    pub files: usize,
    /// Bytes of weights.
    pub bytes: u64,
    /// Weights.
    pub parameters: u64,
}

/// Where the weights come from: fills the last argument with whole rows (the second, never
/// padding) of a tensor (the first, index in canonical order).
pub type ReadRows<'a> = dyn FnMut(usize, Range<usize>, &mut [f32]) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// Writes a Hugging Face folder: `config.json`, then the weights of `model` in one file or in
/// shards, then their index. Each file gets its name when it is complete, the last one makes
/// the folder whole; after an error nothing is left.
///
/// `read` is called for ascending rows of one tensor after the other.
///
/// # Errors
/// [`HfError::NotEmpty`], [`HfError::Config`] if `config_json` does not describe `model`,
/// [`HfError::NotFinite`], [`HfError::TooLarge`], [`HfError::Source`], [`HfError::Io`].
pub fn export(
    dir: &Path,
    model: &Model,
    config_json: &str,
    options: ExportOptions,
    read: &mut ReadRows<'_>,
) -> Result<Exported, HfError> {
    export_to(&Disk, dir, model, config_json, options, read)
}

/// The model without what only its training reads, and without a width that experts stand in for: a folder cannot say these.
fn computed(model: &Model) -> Model {
    let mut model = Model { init_std: 0.0, ..model.clone() };
    if let Some(moe) = &mut model.moe {
        model.ffn = moe.ffn;
        (moe.aux_loss, moe.aux_scope) = (0.0, AuxScope::Layer);
    }
    model
}

/// [`export`] to any storage.
///
/// # Errors
/// As [`export`].
pub fn export_to(
    storage: &dyn Storage,
    dir: &Path,
    model: &Model,
    config_json: &str,
    options: ExportOptions,
    read: &mut ReadRows<'_>,
) -> Result<Exported, HfError> {
    let written = HfConfig::parse(CONFIG, config_json).map_err(|e| HfError::Config { reason: e.to_string() })?;
    if computed(&written.model) != computed(model) {
        return Err(HfError::Config { reason: format!("it says {:?}, the model is {model:?}", written.model) });
    }
    let fresh = !dir.exists();
    storage.create_dir(dir).map_err(HfError::io("create", dir))?;
    if fs::read_dir(dir).map_err(HfError::io("list", dir))?.next().is_some() {
        return Err(HfError::NotEmpty { folder: dir.into() });
    }
    let mut names = Vec::new();
    let result = write_all(storage, dir, model, config_json, options, read, &mut names)
        .and_then(|exported| storage.sync_dir(dir).map_err(HfError::io("sync", dir)).map(|()| exported));
    if result.is_err() {
        // The first error counts; without the last file the others mean nothing.
        for path in names {
            let _ = storage.remove(&path);
        }
        if fresh {
            let _ = fs::remove_dir(dir);
        }
    }
    result
}

fn write_all(
    storage: &dyn Storage,
    dir: &Path,
    model: &Model,
    config_json: &str,
    options: ExportOptions,
    read: &mut ReadRows<'_>,
    names: &mut Vec<PathBuf>,
) -> Result<Exported, HfError> {
    let tensors = tensors(model);
    let size = |tensor: &Tensor| (tensor.real_len() * options.dtype.bytes()) as u64;
    let shards = plan(&tensors, size, options.shard_bytes_max);
    let mut text =
        |name: &str, text: &str| {
            let path = dir.join(name);
            write_whole(storage, &path, |file| file.write_all(text.as_bytes()))
                .map_err(|(action, cause)| HfError::Io { action, path: path.clone(), cause })?;
            names.push(path);
            Ok(())
        };
    text(CONFIG, config_json)?;
    let mut index = Index { metadata: Map::new(), weight_map: Default::default() };
    let mut paths = Vec::new();
    let written = shards.iter().enumerate().try_for_each(|(number, members)| {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        index.weight_map.extend(tensors[members.clone()].iter().map(|tensor| (tensor.name.clone(), name.clone())));
        let path = dir.join(name);
        write_shard(storage, &path, &tensors, members.clone(), options.dtype, read)?;
        paths.push(path);
        Ok(())
    });
    let exported = Exported {
        files: shards.len(),
        bytes: tensors.iter().map(size).sum(),
        parameters: tensors.iter().map(|tensor| tensor.real_len() as u64).sum(),
    };
    let indexed = written.and_then(|()| {
        if shards.len() == 1 {
            return Ok(());
        }
        index.metadata.insert("total_parameters".into(), json!(exported.parameters));
        index.metadata.insert("total_size".into(), json!(exported.bytes));
        let pretty = serde_json::to_string_pretty(&index).expect("plain data has a JSON form");
        text(INDEX, &(pretty + "\n"))
    });
    names.append(&mut paths);
    indexed.map(|()| exported)
}

/// Ranges of tensors, each a shard: as many as fit in `max` bytes, at least one.
fn plan(tensors: &[Tensor], size: impl Fn(&Tensor) -> u64, max: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (number, tensor) in tensors.iter().enumerate() {
        if number > start && bytes + size(tensor) > max {
            shards.push(start..number);
            (start, bytes) = (number, 0);
        }
        bytes += size(tensor);
    }
    shards.push(start..tensors.len());
    shards
}

fn write_shard(
    storage: &dyn Storage,
    path: &Path,
    tensors: &[Tensor],
    members: Range<usize>,
    dtype: Dtype,
    read: &mut ReadRows<'_>,
) -> Result<(), HfError> {
    let mut order: Vec<usize> = members.collect();
    order.sort_by(|a, b| tensors[*a].name.cmp(&tensors[*b].name));
    let shapes: Vec<_> = order.iter().map(|&i| (tensors[i].name.as_str(), file_shape(&tensors[i]))).collect();
    let header = shard::header(dtype.stored(), &shapes).map_err(HfError::NoSuchPart)?;
    let mut failed = None;
    let result = write_whole(storage, path, |file| {
        file.write_all(&header)?;
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        for &number in &order {
            let tensor = &tensors[number];
            let rows_max = (BLOCK_ELEMENTS / tensor.cols).max(1);
            for start in (0..tensor.real_rows).step_by(rows_max) {
                let rows = start..tensor.real_rows.min(start + rows_max);
                values.resize(rows.len() * tensor.cols, 0.0);
                if let Err(error) = block(tensor, number, rows, dtype, read, &mut values, &mut bytes) {
                    failed = Some(error);
                    return Err(io::ErrorKind::Other.into());
                }
                file.write_all(&bytes)?;
            }
        }
        Ok(())
    });
    match (failed, result) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err((action, cause))) => Err(HfError::Io { action, path: path.into(), cause }),
    }
}

/// The bytes of some rows.
fn block(
    tensor: &Tensor,
    number: usize,
    rows: Range<usize>,
    dtype: Dtype,
    read: &mut ReadRows<'_>,
    values: &mut [f32],
    bytes: &mut Vec<u8>,
) -> Result<(), HfError> {
    let name = || tensor.name.clone();
    read(number, rows.clone(), values).map_err(|cause| HfError::Source { tensor: name(), cause })?;
    let place = |at: usize| (rows.start + at / tensor.cols, at % tensor.cols, values[at]);
    if let Some(at) = first_not_finite(values) {
        let (row, col, value) = place(at);
        return Err(HfError::NotFinite { tensor: name(), row, col, value, place: "what is to be exported".into() });
    }
    narrow(dtype, values, bytes).map_err(|at| {
        let (row, col, value) = place(at);
        HfError::TooLarge { tensor: name(), row, col, value, dtype: dtype.name() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Run;

    /// What only training reads does not keep a model from being exported; what the weights are for does.
    #[test]
    fn a_model_is_what_its_weights_compute() {
        let model = |more: &str| {
            let experts = "experts = 4\nexperts_per_token = 2\nexpert_ffn = 88\n";
            let text = format!(
                "[model]\npreset = \"tiny\"\n{experts}{more}\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 2\nseq = 32\n"
            );
            Run::parse(&text, "test", &[], 1).unwrap().model
        };
        let plain = model("");
        for more in ["aux_loss = 1e-2", "aux_loss = 1e-2\naux_scope = \"pooled\"", "init_std = 0.01", "ffn = 88"] {
            assert_eq!(computed(&model(more)), computed(&plain), "{more}");
        }
        for more in ["router_renorm = false", "norm_eps = 1e-6", "tied = true", "shared_ffn = 8", "rope_theta = 5.0"] {
            assert_ne!(computed(&model(more)), computed(&plain), "{more}");
        }
    }
}

//! Opening a folder: every tensor is where the model says, before anything is read.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use spec::Model;
use spec::tensors::{Role, Tensor, tensors};

use super::convert::{Dtype, widen};
use super::error::{Fault, HfError};
use super::index::Index;
use super::shard::{Entry, Shard};
use super::{INDEX, SINGLE, file_shape};

/// Bytes that are compared at once.
const COMPARE_BYTES: usize = 4 << 20;

/// The weights of a Hugging Face folder, mapped and checked against a model.
///
/// It may be read from several threads at once. Nobody may change its files meanwhile.
#[derive(Debug)]
pub struct HfFolder {
    pub(super) path: PathBuf,
    pub(super) tensors: Vec<Tensor>,
    /// Of each tensor: shard, type, first byte.
    pub(super) places: Vec<Place>,
    pub(super) shards: Vec<Shard>,
    notes: Vec<String>,
}

/// Where a tensor is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub shard: usize,
    pub dtype: Dtype,
    pub start: usize,
}

impl HfFolder {
    /// Opens the weights in the folder `dir` as those of `model` (from [`spec::hf::HfConfig`]).
    ///
    /// All names, shapes, types and sizes are checked; values are checked when they are read.
    /// `lm_head.weight` may be there in a tied model if it equals the embedding bit by bit.
    ///
    /// # Errors
    /// [`HfError::NoWeights`], [`HfError::Ambiguous`], [`HfError::Index`], [`HfError::File`],
    /// [`HfError::Tensors`] with every tensor that does not fit, [`HfError::Io`].
    pub fn open(dir: &Path, model: &Model) -> Result<Self, HfError> {
        let (shards, index) = open_shards(dir)?;
        let mut notes = stray(dir, &shards)?;
        let mut faults = Vec::new();
        let found = gather(&shards, index.as_ref(), &mut faults);
        let bytes: usize = found.values().map(|(_, entry)| entry.bytes.len()).sum();
        if let Some(size) = index.as_ref().and_then(Index::total_size).filter(|size| *size != bytes as u64) {
            notes.push(format!("{INDEX} says that all tensors have {size} bytes, they have {bytes}"));
        }
        let tensors = tensors(model);
        let mut places = Vec::with_capacity(tensors.len());
        let listed = |name: &str| index.as_ref().is_some_and(|index| index.weight_map.contains_key(name));
        for tensor in &tensors {
            let Some(&(shard, entry)) = found.get(tensor.name.as_str()) else {
                // One that the index places wrongly has its fault already.
                if !listed(&tensor.name) {
                    faults.push(match tensor.role {
                        Role::LmHead => Fault::HeadMissing,
                        _ => Fault::Missing { tensor: tensor.name.clone() },
                    });
                }
                continue;
            };
            let (tensor_name, file) = (tensor.name.clone(), shards[shard].name.clone());
            let want = file_shape(tensor);
            if entry.shape != want {
                let found = entry.shape.clone();
                faults.push(Fault::Shape { tensor: tensor_name, file, found, want });
                continue;
            }
            match Dtype::of(entry.dtype) {
                Some(dtype) => places.push(Place { shard, dtype, start: entry.bytes.start }),
                None => faults.push(Fault::Dtype { tensor: tensor_name, file, found: entry.dtype.to_string() }),
            }
        }
        let known: HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        for (&name, &(shard, entry)) in &found {
            if known.contains(name) {
                continue;
            }
            let shard = &shards[shard];
            let (tensor, file) = (name.to_string(), shard.name.clone());
            if model.tied && name == "lm_head.weight" {
                let same = found.get(tensors[0].name.as_str()).map(|(other, embed)| {
                    embed.dtype == entry.dtype
                        && embed.shape == entry.shape
                        && same_bytes((&shards[*other], embed), (shard, entry))
                });
                match same {
                    Some(true) => notes.push("lm_head.weight equals the embedding, which is tied to it".into()),
                    Some(false) => faults.push(Fault::HeadDiffers),
                    None => {}
                }
            } else if name.ends_with(".rotary_emb.inv_freq") {
                if !frequencies(model, shard, entry) {
                    faults.push(Fault::Frequencies { tensor, file });
                }
            } else {
                faults.push(Fault::Extra { tensor, file });
            }
        }
        if !faults.is_empty() {
            return Err(HfError::Tensors { folder: dir.into(), faults });
        }
        Ok(Self { path: dir.into(), tensors, places, shards, notes })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors of the model, in canonical order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Type in which a tensor is stored (index in canonical order).
    pub fn dtype(&self, tensor: usize) -> Dtype {
        self.places[tensor].dtype
    }

    /// Number of files that hold the weights.
    pub fn files(&self) -> usize {
        self.shards.len()
    }

    /// What the person should know: files that are not read, redundant tensors.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file())
}

fn open_shards(dir: &Path) -> Result<(Vec<Shard>, Option<Index>), HfError> {
    let (single, index_path) = (dir.join(SINGLE), dir.join(INDEX));
    match (is_file(&single), is_file(&index_path)) {
        (true, true) => Err(HfError::Ambiguous { folder: dir.into() }),
        (true, false) => Ok((vec![Shard::open(&single)?], None)),
        (false, true) => {
            let index = Index::read(&index_path)?;
            let mut shards = Vec::new();
            for file in index.files() {
                let path = dir.join(file);
                if !is_file(&path) {
                    let reason = format!("it is missing, but {INDEX} places tensors in it");
                    return Err(HfError::File { path, reason });
                }
                shards.push(Shard::open(&path)?);
            }
            Ok((shards, Some(index)))
        }
        (false, false) => {
            let names = file_names(dir)?;
            let found = match names.iter().find(|name| name.ends_with(".bin") || name.ends_with(".pth")) {
                Some(name) => format!(" ({name} holds weights in a form that may run code: it is not read)"),
                None => String::new(),
            };
            Err(HfError::NoWeights { folder: dir.into(), found })
        }
    }
}

fn file_names(dir: &Path) -> Result<Vec<String>, HfError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(HfError::io("list", dir))? {
        let entry = entry.map_err(HfError::io("list", dir))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// A note for each file of weights that is not read.
fn stray(dir: &Path, shards: &[Shard]) -> Result<Vec<String>, HfError> {
    let mut names = file_names(dir)?;
    names.retain(|name| name.ends_with(".safetensors") && shards.iter().all(|shard| shard.name != *name));
    Ok(names.into_iter().map(|name| format!("{name} is not part of the model and is not read")).collect())
}

/// Every tensor of the files by name. Those that are not where the index says are faults.
fn gather<'a>(
    shards: &'a [Shard],
    index: Option<&Index>,
    faults: &mut Vec<Fault>,
) -> BTreeMap<&'a str, (usize, &'a Entry)> {
    let mut found: BTreeMap<&str, (usize, &Entry)> = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        for (name, entry) in &shard.entries {
            let (tensor, file) = (name.clone(), shard.name.clone());
            if let Some((first, _)) = found.get(name.as_str()) {
                faults.push(Fault::Twice { tensor, files: [shards[*first].name.clone(), file] });
                continue;
            }
            found.insert(name, (number, entry));
            if index.is_some_and(|index| !index.weight_map.contains_key(name)) {
                faults.push(Fault::Unlisted { tensor, file });
            }
        }
    }
    for (tensor, file) in index.iter().flat_map(|index| &index.weight_map) {
        let there = shards.iter().any(|shard| shard.name == *file && shard.entries.contains_key(tensor));
        if !there {
            faults.push(Fault::NotInShard { tensor: tensor.clone(), file: file.clone() });
        }
    }
    found
}

/// True if two tensors have the same bytes.
fn same_bytes(a: (&Shard, &Entry), b: (&Shard, &Entry)) -> bool {
    let len = a.1.bytes.len();
    (0..len).step_by(COMPARE_BYTES).all(|at| {
        let run = COMPARE_BYTES.min(len - at);
        let [x, y] = [a, b].map(|(shard, entry)| {
            let start = entry.bytes.start + at;
            (shard, start..start + run)
        });
        let same = x.0.bytes(x.1.clone()) == y.0.bytes(y.1.clone());
        x.0.release(x.1);
        y.0.release(y.1);
        same
    })
}

/// True if a stored table of rotary frequencies, as old folders have them, is that of `model`
/// within the rounding of its type.
fn frequencies(model: &Model, shard: &Shard, entry: &Entry) -> bool {
    let Some(dtype) = Dtype::of(entry.dtype) else { return false };
    if entry.shape != [model.head_dim / 2] {
        return false;
    }
    let mut table = vec![0.0; model.head_dim / 2];
    widen(dtype, shard.bytes(entry.bytes.clone()), &mut table);
    table.iter().enumerate().all(|(i, value)| {
        let want = model.rope_theta.powf(-2.0 * i as f64 / model.head_dim as f64);
        (f64::from(*value) - want).abs() <= want * 0.01 + 1e-7
    })
}

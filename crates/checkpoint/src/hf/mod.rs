//! Hugging Face folders: weights in and out, without a second copy of the model in memory.
//!
//! - [`HfFolder::open`] maps `model.safetensors` or the shards of an index and checks names,
//!   shapes and types of every tensor; [`HfFolder::read`] gives any part of any slice in
//!   float32.
//! - [`export`] writes such a folder from any source of rows, [`export_checkpoint`] from a
//!   checkpoint of this crate; [`copy_companions`] brings the tokenizer along.
//!
//! What `config.json` says is parsed by [`spec::hf`].

mod companions;
mod convert;
mod error;
mod export;
mod folder;
#[cfg(test)]
mod fuzz;
mod index;
mod native;
mod read;
mod shard;

pub use companions::{COMPANIONS, copy_companions};
pub use convert::{Dtype, bf16_bits};
pub use error::{Fault, HfError};
pub use export::{ExportOptions, Exported, ReadRows, SHARD_BYTES_MAX, export, export_to};
pub use folder::HfFolder;
pub use native::export_checkpoint;

use std::path::Path;

use spec::tensors::{Role, Tensor};

use crate::foreign::Listed;

/// Config of the model in a folder.
pub const CONFIG: &str = "config.json";
/// Weights in one file.
pub const SINGLE: &str = "model.safetensors";
/// Which shard holds which tensor.
pub const INDEX: &str = "model.safetensors.index.json";

/// The tensors of one safetensors file, by name; their `files` are left to the caller.
pub(crate) fn file_tensors(path: &Path) -> Result<Vec<Listed>, HfError> {
    let listed = |(name, entry): (String, shard::Entry)| Listed {
        name,
        dtype: entry.dtype.to_string(),
        shape: Some(entry.shape.iter().map(|n| *n as u64).collect()),
        bytes: entry.bytes.len() as u64,
        files: Vec::new(),
    };
    Ok(shard::Shard::open(path)?.entries.into_iter().map(listed).collect())
}

/// The shape of a tensor in the files: without padding rows, vectors with one dimension.
pub(crate) fn file_shape(tensor: &Tensor) -> Vec<usize> {
    match tensor.role {
        Role::AttnNorm | Role::QNorm | Role::KNorm | Role::MlpNorm | Role::FinalNorm | Role::RouterBias => {
            vec![tensor.cols]
        }
        _ => vec![tensor.real_rows, tensor.cols],
    }
}

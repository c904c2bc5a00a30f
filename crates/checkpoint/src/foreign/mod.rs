//! Checkpoints of other programs: what is in them and whether it is all there. They carry no hashes, so structure is all
//! that can be verified.

mod dcp;
#[cfg(test)]
mod fuzz;
mod pickle;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::hf::file_tensors;

/// A tensor, or other entry, of a foreign checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its type, as the format names it; `bytes` for what is no tensor.
    pub dtype: String,
    /// Its shape; `None` for what is no tensor.
    pub shape: Option<Vec<u64>>,
    /// Bytes that it takes in the files.
    pub bytes: u64,
    /// The files that hold it.
    pub files: Vec<String>,
}

/// What a foreign checkpoint holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// `torch DCP` or `safetensors`.
    pub format: &'static str,
    /// By name.
    pub tensors: Vec<Listed>,
    /// (name, bytes) of the files that hold them.
    pub files: Vec<(String, u64)>,
    /// What is wrong.
    pub problems: Vec<String>,
}

/// The structure of the folder or file at `path`; `None` if it is of no known format.
///
/// # Errors
/// [`CheckpointError::File`] for a file whose structure cannot be read, [`CheckpointError::Io`].
pub fn look(path: &Path) -> Result<Option<Structure>, CheckpointError> {
    let metadata = path.join(".metadata");
    if metadata.is_file() {
        let bad = |reason| CheckpointError::File { path: metadata.clone(), reason, older: None };
        let size = fs::metadata(&metadata).map_err(CheckpointError::io("read", &metadata))?.len();
        if size > dcp::METADATA_BYTES_MAX {
            return Err(bad(format!("it has {size} bytes, at most {} are read", dcp::METADATA_BYTES_MAX)));
        }
        let bytes = fs::read(&metadata).map_err(CheckpointError::io("read", &metadata))?;
        return dcp::read(&bytes, path).map(Some).map_err(bad);
    }
    let files = safetensors_files(path)?;
    if files.is_empty() {
        let words = fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .any(|e| e.file_name().to_string_lossy().ends_with(".distcp"));
        if words {
            let reason =
                "it has .distcp files and no .metadata, which is written last: the checkpoint is not complete".into();
            return Err(CheckpointError::File { path: path.into(), reason, older: None });
        }
        return Ok(None);
    }
    let mut structure =
        Structure { format: "safetensors", tensors: Vec::new(), files: Vec::new(), problems: Vec::new() };
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let size = fs::metadata(&path).map_err(CheckpointError::io("read", &path))?.len();
        structure.files.push((name.clone(), size));
        match file_tensors(&path) {
            Ok(tensors) => {
                structure.tensors.extend(tensors.into_iter().map(|t| Listed { files: vec![name.clone()], ..t }));
            }
            Err(error) => structure.problems.push(error.to_string()),
        }
    }
    structure.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    for pair in structure.tensors.windows(2).filter(|pair| pair[0].name == pair[1].name) {
        structure.problems.push(format!("{} is in {} and in {}", pair[0].name, pair[0].files[0], pair[1].files[0]));
    }
    Ok(Some(structure))
}

/// `path` itself, or the files in it, that are safetensors by name; ascending.
fn safetensors_files(path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let named = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    if path.is_file() {
        return Ok(if named(path) { vec![path.into()] } else { Vec::new() });
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(CheckpointError::io("list", path))? {
        let path = entry.map_err(CheckpointError::io("list", path))?.path();
        if named(&path) && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

//! The act that makes written files a checkpoint: the manifest, written last.

use std::fs;
use std::path::{Path, PathBuf};

use spec::tensors::{STATE_CHUNK, Tensor};

use crate::digest::DigestBuilder;
use crate::error::CheckpointError;
use crate::folder::{has_manifest, step_dir};
use crate::manifest::{FileEntry, MANIFEST, Manifest, Meta, cover};
use crate::read::size_fault;
use crate::storage::{Disk, Storage, write_whole};
use crate::tensor::entries;

/// Makes the files of `meta.step` under `root` a checkpoint; returns its folder. One caller
/// calls it with the entries that all ranks got from [`crate::write_pieces`].
///
/// Checks that they hold all state exactly once, that the files are there, and that the
/// digest of what was written is `meta.digest` where that is given. Then removes what earlier
/// attempts left in the folder.
///
/// # Errors
/// [`CheckpointError::Missing`], [`CheckpointError::Twice`], [`CheckpointError::Piece`],
/// [`CheckpointError::File`], [`CheckpointError::DigestDiffers`], [`CheckpointError::Exists`],
/// [`CheckpointError::Io`]; after any of them the folder is not a checkpoint (or still the
/// one that it was).
pub fn commit(root: &Path, tensors: &[Tensor], meta: &Meta, files: Vec<FileEntry>) -> Result<PathBuf, CheckpointError> {
    commit_to(&Disk, root, tensors, meta, files)
}

/// [`commit`] to any storage.
///
/// # Errors
/// As [`commit`].
pub fn commit_to(
    storage: &dyn Storage,
    root: &Path,
    tensors: &[Tensor],
    meta: &Meta,
    mut files: Vec<FileEntry>,
) -> Result<PathBuf, CheckpointError> {
    let folder = step_dir(root, meta.step);
    if has_manifest(&folder) {
        return Err(CheckpointError::Exists { step: meta.step, path: folder });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let tensors = entries(tensors, meta.tp);
    if let Some(fault) = tensors.iter().find_map(|tensor| tensor.fault(meta.tp)) {
        return Err(CheckpointError::NoSuchState(fault));
    }
    cover(&tensors, &files)?;
    for file in &files {
        let path = folder.join(&file.name);
        if let Some(reason) = size_fault(&path, file.bytes) {
            return Err(CheckpointError::File { path, reason, older: None });
        }
    }
    let digest = digest_of(&tensors, &files, meta)?;
    if let Some(agreed) = meta.digest.clone().filter(|agreed| *agreed != digest) {
        return Err(CheckpointError::DigestDiffers { step: meta.step, written: digest, agreed });
    }
    let manifest = Manifest::new(Meta { digest: Some(digest), ..meta.clone() }, tensors, files);
    let text = manifest.seal();
    let path = folder.join(MANIFEST);
    storage.sync_dir(&folder).map_err(CheckpointError::io("sync", &folder))?;
    write_whole(storage, &path, |file| file.write_all(text.as_bytes()))
        .map_err(|(action, cause)| CheckpointError::Io { action, path: path.clone(), cause })?;
    storage.sync_dir(&folder).and_then(|()| storage.sync_dir(root)).map_err(|cause| {
        // Whether the name would survive a crash is unknown: an error means no checkpoint.
        let _ = storage.remove(&path);
        CheckpointError::Io { action: "sync", path: folder.clone(), cause }
    })?;
    remove_strangers(storage, &folder, &manifest.files);
    Ok(folder)
}

fn digest_of(tensors: &[crate::TensorEntry], files: &[FileEntry], meta: &Meta) -> Result<String, CheckpointError> {
    let numbers: std::collections::HashMap<_, _> =
        tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.as_str(), i)).collect();
    let mut builder = DigestBuilder::of_entries(tensors.to_vec(), meta.numerics_version);
    for piece in files.iter().flat_map(|file| &file.pieces) {
        let first = piece.elements.start / STATE_CHUNK;
        builder
            .put(numbers[piece.tensor.as_str()], piece.kind, piece.slice, first, &piece.hashes)
            .map_err(|e| CheckpointError::NoSuchState(e.to_string()))?;
    }
    let digest = builder.finish(meta.cursor).map_err(|e| CheckpointError::NoSuchState(e.to_string()))?;
    Ok(digest.to_string())
}

/// Removes shards and temporary files that the manifest does not list. Best effort: they are
/// never read.
fn remove_strangers(storage: &dyn Storage, folder: &Path, files: &[FileEntry]) {
    let Ok(found) = fs::read_dir(folder) else { return };
    for name in found.flatten().map(|entry| entry.file_name()) {
        let Some(text) = name.to_str() else { continue };
        let ours = text.ends_with(".safetensors") || text.ends_with(".tmp");
        if ours && files.binary_search_by(|file| file.name.as_str().cmp(text)).is_err() {
            let _ = storage.remove(&folder.join(text));
        }
    }
}

//! A checkpoint made of other state than that of ranks: cut otherwise, averaged, imported.

use std::path::{Path, PathBuf};

use spec::tensors::Tensor;

use crate::commit::commit_to;
use crate::error::CheckpointError;
use crate::manifest::Meta;
use crate::read::Checkpoint;
use crate::storage::Storage;
use crate::tensor::{Kind, TensorEntry};
use crate::write::{PieceRef, write_pieces_to};

/// Gives one kind of a whole tensor (index in canonical order), row-major, padding rows included.
pub type WholeTensor<'a, E> = dyn FnMut(usize, Kind) -> Result<Vec<f32>, E> + 'a;

/// Writes a checkpoint under `root` of whole tensors that `source` gives, cut for `meta.tp` tensor cells; returns its folder.
/// In memory is what lies between two layers.
///
/// # Errors
/// Those of `source`, of [`crate::write_pieces`] and of [`crate::commit`].
pub fn write_tensors<E: From<CheckpointError>>(
    storage: &dyn Storage,
    root: &Path,
    tensors: &[Tensor],
    meta: &Meta,
    source: &mut WholeTensor<'_, E>,
) -> Result<PathBuf, E> {
    let mut files = Vec::new();
    let mut start = 0;
    for group in tensors.chunk_by(|a, b| a.home == b.home) {
        let mut cut = Vec::new();
        for (number, tensor) in group.iter().enumerate() {
            let entry = TensorEntry::of(tensor, meta.tp);
            for kind in Kind::ALL {
                let whole = source(start + number, kind)?;
                cut.extend((0..entry.slices).map(|slice| (start + number, kind, slice, entry.slice_of(&whole, slice))));
            }
        }
        let mut pieces = Vec::with_capacity(cut.len());
        for (tensor, kind, slice, data) in &cut {
            pieces.push(PieceRef { tensor: *tensor, kind: *kind, slice: *slice, elements: 0..data.len(), data });
        }
        files.extend(write_pieces_to(storage, root, meta.step, tensors, meta.tp, &pieces)?);
        start += group.len();
    }
    Ok(commit_to(storage, root, tensors, meta, files)?)
}

/// The mean of one parameter over `all`, summed in float64 in their order (Polyak averaging).
///
/// # Errors
/// As [`Checkpoint::read_tensor`]; [`CheckpointError::NoSuchState`] if one lacks the tensor or has it in another size.
pub fn mean(all: &[Checkpoint], name: &str) -> Result<Vec<f32>, CheckpointError> {
    let mut sum: Vec<f64> = Vec::new();
    for one in all {
        let place = one.path().display();
        let number =
            one.tensor_index(name).ok_or_else(|| CheckpointError::NoSuchState(format!("{name} in {place}")))?;
        let values = one.read_tensor(number, Kind::Param)?;
        if sum.is_empty() {
            sum.resize(values.len(), 0.0);
        }
        if sum.len() != values.len() {
            let what = format!("{name} of {} elements in {place}, which has {}", sum.len(), values.len());
            return Err(CheckpointError::NoSuchState(what));
        }
        sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    let count = all.len() as f64;
    Ok(sum.into_iter().map(|sum| (sum / count) as f32).collect())
}

impl TensorEntry {
    /// One slice of a whole tensor, row-major.
    pub fn slice_of(&self, whole: &[f32], slice: usize) -> Vec<f32> {
        let len = self.slice_len();
        if self.cut != spec::tensors::Cut::Cols {
            return whole[slice * len..(slice + 1) * len].to_vec();
        }
        let width = self.cols / self.slices;
        whole.chunks_exact(self.cols).flat_map(|row| &row[slice * width..(slice + 1) * width]).copied().collect()
    }
}

//! A checkpoint of this crate as the source of an export.

use std::ops::Range;
use std::path::Path;

use spec::Model;
use spec::tensors::{Cut, tensors};

use super::error::HfError;
use super::export::{ExportOptions, Exported, export};
use crate::error::CheckpointError;
use crate::read::Checkpoint;
use crate::tensor::{Kind, TensorEntry};

/// Writes the parameters in `from` as a Hugging Face folder; its slices are put together row
/// by row, and the hash of every chunk is checked.
///
/// # Errors
/// [`HfError::OtherModel`] if the checkpoint does not hold `model`; as [`export`].
pub fn export_checkpoint(
    from: &Checkpoint,
    model: &Model,
    dir: &Path,
    config_json: &str,
    options: ExportOptions,
) -> Result<Exported, HfError> {
    let (ours, theirs, tp) = (tensors(model), from.tensors(), from.meta().tp);
    for number in 0..ours.len().max(theirs.len()) {
        let entries = [ours.get(number).map(|tensor| TensorEntry::of(tensor, tp)), theirs.get(number).cloned()];
        if entries[0] == entries[1] {
            continue;
        }
        let tensor = entries.iter().flatten().next().map(|entry| entry.name.clone()).unwrap_or_default();
        let [ours, theirs] = entries.map(|entry| match entry {
            Some(TensorEntry { name, rows, cols, .. }) => format!("{name} {rows} x {cols}"),
            None => "absent".into(),
        });
        return Err(HfError::OtherModel { path: from.path().into(), tensor, theirs, ours });
    }
    let mut part = Vec::new();
    export(dir, model, config_json, options, &mut |tensor, rows, out| {
        read_rows(from, tensor, rows, &mut part, out).map_err(Into::into)
    })
}

/// Whole rows of a parameter, whatever its cut. `part` is scratch.
fn read_rows(
    from: &Checkpoint,
    tensor: usize,
    rows: Range<usize>,
    part: &mut Vec<f32>,
    out: &mut [f32],
) -> Result<(), CheckpointError> {
    let entry = &from.tensors()[tensor];
    if entry.cut == Cut::Cols {
        let width = entry.cols / entry.slices;
        part.resize(rows.len() * width, 0.0);
        for slice in 0..entry.slices {
            from.read(tensor, Kind::Param, slice, rows.start * width..rows.end * width, part)?;
            for (out, row) in out.chunks_exact_mut(entry.cols).zip(part.chunks_exact(width)) {
                out[slice * width..][..width].copy_from_slice(row);
            }
        }
        return Ok(());
    }
    // Slices are runs of whole rows: they follow one another.
    let len = entry.slice_len();
    let (mut at, mut rest) = (rows.start * entry.cols, out);
    while !rest.is_empty() {
        let (slice, start) = (at / len, at % len);
        let (now, after) = rest.split_at_mut((len - start).min(rest.len()));
        from.read(tensor, Kind::Param, slice, start..start + now.len(), now)?;
        (at, rest) = (at + now.len(), after);
    }
    Ok(())
}

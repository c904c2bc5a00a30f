//! Writing: each rank puts its pieces in files named by what they hold.

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread::{ScopedJoinHandle, scope};

use spec::tensors::{Home, STATE_CHUNK, Tensor};

use crate::digest::HashPiece;
use crate::error::{CheckpointError, Place};
use crate::folder::{has_manifest, step_dir};
use crate::hash::{Hash, chunk_hashes, chunks, push_bytes, range_fault};
use crate::header;
use crate::manifest::{FileEntry, PieceEntry};
use crate::storage::{Disk, Storage, StorageFile, stage, temporary};
use crate::tensor::Kind;

/// Chunks that go to the file system in one write (256 KiB): what is put together for it stays in a core's cache.
const CHUNKS_PER_WRITE: usize = 4;

/// Files that are synced at a time, beside the one that is written.
const SYNCS_MAX: usize = 8;

/// State of one piece, to be written.
#[derive(Debug, Clone)]
pub struct PieceRef<'a> {
    /// Tensor, index in canonical order.
    pub tensor: usize,
    /// Kind of state.
    pub kind: Kind,
    /// Slice.
    pub slice: usize,
    /// Elements of the slice, row-major: whole state chunks. An empty piece is left out.
    pub elements: Range<usize>,
    /// The values of `elements`.
    pub data: &'a [f32],
}

/// Writes `pieces` of the state after `step` under `root`. Every rank calls it for the pieces
/// that it is to write; then one caller gives all entries to [`crate::commit`].
///
/// Pieces are grouped in one file per (home, slice), named after its first piece: disjoint
/// pieces never share a name, whichever rank writes them. Each file is written under a
/// temporary name and synced while the next one is written; when all are, the pieces are hashed while the disk is at work.
/// Then the files are renamed. What changed between memory and disk is found by whoever reads it.
///
/// # Errors
/// [`CheckpointError::Exists`] if the step has a manifest; [`CheckpointError::Piece`] or
/// [`CheckpointError::Twice`] for pieces that cannot be; [`CheckpointError::Io`], after which
/// nothing that this call wrote is left.
pub fn write_pieces(
    root: &Path,
    step: u64,
    tensors: &[Tensor],
    tp: usize,
    pieces: &[PieceRef<'_>],
) -> Result<Vec<FileEntry>, CheckpointError> {
    write_pieces_to(&Disk, root, step, tensors, tp, pieces)
}

/// [`write_pieces`] to any storage.
///
/// # Errors
/// As [`write_pieces`].
pub fn write_pieces_to(
    storage: &dyn Storage,
    root: &Path,
    step: u64,
    tensors: &[Tensor],
    tp: usize,
    pieces: &[PieceRef<'_>],
) -> Result<Vec<FileEntry>, CheckpointError> {
    write_files(storage, root, step, tensors, tp, pieces, chunk_hashes)
}

/// Files that were written, whose pieces are not hashed yet.
#[derive(Debug)]
#[must_use]
pub struct Unhashed(Vec<FileEntry>);

/// [`write_pieces`] for who hashes the pieces meanwhile.
///
/// # Errors
/// As [`write_pieces`].
pub fn write_unhashed(
    root: &Path,
    step: u64,
    tensors: &[Tensor],
    tp: usize,
    pieces: &[PieceRef<'_>],
) -> Result<Unhashed, CheckpointError> {
    write_files(&Disk, root, step, tensors, tp, pieces, |_| Vec::new()).map(Unhashed)
}

impl Unhashed {
    /// The files with the hashes that are in `hashed`, whose pieces may be larger than those written.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`] if a chunk is not among them.
    pub fn with(mut self, tensors: &[Tensor], hashed: &[HashPiece]) -> Result<Vec<FileEntry>, CheckpointError> {
        let numbers: HashMap<&str, usize> = tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
        let mut known: HashMap<(usize, Kind, usize), Vec<&HashPiece>> = HashMap::new();
        for piece in hashed {
            known.entry((piece.tensor, piece.kind, piece.slice)).or_default().push(piece);
        }
        for piece in self.0.iter_mut().flat_map(|file| &mut file.pieces) {
            let (first, count) = (piece.elements.start / STATE_CHUNK, chunks(piece.elements.len()));
            let of =
                numbers.get(piece.tensor.as_str()).and_then(|number| known.get(&(*number, piece.kind, piece.slice)));
            let found = of.into_iter().flatten().find_map(|hashed| {
                let skip = first.checked_sub(hashed.first_chunk)?;
                hashed.hashes.get(skip..skip + count)
            });
            let place = || Place { tensor: piece.tensor.clone(), kind: piece.kind, slice: piece.slice, chunk: first };
            piece.hashes = found.ok_or_else(|| CheckpointError::Missing(place()))?.to_vec();
        }
        Ok(self.0)
    }
}

fn write_files(
    storage: &dyn Storage,
    root: &Path,
    step: u64,
    tensors: &[Tensor],
    tp: usize,
    pieces: &[PieceRef<'_>],
    hash: impl Fn(&[f32]) -> Vec<Hash>,
) -> Result<Vec<FileEntry>, CheckpointError> {
    let folder = step_dir(root, step);
    if has_manifest(&folder) {
        return Err(CheckpointError::Exists { step, path: folder });
    }
    let pieces = sorted(tensors, tp, pieces)?;
    if pieces.is_empty() {
        return Ok(Vec::new());
    }
    storage.create_dir(&folder).map_err(CheckpointError::io("create", &folder))?;
    let mut files: Vec<FileEntry> = Vec::new();
    let attempt = scope(|scope| {
        let mut syncs: std::collections::VecDeque<(PathBuf, ScopedJoinHandle<'_, io::Result<()>>)> = Default::default();
        let wait = |(path, sync): (PathBuf, ScopedJoinHandle<'_, io::Result<()>>)| {
            let synced = sync.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")));
            synced.map_err(CheckpointError::io("sync", path))
        };
        let groups = || pieces.chunk_by(|a, b| (tensors[a.tensor].home, a.slice) == (tensors[b.tensor].home, b.slice));
        for group in groups() {
            let (entry, mut file) = write_file(storage, &folder, tensors, group)?;
            let path = folder.join(&entry.name);
            files.push(entry);
            match file.handle() {
                Some(handle) => syncs.push_back((path, scope.spawn(move || handle.sync_all()))),
                None => file.sync().map_err(CheckpointError::io("sync", path))?,
            }
            if syncs.len() > SYNCS_MAX {
                syncs.pop_front().map_or(Ok(()), wait)?;
            }
        }
        for (entry, group) in files.iter_mut().zip(groups()) {
            for (piece, data) in entry.pieces.iter_mut().zip(group.iter().map(|piece| piece.data)) {
                piece.hashes = hash(data);
            }
        }
        syncs.into_iter().try_for_each(wait)
    });
    let publish = |file: &FileEntry| {
        let path = folder.join(&file.name);
        storage.rename(&temporary(&path), &path).map_err(CheckpointError::io("rename", path))
    };
    let attempt = attempt
        .and_then(|()| files.iter().try_for_each(publish))
        .and_then(|()| storage.sync_dir(&folder).map_err(CheckpointError::io("sync", &folder)));
    match attempt {
        Ok(()) => Ok(files),
        Err(error) => {
            // Give back the space; without a manifest the files mean nothing.
            for path in files.iter().map(|file| folder.join(&file.name)) {
                let _ = storage.remove(&temporary(&path));
                let _ = storage.remove(&path);
            }
            Err(error)
        }
    }
}

/// The pieces that are not empty, checked, by (home, slice, tensor, kind, first element).
fn sorted<'a, 'b>(
    tensors: &[Tensor],
    tp: usize,
    pieces: &'b [PieceRef<'a>],
) -> Result<Vec<&'b PieceRef<'a>>, CheckpointError> {
    for piece in pieces {
        let Some(tensor) = tensors.get(piece.tensor) else {
            return Err(CheckpointError::NoSuchState(format!("tensor {} of {}", piece.tensor, tensors.len())));
        };
        let fault = |reason| Err(CheckpointError::Piece { tensor: tensor.name.clone(), reason });
        if piece.slice >= tensor.slices(tp) {
            return fault(format!("slice {} of {}", piece.slice, tensor.slices(tp)));
        }
        if piece.data.len() != piece.elements.len() {
            return fault(format!("{} values for elements {:?}", piece.data.len(), piece.elements));
        }
        if !piece.elements.is_empty()
            && let Some(reason) = range_fault(&piece.elements, tensor.slice_len(tp))
        {
            return fault(reason);
        }
    }
    let mut pieces: Vec<_> = pieces.iter().filter(|piece| !piece.elements.is_empty()).collect();
    pieces.sort_by_key(|p| (tensors[p.tensor].home, p.slice, p.tensor, p.kind, p.elements.start));
    for pair in pieces.windows(2) {
        let key = |p: &PieceRef<'_>| (p.tensor, p.kind, p.slice);
        if key(pair[0]) == key(pair[1]) && pair[1].elements.start < pair[0].elements.end {
            let PieceRef { tensor, kind, slice, elements, .. } = pair[1];
            let (tensor, chunk) = (tensors[*tensor].name.clone(), elements.start / STATE_CHUNK);
            return Err(CheckpointError::Twice(Place { tensor, kind: *kind, slice: *slice, chunk }));
        }
    }
    Ok(pieces)
}

/// The name of the file whose first piece is `first`, such as
/// `layer-0003.t1.c000000.self_attn-q_proj.param.safetensors`.
fn file_name(tensors: &[Tensor], first: &PieceRef<'_>) -> String {
    let tensor = &tensors[first.tensor];
    let (home, prefix) = match tensor.home {
        Home::Embed => ("embed".into(), "model.".into()),
        Home::Layer(layer) => (format!("layer-{layer:04}"), format!("model.layers.{layer}.")),
        Home::Head => ("head".into(), "model.".into()),
    };
    let short = tensor.name.strip_prefix(&prefix).unwrap_or(&tensor.name);
    let short = short.strip_suffix(".weight").unwrap_or(short).replace(['.', '/', '\\'], "-");
    let chunk = first.elements.start / STATE_CHUNK;
    format!("{home}.t{}.c{chunk:06}.{short}.{}.safetensors", first.slice, first.kind)
}

/// Writes a file under its temporary name. The hashes of its pieces are still to be taken.
fn write_file(
    storage: &dyn Storage,
    folder: &Path,
    tensors: &[Tensor],
    group: &[&PieceRef<'_>],
) -> Result<(FileEntry, Box<dyn StorageFile>), CheckpointError> {
    let name = file_name(tensors, group[0]);
    let path: PathBuf = folder.join(&name);
    let names: Vec<_> = group
        .iter()
        .map(|p| (header::piece_name(&tensors[p.tensor].name, p.kind, p.slice, &p.elements), p.elements.len()))
        .collect();
    let header = header::encode(&names)
        .map_err(|reason| CheckpointError::Piece { tensor: tensors[group[0].tensor].name.clone(), reason })?;
    let mut pieces = Vec::with_capacity(group.len());
    let mut offset = header.len() as u64;
    let file = stage(storage, &path, |file| {
        file.write_all(&header)?;
        for piece in group {
            pieces.push(PieceEntry {
                tensor: tensors[piece.tensor].name.clone(),
                kind: piece.kind,
                slice: piece.slice,
                elements: piece.elements.clone(),
                offset,
                hashes: Vec::new(),
            });
            write_values(file, piece.data)?;
            offset += piece.data.len() as u64 * 4;
        }
        Ok(())
    })
    .map_err(|(action, cause)| CheckpointError::Io { action, path, cause })?;
    Ok((FileEntry { name, bytes: offset, header_hash: blake3::hash(&header), pieces }, file))
}

/// Writes little-endian values.
fn write_values(file: &mut dyn Write, data: &[f32]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(CHUNKS_PER_WRITE.min(data.len().div_ceil(STATE_CHUNK)) * STATE_CHUNK * 4);
    for run in data.chunks(CHUNKS_PER_WRITE * STATE_CHUNK) {
        bytes.clear();
        push_bytes(run, &mut bytes);
        file.write_all(&bytes)?;
    }
    Ok(())
}

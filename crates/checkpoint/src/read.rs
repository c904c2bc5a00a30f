//! Reading: any range of elements of any slice, whatever pieces were written.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use spec::tensors::{STATE_CHUNK, Tensor};

use crate::error::{CheckpointError, Place};
use crate::folder::{has_manifest, older_than, step_of};
use crate::hash::{Hash, read_values};
use crate::header;
use crate::manifest::{FileEntry, Index, MANIFEST, MANIFEST_BYTES_MAX, Manifest, Meta, PieceEntry, Spot};
use crate::tensor::{Kind, TensorEntry, entries};

/// Chunks that are read from the file system at once (1 MiB).
const CHUNKS_PER_READ: usize = 16;

/// An open checkpoint: its manifest is parsed and its files have their sizes.
///
/// It may be read from several threads at once.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    pub(crate) index: Index,
    /// Files whose header was found good.
    headers_good: Vec<AtomicBool>,
    /// Step of the older complete checkpoint, once it was looked for.
    older: OnceLock<Option<u64>>,
}

/// Why `path` is not a file of `bytes` bytes, if so.
pub(crate) fn size_fault(path: &Path, bytes: u64) -> Option<String> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() && found.len() == bytes => None,
        Ok(found) => Some(format!("it has {} bytes, {bytes} were written", found.len())),
        Err(error) => Some(format!("it cannot be found ({error})")),
    }
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path` (of one step).
    ///
    /// # Errors
    /// [`CheckpointError::NotACheckpoint`], [`CheckpointError::Manifest`],
    /// [`CheckpointError::File`] for a missing or truncated file, [`CheckpointError::Io`].
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_alone(path).map_err(|mut error| {
            if let CheckpointError::Manifest { older, .. } | CheckpointError::File { older, .. } = &mut error {
                *older = step_of(path).and_then(|step| older_than(path, step));
            }
            error
        })
    }

    /// [`Checkpoint::open`] without a look at older checkpoints.
    pub(crate) fn open_alone(path: &Path) -> Result<Self, CheckpointError> {
        if !has_manifest(path) {
            return Err(CheckpointError::NotACheckpoint { path: path.into() });
        }
        let file = path.join(MANIFEST);
        let bad = |reason| CheckpointError::Manifest { path: file.clone(), reason, older: None };
        let size = fs::metadata(&file).map_err(CheckpointError::io("read", &file))?.len();
        if size > MANIFEST_BYTES_MAX {
            return Err(bad(format!("it has {size} bytes, at most {MANIFEST_BYTES_MAX} are read")));
        }
        let bytes = fs::read(&file).map_err(CheckpointError::io("read", &file))?;
        let (manifest, index) = Manifest::parse(&bytes).map_err(bad)?;
        if let Some(step) = step_of(path).filter(|step| *step != manifest.meta.step) {
            return Err(bad(format!("it is of step {}, in the folder of step {step}", manifest.meta.step)));
        }
        for file in &manifest.files {
            let path = path.join(&file.name);
            if let Some(reason) = size_fault(&path, file.bytes) {
                return Err(CheckpointError::File { path, reason, older: None });
            }
        }
        let headers_good = manifest.files.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Self { path: path.into(), manifest, index, headers_good, older: OnceLock::new() })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it belongs to; `digest` is always there.
    pub fn meta(&self) -> &Meta {
        &self.manifest.meta
    }

    /// Its tensors, in canonical order.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.manifest.tensors
    }

    /// Its files, by name.
    pub fn files(&self) -> &[FileEntry] {
        &self.manifest.files
    }

    /// Reads `elements` of one slice into `out`, checking the hash of every chunk it touches.
    ///
    /// `elements` may begin and end anywhere and span any number of written pieces; `tensor`
    /// is an index in canonical order.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupt`] names the chunk, the file and an older checkpoint;
    /// [`CheckpointError::File`] for a damaged header; [`CheckpointError::NoSuchState`];
    /// [`CheckpointError::Io`]. `out` is then partly written.
    pub fn read(
        &self,
        tensor: usize,
        kind: Kind,
        slice: usize,
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let spots = self.index.get(&(tensor, kind, slice)).map_or(&[][..], Vec::as_slice);
        let len = spots.last().map_or(0, |spot| spot.elements.end);
        if spots.is_empty() || elements.start > elements.end || elements.end > len || out.len() != elements.len() {
            let name = self.tensors().get(tensor).map_or("", |tensor| &tensor.name);
            return Err(CheckpointError::NoSuchState(format!(
                "elements {elements:?} of slice {slice} ({len} elements) of {kind} of tensor {tensor} {name:?}, into {}",
                out.len()
            )));
        }
        let first = spots.partition_point(|spot| spot.elements.end <= elements.start);
        for spot in spots[first..].iter().take_while(|spot| spot.elements.start < elements.end) {
            let file = self.open_file(spot.file)?;
            let part = spot.elements.start.max(elements.start)..spot.elements.end.min(elements.end);
            let out = &mut out[part.start - elements.start..part.end - elements.start];
            self.read_chunks(&file, spot, &part, |chunk, bytes, want, piece| {
                if blake3::hash(bytes) != want {
                    return Err(self.corrupt(piece, chunk, spot.file));
                }
                let start = chunk * STATE_CHUNK;
                let (lo, hi) = (part.start.max(start), part.end.min(start + bytes.len() / 4));
                read_values(&bytes[(lo - start) * 4..(hi - start) * 4], &mut out[lo - part.start..hi - part.start]);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Opens a file.
    pub(crate) fn open_raw(&self, number: usize) -> Result<File, CheckpointError> {
        let path = self.path.join(&self.manifest.files[number].name);
        File::open(&path).map_err(CheckpointError::io("open", path))
    }

    /// Opens a file and, the first time, checks its header.
    pub(crate) fn open_file(&self, number: usize) -> Result<File, CheckpointError> {
        let entry = &self.manifest.files[number];
        let path = self.path.join(&entry.name);
        let file = self.open_raw(number)?;
        if !self.headers_good[number].load(Ordering::Relaxed) {
            let len = entry.pieces.iter().map(|piece| piece.offset).min().unwrap_or(0);
            let mut bytes = vec![0; usize::try_from(len.min(entry.bytes)).unwrap_or(0)];
            file.read_exact_at(&mut bytes, 0).map_err(CheckpointError::io("read", &path))?;
            header::check(&bytes, entry).map_err(|reason| CheckpointError::File {
                path,
                reason,
                older: self.older(),
            })?;
            self.headers_good[number].store(true, Ordering::Relaxed);
        }
        Ok(file)
    }

    /// Calls `take(chunk, bytes, written hash, piece)` for every chunk that `part` of one
    /// piece touches, ascending.
    pub(crate) fn read_chunks(
        &self,
        file: &File,
        spot: &Spot,
        part: &Range<usize>,
        mut take: impl FnMut(usize, &[u8], Hash, &PieceEntry) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let entry = &self.manifest.files[spot.file];
        let piece = &entry.pieces[spot.piece];
        let origin = piece.elements.start / STATE_CHUNK;
        let mut bytes = vec![0; CHUNKS_PER_READ.min(piece.hashes.len()) * STATE_CHUNK * 4];
        let (mut chunk, end) = (part.start / STATE_CHUNK, part.end.div_ceil(STATE_CHUNK));
        while chunk < end {
            let run = CHUNKS_PER_READ.min(end - chunk);
            let start = chunk * STATE_CHUNK;
            let len = ((chunk + run) * STATE_CHUNK).min(piece.elements.end) - start;
            let at = piece.offset + (start - piece.elements.start) as u64 * 4;
            let bytes = &mut bytes[..len * 4];
            file.read_exact_at(bytes, at).map_err(CheckpointError::io("read", self.path.join(&entry.name)))?;
            for (i, bytes) in bytes.chunks(STATE_CHUNK * 4).enumerate() {
                take(chunk + i, bytes, piece.hashes[chunk + i - origin], piece)?;
            }
            chunk += run;
        }
        Ok(())
    }

    fn older(&self) -> Option<u64> {
        *self.older.get_or_init(|| older_than(&self.path, self.meta().step))
    }

    pub(crate) fn corrupt(&self, piece: &PieceEntry, chunk: usize, file: usize) -> CheckpointError {
        CheckpointError::Corrupt {
            place: Place { tensor: piece.tensor.clone(), kind: piece.kind, slice: piece.slice, chunk },
            file: self.path.join(&self.manifest.files[file].name),
            older: self.older(),
        }
    }

    /// Checks that this is a checkpoint of the given run: same numerics, definition, grid
    /// cells and tensors.
    ///
    /// # Errors
    /// [`CheckpointError::OtherNumerics`], [`CheckpointError::OtherRun`] with the first line
    /// that differs, [`CheckpointError::OtherModel`] with the first tensor that differs.
    pub fn check_model(
        &self,
        definition: &str,
        tensors: &[Tensor],
        tp: usize,
        numerics_version: u32,
    ) -> Result<(), CheckpointError> {
        let meta = self.meta();
        let path = self.path.clone();
        if meta.numerics_version != numerics_version {
            return Err(CheckpointError::OtherNumerics { path, theirs: meta.numerics_version, ours: numerics_version });
        }
        let definitions = [&meta.definition, definition].map(spec::settled);
        let [mut theirs, mut ours] = definitions.each_ref().map(|text| text.lines());
        for line in 1.. {
            let pair = (theirs.next(), ours.next());
            if pair.0 != pair.1 {
                let [theirs, ours] = [pair.0, pair.1].map(|line| line.unwrap_or_default().to_string());
                return Err(CheckpointError::OtherRun { path, line, theirs, ours });
            }
            if pair.0.is_none() {
                break;
            }
        }
        let ours = entries(tensors, tp);
        let differs = (0..ours.len().max(self.tensors().len())).find(|&i| ours.get(i) != self.tensors().get(i));
        let Some(i) = differs else { return Ok(()) };
        // The tensor of either side that the other lacks or has in another shape.
        let mut here = ours.get(i).into_iter().chain(self.tensors().get(i));
        let differs = |tensor: &&TensorEntry| !(ours.contains(tensor) && self.tensors().contains(tensor));
        let name = here.find(differs).map_or("the order of the tensors", |tensor| &tensor.name);
        let describe = |all: &[TensorEntry]| match all.iter().find(|tensor| tensor.name == name) {
            Some(t) => format!("{} x {} in {} slices by {:?}", t.rows, t.cols, t.slices, t.cut).to_lowercase(),
            None => "absent".to_string(),
        };
        let (theirs, mine) = (describe(self.tensors()), describe(&ours));
        Err(CheckpointError::OtherModel { path, tensor: name.into(), theirs, ours: mine })
    }
}

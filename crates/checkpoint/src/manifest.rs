//! The manifest: what a checkpoint holds and where. Parsed strictly, protected by a checksum.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{CheckpointError, Place};
use crate::hash::{Hash, chunks, hex, hex_list, range_fault};
use crate::tensor::{Kind, TensorEntry};
use spec::tensors::STATE_CHUNK;

/// Version of the manifest; a reader refuses others.
pub const SCHEMA: u32 = 1;
/// Name of the manifest in the folder of a step.
pub const MANIFEST: &str = "manifest.json";
/// Larger manifests are refused, bytes. Chunk hashes take about 0.1 % of the state.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 30;

const NO_CHECKSUM: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// What a checkpoint belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// Last step whose update the state contains; steps count from 1.
    pub step: u64,
    /// Data cursor: sequences consumed.
    pub cursor: u64,
    /// Text of the run definition, compared line by line when the run goes on.
    pub definition: String,
    /// Version of the numerics that computed the state.
    pub numerics_version: u32,
    /// Tensor cells of the grid.
    pub tp: usize,
    /// The digest, 64 hex digits. Given to [`crate::commit`], it is compared with what was
    /// written; left out, it is filled in.
    pub digest: Option<String>,
    /// Wall time of the snapshot, milliseconds since 1970, if the caller wants it recorded.
    pub taken_unix_ms: Option<u64>,
    /// Where a run has its steps checked (gradients computed by two, and alike): the last step for which that was done when this
    /// was written. Below `step`: nobody had checked the steps between then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked: Option<u64>,
    /// The first of the steps that nobody can check any more, as who made them was gone before anybody had: `checked` says nothing
    /// of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unseen: Option<u64>,
    /// Validations up to `step`: they decide when the run ends and which checkpoint is kept as the best. `None`: an older version
    /// wrote the checkpoint, and does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validations: Option<Validations>,
}

/// What a run knows of its validations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Validations {
    /// Step and loss (nats per token, finite) of the best one; `None`: there was none.
    pub best: Option<(u64, f64)>,
    /// Validations since the best one.
    pub since: u64,
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the folder of the step.
    pub name: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// BLAKE3 of its safetensors header, length word included.
    #[serde(with = "hex")]
    pub header_hash: Hash,
    /// What it holds, in the order of the file.
    pub pieces: Vec<PieceEntry>,
}

/// One piece of state in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// Tensor name.
    pub tensor: String,
    /// Kind of state.
    pub kind: Kind,
    /// Slice.
    pub slice: usize,
    /// Elements of the slice, row-major: whole state chunks.
    pub elements: Range<usize>,
    /// Where its first element lies, bytes from the start of the file.
    pub offset: u64,
    /// BLAKE3 of each state chunk.
    #[serde(with = "hex_list")]
    pub hashes: Vec<Hash>,
}

/// The whole manifest. `checksum` comes before any text that could look like it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub schema: u32,
    pub checksum: String,
    pub meta: Meta,
    pub tensors: Vec<TensorEntry>,
    pub files: Vec<FileEntry>,
}

/// Where one piece is: indices into `files` and `pieces`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Spot {
    pub elements: Range<usize>,
    pub file: usize,
    pub piece: usize,
}

/// For each (tensor index, kind, slice) its pieces, ascending; they tile the slice.
pub(crate) type Index = BTreeMap<(usize, Kind, usize), Vec<Spot>>;

impl Manifest {
    pub fn new(meta: Meta, tensors: Vec<TensorEntry>, files: Vec<FileEntry>) -> Self {
        Self { schema: SCHEMA, checksum: NO_CHECKSUM.into(), meta, tensors, files }
    }

    /// The text to write: compact JSON with the BLAKE3 of the text (checksum taken as zeros).
    pub fn seal(&self) -> String {
        let blank = Self { checksum: NO_CHECKSUM.into(), ..self.clone() };
        let mut text = serde_json::to_string(&blank).expect("plain data has a JSON form");
        text.push('\n');
        let checksum = blake3::hash(text.as_bytes()).to_hex();
        text.replacen(NO_CHECKSUM, &checksum, 1)
    }

    /// Parses and checks `bytes` in full, short of looking at the files. `Err` is the reason.
    pub fn parse(bytes: &[u8]) -> Result<(Self, Index), String> {
        let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
        let manifest: Self = serde_json::from_str(text).map_err(|e| e.to_string())?;
        if manifest.schema != SCHEMA {
            return Err(format!("it has schema {}, this program reads {SCHEMA}", manifest.schema));
        }
        let blank = text.replacen(&manifest.checksum, NO_CHECKSUM, 1);
        if *blake3::hash(blank.as_bytes()).to_hex() != *manifest.checksum {
            return Err("its bytes do not have the checksum that was written".into());
        }
        if let Some(fault) = manifest.tensors.iter().find_map(|tensor| tensor.fault(manifest.meta.tp)) {
            return Err(fault);
        }
        let index = cover(&manifest.tensors, &manifest.files).map_err(|e| e.to_string())?;
        Ok((manifest, index))
    }
}

/// Checks that the pieces of `files` hold every chunk of every (tensor, kind, slice) exactly
/// once and lie inside their files; that file names are plain and no two are the same.
pub(crate) fn cover(tensors: &[TensorEntry], files: &[FileEntry]) -> Result<Index, CheckpointError> {
    let mut numbers = HashMap::new();
    for (i, tensor) in tensors.iter().enumerate() {
        if numbers.insert(tensor.name.as_str(), i).is_some() {
            return Err(CheckpointError::NoSuchState(format!("{} is the name of two tensors", tensor.name)));
        }
    }
    let mut names = HashSet::new();
    for name in files.iter().map(|file| file.name.as_str()) {
        if Path::new(name).file_name().is_none_or(|plain| plain != name) || name == MANIFEST {
            return Err(CheckpointError::NoSuchState(format!("{name:?} is not the name of a shard")));
        }
        if !names.insert(name) {
            return Err(CheckpointError::NoSuchState(format!("{name:?} is the name of two shards")));
        }
    }
    let mut index = Index::new();
    for (f, file) in files.iter().enumerate() {
        for (p, piece) in file.pieces.iter().enumerate() {
            let fault = |reason| Err(CheckpointError::Piece { tensor: piece.tensor.clone(), reason });
            let Some(&number) = numbers.get(piece.tensor.as_str()) else {
                return fault(format!("the model has no such tensor (it is in {})", file.name));
            };
            let tensor = &tensors[number];
            if piece.slice >= tensor.slices {
                return fault(format!("slice {} of {}", piece.slice, tensor.slices));
            }
            if let Some(reason) = range_fault(&piece.elements, tensor.slice_len()) {
                return fault(reason);
            }
            if piece.hashes.len() != chunks(piece.elements.len()) {
                return fault(format!("{} hashes for {} elements", piece.hashes.len(), piece.elements.len()));
            }
            let end = piece.offset.checked_add(piece.elements.len() as u64 * 4);
            if piece.offset < 8 || end.is_none_or(|end| end > file.bytes) {
                return fault(format!("it does not lie inside the {} bytes of {}", file.bytes, file.name));
            }
            let spot = Spot { elements: piece.elements.clone(), file: f, piece: p };
            index.entry((number, piece.kind, piece.slice)).or_default().push(spot);
        }
    }
    for (number, tensor) in tensors.iter().enumerate() {
        for kind in Kind::ALL {
            for slice in 0..tensor.slices {
                let place = |at: usize| Place { tensor: tensor.name.clone(), kind, slice, chunk: at / STATE_CHUNK };
                let Some(spots) = index.get_mut(&(number, kind, slice)) else {
                    return Err(CheckpointError::Missing(place(0)));
                };
                spots.sort_by_key(|spot| spot.elements.start);
                let mut end = 0;
                for spot in spots.iter() {
                    if spot.elements.start > end {
                        return Err(CheckpointError::Missing(place(end)));
                    }
                    if spot.elements.start < end {
                        return Err(CheckpointError::Twice(place(spot.elements.start)));
                    }
                    end = spot.elements.end;
                }
                if end < tensor.slice_len() {
                    return Err(CheckpointError::Missing(place(end)));
                }
            }
        }
    }
    Ok(index)
}

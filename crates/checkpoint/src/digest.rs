//! The digest: hashes of chunks from all holders, folded in canonical order.

use std::fmt;

use spec::tensors::Tensor;

use crate::error::{DigestError, Place};
use crate::hash::Hash;
use crate::tensor::{Kind, TensorEntry, entries};

/// Bytes in front of the hashes of an encoded piece: tensor, slice (u32), kind (u8), first chunk, count (u64).
const PIECE_HEAD_BYTES: usize = 4 + 4 + 1 + 8 + 8;

/// Hashes of the chunks of one piece, as they travel between ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashPiece {
    /// Tensor, index in canonical order.
    pub tensor: usize,
    /// Kind of state.
    pub kind: Kind,
    /// Slice.
    pub slice: usize,
    /// First chunk of the piece, counted in its slice.
    pub first_chunk: usize,
    /// One hash per chunk.
    pub hashes: Vec<Hash>,
}

/// The digest of all state, and one hash per (tensor, kind) to locate a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digest {
    /// The digest; `Display` of [`Digest`] prints its 64 hex digits.
    pub total: Hash,
    /// In canonical order of tensors, then kinds.
    pub tensors: Vec<TensorDigest>,
}

/// The hash of one (tensor, kind).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorDigest {
    /// Tensor name.
    pub name: String,
    /// Kind of state.
    pub kind: Kind,
    /// Over name, kind, shape, slices and chunk hashes.
    pub hash: Hash,
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.total.to_hex())
    }
}

/// Collects chunk hashes from all holders, in any order, and folds them.
///
/// A chunk given twice must agree: this is how replicas are compared.
#[derive(Debug, Clone)]
pub struct DigestBuilder {
    numerics_version: u32,
    tensors: Vec<TensorEntry>,
    /// Index of the first leaf of each tensor.
    starts: Vec<usize>,
    /// (tensor, kind, slice, chunk) in lexical order.
    leaves: Vec<Option<Hash>>,
}

impl DigestBuilder {
    /// An empty digest of `tensors` (canonical order) under `tp` tensor cells.
    pub fn new(tensors: &[Tensor], tp: usize, numerics_version: u32) -> Self {
        Self::of_entries(entries(tensors, tp), numerics_version)
    }

    pub(crate) fn of_entries(tensors: Vec<TensorEntry>, numerics_version: u32) -> Self {
        let mut starts = Vec::with_capacity(tensors.len());
        let mut leaves = 0;
        for tensor in &tensors {
            starts.push(leaves);
            leaves += Kind::ALL.len() * tensor.slices * tensor.slice_chunks();
        }
        Self { numerics_version, tensors, starts, leaves: vec![None; leaves] }
    }

    /// Takes in the hashes of the chunks from `first_chunk` of one slice.
    ///
    /// # Errors
    /// [`DigestError::Disagree`] names the first chunk that another holder gave otherwise;
    /// [`DigestError::NoSuchState`] if the model has no such chunks. Chunks before the named
    /// one are taken in.
    pub fn put(
        &mut self,
        tensor: usize,
        kind: Kind,
        slice: usize,
        first_chunk: usize,
        hashes: &[Hash],
    ) -> Result<(), DigestError> {
        let no_such = |what: String| Err(DigestError::NoSuchState(what));
        let Some(entry) = self.tensors.get(tensor) else {
            return no_such(format!("tensor {tensor} of {}", self.tensors.len()));
        };
        let per_slice = entry.slice_chunks();
        if slice >= entry.slices {
            return no_such(format!("slice {slice} of {} of {kind} of {}", entry.slices, entry.name));
        }
        if first_chunk.checked_add(hashes.len()).is_none_or(|end| end > per_slice) {
            return no_such(format!(
                "{} chunks from chunk {first_chunk} of {kind} of {}, slice {slice}: it has {per_slice}",
                hashes.len(),
                entry.name
            ));
        }
        let first = self.starts[tensor] + (kind as usize * entry.slices + slice) * per_slice + first_chunk;
        for (i, hash) in hashes.iter().enumerate() {
            let leaf = &mut self.leaves[first + i];
            if leaf.is_some_and(|known| known != *hash) {
                let tensor = entry.name.clone();
                return Err(DigestError::Disagree(Place { tensor, kind, slice, chunk: first_chunk + i }));
            }
            *leaf = Some(*hash);
        }
        Ok(())
    }

    /// [`DigestBuilder::put`] of a piece that came from another rank.
    ///
    /// # Errors
    /// As [`DigestBuilder::put`].
    pub fn put_piece(&mut self, piece: &HashPiece) -> Result<(), DigestError> {
        self.put(piece.tensor, piece.kind, piece.slice, piece.first_chunk, &piece.hashes)
    }

    /// The digest, with `cursor` = sequences consumed.
    ///
    /// # Errors
    /// [`DigestError::Missing`] names the first chunk that nobody gave.
    pub fn finish(&self, cursor: u64) -> Result<Digest, DigestError> {
        let mut tensors = Vec::with_capacity(self.tensors.len() * Kind::ALL.len());
        let mut total = domain("lockstep digest 1");
        total.update(&self.numerics_version.to_le_bytes());
        for (entry, start) in self.tensors.iter().zip(&self.starts) {
            let per_kind = entry.slices * entry.slice_chunks();
            for kind in Kind::ALL {
                let first = start + kind as usize * per_kind;
                let hash = tensor_hash(entry, kind, &self.leaves[first..first + per_kind])?;
                total.update(hash.as_bytes());
                tensors.push(TensorDigest { name: entry.name.clone(), kind, hash });
            }
        }
        total.update(&cursor.to_le_bytes());
        Ok(Digest { total: total.finalize(), tensors })
    }
}

fn domain(text: &str) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    update_text(&mut hasher, text);
    hasher
}

fn update_text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

fn tensor_hash(entry: &TensorEntry, kind: Kind, leaves: &[Option<Hash>]) -> Result<Hash, DigestError> {
    let mut hasher = domain("lockstep tensor 1");
    update_text(&mut hasher, &entry.name);
    update_text(&mut hasher, kind.label());
    for size in [entry.rows, entry.cols, entry.slices] {
        hasher.update(&(size as u64).to_le_bytes());
    }
    for (i, leaf) in leaves.iter().enumerate() {
        let Some(hash) = leaf else {
            let (slice, chunk) = (i / entry.slice_chunks(), i % entry.slice_chunks());
            return Err(DigestError::Missing(Place { tensor: entry.name.clone(), kind, slice, chunk }));
        };
        hasher.update(hash.as_bytes());
    }
    Ok(hasher.finalize())
}

/// The bytes of `pieces`, to be sent to the rank that folds the digest.
pub fn encode_pieces(pieces: &[HashPiece]) -> Vec<u8> {
    let hashes: usize = pieces.iter().map(|piece| piece.hashes.len()).sum();
    let mut out = Vec::with_capacity(pieces.len() * PIECE_HEAD_BYTES + hashes * blake3::OUT_LEN);
    for piece in pieces {
        out.extend((piece.tensor as u32).to_le_bytes());
        out.extend((piece.slice as u32).to_le_bytes());
        out.push(piece.kind as u8);
        out.extend((piece.first_chunk as u64).to_le_bytes());
        out.extend((piece.hashes.len() as u64).to_le_bytes());
        for hash in &piece.hashes {
            out.extend(hash.as_bytes());
        }
    }
    out
}

/// The pieces in `bytes`, the inverse of [`encode_pieces`].
///
/// # Errors
/// [`DigestError::Bytes`] if they end too early or name an unknown kind.
pub fn decode_pieces(bytes: &[u8]) -> Result<Vec<HashPiece>, DigestError> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let at = bytes.len() - rest.len();
        let fault = |reason| DigestError::Bytes { at, len: bytes.len(), reason };
        let (head, tail) = rest.split_at_checked(PIECE_HEAD_BYTES).ok_or_else(|| fault("cut off in a head"))?;
        let number = |at: usize, width: usize| {
            head[at..at + width].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)) as usize
        };
        let kind = *Kind::ALL.get(usize::from(head[8])).ok_or_else(|| fault("unknown kind"))?;
        let len = number(17, 8).checked_mul(blake3::OUT_LEN).ok_or_else(|| fault("impossible count"))?;
        let (hashes, tail) = tail.split_at_checked(len).ok_or_else(|| fault("cut off in the hashes"))?;
        pieces.push(HashPiece {
            tensor: number(0, 4),
            kind,
            slice: number(4, 4),
            first_chunk: number(9, 8),
            hashes: hashes.as_chunks::<{ blake3::OUT_LEN }>().0.iter().map(|hash| Hash::from_bytes(*hash)).collect(),
        });
        rest = tail;
    }
    Ok(pieces)
}

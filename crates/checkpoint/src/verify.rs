//! The full check of a checkpoint: every header, every chunk, the digest.

use spec::tensors::STATE_CHUNK;

use crate::digest::DigestBuilder;
use crate::error::CheckpointError;
use crate::hash::Hash;
use crate::manifest::Spot;
use crate::read::Checkpoint;
use crate::tensor::Kind;

/// What [`Checkpoint::verify`] found.
#[derive(Debug)]
pub struct Report {
    /// Step of the checkpoint.
    pub step: u64,
    /// Files looked at.
    pub files: usize,
    /// State read, bytes.
    pub bytes: u64,
    /// Digest of the bytes read; `None` if some are corrupt or could not be read.
    pub digest: Option<Hash>,
    /// In canonical order of tensors, then kinds.
    pub tensors: Vec<TensorReport>,
    /// Everything found wrong; a corrupt piece is named by its first corrupt chunk.
    pub problems: Vec<CheckpointError>,
}

impl Report {
    /// True if every byte is what was written.
    pub fn good(&self) -> bool {
        self.problems.is_empty()
    }
}

/// One (tensor, kind) of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorReport {
    /// Tensor name.
    pub name: String,
    /// Kind of state.
    pub kind: Kind,
    /// Its state chunks.
    pub chunks: usize,
    /// Those that are corrupt or could not be read.
    pub bad_chunks: usize,
}

impl Checkpoint {
    /// Reads everything and reports all that is wrong; never stops at the first problem.
    pub fn verify(&self) -> Report {
        let meta = self.meta();
        let mut report = Report {
            step: meta.step,
            files: self.files().len(),
            bytes: 0,
            digest: None,
            tensors: Vec::with_capacity(self.tensors().len() * Kind::ALL.len()),
            problems: Vec::new(),
        };
        for number in 0..self.files().len() {
            report.problems.extend(self.open_file(number).err());
        }
        let mut builder = DigestBuilder::of_entries(self.tensors().to_vec(), meta.numerics_version);
        for (tensor, entry) in self.tensors().iter().enumerate() {
            for kind in Kind::ALL {
                let mut bad_chunks = 0;
                for slice in 0..entry.slices {
                    for spot in &self.index[&(tensor, kind, slice)] {
                        let hashes = self.hashes_of(spot, &mut report);
                        bad_chunks += hashes.iter().filter(|hash| hash.is_none()).count();
                        let first = spot.elements.start / STATE_CHUNK;
                        for (i, hash) in hashes.into_iter().enumerate() {
                            let put = hash.map(|hash| builder.put(tensor, kind, slice, first + i, &[hash]));
                            debug_assert!(put.is_none_or(|put| put.is_ok()), "the manifest covers each chunk once");
                        }
                    }
                }
                let chunks = entry.slices * entry.slice_chunks();
                report.tensors.push(TensorReport { name: entry.name.clone(), kind, chunks, bad_chunks });
            }
        }
        report.digest = builder.finish(meta.cursor).ok().map(|digest| digest.total);
        if let (Some(read), Some(agreed)) = (report.digest, &meta.digest)
            && *read.to_hex() != **agreed
        {
            let written = read.to_string();
            report.problems.push(CheckpointError::DigestDiffers { step: meta.step, written, agreed: agreed.clone() });
        }
        report
    }

    /// Hashes of the chunks of one piece as they are on disk; `None` for one that is not what was written.
    fn hashes_of(&self, spot: &Spot, report: &mut Report) -> Vec<Option<Hash>> {
        let mut hashes = Vec::new();
        let mut first_bad = None;
        let total = self.manifest.files[spot.file].pieces[spot.piece].hashes.len();
        // A bad header was reported once; the state behind it may still be good.
        let opened = self.open_raw(spot.file);
        let read = opened.and_then(|file| {
            self.read_chunks(&file, spot, &spot.elements, |chunk, bytes, want, _| {
                let hash = Some(blake3::hash(bytes)).filter(|hash| *hash == want);
                if hash.is_none() {
                    first_bad.get_or_insert(chunk);
                }
                hashes.push(hash);
                report.bytes += bytes.len() as u64;
                Ok(())
            })
        });
        report.problems.extend(read.err());
        if let Some(chunk) = first_bad {
            let piece = &self.manifest.files[spot.file].pieces[spot.piece];
            report.problems.push(self.corrupt(piece, chunk, spot.file));
        }
        hashes.resize(total, None);
        hashes
    }
}

//! The full check of a checkpoint: every header, every chunk, the digest.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    /// Threads that read.
    pub threads: usize,
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

/// State chunks that a thread takes at once (4 MiB).
const CHUNKS_PER_TASK: usize = 64;

/// Some chunks of one piece.
struct Task<'a> {
    tensor: usize,
    kind: Kind,
    slice: usize,
    spot: &'a Spot,
    /// Counted in the slice.
    chunks: Range<usize>,
}

/// What a thread found in a task.
struct Found {
    /// Of each chunk; `None`: not what was written, or not read.
    hashes: Vec<Option<Hash>>,
    bytes: u64,
    problem: Option<CheckpointError>,
}

impl Checkpoint {
    /// Reads everything and reports all that is wrong; never stops at the first problem.
    pub fn verify(&self) -> Report {
        self.verify_with(1)
    }

    /// [`Checkpoint::verify`] on at most `threads` threads: fewer where there is less to read, or the system gives none.
    pub fn verify_with(&self, threads: usize) -> Report {
        let meta = self.meta();
        let mut problems: Vec<CheckpointError> =
            (0..self.files().len()).filter_map(|number| self.open_file(number).err()).collect();
        let tasks = self.tasks();
        let next = AtomicUsize::new(0);
        let work = || {
            let mine = std::iter::from_fn(|| {
                let at = next.fetch_add(1, Ordering::Relaxed);
                tasks.get(at).map(|task| (at, self.check(task)))
            });
            mine.collect::<Vec<_>>()
        };
        let (mut found, threads): (Vec<(usize, Found)>, usize) = std::thread::scope(|scope| {
            // Threads that the system refuses leave their work to the others.
            let other = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
            let others: Vec<_> = (1..threads.min(tasks.len())).map_while(other).collect();
            let threads = others.len() + 1;
            let mut all = work();
            others.into_iter().for_each(|other| all.extend(other.join().expect("a check does not panic")));
            (all, threads)
        });
        found.sort_unstable_by_key(|(at, _)| *at);
        let mut builder = DigestBuilder::of_entries(self.tensors().to_vec(), meta.numerics_version);
        let mut tensors: Vec<TensorReport> = Vec::with_capacity(self.tensors().len() * Kind::ALL.len());
        for entry in self.tensors() {
            let chunks = entry.slices * entry.slice_chunks();
            let report = |kind| TensorReport { name: entry.name.clone(), kind, chunks, bad_chunks: 0 };
            tensors.extend(Kind::ALL.map(report));
        }
        let mut bytes = 0;
        let mut told = None;
        for (task, (_, Found { hashes, bytes: read, problem })) in tasks.iter().zip(found) {
            let Task { tensor, kind, slice, spot, chunks } = task;
            bytes += read;
            tensors[tensor * Kind::ALL.len() + *kind as usize].bad_chunks +=
                hashes.iter().filter(|hash| hash.is_none()).count();
            for (i, hash) in hashes.into_iter().enumerate() {
                let put = hash.map(|hash| builder.put(*tensor, *kind, *slice, chunks.start + i, &[hash]));
                debug_assert!(put.is_none_or(|put| put.is_ok()), "the manifest covers each chunk once");
            }
            // A corrupt piece is named once, by its first corrupt chunk.
            if problem.is_some() && told != Some((spot.file, spot.piece)) {
                told = Some((spot.file, spot.piece));
                problems.extend(problem);
            }
        }
        let digest = builder.finish(meta.cursor).ok().map(|digest| digest.total);
        if let (Some(read), Some(agreed)) = (digest, &meta.digest)
            && *read.to_hex() != **agreed
        {
            let written = read.to_string();
            problems.push(CheckpointError::DigestDiffers { step: meta.step, written, agreed: agreed.clone() });
        }
        Report { step: meta.step, files: self.files().len(), bytes, threads, digest, tensors, problems }
    }

    /// All chunks, in canonical order.
    fn tasks(&self) -> Vec<Task<'_>> {
        let mut tasks = Vec::new();
        for (&(tensor, kind, slice), spots) in &self.index {
            for spot in spots {
                let all = spot.elements.start / STATE_CHUNK..spot.elements.end.div_ceil(STATE_CHUNK);
                tasks.extend(all.clone().step_by(CHUNKS_PER_TASK).map(|first| {
                    let chunks = first..all.end.min(first + CHUNKS_PER_TASK);
                    Task { tensor, kind, slice, spot, chunks }
                }));
            }
        }
        tasks
    }

    /// Hashes of chunks as they are on disk.
    fn check(&self, task: &Task<'_>) -> Found {
        let Task { spot, chunks, .. } = task;
        let part = chunks.start * STATE_CHUNK..(chunks.end * STATE_CHUNK).min(spot.elements.end);
        let (mut hashes, mut first_bad, mut bytes) = (Vec::new(), None, 0);
        // A bad header was reported once; the state behind it may still be good.
        let opened = self.open_raw(spot.file);
        let read = opened.and_then(|file| {
            self.read_chunks(&file, spot, &part, |chunk, content, want, _| {
                let hash = Some(blake3::hash(content)).filter(|hash| *hash == want);
                if hash.is_none() {
                    first_bad.get_or_insert(chunk);
                }
                hashes.push(hash);
                bytes += content.len() as u64;
                Ok(())
            })
        });
        let piece = &self.manifest.files[spot.file].pieces[spot.piece];
        let problem = read.err().or_else(|| first_bad.map(|chunk| self.corrupt(piece, chunk, spot.file)));
        hashes.resize(chunks.len(), None);
        Found { hashes, bytes, problem }
    }
}

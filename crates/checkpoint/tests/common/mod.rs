//! A small model, its state, and ways to cut the state in pieces.
#![allow(dead_code)]

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use checkpoint::{
    Disk, FileEntry, Kind, Meta, PieceRef, STATE_CHUNK, Storage, StorageFile, Validations, commit_to, write_pieces_to,
};
use spec::Model;
use spec::tensors::{Tensor, tensors};

pub const NUMERICS: u32 = 7;
pub const DEFINITION: &str = "[model]\nhidden = 96\n[train]\nlr = 0.001\n";

/// Large enough that slices have several chunks and short last ones.
pub fn model() -> Model {
    Model {
        hidden: 96,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        ffn: 352,
        vocab: 300,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        qk_norm: true,
        tied: true,
        init_std: 0.02,
        moe: None,
    }
}

/// A sequence of well-mixed numbers from a seed.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// The file system without waiting for the disk.
pub struct NoSync;

struct NoSyncFile(Box<dyn StorageFile>);

impl Write for NoSyncFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for NoSyncFile {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Storage for NoSync {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(NoSyncFile(Disk.create(path)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Disk.remove(path)
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

pub struct State {
    pub tensors: Vec<Tensor>,
    pub tp: usize,
    /// (tensor, kind, slice) in lexical order, and the values of that slice.
    pub slices: Vec<(usize, Kind, usize, Vec<f32>)>,
}

impl State {
    /// State of `model` with any bits, NaN among them.
    pub fn of(model: &Model, tp: usize, seed: u64) -> Self {
        let tensors = tensors(model);
        let mut rng = Rng(seed);
        let mut slices = Vec::new();
        for (i, tensor) in tensors.iter().enumerate() {
            for kind in Kind::ALL {
                for slice in 0..tensor.slices(tp) {
                    let values = (0..tensor.slice_len(tp)).map(|_| f32::from_bits(rng.next() as u32)).collect();
                    slices.push((i, kind, slice, values));
                }
            }
        }
        Self { tensors, tp, slices }
    }

    pub fn new(tp: usize, seed: u64) -> Self {
        Self::of(&model(), tp, seed)
    }

    /// All state, every slice in one piece.
    pub fn pieces(&self) -> Vec<PieceRef<'_>> {
        self.cut(|len, _| std::iter::once(0..len).collect())
    }

    /// All state, each slice cut as `cut(len, slice number)` says.
    pub fn cut(&self, mut cut: impl FnMut(usize, usize) -> Vec<Range<usize>>) -> Vec<PieceRef<'_>> {
        let mut pieces = Vec::new();
        for (i, (tensor, kind, slice, values)) in self.slices.iter().enumerate() {
            for elements in cut(values.len(), i) {
                let data = &values[elements.clone()];
                pieces.push(PieceRef { tensor: *tensor, kind: *kind, slice: *slice, elements, data });
            }
        }
        pieces
    }

    /// All state, cut at random chunk boundaries and dealt to `ranks` at random.
    pub fn deal(&self, ranks: usize, rng: &mut Rng) -> Vec<Vec<PieceRef<'_>>> {
        let pieces = self.cut(|len, _| random_cut(len, rng));
        let mut dealt = vec![Vec::new(); ranks];
        for piece in pieces {
            dealt[rng.below(ranks)].push(piece);
        }
        dealt
    }

    pub fn meta(&self, step: u64) -> Meta {
        Meta {
            validations: Some(Validations { best: Some((step, 0.1 + 0.2)), since: 3 }),
            step,
            cursor: step * 32,
            definition: DEFINITION.into(),
            numerics_version: NUMERICS,
            tp: self.tp,
            digest: None,
            taken_unix_ms: None,
            checked: None,
            unseen: None,
        }
    }

    /// Writes and commits everything as one rank.
    pub fn save(&self, root: &Path, step: u64) -> PathBuf {
        self.save_dealt(root, step, &[self.pieces()])
    }

    /// Writes and commits as several ranks.
    pub fn save_dealt(&self, root: &Path, step: u64, dealt: &[Vec<PieceRef<'_>>]) -> PathBuf {
        let mut files: Vec<FileEntry> = Vec::new();
        for pieces in dealt {
            files.extend(write_pieces_to(&NoSync, root, step, &self.tensors, self.tp, pieces).unwrap());
        }
        commit_to(&NoSync, root, &self.tensors, &self.meta(step), files).unwrap()
    }
}

/// Ranges on chunk boundaries that tile `0..len`; some are empty.
pub fn random_cut(len: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let chunks = len.div_ceil(STATE_CHUNK);
    let mut at: Vec<usize> = (0..rng.below(4)).map(|_| rng.below(chunks + 1)).collect();
    at.extend([0, chunks]);
    at.sort_unstable();
    let at: Vec<usize> = at.into_iter().map(|chunk| (chunk * STATE_CHUNK).min(len)).collect();
    at.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

//! A checkpoint that several writers make without talking: each leaves its word on disk, one of them commits.
//!
//! An attempt has a folder of its own, `writing-TOKEN`, in which nothing is ever taken for a checkpoint. When every writer's
//! part is there, the manifest is written, last, and the folder of the step is renamed into its place at once. So an attempt
//! that dies anywhere, or whose writers belong to a world that is gone, touches no checkpoint and no other attempt. One of a
//! timeline that is no more ([`Timeline`]) becomes none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use spec::tensors::Tensor;

use crate::commit::commit_to;
use crate::error::CheckpointError;
use crate::folder::{discard, has_manifest, step_dir};
use crate::manifest::{FileEntry, Meta};
use crate::read::Checkpoint;
use crate::storage::{Disk, Storage, write_whole};
use crate::store::set_aside;
use crate::timeline::{Timeline, lock};
use crate::write::{PieceRef, write_pieces_to};

/// How attempts' folders begin.
const WRITING: &str = "writing-";
/// How often the committer looks for parts.
const LOOK: Duration = Duration::from_millis(5);

/// The word of a writer: its files, or why there are none.
type Part = Result<Vec<FileEntry>, String>;

/// One try at the checkpoint of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The folder of checkpoints.
    pub root: PathBuf,
    /// The step.
    pub step: u64,
    /// Tells this try from all others; the same for all its writers.
    pub token: u64,
    /// Writers that leave a part.
    pub writers: usize,
    /// The timeline that the step is of; of the committer.
    pub timeline: Timeline,
}

/// Why a writer has no part in an attempt.
#[derive(Debug)]
pub struct Unwritten {
    /// What failed.
    pub cause: CheckpointError,
    /// Its word says so, where the committer looks; if not, it must hear of it in another way or it waits for nothing.
    pub told: bool,
}

/// What came of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// Where another checkpoint of the step is now that was in its place.
    pub aside: Option<PathBuf>,
}

impl Attempt {
    fn base(&self) -> PathBuf {
        self.root.join(format!("{WRITING}{:016x}", self.token))
    }

    fn part(&self, writer: usize) -> PathBuf {
        step_dir(&self.base(), self.step).join(format!("part-{writer:05}-of-{:05}.json", self.writers))
    }

    /// Writes the pieces of `writer` and leaves its part; if that fails, a part that says so.
    ///
    /// # Errors
    /// As [`crate::write_pieces`]. Nothing of it is left but the word, where that has found room.
    pub fn write(
        &self,
        writer: usize,
        tensors: &[Tensor],
        tp: usize,
        pieces: &[PieceRef<'_>],
    ) -> Result<(), Unwritten> {
        self.write_to(&Disk, writer, tensors, tp, pieces)
    }

    /// [`Attempt::write`] to any storage.
    ///
    /// # Errors
    /// As [`Attempt::write`].
    pub fn write_to(
        &self,
        storage: &dyn Storage,
        writer: usize,
        tensors: &[Tensor],
        tp: usize,
        pieces: &[PieceRef<'_>],
    ) -> Result<(), Unwritten> {
        let folder = step_dir(&self.base(), self.step);
        let created = storage.create_dir(&folder).map_err(CheckpointError::io("create", folder));
        let written = created.and_then(|()| write_pieces_to(storage, &self.base(), self.step, tensors, tp, pieces));
        let left = written.and_then(|files| self.leave(storage, writer, &Ok(files)));
        left.map_err(|cause| Unwritten { told: self.fail_to(storage, writer, &cause.to_string()), cause })
    }

    /// Leaves the word that `writer` could not write; false if that cannot be left either.
    pub fn fail(&self, writer: usize, reason: &str) -> bool {
        self.fail_to(&Disk, writer, reason)
    }

    fn fail_to(&self, storage: &dyn Storage, writer: usize, reason: &str) -> bool {
        let path = self.part(writer);
        // Best effort: on a full disk an empty file may still find room, and says as much.
        drop(path.parent().map(|folder| storage.create_dir(folder)));
        self.leave(storage, writer, &Err(reason.into())).is_ok() || fs::write(&path, "").is_ok()
    }

    fn leave(&self, storage: &dyn Storage, writer: usize, part: &Part) -> Result<(), CheckpointError> {
        let path = self.part(writer);
        let text = serde_json::to_vec(part).expect("plain data has a JSON form");
        write_whole(storage, &path, |file| file.write_all(&text)).map_err(|(action, cause)| CheckpointError::Io {
            action,
            path: path.clone(),
            cause,
        })
    }

    /// Whether the step has a checkpoint already, good, of just these files, and with the same past.
    fn is_there(&self, files: &[FileEntry], meta: &Meta) -> bool {
        let place = step_dir(&self.root, self.step);
        let by_name = |files: &[FileEntry]| {
            let mut files = files.to_vec();
            files.sort_by(|a, b| a.name.cmp(&b.name));
            files
        };
        // What was checked when it was written is no part of what it is.
        let past =
            |meta: &Meta| (meta.cursor, meta.numerics_version, meta.tp, meta.validations, meta.definition.clone());
        let same = |known: &Checkpoint| {
            by_name(known.files()) == by_name(files) && past(known.meta()) == past(meta) && known.verify().good()
        };
        has_manifest(&place) && Checkpoint::open_alone(&place).is_ok_and(|known| same(&known))
    }

    /// Waits for the parts of all writers, not after `until`, nor once `given_up` says so and a last look found some missing.
    /// By one caller, the one that commits.
    ///
    /// # Errors
    /// The reason why there will be no checkpoint.
    pub fn collect(&self, until: Instant, given_up: &dyn Fn() -> bool) -> Result<Vec<FileEntry>, String> {
        let mut files = Vec::new();
        for writer in 0..self.writers {
            loop {
                let last = given_up() || Instant::now() > until;
                match fs::read(self.part(writer)) {
                    Ok(bytes) => {
                        files.extend(
                            parse(&bytes)
                                .map_err(|reason| format!("rank {writer} could not write its part: {reason}"))?,
                        );
                        break;
                    }
                    Err(e) if e.kind() != io::ErrorKind::NotFound => {
                        return Err(format!("the part of rank {writer} cannot be read: {e}"));
                    }
                    Err(_) if last => {
                        return Err(format!("the part of rank {writer} of {} did not come", self.writers));
                    }
                    Err(_) => sleep(LOOK),
                }
            }
        }
        Ok(files)
    }

    /// Makes the collected files the checkpoint of the step. One that is in its place stays if it is the same; if not, it is of a
    /// state that the run has left, and is set aside.
    ///
    /// # Errors
    /// As [`crate::commit`], or [`CheckpointError::WentBack`]; the attempt's files are then gone, and so is their space.
    pub fn commit(&self, tensors: &[Tensor], meta: &Meta, files: Vec<FileEntry>) -> Result<Committed, CheckpointError> {
        self.commit_to(&Disk, tensors, meta, files)
    }

    /// [`Attempt::commit`] to any storage.
    ///
    /// # Errors
    /// As [`Attempt::commit`].
    pub fn commit_to(
        &self,
        storage: &dyn Storage,
        tensors: &[Tensor],
        meta: &Meta,
        files: Vec<FileEntry>,
    ) -> Result<Committed, CheckpointError> {
        let place = step_dir(&self.root, self.step);
        let publish = || {
            let there = self.is_there(&files, meta);
            let folder = commit_to(storage, &self.base(), tensors, meta, files)?;
            for writer in 0..self.writers {
                let path = self.part(writer);
                storage.remove(&path).map_err(CheckpointError::io("remove", path))?;
            }
            let _lock = lock(&self.root);
            if Timeline::of(&self.root) != self.timeline {
                return Err(CheckpointError::WentBack { step: self.step });
            }
            if there && has_manifest(&place) {
                return Ok(None);
            }
            let mut aside = None;
            if has_manifest(&place) {
                aside = Some(set_aside(&place)?);
            } else if place.is_dir() {
                // What an earlier life left there without a manifest means nothing.
                discard(&self.root, self.step)?;
            }
            storage.rename(&folder, &place).map_err(CheckpointError::io("rename", folder))?;
            storage.sync_dir(&self.root).map_err(CheckpointError::io("sync", &self.root))?;
            Ok(aside)
        };
        let published = publish();
        self.abandon();
        published.map(|aside| Committed { path: place, aside })
    }

    /// Removes the attempt's folder, if it is there. Best effort: it is never read as a checkpoint.
    pub fn abandon(&self) {
        drop(fs::remove_dir_all(self.base()));
    }

    /// Removes what other attempts left under the root; by the committer of this one, since attempts follow one another.
    pub fn sweep(&self) {
        sweep_but(&self.root, &self.base());
    }
}

/// Removes what attempts left under `root`; by who knows that none is under way.
pub fn sweep(root: &Path) {
    sweep_but(root, Path::new(""));
}

fn sweep_but(root: &Path, own: &Path) {
    for path in fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path != own && is_attempt(&path) {
            drop(fs::remove_dir_all(path));
        }
    }
}

/// That the name is one of ours to the letter.
fn is_attempt(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let token = name.strip_prefix(WRITING).unwrap_or_default();
    token.len() == 16 && token.bytes().all(|b| b.is_ascii_hexdigit())
}

fn parse(bytes: &[u8]) -> Part {
    if bytes.is_empty() {
        return Err("the disk has no room, not even for the reason".into());
    }
    serde_json::from_slice::<Part>(bytes).map_err(|e| format!("its word is unclear: {e}"))?
}

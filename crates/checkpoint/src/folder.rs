//! The folder of checkpoints: names, listing, the newest, pruning.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::manifest::MANIFEST;
use crate::read::Checkpoint;

/// The folder of `step` under `root`: `step-00000024`.
pub fn step_dir(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step:08}"))
}

/// The step whose folder has this name.
pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let digits = path.file_name()?.to_str()?.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    (format!("{step:08}") == digits).then_some(step)
}

pub(crate) fn has_manifest(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file()
}

/// All folders of steps, ascending, with or without a manifest.
fn folders(root: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let entries = match fs::read_dir(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(CheckpointError::io("list", root))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(CheckpointError::io("list", root))?.path();
        if let Some(step) = step_of(&path)
            && path.is_dir()
        {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// The (step, folder) under `root` that have a manifest, ascending; none if there is no `root`.
///
/// # Errors
/// [`CheckpointError::Io`] if `root` cannot be listed.
pub fn list(root: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let mut found = folders(root)?;
    found.retain(|(_, path)| has_manifest(path));
    Ok(found)
}

/// What [`newest`] found.
#[derive(Debug)]
pub struct Newest {
    /// The newest complete checkpoint: its manifest opens and its files have their sizes.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that are damaged, newest first: (step, why). Say so to the person.
    pub skipped: Vec<(u64, CheckpointError)>,
}

/// The newest complete checkpoint under `root`.
///
/// # Errors
/// [`CheckpointError::Io`] if `root` cannot be listed.
pub fn newest(root: &Path) -> Result<Newest, CheckpointError> {
    newest_of(list(root)?)
}

/// The newest complete checkpoint of a step before `step`.
///
/// # Errors
/// [`CheckpointError::Io`] if `root` cannot be listed.
pub fn newest_before(root: &Path, step: u64) -> Result<Newest, CheckpointError> {
    newest_of(list(root)?.into_iter().filter(|found| found.0 < step).collect())
}

fn newest_of(found: Vec<(u64, PathBuf)>) -> Result<Newest, CheckpointError> {
    let mut skipped = Vec::new();
    for (step, path) in found.into_iter().rev() {
        match Checkpoint::open_alone(&path) {
            Ok(checkpoint) => return Ok(Newest { checkpoint: Some(checkpoint), skipped }),
            Err(error) => skipped.push((step, error)),
        }
    }
    Ok(Newest { checkpoint: None, skipped })
}

/// Step of the newest complete checkpoint beside and before the one in `folder`.
pub(crate) fn older_than(folder: &Path, step: u64) -> Option<u64> {
    let root = folder.parent().filter(|root| !root.as_os_str().is_empty()).unwrap_or(Path::new("."));
    newest_before(root, step).ok()?.checkpoint.map(|checkpoint| checkpoint.meta().step)
}

/// Removes the folder of `step`, checkpoint or not; no error if there is none.
///
/// The manifest goes first: cut off in the middle, what is left is not a checkpoint.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn discard(root: &Path, step: u64) -> Result<(), CheckpointError> {
    remove(&step_dir(root, step))
}

fn remove(folder: &Path) -> Result<(), CheckpointError> {
    let gone = |result: io::Result<()>| match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    let manifest = folder.join(MANIFEST);
    gone(fs::remove_file(&manifest)).map_err(CheckpointError::io("remove", manifest))?;
    gone(fs::remove_dir_all(folder)).map_err(CheckpointError::io("remove", folder))
}

/// What is kept when room is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retention {
    /// The newest complete checkpoints, at least one.
    pub keep: usize,
    /// Steps that are multiples of it; 0: none.
    pub keep_every: u64,
    /// These steps.
    pub also: Vec<u64>,
}

impl Retention {
    /// Whether `step` stays although it is older than the oldest of the newest ones.
    pub(crate) fn spares(&self, step: u64) -> bool {
        self.also.contains(&step) || (self.keep_every > 0 && step.is_multiple_of(self.keep_every))
    }
}

/// [`retain`] of the newest `keep`.
///
/// # Errors
/// As [`retain`].
pub fn prune(root: &Path, keep: usize) -> Result<Vec<PathBuf>, CheckpointError> {
    retain(root, &Retention { keep, ..Retention::default() })
}

/// Keeps the newest complete checkpoints under `root`, what else `retention` names, and whatever is newer than the oldest
/// of them, except folders without a manifest that are older than the newest complete one. Returns the folders removed,
/// ascending.
///
/// Complete: the manifest opens and all files have their sizes. Before one that is complete goes, a newer one was read
/// whole and is good; where none is, the newest good one stays, whatever its age. With no complete checkpoint nothing is
/// removed. Names other than `step-NNNNNNNN` are left alone. A run that goes back first discards the steps that it goes
/// back over: else a step that it is writing again counts as a leftover.
///
/// # Errors
/// [`CheckpointError::Io`]; what was removed before it stays removed.
pub fn retain(root: &Path, retention: &Retention) -> Result<Vec<PathBuf>, CheckpointError> {
    let found = folders(root)?;
    let complete: Vec<u64> =
        found.iter().rev().filter(|(_, path)| Checkpoint::open_alone(path).is_ok()).map(|found| found.0).collect();
    let Some(&newest) = complete.first() else { return Ok(Vec::new()) };
    // Fewer than `keep` complete ones: nothing with a manifest goes.
    let oldest = complete.get(retention.keep.max(1) - 1).copied().unwrap_or(0);
    let goes = |step: u64| step < oldest && !retention.spares(step);
    let mut last_good = None;
    if complete.iter().any(|step| goes(*step)) {
        let good =
            |step: &&u64| Checkpoint::open_alone(&step_dir(root, **step)).is_ok_and(|found| found.verify().good());
        last_good = complete.iter().find(good).copied();
    }
    let mut removed = Vec::new();
    for (step, path) in found {
        if (goes(step) && last_good != Some(step)) || (step < newest && !has_manifest(&path)) {
            remove(&path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

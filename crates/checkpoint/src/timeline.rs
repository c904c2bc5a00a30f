//! Which timeline of a run a folder of checkpoints is of.
//!
//! A run that goes back to an earlier step goes on in another timeline. Writers of the one before may still be at work, in
//! processes that nobody reaches. So the folder says itself which one it is of: who goes back gives it another name first and
//! then sets aside what is there of later steps; who commits looks at the name, under the same lock.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;

use crate::error::CheckpointError;
use crate::folder::list;
use crate::store::set_aside;

/// Where the name stands; a folder whose run never went back has none.
const NAME: &str = "timeline";

/// A timeline of a run: from one way back to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timeline(Vec<u8>);

impl Timeline {
    /// That of the checkpoints under `root` now.
    pub fn of(root: &Path) -> Self {
        Self(fs::read(root.join(NAME)).unwrap_or_default())
    }

    /// Its name; empty where the run never went back.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.0).trim().into()
    }
}

/// Nobody else goes back or commits under `root` as long as this is there. Best effort: where folders cannot be locked the
/// name still keeps out all that comes later.
pub(crate) fn lock(root: &Path) -> Option<File> {
    let folder = File::open(root).ok()?;
    folder.lock().ok().map(|()| folder)
}

/// The run goes on after step `after` in a timeline of its own: no attempt of the one before is committed from here on, and what
/// is under `root` of later steps is set aside; these steps.
///
/// # Errors
/// [`CheckpointError::Io`]; what was set aside before it stays so.
pub fn go_back(root: &Path, after: u64) -> Result<Vec<u64>, CheckpointError> {
    if !root.is_dir() {
        fs::create_dir_all(root).map_err(CheckpointError::io("create", root))?;
    }
    let _lock = lock(root);
    let (new, at) = (root.join("timeline.tmp"), root.join(NAME));
    let name = format!("{:016x}\n", RandomState::new().build_hasher().finish());
    fs::write(&new, name).and_then(|()| fs::rename(&new, &at)).map_err(CheckpointError::io("write", &at))?;
    let mut aside = Vec::new();
    for (step, folder) in list(root)?.into_iter().filter(|(step, _)| *step > after) {
        set_aside(&folder)?;
        aside.push(step);
    }
    Ok(aside)
}

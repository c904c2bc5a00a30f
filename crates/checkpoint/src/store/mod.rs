//! The slower tier: copies of committed checkpoints in another place.
//!
//! A store holds the same folders as a run's `checkpoints`. A copy counts once its manifest, copied last, is there; so what
//! [`crate::Checkpoint`] reads, [`crate::retain`] keeps and [`crate::newest`] finds holds for both tiers.

mod uploader;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::folder::{has_manifest, step_dir};
use crate::manifest::MANIFEST;
use crate::read::Checkpoint;
use crate::storage::{Disk, Storage, write_whole};

pub use uploader::Uploader;

/// Where copies go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store in the folder `root`, which need not exist yet.
    pub fn folder(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// Its folder: that of checkpoints, in the sense of this crate.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Copies a checkpoint; returns the bytes copied. What is there of the step already and is the same stays; what is there
    /// and damaged is set aside.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], worth another try; others say what is wrong with the checkpoint itself. There is then no
    /// copy, or the one that was there.
    pub fn put(&self, from: &Checkpoint) -> Result<u64, CheckpointError> {
        self.put_to(&Disk, from)
    }

    /// [`Store::put`] by way of any storage.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn put_to(&self, storage: &dyn Storage, from: &Checkpoint) -> Result<u64, CheckpointError> {
        // Damage must not spread, least of all over the only good copy.
        if let Some(problem) = from.verify().problems.into_iter().next() {
            return Err(problem);
        }
        let folder = step_dir(&self.root, from.meta().step);
        if has_manifest(&folder) {
            let known = Checkpoint::open_alone(&folder);
            if known.is_ok_and(|known| known.meta() == from.meta() && known.verify().good()) {
                return Ok(0);
            }
            set_aside(&folder)?;
        }
        storage.create_dir(&folder).map_err(CheckpointError::io("create", &folder))?;
        let mut bytes = 0;
        for name in from.files().iter().map(|file| file.name.as_str()).chain([MANIFEST]) {
            if name == MANIFEST {
                storage.sync_dir(&folder).map_err(CheckpointError::io("sync", &folder))?;
            }
            let (source, place) = (from.path().join(name), folder.join(name));
            let mut file = File::open(&source).map_err(CheckpointError::io("open", &source))?;
            write_whole(storage, &place, |out| {
                bytes += io::copy(&mut file, out)?;
                Ok(())
            })
            .map_err(|(action, cause)| CheckpointError::Io { action, path: place, cause })?;
        }
        for folder in [&folder, &self.root] {
            storage.sync_dir(folder).map_err(CheckpointError::io("sync", folder))?;
        }
        // That what arrived is what was sent.
        match Checkpoint::open(&folder)?.verify().problems.into_iter().next() {
            None => Ok(bytes),
            Some(problem) => {
                set_aside(&folder)?;
                Err(problem)
            }
        }
    }
}

/// Gives the folder of a step a name under which it is no checkpoint, and which is free; returns it.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn set_aside(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let name = |n: u32| folder.with_extension(if n == 1 { "damaged".into() } else { format!("damaged-{n}") });
    let to = (1..).map(name).find(|path| !path.exists()).expect("there are many numbers");
    fs::rename(folder, &to).map_err(CheckpointError::io("set aside", folder))?;
    Ok(to)
}

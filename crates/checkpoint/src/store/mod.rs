//! The slower tier: copies of committed checkpoints in another place.
//!
//! A store holds what a run's `checkpoints` holds, in a folder or as objects. A copy counts once its manifest, copied last, is
//! there; so in a folder what [`crate::Checkpoint`] reads, [`crate::retain`] keeps and [`crate::newest`] finds holds for both
//! tiers. Objects are fetched before they are read.

mod objects;
#[cfg(feature = "s3")]
mod s3;
mod uploader;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spec::StoreUrl;

use crate::error::CheckpointError;
use crate::folder::{Retention, has_manifest, retain, step_dir};
use crate::manifest::MANIFEST;
use crate::read::Checkpoint;
use crate::storage::{Disk, Storage, write_whole};

use objects::Remote;

pub use objects::Objects;
#[cfg(feature = "s3")]
pub use s3::S3;
pub use uploader::Uploader;

/// Where copies go.
#[derive(Clone)]
pub struct Store {
    place: Place,
}

#[derive(Clone)]
enum Place {
    Folder(PathBuf),
    /// And what it is called.
    Objects(Arc<dyn Objects>, String),
}

impl Store {
    /// The store at `url`; of S3 with the settings in this process's environment (`AWS_ACCESS_KEY_ID` and so on). Nothing is asked
    /// of it yet.
    ///
    /// # Errors
    /// [`CheckpointError::Store`]: this program was built without it, or settings that cannot be.
    pub fn open(url: &StoreUrl) -> Result<Self, CheckpointError> {
        match url {
            StoreUrl::Folder(root) => Ok(Self::folder(root)),
            #[cfg(feature = "s3")]
            StoreUrl::S3 { bucket, prefix } => {
                let settings = std::env::vars_os();
                let text = settings.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
                let refused = |reason| CheckpointError::Store { url: url.to_string(), reason };
                Ok(Self::objects(Arc::new(S3::open(bucket, prefix, text).map_err(refused)?), url.to_string()))
            }
            #[cfg(not(feature = "s3"))]
            StoreUrl::S3 { .. } => Err(CheckpointError::Store {
                url: url.to_string(),
                reason: "this lockstep was built without S3; build it with `--features s3`, or name a folder, such as file:///backup/run-1"
                    .into(),
            }),
        }
    }

    /// The store in the folder `root`, which need not exist yet.
    pub fn folder(root: &Path) -> Self {
        Self { place: Place::Folder(root.into()) }
    }

    /// The store in `objects`, called `name`.
    pub fn objects(objects: Arc<dyn Objects>, name: String) -> Self {
        Self { place: Place::Objects(objects, name) }
    }

    /// Its folder, that of checkpoints in the sense of this crate, if it is one.
    pub fn root(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(root) => Some(root),
            Place::Objects(..) => None,
        }
    }

    /// Its name for a person.
    pub fn name(&self) -> String {
        match &self.place {
            Place::Folder(root) => root.display().to_string(),
            Place::Objects(_, name) => name.clone(),
        }
    }

    /// The steps of which it holds something with a manifest, ascending.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        match &self.place {
            Place::Folder(root) => Ok(crate::folder::list(root)?.into_iter().map(|(step, _)| step).collect()),
            Place::Objects(objects, place) => Remote { objects: &**objects, place }.steps(),
        }
    }

    /// Sets the checkpoints of steps after `step` aside, in a folder as [`crate::go_back`]; these steps.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]; what was set aside before it stays so.
    pub fn distrust(&self, step: u64) -> Result<Vec<u64>, CheckpointError> {
        match &self.place {
            Place::Folder(root) => crate::go_back(root, step),
            Place::Objects(objects, place) => {
                let after: Vec<u64> = self.steps()?.into_iter().filter(|there| *there > step).collect();
                let remote = Remote { objects: &**objects, place };
                after.iter().try_for_each(|step| remote.distrust(*step))?;
                Ok(after)
            }
        }
    }

    /// Sets the checkpoint of `step` aside, if there is one.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub(crate) fn set_one_aside(&self, step: u64) -> Result<(), CheckpointError> {
        match &self.place {
            Place::Folder(root) if has_manifest(&step_dir(root, step)) => set_aside(&step_dir(root, step)).map(drop),
            Place::Folder(_) => Ok(()),
            Place::Objects(objects, place) => Remote { objects: &**objects, place }.distrust(step),
        }
    }

    /// Makes room: [`crate::retain`].
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn retain(&self, retention: &Retention) -> Result<(), CheckpointError> {
        match &self.place {
            Place::Folder(root) => retain(root, retention).map(drop),
            Place::Objects(objects, place) => Remote { objects: &**objects, place }.retain(retention).map(drop),
        }
    }

    /// The folder of the checkpoint of `step`: in the store, or where it is none of folders, fetched to `root`, where whatever has
    /// its name is set aside once every byte of it has come and is good.
    ///
    /// # Errors
    /// [`CheckpointError::Io`], worth another try; others say what is wrong with it.
    pub fn fetch(&self, step: u64, root: &Path) -> Result<PathBuf, CheckpointError> {
        match &self.place {
            Place::Folder(store) => Ok(step_dir(store, step)),
            Place::Objects(objects, place) => Remote { objects: &**objects, place }.fetch(step, root),
        }
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
        let root = match &self.place {
            Place::Folder(root) => root,
            Place::Objects(objects, place) => return Remote { objects: &**objects, place }.put(from),
        };
        let folder = step_dir(root, from.meta().step);
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
        for folder in [&folder, root] {
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

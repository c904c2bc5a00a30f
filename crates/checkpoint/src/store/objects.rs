//! Checkpoints in a store of objects: no folders, no rename, but an object is there whole or not at all.
//!
//! The names are those of files: `step-00000024/manifest.json` and so on. The manifest is put last, when every other object is
//! there with its size, and removed first; so a copy that was cut off anywhere is none.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::folder::{Retention, step_dir, step_of};
use crate::manifest::{MANIFEST, Manifest};
use crate::read::Checkpoint;

/// What is asked of a store of objects. Names are relative to it.
pub trait Objects: Send + Sync {
    /// Puts a file under a name, in place of what is there; until it returns without error there is what was there before.
    ///
    /// # Errors
    /// Those of the store; another try may help.
    fn put(&self, name: &str, from: &Path) -> io::Result<()>;
    /// Writes an object to `to`.
    ///
    /// # Errors
    /// `NotFound` if there is none; those of the store and of `to`.
    fn get(&self, name: &str, to: &mut dyn Write) -> io::Result<()>;
    /// The bytes of an object, if it is there.
    ///
    /// # Errors
    /// Those of the store.
    fn size(&self, name: &str) -> io::Result<Option<u64>>;
    /// All objects, with their bytes.
    ///
    /// # Errors
    /// Those of the store.
    fn list(&self) -> io::Result<BTreeMap<String, u64>>;
    /// Copies an object inside of the store.
    ///
    /// # Errors
    /// Those of the store.
    fn copy(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes an object; no error if there is none.
    ///
    /// # Errors
    /// Those of the store.
    fn remove(&self, name: &str) -> io::Result<()>;
}

/// What the names of a step's objects begin with.
fn of_step(step: u64) -> String {
    step_dir(Path::new(""), step).display().to_string()
}

/// Checkpoints in `objects`; `place` names the store in errors.
pub(super) struct Remote<'a> {
    pub objects: &'a dyn Objects,
    pub place: &'a str,
}

impl Remote<'_> {
    fn io<'e>(&'e self, action: &'static str, name: &'e str) -> impl FnOnce(io::Error) -> CheckpointError + 'e {
        move |cause| CheckpointError::Io { action, path: format!("{}/{name}", self.place).into(), cause }
    }

    fn all(&self) -> Result<BTreeMap<String, u64>, CheckpointError> {
        self.objects.list().map_err(self.io("list", ""))
    }

    /// The manifest of a step, if there is one that is whole.
    fn manifest(&self, step: u64) -> Result<Option<Manifest>, CheckpointError> {
        let (name, mut bytes) = (format!("{}/{MANIFEST}", of_step(step)), Vec::new());
        match self.objects.get(&name, &mut bytes) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.io("read", &name)(e)),
            Ok(()) => Ok(Manifest::parse(&bytes).ok().map(|(manifest, _)| manifest)),
        }
    }

    /// Whether all files of a manifest are among `all`.
    fn complete(manifest: &Manifest, all: &BTreeMap<String, u64>) -> bool {
        let step = of_step(manifest.meta.step);
        manifest.files.iter().all(|file| all.get(&format!("{step}/{}", file.name)) == Some(&file.bytes))
    }

    /// Steps that have a manifest, ascending.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let all = self.all()?;
        let step = |name: &String| step_of(Path::new(name.strip_suffix(MANIFEST)?.strip_suffix('/')?));
        Ok(all.keys().filter_map(step).collect())
    }

    pub fn put(&self, from: &Checkpoint) -> Result<u64, CheckpointError> {
        let (step, meta) = (of_step(from.meta().step), from.meta());
        if let Some(known) = self.manifest(meta.step)? {
            // When it was taken, and in which files it is, does not matter.
            let same = (&known.meta.definition, &known.meta.digest, known.meta.cursor, known.meta.tp);
            if same == (&meta.definition, &meta.digest, meta.cursor, meta.tp) && Self::complete(&known, &self.all()?) {
                return Ok(0);
            }
        }
        self.set_aside(&step)?;
        let mut sent = 0;
        let files = from.files().iter().map(|file| (file.name.as_str(), Some(file.bytes)));
        for (name, bytes) in files.chain([(MANIFEST, None)]) {
            let (source, name) = (from.path().join(name), format!("{step}/{name}"));
            let bytes = match bytes {
                Some(bytes) => bytes,
                None => fs::metadata(&source).map_err(CheckpointError::io("read", &source))?.len(),
            };
            self.objects.put(&name, &source).map_err(self.io("write", &name))?;
            let there = self.objects.size(&name).map_err(self.io("look at", &name))?;
            if there != Some(bytes) {
                // It must not count as one.
                drop(self.objects.remove(&name));
                let cause = io::Error::other(format!("{bytes} bytes were sent, {there:?} are there"));
                return Err(self.io("write", &name)(cause));
            }
            sent += bytes;
        }
        Ok(sent)
    }

    /// Sets the checkpoint of a step aside, if there is one.
    pub fn distrust(&self, step: u64) -> Result<(), CheckpointError> {
        self.set_aside(&of_step(step))
    }

    /// Gives what is there under a step's name another one, under which it is no checkpoint; without a manifest it is none.
    fn set_aside(&self, step: &str) -> Result<(), CheckpointError> {
        let all = self.all()?;
        let under = |name: &str| all.keys().any(|key| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('/')));
        if !all.contains_key(&format!("{step}/{MANIFEST}")) {
            return Ok(());
        }
        let to = (1..).map(|n| format!("{step}.damaged-{n}")).find(|to| !under(to)).expect("there are many numbers");
        for name in all.keys().filter_map(|key| key.strip_prefix(step)?.strip_prefix('/')) {
            let from = format!("{step}/{name}");
            self.objects.copy(&from, &format!("{to}/{name}")).map_err(self.io("set aside", &from))?;
        }
        self.remove(step, &all)
    }

    /// Removes what is under a step's name, its manifest first.
    fn remove(&self, step: &str, all: &BTreeMap<String, u64>) -> Result<(), CheckpointError> {
        let manifest = format!("{step}/{MANIFEST}");
        let of_it =
            |key: &&String| key.strip_prefix(step).is_some_and(|rest| rest.starts_with('/')) && **key != manifest;
        for name in std::iter::once(&manifest).chain(all.keys().filter(of_it)) {
            self.objects.remove(name).map_err(self.io("remove", name))?;
        }
        Ok(())
    }

    /// As [`crate::retain`]; what is complete here counts as good, since each object was checked by the store when it came.
    pub fn retain(&self, retention: &Retention) -> Result<Vec<u64>, CheckpointError> {
        let all = self.all()?;
        let mut steps: Vec<u64> = all.keys().filter_map(|key| step_of(Path::new(key.split_once('/')?.0))).collect();
        steps.dedup();
        let mut complete = Vec::new();
        for step in steps.iter().rev() {
            if self.manifest(*step)?.is_some_and(|manifest| Self::complete(&manifest, &all)) {
                complete.push(*step);
            }
        }
        let Some(&newest) = complete.first() else { return Ok(Vec::new()) };
        let oldest = complete.get(retention.keep.max(1) - 1).copied().unwrap_or(0);
        let leftover = |step: u64| step < newest && !all.contains_key(&format!("{}/{MANIFEST}", of_step(step)));
        let goes = |step: &u64| (*step < oldest && !retention.spares(*step)) || leftover(*step);
        let gone: Vec<u64> = steps.into_iter().filter(goes).collect();
        gone.iter().try_for_each(|step| self.remove(&of_step(*step), &all))?;
        Ok(gone)
    }

    /// Brings the checkpoint of a step to `root`, verified; what was there under its name is set aside.
    pub fn fetch(&self, step: u64, root: &Path) -> Result<PathBuf, CheckpointError> {
        // A name that attempts have: what is left of it after a death is swept.
        let base = root.join(format!("writing-{:016x}", u64::from(std::process::id()) << 32 | (step & 0xffff_ffff)));
        let folder = step_dir(&base, step);
        let fetched = self.fetch_into(step, &folder).and_then(|()| {
            let place = step_dir(root, step);
            if place.exists() {
                super::set_aside(&place)?;
            }
            fs::rename(&folder, &place).map_err(CheckpointError::io("rename", &folder))?;
            Ok(place)
        });
        drop(fs::remove_dir_all(base));
        fetched
    }

    fn fetch_into(&self, step: u64, folder: &Path) -> Result<(), CheckpointError> {
        let manifest = self.manifest(step)?.ok_or_else(|| CheckpointError::Manifest {
            path: format!("{}/{}/{MANIFEST}", self.place, of_step(step)).into(),
            reason: "it is none".into(),
            older: None,
        })?;
        fs::create_dir_all(folder).map_err(CheckpointError::io("create", folder))?;
        for name in manifest.files.iter().map(|file| file.name.as_str()).chain([MANIFEST]) {
            let (path, name) = (folder.join(name), format!("{}/{name}", of_step(step)));
            let mut file = File::create(&path).map_err(CheckpointError::io("create", &path))?;
            self.objects.get(&name, &mut file).map_err(self.io("read", &name))?;
            file.sync_all().map_err(CheckpointError::io("sync", &path))?;
        }
        match Checkpoint::open_alone(folder)?.verify().problems.into_iter().next() {
            None => Ok(()),
            Some(problem) => Err(problem),
        }
    }
}

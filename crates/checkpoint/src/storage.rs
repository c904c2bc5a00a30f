//! The seam to the file system for everything that writes; tests put faults behind it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file being written.
pub trait StorageFile: Write {
    /// Returns when the bytes are on stable storage.
    ///
    /// # Errors
    /// Those of the file system; the file must then not be used.
    fn sync(&mut self) -> io::Result<()>;

    /// A second handle, by which another thread may sync what was written so far; `None`: there is only this one.
    fn handle(&self) -> Option<File> {
        None
    }
}

/// What writing a checkpoint asks of a file system. Reading uses the file system itself.
pub trait Storage {
    /// Creates a folder and its parents; no error if it exists.
    ///
    /// # Errors
    /// Those of the file system.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates or empties a file.
    ///
    /// # Errors
    /// Those of the file system.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Gives a file its final name, atomically; replaces what is there.
    ///
    /// # Errors
    /// Those of the file system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// Those of the file system.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns when the names in a folder are on stable storage.
    ///
    /// # Errors
    /// Those of the file system.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disk;

impl StorageFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }

    fn handle(&self) -> Option<File> {
        self.try_clone().ok()
    }
}

impl Storage for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(File::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

/// The name under which `path` is written.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

/// Creates and fills [`temporary`] of `path`; it is still to be synced and renamed. On error it is removed.
///
/// The error says what failed.
pub(crate) fn stage(
    storage: &dyn Storage,
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<Box<dyn StorageFile>, (&'static str, io::Error)> {
    let temporary = temporary(path);
    let attempt = || {
        let mut file = storage.create(&temporary).map_err(|e| ("create", e))?;
        fill(&mut file).map_err(|e| ("write", e))?;
        file.flush().map_err(|e| ("write", e))?;
        Ok(file)
    };
    attempt().inspect_err(|_| {
        // The first error counts; a leftover of this name is never read.
        let _ = storage.remove(&temporary);
    })
}

/// Writes `path` by way of `path.tmp`: create, `fill`, sync, rename. On error the temporary
/// file is removed and `path` is as it was.
///
/// The error says which of the four failed.
pub(crate) fn write_whole(
    storage: &dyn Storage,
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), (&'static str, io::Error)> {
    let mut file = stage(storage, path, fill)?;
    let temporary = temporary(path);
    let attempt = || {
        file.sync().map_err(|e| ("sync", e))?;
        drop(file);
        storage.rename(&temporary, path).map_err(|e| ("rename", e))
    };
    attempt().inspect_err(|_| drop(storage.remove(&temporary)))
}

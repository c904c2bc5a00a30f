//! Where a vector of optimizer state lies: in memory, or (the "offloaded" placement) in a file that is mapped.
//!
//! The file has no name: its space is free again when the process ends, however it ends. Pages come to memory when they are
//! asked for ahead of their use ([`Tier::want`]) and leave it after ([`Tier::release`]); what was written stays in the
//! system's cache until it is on the disk.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use memmap2::{Advice, MmapMut, MmapOptions, UncheckedAdvice};
use rustix::fs::{FallocateFlags, fallocate};

/// A vector of numbers.
#[derive(Debug)]
pub enum Tier {
    /// In memory.
    Memory(Vec<f32>),
    /// In a file of its own.
    File(Mapped),
}

/// A mapped file without a name.
#[derive(Debug)]
pub struct Mapped {
    map: MmapMut,
    len: usize,
}

impl Tier {
    /// `len` zeros in memory.
    pub fn zeros(len: usize) -> Self {
        Self::Memory(vec![0.0; len])
    }

    /// `len` zeros in a file in `folder`, whose space is taken at once; an empty vector stays in memory.
    ///
    /// # Errors
    /// The system's: no such folder, no space.
    pub fn in_file(folder: &Path, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self::zeros(0));
        }
        let file = nameless(folder)?;
        let bytes = len * size_of::<f32>();
        // A hole that finds no space when it is written to would end the process.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        // SAFETY: the file has no name any more, so nobody else writes to it or shortens it while it is mapped.
        let map = unsafe { MmapOptions::new().len(bytes).map_mut(&file) }?;
        // Read and written from front to back, once a step.
        let _ = map.advise(Advice::Sequential);
        Ok(Self::File(Mapped { map, len }))
    }

    /// The whole vector will be used soon: the system begins to read it.
    pub fn want(&self) {
        if let Self::File(Mapped { map, .. }) = self {
            // A hint: if it is not taken, only time is lost.
            let _ = map.advise(Advice::WillNeed);
        }
    }

    /// It will not be used soon: its pages leave this process.
    pub fn release(&self) {
        if let Self::File(Mapped { map, .. }) = self {
            let _ = map.flush_async();
            // SAFETY: the pages are those of a shared map of a file: what was written is in the file (or on its way there in
            // the system's cache), and a later access finds it again.
            let _ = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

/// A new file in `folder`, for reading and writing, that has no name any more.
pub(crate) fn nameless(folder: &Path) -> io::Result<File> {
    let mut number = 0;
    loop {
        // Ranks that are threads of one process may want the same name at one time.
        let path = folder.join(format!(".offload-{}-{number}", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            Ok(file) => return fs::remove_file(&path).map(|()| file),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(e) => return Err(e),
        }
    }
}

impl Deref for Tier {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Memory(values) => values,
            // SAFETY: the map begins on a page, has `len` numbers, and every pattern of bits is a number.
            Self::File(Mapped { map, len }) => unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), *len) },
        }
    }
}

impl DerefMut for Tier {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Memory(values) => values,
            // SAFETY: as above, and `self` is borrowed alone.
            Self::File(Mapped { map, len }) => unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), *len) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_is_found_again_and_the_folder_stays_empty() {
        let folder = tempfile::tempdir().unwrap();
        let mut tier = Tier::in_file(folder.path(), 5000).unwrap();
        assert_eq!(tier.len(), 5000);
        assert!(tier.iter().all(|x| *x == 0.0));
        tier.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
        tier.release();
        tier.want();
        assert!(tier.iter().enumerate().all(|(i, x)| *x == i as f32));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(matches!(Tier::in_file(folder.path(), 0).unwrap(), Tier::Memory(_)));
        assert!(Tier::in_file(&folder.path().join("none"), 1).is_err());
    }
}

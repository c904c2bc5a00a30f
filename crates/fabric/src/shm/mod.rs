//! Shared memory between processes, and between threads of one process.
//!
//! The memory is a `memfd`: it has no name in any file system and vanishes with the last
//! process that holds it. The kernel is asked by process id whether a peer still lives, so
//! all ranks of a world must see the same process ids (one pid namespace).

mod link;
mod region;

use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::options::{FabricOptions, RankId};
use link::ShmLink;
use region::Region;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The memory that the ranks of one world share. Keep it until all of them have attached.
pub struct ShmWorld {
    file: File,
    region: Arc<Region>,
}

impl ShmWorld {
    /// Makes memory for `world` ranks: world^2 rings of `options.ring_bytes`, of which
    /// only the used ones take pages. Child processes inherit the descriptor.
    ///
    /// # Errors
    /// `Setup` if the system refuses the memory.
    pub fn create(world: u32, options: &FabricOptions) -> Result<Self, FabricError> {
        let what = "create shared memory";
        let fd = rustix::fs::memfd_create("lockstep-fabric", MemfdFlags::ALLOW_SEALING)
            .map_err(|e| FabricError::setup(what, e))?;
        let file = File::from(fd);
        let region = Arc::new(Region::create(&file, world, options.ring_bytes)?);
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|e| FabricError::setup(what, e))?;
        Ok(Self { file, region })
    }

    /// The descriptor that a child inherits and gives to [`ShmWorld::attach`].
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// A path under which other processes of the same user find this memory while this
    /// process lives, for [`ShmWorld::attach_path`]: how a process that was not started
    /// after `create` joins.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.fd()))
    }

    /// Becomes `rank` in the memory behind an inherited descriptor. The descriptor itself
    /// stays open and untouched.
    ///
    /// # Errors
    /// `Setup` if `fd` is no such memory, was made for another number of ranks, or the rank
    /// is taken.
    pub fn attach(fd: RawFd, rank: RankId, world: u32, options: &FabricOptions) -> Result<Endpoint, FabricError> {
        Self::attach_path(Path::new(&format!("/proc/self/fd/{fd}")), rank, world, options)
    }

    /// Becomes `rank` in the memory that [`ShmWorld::path`] of another process names.
    ///
    /// # Errors
    /// As [`ShmWorld::attach`].
    pub fn attach_path(
        path: &Path,
        rank: RankId,
        world: u32,
        options: &FabricOptions,
    ) -> Result<Endpoint, FabricError> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|e| FabricError::setup("attach to shared memory", format!("{}: {e}", path.display())))?;
        join(Arc::new(Region::open(&file, world)?), rank, options)
    }

    /// Tells all ranks that `rank` is dead: for a parent that saw it exit before it attached.
    /// (The death of an attached process is noticed without this.)
    pub fn mark_dead(&self, rank: RankId) {
        link::mark_dead(&self.region, rank);
    }
}

/// `world` endpoints in one process, one for each thread that plays a rank.
///
/// # Errors
/// `Setup` if the system refuses the memory for the rings.
pub fn threads(world: u32, options: &FabricOptions) -> Result<Vec<Endpoint>, FabricError> {
    let shared = ShmWorld::create(world, options)?;
    (0..world).map(|rank| join(shared.region.clone(), rank, options)).collect()
}

fn join(region: Arc<Region>, rank: RankId, options: &FabricOptions) -> Result<Endpoint, FabricError> {
    let world = region.world();
    let link = ShmLink::new(region, rank)?;
    Ok(Endpoint::over(rank, world, options, Arc::new(link)))
}

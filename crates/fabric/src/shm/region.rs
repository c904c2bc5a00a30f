//! The shared memory: a page of facts, a slot per rank, a byte ring per ordered pair.
//!
//! ```text
//! page 0:           magic u64, world u64, ring bytes u64
//! page 1 ..:        per rank 128 bytes: state, pid, doorbell, asleep (u32 each)
//! then, per pair:   head u64 at 0, tail u64 at 128, data at 4096 (source * world + target)
//! ```
//!
//! The rings are lock-free with one producer and one consumer: the producer alone moves
//! `tail`, the consumer alone moves `head`; both only grow. All `unsafe` of the transport
//! is here.

use crate::error::FabricError;
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"lockshm1");
const PAGE: usize = 4096;
const SLOT_BYTES: usize = 128;
const TAIL_AT: usize = 128;

/// The words of a rank's slot, by offset in bytes.
#[derive(Clone, Copy)]
pub(crate) enum Word {
    /// [`State`] as a number.
    State = 0,
    /// Process id, valid once attached.
    Pid = 4,
    /// Counts what happened to this rank's rings; what it sleeps on.
    Doorbell = 8,
    /// 1 while the rank sleeps.
    Asleep = 12,
}

/// The life of a rank in a region.
pub(crate) mod state {
    pub const ABSENT: u32 = 0;
    pub const ATTACHED: u32 = 1;
    pub const CLOSED: u32 = 2;
    pub const DEAD: u32 = 3;
}

/// A mapping of the shared memory.
pub(crate) struct Region {
    map: MmapRaw,
    world: usize,
    ring_bytes: usize,
}

impl Region {
    /// Bytes of a region.
    fn size(world: usize, ring_bytes: usize) -> Option<usize> {
        let slots = (world * SLOT_BYTES).next_multiple_of(PAGE);
        world.checked_mul(world)?.checked_mul(PAGE.checked_add(ring_bytes)?)?.checked_add(PAGE + slots)
    }

    /// Sizes `file`, maps it and writes the facts.
    pub fn create(file: &File, world: u32, ring_bytes: usize) -> Result<Self, FabricError> {
        let ring_bytes = ring_bytes.clamp(PAGE, 1 << 40).next_power_of_two();
        let what = "create shared memory";
        let size = Self::size(world as usize, ring_bytes)
            .ok_or_else(|| FabricError::setup(what, format!("{world}^2 rings of {ring_bytes} bytes")))?;
        file.set_len(size as u64).map_err(|e| FabricError::setup(what, format!("{size} bytes: {e}")))?;
        let region = Self::map(file, world as usize, ring_bytes, size)?;
        region.long(8).store(world.into(), Ordering::Relaxed);
        region.long(16).store(ring_bytes as u64, Ordering::Relaxed);
        region.long(0).store(MAGIC, Ordering::Release);
        Ok(region)
    }

    /// Maps a region that [`Region::create`] made; checks every fact against the file.
    pub fn open(file: &File, world: u32) -> Result<Self, FabricError> {
        let what = "attach to shared memory";
        let bytes = file.metadata().map_err(|e| FabricError::setup(what, e))?.len() as usize;
        if bytes < PAGE {
            return Err(FabricError::setup(what, format!("{bytes} bytes are no shared world")));
        }
        let facts = Self::map(file, 0, 0, PAGE)?;
        let magic = facts.long(0).load(Ordering::Acquire);
        let made_for = facts.long(8).load(Ordering::Relaxed);
        let ring_bytes = facts.long(16).load(Ordering::Relaxed) as usize;
        if magic != MAGIC {
            return Err(FabricError::setup(what, format!("magic is {magic:#x}, expected {MAGIC:#x}")));
        }
        if made_for != u64::from(world) {
            return Err(FabricError::setup(what, format!("made for {made_for} ranks, asked for {world}")));
        }
        let size = Self::size(world as usize, ring_bytes);
        if !ring_bytes.is_power_of_two() || size != Some(bytes) {
            let problem = format!("{bytes} bytes do not fit {world} ranks with rings of {ring_bytes}");
            return Err(FabricError::setup(what, problem));
        }
        Self::map(file, world as usize, ring_bytes, bytes)
    }

    fn map(file: &File, world: usize, ring_bytes: usize, size: usize) -> Result<Self, FabricError> {
        let map = MmapOptions::new()
            .len(size)
            .map_raw(file)
            .map_err(|e| FabricError::setup("map shared memory", format!("{size} bytes: {e}")))?;
        Ok(Self { map, world, ring_bytes })
    }

    fn long(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.map.len());
        // SAFETY: inside the mapping (asserted), which lives as long as &self and whose
        // file is sealed against shrinking; aligned, since the mapping starts on a page;
        // every process uses these words by atomics only.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    /// A word of `rank`'s slot.
    pub fn word(&self, rank: u32, word: Word) -> &AtomicU32 {
        let at = PAGE + rank as usize * SLOT_BYTES + word as usize;
        assert!((rank as usize) < self.world && at + 4 <= self.map.len());
        // SAFETY: as in `long`.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.world as u32
    }

    fn ring(&self, source: u32, target: u32) -> usize {
        let slots = (self.world * SLOT_BYTES).next_multiple_of(PAGE);
        let pair = source as usize * self.world + target as usize;
        PAGE + slots + pair * (PAGE + self.ring_bytes)
    }

    /// Puts a prefix of `bytes` into the ring; returns its length, 0 if the ring is full.
    /// Only `source` itself may call this, from one thread at a time.
    pub fn put(&self, source: u32, target: u32, bytes: &[u8]) -> usize {
        let ring = self.ring(source, target);
        let (head, tail) = (self.long(ring), self.long(ring + TAIL_AT));
        let at = tail.load(Ordering::Relaxed);
        let used = at.wrapping_sub(head.load(Ordering::Acquire)) as usize;
        let n = bytes.len().min(self.ring_bytes.saturating_sub(used));
        if n == 0 {
            return 0;
        }
        let (start, first) = self.split(ring, at, n);
        // SAFETY: `split` keeps both pieces inside this ring's data; the bytes from tail to
        // tail + n are free (n <= room), so the consumer does not touch them until the
        // release store below; `bytes` is ordinary memory outside the mapping.
        unsafe {
            let base = self.map.as_mut_ptr();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.add(start), first);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), base.add(ring + PAGE), n - first);
        }
        tail.store(at.wrapping_add(n as u64), Ordering::Release);
        n
    }

    /// Takes bytes out of the ring; returns how many, 0 if it is empty. Only `target`
    /// itself may call this, from one thread at a time.
    pub fn get(&self, source: u32, target: u32, into: &mut [u8]) -> usize {
        let ring = self.ring(source, target);
        let (head, tail) = (self.long(ring), self.long(ring + TAIL_AT));
        let at = head.load(Ordering::Relaxed);
        let used = tail.load(Ordering::Acquire).wrapping_sub(at) as usize;
        let n = into.len().min(used).min(self.ring_bytes);
        if n == 0 {
            return 0;
        }
        let (start, first) = self.split(ring, at, n);
        // SAFETY: `split` keeps both pieces inside this ring's data; the bytes from head to
        // head + n were published by the producer's release store, and it does not touch
        // them until the release store below; `into` lies outside the mapping.
        unsafe {
            let base = self.map.as_mut_ptr();
            std::ptr::copy_nonoverlapping(base.add(start), into.as_mut_ptr(), first);
            std::ptr::copy_nonoverlapping(base.add(ring + PAGE), into.as_mut_ptr().add(first), n - first);
        }
        head.store(at.wrapping_add(n as u64), Ordering::Release);
        n
    }

    /// Where the `n <= ring_bytes` bytes at ring position `at` start in the mapping, and how
    /// many of them come before the ring wraps.
    fn split(&self, ring: usize, at: u64, n: usize) -> (usize, usize) {
        let offset = at as usize & (self.ring_bytes - 1);
        let first = n.min(self.ring_bytes - offset);
        assert!(n <= self.ring_bytes && ring + PAGE + self.ring_bytes <= self.map.len());
        (ring + PAGE + offset, first)
    }
}

//! The shared memory: a page of facts, a slot per rank, a byte ring per ordered pair.
//!
//! ```text
//! page 0:           magic u64, world u64, ring bytes u64, cores u64
//! page 1 ..:        per rank 128 bytes: state, pid, doorbell, asleep (u32 each)
//! then, per pair:   head u64 at 0, tail u64 at 128, starved u32 at 256, data at 4096
//!                   (pair number: source * world + target)
//! ```
//!
//! The rings are lock-free with one producer and one consumer: the producer alone moves
//! `tail`, the consumer alone moves `head`; both only grow. A producer without room says
//! so in `starved`: only then does the consumer ring its bell. All `unsafe` of the
//! transport is here.

use crate::error::FabricError;
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

const MAGIC: u64 = u64::from_le_bytes(*b"lockshm2");
const PAGE: usize = 4096;
const SLOT_BYTES: usize = 128;
const TAIL_AT: usize = 128;
const STARVED_AT: usize = 256;

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
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        region.long(24).store(cores as u64, Ordering::Relaxed);
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

    /// True if every rank has a core for itself, as far as its maker may use them: the ranks
    /// themselves may each be held on one.
    pub fn roomy(&self) -> bool {
        self.world as u64 <= self.long(24).load(Ordering::Relaxed)
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

    /// Puts a prefix of the concatenation of `pieces` into the ring; returns its length, 0 if
    /// the ring is full. Only `source` itself may call this, from one thread at a time.
    pub fn put(&self, source: u32, target: u32, pieces: &[IoSlice<'_>]) -> usize {
        let ring = self.ring(source, target);
        let (head, tail) = (self.long(ring), self.long(ring + TAIL_AT));
        let start = tail.load(Ordering::Relaxed);
        let used = start.wrapping_sub(head.load(Ordering::Acquire)) as usize;
        let room = self.ring_bytes.saturating_sub(used);
        let mut done = 0;
        for piece in pieces {
            let n = piece.len().min(room - done);
            let (at, first) = self.split(ring, start.wrapping_add(done as u64), n);
            // SAFETY: `split` keeps both pieces inside this ring's data; the bytes from tail to
            // tail + room are free, so the consumer does not touch them until the release store
            // below; `piece` is ordinary memory outside the mapping.
            unsafe {
                let base = self.map.as_mut_ptr();
                std::ptr::copy_nonoverlapping(piece.as_ptr(), base.add(at), first);
                std::ptr::copy_nonoverlapping(piece.as_ptr().add(first), base.add(ring + PAGE), n - first);
            }
            done += n;
        }
        if done > 0 {
            tail.store(start.wrapping_add(done as u64), Ordering::Release);
        }
        done
    }

    /// Says that `source` waits for room. Dekker's order with [`Region::show`]: this is stored
    /// before the head is read again, there the head before this is read.
    pub fn starve(&self, source: u32, target: u32) {
        self.starved(source, target).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn starved(&self, source: u32, target: u32) -> &AtomicU32 {
        let at = self.ring(source, target) + STARVED_AT;
        assert!(at + 4 <= self.map.len());
        // SAFETY: as in `long`.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    /// Shows the oldest bytes of the ring where they lie, then frees them: one piece of at most
    /// `limit` bytes, a multiple of `unit` (of which the ring is one). Returns its length, 0 if
    /// there is no such piece, and whether the producer waits for room. Only `target` itself
    /// may call this, from one thread at a time.
    pub fn show(
        &self,
        source: u32,
        target: u32,
        limit: usize,
        unit: usize,
        see: &mut dyn FnMut(&[u8]),
    ) -> (usize, bool) {
        let ring = self.ring(source, target);
        let (head, tail) = (self.long(ring), self.long(ring + TAIL_AT));
        let start = head.load(Ordering::Relaxed);
        let used = tail.load(Ordering::Acquire).wrapping_sub(start) as usize;
        let n = limit.min(used).min(self.ring_bytes);
        let (at, first) = self.split(ring, start, n);
        let n = first - first % unit;
        if n == 0 {
            return (0, false);
        }
        // SAFETY: `split` keeps the piece inside this ring's data; the bytes from head to head
        // + n were published by the producer's release store, and it does not touch them until
        // the release store below, which comes after the last use of this borrow.
        see(unsafe { std::slice::from_raw_parts(self.map.as_mut_ptr().add(at), n) });
        head.store(start.wrapping_add(n as u64), Ordering::Release);
        fence(Ordering::SeqCst);
        let starved = self.starved(source, target);
        (n, starved.load(Ordering::Relaxed) != 0 && starved.swap(0, Ordering::Relaxed) != 0)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A region with rings of one page, ranks 0 and 1.
    fn region() -> Region {
        let fd = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::empty()).unwrap();
        Region::create(&File::from(fd), 2, PAGE).unwrap()
    }

    /// Takes up to `limit` bytes out.
    fn get(region: &Region, limit: usize, unit: usize) -> Vec<u8> {
        let mut got = Vec::new();
        region.show(0, 1, limit, unit, &mut |piece| got.extend_from_slice(piece));
        got
    }

    #[test]
    fn every_byte_passes_once_at_every_offset_of_the_wrap() {
        let region = region();
        let (mut next_in, mut next_out) = (0u32, 0u32);
        for round in 0..400usize {
            let bytes: Vec<u8> = (0..(round * 37) % (PAGE + 9)).map(|i| (next_in + i as u32) as u8).collect();
            let (a, b) = bytes.split_at(bytes.len() / 3);
            let put = region.put(0, 1, &[IoSlice::new(a), IoSlice::new(b)]);
            assert_eq!(put, bytes.len().min(PAGE));
            next_in += put as u32;
            // Out in pieces; the one at the end of the ring is short.
            while next_out < next_in {
                for byte in get(&region, 1 + round % 777, 1) {
                    assert_eq!(byte, next_out as u8, "byte {next_out} in round {round}");
                    next_out += 1;
                }
            }
        }
    }

    #[test]
    fn a_full_ring_takes_nothing_and_numbers_stay_whole() {
        let region = region();
        assert_eq!(region.put(0, 1, &[IoSlice::new(&[7; PAGE + 1])]), PAGE);
        assert_eq!(region.put(0, 1, &[IoSlice::new(&[7])]), 0);
        assert_eq!(get(&region, 6, 4).len(), 4);
        assert_eq!(get(&region, 3, 4).len(), 0);
        assert_eq!(get(&region, PAGE, 4).len(), PAGE - 4);
        assert_eq!(region.put(0, 1, &[IoSlice::new(&[7; 6])]), 6);
        assert_eq!(get(&region, 100, 4).len(), 4, "two bytes are no number");
        assert_eq!(get(&region, 100, 1).len(), 2);
    }

    #[test]
    fn who_waits_for_room_is_told_once() {
        let region = region();
        region.put(0, 1, &[IoSlice::new(&[7; PAGE])]);
        assert_eq!(region.show(0, 1, 8, 4, &mut |_| {}), (8, false));
        region.starve(0, 1);
        assert_eq!(region.show(0, 1, 8, 4, &mut |_| {}), (8, true));
        assert_eq!(region.show(0, 1, 8, 4, &mut |_| {}), (8, false));
    }
}

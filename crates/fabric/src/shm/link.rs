//! The byte streams of one rank over a [`Region`], with sleeping and signs of death.

use super::region::{Region, Word, state};
use crate::error::FabricError;
use crate::link::{Link, LinkDown};
use crate::options::RankId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::futex;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a sleeper asks whether the processes of its peers still live.
const LIFE_CHECK: Duration = Duration::from_millis(10);

/// Sum and copy in steps that stay in the core's innermost cache.
const STEP_BYTES: usize = 16 << 10;
/// The longest and the shortest spin before a sleep. Waking a sleeper costs tens of
/// microseconds; a spin that is in vain costs nobody anything but its own length.
const SPIN_MAX: Duration = Duration::from_micros(200);
const SPIN_MIN: Duration = Duration::from_micros(5);
/// Looks at the bell between two looks at the clock.
const LOOKS: u32 = 16;

/// One rank's end of a region.
pub(super) struct ShmLink {
    region: Arc<Region>,
    rank: RankId,
    life: Mutex<Life>,
    /// How long the next wait spins, in nanoseconds; 0 for ever where ranks share cores: there
    /// a spin keeps the awaited rank from running.
    spin_ns: AtomicU32,
}

/// What is known about the processes of the peers.
struct Life {
    watched: Vec<Option<OwnedFd>>,
    checked: Instant,
}

impl ShmLink {
    /// Takes the slot of `rank`.
    pub fn new(region: Arc<Region>, rank: RankId) -> Result<Self, FabricError> {
        let world = region.world();
        if rank >= world {
            let problem = format!("rank {rank} in a world of {world}");
            return Err(FabricError::setup("attach to shared memory", problem));
        }
        let slot = region.word(rank, Word::State);
        slot.compare_exchange(state::ABSENT, state::ATTACHED, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| FabricError::setup("attach to shared memory", format!("rank {rank} is taken")))?;
        region.word(rank, Word::Pid).store(std::process::id(), Ordering::Release);
        let watched = (0..world).map(|_| None).collect();
        let life = Mutex::new(Life { watched, checked: Instant::now() });
        let spin = if region.roomy() { SPIN_MAX } else { Duration::ZERO };
        Ok(Self { region, rank, life, spin_ns: AtomicU32::new(spin.as_nanos() as u32) })
    }

    /// Spins for a while; true if the bell rang. A spin in vain halves the next one, one that
    /// paid doubles it: waits of one program are alike.
    fn spin(&self, ticket: u32, limit: Duration) -> bool {
        let spin = Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed).into());
        if spin.is_zero() {
            return false;
        }
        let bell = self.region.word(self.rank, Word::Doorbell);
        let (began, most) = (Instant::now(), spin.min(limit));
        let mut rung = false;
        while !rung && began.elapsed() < most {
            rung = (0..LOOKS).any(|_| {
                std::hint::spin_loop();
                bell.load(Ordering::SeqCst) != ticket
            });
        }
        let next = if rung { (spin * 2).min(SPIN_MAX) } else { (spin / 2).max(SPIN_MIN) };
        self.spin_ns.store(next.as_nanos() as u32, Ordering::Relaxed);
        rung
    }

    fn take(&self, peer: RankId, limit: usize, unit: usize, see: &mut dyn FnMut(&[u8])) -> Result<usize, LinkDown> {
        // First the state, then the ring: what a peer sent before it left is still read.
        let down = self.down(peer);
        let (n, starved) = self.region.show(peer, self.rank, limit, unit, see);
        if starved {
            ring_bell(&self.region, peer);
        }
        match down.filter(|_| n == 0) {
            Some(down) => Err(down),
            None => Ok(n),
        }
    }

    fn down(&self, peer: RankId) -> Option<LinkDown> {
        match self.region.word(peer, Word::State).load(Ordering::Acquire) {
            state::CLOSED => Some(LinkDown("it closed its end".into())),
            state::DEAD => Some(LinkDown("its process died".into())),
            _ => None,
        }
    }

    /// Marks the peers whose processes have ended. A process that was killed ends without a
    /// word, so the kernel is asked.
    fn check_life(&self) {
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        if life.checked.elapsed() < LIFE_CHECK {
            return;
        }
        life.checked = Instant::now();
        let me = std::process::id();
        for peer in 0..self.region.world() {
            if self.region.word(peer, Word::State).load(Ordering::Acquire) != state::ATTACHED {
                continue;
            }
            let pid = self.region.word(peer, Word::Pid).load(Ordering::Acquire);
            if pid == me || pid == 0 {
                continue;
            }
            let slot = &mut life.watched[peer as usize];
            if slot.is_none() {
                match Pid::from_raw(pid as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
                    Some(Ok(fd)) => *slot = Some(fd),
                    Some(Err(rustix::io::Errno::SRCH)) | None => {
                        mark_dead(&self.region, peer);
                        continue;
                    }
                    Some(Err(_)) => continue,
                }
            }
            let Some(fd) = slot.as_ref() else { continue };
            let mut fds = [PollFd::new(fd, PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ended| ended > 0) {
                mark_dead(&self.region, peer);
            }
        }
    }
}

/// Marks `rank` dead and wakes everyone.
pub(super) fn mark_dead(region: &Region, rank: RankId) {
    leave(region, rank, state::DEAD);
}

fn leave(region: &Region, rank: RankId, how: u32) {
    region.word(rank, Word::State).store(how, Ordering::Release);
    for peer in 0..region.world() {
        ring_bell(region, peer);
    }
}

/// Tells `rank` that something happened. With `wait` this is Dekker's order: the bell is
/// counted before `Asleep` is read there, `Asleep` is set before the bell is read here.
fn ring_bell(region: &Region, rank: RankId) {
    let bell = region.word(rank, Word::Doorbell);
    bell.fetch_add(1, Ordering::SeqCst);
    if region.word(rank, Word::Asleep).load(Ordering::SeqCst) != 0 {
        // Nothing to do if it fails: the sleeper wakes by itself soon.
        let _ = futex::wake(bell, futex::Flags::empty(), 1);
    }
}

impl Link for ShmLink {
    fn step_bytes(&self) -> usize {
        STEP_BYTES
    }

    fn write(&self, peer: RankId, pieces: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        if let Some(down) = self.down(peer) {
            return Err(down);
        }
        let mut n = self.region.put(self.rank, peer, pieces);
        if n == 0 {
            self.region.starve(self.rank, peer);
            n = self.region.put(self.rank, peer, pieces);
        }
        if n > 0 {
            ring_bell(&self.region, peer);
        }
        Ok(n)
    }

    fn read(&self, peer: RankId, into: &mut [u8]) -> Result<usize, LinkDown> {
        self.take(peer, into.len(), 1, &mut |piece| into[..piece.len()].copy_from_slice(piece))
    }

    fn show(&self, peer: RankId, limit: usize, see: &mut dyn FnMut(&[u8])) -> Result<usize, LinkDown> {
        self.take(peer, limit, size_of::<f32>(), see)
    }

    fn ticket(&self) -> u32 {
        self.region.word(self.rank, Word::Doorbell).load(Ordering::SeqCst)
    }

    fn wait(&self, ticket: u32, _full: Option<RankId>, limit: Duration) {
        if self.spin(ticket, limit) {
            return;
        }
        let asleep = self.region.word(self.rank, Word::Asleep);
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        asleep.store(1, Ordering::SeqCst);
        let bell = self.region.word(self.rank, Word::Doorbell);
        // Woken, bell already rung, or time over: the caller looks again in every case.
        let _ = futex::wait(bell, futex::Flags::empty(), ticket, Some(&timeout));
        asleep.store(0, Ordering::SeqCst);
        self.check_life();
    }

    fn wake(&self) {
        ring_bell(&self.region, self.rank);
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        leave(&self.region, self.rank, state::CLOSED);
    }
}

//! The byte streams of one rank over connected sockets.

use crate::link::{Link, LinkDown};
use crate::options::RankId;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A system call costs more than what a smaller step saves.
const STEP_BYTES: usize = 256 << 10;
/// What is read ahead from a peer. Larger reads go straight to their place.
const AHEAD_BYTES: usize = 64 << 10;

/// One connection.
struct Peer {
    stream: TcpStream,
    ahead: Mutex<Ahead>,
    /// Set at its end: a closed socket would end every poll at once.
    down: AtomicBool,
}

/// Bytes that were read before anybody asked for them: `bytes[from..to]`.
#[derive(Default)]
struct Ahead {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
}

/// One rank's connections, by rank; none to itself.
pub(super) struct TcpLink {
    peers: Vec<Option<Peer>>,
    bell: OwnedFd,
}

impl TcpLink {
    /// Takes over streams that are connected and non-blocking.
    pub fn new(streams: Vec<Option<TcpStream>>) -> std::io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let peer = |stream| Peer { stream, ahead: Mutex::default(), down: AtomicBool::new(false) };
        Ok(Self { peers: streams.into_iter().map(|stream| stream.map(peer)).collect(), bell })
    }

    fn peer(&self, rank: RankId) -> Result<&Peer, LinkDown> {
        let peer = self.peers.get(rank as usize).and_then(Option::as_ref);
        peer.ok_or_else(|| LinkDown("there is no connection".into()))
    }
}

impl Peer {
    /// What a read or write came to: 0 if it has to be tried again later.
    fn outcome(&self, result: std::io::Result<usize>) -> Result<usize, LinkDown> {
        let detail = match result {
            Ok(n) if n > 0 => return Ok(n),
            Ok(_) => "it closed its end".to_string(),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(0),
            Err(e) => format!("the connection failed: {e}"),
        };
        self.down.store(true, Ordering::Relaxed);
        Err(LinkDown(detail))
    }

    /// Shows the next bytes, at most `limit`, a multiple of `unit`.
    fn take(&self, limit: usize, unit: usize, see: &mut dyn FnMut(&[u8])) -> Result<usize, LinkDown> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let Ahead { bytes, from, to } = &mut *ahead;
        if *to - *from < unit {
            bytes.resize(AHEAD_BYTES, 0);
            bytes.copy_within(*from..*to, 0);
            (*from, *to) = (0, *to - *from);
            *to += self.outcome((&self.stream).read(&mut bytes[*to..]))?;
        }
        let n = limit.min(*to - *from);
        let n = n - n % unit;
        if n > 0 {
            see(&bytes[*from..*from + n]);
            *from += n;
        }
        Ok(n)
    }

    fn is_ahead(&self) -> bool {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.from < ahead.to
    }
}

impl Link for TcpLink {
    fn step_bytes(&self) -> usize {
        STEP_BYTES
    }

    fn write(&self, peer: RankId, pieces: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let peer = self.peer(peer)?;
        peer.outcome((&peer.stream).write_vectored(pieces))
    }

    fn read(&self, peer: RankId, into: &mut [u8]) -> Result<usize, LinkDown> {
        let peer = self.peer(peer)?;
        if into.len() >= AHEAD_BYTES && !peer.is_ahead() {
            return peer.outcome((&peer.stream).read(into));
        }
        peer.take(into.len(), 1, &mut |piece| into[..piece.len()].copy_from_slice(piece))
    }

    fn show(&self, peer: RankId, limit: usize, see: &mut dyn FnMut(&[u8])) -> Result<usize, LinkDown> {
        self.peer(peer)?.take(limit, size_of::<f32>(), see)
    }

    fn ticket(&self) -> u32 {
        0 // The kernel remembers what came since the last look.
    }

    fn wait(&self, _ticket: u32, full: Option<RankId>, limit: Duration) {
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        for (rank, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer.as_ref().filter(|p| !p.down.load(Ordering::Relaxed)) else { continue };
            let out = if full == Some(rank as RankId) { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::new(&peer.stream, PollFlags::IN | out));
        }
        let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Ready, time over or interrupted: the caller looks again in every case.
        let _ = poll(&mut fds, Some(&timeout));
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
    }

    fn wake(&self) {
        // Full means that a wake is already pending.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

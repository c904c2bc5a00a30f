//! The byte streams of one rank over connected sockets.

use crate::link::{Link, LinkDown};
use crate::options::RankId;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// One connection.
struct Peer {
    stream: TcpStream,
    /// Set at its end: a closed socket would end every poll at once.
    down: AtomicBool,
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
        let peer = |stream| Peer { stream, down: AtomicBool::new(false) };
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
}

impl Link for TcpLink {
    fn write(&self, peer: RankId, bytes: &[u8]) -> Result<usize, LinkDown> {
        let peer = self.peer(peer)?;
        peer.outcome((&peer.stream).write(bytes))
    }

    fn read(&self, peer: RankId, into: &mut [u8]) -> Result<usize, LinkDown> {
        let peer = self.peer(peer)?;
        peer.outcome((&peer.stream).read(into))
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

//! TCP: one connection per pair of ranks.
//!
//! Every rank binds a port; somebody who knows all ranks hands out the list of addresses;
//! then every rank calls the ranks below it and answers those above. Who does not know the
//! run's token is turned away (see [`handshake`]). The ports close when all are connected.

#[cfg(test)]
mod fuzz;
mod handshake;
mod link;

use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::options::{FabricOptions, RankId};
use handshake::{HELLO_BYTES, Hello, REPLY_BYTES, Verdict};
use link::TcpLink;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WHAT: &str = "connect by TCP";
/// How long a caller may take to introduce itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Callers that may be introducing themselves at once; the oldest goes first.
const CALLERS_MAX: usize = 256;
/// Pause between looks at the port.
const NAP: Duration = Duration::from_micros(300);

/// A bound port, before the other ranks' addresses are known.
pub struct TcpListenerHandle {
    listener: TcpListener,
}

/// A connection whose other end has not said everything yet.
struct Pending {
    stream: TcpStream,
    heard: Vec<u8>,
    since: Instant,
}

/// What a look at a [`Pending`] found.
enum Heard {
    All,
    More,
    Closed,
}

impl TcpListenerHandle {
    /// Binds a free port of `ip`; the address is what the other ranks need.
    ///
    /// # Errors
    /// `Setup` if the system refuses.
    pub fn bind(ip: IpAddr) -> Result<(Self, SocketAddr), FabricError> {
        let bind = || {
            let listener = TcpListener::bind((ip, 0))?;
            listener.set_nonblocking(true)?;
            let addr = listener.local_addr()?;
            Ok((Self { listener }, addr))
        };
        bind().map_err(|e: std::io::Error| FabricError::setup("bind a TCP port", format!("{ip}: {e}")))
    }

    /// Connects to all other ranks: `addrs[r]` is the address of rank `r`. All ranks must
    /// call this, with the same token and generation, within `options.deadline_ms`.
    ///
    /// # Errors
    /// `Setup` if a rank cannot be reached, refuses this one (and why), or does not come in
    /// time (then also how many callers were turned away, and why).
    pub fn connect(
        self,
        rank: RankId,
        addrs: &[SocketAddr],
        token: &[u8; 32],
        options: &FabricOptions,
    ) -> Result<Endpoint, FabricError> {
        self.connect_unless(rank, addrs, token, options, &|| None)
    }

    /// [`TcpListenerHandle::connect`] that gives up when `over` tells a reason: a rank that has died meanwhile would be
    /// waited for in vain.
    ///
    /// # Errors
    /// As `connect`; `Aborted` with the reason.
    pub fn connect_unless(
        self,
        rank: RankId,
        addrs: &[SocketAddr],
        token: &[u8; 32],
        options: &FabricOptions,
        over: &dyn Fn() -> Option<String>,
    ) -> Result<Endpoint, FabricError> {
        let world = addrs.len() as u32;
        if rank >= world {
            return Err(FabricError::setup(WHAT, format!("rank {rank} in a world of {world}")));
        }
        let deadline = Instant::now() + Duration::from_millis(options.deadline_ms);
        let hello = |target| Hello { generation: options.generation, source: rank, target, world, token: *token };
        let mut calls: Vec<(RankId, Pending)> = Vec::new();
        for target in 0..rank {
            let addr = addrs[target as usize];
            let pending = call(addr, &hello(target), deadline)
                .map_err(|e| FabricError::setup(WHAT, format!("rank {rank} calls rank {target} at {addr}: {e}")))?;
            calls.push((target, pending));
        }
        let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
        let mut callers: Vec<Pending> = Vec::new();
        let mut refused: Vec<String> = Vec::new();
        loop {
            accept(&self.listener, &mut callers);
            answer(&mut callers, &hello(rank), &mut streams, &mut refused);
            hear_replies(&mut calls, rank, &mut streams)?;
            let missing: Vec<u32> = (0..world).filter(|&r| r != rank && streams[r as usize].is_none()).collect();
            if missing.is_empty() {
                break;
            }
            if let Some(reason) = over() {
                return Err(FabricError::Aborted { reason });
            }
            if Instant::now() >= deadline {
                let turned = match refused.last() {
                    Some(last) => format!("; {} callers turned away, the last: {last}", refused.len()),
                    None => String::new(),
                };
                let waited = options.deadline_ms;
                let problem = format!("rank {rank} waited {waited} ms for ranks {missing:?}{turned}");
                return Err(FabricError::setup(WHAT, problem));
            }
            std::thread::sleep(NAP);
        }
        let link = TcpLink::new(streams).map_err(|e| FabricError::setup(WHAT, e))?;
        Ok(Endpoint::over(rank, world, options, Arc::new(link)))
    }
}

/// Calls `addr` and says hello.
fn call(addr: SocketAddr, hello: &Hello, deadline: Instant) -> std::io::Result<Pending> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&addr, left)?;
    stream.set_nodelay(true)?;
    stream.write_all(&hello.encode())?;
    stream.set_nonblocking(true)?;
    Ok(Pending::new(stream))
}

/// Takes in new callers.
fn accept(listener: &TcpListener, callers: &mut Vec<Pending>) {
    while let Ok((stream, _)) = listener.accept() {
        if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() {
            if callers.len() == CALLERS_MAX {
                callers.remove(0);
            }
            callers.push(Pending::new(stream));
        }
    }
}

/// Listens to callers; welcomes those that belong here.
fn answer(callers: &mut Vec<Pending>, here: &Hello, streams: &mut [Option<TcpStream>], refused: &mut Vec<String>) {
    let mut kept = Vec::new();
    for mut caller in callers.drain(..) {
        match caller.listen(HELLO_BYTES) {
            Heard::More if caller.since.elapsed() < HELLO_TIMEOUT => kept.push(caller),
            Heard::More => refused.push("it said too little".into()),
            Heard::Closed => refused.push("it hung up".into()),
            Heard::All => {
                let raw = caller.heard[..].try_into().expect("a whole hello");
                // No answer to noise.
                let Some(hello) = Hello::decode(&raw) else {
                    refused.push("it does not speak this protocol".into());
                    continue;
                };
                let place = streams.get(hello.source as usize);
                let verdict = here.judge(&hello, place.is_some_and(Option::is_none));
                let told = caller.stream.write_all(&verdict.encode()).is_ok();
                match verdict {
                    Verdict::Welcome if told => streams[hello.source as usize] = Some(caller.stream),
                    Verdict::Welcome => refused.push("it hung up".into()),
                    no => refused.push(no.to_string()),
                }
            }
        }
    }
    *callers = kept;
}

/// Listens to what the ranks below answered.
fn hear_replies(
    calls: &mut Vec<(RankId, Pending)>,
    rank: RankId,
    streams: &mut [Option<TcpStream>],
) -> Result<(), FabricError> {
    let mut kept = Vec::new();
    for (target, mut call) in calls.drain(..) {
        match call.listen(REPLY_BYTES) {
            Heard::More => kept.push((target, call)),
            Heard::Closed => {
                let problem = format!("rank {target} hung up on rank {rank} without an answer");
                return Err(FabricError::setup(WHAT, problem));
            }
            Heard::All => match Verdict::decode(&call.heard[..].try_into().expect("a whole reply")) {
                Verdict::Welcome => streams[target as usize] = Some(call.stream),
                no => {
                    let problem = format!("rank {target} refused rank {rank}: {no}");
                    return Err(FabricError::setup(WHAT, problem));
                }
            },
        }
    }
    *calls = kept;
    Ok(())
}

impl Pending {
    fn new(stream: TcpStream) -> Self {
        Self { stream, heard: Vec::new(), since: Instant::now() }
    }

    /// Reads up to `size` bytes in all, and not one more: what follows is the fabric's.
    fn listen(&mut self, size: usize) -> Heard {
        let mut raw = [0u8; HELLO_BYTES];
        while self.heard.len() < size {
            let room = size - self.heard.len();
            match self.stream.read(&mut raw[..room]) {
                Ok(0) => return Heard::Closed,
                Ok(n) => self.heard.extend_from_slice(&raw[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Heard::More,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Heard::Closed,
            }
        }
        Heard::All
    }
}

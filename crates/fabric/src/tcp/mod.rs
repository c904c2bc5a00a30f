//! TCP: one connection per pair of ranks.
//!
//! Every rank binds a port; somebody who knows all ranks hands out the list of addresses;
//! then every rank calls the ranks below it and answers those above. Who cannot prove that it
//! knows the world's token is turned away (see [`handshake`]). The ports close when all are connected.

#[cfg(test)]
mod fuzz;
mod handshake;
mod link;

use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::options::{FabricOptions, RankId};
use handshake::{Claim, GREETING_BYTES, HELLO_BYTES, Hello, Nonce, REPLY_BYTES, Token, Verdict, greeted, greeting};
use link::TcpLink;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WHAT: &str = "connect by TCP";
/// How long a caller may take to introduce itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Callers that may be introducing themselves at once; the oldest goes first.
const CALLERS_MAX: usize = 256;
/// How long a call waits before it is made again.
const CALL: Duration = Duration::from_millis(500);
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

/// One that called this rank, and what it was greeted with.
struct Caller {
    pending: Pending,
    nonce: Nonce,
}

/// One that this rank called.
struct Call {
    target: RankId,
    pending: Pending,
    /// What it greeted with and what was said to that.
    said: Option<(Nonce, Hello)>,
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
        let claim = |target| Claim { generation: options.generation, source: rank, target, world };
        let mut dice = Dice::new().map_err(|e| FabricError::setup(WHAT, format!("no random numbers: {e}")))?;
        let mut calls: Vec<Call> = Vec::new();
        for target in 0..rank {
            let addr = addrs[target as usize];
            let problem = |e| FabricError::setup(WHAT, format!("rank {rank} calls rank {target} at {addr}: {e}"));
            let pending = loop {
                match call(addr, deadline) {
                    // A host that is cut off answers nothing; nobody waits for it when the world is over.
                    Err(e) if e.kind() == ErrorKind::TimedOut && Instant::now() < deadline => {
                        if let Some(reason) = over() {
                            return Err(FabricError::Aborted { reason });
                        }
                    }
                    called => break called.map_err(problem)?,
                }
            };
            calls.push(Call { target, pending, said: None });
        }
        let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
        let mut callers: Vec<Caller> = Vec::new();
        let mut refused: Vec<String> = Vec::new();
        loop {
            accept(&self.listener, &mut callers, &mut dice);
            answer(&mut callers, (claim(rank), token), &mut streams, &mut refused);
            hear(&mut calls, (&claim, token), &mut dice, &mut streams)?;
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

/// Random bytes of the system.
struct Dice(File);

impl Dice {
    fn new() -> std::io::Result<Self> {
        File::open("/dev/urandom").map(Self)
    }

    fn nonce(&mut self) -> std::io::Result<Nonce> {
        let mut nonce = [0; 32];
        self.0.read_exact(&mut nonce)?;
        Ok(nonce)
    }
}

/// Calls `addr` for at most [`CALL`]; it speaks first.
fn call(addr: SocketAddr, deadline: Instant) -> std::io::Result<Pending> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&addr, left.min(CALL))?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(Pending::new(stream))
}

/// Takes in new callers and greets them.
fn accept(listener: &TcpListener, callers: &mut Vec<Caller>, dice: &mut Dice) {
    while let Ok((mut stream, _)) = listener.accept() {
        let greeted = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).and_then(|()| {
            let nonce = dice.nonce()?;
            stream.write_all(&greeting(&nonce)).map(|()| nonce)
        });
        if let Ok(nonce) = greeted {
            if callers.len() == CALLERS_MAX {
                callers.remove(0);
            }
            callers.push(Caller { pending: Pending::new(stream), nonce });
        }
    }
}

/// Listens to callers; welcomes those that belong here.
fn answer(
    callers: &mut Vec<Caller>,
    (here, token): (Claim, &Token),
    streams: &mut [Option<TcpStream>],
    refused: &mut Vec<String>,
) {
    let mut kept = Vec::new();
    for Caller { mut pending, nonce } in callers.drain(..) {
        match pending.listen(HELLO_BYTES) {
            Heard::More if pending.since.elapsed() < HELLO_TIMEOUT => kept.push(Caller { pending, nonce }),
            Heard::More => refused.push("it said too little".into()),
            Heard::Closed => refused.push("it hung up".into()),
            Heard::All => {
                let raw = pending.heard[..].try_into().expect("a whole hello");
                // No answer to noise.
                let Some(hello) = Hello::decode(&raw) else {
                    refused.push("it does not speak this protocol".into());
                    continue;
                };
                let place = streams.get(hello.claim.source as usize);
                let verdict = here.judge(token, &nonce, &hello, place.is_some_and(Option::is_none));
                let told = pending.stream.write_all(&verdict.encode(token, &nonce, &hello)).is_ok();
                match verdict {
                    Verdict::Welcome if told => streams[hello.claim.source as usize] = Some(pending.stream),
                    Verdict::Welcome => refused.push("it hung up".into()),
                    no => refused.push(no.to_string()),
                }
            }
        }
    }
    *callers = kept;
}

/// Listens to the ranks below: says hello to their greeting, and takes what they answer.
fn hear(
    calls: &mut Vec<Call>,
    (claim, token): (&dyn Fn(RankId) -> Claim, &Token),
    dice: &mut Dice,
    streams: &mut [Option<TcpStream>],
) -> Result<(), FabricError> {
    let mut kept = Vec::new();
    for mut call in calls.drain(..) {
        let target = call.target;
        let rank = claim(target).source;
        let failed = |how: &dyn std::fmt::Display| FabricError::setup(WHAT, format!("rank {target} {how}"));
        match call.pending.listen(if call.said.is_none() { GREETING_BYTES } else { REPLY_BYTES }) {
            Heard::More => {}
            Heard::Closed => return Err(failed(&format!("hung up on rank {rank} without an answer"))),
            Heard::All => {
                let raw = std::mem::take(&mut call.pending.heard);
                let Some((theirs, hello)) = &call.said else {
                    let theirs = greeted(&raw[..].try_into().expect("a whole greeting"));
                    let theirs = theirs.ok_or_else(|| failed(&"does not speak this protocol"))?;
                    let nonce = dice.nonce().map_err(|e| failed(&format!("gets no answer: no random numbers: {e}")))?;
                    let hello = claim(target).hello(token, &theirs, nonce);
                    let said = call.pending.stream.write_all(&hello.encode());
                    said.map_err(|e| failed(&format!("hung up on rank {rank}: {e}")))?;
                    call.said = Some((theirs, hello));
                    kept.push(call);
                    continue;
                };
                let verdict = Verdict::decode(&raw[..].try_into().expect("a whole reply"), token, theirs, hello);
                if verdict != Verdict::Welcome {
                    return Err(failed(&format!("refused rank {rank}: {verdict}")));
                }
                streams[target as usize] = Some(call.pending.stream);
                continue;
            }
        }
        kept.push(call);
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

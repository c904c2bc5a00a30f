//! The agent's link: a thread that calls the controller, hears it, and calls again when the link is over.

use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use super::frame::{Opener, Sealer};
use super::handshake::{CHALLENGE, Guest, Key, Refusal, VERDICT};
use super::{ToAgent, WAITING_MAX, WORD_MAX};
use crate::agent::token;

/// How long a call may take until both know each other.
pub(super) const CALL: Duration = Duration::from_secs(2);
/// Pauses between two calls: from the first to the last, doubled each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// The longest pause after a call that was answered with a refusal.
pub(super) const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// A link that came up.
pub(super) struct Up {
    /// Ascends with every link.
    pub number: u64,
    /// The controller's.
    pub epoch: u64,
    /// Where it is.
    pub peer: String,
    /// This host, as the controller sees it.
    pub address: IpAddr,
    /// Takes payloads to be sealed and sent.
    pub words: SyncSender<Vec<u8>>,
    /// Only to end it.
    pub stream: TcpStream,
}

/// What the thread tells.
pub(super) enum Line {
    Up(Up),
    Word(u64, Box<ToAgent>),
    /// The link of this number is over.
    Down(u64, String),
    /// A call did not come to a link.
    Failed(String, Option<Refusal>),
}

/// What the thread is told.
pub(super) struct Dial {
    pub controllers: Vec<String>,
    pub key: Key,
    /// The highest epoch that was obeyed.
    pub known: Arc<AtomicU64>,
    /// Milliseconds of silence after which a link is over.
    pub silence_ms: Arc<AtomicU64>,
    pub over: Arc<AtomicBool>,
}

impl Dial {
    /// Calls and hears until the agent is over.
    pub fn run(self, tell: &dyn Fn(Line) -> bool) {
        let mut pause = PAUSE.0;
        for number in 1u64.. {
            let at = &self.controllers[(number - 1) as usize % self.controllers.len()];
            // The pause grows until this agent is let in; a refusal does not pass as soon as a broken link.
            let mut longest = PAUSE.1;
            let told = match self.call(at, number) {
                Ok((up, opener, stream)) => {
                    tell(Line::Up(up)) && {
                        let (why, welcome) = self.hear(stream, opener, number, tell);
                        match welcome {
                            Some(true) => pause = PAUSE.0,
                            Some(false) => longest = REFUSED_PAUSE,
                            None => {}
                        }
                        tell(Line::Down(number, why))
                    }
                }
                Err((text, refusal)) => {
                    if refusal.is_some() {
                        longest = REFUSED_PAUSE;
                    }
                    tell(Line::Failed(format!("{at}: {text}"), refusal))
                }
            };
            if !told || self.over.load(Ordering::Relaxed) {
                return;
            }
            pause = pause.min(longest);
            std::thread::sleep(pause);
            pause = 2 * pause;
        }
    }

    fn call(&self, at: &str, number: u64) -> Result<(Up, Opener, TcpStream), (String, Option<Refusal>)> {
        let io = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => ("the other side hung up".to_owned(), None),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ("no answer in time".into(), None),
            _ => (e.to_string(), None),
        };
        let address = at.to_socket_addrs().map_err(io)?.next().ok_or(("no such address".to_owned(), None))?;
        let mut stream = TcpStream::connect_timeout(&address, CALL).map_err(io)?;
        stream.set_nodelay(true).map_err(io)?;
        stream.set_read_timeout(Some(CALL)).map_err(io)?;
        stream.set_write_timeout(Some(CALL)).map_err(io)?;
        let mut challenge = [0; CHALLENGE];
        stream.read_exact(&mut challenge).map_err(io)?;
        let refused = |refusal: Refusal| (refusal.to_string(), Some(refusal));
        let known = self.known.load(Ordering::Relaxed);
        let guest = Guest::new(self.key, challenge, token().map_err(io)?, known).map_err(refused)?;
        stream.write_all(guest.answer()).map_err(io)?;
        let mut verdict = [0; VERDICT];
        stream.read_exact(&mut verdict).map_err(io)?;
        let (epoch, keys) = guest.judge(&verdict).map_err(refused)?;
        self.known.fetch_max(epoch, Ordering::Relaxed);
        let (words, to_say) = std::sync::mpsc::sync_channel::<Vec<u8>>(WAITING_MAX);
        let mut writing = stream.try_clone().map_err(io)?;
        let write = move || {
            let mut sealer = Sealer::new(keys.up);
            for payload in to_say {
                if writing.write_all(&sealer.seal(&payload)).is_err() {
                    break;
                }
            }
            let _ = writing.shutdown(std::net::Shutdown::Both);
        };
        std::thread::Builder::new().name("to-controller".into()).spawn(write).map_err(io)?;
        let up = Up {
            number,
            epoch,
            peer: address.to_string(),
            address: stream.local_addr().map_err(io)?.ip(),
            words,
            stream: stream.try_clone().map_err(io)?,
        };
        Ok((up, Opener::new(keys.down, WORD_MAX), stream))
    }

    /// Hears the controller until the link is over; why it is, and whether this agent was let in, if that was said.
    fn hear(
        &self,
        stream: TcpStream,
        opener: Opener,
        number: u64,
        tell: &dyn Fn(Line) -> bool,
    ) -> (String, Option<bool>) {
        let mut welcome = None;
        let why = self.words(stream, opener, &mut |word| {
            match word {
                ToAgent::Welcome { .. } => welcome = Some(true),
                ToAgent::Refused { .. } => welcome = Some(false),
                _ => {}
            }
            tell(Line::Word(number, Box::new(word)))
        });
        (why, welcome)
    }

    fn words(&self, mut stream: TcpStream, mut opener: Opener, tell: &mut dyn FnMut(ToAgent) -> bool) -> String {
        let mut bytes = vec![0; 1 << 16];
        loop {
            loop {
                let word = match opener.open() {
                    Ok(Some(word)) => word,
                    Ok(None) => break,
                    Err(e) => return e.to_string(),
                };
                let Ok(word) = serde_json::from_slice(&word) else {
                    return "it says what this release does not understand".into();
                };
                if !tell(word) {
                    return "the agent ends".into();
                }
            }
            let silence = Duration::from_millis(self.silence_ms.load(Ordering::Relaxed).max(1));
            let _ = stream.set_read_timeout(Some(silence));
            match stream.read(&mut bytes) {
                Ok(0) => return "the controller hung up".into(),
                Ok(n) => opener.push(&bytes[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return format!("no word from the controller for {} ms", silence.as_millis());
                }
                Err(e) => return e.to_string(),
            }
        }
    }
}

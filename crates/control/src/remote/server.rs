//! The controller's side: agents call, prove that they have the token, and are let in.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fabric::FabricOptions;
use policy::Process;

use super::frame::{Opener, Sealer};
use super::handshake::{self, ANSWER, Key, LinkKeys};
use super::host::{Host, Link};
use super::{FromAgent, Here, Order, ToAgent, WAITING_MAX, WORD_MAX, host_name};
use crate::agent::{Agents, Heard, News, token};
use crate::wire::{FabricSpec, FromRank, ToRank};

/// How long a caller may take to introduce itself.
const HELLO: Duration = Duration::from_secs(3);
/// Callers that may be introducing themselves at once; more are turned away.
const CALLERS_MAX: usize = 64;
/// Where none of several agents is heard this side waits so long for them: more likely it is cut off itself, and ranks step on.
const DEAF: Duration = Duration::from_secs(30);
/// Callers that were turned away and told of one by one; then only every power of two.
const TOLD: usize = 8;

/// How a controller is reached, and by whom.
pub struct Door {
    /// Who may come in.
    pub key: Key,
    /// Of the lease.
    pub epoch: u64,
    /// Name of the run: secrets of two runs differ.
    pub run: String,
    /// Milliseconds between two signs of life, each way.
    pub beat_ms: u64,
    /// A host that was silent for so long is gone.
    pub silence_ms: u64,
    /// Agents that an earlier controller knew: host, session, news that are written down.
    pub known: Vec<(String, u64, u64)>,
}

/// The agents of other hosts. Dropped, it hangs up: ranks step on.
pub struct Remote {
    shared: Arc<Shared>,
    news: Receiver<News>,
    address: SocketAddr,
}

struct Shared {
    door: Door,
    state: Mutex<State>,
    tell: Mutex<Sender<News>>,
    callers: AtomicUsize,
    turned_away: AtomicUsize,
    over: AtomicBool,
}

#[derive(Default)]
struct State {
    hosts: BTreeMap<String, Host>,
    places: HashMap<Process, String>,
    links: u64,
    /// Since when no agent at all is heard, while there are several.
    deaf: Option<Instant>,
}

impl Remote {
    /// Takes callers of `listener` in from now on.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn listen(listener: TcpListener, door: Door) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (tell, news) = channel();
        let known = door.known.iter().map(|(host, session, seq)| (host.clone(), Host::new(*session, *seq)));
        let state = State { hosts: known.collect(), ..State::default() };
        let shared = Arc::new(Shared {
            door,
            state: Mutex::new(state),
            tell: Mutex::new(tell),
            callers: AtomicUsize::new(0),
            turned_away: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        });
        let at_the_door = shared.clone();
        std::thread::Builder::new().name("door".into()).spawn(move || at_the_door.open(&listener))?;
        let watched = shared.clone();
        std::thread::Builder::new().name("hosts".into()).spawn(move || watched.watch())?;
        Ok(Self { shared, news, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn order(&mut self, host: Option<&str>, process: Process, order: Order) {
        let mut state = self.shared.state();
        let Some(name) = host.map(str::to_owned).or_else(|| state.places.get(&process).cloned()) else { return };
        let Some(host) = state.hosts.get_mut(&name) else { return };
        let seq = host.orders.push(order.clone(), 0, |_| false);
        if let Some(link) = &host.link {
            link.say(ToAgent::Order { seq, order });
        }
    }
}

impl Agents for Remote {
    fn news(&self) -> &Receiver<News> {
        &self.news
    }

    fn written(&mut self, host: &str, seq: u64) {
        if let Some(host) = self.shared.state().hosts.get_mut(host) {
            host.written = host.written.max(seq);
            if let Some(link) = &host.link {
                link.say(ToAgent::Heard { seq });
            }
        }
    }

    fn deaf(&self) -> bool {
        let state = self.shared.state();
        state.deaf.is_some_and(|since| since.elapsed() < DEAF) || state.hosts.values().any(Host::is_awaited)
    }

    fn end(&mut self, code: i32, reason: &str) {
        let state = self.shared.state();
        for link in state.hosts.values().filter_map(|host| host.link.as_ref()) {
            link.say(ToAgent::End { code, reason: reason.into() });
        }
        drop(state);
        // Agents hang up when they have heard it.
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline && self.shared.state().hosts.values().any(|host| host.link.is_some()) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn spawn(&mut self, host: &str, process: Process, beat_ms: u64, job: &serde_json::Value) {
        self.shared.state().places.insert(process, host.into());
        self.order(Some(host), process, Order::Spawn { process, beat_ms, job: job.clone() });
    }

    fn say(&mut self, process: Process, word: &ToRank) {
        self.order(None, process, Order::Say { process, said: word.clone() });
    }

    fn kill(&mut self, process: Process) {
        self.order(None, process, Order::Kill { process });
    }

    fn stop(&mut self, process: Process) {
        self.order(None, process, Order::Stop { process });
    }

    fn strike(&mut self, process: Process) {
        self.order(None, process, Order::Strike { process });
    }

    /// The token of a world follows from the run's token and the world's number: agents make it themselves, and a controller that
    /// comes later means the same.
    fn fabric(
        &mut self,
        processes: &[Process],
        shared_memory: bool,
        options: &FabricOptions,
    ) -> io::Result<Vec<FabricSpec>> {
        if shared_memory {
            return Err(io::Error::other(
                "layout.transport = shm connects ranks of one host; set layout.transport=tcp",
            ));
        }
        let purpose = format!("{} world {}", self.shared.door.run, options.generation);
        let state = self.shared.state();
        let at = |process: &Process| state.places.get(process).and_then(|host| state.hosts.get(host));
        let spec = |process: &Process| {
            let host = at(process).ok_or_else(|| io::Error::other(format!("the host of {process} is not known")))?;
            Ok(FabricSpec::Keyed { purpose: purpose.clone(), bind: host.address })
        };
        processes.iter().map(spec).collect()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        self.shared.state().hosts.values_mut().for_each(Host::unlink);
        // The door waits for a caller.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(100));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, news: News) {
        let tell = self.tell.lock().unwrap_or_else(PoisonError::into_inner);
        drop(tell.send(news));
    }

    fn over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Takes callers in until the end.
    fn open(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.over() {
                return;
            }
            let Ok(stream) = stream else {
                // Such as too many open files: it may pass.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            if self.callers.fetch_add(1, Ordering::Relaxed) >= CALLERS_MAX {
                self.callers.fetch_sub(1, Ordering::Relaxed);
                self.turn_away(stream.peer_addr().ok(), &"too many callers at once");
                continue;
            }
            let shared = self.clone();
            let started = std::thread::Builder::new().name("caller".into()).spawn(move || {
                let from = stream.peer_addr().ok();
                let hello = shared.hello(&stream);
                shared.callers.fetch_sub(1, Ordering::Relaxed);
                match hello {
                    Ok((keys, opener, here)) => shared.serve(stream, keys, opener, here),
                    Err(reason) => shared.turn_away(from, &reason),
                }
            });
            if started.is_err() {
                self.callers.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn turn_away(&self, from: Option<SocketAddr>, reason: &dyn std::fmt::Display) {
        let n = 1 + self.turned_away.fetch_add(1, Ordering::Relaxed);
        if n <= TOLD || n.is_power_of_two() {
            let from = from.map_or("an unknown address".into(), |from| from.to_string());
            self.tell(News::Notice(format!("a caller from {from} was turned away: {reason} (number {n})")));
        }
    }

    /// The handshake, and the agent's first word.
    fn hello(&self, stream: &TcpStream) -> Result<(LinkKeys, Opener, Here), String> {
        let deadline = Instant::now() + HELLO;
        let nonce = token().map_err(|e| e.to_string())?;
        let host = handshake::Host::new(self.door.key, self.door.epoch, nonce);
        let mut stream = Deadline { stream, deadline };
        let io = |e: io::Error| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it said too little in time".to_owned(),
            io::ErrorKind::UnexpectedEof => "it hung up".into(),
            _ => e.to_string(),
        };
        stream.stream.set_nodelay(true).and_then(|()| stream.stream.set_write_timeout(Some(HELLO))).map_err(io)?;
        stream.stream.write_all(host.challenge()).map_err(io)?;
        let mut answer = [0; ANSWER];
        stream.read_exact(&mut answer).map_err(io)?;
        let (verdict, judged) = host.judge(&answer);
        if let Some(verdict) = verdict {
            stream.stream.write_all(&verdict).map_err(io)?;
        }
        let keys = judged.map_err(|refused| refused.to_string())?;
        let mut opener = Opener::new(keys.up, WORD_MAX);
        let mut bytes = [0; 4096];
        let word = loop {
            if let Some(word) = opener.open().map_err(|e| e.to_string())? {
                break word;
            }
            match stream.read(&mut bytes).map_err(io)? {
                0 => return Err("it hung up".into()),
                n => opener.push(&bytes[..n]),
            }
        };
        match serde_json::from_slice(&word) {
            Ok(FromAgent::Here(here)) => Ok((keys, opener, here)),
            _ => Err("its first word is not its name".into()),
        }
    }

    /// An agent that has the token: lets it in and hears it until the link ends.
    fn serve(&self, stream: TcpStream, keys: LinkKeys, opener: Opener, here: Here) {
        let from = stream.peer_addr().ok();
        let (words, to_say) = sync_channel(WAITING_MAX);
        let Ok(writing) = stream.try_clone() else { return };
        let writer = std::thread::Builder::new().name("to-agent".into()).spawn(move || {
            let (mut sealer, mut stream) = (Sealer::new(keys.down), writing);
            for word in to_say {
                let Ok(payload) = serde_json::to_vec(&word) else { continue };
                if stream.write_all(&sealer.seal(&payload)).is_err() {
                    break;
                }
            }
            let _ = stream.shutdown(std::net::Shutdown::Both);
        });
        if writer.is_err() {
            return;
        }
        let Ok(ending) = stream.try_clone() else { return };
        let name = here.host.clone();
        let link = Link { number: 0, stream: ending, words };
        let number = match self.admit(here, link) {
            Ok(number) => number,
            Err(reason) => return self.turn_away(from, &reason),
        };
        let why = self.listen(stream, opener, &name, number);
        let mut state = self.state();
        if let Some(host) = state.hosts.get_mut(&name).filter(|h| h.link.as_ref().is_some_and(|l| l.number == number)) {
            host.unlink();
            drop(state);
            if !self.over() {
                self.tell(News::Notice(format!("the link to host {name} ended: {why}")));
            }
        }
    }

    /// Gives the host its link, unless it cannot be here.
    fn admit(&self, here: Here, mut link: Link) -> Result<u64, String> {
        let mut state = self.state();
        let silence = Duration::from_millis(self.door.silence_ms);
        if let Some(reason) = refusal(&state, &here, silence) {
            link.say(ToAgent::Refused { reason: reason.clone(), silence_ms: self.door.silence_ms });
            return Err(reason);
        }
        state.links += 1;
        let number = state.links;
        link.number = number;
        for process in &here.running {
            state.places.insert(*process, here.host.clone());
        }
        let host = state.hosts.entry(here.host.clone()).or_insert_with(|| Host::new(here.session, 0));
        if host.session != here.session {
            if !host.lost {
                let reason = "its agent was started again".into();
                self.tell(News::Lost { host: here.host.clone(), reason });
            }
            host.unlink();
            *host = Host::new(here.session, 0);
        }
        host.address = here.address;
        let done = if here.done.0 == self.door.epoch { here.done.1 } else { 0 };
        host.orders.ack(done);
        let (beat_ms, silence_ms) = (self.door.beat_ms, self.door.silence_ms);
        link.say(ToAgent::Welcome { heard: host.written, beat_ms, silence_ms });
        // News that came and are not written down will come again.
        host.news = super::window::Inbox::new(host.written);
        for (seq, order) in host.orders.after(done) {
            link.say(ToAgent::Order { seq, order: order.clone() });
        }
        host.calls(link);
        let host = &*host;
        let text = format!("host {} is here: {} places, its ranks at {}", here.host, here.slots, here.address);
        self.tell(News::Notice(text));
        self.tell(News::Mark { host: here.host.clone(), session: here.session, seq: host.written });
        self.tell(News::Joined { host: here.host.clone(), slots: here.slots });
        self.tell(News::Present { host: here.host, started: here.started, running: here.running });
        Ok(number)
    }

    /// Hears an agent until its link ends; why it did.
    fn listen(&self, mut stream: TcpStream, mut opener: Opener, name: &str, number: u64) -> String {
        let _ = stream.set_read_timeout(None);
        let mut bytes = vec![0; 1 << 16];
        loop {
            let mut kept = false;
            loop {
                let word = match opener.open() {
                    Ok(Some(word)) => word,
                    Ok(None) => break,
                    Err(e) => return e.to_string(),
                };
                let Ok(word) = serde_json::from_slice::<FromAgent>(&word) else {
                    return "it says what this release does not understand".into();
                };
                let mut state = self.state();
                let linked = |host: &&mut Host| host.link.as_ref().is_some_and(|link| link.number == number);
                let Some(host) = state.hosts.get_mut(name).filter(linked) else {
                    return "another link took its place".into();
                };
                host.heard();
                match word {
                    FromAgent::Here(_) => {}
                    FromAgent::Beat { done } => host.orders.ack(done),
                    FromAgent::Passing { process, heard } => self.tell(News::Process(process, heard)),
                    FromAgent::News { seq, process, heard } => {
                        if host.news.take(seq) {
                            self.tell(News::Process(process, heard));
                        }
                        kept = true;
                    }
                }
            }
            if kept {
                let state = self.state();
                if let Some(host) = state.hosts.get(name) {
                    self.tell(News::Mark { host: name.into(), session: host.session, seq: host.news.last() });
                }
            }
            match stream.read(&mut bytes) {
                Ok(0) => return "the agent hung up".into(),
                Ok(n) => opener.push(&bytes[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return e.to_string(),
            }
        }
    }

    /// Gives signs of life, and notices who gives none.
    fn watch(&self) {
        let beat = Duration::from_millis(self.door.beat_ms.max(1));
        let silence = Duration::from_millis(self.door.silence_ms);
        let mut looked = Instant::now();
        while !self.over() {
            let mut state = self.state();
            if looked.elapsed() > beat + silence / 4 {
                // This process stood still itself.
                state.hosts.values_mut().for_each(Host::wait);
            }
            looked = Instant::now();
            let (before, deaf) = (state.deaf, state.listen(silence));
            if before.is_none() && deaf.is_some() {
                let text = "no agent is heard: this side may be cut off; ranks step on, and are waited for";
                self.tell(News::Notice(text.into()));
            }
            for (name, host) in state.hosts.iter_mut().filter(|(_, host)| !host.lost) {
                match (host.gone(silence).filter(|_| deaf.is_none()), &host.link) {
                    (Some(reason), _) => {
                        host.lost = true;
                        host.unlink();
                        // Nothing that it was told holds any more.
                        host.orders.ack(u64::MAX);
                        self.tell(News::Lost { host: name.clone(), reason });
                    }
                    (None, Some(link)) => link.say(ToAgent::Heard { seq: host.written }),
                    (None, None) => {}
                }
            }
            drop(state);
            std::thread::sleep(beat);
        }
    }
}

impl State {
    /// Since when no agent is heard, for [`DEAF`] at most.
    fn listen(&mut self, silence: Duration) -> Option<Instant> {
        let mut there = self.hosts.values().filter(|host| !host.lost);
        // One alone can as well be gone; one that hung up was heard to.
        let several = there.clone().count() > 1;
        let none = several && there.all(|host| host.is_silent(silence / 2));
        let before = std::mem::replace(&mut self.deaf, none.then(Instant::now));
        match (before, none) {
            (Some(since), true) => self.deaf = Some(since),
            // The others are about to call, too.
            (Some(_), false) => self.hosts.values_mut().for_each(Host::wait),
            (None, _) => {}
        }
        self.deaf.filter(|since| since.elapsed() < DEAF)
    }
}

/// Why an agent cannot be here.
fn refusal(state: &State, here: &Here, silence: Duration) -> Option<String> {
    let name = &here.host;
    if let Err(reason) = host_name(name) {
        return Some(reason);
    }
    if here.slots == 0 {
        return Some(format!("host {name} has no place for a rank; give --ranks 1 or more"));
    }
    if let Some(host) = state.hosts.get(name)
        && host.session != here.session
        && host.link.is_some()
        && host.gone(silence).is_none()
    {
        return Some(format!("an agent of host {name} is here already; give another --host"));
    }
    let others = state.hosts.iter().filter(|(other, host)| *other != name && host.link.is_some());
    let other = |(other, host): (&String, &Host)| (other.clone(), host.address);
    let apart = others.map(other).find(|(_, address)| address.is_loopback() != here.address.is_loopback());
    apart.map(|(other, address)| {
        format!(
            "ranks of host {name} would listen at {} and those of host {other} at {address}, and could not reach each other; start the agent of the one on loopback with --address",
            here.address
        )
    })
}

/// Reads until a point in time, not for a time after each byte.
struct Deadline<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Deadline<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(bytes)
    }
}

/// True if nothing is lost with it: a newer word says the same.
pub(super) fn passing(heard: &Heard) -> bool {
    matches!(heard, Heard::Stopped(_) | Heard::Said(FromRank::Beat { .. }))
}

//! The agent's side: starts the ranks of its host on order, relays their words both ways, and outlives controllers.
//!
//! Ranks step on while no controller can be reached; what they said is kept and told when one can.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Shutdown};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use events::Event;
use policy::Process;
use rustix::process::Signal;

use super::dial::{Dial, Line, Up};
use super::handshake::{Key, Refusal};
use super::refused::{Complaints, Refusals};
use super::server::passing;
use super::window::Outbox;
use super::{FromAgent, Here, Order, ToAgent, WORD_MAX};
use crate::agent::{Heard, News, token};
use crate::processes::Processes;
use crate::wire::{FabricSpec, FromRank, ToRank};

/// Bytes of events that are kept while no controller can be reached.
const KEPT_MAX: usize = 64 << 20;
/// Silence of a controller that has not said its own limit.
const SILENCE_MS: u64 = 5_000;
/// How often an agent looks at its clock.
const LOOK: Duration = Duration::from_millis(20);

/// What an agent is told.
pub struct Agent {
    /// Where controllers are, such as `10.0.0.1:7070`; called in turn.
    pub controllers: Vec<String>,
    /// Who is obeyed.
    pub key: Key,
    /// Name of this host.
    pub host: String,
    /// Most rank processes.
    pub slots: usize,
    /// Where ranks of this host can be reached; none: as the controller sees it.
    pub address: Option<IpAddr>,
    /// The binary that is a rank.
    pub program: PathBuf,
    /// Ranks that came to no step for so long without a controller are ended.
    pub idle: Duration,
    /// With no rank at work it ends when no controller has said a word for so long; none: it calls for ever.
    pub patience: Option<Duration>,
    /// Set by a signal handler: end, and the ranks with it.
    pub stop: Arc<AtomicBool>,
}

/// How an agent ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The run is over.
    Run {
        /// Its exit code.
        code: i32,
        /// Why.
        reason: String,
    },
    /// Somebody asked this agent to end.
    Stopped,
    /// It was never let in, and will not be.
    Refused(String),
    /// No controller said a word for so long, in seconds; the last complaint.
    Alone(u64, String),
}

enum In {
    News(News),
    Line(Line),
}

/// A word that is kept.
struct Kept {
    payload: Vec<u8>,
    minor: bool,
}

struct Life<'a> {
    agent: &'a Agent,
    say: &'a dyn Fn(&str),
    session: u64,
    processes: Processes,
    started: BTreeSet<Process>,
    running: BTreeSet<Process>,
    /// The newest world of which a process was told its place, the addresses, the end.
    told: HashMap<Process, [u64; 3]>,
    kept: Outbox<Kept>,
    link: Option<Up>,
    welcome: bool,
    ever_welcome: bool,
    /// Orders that were carried out.
    done: (u64, u64),
    silence_ms: Arc<AtomicU64>,
    beat: Duration,
    beat_at: Instant,
    /// The last step, or the last word of a controller.
    alive_at: Instant,
    /// The last word of a controller, or the beginning; or when the last rank ended.
    met_at: Instant,
    /// The last thing that went wrong, and what was said of that lately.
    complaint: String,
    complaints: Complaints,
    refusals: Refusals,
    /// The link that was refused: its end is no news.
    refused_link: u64,
    ended: Option<Ended>,
}

/// Runs an agent to its end; `say` gets lines for the person.
///
/// # Errors
/// What the system refuses.
pub fn run(agent: &Agent, say: &dyn Fn(&str)) -> io::Result<Ended> {
    let (tell, inbox) = channel();
    let (told, news) = channel();
    let bridge = tell.clone();
    let carry = move || {
        for news in news {
            if bridge.send(In::News(news)).is_err() {
                break;
            }
        }
    };
    std::thread::Builder::new().name("news".into()).spawn(carry)?;
    let (silence_ms, over) = (Arc::new(AtomicU64::new(SILENCE_MS)), Arc::new(AtomicBool::new(false)));
    let dial = Dial {
        controllers: agent.controllers.clone(),
        key: agent.key,
        known: Arc::default(),
        silence_ms: silence_ms.clone(),
        over: over.clone(),
    };
    std::thread::Builder::new()
        .name("link".into())
        .spawn(move || dial.run(&|line| tell.send(In::Line(line)).is_ok()))?;
    let session = token()?.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let mut life = Life {
        agent,
        say,
        session,
        processes: Processes::new(agent.program.clone(), told),
        started: BTreeSet::new(),
        running: BTreeSet::new(),
        told: HashMap::new(),
        kept: Outbox::new(KEPT_MAX),
        link: None,
        welcome: false,
        ever_welcome: false,
        done: (0, 0),
        silence_ms,
        beat: Duration::from_millis(100),
        beat_at: Instant::now(),
        alive_at: Instant::now(),
        met_at: Instant::now(),
        complaint: String::new(),
        complaints: Complaints::default(),
        refusals: Refusals::default(),
        refused_link: 0,
        ended: None,
    };
    let ended = loop {
        match inbox.recv_timeout(LOOK) {
            Ok(In::News(News::Process(process, heard))) => life.heard(process, heard),
            Ok(In::Line(line)) => life.line(line),
            Ok(In::News(_)) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        life.clock();
        if agent.stop.load(Ordering::Relaxed) {
            break Ended::Stopped;
        }
        if let Some(ended) = life.ended.take() {
            break ended;
        }
    };
    over.store(true, Ordering::Relaxed);
    if let Some(link) = life.link.take() {
        let _ = link.stream.shutdown(Shutdown::Both);
    }
    Ok(ended)
}

/// What a rank is told: the token of its world is made here, for it does not travel.
fn with_token(mut said: ToRank, key: &Key) -> ToRank {
    if let ToRank::Assign(place) = &mut said
        && let FabricSpec::Keyed { purpose, bind } = &place.fabric
    {
        place.fabric = FabricSpec::Tcp { token: key.secret(purpose), bind: *bind };
    }
    said
}

impl Life<'_> {
    /// A process said something, or something became of it.
    fn heard(&mut self, process: Process, heard: Heard) {
        match &heard {
            Heard::Exited { .. } | Heard::NotStarted(_) => {
                self.running.remove(&process);
                self.processes.kill(process);
            }
            Heard::Said(FromRank::Event(Event::Step(_))) => self.alive_at = Instant::now(),
            _ => {}
        }
        if passing(&heard) {
            return self.tell(&FromAgent::Passing { process, heard });
        }
        let minor = match &heard {
            Heard::Said(FromRank::Event(event)) => !matches!(
                event,
                Event::Digest { .. } | Event::RankFinished(_) | Event::Checkpoint { .. } | Event::FaultFired { .. }
            ),
            heard => matches!(heard, Heard::Line(_)),
        };
        self.keep(process, heard, minor);
    }

    /// Keeps a word until it is written down, and tells it now if somebody hears.
    fn keep(&mut self, process: Process, heard: Heard, minor: bool) {
        let seq = self.kept.next();
        let word = |heard| serde_json::to_vec(&FromAgent::News { seq, process, heard }).unwrap_or_default();
        let mut payload = word(heard);
        if payload.len() > WORD_MAX {
            let text = format!("a word of {} bytes was left out: the limit is {WORD_MAX}", payload.len());
            payload = word(Heard::Line(text));
        }
        let bytes = payload.len();
        self.kept.push(Kept { payload: payload.clone(), minor }, bytes, |kept| kept.minor);
        if self.welcome {
            self.send(payload);
        }
    }

    fn tell(&mut self, word: &FromAgent) {
        if self.welcome
            && let Ok(payload) = serde_json::to_vec(word)
        {
            self.send(payload);
        }
    }

    fn send(&mut self, payload: Vec<u8>) {
        if let Some(link) = &self.link
            && link.words.try_send(payload).is_err()
        {
            // It takes nothing: what matters is told on the next one.
            let _ = link.stream.shutdown(Shutdown::Both);
            self.welcome = false;
        }
    }

    fn line(&mut self, line: Line) {
        match line {
            Line::Up(up) => self.up(up),
            Line::Word(number, word) => {
                if self.link.as_ref().is_some_and(|link| link.number == number) {
                    self.word(*word);
                }
            }
            Line::Down(number, why) => {
                if self.link.as_ref().is_some_and(|link| link.number == number) {
                    (self.link, self.welcome) = (None, false);
                    if number != self.refused_link {
                        self.complain(format!("no controller ({why}); ranks go on, what they say is kept"));
                    }
                }
            }
            Line::Failed(text, refusal) => {
                match refusal {
                    // Nothing here changes by asking again.
                    Some(Refusal::Token | Refusal::Version(_)) if !self.ever_welcome => {
                        self.ended = Some(Ended::Refused(text));
                    }
                    Some(Refusal::Token | Refusal::Version(_)) => self.refused(text, 0),
                    _ => self.complain(text),
                }
            }
        }
    }

    /// Says it, unless it was said lately.
    fn complain(&mut self, text: String) {
        if self.complaints.is_new(&text, Instant::now()) {
            (self.say)(&text);
        }
        self.complaint = text;
    }

    /// A controller answers, and does not let this agent in. It may yet: another agent of this host's name may be gone, and
    /// not known to be. Ranks that are at work step on meanwhile.
    fn refused(&mut self, reason: String, silence_ms: u64) {
        let silence = Duration::from_millis(silence_ms);
        let enough = self.refusals.another(Instant::now(), silence, self.agent.patience);
        if let Some((times, since)) = enough.filter(|_| self.running.is_empty()) {
            let told = format!("{reason} (refused {times} times in {:.0} s)", since.as_secs_f64());
            self.ended = Some(Ended::Refused(told));
            return;
        }
        self.complain(format!("{reason}; asks again, in growing intervals"));
    }

    fn up(&mut self, up: Up) {
        let here = Here {
            host: self.agent.host.clone(),
            session: self.session,
            slots: self.agent.slots,
            address: self.agent.address.unwrap_or(up.address),
            done: self.done,
            started: self.started.iter().copied().collect(),
            running: self.running.iter().copied().collect(),
        };
        if self.done.0 != up.epoch {
            self.done = (up.epoch, 0);
        }
        (self.link, self.welcome) = (Some(up), false);
        if let Ok(payload) = serde_json::to_vec(&FromAgent::Here(here)) {
            self.send(payload);
        }
    }

    fn word(&mut self, word: ToAgent) {
        // Who refuses does not lead these ranks.
        if !matches!(word, ToAgent::Refused { .. }) {
            self.alive_at = Instant::now();
            self.met_at = self.alive_at;
        }
        match word {
            ToAgent::Welcome { heard, beat_ms, silence_ms } => {
                self.beat = Duration::from_millis(beat_ms.max(1));
                self.silence_ms.store(silence_ms, Ordering::Relaxed);
                self.kept.ack(heard);
                (self.welcome, self.ever_welcome) = (true, true);
                let left_out = self.kept.left_out();
                let again: Vec<_> = self.kept.after(heard).map(|(_, kept)| kept.payload.clone()).collect();
                let (peer, epoch) = self.link.as_ref().map_or((String::new(), 0), |up| (up.peer.clone(), up.epoch));
                let more = if left_out > 0 { format!(", {left_out} events were left out") } else { String::new() };
                (self.say)(&format!(
                    "the controller at {peer} of epoch {epoch} is heard; {} words are told again{more}",
                    again.len()
                ));
                self.complaint.clear();
                self.complaints.clear();
                self.refusals.clear();
                again.into_iter().for_each(|payload| self.send(payload));
            }
            ToAgent::Refused { reason, silence_ms } => {
                self.refused_link = self.link.as_ref().map_or(0, |link| link.number);
                self.refused(format!("the controller refuses this agent: {reason}"), silence_ms);
            }
            ToAgent::Order { seq, order } => {
                if seq > self.done.1 {
                    self.done.1 = seq;
                    self.obey(order);
                }
            }
            ToAgent::Heard { seq } => self.kept.ack(seq),
            ToAgent::End { code, reason } => self.ended = Some(Ended::Run { code, reason }),
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Spawn { process, beat_ms, job } => {
                // A controller that was rebuilt may order what the one before it ordered.
                if self.started.insert(process) {
                    self.running.insert(process);
                    self.processes.spawn(process, beat_ms, &job);
                }
            }
            Order::Say { process, said } => {
                if self.is_new(process, &said) {
                    self.processes.say(process, &with_token(said, &self.agent.key));
                }
            }
            Order::Kill { process } => {
                self.running.remove(&process);
                self.processes.kill(process);
            }
            Order::Stop { process } => self.processes.signal(process, Signal::STOP),
            Order::Strike { process } => self.processes.signal(process, Signal::KILL),
        }
    }

    /// False for what a process was told of a world already.
    fn is_new(&mut self, process: Process, said: &ToRank) -> bool {
        let (which, generation) = match said {
            ToRank::Assign(place) => (0, place.generation),
            ToRank::Addresses { generation, .. } => (1, *generation),
            ToRank::Abort { generation, .. } => (2, *generation),
            _ => return true,
        };
        let told = &mut self.told.entry(process).or_default()[which];
        let new = generation > *told;
        *told = generation.max(*told);
        new
    }

    fn clock(&mut self) {
        let now = Instant::now();
        if self.welcome && now.duration_since(self.beat_at) >= self.beat {
            self.beat_at = now;
            let done = self.done.1;
            self.tell(&FromAgent::Beat { done });
        }
        if !self.running.is_empty() {
            self.met_at = now;
        }
        if let Some(patience) = self.agent.patience.filter(|patience| now.duration_since(self.met_at) > *patience)
            && !self.refusals.lately(now)
        {
            self.ended = Some(Ended::Alone(patience.as_secs(), self.complaint.clone()));
        }
        if !self.welcome && !self.running.is_empty() && now.duration_since(self.alive_at) > self.agent.idle {
            let n = self.running.len();
            (self.say)(&format!(
                "no controller and no step for {} s: the {n} ranks of this host are ended (--idle-limit-s)",
                self.agent.idle.as_secs()
            ));
            let all: Vec<_> = std::mem::take(&mut self.running).into_iter().collect();
            for process in all {
                self.processes.kill(process);
            }
        }
    }
}

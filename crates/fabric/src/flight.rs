//! The flight recorder: the last exchanges of an endpoint, readable from any thread while one of them is stuck.
//!
//! Two short locks per exchange, of a mutex that nobody else holds for long. Times come from the clock that the exchange reads
//! anyway.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use events::wall::Wall;
use serde::{Deserialize, Serialize};

use crate::frame::Operation;
use crate::options::{Group, RankId};

/// Exchanges that are kept.
const KEPT: usize = 512;
/// No peer is waited for.
const NOBODY: u32 = u32::MAX;
/// Whoever has not looked for so long does not know that nothing has come.
const FRESH_NS: u64 = 200_000_000;

/// How far an exchange has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlightState {
    /// Under way.
    Started,
    /// Ended well.
    Completed,
    /// Ended with an error.
    Failed,
}

/// One exchange of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightEntry {
    /// Counts the exchanges of this rank from 0.
    pub id: u64,
    /// The group's id; see [`FlightRecord::groups`].
    pub group: u32,
    /// The kind of exchange.
    pub operation: Operation,
    /// The other side of a send or receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<RankId>,
    /// Counts from 0: the collectives of the group, or what was sent to (received from) this peer in it.
    pub sequence: u64,
    /// Payload of this rank: what it sends or wants, as far as it knows before.
    pub bytes: u64,
    /// How far it has come.
    pub state: FlightState,
    /// Nanoseconds since 1970.
    pub started_ns: u64,
    /// Nanoseconds since 1970; none while it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ns: Option<u64>,
}

/// A group that occurs in the entries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightGroup {
    /// Its id.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its members.
    pub ranks: Vec<RankId>,
    /// Collectives that this rank has begun in it.
    pub begun: u64,
    /// Sends that this rank has begun, by member.
    pub sends: Vec<u64>,
    /// Receives that this rank has begun, by member.
    pub receives: Vec<u64>,
}

/// What went to and came from one peer, in whole messages of all groups. What was lost on the way counts as sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightLink {
    /// The peer.
    pub peer: RankId,
    /// Messages to it.
    pub sent: u64,
    /// Messages from it of which the header has come.
    pub received: u64,
}

/// What one rank's recorder shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The rank.
    pub rank: RankId,
    /// Ranks of the world.
    pub world: u32,
    /// The world's generation.
    pub generation: u32,
    /// The peer that the exchange under way waits for, if it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<RankId>,
    /// Milliseconds for which the exchange under way has looked again and again, and not a byte came or went; 0: it moves, or
    /// has not looked of late.
    #[serde(default)]
    pub still_ms: u64,
    /// Of every peer with which there was an exchange.
    #[serde(default)]
    pub links: Vec<FlightLink>,
    /// Groups in which there was an exchange.
    pub groups: Vec<FlightGroup>,
    /// The last exchanges, oldest first.
    pub entries: Vec<FlightEntry>,
}

/// Reads an [`crate::Endpoint`]'s recorder from any thread.
#[derive(Clone)]
pub struct Flight(Arc<Recorder>);

impl Flight {
    /// What it shows now. Does not wait for the exchange under way.
    pub fn record(&self) -> FlightRecord {
        self.0.record()
    }

    /// [`FlightRecord::still_ms`], without a lock.
    pub fn still_ms(&self) -> u64 {
        self.0.still_ms()
    }
}

pub(crate) struct Recorder {
    rank: RankId,
    world: u32,
    generation: u32,
    /// A moment, on both clocks.
    began: Instant,
    began_ns: u64,
    waits_for: AtomicU32,
    /// Since when nothing moves, and when that was looked at last; nanoseconds since `began`, 0: something moves.
    still: [AtomicU64; 2],
    /// By peer: messages sent, messages received.
    links: Vec<[AtomicU64; 2]>,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    next: u64,
    entries: Vec<FlightEntry>,
    groups: Vec<FlightGroup>,
    /// Where the group of the last exchange lies: most follow one of their own group.
    last: usize,
}

impl Ring {
    fn group(&mut self, group: &Group) -> &mut FlightGroup {
        if self.groups.get(self.last).is_none_or(|g| g.id != group.id) {
            self.last = self.groups.iter().position(|g| g.id == group.id).unwrap_or_else(|| {
                let (id, name, ranks) = (group.id, group.name.clone(), group.ranks.clone());
                let (sends, receives) = (vec![0; ranks.len()], vec![0; ranks.len()]);
                self.groups.push(FlightGroup { id, name, ranks, begun: 0, sends, receives });
                self.groups.len() - 1
            });
        }
        &mut self.groups[self.last]
    }
}

impl Recorder {
    pub fn new(rank: RankId, world: u32, generation: u32, wall: &Wall) -> Arc<Self> {
        Arc::new(Self {
            rank,
            world,
            generation,
            began: Instant::now(),
            began_ns: wall.since_1970().as_nanos() as u64,
            waits_for: AtomicU32::new(NOBODY),
            still: Default::default(),
            links: (0..world).map(|_| Default::default()).collect(),
            ring: Mutex::default(),
        })
    }

    pub fn handle(self: &Arc<Self>) -> Flight {
        Flight(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ns(&self, at: Instant) -> u64 {
        self.began_ns + at.saturating_duration_since(self.began).as_nanos() as u64
    }

    /// An exchange begins; its place for [`Recorder::end`]. `peer` is a member.
    pub fn begin(&self, group: &Group, operation: Operation, peer: Option<usize>, bytes: usize, at: Instant) -> usize {
        self.waits_for.store(NOBODY, Ordering::Relaxed);
        let mut ring = self.lock();
        let known = ring.group(group);
        let count = match peer.filter(|&peer| peer < known.ranks.len()) {
            None => &mut known.begun,
            Some(peer) if operation == Operation::Send => &mut known.sends[peer],
            Some(peer) => &mut known.receives[peer],
        };
        let sequence = *count;
        *count += 1;
        let id = ring.next;
        ring.next += 1;
        let entry = FlightEntry {
            id,
            group: group.id,
            operation,
            peer: peer.and_then(|peer| group.ranks.get(peer).copied()),
            sequence,
            bytes: bytes as u64,
            state: FlightState::Started,
            started_ns: self.ns(at),
            ended_ns: None,
        };
        let place = id as usize % KEPT;
        if ring.entries.len() < KEPT {
            ring.entries.push(entry);
        } else {
            ring.entries[place] = entry;
        }
        place
    }

    /// The exchange at `place` has ended.
    pub fn end(&self, place: usize, well: bool) {
        self.moves();
        let now = self.ns(Instant::now());
        let entry = &mut self.lock().entries[place];
        entry.state = if well { FlightState::Completed } else { FlightState::Failed };
        entry.ended_ns = Some(now);
    }

    /// The exchange under way waits for `peer`.
    pub fn waits(&self, peer: RankId) {
        self.waits_for.store(peer, Ordering::Relaxed);
    }

    /// It has waited since `since`, and has just looked again.
    pub fn looks(&self, since: Instant) {
        let [began, looked] = &self.still;
        let ns = |at: Instant| at.saturating_duration_since(self.began).as_nanos() as u64;
        looked.store(ns(Instant::now()), Ordering::Relaxed);
        began.store(ns(since).max(1), Ordering::Relaxed);
    }

    /// Something came or went.
    pub fn moves(&self) {
        self.still[0].store(0, Ordering::Relaxed);
    }

    fn still_ms(&self) -> u64 {
        let [began, looked] = [0, 1].map(|i| self.still[i].load(Ordering::Relaxed));
        let now = self.began.elapsed().as_nanos() as u64;
        if began == 0 || now > looked + FRESH_NS { 0 } else { looked.saturating_sub(began) / 1_000_000 }
    }

    /// A message to `peer` is about to leave.
    pub fn sends(&self, peer: RankId) {
        self.links[peer as usize][0].fetch_add(1, Ordering::Relaxed);
    }

    /// A message from `peer` begins to come.
    pub fn receives(&self, peer: RankId) {
        self.links[peer as usize][1].fetch_add(1, Ordering::Relaxed);
    }

    fn record(&self) -> FlightRecord {
        let link = |(peer, counts): (RankId, &[AtomicU64; 2])| {
            let [sent, received] = [0, 1].map(|i| counts[i].load(Ordering::Relaxed));
            (sent + received > 0).then_some(FlightLink { peer, sent, received })
        };
        let ring = self.lock();
        let mut entries = ring.entries.clone();
        entries.sort_unstable_by_key(|entry| entry.id);
        let stuck = entries.last().is_some_and(|entry| entry.state != FlightState::Completed);
        let waits_for = Some(self.waits_for.load(Ordering::Relaxed)).filter(|&peer| stuck && peer != NOBODY);
        FlightRecord {
            rank: self.rank,
            world: self.world,
            generation: self.generation,
            waits_for,
            still_ms: self.still_ms(),
            links: (0..).zip(&self.links).filter_map(link).collect(),
            groups: ring.groups.clone(),
            entries,
        }
    }
}

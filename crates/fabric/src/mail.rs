//! Messages over byte streams: framing, checks, order, and the mailbox.
//!
//! Any wait, also one for room to send, takes in whatever arrives from anyone and keeps it
//! for later receives. So two ranks that send to each other at once never block for ever.

use crate::error::FabricError;
use crate::frame::{BadHeader, HEADER_BYTES, Header, Operation, TRAILER_BYTES};
use crate::link::{Link, LinkDown};
use crate::op::{AbortState, Task};
use crate::options::{FabricOptions, RankId};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3Default;

/// Payloads up to this size travel with their header in one write.
const SMALL_BYTES: usize = 16 << 10;
/// Sum and copy in steps that stay in the core's cache.
const STEP_BYTES: usize = 128 << 10;
/// The longest sleep before abort and deadline are looked at again.
const NAP: Duration = Duration::from_millis(2);

/// A deliberate fault in the next message sent, to prove that the receiver notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Flips this bit (modulo the size) of the next payload that is not empty, after its
    /// checksum was taken.
    FlipPayloadBit(u64),
    /// Flips this bit (modulo the size) of the next header.
    FlipHeaderBit(u64),
    /// Loses the next message: it is counted and never sent.
    Lose,
}

/// (peer, group, lane): messages of one stream keep their order.
type Stream = (RankId, u32, u8);

/// A message in arrival from one peer.
#[derive(Default)]
struct Inbound {
    head: Vec<u8>,
    now: Option<Header>,
    /// True if the payload goes straight to where the receiver wants it.
    direct: bool,
    body: Vec<u8>,
    got: usize,
    sum: Xxh3Default,
    tail: Vec<u8>,
    down: Option<LinkDown>,
}

/// Where an awaited message of known length goes.
struct Want<'a> {
    stream: Stream,
    wire: u8,
    into: &'a mut [u8],
    done: bool,
}

/// How long nothing has happened.
#[derive(Default)]
struct Idle {
    rounds: u32,
    since: Option<Instant>,
}

impl Idle {
    fn over(&mut self, task: &mut Task) {
        self.rounds = 0;
        if let Some(since) = self.since.take() {
            task.count.waited_ns += since.elapsed().as_nanos() as u64;
        }
    }
}

/// What a wait is for, for the error that may end it.
struct Reason {
    peer: RankId,
    direction: &'static str,
    sequence: u64,
    full: Option<RankId>,
}

/// One rank's streams, mailbox and sequence numbers.
pub(crate) struct Mail {
    rank: RankId,
    options: FabricOptions,
    link: Arc<dyn Link>,
    abort: Arc<AbortState>,
    inbound: Vec<Inbound>,
    waiting: HashMap<Stream, VecDeque<(Header, Vec<u8>)>>,
    waiting_bytes: u64,
    sent: HashMap<Stream, u64>,
    seen: HashMap<Stream, u64>,
    small: Vec<u8>,
    fault: Option<Fault>,
}

impl Mail {
    pub fn new(rank: RankId, world: u32, options: FabricOptions, link: Arc<dyn Link>, abort: Arc<AbortState>) -> Self {
        Self {
            rank,
            options,
            link,
            abort,
            inbound: (0..world).map(|_| Inbound::default()).collect(),
            waiting: HashMap::new(),
            waiting_bytes: 0,
            sent: HashMap::new(),
            seen: HashMap::new(),
            small: Vec::new(),
            fault: None,
        }
    }

    pub fn inject(&mut self, fault: Fault) {
        self.fault = Some(fault);
    }

    /// The block size for messages of `pieces` blocks: `wish` numbers, less if the limit on
    /// messages asks for it. All members compute the same.
    pub fn block(&self, wish: usize, pieces: usize) -> usize {
        let fits = self.options.message_bytes_max / (4 * pieces.max(1) as u64);
        wish.min(usize::try_from(fits).unwrap_or(wish)).max(1)
    }

    /// Sends the concatenation of `pieces` to `member`.
    pub fn send(&mut self, task: &mut Task, member: usize, lane: u8, pieces: &[&[u8]]) -> Result<(), FabricError> {
        let peer = task.group.ranks[member];
        let bytes: u64 = pieces.iter().map(|p| p.len() as u64).sum();
        if bytes > self.options.message_bytes_max {
            return Err(self.oversize("to", task.group.name.clone(), peer, bytes));
        }
        let stream = (peer, task.group.id, lane);
        let sequence = self.sent.entry(stream).or_default();
        let header = Header {
            operation: task.operation.wire(),
            lane,
            generation: self.options.generation,
            group: task.group.id,
            sequence: *sequence,
            source: self.rank,
            target: peer,
            bytes,
            checksum: self.options.checksum,
        };
        *sequence += 1;
        if peer == self.rank {
            self.waiting_bytes += bytes;
            self.waiting.entry(stream).or_default().push_back((header, pieces.concat()));
            return Ok(());
        }
        let crosses = task.group.crosses(task.me, member);
        task.count.messages_sent += 1;
        *(if crosses { &mut task.count.inter_bytes_sent } else { &mut task.count.intra_bytes_sent }) += bytes;
        if self.fault == Some(Fault::Lose) {
            self.fault = None;
            return Ok(());
        }
        let mut small = std::mem::take(&mut self.small);
        let sent = self.send_frame(task, &header, pieces, &mut small);
        self.small = small;
        sent
    }

    fn send_frame(
        &mut self,
        task: &mut Task,
        header: &Header,
        pieces: &[&[u8]],
        small: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let mut head = header.encode();
        if let Some(Fault::FlipHeaderBit(bit)) = self.fault {
            self.fault = None;
            flip(&mut head, bit);
        }
        let mut sum = Xxh3Default::new();
        if header.bytes <= SMALL_BYTES as u64 {
            small.clear();
            small.extend_from_slice(&head);
            for piece in pieces {
                small.extend_from_slice(piece);
            }
            if header.checksum {
                sum.update(&small[HEADER_BYTES..]);
                let end = small.len();
                small.extend_from_slice(&sum.digest().to_le_bytes());
                self.spoil(&mut small[HEADER_BYTES..end]);
            } else {
                self.spoil(&mut small[HEADER_BYTES..]);
            }
            return self.write_all(task, header, small);
        }
        self.write_all(task, header, &head)?;
        for piece in pieces {
            for step in piece.chunks(STEP_BYTES) {
                if header.checksum {
                    sum.update(step);
                }
                if matches!(self.fault, Some(Fault::FlipPayloadBit(_))) {
                    let mut bad = step.to_vec();
                    self.spoil(&mut bad);
                    self.write_all(task, header, &bad)?;
                } else {
                    self.write_all(task, header, step)?;
                }
            }
        }
        if header.checksum {
            self.write_all(task, header, &sum.digest().to_le_bytes())?;
        }
        Ok(())
    }

    fn spoil(&mut self, payload: &mut [u8]) {
        if let (Some(Fault::FlipPayloadBit(bit)), false) = (self.fault, payload.is_empty()) {
            self.fault = None;
            flip(payload, bit);
        }
    }

    fn write_all(&mut self, task: &mut Task, header: &Header, bytes: &[u8]) -> Result<(), FabricError> {
        let mut idle = Idle::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            let ticket = self.link.ticket();
            let took = self.link.write(header.target, rest).map_err(|d| gone(task, header.target, d))?;
            rest = &rest[took..];
            if took > 0 || self.drain(task, None)? {
                idle.over(task);
                continue;
            }
            let peer = header.target;
            let reason = Reason { peer, direction: "to send to", sequence: header.sequence, full: Some(peer) };
            self.pause(task, &mut idle, ticket, &reason)?;
        }
        idle.over(task);
        Ok(())
    }

    /// Receives the next message of `member` on `lane`, which must have the length of `into`.
    pub fn recv_into(&mut self, task: &mut Task, member: usize, lane: u8, into: &mut [u8]) -> Result<(), FabricError> {
        let length = into.len();
        let stream = (task.group.ranks[member], task.group.id, lane);
        let mut want = Want { stream, wire: task.operation.wire(), into, done: false };
        if let Some((header, body)) = self.receive(task, stream, Some(&mut want))? {
            expect(task, &header, "byte count", length, body.len())?;
            want.into.copy_from_slice(&body);
        }
        received(task, member, length);
        Ok(())
    }

    /// Receives the next message of `member` on `lane`, of any length.
    pub fn recv_vec(&mut self, task: &mut Task, member: usize, lane: u8) -> Result<Vec<u8>, FabricError> {
        let stream = (task.group.ranks[member], task.group.id, lane);
        let (_, body) = self.receive(task, stream, None)?.expect("without a place it comes by the mailbox");
        received(task, member, body.len());
        Ok(body)
    }

    /// The next letter of `stream`, or `None` if it went straight to its place.
    fn receive(
        &mut self,
        task: &mut Task,
        stream: Stream,
        mut want: Option<&mut Want>,
    ) -> Result<Option<(Header, Vec<u8>)>, FabricError> {
        let peer = stream.0;
        let mut idle = Idle::default();
        loop {
            if let Some(letter) = self.waiting.get_mut(&stream).and_then(VecDeque::pop_front) {
                idle.over(task);
                self.waiting_bytes -= letter.1.len() as u64;
                if letter.0.operation != task.operation.wire() {
                    return Err(wrong_operation(task, &letter.0));
                }
                return Ok(Some(letter));
            }
            if peer == self.rank {
                return Err(task.argument("this rank receives from itself what it has not sent".into()));
            }
            let ticket = self.link.ticket();
            let mut moved = self.pump(task, peer, want.as_deref_mut())?;
            if want.as_ref().is_some_and(|w| w.done) {
                idle.over(task);
                return Ok(None);
            }
            if !moved {
                if let Some(down) = self.inbound[peer as usize].down.clone() {
                    return Err(gone(task, peer, down));
                }
                moved = self.drain(task, Some(peer))?;
            }
            if moved {
                idle.over(task);
                continue;
            }
            let sequence = self.seen.get(&stream).copied().unwrap_or(0);
            let reason = Reason { peer, direction: "for", sequence, full: None };
            self.pause(task, &mut idle, ticket, &reason)?;
        }
    }

    /// Takes in what is there from everyone but `except`. True if anything came.
    fn drain(&mut self, task: &Task, except: Option<RankId>) -> Result<bool, FabricError> {
        let mut moved = false;
        for peer in 0..self.inbound.len() as RankId {
            if peer != self.rank && Some(peer) != except && self.inbound[peer as usize].down.is_none() {
                moved |= self.pump(task, peer, None)?;
            }
        }
        Ok(moved)
    }

    /// Takes in what is there from `peer`. True if anything came.
    fn pump(&mut self, task: &Task, peer: RankId, mut want: Option<&mut Want>) -> Result<bool, FabricError> {
        let mut moved = false;
        loop {
            let at = &mut self.inbound[peer as usize];
            if at.down.is_some() {
                return Ok(moved);
            }
            if at.now.is_none() {
                if !fill(&*self.link, peer, at, HEADER_BYTES, &mut moved) {
                    return Ok(moved);
                }
                self.open(task, peer, want.as_deref_mut())?;
            }
            let at = &mut self.inbound[peer as usize];
            let header = at.now.expect("opened above");
            let bytes = header.bytes as usize;
            while at.got < bytes {
                let end = bytes.min(at.got + STEP_BYTES);
                let place = if at.direct {
                    let want = want.as_deref_mut().expect("a direct message stays with its receiver");
                    &mut want.into[at.got..end]
                } else {
                    at.body.resize(end, 0);
                    &mut at.body[at.got..end]
                };
                match self.link.read(peer, place) {
                    Ok(0) => return Ok(moved),
                    Ok(n) => {
                        if header.checksum {
                            at.sum.update(&place[..n]);
                        }
                        at.got += n;
                        moved = true;
                    }
                    Err(down) => {
                        at.down = Some(down);
                        return Ok(moved);
                    }
                }
            }
            if header.checksum {
                if !fill(&*self.link, peer, at, TRAILER_BYTES, &mut moved) {
                    return Ok(moved);
                }
                let got = u64::from_le_bytes(at.tail[..].try_into().expect("8 bytes"));
                let sum = at.sum.digest();
                if sum != got {
                    let (sum, got) = (format!("{sum:#018x}"), format!("{got:#018x}"));
                    return Err(mismatch(task, &header, "payload checksum", got, sum));
                }
            }
            at.head.clear();
            at.tail.clear();
            at.now = None;
            let body = std::mem::take(&mut at.body);
            if at.direct {
                want.expect("a direct message stays with its receiver").done = true;
                return Ok(true);
            }
            let stream = (peer, header.group, header.lane);
            self.waiting.entry(stream).or_default().push_back((header, body));
        }
    }

    /// Reads and checks a full header, and decides where its payload goes.
    fn open(&mut self, task: &Task, peer: RankId, want: Option<&mut Want>) -> Result<(), FabricError> {
        let at = &mut self.inbound[peer as usize];
        let raw: [u8; HEADER_BYTES] = at.head[..].try_into().expect("a full header");
        let header = Header::decode(&raw).map_err(|bad| unreadable(task, peer, bad))?;
        let wrong =
            |what, expected: u64, got: u64| Err(mismatch(task, &header, what, expected.to_string(), got.to_string()));
        if header.generation != self.options.generation {
            return wrong("generation", self.options.generation.into(), header.generation.into());
        }
        if header.source != peer {
            return wrong("source", peer.into(), header.source.into());
        }
        if header.target != self.rank {
            return wrong("target", self.rank.into(), header.target.into());
        }
        let stream = (peer, header.group, header.lane);
        let seen = self.seen.entry(stream).or_default();
        if header.sequence != *seen {
            return wrong("sequence", *seen, header.sequence);
        }
        *seen += 1;
        if header.bytes > self.options.message_bytes_max {
            return Err(self.oversize("from", name(task, header.group), peer, header.bytes));
        }
        let first = self.waiting.get(&stream).is_none_or(VecDeque::is_empty);
        let place = want.filter(|w| first && w.stream == stream);
        if let Some(want) = &place {
            if header.operation != want.wire {
                return Err(wrong_operation(task, &header));
            }
            expect(task, &header, "byte count", want.into.len(), header.bytes as usize)?;
        } else {
            self.waiting_bytes += header.bytes;
            if self.waiting_bytes > self.options.mailbox_bytes_max {
                return Err(FabricError::MailboxFull {
                    rank: peer,
                    bytes: self.waiting_bytes,
                    bytes_max: self.options.mailbox_bytes_max,
                });
            }
            at.body.reserve_exact(header.bytes as usize);
        }
        at.direct = place.is_some();
        at.got = 0;
        at.sum.reset();
        at.now = Some(header);
        Ok(())
    }

    /// Spins, yields, then sleeps a little; looks at abort and deadline.
    fn pause(&self, task: &Task, idle: &mut Idle, ticket: u32, why: &Reason) -> Result<(), FabricError> {
        self.abort.check()?;
        idle.since.get_or_insert_with(Instant::now);
        idle.rounds += 1;
        if idle.rounds <= self.link.spins() {
            std::hint::spin_loop();
            return Ok(());
        }
        let waited = task.started.elapsed();
        let deadline = Duration::from_millis(self.options.deadline_ms);
        if waited >= deadline {
            return Err(FabricError::Deadline {
                operation: task.operation,
                group: task.group.name.clone(),
                rank: why.peer,
                direction: why.direction,
                sequence: why.sequence,
                waited_ms: waited.as_millis() as u64,
            });
        }
        self.link.wait(ticket, why.full, NAP.min(deadline - waited));
        Ok(())
    }

    fn oversize(&self, direction: &'static str, group: String, rank: RankId, bytes: u64) -> FabricError {
        let bytes_max = self.options.message_bytes_max;
        FabricError::Oversize { direction, rank, group, bytes, bytes_max }
    }
}

/// Reads on until the head (or tail) of `at` has `size` bytes. True when it has.
fn fill(link: &dyn Link, peer: RankId, at: &mut Inbound, size: usize, moved: &mut bool) -> bool {
    let buffer = if at.now.is_none() { &mut at.head } else { &mut at.tail };
    let mut raw = [0u8; HEADER_BYTES];
    while buffer.len() < size {
        let room = size - buffer.len();
        match link.read(peer, &mut raw[..room]) {
            Ok(0) => return false,
            Ok(n) => {
                buffer.extend_from_slice(&raw[..n]);
                *moved = true;
            }
            Err(down) => {
                at.down = Some(down);
                return false;
            }
        }
    }
    true
}

fn flip(bytes: &mut [u8], bit: u64) {
    let bit = bit % (bytes.len() as u64 * 8);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

fn received(task: &mut Task, member: usize, bytes: usize) {
    let count = &mut task.count;
    *(if task.group.crosses(task.me, member) {
        &mut count.inter_bytes_received
    } else {
        &mut count.intra_bytes_received
    }) += bytes as u64;
}

fn name(task: &Task, group: u32) -> String {
    if group == task.group.id { task.group.name.clone() } else { format!("#{group}") }
}

fn gone(task: &Task, rank: RankId, down: LinkDown) -> FabricError {
    let group = task.group.name.clone();
    FabricError::PeerGone { rank, operation: task.operation, group, detail: down.0 }
}

fn mismatch(task: &Task, header: &Header, what: &'static str, expected: String, got: String) -> FabricError {
    let (rank, sequence) = (header.source, header.sequence);
    FabricError::Mismatch { what, group: name(task, header.group), rank, sequence, expected, got }
}

fn expect(task: &Task, header: &Header, what: &'static str, expected: usize, got: usize) -> Result<(), FabricError> {
    if expected == got {
        return Ok(());
    }
    Err(mismatch(task, header, what, expected.to_string(), got.to_string()))
}

fn wrong_operation(task: &Task, header: &Header) -> FabricError {
    let wanted = Operation::wire_name(task.operation.wire());
    mismatch(task, header, "operation", wanted, Operation::wire_name(header.operation))
}

fn unreadable(task: &Task, rank: RankId, (what, expected, got): BadHeader) -> FabricError {
    let group = task.group.name.clone();
    FabricError::Mismatch { what, group, rank, sequence: 0, expected, got }
}

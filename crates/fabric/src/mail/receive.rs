//! Receiving: what has arrived is checked, then goes to its place or into the mailbox.

use super::{Idle, Mail, Reason, Stream};
use crate::bits::numbers;
use crate::error::FabricError;
use crate::frame::{HEADER_BYTES, Header, TAIL_BYTES_MAX, Tail};
use crate::link::{Link, LinkDown};
use crate::op::Task;
use crate::options::RankId;
use std::collections::VecDeque;
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// A message in arrival from one peer.
#[derive(Default)]
pub(super) struct Inbound {
    now: Option<Header>,
    /// Where the payload goes.
    to: To,
    body: Vec<u8>,
    got: usize,
    sum: Sum,
    /// Header or tail, as far as it has come.
    edge: Edge,
    down: Option<LinkDown>,
}

/// Where a payload in arrival goes.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum To {
    /// Kept for a later receive.
    #[default]
    Mailbox,
    /// Straight to where the receiver wants it.
    Receiver,
    /// To the place that was posted for it.
    Posted,
}

/// The sum of a payload that comes in pieces.
#[derive(Default)]
struct Sum {
    running: Option<XxHash3_64>,
    done: u64,
}

impl Sum {
    /// Takes in a piece; `whole` if it is all of the payload.
    fn add(&mut self, piece: &[u8], whole: bool) {
        if whole {
            self.done = XxHash3_64::oneshot(piece);
        } else {
            self.running.get_or_insert_with(|| XxHash3_64::with_seed(0)).write(piece);
        }
    }

    fn take(&mut self) -> u64 {
        self.running.take().map_or(self.done, |sum| sum.finish())
    }
}

/// The bytes around a payload.
struct Edge {
    raw: [u8; TAIL_BYTES_MAX],
    len: usize,
}

impl Default for Edge {
    fn default() -> Self {
        Self { raw: [0; TAIL_BYTES_MAX], len: 0 }
    }
}

/// Where an awaited message of known length goes.
struct Want<'a> {
    stream: Stream,
    wire: u8,
    bytes: usize,
    to: Goal<'a>,
    done: bool,
}

/// What becomes of a payload.
pub(super) enum Goal<'a> {
    /// It is put here.
    Place(&'a mut [u8]),
    /// Its numbers are shown where they lie, with their position in the payload.
    Show(&'a mut dyn FnMut(usize, &[f32])),
}

impl Mail {
    /// Receives the next message of `member` on `lane`, which must have the length of `into`.
    pub fn recv_into(&mut self, task: &mut Task, member: usize, lane: u8, into: &mut [u8]) -> Result<(), FabricError> {
        let bytes = into.len();
        self.recv_to(task, member, lane, bytes, Goal::Place(into))
    }

    /// Shows the next message of `member` on `lane`, which must have `len` numbers, to `see`:
    /// every number once, in order, in pieces with their position, where they lie. They are
    /// checked only at the end: if this fails, what was made of them is void.
    pub fn recv_with(
        &mut self,
        task: &mut Task,
        member: usize,
        lane: u8,
        len: usize,
        see: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), FabricError> {
        self.recv_to(task, member, lane, len * size_of::<f32>(), Goal::Show(see))
    }

    fn recv_to(&mut self, task: &mut Task, member: usize, lane: u8, bytes: usize, to: Goal) -> Result<(), FabricError> {
        let stream = (task.group.ranks[member], task.group.id, lane);
        let mut want = Want { stream, wire: task.operation.wire(), bytes, to, done: false };
        if let Some((header, body)) = self.receive(task, stream, Some(&mut want))? {
            task.expect(&header, "byte count", bytes, body.len())?;
            match want.to {
                Goal::Place(into) => into.copy_from_slice(&body),
                Goal::Show(see) => see(0, numbers(&body, &mut self.unaligned)),
            }
        }
        received(task, member, bytes);
        Ok(())
    }

    /// Receives the next message of `member` on `lane`, of any length.
    pub fn recv_vec(&mut self, task: &mut Task, member: usize, lane: u8) -> Result<Vec<u8>, FabricError> {
        let stream = (task.group.ranks[member], task.group.id, lane);
        let (_, body) = self.receive(task, stream, None)?.expect("without a place it comes by the mailbox");
        received(task, member, body.len());
        Ok(body)
    }

    /// True if the next message of `member` on `lane` is here, or its stream has ended; takes in what has come, and never waits.
    pub fn is_here(&mut self, task: &Task, member: usize, lane: u8) -> Result<bool, FabricError> {
        self.abort.check()?;
        let peer = task.group.ranks[member];
        let stream = (peer, task.group.id, lane);
        let waits = |mail: &Self| mail.waiting.get(&stream).is_some_and(|letters| !letters.is_empty());
        if !waits(self) {
            self.pump(task, peer, None, false)?;
            self.push(task, None)?;
        }
        Ok(waits(self) || self.inbound[peer as usize].down.is_some())
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
        // The mailbox is worth a look at first, and when anything has come since.
        let mut moved = true;
        loop {
            let letter = if moved { self.waiting.get_mut(&stream).and_then(VecDeque::pop_front) } else { None };
            if let Some(letter) = letter {
                self.over(task, &mut idle);
                self.waiting_bytes -= letter.1.len() as u64;
                if letter.0.operation != task.operation.wire() {
                    return Err(task.wrong_operation(&letter.0));
                }
                return Ok(Some(letter));
            }
            if peer == self.rank {
                return Err(task.argument("this rank receives from itself what it has not sent".into()));
            }
            self.abort.check()?;
            let ticket = self.link.ticket();
            moved = self.pump(task, peer, want.as_deref_mut(), false)?;
            if want.as_ref().is_some_and(|w| w.done) {
                self.over(task, &mut idle);
                return Ok(None);
            }
            if !moved {
                moved = self.push(task, None)?;
            }
            if !moved {
                if let Some(down) = self.inbound[peer as usize].down.clone() {
                    return Err(task.gone(peer, down));
                }
                moved = self.drain(task, Some(peer))?;
            }
            if moved {
                self.over(task, &mut idle);
                continue;
            }
            let sequence = self.seen.get(&stream).copied().unwrap_or(0);
            let reason = Reason { peer, direction: "for", sequence, full: None };
            self.pause(task, &mut idle, ticket, &reason)?;
        }
    }

    /// How the stream of `peer` has ended, if it has.
    pub(super) fn down(&self, peer: RankId) -> Option<LinkDown> {
        self.inbound[peer as usize].down.clone()
    }

    /// Takes in what is there for posts. What nobody asked for yet stays in the transport: its sender has room for it.
    pub(super) fn drain_posted(&mut self, task: &Task) -> Result<bool, FabricError> {
        let mut moved = false;
        for peer in 0..self.inbound.len() as RankId {
            if peer != self.rank && self.inbound[peer as usize].down.is_none() {
                moved |= self.pump(task, peer, None, true)?;
            }
        }
        Ok(moved)
    }

    /// Takes in what is there from everyone but `except`. True if anything came.
    pub(super) fn drain(&mut self, task: &Task, except: Option<RankId>) -> Result<bool, FabricError> {
        let mut moved = false;
        for peer in 0..self.inbound.len() as RankId {
            if peer != self.rank && Some(peer) != except && self.inbound[peer as usize].down.is_none() {
                moved |= self.pump(task, peer, None, false)?;
            }
        }
        Ok(moved)
    }

    /// Takes in what is there from `peer`, up to the first message that no post awaits if `posted`. True if anything came.
    fn pump(
        &mut self,
        task: &Task,
        peer: RankId,
        mut want: Option<&mut Want>,
        posted: bool,
    ) -> Result<bool, FabricError> {
        let mut moved = false;
        loop {
            let at = &mut self.inbound[peer as usize];
            if at.down.is_some() || self.cut[peer as usize] {
                return Ok(moved);
            }
            if at.now.is_none() {
                if !fill(&*self.link, peer, at, HEADER_BYTES, &mut moved) {
                    return Ok(moved);
                }
                if posted && !self.is_for_a_post(peer) {
                    return Ok(moved);
                }
                self.open(task, peer, want.as_deref_mut())?;
            }
            let at = &mut self.inbound[peer as usize];
            let header = at.now.expect("opened above");
            let bytes = header.bytes as usize;
            let stream = (peer, header.group, header.lane);
            while at.got < bytes {
                let unaligned = &mut self.unaligned;
                let took = match at.to {
                    To::Mailbox => take_step(&*self.link, &header, at, None, unaligned),
                    To::Receiver => {
                        let goal = want.as_deref_mut().map(|want| &mut want.to);
                        take_step(&*self.link, &header, at, goal, unaligned)
                    }
                    To::Posted => {
                        self.outbox.fill(stream, |goal| take_step(&*self.link, &header, at, Some(goal), unaligned))
                    }
                };
                match took {
                    Ok(0) => return Ok(moved),
                    Ok(_) => moved = true,
                    Err(down) => {
                        at.down = Some(down);
                        return Ok(moved);
                    }
                }
            }
            if !fill(&*self.link, peer, at, Tail::len(&header), &mut moved) {
                return Ok(moved);
            }
            let sum = at.sum.take();
            if let Some(got) = Tail::sum(&header, &at.edge.raw[..at.edge.len]).filter(|got| *got != sum) {
                let (sum, got) = (format!("{sum:#018x}"), format!("{got:#018x}"));
                return Err(task.mismatch(&header, "payload checksum", got, sum));
            }
            at.edge.len = 0;
            at.now = None;
            let body = std::mem::take(&mut at.body);
            match at.to {
                To::Receiver => {
                    want.expect("a direct message stays with its receiver").done = true;
                    return Ok(true);
                }
                To::Posted => self.landed(task, stream)?,
                To::Mailbox => {
                    self.waiting.entry(stream).or_default().push_back((header, body));
                    self.serve(task, stream)?;
                }
            }
        }
    }

    /// Whether a post awaits the message whose header is there; what is no header is for [`Mail::open`] to refuse.
    fn is_for_a_post(&self, peer: RankId) -> bool {
        let edge = &self.inbound[peer as usize].edge;
        let header = edge.raw[..edge.len].try_into().map(Header::decode);
        let Ok(Ok(header)) = header else { return true };
        let stream = (peer, header.group, header.lane);
        self.waiting.get(&stream).is_none_or(VecDeque::is_empty) && self.outbox.awaited(stream).is_some()
    }

    /// Reads and checks a full header, and decides where its payload goes.
    fn open(&mut self, task: &Task, peer: RankId, want: Option<&mut Want>) -> Result<(), FabricError> {
        let at = &mut self.inbound[peer as usize];
        let raw: [u8; HEADER_BYTES] = at.edge.raw[..at.edge.len].try_into().expect("a full header");
        let header = Header::decode(&raw).map_err(|bad| task.unreadable(peer, bad))?;
        // Whose stream it came by is known; what the header says of its source is not believed.
        let came = Header { source: peer, ..header };
        let wrong =
            |what, expected: u64, got: u64| Err(task.mismatch(&came, what, expected.to_string(), got.to_string()));
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
        self.flight.receives(peer);
        if header.bytes > self.options.message_bytes_max {
            return Err(self.oversize("from", task.name(header.group), peer, header.bytes));
        }
        let first = self.waiting.get(&stream).is_none_or(VecDeque::is_empty);
        let place = want.filter(|w| first && w.stream == stream);
        let posted = if first && place.is_none() { self.outbox.awaited(stream) } else { None };
        if let Some((wire, bytes)) = posted {
            task.expect_posted(&header, wire, bytes)?;
        } else if let Some(want) = &place {
            if header.operation != want.wire {
                return Err(task.wrong_operation(&header));
            }
            task.expect(&header, "byte count", want.bytes, header.bytes as usize)?;
        } else {
            self.keep_room(peer, header.bytes)?;
            let at = &mut self.inbound[peer as usize];
            at.body.reserve_exact(header.bytes as usize);
        }
        let at = &mut self.inbound[peer as usize];
        at.to = match (posted, place) {
            (Some(_), _) => To::Posted,
            (None, Some(_)) => To::Receiver,
            (None, None) => To::Mailbox,
        };
        at.got = 0;
        at.sum = Sum::default();
        at.edge.len = 0;
        at.now = Some(header);
        Ok(())
    }
}

/// Takes in the next step of a payload: to its `goal`, or to the body of a letter. How many
/// bytes; 0 if nothing is there now.
fn take_step(
    link: &dyn Link,
    header: &Header,
    at: &mut Inbound,
    goal: Option<&mut Goal>,
    unaligned: &mut Vec<f32>,
) -> Result<usize, LinkDown> {
    let bytes = header.bytes as usize;
    let (from, end) = (at.got, bytes.min(at.got + link.step_bytes()));
    let place = match goal {
        Some(Goal::Show(see)) => {
            let sum = &mut at.sum;
            let n = link.show(header.source, end - from, &mut |piece| {
                if header.checksum {
                    sum.add(piece, piece.len() == bytes);
                }
                see(from / size_of::<f32>(), numbers(piece, unaligned));
            })?;
            at.got += n;
            return Ok(n);
        }
        Some(Goal::Place(into)) => &mut into[from..end],
        None => {
            at.body.resize(end, 0);
            &mut at.body[from..end]
        }
    };
    let n = link.read(header.source, place)?;
    if header.checksum && n > 0 {
        at.sum.add(&place[..n], n == bytes);
    }
    at.got += n;
    Ok(n)
}

/// Reads on until the edge of `at` has `size` bytes. True when it has.
fn fill(link: &dyn Link, peer: RankId, at: &mut Inbound, size: usize, moved: &mut bool) -> bool {
    while at.edge.len < size {
        match link.read(peer, &mut at.edge.raw[at.edge.len..size]) {
            Ok(0) => return false,
            Ok(n) => {
                at.edge.len += n;
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

fn received(task: &mut Task, member: usize, bytes: usize) {
    let count = &mut task.count;
    *(if task.group.crosses(task.me, member) {
        &mut count.inter_bytes_received
    } else {
        &mut count.intra_bytes_received
    }) += bytes as u64;
}

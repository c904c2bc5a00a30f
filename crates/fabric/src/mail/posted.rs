//! What was posted: messages that leave when there is room, and places for messages that may come at any time.
//!
//! A post owns its buffers and goes through stages: the messages of a stage leave and those that it awaits come in any
//! order; when the last one has come the next stage begins. All of it moves on in any wait of this rank, and when
//! [`Mail::progress`] is called. A post keeps its buffers until it is settled, so what is in flight is bounded by what
//! the rank has posted.

use super::receive::Goal;
use super::send::{Frame, count_sent};
use super::{Idle, Mail, Reason, Stream};
use crate::bits::{bytes, bytes_mut, numbers};
use crate::error::FabricError;
use crate::frame::Header;
use crate::link::LinkDown;
use crate::op::Task;
use crate::options::RankId;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

/// A message to or from `member`: which numbers of which buffers of the post.
#[derive(Clone, Debug)]
pub(crate) struct Letter {
    pub member: usize,
    pub lane: u8,
    pub at: Vec<Piece>,
}

/// What leaves and what comes, in order for each member and lane.
#[derive(Default, Debug)]
pub(crate) struct Stage {
    pub out: Vec<Letter>,
    /// Of these each lies in one range of buffer 0. A second piece, of another buffer, is what it is added to on the way.
    pub awaits: Vec<Letter>,
    /// What comes is added to what is there; else it takes its place.
    pub adds: bool,
}

/// The buffers of a post and how far it is.
struct Slot {
    buffers: Vec<Vec<f32>>,
    /// Messages that have not left, and that have not come.
    out: usize,
    awaits: usize,
    /// Headers and places are made beforehand, so that a stage begins without its group.
    later: VecDeque<Ready>,
    /// Nobody settles it: its buffers are free when it has left.
    alone: bool,
    /// When the last of it had come.
    came: Instant,
}

/// Numbers of a post: of which of its buffers, and where in it.
type Piece = (usize, Range<usize>);

/// A stage with its headers.
struct Ready {
    out: Vec<(Header, Vec<Piece>)>,
    awaits: Vec<(Stream, Place)>,
}

/// A place for the next message of a stream.
struct Place {
    slot: u64,
    wire: u8,
    at: Range<usize>,
    /// What comes is added to what is there, or to these numbers of another buffer.
    adds: bool,
    onto: Option<(usize, usize)>,
}

/// A message on its way out of a post.
struct Parcel {
    slot: u64,
    header: Header,
    at: Vec<Piece>,
    frame: Option<Frame>,
}

/// All posts of a rank.
#[derive(Default)]
pub(super) struct Posts {
    next: u64,
    slots: BTreeMap<u64, Slot>,
    /// By peer.
    parcels: Vec<VecDeque<Parcel>>,
    waiting: usize,
    places: HashMap<Stream, VecDeque<Place>>,
    placed: usize,
    spent: Vec<Vec<f32>>,
}

impl Posts {
    pub fn new(world: u32) -> Self {
        Self { parcels: (0..world).map(|_| VecDeque::new()).collect(), ..Self::default() }
    }

    /// Part of a message to `peer` has left.
    pub fn begun(&self, peer: RankId) -> bool {
        self.parcels[peer as usize].front().and_then(|parcel| parcel.frame.as_ref()).is_some_and(Frame::begun)
    }

    /// A peer that has no room for what was posted.
    pub fn full(&self) -> Option<RankId> {
        if self.waiting == 0 {
            return None;
        }
        self.parcels.iter().position(|parcels| !parcels.is_empty()).map(|peer| peer as RankId)
    }

    /// Kind and bytes of the next message of a stream, if a place was posted for it.
    pub fn awaited(&self, stream: Stream) -> Option<(u8, usize)> {
        if self.placed == 0 {
            return None;
        }
        let place = self.places.get(&stream)?.front()?;
        Some((place.wire, place.at.len() * size_of::<f32>()))
    }

    /// Gives the next place of `stream` to `take`.
    pub fn fill<T>(&mut self, stream: Stream, take: impl FnOnce(&mut Goal) -> T) -> T {
        let place = self.places.get(&stream).and_then(VecDeque::front).expect("a place was posted");
        let slot = self.slots.get_mut(&place.slot).expect("a post stays until it is settled");
        let (first, others) = slot.buffers.split_first_mut().expect("a place lies in a buffer");
        let data = &mut first[place.at.clone()];
        if let Some((buffer, start)) = place.onto {
            let onto = &others[buffer - 1][start..start + data.len()];
            return take(&mut Goal::Show(&mut |at, piece| {
                let sums = data[at..].iter_mut().zip(&onto[at..]).zip(piece);
                sums.for_each(|((sum, mine), theirs)| *sum = mine + theirs);
            }));
        }
        if !place.adds {
            return take(&mut Goal::Place(bytes_mut(data)));
        }
        take(&mut Goal::Show(&mut |at, piece| {
            data[at..].iter_mut().zip(piece).for_each(|(sum, more)| *sum += more);
        }))
    }
}

impl Mail {
    /// Posts `stages` over `buffers`; what there is room for leaves at once, the rest later. Its number.
    pub fn post(
        &mut self,
        task: &mut Task,
        buffers: Vec<Vec<f32>>,
        stages: Vec<Stage>,
        alone: bool,
    ) -> Result<u64, FabricError> {
        let id = self.outbox.next;
        self.outbox.next += 1;
        let mut ready = VecDeque::new();
        for stage in stages {
            let mut out = Vec::new();
            for Letter { member, lane, at } in stage.out {
                let bytes = at.iter().map(|(_, at)| size_of::<f32>() * at.len()).sum::<usize>() as u64;
                out.push((self.header(task, member, lane, bytes)?, at));
                count_sent(task, member, bytes);
            }
            let wire = task.operation.wire();
            let place = |letter: Letter| {
                let stream = (task.group.ranks[letter.member], task.group.id, letter.lane);
                let mut pieces = letter.at.into_iter();
                let (_, at) = pieces.next().expect("one range");
                let onto = pieces.next().map(|(buffer, at)| (buffer, at.start));
                (stream, Place { slot: id, wire, at, adds: stage.adds, onto })
            };
            ready.push_back(Ready { out, awaits: stage.awaits.into_iter().map(place).collect() });
        }
        let slot = Slot { buffers, out: 0, awaits: 0, later: ready, alone, came: task.started };
        self.outbox.slots.insert(id, slot);
        self.begin(task, id)?;
        self.push(task, None)?;
        Ok(id)
    }

    /// Begins the next stage of a post, and those that follow from what is there.
    fn begin(&mut self, task: &Task, id: u64) -> Result<(), FabricError> {
        let slot = self.outbox.slots.get_mut(&id).expect("a post stays until it is settled");
        let Some(Ready { out, awaits }) = slot.later.pop_front() else { return Ok(()) };
        slot.out += out.len();
        slot.awaits = awaits.len();
        self.outbox.waiting += out.len();
        self.outbox.placed += awaits.len();
        for (header, at) in out {
            self.outbox.parcels[header.target as usize].push_back(Parcel { slot: id, header, at, frame: None });
        }
        let none = awaits.is_empty();
        let mut streams: Vec<Stream> = awaits.iter().map(|(stream, _)| *stream).collect();
        for (stream, place) in awaits {
            self.outbox.places.entry(stream).or_default().push_back(place);
        }
        streams.dedup();
        streams.into_iter().try_for_each(|stream| self.serve(task, stream))?;
        if none { self.begin(task, id) } else { Ok(()) }
    }

    /// Puts messages that have come before their place was posted into it.
    pub(super) fn serve(&mut self, task: &Task, stream: Stream) -> Result<(), FabricError> {
        while let Some((wire, want)) = self.outbox.awaited(stream) {
            let Some((header, body)) = self.waiting.get_mut(&stream).and_then(VecDeque::pop_front) else {
                return Ok(());
            };
            self.waiting_bytes -= body.len() as u64;
            task.expect_posted(&header, wire, want)?;
            let unaligned = &mut self.unaligned;
            self.outbox.fill(stream, |goal| match goal {
                Goal::Place(into) => into.copy_from_slice(&body),
                Goal::Show(see) => see(0, numbers(&body, unaligned)),
            });
            self.landed(task, stream)?;
        }
        Ok(())
    }

    /// The next place of `stream` is filled.
    pub(super) fn landed(&mut self, task: &Task, stream: Stream) -> Result<(), FabricError> {
        let place = self.outbox.places.get_mut(&stream).and_then(VecDeque::pop_front).expect("a place was posted");
        self.outbox.placed -= 1;
        let slot = self.outbox.slots.get_mut(&place.slot).expect("a post stays until it is settled");
        slot.awaits -= 1;
        if slot.awaits > 0 {
            return Ok(());
        }
        slot.came = Instant::now();
        self.begin(task, place.slot)
    }

    /// Lets posted messages leave as far as there is room, but none to `except`. True if anything left.
    pub(super) fn push(&mut self, task: &Task, except: Option<RankId>) -> Result<bool, FabricError> {
        let mut moved = false;
        if self.outbox.waiting == 0 {
            return Ok(false);
        }
        for peer in (0..self.outbox.parcels.len() as RankId).filter(|peer| Some(*peer) != except) {
            while !self.outbox.parcels[peer as usize].is_empty() {
                if self.push_front(peer).map_err(|down| task.gone(peer, down))? == 0 {
                    break;
                }
                moved = true;
            }
        }
        Ok(moved)
    }

    /// One attempt to write the first parcel for `peer`: how many bytes left, at least 1 if it is gone.
    pub(super) fn push_front(&mut self, peer: RankId) -> Result<usize, LinkDown> {
        let Some(mut parcel) = self.outbox.parcels[peer as usize].pop_front() else { return Ok(0) };
        let mut took = 0;
        let mut gone = parcel.frame.is_none() && !self.leaves(peer);
        if !gone {
            let buffers = &self.outbox.slots[&parcel.slot].buffers;
            let pieces: Vec<&[u8]> = parcel.at.iter().map(|(i, at)| bytes(&buffers[*i][at.clone()])).collect();
            let fault = &mut self.fault;
            let frame = parcel.frame.get_or_insert_with(|| Frame::new(parcel.header, fault));
            took = frame.write(&*self.link, &pieces, &mut self.fault)?;
            gone = frame.done();
        }
        if !gone {
            self.outbox.parcels[peer as usize].push_front(parcel);
            return Ok(took);
        }
        self.outbox.waiting -= 1;
        let slot = self.outbox.slots.get_mut(&parcel.slot).expect("a post stays until it is settled");
        slot.out -= 1;
        if slot.alone && slot.out == 0 {
            let slot = self.outbox.slots.remove(&parcel.slot);
            self.outbox.spent.extend(slot.into_iter().flat_map(|slot| slot.buffers));
        }
        Ok(took.max(1))
    }

    /// Moves what was posted as far as it goes without waiting.
    pub fn progress(&mut self, task: &Task) -> Result<(), FabricError> {
        self.push(task, None)?;
        if self.outbox.placed > 0 && self.drain_posted(task)? {
            self.push(task, None)?;
        }
        Ok(())
    }

    /// True if something that was posted has not left, or not come.
    pub fn in_flight(&self) -> bool {
        self.outbox.waiting + self.outbox.placed > 0
    }

    /// Waits until all of post `id` has left and come: its buffers, and when the last of it had come.
    pub fn settle(&mut self, task: &mut Task, id: u64) -> Result<(Vec<Vec<f32>>, Instant), FabricError> {
        let mut idle = Idle::default();
        loop {
            let Some(slot) = self.outbox.slots.get(&id) else {
                return Err(task.argument(format!("number {id} was never posted, or taken before")));
            };
            if slot.out + slot.awaits == 0 && slot.later.is_empty() {
                break;
            }
            self.abort.check()?;
            let ticket = self.link.ticket();
            if self.drain(task, None)? | self.push(task, None)? {
                self.over(task, &mut idle);
                continue;
            }
            let (peer, full) = self.holds_up(id);
            if let Some(down) = self.down(peer) {
                return Err(task.gone(peer, down));
            }
            let direction = if full { "to send to" } else { "for" };
            let reason = Reason { peer, direction, sequence: 0, full: full.then_some(peer) };
            self.pause(task, &mut idle, ticket, &reason)?;
        }
        self.over(task, &mut idle);
        let slot = self.outbox.slots.remove(&id).expect("looked at above");
        Ok((slot.buffers, slot.came))
    }

    /// A peer that post `id` waits for, and whether it waits for room there.
    fn holds_up(&self, id: u64) -> (RankId, bool) {
        let mut places = self.outbox.places.iter();
        let awaited = places.find(|(_, places)| places.iter().any(|place| place.slot == id));
        if let Some(((peer, ..), _)) = awaited {
            return (*peer, false);
        }
        let full = self.outbox.parcels.iter().position(|parcels| parcels.iter().any(|parcel| parcel.slot == id));
        (full.unwrap_or(0) as RankId, true)
    }

    /// Buffers whose messages have left, of posts that nobody settles.
    pub fn spent(&mut self) -> Vec<Vec<f32>> {
        std::mem::take(&mut self.outbox.spent)
    }
}

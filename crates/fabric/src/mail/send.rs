//! Sending: header, payload in steps, tail.

use super::{Fault, Idle, Mail, Reason};
use crate::bits::flip;
use crate::error::FabricError;
use crate::frame::{HEADER_BYTES, Header, Tail};
use crate::link::{Link, LinkDown};
use crate::op::Task;
use std::hash::Hasher;
use std::io::IoSlice;
use twox_hash::XxHash3_64;

impl Mail {
    /// The header of the next message to `member`.
    pub(super) fn header(&mut self, task: &Task, member: usize, lane: u8, bytes: u64) -> Result<Header, FabricError> {
        let peer = task.group.ranks[member];
        if bytes > self.options.message_bytes_max {
            return Err(self.oversize("to", task.group.name.clone(), peer, bytes));
        }
        let sequence = self.sent.entry((peer, task.group.id, lane)).or_default();
        *sequence += 1;
        Ok(Header {
            operation: task.operation.wire(),
            lane,
            generation: self.options.generation,
            group: task.group.id,
            sequence: *sequence - 1,
            source: self.rank,
            target: peer,
            bytes,
            checksum: self.options.checksum,
        })
    }

    /// Sends the concatenation of `pieces` to `member`.
    pub fn send(&mut self, task: &mut Task, member: usize, lane: u8, pieces: &[&[u8]]) -> Result<(), FabricError> {
        let bytes: u64 = pieces.iter().map(|p| p.len() as u64).sum();
        let header = self.header(task, member, lane, bytes)?;
        let peer = header.target;
        if peer == self.rank {
            self.keep_room(peer, bytes)?;
            let stream = (peer, header.group, header.lane);
            self.waiting.entry(stream).or_default().push_back((header, pieces.concat()));
            return Ok(());
        }
        count_sent(task, member, bytes);
        // What was posted and has begun to leave is not cut in two.
        let mut idle = Idle::default();
        while self.outbox.begun(peer) {
            self.leave(task, &mut idle, peer, header.sequence, |mail| mail.push_front(peer))?;
        }
        if self.leaves(peer) {
            let mut frame = Frame::new(header, &mut self.fault);
            while !frame.done() {
                self.leave(task, &mut idle, peer, header.sequence, |mail| {
                    frame.write(&*mail.link, pieces, &mut mail.fault)
                })?;
            }
        }
        self.over(task, &mut idle);
        Ok(())
    }

    /// One attempt to write to `peer`; without room it takes in what arrives meanwhile, then sleeps a little.
    fn leave(
        &mut self,
        task: &mut Task,
        idle: &mut Idle,
        peer: u32,
        sequence: u64,
        write: impl FnOnce(&mut Self) -> Result<usize, LinkDown>,
    ) -> Result<(), FabricError> {
        self.abort.check()?;
        let ticket = self.link.ticket();
        let wrote = write(self).map_err(|down| task.gone(peer, down))? > 0;
        if wrote || self.drain(task, None)? || self.push(task, Some(peer))? {
            self.over(task, idle);
            return Ok(());
        }
        self.pause(task, idle, ticket, &Reason { peer, direction: "to send to", sequence, full: Some(peer) })
    }

    /// A message to `peer` is about to leave; false if a drill has it lost.
    pub(super) fn leaves(&mut self, peer: u32) -> bool {
        self.flight.sends(peer);
        if self.cut[peer as usize] {
            return false;
        }
        let lost = self.fault == Some(Fault::Lose);
        if lost {
            self.fault = None;
        }
        !lost
    }
}

/// Counts a message to another rank.
pub(super) fn count_sent(task: &mut Task, member: usize, bytes: u64) {
    let crosses = task.group.crosses(task.me, member);
    task.count.messages_sent += 1;
    *(if crosses { &mut task.count.inter_bytes_sent } else { &mut task.count.intra_bytes_sent }) += bytes;
}

/// A message on its way out: how much of it has left. Each step of the payload is summed, then written: the first behind
/// the header, the last before the tail.
pub(super) struct Frame {
    header: Header,
    head: [u8; HEADER_BYTES],
    /// Bytes of it in front of the step; after the first one none.
    head_len: usize,
    /// The piece and the byte in it at which the step under way begins, and its length.
    piece: usize,
    from: usize,
    len: usize,
    /// The step with a flipped bit, if a fault asks for that.
    spoilt: Option<Vec<u8>>,
    sum: Option<XxHash3_64>,
    /// Behind the last step.
    tail: Option<Tail>,
    /// Bytes of head, step and tail that have left; none: the step is yet to be summed.
    written: Option<usize>,
    done: bool,
}

impl Frame {
    pub fn new(header: Header, fault: &mut Option<Fault>) -> Self {
        let mut head = header.encode();
        if let Some(Fault::FlipHeaderBit(bit)) = *fault {
            *fault = None;
            flip(&mut head, bit);
        }
        let (spoilt, sum, tail) = (None, None, None);
        let head_len = HEADER_BYTES;
        Self { header, head, head_len, piece: 0, from: 0, len: 0, spoilt, sum, tail, written: None, done: false }
    }

    /// All of it has left.
    pub fn done(&self) -> bool {
        self.done
    }

    /// Some of it has left.
    pub fn begun(&self) -> bool {
        self.head_len == 0 || self.written.is_some_and(|written| written > 0)
    }

    /// Writes what the link takes of the step under way, and how many bytes that was. `pieces` are the payload, the same
    /// at every call.
    pub fn write(&mut self, link: &dyn Link, pieces: &[&[u8]], fault: &mut Option<Fault>) -> Result<usize, LinkDown> {
        if self.written.is_none() {
            self.begin(link.step_bytes(), pieces, fault);
        }
        let step = pieces.get(self.piece).map_or(&[][..], |piece| &piece[self.from..self.from + self.len]);
        let step = self.spoilt.as_deref().unwrap_or(step);
        let tail = self.tail.as_ref().map_or(&[][..], Tail::bytes);
        let mut slices = [IoSlice::new(&self.head[..self.head_len]), IoSlice::new(step), IoSlice::new(tail)];
        let mut rest = &mut slices[..];
        let before = self.written.unwrap_or(0);
        IoSlice::advance_slices(&mut rest, before);
        let took = if rest.is_empty() { 0 } else { link.write(self.header.target, rest)? };
        let all = self.head_len + step.len() + tail.len();
        self.written = Some(before + took);
        if before + took == all {
            self.head_len = 0;
            self.from += self.len;
            self.len = 0;
            self.written = None;
            self.done = self.tail.is_some();
        }
        Ok(took)
    }

    /// Finds the next step and sums it.
    fn begin(&mut self, size: usize, pieces: &[&[u8]], fault: &mut Option<Fault>) {
        while pieces.get(self.piece).is_some_and(|piece| self.from == piece.len()) {
            (self.piece, self.from) = (self.piece + 1, 0);
        }
        let step = pieces.get(self.piece).map_or(&[][..], |piece| &piece[self.from..piece.len().min(self.from + size)]);
        self.len = step.len();
        let ends = pieces.get(self.piece).is_none_or(|piece| self.from + self.len == piece.len());
        let last = ends && pieces.iter().skip(self.piece + 1).all(|piece| piece.is_empty());
        let mut sum = 0;
        if self.header.checksum {
            // A message of one step needs no running sum, which takes longer to set up.
            if last && self.sum.is_none() {
                sum = XxHash3_64::oneshot(step);
            } else {
                let state = self.sum.get_or_insert_with(|| XxHash3_64::with_seed(0));
                state.write(step);
                if last {
                    sum = state.finish();
                }
            }
        }
        self.tail = last.then(|| Tail::new(&self.header, sum));
        self.spoilt = None;
        if let Some(Fault::FlipPayloadBit(bit)) = fault.filter(|_| !step.is_empty()) {
            *fault = None;
            let mut bad = step.to_vec();
            flip(&mut bad, bit);
            self.spoilt = Some(bad);
        }
        self.written = Some(0);
    }
}

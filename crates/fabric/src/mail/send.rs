//! Sending: header, payload in steps, tail.

use super::{Fault, Idle, Mail, Reason};
use crate::error::FabricError;
use crate::frame::{Header, Tail};
use crate::op::Task;
use std::hash::Hasher;
use std::io::IoSlice;
use twox_hash::XxHash3_64;

impl Mail {
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
            self.keep_room(peer, bytes)?;
            self.waiting.entry(stream).or_default().push_back((header, pieces.concat()));
            return Ok(());
        }
        let crosses = task.group.crosses(task.me, member);
        task.count.messages_sent += 1;
        *(if crosses { &mut task.count.inter_bytes_sent } else { &mut task.count.intra_bytes_sent }) += bytes;
        self.flight.sends(peer);
        if self.cut[peer as usize] {
            return Ok(());
        }
        if self.fault == Some(Fault::Lose) {
            self.fault = None;
            return Ok(());
        }
        self.send_frame(task, &header, pieces)
    }

    /// Each step is summed, then written: the first behind the header, the last before the tail.
    fn send_frame(&mut self, task: &mut Task, header: &Header, pieces: &[&[u8]]) -> Result<(), FabricError> {
        let mut head = header.encode();
        if let Some(Fault::FlipHeaderBit(bit)) = self.fault {
            self.fault = None;
            flip(&mut head, bit);
        }
        let size = self.link.step_bytes();
        let mut steps = pieces.iter().flat_map(|piece| piece.chunks(size)).peekable();
        let mut head = &head[..];
        // A message of one step needs no running sum, which takes longer to set up.
        let mut running = None;
        while let Some(step) = steps.next() {
            let mut sum = 0;
            if header.checksum {
                if steps.peek().is_none() && running.is_none() {
                    sum = XxHash3_64::oneshot(step);
                } else {
                    let state = running.get_or_insert_with(|| XxHash3_64::with_seed(0));
                    state.write(step);
                    if steps.peek().is_none() {
                        sum = state.finish();
                    }
                }
            }
            let tail = steps.peek().is_none().then(|| Tail::new(header, sum));
            let tail = tail.as_ref().map_or(&[][..], Tail::bytes);
            let spoilt = self.spoil(step);
            let step = spoilt.as_deref().unwrap_or(step);
            self.write_all(task, header, &mut [IoSlice::new(head), IoSlice::new(step), IoSlice::new(tail)])?;
            head = &[];
        }
        self.write_all(task, header, &mut [IoSlice::new(head)])
    }

    /// The step with a flipped bit, if a fault asks for that.
    fn spoil(&mut self, step: &[u8]) -> Option<Vec<u8>> {
        let Some(Fault::FlipPayloadBit(bit)) = self.fault else { return None };
        self.fault = None;
        let mut bad = step.to_vec();
        flip(&mut bad, bit);
        Some(bad)
    }

    fn write_all(&mut self, task: &mut Task, header: &Header, pieces: &mut [IoSlice]) -> Result<(), FabricError> {
        let mut idle = Idle::default();
        let mut rest = pieces;
        // Drops empty pieces in front.
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            self.abort.check()?;
            let ticket = self.link.ticket();
            let took = self.link.write(header.target, rest).map_err(|d| task.gone(header.target, d))?;
            IoSlice::advance_slices(&mut rest, took);
            if took > 0 || self.drain(task, None)? {
                self.over(task, &mut idle);
                continue;
            }
            let peer = header.target;
            let reason = Reason { peer, direction: "to send to", sequence: header.sequence, full: Some(peer) };
            self.pause(task, &mut idle, ticket, &reason)?;
        }
        self.over(task, &mut idle);
        Ok(())
    }
}

fn flip(bytes: &mut [u8], bit: u64) {
    let bit = bit % (bytes.len() as u64 * 8);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

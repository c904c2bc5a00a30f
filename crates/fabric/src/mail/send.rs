//! Sending: header, payload in steps, checksum.

use super::{Fault, Idle, Mail, Reason, STEP_BYTES};
use crate::error::FabricError;
use crate::frame::{HEADER_BYTES, Header};
use crate::op::Task;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// Payloads up to this size travel with their header in one write.
const SMALL_BYTES: usize = 16 << 10;

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
        if header.bytes <= SMALL_BYTES as u64 {
            small.clear();
            small.extend_from_slice(&head);
            for piece in pieces {
                small.extend_from_slice(piece);
            }
            if header.checksum {
                let (sum, end) = (xxh3_64(&small[HEADER_BYTES..]), small.len());
                small.extend_from_slice(&sum.to_le_bytes());
                self.spoil(&mut small[HEADER_BYTES..end]);
            } else {
                self.spoil(&mut small[HEADER_BYTES..]);
            }
            return self.write_all(task, header, small);
        }
        let mut sum = Xxh3Default::new();
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
            self.abort.check()?;
            let ticket = self.link.ticket();
            let took = self.link.write(header.target, rest).map_err(|d| task.gone(header.target, d))?;
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
}

fn flip(bytes: &mut [u8], bit: u64) {
    let bit = bit % (bytes.len() as u64 * 8);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

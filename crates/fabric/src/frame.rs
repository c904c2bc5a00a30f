//! The message header.
//!
//! ```text
//!  0 magic u32    4 version u16   6 operation u8   7 lane u8
//!  8 generation   12 group        16 sequence u64
//! 24 source u32   28 target u32   32 payload bytes u64
//! 40 flags u32    44 zero u32     48 zero u64      56 xxh3 of bytes 0..56
//! ```
//!
//! The payload follows, then the tail: (flag 1) the payload's xxh3 in 8 bytes, and zeros up
//! to the next multiple of 64 bytes. The sum stands behind the payload, so that one pass
//! over the data both sums and copies it; the zeros keep the numbers of the next message
//! aligned in shared memory. A message without payload is its header.

use serde::{Deserialize, Serialize};
use std::fmt;
use twox_hash::XxHash3_64;

/// Bytes of a header, and what the bytes of a whole message are a multiple of.
pub(crate) const HEADER_BYTES: usize = 64;
/// Bytes of the checksum behind a payload.
const SUM_BYTES: usize = 8;
/// The longest tail.
pub(crate) const TAIL_BYTES_MAX: usize = SUM_BYTES + HEADER_BYTES - 1;
const MAGIC: u32 = u32::from_le_bytes(*b"lkst");
const VERSION: u16 = 2;
const FLAG_CHECKSUM: u32 = 1;

/// The kind of an operation, as counters and errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// [`crate::Endpoint::send`] and `send_bytes`.
    Send,
    /// [`crate::Endpoint::recv`] and `recv_bytes`.
    Receive,
    /// [`crate::Endpoint::reduce_scatter`].
    ReduceScatter,
    /// [`crate::Endpoint::all_gather`], in place or not.
    AllGather,
    /// [`crate::Endpoint::all_gather_bytes`].
    AllGatherBytes,
    /// [`crate::Endpoint::all_reduce`], both halves.
    AllReduce,
    /// [`crate::Endpoint::broadcast`].
    Broadcast,
    /// [`crate::Endpoint::barrier`].
    Barrier,
    /// [`crate::Endpoint::all_to_all`].
    AllToAll,
}

impl Operation {
    /// The kind that travels in the header: a send and a receive are one point-to-point.
    pub(crate) fn wire(self) -> u8 {
        match self {
            Self::Send | Self::Receive => 1,
            Self::ReduceScatter => 2,
            Self::AllGather => 3,
            Self::AllGatherBytes => 4,
            Self::AllReduce => 5,
            Self::Broadcast => 6,
            Self::Barrier => 7,
            Self::AllToAll => 8,
        }
    }

    /// The name of a kind found in a header.
    pub(crate) fn wire_name(wire: u8) -> String {
        match wire {
            1 => "point-to-point".into(),
            2 => Self::ReduceScatter.to_string(),
            3 => Self::AllGather.to_string(),
            4 => Self::AllGatherBytes.to_string(),
            5 => Self::AllReduce.to_string(),
            6 => Self::Broadcast.to_string(),
            7 => Self::Barrier.to_string(),
            8 => Self::AllToAll.to_string(),
            other => format!("unknown kind {other}"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "recv",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::AllGatherBytes => "all_gather_bytes",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::AllToAll => "all_to_all",
        })
    }
}

/// One message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub operation: u8,
    /// A stream inside a group, in which no message overtakes another; see `route`.
    pub lane: u8,
    pub generation: u32,
    pub group: u32,
    /// Counted from 0 per (source, target, group, lane).
    pub sequence: u64,
    pub source: u32,
    pub target: u32,
    pub bytes: u64,
    pub checksum: bool,
}

/// A header that cannot be read: the field, what was expected, what came.
pub(crate) type BadHeader = (&'static str, String, String);

impl Header {
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6] = self.operation;
        out[7] = self.lane;
        out[8..12].copy_from_slice(&self.generation.to_le_bytes());
        out[12..16].copy_from_slice(&self.group.to_le_bytes());
        out[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        out[24..28].copy_from_slice(&self.source.to_le_bytes());
        out[28..32].copy_from_slice(&self.target.to_le_bytes());
        out[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        out[40..44].copy_from_slice(&(if self.checksum { FLAG_CHECKSUM } else { 0 }).to_le_bytes());
        let sum = XxHash3_64::oneshot(&out[..56]);
        out[56..64].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub fn decode(raw: &[u8; HEADER_BYTES]) -> Result<Self, BadHeader> {
        let u32_at = |at: usize| u32::from_le_bytes(raw[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(raw[at..at + 8].try_into().expect("8 bytes"));
        if u32_at(0) != MAGIC {
            return Err(("magic", format!("{MAGIC:#010x}"), format!("{:#010x}", u32_at(0))));
        }
        let version = u16::from_le_bytes([raw[4], raw[5]]);
        if version != VERSION {
            return Err(("version", VERSION.to_string(), version.to_string()));
        }
        let (sum, got) = (XxHash3_64::oneshot(&raw[..56]), u64_at(56));
        if sum != got {
            return Err(("header checksum", format!("{sum:#018x}"), format!("{got:#018x}")));
        }
        Ok(Self {
            operation: raw[6],
            lane: raw[7],
            generation: u32_at(8),
            group: u32_at(12),
            sequence: u64_at(16),
            source: u32_at(24),
            target: u32_at(28),
            bytes: u64_at(32),
            checksum: u32_at(40) & FLAG_CHECKSUM != 0,
        })
    }
}

/// The bytes behind a payload.
pub(crate) struct Tail {
    raw: [u8; TAIL_BYTES_MAX],
    len: usize,
}

impl Tail {
    /// The tail of the message of `header`, whose payload sums up to `sum`.
    pub fn new(header: &Header, sum: u64) -> Self {
        let mut raw = [0; TAIL_BYTES_MAX];
        if header.checksum {
            raw[..SUM_BYTES].copy_from_slice(&sum.to_le_bytes());
        }
        Self { raw, len: Self::len(header) }
    }

    /// Bytes of the tail of the message of `header`.
    pub fn len(header: &Header) -> usize {
        if header.bytes == 0 {
            return 0;
        }
        let least = if header.checksum { SUM_BYTES } else { 0 };
        let over = (header.bytes as usize + least) % HEADER_BYTES;
        least + (HEADER_BYTES - over) % HEADER_BYTES
    }

    pub fn bytes(&self) -> &[u8] {
        &self.raw[..self.len]
    }

    /// The payload's sum, if the tail that came carries one.
    pub fn sum(header: &Header, raw: &[u8]) -> Option<u64> {
        let sum = raw.get(..SUM_BYTES).filter(|_| header.checksum)?;
        Some(u64::from_le_bytes(sum.try_into().expect("8 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire_and_any_flipped_bit_is_seen() {
        let header = Header {
            operation: 2,
            lane: 1,
            generation: 7,
            group: 9,
            sequence: u64::MAX - 3,
            source: 5,
            target: 6,
            bytes: 1 << 40,
            checksum: true,
        };
        let wire = header.encode();
        assert_eq!(Header::decode(&wire), Ok(header));
        for bytes in 0..200 {
            for checksum in [false, true] {
                let header = Header { bytes, checksum, ..header };
                let tail = Tail::new(&header, 9);
                assert_eq!((HEADER_BYTES + bytes as usize + tail.bytes().len()) % HEADER_BYTES, 0);
                assert!(tail.bytes().len() <= TAIL_BYTES_MAX);
                assert_eq!(Tail::sum(&header, tail.bytes()), (checksum && bytes > 0).then_some(9));
            }
        }
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = wire;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
    }
}

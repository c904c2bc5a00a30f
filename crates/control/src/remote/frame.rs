//! Bytes on the link: `length u32 | tag 16 bytes | payload`, little endian. The tag is a keyed BLAKE3 hash over the frame's number in
//! its direction and the payload, so a frame that was changed, repeated, left out or made up is refused. Pure.

use std::fmt;

/// Bytes before the payload.
pub const HEAD: usize = 20;
const TAG: usize = 16;

/// Why a link ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadFrame {
    /// It says that it is longer than allowed.
    Oversize {
        /// Bytes that it claims.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The tag is not that of this frame on this link.
    Tag,
}

impl fmt::Display for BadFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Oversize { bytes, limit } => write!(f, "a frame of {bytes} bytes, the limit is {limit}"),
            Self::Tag => f.write_str("a frame that was not made by the other side of this link, or was changed"),
        }
    }
}

fn tag(key: &[u8; 32], number: u64, payload: &[u8]) -> [u8; TAG] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&number.to_le_bytes()).update(payload);
    let mut out = [0; TAG];
    hasher.finalize_xof().fill(&mut out);
    out
}

/// True if both are the same; the time that it takes does not tell where they differ.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b))) == 0
}

/// Makes the frames of one direction of a link.
pub struct Sealer {
    key: [u8; 32],
    next: u64,
}

impl Sealer {
    /// With the direction's key.
    pub fn new(key: [u8; 32]) -> Self {
        Self { key, next: 0 }
    }

    /// The next frame; `payload` is within the limit of the other side.
    pub fn seal(&mut self, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::with_capacity(HEAD + payload.len());
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(tag(&self.key, self.next, payload));
        frame.extend(payload);
        self.next += 1;
        frame
    }
}

/// Takes the frames of one direction of a link apart, however they were cut on the way.
pub struct Opener {
    key: [u8; 32],
    next: u64,
    limit: usize,
    bytes: Vec<u8>,
}

impl Opener {
    /// With the direction's key; payloads are at most `limit` bytes.
    pub fn new(key: [u8; 32], limit: usize) -> Self {
        Self { key, next: 0, limit, bytes: Vec::new() }
    }

    /// Takes in what came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole payload, if there is one.
    ///
    /// # Errors
    /// What ends the link; nothing after it is worth reading.
    pub fn open(&mut self) -> Result<Option<Vec<u8>>, BadFrame> {
        let Some(length) = self.bytes.first_chunk::<4>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*length) as usize;
        if bytes > self.limit {
            return Err(BadFrame::Oversize { bytes, limit: self.limit });
        }
        if self.bytes.len() < HEAD + bytes {
            return Ok(None);
        }
        let payload = self.bytes[HEAD..HEAD + bytes].to_vec();
        if !same(&self.bytes[4..HEAD], &tag(&self.key, self.next, &payload)) {
            return Err(BadFrame::Tag);
        }
        self.next += 1;
        self.bytes.drain(..HEAD + bytes);
        Ok(Some(payload))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 300;

    proptest! {
        #[test]
        fn what_is_sealed_comes_out_however_it_is_cut(
            words in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..LIMIT), 0..8),
            cut in 1usize..64,
        ) {
            let (mut sealer, mut opener) = (Sealer::new([5; 32]), Opener::new([5; 32], LIMIT));
            let bytes: Vec<u8> = words.iter().flat_map(|word| sealer.seal(word)).collect();
            let mut out = Vec::new();
            for part in bytes.chunks(cut) {
                opener.push(part);
                while let Some(word) = opener.open().unwrap() {
                    out.push(word);
                }
            }
            prop_assert_eq!(out, words);
        }

        #[test]
        fn noise_is_never_a_frame(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut opener = Opener::new([5; 32], LIMIT);
            opener.push(&bytes);
            prop_assert!(!matches!(opener.open(), Ok(Some(_))));
        }

        #[test]
        fn a_changed_bit_is_found(word in proptest::collection::vec(any::<u8>(), 1..64), at in any::<usize>(), bit in 0u8..8) {
            let mut frame = Sealer::new([5; 32]).seal(&word);
            let at = at % frame.len();
            frame[at] ^= 1 << bit;
            let mut opener = Opener::new([5; 32], LIMIT);
            opener.push(&frame);
            // A length that grew waits for more.
            prop_assert!(!matches!(opener.open(), Ok(Some(_))));
        }
    }

    #[test]
    fn a_frame_repeated_left_out_or_of_another_link_is_refused() {
        let mut sealer = Sealer::new([5; 32]);
        let (first, second) = (sealer.seal(b"one"), sealer.seal(b"two"));
        let opened = |key: u8, frames: &[&[u8]]| {
            let mut opener = Opener::new([key; 32], LIMIT);
            frames.iter().for_each(|frame| opener.push(frame));
            std::iter::from_fn(|| opener.open().transpose()).take(2).collect::<Result<Vec<_>, _>>()
        };
        assert_eq!(opened(5, &[&first, &second]).unwrap().len(), 2);
        assert_eq!(opened(5, &[&first, &first]), Err(BadFrame::Tag));
        assert_eq!(opened(5, &[&second]), Err(BadFrame::Tag));
        assert_eq!(opened(6, &[&first]), Err(BadFrame::Tag));
    }

    #[test]
    fn an_oversized_frame_is_refused_by_its_length_alone() {
        let mut opener = Opener::new([5; 32], LIMIT);
        opener.push(&(LIMIT as u32 + 1).to_le_bytes());
        let error = opener.open().unwrap_err();
        assert_eq!(error.to_string(), "a frame of 301 bytes, the limit is 300");
    }
}

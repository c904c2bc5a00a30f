//! Who may come in.
//!
//! The token guards against accidents (another run, another generation, noise on the port);
//! it travels in the clear, so it is no defence against someone who reads the network.
//!
//! ```text
//! hello:  0 magic u64   8 version u32  12 generation u32  16 source u32  20 target u32
//!        24 world u32  28 zero u32     32 token           64 xxh3 of bytes 0..64
//! reply:  0 magic u64   8 verdict u32  12 zero u32        16 xxh3 of bytes 0..16
//! ```

use std::fmt;
use twox_hash::XxHash3_64;

pub(super) const HELLO_BYTES: usize = 72;
pub(super) const REPLY_BYTES: usize = 24;
const HELLO_MAGIC: u64 = u64::from_le_bytes(*b"lockhelo");
const REPLY_MAGIC: u64 = u64::from_le_bytes(*b"lockrepl");
const VERSION: u32 = 1;

/// What a caller says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub generation: u32,
    pub source: u32,
    pub target: u32,
    pub world: u32,
    pub token: [u8; 32],
}

/// The answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Welcome,
    Token,
    Generation(u32),
    World,
    Target,
    Taken,
    Noise,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Welcome => f.write_str("welcome"),
            Self::Token => f.write_str("wrong token: it belongs to another run"),
            Self::Generation(here) => write!(f, "wrong generation: the refusing rank is in {here}"),
            Self::World => f.write_str("wrong number of ranks"),
            Self::Target => f.write_str("it looked for another rank: the address list is out of order"),
            Self::Taken => f.write_str("a rank of that number is connected or impossible"),
            Self::Noise => f.write_str("it does not speak this protocol"),
        }
    }
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0u8; HELLO_BYTES];
        out[0..8].copy_from_slice(&HELLO_MAGIC.to_le_bytes());
        let words = [VERSION, self.generation, self.source, self.target, self.world];
        for (i, word) in words.into_iter().enumerate() {
            out[8 + 4 * i..12 + 4 * i].copy_from_slice(&word.to_le_bytes());
        }
        out[32..64].copy_from_slice(&self.token);
        let sum = XxHash3_64::oneshot(&out[..64]);
        out[64..72].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// `None` if the bytes are no hello of this version.
    pub fn decode(raw: &[u8; HELLO_BYTES]) -> Option<Self> {
        let word = |i: usize| u32::from_le_bytes(raw[8 + 4 * i..12 + 4 * i].try_into().expect("4 bytes"));
        let sound = raw[0..8] == HELLO_MAGIC.to_le_bytes()
            && raw[64..72] == XxHash3_64::oneshot(&raw[..64]).to_le_bytes()
            && word(0) == VERSION;
        sound.then(|| Self {
            generation: word(1),
            source: word(2),
            target: word(3),
            world: word(4),
            token: raw[32..64].try_into().expect("32 bytes"),
        })
    }

    /// Judges `caller` from the place of `self` (whose source and target are this rank).
    /// `free`: nobody with the caller's number is connected.
    pub fn judge(&self, caller: &Self, free: bool) -> Verdict {
        // All bytes are compared, so that the time does not tell how many were right.
        let differing = self.token.iter().zip(&caller.token).fold(0, |sum, (a, b)| sum | (a ^ b));
        if differing != 0 {
            Verdict::Token
        } else if caller.generation != self.generation {
            Verdict::Generation(self.generation)
        } else if caller.world != self.world {
            Verdict::World
        } else if caller.target != self.source {
            Verdict::Target
        } else if !free || caller.source <= self.source {
            Verdict::Taken
        } else {
            Verdict::Welcome
        }
    }
}

impl Verdict {
    pub fn encode(self) -> [u8; REPLY_BYTES] {
        let (code, detail) = match self {
            Self::Welcome => (0u32, 0),
            Self::Token => (1, 0),
            Self::Generation(here) => (2, here),
            Self::World => (3, 0),
            Self::Target => (4, 0),
            Self::Taken => (5, 0),
            Self::Noise => (6, 0),
        };
        let mut out = [0u8; REPLY_BYTES];
        out[0..8].copy_from_slice(&REPLY_MAGIC.to_le_bytes());
        out[8..12].copy_from_slice(&code.to_le_bytes());
        out[12..16].copy_from_slice(&detail.to_le_bytes());
        let sum = XxHash3_64::oneshot(&out[..16]);
        out[16..24].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub fn decode(raw: &[u8; REPLY_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes(raw[at..at + 4].try_into().expect("4 bytes"));
        if raw[0..8] != REPLY_MAGIC.to_le_bytes() || raw[16..24] != XxHash3_64::oneshot(&raw[..16]).to_le_bytes() {
            return Self::Noise;
        }
        match word(8) {
            0 => Self::Welcome,
            1 => Self::Token,
            2 => Self::Generation(word(12)),
            3 => Self::World,
            4 => Self::Target,
            5 => Self::Taken,
            _ => Self::Noise,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(source: u32, target: u32) -> Hello {
        Hello { generation: 3, source, target, world: 4, token: [7; 32] }
    }

    #[test]
    fn each_difference_has_its_verdict() {
        let here = hello(1, 1);
        let caller = hello(2, 1);
        assert_eq!(here.judge(&caller, true), Verdict::Welcome);
        assert_eq!(here.judge(&caller, false), Verdict::Taken);
        assert_eq!(here.judge(&hello(0, 1), true), Verdict::Taken);
        assert_eq!(here.judge(&hello(2, 0), true), Verdict::Target);
        assert_eq!(here.judge(&Hello { world: 5, ..caller.clone() }, true), Verdict::World);
        assert_eq!(here.judge(&Hello { generation: 2, ..caller.clone() }, true), Verdict::Generation(3));
        let mut stranger = caller;
        stranger.token[31] ^= 1;
        assert_eq!(here.judge(&stranger, true), Verdict::Token);
    }

    #[test]
    fn hello_and_reply_survive_the_wire_and_noise_does_not() {
        let hello = hello(2, 1);
        let raw = hello.encode();
        assert_eq!(Hello::decode(&raw), Some(hello));
        for bit in 0..HELLO_BYTES * 8 {
            let mut bad = raw;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Hello::decode(&bad), None, "bit {bit}");
        }
        for verdict in [Verdict::Welcome, Verdict::Token, Verdict::Generation(9), Verdict::World] {
            let mut raw = verdict.encode();
            assert_eq!(Verdict::decode(&raw), verdict);
            raw[8] ^= 1;
            assert_eq!(Verdict::decode(&raw), Verdict::Noise);
        }
    }
}

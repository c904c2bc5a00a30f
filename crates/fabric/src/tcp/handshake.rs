//! Who may come in. Both sides prove that they have the world's token without sending it: a proof is the keyed BLAKE3 hash over
//! everything that was said before, with a nonce of each side in it. Pure.
//!
//! ```text
//! greeting (who listens): 0 magic u64   8 version u32  12 zero u32   16 nonce 32   48 xxh3 of bytes 0..48
//! hello    (who calls):   0 magic u64   8 version u32  12 generation u32  16 source u32  20 target u32
//!                        24 world u32  28 zero u32     32 nonce 32   64 proof 32   96 xxh3 of bytes 0..96
//! reply    (who listens): 0 magic u64   8 verdict u32  12 detail u32 16 proof 32   48 xxh3 of bytes 0..48
//! ```
//!
//! It keeps strangers out of a world while it is formed. What travels afterwards is neither encrypted nor authenticated: its
//! checksums find accidents.

use std::fmt;
use twox_hash::XxHash3_64;

pub(super) const GREETING_BYTES: usize = 56;
pub(super) const HELLO_BYTES: usize = 104;
pub(super) const REPLY_BYTES: usize = 56;
const GREETING_MAGIC: u64 = u64::from_le_bytes(*b"lockgrtg");
const HELLO_MAGIC: u64 = u64::from_le_bytes(*b"lockhelo");
const REPLY_MAGIC: u64 = u64::from_le_bytes(*b"lockrepl");
const VERSION: u32 = 2;

/// Of a world; whoever has it belongs to it.
pub(super) type Token = [u8; 32];
/// Random bytes that were never used before.
pub(super) type Nonce = [u8; 32];

/// Whom a caller says to be, and whom it looks for; of who listens, source and target are its own rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub generation: u32,
    pub source: u32,
    pub target: u32,
    pub world: u32,
}

/// What a caller says to a greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub claim: Claim,
    pub nonce: Nonce,
    proof: [u8; 32],
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

/// What `who` shows to know `token`.
fn prove(token: &Token, who: &[u8; 8], said: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(token);
    hasher.update(who);
    for part in said {
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// Puts the checksum behind everything else.
fn seal<const N: usize>(mut out: [u8; N]) -> [u8; N] {
    let sum = XxHash3_64::oneshot(&out[..N - 8]);
    out[N - 8..].copy_from_slice(&sum.to_le_bytes());
    out
}

/// True if the checksum is right and it begins with `magic`.
fn is_sound(raw: &[u8], magic: u64) -> bool {
    let (said, sum) = raw.split_at(raw.len() - 8);
    said[..8] == magic.to_le_bytes() && sum == XxHash3_64::oneshot(said).to_le_bytes()
}

fn word(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(raw[at..at + 4].try_into().expect("4 bytes"))
}

fn bytes_at(raw: &[u8], at: usize) -> [u8; 32] {
    raw[at..at + 32].try_into().expect("32 bytes")
}

/// What is said to a caller first.
pub(super) fn greeting(nonce: &Nonce) -> [u8; GREETING_BYTES] {
    let mut out = [0; GREETING_BYTES];
    out[..8].copy_from_slice(&GREETING_MAGIC.to_le_bytes());
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[16..48].copy_from_slice(nonce);
    seal(out)
}

/// The nonce of a greeting; `None` if the bytes are none of this version.
pub(super) fn greeted(raw: &[u8; GREETING_BYTES]) -> Option<Nonce> {
    (is_sound(raw, GREETING_MAGIC) && word(raw, 8) == VERSION).then(|| bytes_at(raw, 16))
}

impl Claim {
    /// What to say to who greeted with `theirs`.
    pub fn hello(self, token: &Token, theirs: &Nonce, nonce: Nonce) -> Hello {
        let mut hello = Hello { claim: self, nonce, proof: [0; 32] };
        hello.proof = hello.expected(token, theirs);
        hello
    }

    /// Judges `caller`, who was greeted with `nonce`. `free`: nobody with the caller's number is connected.
    pub fn judge(&self, token: &Token, nonce: &Nonce, caller: &Hello, free: bool) -> Verdict {
        let claim = &caller.claim;
        if !same(&caller.proof, &caller.expected(token, nonce)) {
            Verdict::Token
        } else if claim.generation != self.generation {
            Verdict::Generation(self.generation)
        } else if claim.world != self.world {
            Verdict::World
        } else if claim.target != self.source {
            Verdict::Target
        } else if !free || claim.source <= self.source {
            Verdict::Taken
        } else {
            Verdict::Welcome
        }
    }
}

/// All bytes are compared, so that the time does not tell how many were right.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b))) == 0
}

impl Hello {
    fn head(&self) -> [u8; 64] {
        let Claim { generation, source, target, world } = self.claim;
        let mut out = [0; 64];
        out[..8].copy_from_slice(&HELLO_MAGIC.to_le_bytes());
        for (i, word) in [VERSION, generation, source, target, world].into_iter().enumerate() {
            out[8 + 4 * i..12 + 4 * i].copy_from_slice(&word.to_le_bytes());
        }
        out[32..].copy_from_slice(&self.nonce);
        out
    }

    fn expected(&self, token: &Token, theirs: &Nonce) -> [u8; 32] {
        prove(token, b"caller..", &[theirs, &self.head()])
    }

    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..64].copy_from_slice(&self.head());
        out[64..96].copy_from_slice(&self.proof);
        seal(out)
    }

    /// `None` if the bytes are no hello of this version.
    pub fn decode(raw: &[u8; HELLO_BYTES]) -> Option<Self> {
        let sound = is_sound(raw, HELLO_MAGIC) && word(raw, 8) == VERSION && word(raw, 28) == 0;
        sound.then(|| Self {
            claim: Claim {
                generation: word(raw, 12),
                source: word(raw, 16),
                target: word(raw, 20),
                world: word(raw, 24),
            },
            nonce: bytes_at(raw, 32),
            proof: bytes_at(raw, 64),
        })
    }
}

impl Verdict {
    /// As who greeted with `nonce` says it to `hello`. Who has not shown that he knows the token gets nothing made with it.
    pub fn encode(self, token: &Token, nonce: &Nonce, hello: &Hello) -> [u8; REPLY_BYTES] {
        let (code, detail) = match self {
            Self::Welcome => (0u32, 0),
            Self::Token => (1, 0),
            Self::Generation(here) => (2, here),
            Self::World => (3, 0),
            Self::Target => (4, 0),
            Self::Taken => (5, 0),
            Self::Noise => (6, 0),
        };
        let mut out = [0; REPLY_BYTES];
        out[..8].copy_from_slice(&REPLY_MAGIC.to_le_bytes());
        out[8..12].copy_from_slice(&code.to_le_bytes());
        out[12..16].copy_from_slice(&detail.to_le_bytes());
        if !matches!(self, Self::Token | Self::Noise) {
            let proof = prove(token, b"listener", &[nonce, &hello.nonce, &out[..16]]);
            out[16..48].copy_from_slice(&proof);
        }
        seal(out)
    }

    /// As who was greeted with `nonce` and said `hello` understands it: nobody is welcomed by who does not have the token.
    pub fn decode(raw: &[u8; REPLY_BYTES], token: &Token, nonce: &Nonce, hello: &Hello) -> Self {
        if !is_sound(raw, REPLY_MAGIC) {
            return Self::Noise;
        }
        let proof = prove(token, b"listener", &[nonce, &hello.nonce, &raw[..16]]);
        match word(raw, 8) {
            0 | 2..=5 if !same(&bytes_at(raw, 16), &proof) => Self::Token,
            0 => Self::Welcome,
            1 => Self::Token,
            2 => Self::Generation(word(raw, 12)),
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

    const TOKEN: Token = [7; 32];
    const THEIRS: Nonce = [1; 32];

    fn claim(source: u32, target: u32) -> Claim {
        Claim { generation: 3, source, target, world: 4 }
    }

    fn hello(source: u32, target: u32) -> Hello {
        claim(source, target).hello(&TOKEN, &THEIRS, [2; 32])
    }

    #[test]
    fn each_difference_has_its_verdict() {
        let judge = |caller: &Hello, free| claim(1, 1).judge(&TOKEN, &THEIRS, caller, free);
        assert_eq!(judge(&hello(2, 1), true), Verdict::Welcome);
        assert_eq!(judge(&hello(2, 1), false), Verdict::Taken);
        assert_eq!(judge(&hello(0, 1), true), Verdict::Taken);
        assert_eq!(judge(&hello(2, 0), true), Verdict::Target);
        let said = |claim: Claim| claim.hello(&TOKEN, &THEIRS, [2; 32]);
        assert_eq!(judge(&said(Claim { world: 5, ..claim(2, 1) }), true), Verdict::World);
        assert_eq!(judge(&said(Claim { generation: 2, ..claim(2, 1) }), true), Verdict::Generation(3));
        let mut token = TOKEN;
        token[31] ^= 1;
        assert_eq!(judge(&claim(2, 1).hello(&token, &THEIRS, [2; 32]), true), Verdict::Token);
        // What was overheard fits no other greeting, and no other claim.
        assert_eq!(claim(1, 1).judge(&TOKEN, &[3; 32], &hello(2, 1), true), Verdict::Token);
        assert_eq!(judge(&Hello { claim: claim(3, 1), ..hello(2, 1) }, true), Verdict::Token);
    }

    #[test]
    fn nobody_is_welcomed_by_who_does_not_have_the_token() {
        let hello = hello(2, 1);
        let reply = Verdict::Welcome.encode(&[8; 32], &THEIRS, &hello);
        assert_eq!(Verdict::decode(&reply, &TOKEN, &THEIRS, &hello), Verdict::Token);
        // And the token itself is in nothing that is said.
        let said =
            [&greeting(&THEIRS)[..], &hello.encode(), &Verdict::Welcome.encode(&TOKEN, &THEIRS, &hello)].concat();
        assert!(!said.windows(32).any(|part| part == TOKEN));
    }

    #[test]
    fn greeting_hello_and_reply_survive_the_wire_and_noise_does_not() {
        let flipped = |bit: usize, raw: &mut [u8]| raw[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(greeted(&greeting(&THEIRS)), Some(THEIRS));
        for bit in 0..GREETING_BYTES * 8 {
            let mut bad = greeting(&THEIRS);
            flipped(bit, &mut bad);
            assert_eq!(greeted(&bad), None, "bit {bit}");
        }
        let hello = hello(2, 1);
        assert_eq!(Hello::decode(&hello.encode()), Some(hello.clone()));
        for bit in 0..HELLO_BYTES * 8 {
            let mut bad = hello.encode();
            flipped(bit, &mut bad);
            assert_eq!(Hello::decode(&bad), None, "bit {bit}");
        }
        for verdict in [Verdict::Welcome, Verdict::Token, Verdict::Generation(9), Verdict::World] {
            let mut raw = verdict.encode(&TOKEN, &THEIRS, &hello);
            assert_eq!(Verdict::decode(&raw, &TOKEN, &THEIRS, &hello), verdict);
            raw[8] ^= 1;
            assert_eq!(Verdict::decode(&raw, &TOKEN, &THEIRS, &hello), Verdict::Noise);
        }
    }
}

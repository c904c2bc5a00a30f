//! Who may speak. Both sides prove that they have the token without sending it; from both nonces come the keys of the link. Pure.
//!
//! ```text
//! challenge (controller): 0 magic 8   8 version u32  12 epoch u64  20 nonce 32                        52 bytes
//! answer    (agent):      0 magic 8   8 version u32  12 nonce 32   44 proof 32                        76 bytes
//! verdict   (controller): 0 magic 8   8 code u32     12 detail u32 16 proof 32                        48 bytes
//! ```
//!
//! A proof is the keyed BLAKE3 hash over who speaks and everything said before it. Messages are of one size, so none is too large.

use std::fmt;

use super::VERSION;
use super::frame::same;

/// Bytes of a challenge.
pub const CHALLENGE: usize = 52;
/// Bytes of an answer.
pub const ANSWER: usize = 76;
/// Bytes of a verdict.
pub const VERDICT: usize = 48;
/// A shorter token could be guessed.
pub const TOKEN_MIN: usize = 16;
const CHALLENGE_MAGIC: &[u8; 8] = b"lockctrl";
const ANSWER_MAGIC: &[u8; 8] = b"lockagnt";
const VERDICT_MAGIC: &[u8; 8] = b"lockverd";

/// What is made of a token; the token itself is not kept.
#[derive(Clone, Copy)]
pub struct Key([u8; 32]);

/// Keys of the two directions of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkKeys {
    /// From the agent to the controller.
    pub up: [u8; 32],
    /// From the controller to the agent.
    pub down: [u8; 32],
}

/// Why a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No such protocol.
    Noise,
    /// Another version of it.
    Version(u32),
    /// Another token.
    Token,
    /// The controller is older than one that the agent has obeyed.
    Epoch {
        /// Its epoch.
        theirs: u64,
        /// The newest known.
        known: u64,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noise => f.write_str("it does not speak this protocol"),
            Self::Version(theirs) => {
                write!(f, "it speaks version {theirs}, this side version {VERSION}; use one release on all hosts")
            }
            Self::Token => f.write_str("wrong token: give both sides the same --token-file"),
            Self::Epoch { theirs, known } => {
                write!(f, "a controller of epoch {theirs}, but one of epoch {known} has taken over")
            }
        }
    }
}

impl Key {
    /// Of the content of a token file.
    pub fn new(token: &[u8]) -> Self {
        Self(blake3::derive_key("lockstep 2026-11 control link", token))
    }

    /// A secret for a purpose, such as the fabric of one world.
    pub fn secret(&self, purpose: &str) -> [u8; 32] {
        self.hash("secret", &[purpose.as_bytes()])
    }

    fn hash(&self, who: &str, said: &[&[u8]]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[who.len() as u8]).update(who.as_bytes());
        for part in said {
            hasher.update(part);
        }
        hasher.finalize().into()
    }

    fn keys(&self, challenge: &[u8], answer: &[u8]) -> LinkKeys {
        LinkKeys { up: self.hash("up", &[challenge, answer]), down: self.hash("down", &[challenge, answer]) }
    }
}

fn put<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    parts.concat().try_into().expect("parts of the stated sizes")
}

fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(raw[at..at + 4].try_into().expect("4 bytes"))
}

/// The controller's side.
pub struct Host {
    key: Key,
    challenge: [u8; CHALLENGE],
}

impl Host {
    /// A controller of `epoch`, with a nonce that was never used before.
    pub fn new(key: Key, epoch: u64, nonce: [u8; 32]) -> Self {
        let challenge = put(&[CHALLENGE_MAGIC, &VERSION.to_le_bytes(), &epoch.to_le_bytes(), &nonce]);
        Self { key, challenge }
    }

    /// What to say first.
    pub fn challenge(&self) -> &[u8; CHALLENGE] {
        &self.challenge
    }

    /// What to say to an answer, none to noise, and whether the caller is let in.
    pub fn judge(&self, answer: &[u8; ANSWER]) -> (Option<[u8; VERDICT]>, Result<LinkKeys, Refusal>) {
        let said = |code: u32, detail: u32| {
            let head: [u8; 16] = put(&[VERDICT_MAGIC, &code.to_le_bytes(), &detail.to_le_bytes()]);
            // Who has not shown that he knows the token is told nothing that was made with it.
            let proof = match code {
                0 => self.key.hash("controller", &[&self.challenge, answer, &head]),
                _ => [0; 32],
            };
            Some(put(&[&head, &proof]))
        };
        if answer[..8] != *ANSWER_MAGIC {
            return (None, Err(Refusal::Noise));
        }
        let version = u32_at(answer, 8);
        if version != VERSION {
            return (said(2, VERSION), Err(Refusal::Version(version)));
        }
        if !same(&answer[44..], &self.key.hash("agent", &[&self.challenge, &answer[..44]])) {
            return (said(1, 0), Err(Refusal::Token));
        }
        (said(0, 0), Ok(self.key.keys(&self.challenge, answer)))
    }
}

/// The agent's side, after it heard the challenge.
pub struct Guest {
    key: Key,
    challenge: [u8; CHALLENGE],
    answer: [u8; ANSWER],
    known: u64,
}

impl Guest {
    /// `known`: the highest epoch of a controller that was obeyed.
    ///
    /// # Errors
    /// What the other side is not.
    pub fn new(key: Key, challenge: [u8; CHALLENGE], nonce: [u8; 32], known: u64) -> Result<Self, Refusal> {
        if challenge[..8] != *CHALLENGE_MAGIC {
            return Err(Refusal::Noise);
        }
        let version = u32_at(&challenge, 8);
        if version != VERSION {
            return Err(Refusal::Version(version));
        }
        let head: [u8; 44] = put(&[ANSWER_MAGIC, &VERSION.to_le_bytes(), &nonce]);
        let proof = key.hash("agent", &[&challenge, &head]);
        Ok(Self { key, challenge, answer: put(&[&head, &proof]), known })
    }

    /// What to say.
    pub fn answer(&self) -> &[u8; ANSWER] {
        &self.answer
    }

    /// The epoch and the keys of the link, if the other side has the token, too, and nobody has taken over from it.
    ///
    /// # Errors
    /// What it is not.
    pub fn judge(&self, verdict: &[u8; VERDICT]) -> Result<(u64, LinkKeys), Refusal> {
        if verdict[..8] != *VERDICT_MAGIC {
            return Err(Refusal::Noise);
        }
        match u32_at(verdict, 8) {
            0 => {}
            1 => return Err(Refusal::Token),
            2 => return Err(Refusal::Version(u32_at(verdict, 12))),
            _ => return Err(Refusal::Noise),
        }
        let proof = self.key.hash("controller", &[&self.challenge, &self.answer, &verdict[..16]]);
        if !same(&verdict[16..], &proof) {
            return Err(Refusal::Token);
        }
        let theirs = u64::from_le_bytes(self.challenge[12..20].try_into().expect("8 bytes"));
        if theirs < self.known {
            return Err(Refusal::Epoch { theirs, known: self.known });
        }
        Ok((theirs, self.key.keys(&self.challenge, &self.answer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(token: &str) -> Key {
        Key::new(token.as_bytes())
    }

    fn talk(host: &Host, guest: &Guest) -> Result<(u64, LinkKeys), Refusal> {
        guest.judge(&host.judge(guest.answer()).0.unwrap())
    }

    #[test]
    fn who_has_the_token_gets_the_same_keys_and_each_link_its_own() {
        let host = Host::new(key("a long enough token"), 3, [1; 32]);
        let guest = Guest::new(key("a long enough token"), *host.challenge(), [2; 32], 3).unwrap();
        let keys = host.judge(guest.answer()).1.unwrap();
        assert_eq!(talk(&host, &guest), Ok((3, keys)));
        assert_ne!(keys.up, keys.down);
        let again = Host::new(key("a long enough token"), 3, [4; 32]);
        // An answer that was overheard fits no other challenge.
        assert_eq!(again.judge(guest.answer()).1, Err(Refusal::Token));
    }

    #[test]
    fn a_wrong_token_is_found_on_both_sides() {
        let host = Host::new(key("one"), 3, [1; 32]);
        let guest = Guest::new(key("two"), *host.challenge(), [2; 32], 0).unwrap();
        let (verdict, refused) = host.judge(guest.answer());
        assert_eq!(refused, Err(Refusal::Token));
        let mut verdict = verdict.unwrap();
        assert_eq!(guest.judge(&verdict), Err(Refusal::Token));
        // A controller without the token may say welcome.
        verdict[8] = 0;
        assert_eq!(guest.judge(&verdict), Err(Refusal::Token));
        assert!(verdict[16..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn an_older_controller_is_not_obeyed() {
        let host = Host::new(key("t"), 3, [1; 32]);
        let guest = Guest::new(key("t"), *host.challenge(), [2; 32], 4).unwrap();
        assert_eq!(talk(&host, &guest), Err(Refusal::Epoch { theirs: 3, known: 4 }));
    }

    #[test]
    fn a_changed_bit_of_any_message_is_found() {
        let host = Host::new(key("t"), 3, [1; 32]);
        for bit in 0..CHALLENGE * 8 {
            let mut challenge = *host.challenge();
            challenge[bit / 8] ^= 1 << (bit % 8);
            let Ok(guest) = Guest::new(key("t"), challenge, [2; 32], 0) else { continue };
            assert!(host.judge(guest.answer()).1.is_err(), "bit {bit}");
        }
        let guest = Guest::new(key("t"), *host.challenge(), [2; 32], 0).unwrap();
        for bit in 0..ANSWER * 8 {
            let mut answer = *guest.answer();
            answer[bit / 8] ^= 1 << (bit % 8);
            assert!(host.judge(&answer).1.is_err(), "bit {bit}");
        }
        for bit in 0..VERDICT * 8 {
            let mut verdict = host.judge(guest.answer()).0.unwrap();
            verdict[bit / 8] ^= 1 << (bit % 8);
            assert!(guest.judge(&verdict).is_err(), "bit {bit}");
        }
    }
}

//! Text to token sequences, the same for every split of the work.
//!
//! Which tokens stand at an index is a pure function of the run file and the text: no rank, no clock, no predecessor.
//!
//! - [`Dataset::open`] reads a source once: text files, the sources of the crates that the binary is built from, or
//!   a synthetic language of known entropy. Nothing is ever written.
//! - One file is one document. Tokens are bytes; an optional token [`EOD`] follows every document.
//! - The documents of a [`Split`] in their fixed order form one stream, cut every `seq` tokens into [`Sequence`]s.
//! - Training visits sequences in a seeded order that differs in each epoch; validation visits them in file order.
//!
//! The whole text lies in memory. It is read rather than mapped, so that a file that changes during a run changes
//! nothing in the run.

mod cargo;
mod dataset;
mod error;
mod holdout;
mod permute;
mod random;
#[cfg(test)]
mod scratch;
mod stream;
mod synthetic;
mod text;

pub use dataset::Dataset;
pub use error::DataError;

/// The target of a position that has none.
pub const IGNORE: u32 = u32::MAX;

/// The end-of-document token.
pub const EOD: u32 = 256;

/// The token of padding; its target is [`IGNORE`].
pub const PAD: u32 = 0;

/// One packed sequence of `seq` tokens; the four lists have that length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids: bytes, or [`EOD`].
    pub tokens: Vec<u32>,
    /// The token that follows in the stream, or [`IGNORE`]: at the end of the stream, on padding, and with masks on the
    /// last token of each document.
    pub targets: Vec<u32>,
    /// The position in this sequence where the document of each token begins: 0 for one that began in an earlier
    /// sequence, and everywhere without masks. With masks, padding is a document of its own.
    pub doc_start: Vec<u32>,
    /// Rotary position: the distance to `doc_start`.
    pub positions: Vec<u32>,
}

/// Which documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Those that the model learns from.
    Train,
    /// Those held out.
    Validation,
}

/// The text of `tokens`: bytes that are not UTF-8 become U+FFFD, [`EOD`] becomes `<eod>`, other ids are left out.
pub fn decode(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    for &token in tokens {
        match u8::try_from(token) {
            Ok(byte) => bytes.push(byte),
            Err(_) if token == EOD => bytes.extend_from_slice(b"<eod>"),
            Err(_) => {}
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_keeps_text_and_survives_everything_else() {
        assert_eq!(decode(&[104, 105, EOD, 195, 164, 255, 300, IGNORE]), "hi<eod>\u{e4}\u{fffd}");
        assert_eq!(decode(&[]), "");
    }
}

//! Text and tokens to sequences, the same for every split of the work.
//!
//! Which tokens stand at an index is a pure function of the run file and the data: no rank, no clock, no predecessor.
//!
//! - [`Dataset::open`] reads sources once: six novels in the binary, text files, the sources of the crates that the
//!   binary is built from, a synthetic language of known entropy, folders of tokens, Megatron files. Nothing is written.
//! - A file of text is one document and its bytes are tokens; an optional token [`EOD`] follows every document.
//! - The documents of a [`Split`] in their fixed order form one stream, cut every `seq` tokens into [`Sequence`]s, or
//!   are packed whole (`data.packing`).
//! - Training visits sequences in a seeded order that differs in each epoch; validation visits them in file order.
//! - A weighted mixture has an order of its own for each source, and says which source stands at an index.
//! - [`tokenize`] writes folders of tokens; [`stats`] looks at what a data set is like.
//!
//! Text lies in memory: it is read rather than mapped, so that a file that changes during a run changes nothing in
//! the run. Tokens are mapped: they may be larger than memory, and are not written again once their header is there.

mod austen;
mod bestfit;
mod cargo;
pub mod content;
mod dataset;
mod error;
pub mod folder;
mod holdout;
pub mod megatron;
mod mixture;
mod open;
mod permute;
mod random;
#[cfg(test)]
mod scratch;
mod speech;
pub mod stats;
mod store;
mod stream;
mod synthetic;
mod text;
pub mod tokenize;
#[cfg(feature = "tokenizers")]
pub mod tokenizer;

pub use dataset::Dataset;
pub use error::DataError;
pub use speech::Speech;

/// The target of a position that has none.
pub const IGNORE: u32 = u32::MAX;

/// The end-of-document token of text.
pub const EOD: u32 = 256;

/// The token of padding; its target is [`IGNORE`].
pub const PAD: u32 = 0;

/// One packed sequence of `seq` tokens; the lists have that length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids: of text, bytes or [`EOD`].
    pub tokens: Vec<u32>,
    /// The token that follows in the stream, or [`IGNORE`]: at the end of the stream, on padding, and with masks on the
    /// last token of each document.
    pub targets: Vec<u32>,
    /// The position in this sequence where the document of each token begins: 0 for one that began in an earlier
    /// sequence, and everywhere without masks. With masks, padding is a document of its own.
    pub doc_start: Vec<u32>,
    /// Rotary position: the distance to `doc_start`.
    pub positions: Vec<u32>,
    /// Bytes of text that each target stands for: 1 for a byte; for a token its part of its document's bytes, which
    /// sum to the document's; 0 for the end of a document, for [`IGNORE`], and where bytes are not known.
    pub target_bytes: Vec<u32>,
}

/// Which documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Those that the model learns from.
    Train,
    /// Those held out.
    Validation,
}

/// True if `path` is a folder of tokens or the prefix of Megatron files.
pub fn is_tokens(path: &std::path::Path) -> bool {
    folder::is_folder(path) || megatron::is_prefix(path)
}

/// True if `path` is a folder of tokens that names an end-of-document token.
pub fn has_eod(path: &std::path::Path) -> bool {
    folder::header(path, "PATH").is_ok_and(|header| header.eod.is_some())
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

//! `tokenizer.json` files: text to ids and back.
//!
//! The crate `tokenizers` reads the file and says what is right. It encodes a few megabytes a second, so the usual
//! shape of such files (byte-level BPE behind a splitting pattern) takes a shorter way through the module `fast`: the same
//! pattern in a faster engine, and a table of words that the crate encoded before.

mod eod;
mod fast;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenizers::Model;

use crate::DataError;
use crate::folder::TOKENIZER_FILES;
pub use eod::Eod;
use fast::{Fast, Words};

/// A tokenizer. Immutable; each thread encodes through an [`Encoder`] of its own.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    fast: Option<Fast>,
    path: PathBuf,
    hash: [u8; 32],
    ids: usize,
}

/// What of the file decides whether the fast way is right.
#[derive(Deserialize)]
struct Shape {
    normalizer: Option<serde_json::Value>,
    pre_tokenizer: Option<serde_json::Value>,
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: ModelShape,
}

#[derive(Deserialize)]
struct Added {
    content: String,
    /// It is looked for in the normalised text, in its own normalised form. Files always say; if one does not, the
    /// careful reading is this one.
    #[serde(default = "yes")]
    normalized: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
struct ModelShape {
    #[serde(rename = "type", default)]
    kind: String,
    dropout: Option<f32>,
}

impl Tokenizer {
    /// Reads the file at `path`. Truncation and padding that it asks for are left out: documents are encoded whole.
    ///
    /// # Errors
    /// A file that cannot be read or that is no tokenizer; one that drops merges at random.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let bytes = std::fs::read(path).map_err(|source| DataError::Read {
            path: path.to_owned(),
            key: "--tokenizer",
            source,
        })?;
        Self::parse(&bytes, path)
    }

    /// The same from the content of a file called `path`.
    ///
    /// # Errors
    /// As for [`Tokenizer::open`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, DataError> {
        let refuse = |what: String| DataError::Tokenizer { path: path.to_owned(), what };
        let shape: Shape = serde_json::from_slice(bytes).map_err(|e| refuse(e.to_string()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| refuse(e.to_string()))?;
        if let Some(dropout) = shape.model.dropout.filter(|&dropout| dropout > 0.0) {
            return Err(refuse(format!("model.dropout = {dropout} encodes at random; set it to null in the file")));
        }
        inner.with_truncation(None).map_err(|e| refuse(e.to_string()))?;
        inner.with_padding(None);
        let ids = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if ids == 0 {
            return Err(refuse("it has no tokens".into()));
        }
        let fast = Fast::of(&shape);
        Ok(Self { inner, fast, path: path.to_owned(), hash: *blake3::hash(bytes).as_bytes(), ids })
    }

    /// Where it was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// BLAKE3 of the file.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// The file and the settings beside it that exist, each with the name that it has in a folder of tokens.
    pub fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let [own, settings @ ..] = TOKENIZER_FILES;
        let beside = settings.map(|name| (name, self.path.with_file_name(name)));
        [(own, self.path.clone())].into_iter().chain(beside).filter(|(_, path)| path.is_file()).collect()
    }

    /// The largest id plus one.
    pub fn ids(&self) -> usize {
        self.ids
    }

    /// The id of a token by its name, if it has one.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// True if this file takes the fast way.
    pub fn is_fast(&self) -> bool {
        self.fast.is_some()
    }

    /// An encoder for one thread.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { tokenizer: self, words: self.fast.as_ref().map(Words::new) }
    }

    /// The text of `ids`; what is not UTF-8 becomes U+FFFD. `special` keeps special tokens.
    ///
    /// # Errors
    /// What the file's decoder says.
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String, DataError> {
        self.inner.decode(ids, !special).map_err(|e| self.refuse(e.to_string()))
    }

    fn refuse(&self, what: String) -> DataError {
        DataError::Tokenizer { path: self.path.clone(), what }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("ids", &self.ids).finish_non_exhaustive()
    }
}

/// Encodes on one thread.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    words: Option<Words<'a>>,
}

impl Encoder<'_> {
    /// Appends the ids of `text`; no token is added that does not stand in it.
    ///
    /// # Errors
    /// What the file's model says, such as a character that it has no token for.
    pub fn encode(&mut self, text: &str, into: &mut Vec<u32>) -> Result<(), DataError> {
        let inner = &self.tokenizer.inner;
        let before = into.len();
        if let Some(words) = &mut self.words {
            let model = inner.get_model();
            let miss = |word: &str, into: &mut Vec<u32>| {
                model.tokenize(word).map(|tokens| into.extend(tokens.iter().map(|token| token.id)))
            };
            if words.encode(text, into, miss).map_err(|e| self.tokenizer.refuse(e.to_string()))? {
                return Ok(());
            }
            into.truncate(before);
        }
        self.encode_slowly(text, into)
    }

    /// The same as [`Encoder::encode`], by the crate alone.
    ///
    /// # Errors
    /// As for [`Encoder::encode`].
    pub fn encode_slowly(&self, text: &str, into: &mut Vec<u32>) -> Result<(), DataError> {
        let encoding =
            self.tokenizer.inner.encode_fast(text, false).map_err(|e| self.tokenizer.refuse(e.to_string()))?;
        into.extend_from_slice(encoding.get_ids());
        Ok(())
    }
}

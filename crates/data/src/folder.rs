//! Folders of tokens: written once by `lockstep data tokenize`, mapped by runs.
//!
//! | file | content |
//! | --- | --- |
//! | [`TOKENS`] | token ids back to back, u16 or u32, little-endian; no end-of-document tokens |
//! | [`DOCUMENTS`] | for each document two u64, little-endian: tokens and bytes of text up to its end |
//! | [`HEADER`] | JSON, see [`Header`]; written last: without it there is no data |
//! | [`TOKENIZER_FILES`] | the tokenizer that wrote the tokens, as it was: an exported model needs it |

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::DataError;
use crate::content::{Limit, Mapped, Reading, Word};
use crate::store::Ids;

/// Name of the file of tokens.
pub const TOKENS: &str = "tokens.bin";
/// Name of the index of documents.
pub const DOCUMENTS: &str = "documents.bin";
/// Name of the header.
pub const HEADER: &str = "header.json";
/// The tokenizer and its settings. Runs do not read them; older folders do not have them.
pub const TOKENIZER_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
/// What a header begins with.
pub const MAGIC: &str = "lockstep tokens";
/// Of the format.
pub const VERSION: u32 = 1;

/// Longest header read.
const HEADER_BYTES_MAX: u64 = 1 << 20;
/// Bytes of one document in the index.
const ENTRY_BYTES: u64 = 16;

/// The header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: String,
    /// [`VERSION`].
    pub version: u32,
    /// `u16` or `u32`.
    pub dtype: String,
    /// Documents.
    pub documents: u64,
    /// Tokens of all documents.
    pub tokens: u64,
    /// Bytes of their text.
    pub bytes: u64,
    /// Ids of the tokenizer: the largest plus one.
    pub vocab: u64,
    /// The token that ends a document, where the tokenizer has one.
    pub eod: Option<u32>,
    /// Its name.
    pub eod_token: Option<String>,
    /// BLAKE3 of the `tokenizer.json`.
    pub tokenizer_blake3: String,
    /// BLAKE3 of [`TOKENS`].
    pub tokens_blake3: String,
    /// BLAKE3 of [`DOCUMENTS`].
    pub documents_blake3: String,
}

impl Header {
    /// Reads a header; `path` is for messages.
    ///
    /// # Errors
    /// What is not as written: no JSON, another magic, version or dtype, counts that cannot be.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, DataError> {
        let header: Self = serde_json::from_slice(bytes).map_err(|e| damaged(path, e.to_string()))?;
        if header.magic != MAGIC || header.version != VERSION {
            let (magic, version) = (&header.magic, header.version);
            return Err(damaged(path, format!("it is {magic:?} version {version}, not {MAGIC:?} version {VERSION}")));
        }
        header.width().ok_or_else(|| damaged(path, format!("dtype {:?} is neither u16 nor u32", header.dtype)))?;
        let hashes = [&header.tokenizer_blake3, &header.tokens_blake3, &header.documents_blake3];
        if let Some(hash) = hashes.iter().find(|hash| blake3::Hash::from_hex(hash).is_err()) {
            return Err(damaged(path, format!("{hash:?} is not a BLAKE3 hash")));
        }
        let id_fits = header.eod.is_none_or(|eod| u64::from(eod) < header.vocab);
        if header.documents > header.tokens || header.vocab > 1 << 32 || header.tokens > 1 << 60 || !id_fits {
            let Self { documents, tokens, vocab, eod, .. } = &header;
            return Err(damaged(
                path,
                format!("{documents} documents, {tokens} tokens, {vocab} ids, eod {eod:?} cannot be"),
            ));
        }
        Ok(header)
    }

    /// Bytes of a token.
    fn width(&self) -> Option<usize> {
        match self.dtype.as_str() {
            "u16" => Some(2),
            "u32" => Some(4),
            _ => None,
        }
    }
}

/// A folder that was opened.
#[derive(Debug)]
pub(crate) struct Folder {
    pub(crate) header: Header,
    pub(crate) ids: Ids,
    /// Tokens and bytes of text of each document.
    pub(crate) documents: Vec<(usize, u64)>,
}

/// True if `path` is meant to be such a folder.
pub(crate) fn is_folder(path: &Path) -> bool {
    path.join(HEADER).is_file()
}

/// The header of the folder at `path`, which is believed: nobody looks at its tokens.
///
/// # Errors
/// No readable header.
pub fn header(path: &Path, key: &'static str) -> Result<Header, DataError> {
    let name = path.join(HEADER);
    let size = fs::metadata(&name).map_err(|source| DataError::Read { path: name.clone(), key, source })?.len();
    if size > HEADER_BYTES_MAX {
        return Err(damaged(&name, format!("{size} bytes are too many for a header")));
    }
    let bytes = fs::read(&name).map_err(|source| DataError::Read { path: name.clone(), key, source })?;
    Header::parse(&bytes, &name)
}

/// Opens the folder of `header` at `path`: sizes, index, hashes and every id must be as the header says.
pub(crate) fn open(path: &Path, header: Header, key: &'static str, reading: Reading) -> Result<Folder, DataError> {
    let width = header.width().expect("checked");
    let index = path.join(DOCUMENTS);
    let bytes = fs::read(&index).map_err(|source| DataError::Read { path: index.clone(), key, source })?;
    if bytes.len() as u64 != header.documents * ENTRY_BYTES {
        let (found, documents) = (bytes.len(), header.documents);
        let wanted = documents * ENTRY_BYTES;
        return Err(damaged(&index, format!("{found} bytes found, {wanted} needed for {documents} documents")));
    }
    let documents = lengths(&bytes, &header).map_err(|what| damaged(&index, what))?;
    let tokens = path.join(TOKENS);
    let (found, wanted) = (size_of(&tokens, key)?, header.tokens * width as u64);
    if found != wanted {
        let count = header.tokens;
        return Err(damaged(
            &tokens,
            format!("{found} bytes found, {wanted} needed for {count} tokens of {}", header.dtype),
        ));
    }
    as_said(&index, blake3::hash(&bytes).into(), &header.documents_blake3)?;
    let lengths: Vec<usize> = documents.iter().map(|(tokens, _)| *tokens).collect();
    let remedy = "header.json or tokens.bin is not as it was written: tokenize again, or copy the folder again";
    let limit = Limit { ids: header.vocab, says: "header.json", remedy, documents: &lengths };
    let word = Word { width, signed: false };
    let Some(file) = Mapped::open(&tokens, word, &[], limit, key, reading)? else {
        as_said(&tokens, blake3::hash(&[]).into(), &header.tokens_blake3)?;
        return Ok(Folder { header, ids: Ids::None, documents });
    };
    as_said(&tokens, file.hash(), &header.tokens_blake3)?;
    Ok(Folder { header, ids: Ids::Mapped(Box::new(file)), documents })
}

/// The content of `path` is what the header says.
fn as_said(path: &Path, found: [u8; 32], header: &str) -> Result<(), DataError> {
    let found = blake3::Hash::from(found).to_hex();
    if found.eq_ignore_ascii_case(header) {
        return Ok(());
    }
    Err(damaged(path, format!("its content has blake3 {found}, header.json says {header}")))
}

/// Tokens and bytes of text of each document, from ends that ascend to the header's totals.
fn lengths(index: &[u8], header: &Header) -> Result<Vec<(usize, u64)>, String> {
    let mut last = (0u64, 0u64);
    let mut documents = Vec::with_capacity(index.len() / ENTRY_BYTES as usize);
    for (number, entry) in index.as_chunks::<16>().0.iter().enumerate() {
        let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("eight bytes"));
        let (tokens, bytes) = (word(0), word(8));
        if tokens <= last.0 || bytes < last.1 || tokens > header.tokens || bytes > header.bytes {
            return Err(format!(
                "the end of document {number} ({tokens} tokens, {bytes} bytes) does not follow {last:?}"
            ));
        }
        documents.push(((tokens - last.0) as usize, bytes - last.1));
        last = (tokens, bytes);
    }
    if last != (header.tokens, header.bytes) {
        let (tokens, bytes) = (header.tokens, header.bytes);
        return Err(format!("its documents end at {last:?}, the header says {tokens} tokens and {bytes} bytes"));
    }
    Ok(documents)
}

pub(crate) fn size_of(path: &Path, key: &'static str) -> Result<u64, DataError> {
    Ok(fs::metadata(path).map_err(|source| DataError::Read { path: path.to_owned(), key, source })?.len())
}

pub(crate) fn damaged(path: &Path, what: String) -> DataError {
    DataError::Damaged { path: PathBuf::from(path), what }
}

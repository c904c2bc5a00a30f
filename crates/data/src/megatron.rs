//! Megatron's `.bin` and `.idx`, read as they are.
//!
//! The index, little-endian: `MMIDIDX\0\0`, u64 version 1, u8 dtype, u64 sequences, u64 documents + 1, i32 lengths of
//! the sequences in tokens, i64 offsets of the sequences in bytes, i64 first sequence of each document and the count of
//! sequences; a multimodal file has an i8 per sequence behind that.

use std::fs;
use std::path::{Path, PathBuf};

use crate::content::{Limit, Mapped, Reading, Word};
use crate::folder::{damaged, size_of};
use crate::store::Ids;
use crate::{DataError, IGNORE};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER_BYTES: usize = 34;

/// What an index says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// How a token is written.
    pub word: Word,
    /// Tokens of each document.
    pub documents: Vec<usize>,
    /// Tokens of all.
    pub tokens: u64,
}

/// How a token is written, by its code.
fn word_of(code: u8) -> Result<Word, String> {
    let word = |width, signed| Ok(Word { width, signed });
    match code {
        1 => word(1, false),
        2 => word(1, true),
        3 => word(2, true),
        4 => word(4, true),
        5 => word(8, true),
        8 => word(2, false),
        6 | 7 => Err(format!("dtype code {code} is floating point; token ids are whole numbers")),
        _ => Err(format!("dtype code {code} is unknown; 1 u8, 2 i8, 3 i16, 4 i32, 5 i64 and 8 u16 are read")),
    }
}

impl Index {
    /// Reads an index.
    ///
    /// # Errors
    /// What is not as the format says.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if !bytes.starts_with(MAGIC) {
            return Err("it does not begin with MMIDIDX".into());
        }
        if bytes.len() < HEADER_BYTES {
            return Err(format!("{} bytes found, {HEADER_BYTES} needed for the header", bytes.len()));
        }
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if number(9) != VERSION {
            return Err(format!("it has version {}; version {VERSION} is read", number(9)));
        }
        let word = word_of(bytes[17])?;
        let (width, sequences, marks) = (word.width, number(18), number(26));
        let needed = u128::from(sequences) * 12 + u128::from(marks) * 8 + HEADER_BYTES as u128;
        let found = bytes.len() as u128;
        if found != needed && found != needed + u128::from(sequences) {
            return Err(format!(
                "{found} bytes found, {needed} needed for {sequences} sequences and {marks} document marks"
            ));
        }
        let (sequences, marks) = (sequences as usize, marks as usize);
        let (lengths, rest) = bytes[HEADER_BYTES..].split_at(sequences * 4);
        let (offsets, rest) = rest.split_at(sequences * 8);
        let lengths: Vec<i32> = lengths.as_chunks::<4>().0.iter().map(|&w| i32::from_le_bytes(w)).collect();
        let longs =
            |bytes: &[u8]| -> Vec<i64> { bytes.as_chunks::<8>().0.iter().map(|&w| i64::from_le_bytes(w)).collect() };
        let mut tokens = 0u64;
        for (number, (&length, offset)) in lengths.iter().zip(longs(offsets)).enumerate() {
            if length < 0 || u64::try_from(offset) != Ok(tokens * width as u64) {
                return Err(format!(
                    "sequence {number} has {length} tokens at byte {offset}; byte {} is where the one before ends",
                    tokens * width as u64
                ));
            }
            tokens += length as u64;
        }
        let marks = longs(&rest[..marks * 8]);
        let ends = (marks.first().copied(), marks.last().copied());
        if ends != (Some(0), Some(sequences as i64)) || !marks.is_sorted() {
            return Err(format!("its document marks do not ascend from 0 to {sequences}: {ends:?}"));
        }
        let document = |pair: &[i64]| lengths[pair[0] as usize..pair[1] as usize].iter().map(|&n| n as usize).sum();
        Ok(Self { word, documents: marks.windows(2).map(document).collect(), tokens })
    }
}

/// Both files of a prefix; `path` may also be one of the files.
fn files(path: &Path) -> [PathBuf; 2] {
    let named = path.extension().is_some_and(|extension| extension == "bin" || extension == "idx");
    let prefix = if named { path.with_extension("") } else { path.to_owned() };
    ["bin", "idx"].map(|ending| {
        let mut name = prefix.clone().into_os_string();
        name.push(".");
        name.push(ending);
        PathBuf::from(name)
    })
}

/// True if `path` names such files.
pub(crate) fn is_prefix(path: &Path) -> bool {
    files(path)[1].is_file()
}

/// Opens both files of the prefix `path` and checks that they fit, and that every id is below `vocab`. Returns them with
/// the hash of both.
pub(crate) fn open(
    path: &Path,
    vocab: usize,
    key: &'static str,
    reading: Reading,
) -> Result<(Ids, Index, [u8; 32]), DataError> {
    let [bin, idx] = files(path);
    let bytes = fs::read(&idx).map_err(|source| DataError::Read { path: idx.clone(), key, source })?;
    let index = Index::parse(&bytes).map_err(|what| damaged(&idx, what))?;
    let width = index.word.width;
    let (found, wanted) = (size_of(&bin, key)?, index.tokens * width as u64);
    if found != wanted {
        let tokens = index.tokens;
        return Err(damaged(
            &idx,
            format!(
                "it does not match {}: {tokens} tokens of {width} bytes are {wanted} bytes, but the file has {found}",
                bin.display()
            ),
        ));
    }
    let ids = (vocab as u64).min(u64::from(IGNORE));
    let remedy = "set model.vocab to at least {ids}, or use data of a smaller tokenizer";
    let limit = Limit { ids, says: "model.vocab", remedy, documents: &index.documents };
    Ok(match Mapped::open(&bin, index.word, &bytes, limit, key, reading)? {
        Some(file) => {
            let hash = file.hash();
            (Ids::Mapped(Box::new(file)), index, hash)
        }
        None => (Ids::None, index, *blake3::hash(&bytes).as_bytes()),
    })
}

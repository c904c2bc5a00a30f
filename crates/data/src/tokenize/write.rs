//! Writes a folder of tokens beside its place, and moves it there when it is whole.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::Vocabulary;
use crate::DataError;
use crate::folder::{DOCUMENTS, HEADER, Header, MAGIC, TOKENS, VERSION};

const BUFFER_BYTES: usize = 1 << 20;

/// A file that hashes what is written to it.
struct Hashed {
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    path: PathBuf,
}

impl Hashed {
    fn create(path: PathBuf) -> Result<Self, DataError> {
        let file = File::create(&path).map_err(|e| unwritable(&path, e))?;
        Ok(Self { file: BufWriter::with_capacity(BUFFER_BYTES, file), hasher: blake3::Hasher::new(), path })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|e| unwritable(&self.path, e))
    }

    /// Brings it to the disk; returns the hash of its content.
    fn finish(mut self) -> Result<String, DataError> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(|e| unwritable(&self.path, e))?;
        Ok(self.hasher.finalize().to_hex().to_string())
    }
}

/// A folder under way. Dropped before it is finished, it takes its files with it.
pub(super) struct Writer {
    out: PathBuf,
    partial: PathBuf,
    tokens: Option<Hashed>,
    documents: Option<Hashed>,
    header: Header,
    wide: bool,
    buffer: Vec<u8>,
}

impl Writer {
    pub(super) fn create(out: &Path, vocabulary: &Vocabulary) -> Result<Self, DataError> {
        let taken = match fs::read_dir(out) {
            Ok(mut entries) => entries.next().is_some(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
            Err(e) => return Err(unwritable(out, e)),
        };
        if taken {
            return Err(DataError::OutTaken { path: out.to_owned() });
        }
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(|e| unwritable(parent, e))?;
        let name = out.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let partial = parent.join(format!(".{name}.partial-{}", std::process::id()));
        fs::create_dir(&partial).map_err(|e| unwritable(&partial, e))?;
        let wide = vocabulary.ids > 1 << 16;
        let header = Header {
            magic: MAGIC.into(),
            version: VERSION,
            dtype: if wide { "u32" } else { "u16" }.into(),
            documents: 0,
            tokens: 0,
            bytes: 0,
            vocab: vocabulary.ids as u64,
            eod: vocabulary.eod.as_ref().map(|(id, _)| *id),
            eod_token: vocabulary.eod.as_ref().map(|(_, name)| name.clone()),
            tokenizer_blake3: blake3::Hash::from(vocabulary.hash).to_hex().to_string(),
            tokens_blake3: String::new(),
            documents_blake3: String::new(),
        };
        let mut writer =
            Self { out: out.to_owned(), partial, tokens: None, documents: None, header, wide, buffer: Vec::new() };
        writer.tokens = Some(Hashed::create(writer.partial.join(TOKENS))?);
        writer.documents = Some(Hashed::create(writer.partial.join(DOCUMENTS))?);
        for (name, file) in &vocabulary.files {
            let read = |source| DataError::Read { path: file.clone(), key: "--tokenizer", source };
            let content = fs::read(file).map_err(read)?;
            let mut copy = Hashed::create(writer.partial.join(name))?;
            copy.write(&content)?;
            copy.finish()?;
        }
        Ok(writer)
    }

    pub(super) fn documents(&self) -> u64 {
        self.header.documents
    }

    /// Appends documents: their tokens back to back, and how many tokens and bytes of text each has.
    pub(super) fn add(&mut self, tokens: &[u32], documents: &[(u64, u64)]) -> Result<(), DataError> {
        self.buffer.clear();
        if self.wide {
            tokens.iter().for_each(|token| self.buffer.extend(token.to_le_bytes()));
        } else {
            tokens.iter().for_each(|&token| self.buffer.extend((token as u16).to_le_bytes()));
        }
        self.tokens.as_mut().expect("open").write(&self.buffer)?;
        self.buffer.clear();
        for &(tokens, bytes) in documents {
            self.header.documents += 1;
            self.header.tokens += tokens;
            self.header.bytes += bytes;
            self.buffer.extend(self.header.tokens.to_le_bytes());
            self.buffer.extend(self.header.bytes.to_le_bytes());
        }
        self.documents.as_mut().expect("open").write(&self.buffer)
    }

    /// Writes the header and moves the folder to its place.
    pub(super) fn finish(mut self) -> Result<Header, DataError> {
        self.header.tokens_blake3 = self.tokens.take().expect("open").finish()?;
        self.header.documents_blake3 = self.documents.take().expect("open").finish()?;
        let mut header = Hashed::create(self.partial.join(HEADER))?;
        header.write(&serde_json::to_vec_pretty(&self.header).expect("a header is JSON"))?;
        header.finish()?;
        // An empty folder at the place gives way.
        fs::rename(&self.partial, &self.out).map_err(|e| unwritable(&self.out, e))?;
        if let Some(parent) = self.out.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            let _ = File::open(parent).and_then(|folder| folder.sync_all());
        }
        Ok(self.header.clone())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Gone already if it was moved.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

fn unwritable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Write { path: path.to_owned(), source }
}

//! Which files are read, and how their names say to read them.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::zst::Frames;
use crate::{DataError, text};

/// Where the paths are from, for messages.
pub(super) const KEY: &str = "INPUT";
const BUFFER_BYTES: usize = 1 << 18;

/// How the content is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrapping {
    None,
    Gzip,
    Zstd,
}

/// One file.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    /// Its length on the disk.
    pub(super) bytes: u64,
    /// A document per line.
    pub(super) lines: bool,
    wrapping: Wrapping,
}

impl File {
    fn new(path: PathBuf) -> Result<Self, DataError> {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let (inner, wrapping) = match name.rsplit_once('.') {
            Some((inner, "gz")) => (inner, Wrapping::Gzip),
            Some((inner, "zst")) => (inner, Wrapping::Zstd),
            _ => (name.as_str(), Wrapping::None),
        };
        let lines = inner.ends_with(".jsonl") || inner.ends_with(".ndjson");
        let bytes = fs::metadata(&path).map_err(|source| unreadable(&path, source))?.len();
        Ok(Self { path, bytes, lines, wrapping })
    }

    /// The content; `read` counts the bytes taken from the disk.
    pub(super) fn open<'a>(&self, read: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>, DataError> {
        let file = fs::File::open(&self.path).map_err(|source| unreadable(&self.path, source))?;
        let counted = BufReader::with_capacity(BUFFER_BYTES, Counted { file, read });
        Ok(match self.wrapping {
            Wrapping::None => Box::new(counted),
            Wrapping::Gzip => {
                Box::new(BufReader::with_capacity(BUFFER_BYTES, flate2::bufread::MultiGzDecoder::new(counted)))
            }
            Wrapping::Zstd => Box::new(BufReader::with_capacity(BUFFER_BYTES, Frames::new(counted))),
        })
    }
}

/// A file that counts what is read of it.
struct Counted<'a> {
    file: fs::File,
    read: &'a AtomicU64,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.file.read(into)?;
        self.read.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

pub(super) fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    DataError::Read { path: path.to_owned(), key: KEY, source }
}

/// Every file of `inputs` in order: as listed, globs and folders in the order of names.
pub(super) fn list(inputs: &[String]) -> Result<Vec<File>, DataError> {
    let mut paths = Vec::new();
    for input in inputs {
        let path = Path::new(input);
        if path.exists() || !input.contains(['*', '?', '[']) {
            text::list_paths(path, KEY, &mut paths)?;
            continue;
        }
        let found = glob::glob(input).map_err(|e| DataError::Glob { pattern: input.clone(), what: e.to_string() })?;
        let before = paths.len();
        for path in found {
            let path = path.map_err(|e| {
                let path = e.path().to_owned();
                unreadable(&path, e.into())
            })?;
            text::list_paths(&path, KEY, &mut paths)?;
        }
        if paths.len() == before {
            return Err(DataError::Glob { pattern: input.clone(), what: "no file matches".into() });
        }
    }
    paths.into_iter().map(File::new).collect()
}

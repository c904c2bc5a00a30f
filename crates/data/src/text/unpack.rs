//! Compressed files as their content.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use lzma_rust2::XzReader;

use super::zst::Frames;
use crate::DataError;

const BUFFER_BYTES: usize = 1 << 18;
/// Most memory that a file in xz may ask for; its largest preset takes 64 MiB.
const XZ_MEMORY_KIB_MAX: u32 = 1 << 20;

/// How the content is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrapping {
    None,
    Gzip,
    Xz,
    Zstd,
}

impl Wrapping {
    /// What the first bytes of a file say.
    pub(crate) fn of_head(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            // A frame, or one to skip.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }

    /// What the end of a file's name promises.
    pub(crate) fn of_ending(ending: &str) -> Self {
        match ending {
            "gz" | "gzip" => Self::Gzip,
            "xz" => Self::Xz,
            "zst" | "zstd" => Self::Zstd,
            _ => Self::None,
        }
    }

    /// The error of reading a file that is packed so.
    pub(crate) fn fail(self, path: &Path, key: &'static str, source: std::io::Error) -> DataError {
        match self {
            Self::None => DataError::Read { path: path.to_owned(), key, source },
            _ => DataError::Damaged { path: path.to_owned(), what: source.to_string() },
        }
    }
}

/// Opens the content of the file at `path`; `read` counts the bytes taken from the disk.
///
/// # Errors
/// What the system says.
pub(crate) fn open<'a>(path: &Path, wrapping: Wrapping, read: &'a AtomicU64) -> std::io::Result<Box<dyn BufRead + 'a>> {
    let counted = BufReader::with_capacity(BUFFER_BYTES, Counted { file: fs::File::open(path)?, read });
    let buffered = |content: Box<dyn Read + 'a>| Box::new(BufReader::with_capacity(BUFFER_BYTES, content));
    Ok(match wrapping {
        Wrapping::None => Box::new(counted),
        Wrapping::Gzip => buffered(Box::new(flate2::bufread::MultiGzDecoder::new(counted))),
        Wrapping::Xz => buffered(Box::new(XzReader::new_mem_limit(counted, true, XZ_MEMORY_KIB_MAX))),
        Wrapping::Zstd => buffered(Box::new(Frames::new(counted))),
    })
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

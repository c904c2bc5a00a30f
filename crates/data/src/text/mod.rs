//! Text files and folders as documents.

pub(crate) mod foreign;
pub(crate) mod kinds;
pub(crate) mod lines;
pub(crate) mod list;
pub(crate) mod look;
pub(crate) mod unpack;
mod zst;

use std::collections::HashSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use crate::DataError;
use kinds::Kinds;
use look::{Form, Look, MARK};

/// Documents, one after another.
#[derive(Default)]
pub(crate) struct Documents {
    /// All bytes.
    pub(crate) bytes: Vec<u8>,
    /// For each document, the bytes up to its end.
    pub(crate) ends: Vec<usize>,
    /// What the files were read as.
    pub(crate) kinds: Kinds,
}

impl Documents {
    /// Adds a document that is not empty.
    pub(crate) fn push(&mut self, document: &[u8]) {
        debug_assert!(!document.is_empty());
        self.bytes.extend_from_slice(document);
        self.ends.push(self.bytes.len());
    }
}

/// Where text is read from, and how.
pub(crate) struct Reading<'a> {
    /// The key of the run file that names the paths, for messages.
    pub(crate) key: &'static str,
    /// The field of a line of JSON with its text.
    pub(crate) field: &'a str,
    /// Files (canonical paths) that are left out.
    pub(crate) without: &'a HashSet<PathBuf>,
}

/// Adds what every file of `paths` holds: paths as listed, folders as [`list::files`] says. A path listed twice is read
/// twice. Empty files inside of folders are left out.
///
/// # Errors
/// The path with what is wrong with it: as [`look::look`], and `Empty`, `NoText`, `Line`; `AllHeldOut` where `without`
/// left nothing.
pub(crate) fn read(into: &mut Documents, paths: &[String], reading: &Reading<'_>) -> Result<(), DataError> {
    let Reading { key, without, .. } = *reading;
    let before = into.ends.len();
    let mut held_out = Vec::new();
    for path in paths.iter().map(Path::new) {
        let files = list::files(path, key, &mut into.kinds)?;
        let mut found = false;
        for file in &files {
            let Some(look) = look::look(&file.path, key)? else {
                if file.named {
                    return Err(DataError::Empty { path: file.path.clone(), key });
                }
                into.kinds.empty_files += 1;
                continue;
            };
            found = true;
            if !without.is_empty() && without.contains(&list::canonical(&file.path, key)?) {
                held_out.push(file.path.clone());
                continue;
            }
            add(into, &file.path, look, reading)?;
        }
        if !found {
            return Err(DataError::NoText { path: path.to_owned(), key, seen: files.len() as u64 });
        }
    }
    match held_out.first() {
        Some(path) if into.ends.len() == before => {
            Err(DataError::AllHeldOut { documents: held_out.len() as u64, path: path.clone() })
        }
        _ => Ok(()),
    }
}

/// Adds the content of one file.
fn add(into: &mut Documents, path: &Path, look: Look, reading: &Reading<'_>) -> Result<(), DataError> {
    let key = reading.key;
    let mut bytes = Vec::new();
    unpack::open(path, look.wrapping, &AtomicU64::new(0))
        .and_then(|mut source| source.read_to_end(&mut bytes))
        .map_err(|e| look.wrapping.fail(path, key, e))?;
    let content = bytes.strip_prefix(MARK).unwrap_or(&bytes);
    into.kinds.file(path, &look);
    match look.form {
        Form::Text => {
            if let Some(foreign) = foreign::binary(content) {
                return Err(look::refuse(path, key, foreign));
            }
            if std::str::from_utf8(content).is_err() {
                into.kinds.not_utf8(path);
            }
            if !content.is_empty() {
                into.push(content);
            }
        }
        Form::Lines => {
            for (number, line) in (1..).zip(content.split(|&byte| byte == b'\n')) {
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let text = lines::text_of(line, reading.field).map_err(|what| DataError::Line {
                    path: path.to_owned(),
                    key,
                    line: number,
                    what,
                })?;
                if text.is_empty() {
                    into.kinds.empty_lines += 1;
                } else {
                    into.push(text.as_bytes());
                    into.kinds.line_documents += 1;
                }
            }
        }
    }
    Ok(())
}

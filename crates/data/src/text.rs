//! Text files and folders as documents.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::DataError;

/// Documents, one after another.
#[derive(Default)]
pub(crate) struct Documents {
    /// All bytes.
    pub(crate) bytes: Vec<u8>,
    /// For each document, the bytes up to its end.
    pub(crate) ends: Vec<usize>,
    /// Empty files in folders, left out.
    pub(crate) skipped: u64,
}

impl Documents {
    /// Adds a document that is not empty.
    pub(crate) fn push(&mut self, document: &[u8]) {
        debug_assert!(!document.is_empty());
        self.bytes.extend_from_slice(document);
        self.ends.push(self.bytes.len());
    }
}

/// A file to read.
struct File {
    path: PathBuf,
    /// Named by the user rather than found in a folder.
    named: bool,
}

/// Adds every file of `paths` as a document: paths as listed, folders recursively in the order of their names' bytes.
/// A path listed twice is read twice. Hidden files and folders, links to folders and empty files inside of folders are
/// left out, and so is every file in `without` (canonical paths). `key` is the key of the run file, for messages.
///
/// # Errors
/// The path with what is wrong with it: [`DataError::Read`], `NotAFile`, `NotPlain`, `Empty`, `NulFilled`, `NoText`; `AllHeldOut`
/// where `without` left nothing.
pub(crate) fn read(
    into: &mut Documents,
    paths: &[String],
    without: &HashSet<PathBuf>,
    key: &'static str,
) -> Result<(), DataError> {
    let before = into.ends.len();
    let mut held_out = Vec::new();
    for path in paths.iter().map(Path::new) {
        let mut files = Vec::new();
        list(path, true, key, &mut files)?;
        let mut found = false;
        for file in &files {
            if let Some(what) = not_plain(&file.path) {
                return Err(DataError::NotPlain { path: file.path.clone(), key, what });
            }
            let bytes = fs::read(&file.path).map_err(|source| unreadable(&file.path, key, source))?;
            if bytes.is_empty() && file.named {
                return Err(DataError::Empty { path: file.path.clone(), key });
            } else if bytes.is_empty() {
                into.skipped += 1;
                continue;
            } else if bytes.iter().all(|&byte| byte == 0) {
                return Err(DataError::NulFilled { path: file.path.clone(), key, bytes: bytes.len() as u64 });
            }
            found = true;
            if !without.is_empty() && without.contains(&canonical(&file.path, key)?) {
                held_out.push(file.path.clone());
                continue;
            }
            into.push(&bytes);
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

/// What of a file with such a name is not text.
fn not_plain(path: &Path) -> Option<&'static str> {
    match path.extension()?.to_str()? {
        "jsonl" | "ndjson" => Some("JSON syntax"),
        "gz" | "zst" => Some("compression"),
        _ => None,
    }
}

/// The canonical paths of every file that [`read`] would look at.
///
/// # Errors
/// As for [`read`], where a path cannot be listed.
pub(crate) fn canonical_files(paths: &[String], key: &'static str) -> Result<HashSet<PathBuf>, DataError> {
    let mut files = Vec::new();
    for path in paths {
        list(Path::new(path), true, key, &mut files)?;
    }
    files.iter().map(|file| canonical(&file.path, key)).collect()
}

/// The files that `path` names, in the order of [`read`].
///
/// # Errors
/// As for [`read`], where a path cannot be listed.
pub(crate) fn list_paths(path: &Path, key: &'static str, into: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let mut files = Vec::new();
    list(path, true, key, &mut files)?;
    into.extend(files.into_iter().map(|file| file.path));
    Ok(())
}

fn canonical(path: &Path, key: &'static str) -> Result<PathBuf, DataError> {
    fs::canonicalize(path).map_err(|source| unreadable(path, key, source))
}

fn unreadable(path: &Path, key: &'static str, source: std::io::Error) -> DataError {
    DataError::Read { path: path.to_owned(), key, source }
}

/// Lists the file `path`, or all files below the folder `path`. The walk ends: links to folders are not followed.
fn list(path: &Path, named: bool, key: &'static str, files: &mut Vec<File>) -> Result<(), DataError> {
    let kind = fs::metadata(path).map_err(|source| unreadable(path, key, source))?;
    if kind.is_file() {
        files.push(File { path: path.to_owned(), named });
        return Ok(());
    }
    if !kind.is_dir() {
        return Err(DataError::NotAFile { path: path.to_owned(), key });
    }
    if !named && path.is_symlink() {
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(|source| unreadable(path, key, source))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(|source| unreadable(path, key, source))?.file_name());
    }
    names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
    names.sort_unstable_by(|a, b| a.as_encoded_bytes().cmp(b.as_encoded_bytes()));
    names.iter().try_for_each(|name| list(&path.join(name), false, key, files))
}

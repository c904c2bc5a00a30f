//! Which files a path names.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::kinds::Kinds;
use crate::DataError;

/// What goes with a data set without being of it. In a folder such files are left out: alone, with one of
/// [`COMPANION_ENDINGS`], and, in capitals, with anything behind a dot, dash or underscore.
const COMPANIONS: [&str; 9] =
    ["readme", "license", "licence", "copying", "notice", "citation", "contributing", "code_of_conduct", "changelog"];
const COMPANION_ENDINGS: [&str; 7] = ["txt", "md", "markdown", "rst", "html", "cff", "bib"];
/// What the hub of data sets adds to them.
const COMPANION_FILES: [&str; 2] = ["dataset_info.json", "dataset_infos.json"];

/// A file to read.
pub(crate) struct File {
    pub(crate) path: PathBuf,
    /// Named by the user rather than found in a folder.
    pub(crate) named: bool,
}

/// The files that `path` names: itself, or those below the folder, recursively in the order of their names' bytes. Hidden
/// files and folders, links to folders and what goes with a data set (README, LICENSE, ...) are left out of folders;
/// the last are told to `kinds`.
///
/// # Errors
/// [`DataError::Read`] and `NotAFile` with the path; `key` is the key of the run file, for messages.
pub(crate) fn files(path: &Path, key: &'static str, kinds: &mut Kinds) -> Result<Vec<File>, DataError> {
    let mut found = Vec::new();
    walk(path, true, key, kinds, &mut found)?;
    Ok(found)
}

/// The canonical paths of every file that `paths` name.
///
/// # Errors
/// As for [`files`].
pub(crate) fn canonical_files(paths: &[String], key: &'static str) -> Result<HashSet<PathBuf>, DataError> {
    let mut canonical_paths = HashSet::new();
    for path in paths {
        for file in files(Path::new(path), key, &mut Kinds::default())? {
            canonical_paths.insert(canonical(&file.path, key)?);
        }
    }
    Ok(canonical_paths)
}

pub(super) fn canonical(path: &Path, key: &'static str) -> Result<PathBuf, DataError> {
    fs::canonicalize(path).map_err(|source| unreadable(path, key, source))
}

fn unreadable(path: &Path, key: &'static str, source: std::io::Error) -> DataError {
    DataError::Read { path: path.to_owned(), key, source }
}

/// The walk ends: links to folders are not followed.
fn walk(
    path: &Path,
    named: bool,
    key: &'static str,
    kinds: &mut Kinds,
    found: &mut Vec<File>,
) -> Result<(), DataError> {
    let kind = fs::metadata(path).map_err(|source| unreadable(path, key, source))?;
    if kind.is_file() {
        if !named && is_companion(path) {
            kinds.companion(path);
        } else {
            found.push(File { path: path.to_owned(), named });
        }
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
    names.iter().try_for_each(|name| walk(&path.join(name), false, key, kinds, found))
}

/// True for README, LICENSE and the like.
fn is_companion(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let lower = name.to_ascii_lowercase();
    if COMPANION_FILES.contains(&lower.as_str()) {
        return true;
    }
    let Some(rest) = COMPANIONS.iter().find_map(|companion| lower.strip_prefix(companion)) else { return false };
    let capitals = !name[..name.len() - rest.len()].bytes().any(|byte| byte.is_ascii_lowercase());
    rest.is_empty()
        || rest.strip_prefix('.').is_some_and(|ending| COMPANION_ENDINGS.contains(&ending))
        || capitals && rest.starts_with(['.', '-', '_'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_with_a_data_set_is_told_from_what_is_of_it() {
        for name in [
            "README",
            "README.md",
            "readme.txt",
            "README_zh.md",
            "LICENSE-MIT",
            "COPYING.LESSER",
            "Licence",
            "dataset_infos.json",
            "CITATION.cff",
        ] {
            assert!(is_companion(Path::new(name)), "{name}");
        }
        for name in
            ["notices.txt", "license_to_kill.txt", "readme.jsonl", "notice-0001", "a.md", "data.json", "readmes/a.txt"]
        {
            assert!(!is_companion(Path::new(name)), "{name}");
        }
    }
}

//! The sources of the crates that the binary is built from: text that is already on the disk of whoever built it.
//!
//! Cargo unpacks each crate under `$CARGO_HOME/registry/src/<registry>/<name>-<version>/`. Which files are read, and
//! their hashes, is fixed by `cargo_corpus.txt`; `cargo run -p lockstep-data --example cargo_corpus` writes it anew
//! when a version in `Cargo.lock` changes.

use std::fs;
use std::path::{Path, PathBuf};

use crate::text::Documents;

/// One file of the corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Folder of the crate: `name-version`.
    pub package: &'static str,
    /// Path inside the crate.
    pub path: &'static str,
    /// Its length.
    pub bytes: u64,
    /// Its BLAKE3 hash in hexadecimal.
    pub hash: &'static str,
}

/// The files of the corpus in their order.
pub fn cargo_corpus() -> impl Iterator<Item = Entry> {
    include_str!("cargo_corpus.txt").lines().filter_map(parse)
}

/// A line `crate-version path bytes blake3`.
fn parse(line: &'static str) -> Option<Entry> {
    let mut words = line.split(' ');
    let (package, path) = (words.next()?, words.next()?);
    Some(Entry { package, path, bytes: words.next()?.parse().ok()?, hash: words.next()? })
}

/// Reads the corpus below `cargo_home`, or where the environment says that Cargo keeps its files (`CARGO_HOME`, else
/// `.cargo` in the home directory).
///
/// # Errors
/// A sentence that names the first file that is missing or differs, and what to do.
pub(crate) fn read(cargo_home: Option<&Path>) -> Result<Documents, String> {
    let remedy = "run `cargo fetch --locked` in the source of lockstep";
    let home = cargo_home.map(Path::to_owned).or_else(home).ok_or_else(|| {
        format!("neither CARGO_HOME nor HOME is set, so the sources of the crates cannot be found; set CARGO_HOME, or {remedy}")
    })?;
    let sources = home.join("registry").join("src");
    let registries = folders(&sources);
    if registries.is_empty() {
        return Err(format!("there are no sources of crates under {}; {remedy}, or set CARGO_HOME", sources.display()));
    }
    let mut documents = Documents::default();
    for entry in cargo_corpus() {
        let mut differs = None;
        let found = registries.iter().find_map(|registry| {
            let path = registry.join(entry.package).join(entry.path);
            let bytes = fs::read(&path).ok()?;
            let same = bytes.len() as u64 == entry.bytes && blake3::hash(&bytes).to_hex().as_str() == entry.hash;
            if same {
                return Some(bytes);
            }
            differs = Some((path, bytes.len()));
            None
        });
        match (found, differs) {
            (Some(bytes), _) => documents.push(&bytes),
            (None, Some((path, bytes))) => {
                return Err(format!(
                    "{} ({bytes} bytes) is not the published file ({} bytes, blake3 {}); remove the folder of that \
                     crate and {remedy}",
                    path.display(),
                    entry.bytes,
                    &entry.hash[..16]
                ));
            }
            (None, None) => {
                return Err(format!("{}/{} is not under {}; {remedy}", entry.package, entry.path, sources.display()));
            }
        }
    }
    Ok(documents)
}

fn home() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("CARGO_HOME").or_else(|| Some(set("HOME")?.join(".cargo")))
}

/// The folders in `path`, sorted; none where it cannot be read.
fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort_unstable();
    folders
}

//! Prints `src/cargo_corpus.txt` anew: which files of which crates are the text of `data.source = "cargo"`.
//!
//! Run it when `Cargo.lock` has moved one of [`CRATES`] to another version, then look at what changed:
//!
//! ```text
//! cargo fetch --locked
//! cargo run -p lockstep-data --example cargo_corpus > crates/data/src/cargo_corpus.txt
//! ```
//!
//! A crate belongs here if the binary cannot be built without it, and if its licence is permissive: then its sources are
//! on the disk of whoever built the binary. Its files are those under `src` of moderate length.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

/// The crates, all of them needed to build the binary on any system.
const CRATES: &[&str] = &[
    "blake3",
    "clap",
    "clap_builder",
    "clap_derive",
    "clap_lex",
    "console",
    "crossbeam-deque",
    "crossbeam-epoch",
    "crossbeam-utils",
    "indicatif",
    "memmap2",
    "proc-macro2",
    "quote",
    "rayon",
    "rayon-core",
    "safetensors",
    "serde",
    "serde_core",
    "serde_derive",
    "serde_json",
    "serde_spanned",
    "strsim",
    "thiserror",
    "thiserror-impl",
    "toml",
    "toml_datetime",
    "toml_parser",
    "toml_writer",
    "winnow",
];

/// Shorter files say little; longer ones are tables or generated code.
const FILE_BYTES_MIN: usize = 1_000;
const FILE_BYTES_MAX: usize = 24_000;

fn main() -> Result<(), Box<dyn Error>> {
    let lock = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock"))?;
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let sources = home.ok_or("set CARGO_HOME")?.join("registry/src");
    let mut registries: Vec<PathBuf> =
        fs::read_dir(&sources)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    registries.sort_unstable();
    for name in CRATES {
        let package = format!("{name}-{}", version(&lock, name)?);
        let folder = registries.iter().map(|registry| registry.join(&package)).find(|folder| folder.is_dir());
        let folder = folder
            .ok_or_else(|| format!("{package} is not under {}; run `cargo fetch --locked`", sources.display()))?;
        let mut files = Vec::new();
        list(&folder.join("src"), &mut files)?;
        for file in files {
            let bytes = fs::read(&file)?;
            let path = file.strip_prefix(&folder)?.to_str().ok_or("a file name that is not UTF-8")?;
            let fits = (FILE_BYTES_MIN..=FILE_BYTES_MAX).contains(&bytes.len());
            if fits && !path.contains(' ') && std::str::from_utf8(&bytes).is_ok() {
                println!("{package} {path} {} {}", bytes.len(), blake3::hash(&bytes));
            }
        }
    }
    Ok(())
}

/// The version of the only package called `name` in a lock file.
fn version<'a>(lock: &'a str, name: &str) -> Result<&'a str, String> {
    let head = format!("name = \"{name}\"\nversion = \"");
    let mut found = lock.match_indices(&head).map(|(at, _)| lock[at + head.len()..].split('"').next().unwrap_or(""));
    match (found.next(), found.next()) {
        (Some(version), None) => Ok(version),
        (first, _) => Err(format!(
            "Cargo.lock has {} versions of {name}; one is needed",
            if first.is_some() { "several" } else { "no" }
        )),
    }
}

/// The Rust files below `folder`, sorted.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    paths.sort_unstable();
    for path in paths {
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

//! The sources of the crates that the binary is built from: text that is already on the disk of whoever built it.
//!
//! Cargo unpacks each crate under `$CARGO_HOME/registry/src/<registry>/<name>-<version>/`. Which files are read, and
//! their hashes, is fixed by `cargo_corpus.txt`; `cargo run -p lockstep-data --example cargo_corpus` writes it anew
//! when a version in `Cargo.lock` changes.

use std::fs;
use std::path::{Path, PathBuf};

use crate::text::Documents;

/// What to do where a file is not as listed.
const REMEDY: &str = "run `cargo fetch --locked` in the source of lockstep";

/// The files of the corpus in their order, one a line: `crate-version path bytes blake3`.
const CORPUS: &str = include_str!("cargo_corpus.txt");

/// One file of the corpus.
struct Entry<'a> {
    /// Folder of the crate: `name-version`.
    package: &'a str,
    /// Path inside the crate.
    path: &'a str,
    /// Its length.
    bytes: u64,
    /// Its BLAKE3 hash in hexadecimal.
    hash: &'a str,
}

/// A line of the list.
fn parse(line: &str) -> Option<Entry<'_>> {
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
    let home = cargo_home.map(Path::to_owned).or_else(home).ok_or_else(|| {
        format!("the sources of the crates cannot be found without CARGO_HOME or HOME; set CARGO_HOME, or {REMEDY}")
    })?;
    read_list(CORPUS, &home.join("registry").join("src"))
}

/// Reads the files of `list` below any of the registries in `sources`.
fn read_list(list: &str, sources: &Path) -> Result<Documents, String> {
    let registries = folders(sources);
    if registries.is_empty() {
        return Err(format!("there are no sources of crates under {}; {REMEDY}, or set CARGO_HOME", sources.display()));
    }
    let mut documents = Documents::default();
    for line in list.lines() {
        let entry =
            parse(line).ok_or_else(|| format!("`{line}` in the list of files is not `crate path bytes blake3`"))?;
        documents.push(&find(&entry, &registries, sources)?);
    }
    Ok(documents)
}

/// The content of `entry` from the first registry where it is as listed.
fn find(entry: &Entry<'_>, registries: &[PathBuf], sources: &Path) -> Result<Vec<u8>, String> {
    let mut differs = None;
    for registry in registries {
        let path = registry.join(entry.package).join(entry.path);
        let Ok(bytes) = fs::read(&path) else { continue };
        if bytes.len() as u64 == entry.bytes && blake3::hash(&bytes).to_hex().as_str() == entry.hash {
            return Ok(bytes);
        }
        differs = Some((path, bytes.len()));
    }
    Err(match differs {
        Some((path, bytes)) => format!(
            "{} ({bytes} bytes) is not as published ({} bytes, blake3 {}); remove the folder of that crate and {REMEDY}",
            path.display(),
            entry.bytes,
            entry.hash
        ),
        None => format!("{}/{} is not under {}; {REMEDY}", entry.package, entry.path, sources.display()),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn line(package: &str, path: &str, content: &str) -> String {
        format!("{package} {path} {} {}\n", content.len(), blake3::hash(content.as_bytes()))
    }

    #[test]
    fn files_come_in_listed_order_from_any_registry() {
        let home = Scratch::new();
        home.write("first/b-1.0.0/src/lib.rs", "damaged");
        home.write("second/b-1.0.0/src/lib.rs", "of b");
        home.write("first/a-2.0.0+x/src/lib.rs", "of a");
        let list = line("b-1.0.0", "src/lib.rs", "of b") + &line("a-2.0.0+x", "src/lib.rs", "of a");
        let documents = read_list(&list, home.path()).expect("all there");
        assert_eq!((documents.bytes.as_slice(), documents.ends), (&b"of bof a"[..], vec![4, 8]));
    }

    #[test]
    fn what_is_not_as_listed_is_named() {
        let home = Scratch::new();
        let refusal = |list: &str| read_list(list, home.path()).err().expect("refused");
        assert!(refusal("").contains("there are no sources of crates under"));
        home.write("r/a-1.0.0/src/lib.rs", "text");
        let missing = refusal(&line("a-1.0.0", "src/de.rs", "text"));
        assert!(
            missing.starts_with("a-1.0.0/src/de.rs is not under") && missing.contains("cargo fetch --locked"),
            "{missing}"
        );
        for content in ["tex", "Text"] {
            let differs = refusal(&line("a-1.0.0", "src/lib.rs", content));
            assert!(differs.contains("a-1.0.0/src/lib.rs (4 bytes) is not as published"), "{differs}");
        }
    }

    #[test]
    fn the_list_is_sound() {
        let entries: Vec<_> = CORPUS.lines().map(|line| parse(line).expect(line)).collect();
        let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        assert!((1_500_000..3_000_000).contains(&total), "{total} bytes");
        for entry in &entries {
            assert!(entry.bytes > 0 && blake3::Hash::from_hex(entry.hash).is_ok() && !entry.path.contains(".."));
        }
        let mut names: Vec<_> = entries.iter().map(|entry| (entry.package, entry.path)).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), entries.len());
    }

    #[test]
    fn every_crate_of_the_list_is_locked_at_that_version() {
        let lock =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock")).expect("Cargo.lock");
        let locked: Vec<String> = lock
            .split("[[package]]")
            .filter_map(|package| {
                let value = |key: &str| package.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix('"'));
                Some(format!("{}-{}", value("name = \"")?, value("version = \"")?))
            })
            .collect();
        for entry in CORPUS.lines().map(|line| parse(line).expect(line)) {
            assert!(
                locked.iter().any(|package| package == entry.package),
                "{} is not in Cargo.lock; run the example `cargo_corpus` and commit its list",
                entry.package
            );
        }
    }
}

//! The floors of the workspace: a crate uses only crates on lower ones.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// Crate folder and floor. A crate that is not in this table is an error: give it a floor.
const FLOORS: &[(&str, u32)] = &[
    ("spec", 0),
    ("events", 0),
    ("netns", 0),
    ("program", 1),
    ("kernels", 1),
    ("fabric", 1),
    ("data", 1),
    ("policy", 1),
    ("checkpoint", 2),
    ("observe", 2),
    ("control", 2),
    ("train", 3),
    ("cli", 4),
];

/// Crates outside of the house: they may use all, nobody uses them.
const OUTSIDE: &[&str] = &["xtask"];

/// Lines of a source file above which it deserves a hard look.
const LINES_MAX: usize = 600;

/// The source that reads the wall clock, for all who date something. It jumps: whatever waits or measures uses `Instant`.
const WALL_CLOCK: [&str; 1] = ["crates/events/src/wall.rs"];

/// What is wrong with a crate.
#[derive(Debug, PartialEq, Eq)]
enum Violation {
    /// It is not in the table.
    NoFloor { name: String },
    /// It uses a crate that is not below it.
    Upwards { name: String, floor: u32, uses: String, its_floor: u32, dev: bool },
    /// It uses a crate that is outside, or has no floor.
    Outside { name: String, uses: String },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFloor { name } => write!(f, "{name} has no floor: add it to the table in xtask/src/floors.rs"),
            Self::Upwards { name, floor, uses, its_floor, dev } => {
                let (kind, law) = if *dev { ("dev-depends", "not above") } else { ("depends", "below") };
                write!(f, "{name} (floor {floor}) {kind} on {uses} (floor {its_floor}), which must be {law} it")
            }
            Self::Outside { name, uses } => write!(f, "{name} depends on {uses}, which nobody may use"),
        }
    }
}

/// A crate's manifest.
struct Member {
    /// The name of its folder.
    name: String,
    /// Workspace crates that it uses: (folder name, only in tests).
    uses: Vec<(String, bool)>,
}

/// Checks the workspace at `root` and prints what it finds; true if it is sound.
pub fn check(root: &Path) -> Result<bool, String> {
    let members = read(root)?;
    let violations = violations(&members);
    violations.iter().for_each(|v| println!("error: {v}"));
    let clocks = wall_clocks(&sources(root, &members)?);
    clocks.iter().for_each(|path| {
        println!("error: {path} reads the wall clock, which jumps: use Instant, or say why in WALL_CLOCK")
    });
    for (path, lines) in long_files(root, &members)? {
        println!("warning: {} has {lines} lines, more than {LINES_MAX}: a hard look", path.display());
    }
    println!("{} crates on their floors, {} violations", members.len(), violations.len() + clocks.len());
    Ok(violations.is_empty() && clocks.is_empty())
}

fn violations(members: &[Member]) -> Vec<Violation> {
    let floor = |name: &str| FLOORS.iter().find(|(n, _)| *n == name).map(|(_, floor)| *floor);
    let mut found = Vec::new();
    for member in members.iter().filter(|m| !OUTSIDE.contains(&m.name.as_str())) {
        let name = member.name.clone();
        let Some(mine) = floor(&name) else {
            found.push(Violation::NoFloor { name });
            continue;
        };
        for (uses, dev) in &member.uses {
            let (name, uses, dev) = (name.clone(), uses.clone(), *dev);
            match floor(&uses) {
                None => found.push(Violation::Outside { name, uses }),
                Some(its_floor) if its_floor < mine || (dev && its_floor == mine) => {}
                Some(its_floor) => found.push(Violation::Upwards { name, floor: mine, uses, its_floor, dev }),
            }
        }
    }
    found
}

fn manifest(path: &Path) -> Result<Table, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    text.parse().map_err(|e| format!("{} is no TOML: {e}", path.display()))
}

/// The crates of the workspace at `root`.
fn read(root: &Path) -> Result<Vec<Member>, String> {
    let workspace = manifest(&root.join("Cargo.toml"))?;
    let workspace =
        workspace.get("workspace").and_then(Value::as_table).ok_or("the root manifest has no [workspace]")?;
    let shared = workspace.get("dependencies").and_then(Value::as_table).cloned().unwrap_or_default();
    let globs = workspace.get("members").and_then(Value::as_array).ok_or("[workspace] has no members")?;
    let mut folders = Vec::new();
    for glob in globs.iter().filter_map(Value::as_str) {
        match glob.strip_suffix("/*") {
            Some(parent) => {
                let parent = root.join(parent);
                let entries = fs::read_dir(&parent).map_err(|e| format!("cannot read {}: {e}", parent.display()))?;
                folders
                    .extend(entries.filter_map(Result::ok).map(|e| e.path()).filter(|p| p.join("Cargo.toml").exists()));
            }
            None => folders.push(root.join(glob)),
        }
    }
    folders.sort();
    folders.iter().map(|folder| Ok(member(folder, &manifest(&folder.join("Cargo.toml"))?, &shared))).collect()
}

fn folder_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

/// The member in `folder` with `manifest`; `shared` is the root's table of dependencies.
fn member(folder: &Path, manifest: &Table, shared: &Table) -> Member {
    let targets = manifest.get("target").and_then(Value::as_table).into_iter().flat_map(Table::values);
    let scopes = std::iter::once(manifest).chain(targets.filter_map(Value::as_table));
    let mut uses = BTreeMap::new();
    for scope in scopes {
        for (section, dev) in [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)] {
            let entries = scope.get(section).and_then(Value::as_table).into_iter().flatten();
            for (key, value) in entries {
                let inherited = value.get("workspace").and_then(Value::as_bool) == Some(true);
                let value = if inherited { shared.get(key) } else { Some(value) };
                if let Some(path) = value.and_then(|v| v.get("path")).and_then(Value::as_str) {
                    // A crate used both ways is held to the stricter law.
                    let only_dev = uses.entry(folder_name(Path::new(path))).or_insert(dev);
                    *only_dev &= dev;
                }
            }
        }
    }
    Member { name: folder_name(folder), uses: uses.into_iter().collect() }
}

/// Source files of more than [`LINES_MAX`] lines.
fn long_files(root: &Path, members: &[Member]) -> Result<Vec<(PathBuf, usize)>, String> {
    let lines = sources(root, members)?.into_iter().map(|(path, text)| (path, text.lines().count()));
    let mut long: Vec<_> = lines.filter(|(_, lines)| *lines > LINES_MAX).collect();
    long.sort();
    Ok(long)
}

/// Those of `sources` that read the wall clock and may not: no tests, no examples.
fn wall_clocks(sources: &[(PathBuf, String)]) -> Vec<String> {
    let shipped = |path: &str| path.starts_with("crates/") && path.contains("/src/") && !WALL_CLOCK.contains(&path);
    let reads = |text: &str| text.contains("SystemTime") || text.contains("UNIX_EPOCH");
    let named = sources.iter().map(|(path, text)| (path.to_string_lossy().into_owned(), text));
    named.filter(|(path, text)| shipped(path) && reads(text)).map(|(path, _)| path).collect()
}

/// All source files, by their path in the workspace, with their text.
fn sources(root: &Path, members: &[Member]) -> Result<Vec<(PathBuf, String)>, String> {
    let mut all = Vec::new();
    let mut open: Vec<PathBuf> = members
        .iter()
        .map(
            |m| if OUTSIDE.contains(&m.name.as_str()) { root.join(&m.name) } else { root.join("crates").join(&m.name) },
        )
        .collect();
    while let Some(folder) = open.pop() {
        let entries = fs::read_dir(&folder).map_err(|e| format!("cannot read {}: {e}", folder.display()))?;
        for path in entries.filter_map(Result::ok).map(|e| e.path()) {
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
                all.push((path.strip_prefix(root).unwrap_or(&path).to_owned(), text));
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: &str = r#"
        spec = { path = "crates/spec", package = "lockstep-spec" }
        kernels = { path = "crates/kernels" }
        fabric = { path = "crates/fabric" }
        train = { path = "crates/train" }
        xtask = { path = "xtask" }
        serde = "1"
    "#;

    fn found(name: &str, text: &str) -> Vec<String> {
        let shared: Table = SHARED.parse().unwrap();
        let member = member(&Path::new("crates").join(name), &text.parse().unwrap(), &shared);
        violations(&[member]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn downwards_is_free_and_equal_is_for_tests() {
        let text = "[dependencies]\nspec.workspace = true\nserde.workspace = true\n[dev-dependencies]\nfabric.workspace = true";
        assert_eq!(found("kernels", text), [""; 0]);
        assert_eq!(found("xtask", "[dependencies]\ntrain.workspace = true"), [""; 0]);
    }

    #[test]
    fn a_violating_manifest_is_named() {
        let upwards = found("kernels", "[dependencies]\ntrain = { path = \"../train\" }");
        assert_eq!(upwards, ["kernels (floor 1) depends on train (floor 3), which must be below it"]);
        let equal = found("kernels", "[dependencies]\nfabric.workspace = true");
        assert_eq!(equal, ["kernels (floor 1) depends on fabric (floor 1), which must be below it"]);
        let both =
            found("kernels", "[dev-dependencies]\nfabric.workspace = true\n[dependencies]\nfabric.workspace = true");
        assert_eq!(both, equal, "the stricter law");
        let dev = found("spec", "[dev-dependencies]\nkernels.workspace = true");
        assert_eq!(dev, ["spec (floor 0) dev-depends on kernels (floor 1), which must be not above it"]);
        let hidden = found("spec", "[target.'cfg(unix)'.dependencies]\nkernels.workspace = true");
        assert_eq!(hidden, ["spec (floor 0) depends on kernels (floor 1), which must be below it"]);
        let outside = found("train", "[dependencies]\nxtask.workspace = true");
        assert_eq!(outside, ["train depends on xtask, which nobody may use"]);
        assert!(found("novel", "")[0].starts_with("novel has no floor"));
    }

    #[test]
    fn who_reads_the_wall_clock_is_named() {
        let source = |path: &str, text: &str| (PathBuf::from(path), text.to_string());
        let late = "let late = SystemTime::now() > deadline;";
        let found = wall_clocks(&[
            source("crates/policy/src/lib.rs", late),
            source("crates/policy/tests/a.rs", late),
            source(WALL_CLOCK[0], late),
            source("crates/train/src/rank.rs", "Instant::now()"),
        ]);
        assert_eq!(found, ["crates/policy/src/lib.rs"]);
    }

    #[test]
    fn this_workspace_is_sound() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let members = read(root).unwrap();
        assert!(members.len() > FLOORS.len());
        assert_eq!(violations(&members), []);
        assert_eq!(wall_clocks(&sources(root, &members).unwrap()), [""; 0]);
        let train = members.iter().find(|m| m.name == "train").unwrap();
        assert!(train.uses.contains(&("program".into(), false)), "{:?}", train.uses);
    }
}

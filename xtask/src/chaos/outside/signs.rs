//! What shows of a run from outside: its words, its folders, its processes.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;

use events::Event;

/// A line that a run said.
pub enum Sign {
    /// An event.
    Event(Box<Event>),
    /// Anything else.
    Line(String),
}

/// Hands on what `output` says, from a thread that ends with it.
pub fn hear(output: impl Read + Send + 'static, tell: Sender<Sign>) {
    std::thread::spawn(move || {
        BufReader::new(output).lines().map_while(Result::ok).all(|line| {
            let sign = match Event::from_line(&line) {
                Ok(event) => Sign::Event(Box::new(event)),
                Err(_) => Sign::Line(line),
            };
            tell.send(sign).is_ok()
        })
    });
}

/// A folder in which names come and go.
pub struct Folder {
    path: PathBuf,
    known: BTreeSet<String>,
}

impl Folder {
    /// What is there now is known.
    pub fn new(path: &Path) -> Self {
        Self { path: path.into(), known: names(path) }
    }

    /// Names that begin like this and were not there when this was asked last.
    pub fn new_names(&mut self, start: &str) -> bool {
        let names = names(&self.path);
        let new = names.iter().any(|name| name.starts_with(start) && !self.known.contains(name));
        self.known = names;
        new
    }
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The steps with a complete checkpoint in a folder of checkpoints, ascending.
pub fn steps(checkpoints: &Path) -> Vec<u64> {
    let named = names(checkpoints).into_iter().filter(|name| checkpoints.join(name).join("manifest.json").exists());
    named.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect()
}

/// Complete checkpoints in a folder of checkpoints that were set aside. None of a chain was ever damaged.
pub fn set_aside(checkpoints: &Path) -> Vec<String> {
    let aside = names(checkpoints).into_iter().filter(|name| name.contains(".damaged"));
    aside.filter(|name| checkpoints.join(name).join("manifest.json").exists()).collect()
}

/// The processes that `parent` has started and that are not collected.
pub fn children(parent: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let of = threads.map(|thread| fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let mut all: Vec<u32> =
        of.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect();
    all.sort_unstable();
    all
}

/// Whether it runs or stands still, neither gone nor waiting to be collected.
pub fn lives(pid: u32) -> bool {
    state(pid).is_some_and(|state| !"ZX".contains(state))
}

fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Where a process stands: its state, and that of each of its threads with what it waits for.
pub fn standing(pid: u32) -> String {
    let Some(state) = state(pid) else { return format!("process {pid} is gone") };
    let read = |path: &Path, name: &str| fs::read_to_string(path.join(name)).unwrap_or_default().trim().to_owned();
    let mut text = format!("process {pid} ({state})");
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let path = thread.path();
        text += &format!("\n    {} in {} ({})", read(&path, "comm"), read(&path, "wchan"), read(&path, "syscall"));
    }
    text
}

//! A folder to work in, the binary, and what it said.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Nothing here takes this long; a hang ends the test instead of the suite.
const PATIENCE: Duration = Duration::from_secs(180);

/// A small run; 4 data cells, 2 tensor cells, 2 microbatches a cell.
pub const NANO: &str = r#"
[model]
preset = "nano"
qk_norm = true
tied = true
[data]
source = "synthetic"
[train]
steps = 4
batch = 8
seq = 16
lr = 3e-3
warmup = 2
eval_sequences = 2
[grid]
dp = 4
tp = 2
# Steps take milliseconds here: a checkpoint beside them would take several.
[checkpoint]
background = false
"#;

/// Settings under which a step takes seconds.
pub const SLOW: [&str; 4] = ["model.preset=demo", "train.seq=512", "train.batch=64", "train.steps=50"];

/// A fault that keeps a run at work, however long a busy machine lets the test wait: from `step` on all that `rank` does takes thirty
/// times as long (no more, or what a busy machine makes slow would look like a hang). It ends with the world of that rank, or after so many `steps`. Who waits for the line of `step` and strikes then
/// finds it struck, too, so that it does not strike in the next world.
pub fn hold(rank: usize, step: u64, steps: Option<u64>) -> String {
    let steps = steps.map_or(String::new(), |steps| format!(":{steps}"));
    format!("slow:{rank}@{step}x30{steps}")
}

/// A folder that is the working directory of the binary; `run.toml` in it is [`NANO`].
pub struct Lab {
    dir: TempDir,
}

/// What the binary said, when it is done.
pub struct Out {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// The binary while it runs; killed when dropped.
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
    stderr: Option<JoinHandle<String>>,
}

/// Relative path and content of every file below a folder; folders end in `/`.
pub type Tree = BTreeMap<PathBuf, Vec<u8>>;

impl Lab {
    pub fn new() -> Self {
        let lab = Self { dir: tempfile::tempdir().unwrap() };
        lab.write("run.toml", NANO);
        lab
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.path(name), text).unwrap();
    }

    pub fn tree(&self) -> Tree {
        tree(self.dir.path())
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Runs the binary to its end.
    pub fn lockstep(&self, args: &[&str]) -> Out {
        self.start(args).end()
    }

    /// Trains `run.toml` in the run directory `dir` to its end.
    pub fn train(&self, dir: &str, args: &[&str], sets: &[&str]) -> Out {
        self.start_train(dir, args, sets).end()
    }

    pub fn start(&self, args: &[&str]) -> Running {
        self.start_command(self.command(args))
    }

    /// Starts `command` in this folder.
    pub fn start_command(&self, mut command: Command) -> Running {
        let mut child =
            command.current_dir(self.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let mut stderr = child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        Running { child, lines, seen: Vec::new(), stderr: Some(stderr) }
    }

    pub fn start_train(&self, dir: &str, args: &[&str], sets: &[&str]) -> Running {
        let sets: Vec<String> = sets.iter().map(|set| format!("--set={set}")).collect();
        let words = ["train", "run.toml", "--run-dir", dir].into_iter().chain(args.iter().copied());
        self.start(&words.chain(sets.iter().map(String::as_str)).collect::<Vec<_>>())
    }
}

impl Out {
    /// The exit code; `None` if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Stops the test unless the exit code is `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code(), Some(code), "{self}");
        self
    }

    /// The digest, which is the last line.
    #[track_caller]
    pub fn digest(&self) -> String {
        let digest = self.stdout.lines().last().and_then(|line| line.strip_prefix("digest "));
        let digest = digest.filter(|d| d.len() == 64 && d.bytes().all(|b| b.is_ascii_hexdigit()));
        digest.unwrap_or_else(|| panic!("the last line is no digest: {self}")).to_owned()
    }

    /// Stops the test unless every word is in what went to standard error.
    #[track_caller]
    pub fn says(&self, words: &[&str]) {
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not said: {self}");
        }
        assert!(!self.stderr.contains("panicked"), "{self}");
    }
}

impl std::fmt::Display for Out {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\nstdout:\n{}\nstderr:\n{}", self.status, self.stdout, self.stderr)
    }
}

impl Running {
    /// Waits for a line that `wanted` accepts.
    #[track_caller]
    pub fn wait_for(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if wanted(&line) {
                        return line;
                    }
                }
                Err(e) => panic!("the line does not come ({e}); so far:\n{}", self.seen.join("\n")),
            }
        }
    }

    /// Waits for the line of `step`.
    #[track_caller]
    pub fn wait_for_step(&mut self, step: u64) {
        let start = format!("step {step}/");
        self.wait_for(|line| line.starts_with(&start));
    }

    /// The processes of all `count` ranks, by rank.
    #[track_caller]
    pub fn ranks(&mut self, count: usize) -> Vec<u32> {
        let mut pids = BTreeMap::new();
        while pids.len() < count {
            let line = self.wait_for(|line| line.starts_with("rank ") && line.contains(" is process "));
            let (rank, pid) = line["rank ".len()..].split_once(" is process ").unwrap();
            pids.insert(rank.parse::<usize>().unwrap(), pid.parse().unwrap());
        }
        pids.into_values().collect()
    }

    /// The group of a process that was started with one of its own.
    pub fn group(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        send(self.child.id(), signal);
    }

    /// Waits until the process has taken in `signal`, which was sent to it.
    #[track_caller]
    pub fn taken_in(&self, signal: Signal) {
        let deadline = Instant::now() + PATIENCE;
        let waits = || {
            let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
            u64::from_str_radix(pending.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
        };
        while waits() {
            assert!(Instant::now() < deadline, "{signal:?} is not taken in");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end.
    pub fn end(mut self) -> Out {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let late = Instant::now() > deadline;
            assert!(!late, "it does not end; so far:\n{}", self.seen.join("\n"));
            match self.lines.recv_timeout(Duration::from_millis(10)) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        // Both pipes close when the last process that holds them is gone.
        self.seen.extend(self.lines.iter());
        let stderr = self.stderr.take().unwrap().join().unwrap();
        Out { status, stdout: self.seen.join("\n"), stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// True if the process runs: neither gone nor waiting to be collected.
pub fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

/// Stops the test unless all processes are gone within `limit`; those that are not are killed first.
#[track_caller]
pub fn gone_within(limit: Duration, pids: &[u32]) {
    let deadline = Instant::now() + limit;
    let left = || pids.iter().copied().filter(|pid| runs(*pid)).collect::<Vec<_>>();
    while !left().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let left = left();
    left.iter().for_each(|pid| send(*pid, Signal::KILL));
    assert!(left.is_empty(), "{left:?} of {pids:?} still run after {limit:?}");
}

pub fn tree(root: &Path) -> Tree {
    let mut found = Tree::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.strip_prefix(root).unwrap().to_owned();
            if path.is_dir() {
                found.insert(name.join(""), Vec::new());
                folders.push(path);
            } else {
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Stops the test unless both folders hold the same; names what differs.
#[track_caller]
pub fn same_tree(before: &Tree, after: &Tree) {
    let names = before.keys().chain(after.keys());
    let differs: Vec<_> = names.filter(|name| before.get(*name) != after.get(*name)).collect();
    assert!(differs.is_empty(), "these files changed: {differs:?}");
}

/// Copies a folder with everything in it.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for (name, content) in tree(from) {
        let path = to.join(&name);
        // Folders come before what is in them.
        if from.join(&name).is_dir() {
            fs::create_dir_all(path).unwrap();
        } else {
            fs::write(path, content).unwrap();
        }
    }
}

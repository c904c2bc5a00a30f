//! Runs the binary and reads what it leaves.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use events::{Event, RankReport};
use serde_json::Value;

/// Exit code of a run that was stopped on request, after a checkpoint.
const STOPPED: i32 = 3;
/// How often a run is tried that must be stopped before it ends by itself.
const STOP_TRIES: u32 = 5;

/// The built binary, a run file and a place for run folders.
pub struct Launcher {
    /// The binary.
    pub binary: PathBuf,
    /// Where everything of this proof lies.
    pub folder: PathBuf,
}

/// One start of the binary.
#[derive(Debug, Clone, Copy, Default)]
pub struct Start<'a> {
    /// Keys.
    pub sets: &'a [String],
    /// Further arguments.
    pub args: &'a [&'a str],
    /// Send SIGTERM after the first step.
    pub stop: bool,
}

/// What a run left.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The digest.
    pub digest: String,
    /// The last step.
    pub step: u64,
    /// What ranks counted.
    pub ranks: Vec<RankReport>,
    /// Distinct processes of ranks.
    pub processes: usize,
    /// The layout as the run understood it.
    pub layout: String,
    /// Every step and validation, see [`curve`].
    pub curve: Vec<String>,
}

/// Why there is nothing to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// The exit code; `None`: a signal.
    pub code: Option<i32>,
    /// The last words.
    pub reason: String,
}

/// Starts `command`: the child, its output, and a thread that takes in what it says on standard error.
///
/// # Errors
/// What the system refuses.
pub fn piped(command: &mut Command) -> Result<(Child, ChildStdout, JoinHandle<String>), String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|e| format!("cannot start {}: {e}", command.get_program().display()))?;
    let (output, mut errors) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = errors.read_to_string(&mut text);
        text
    });
    Ok((child, output, errors))
}

/// Builds the release binary; its path.
pub fn build(root: &Path) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let args =
        ["build", "--release", "--locked", "--package", "lockstep", "--message-format", "json-render-diagnostics"];
    let output = Command::new(cargo)
        .args(args)
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("cannot start cargo: {e}"))?;
    if !output.status.success() {
        return Err(format!("the build of the binary ended with {}", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let built = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let executable = built.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).next_back();
    executable.ok_or_else(|| "cargo built no binary".into())
}

impl Launcher {
    /// Writes the run file of a grid.
    pub fn write(&self, name: &str, toml: &str) -> Result<(), String> {
        let path = self.run_file(name);
        fs::write(&path, toml).map_err(|e| format!("cannot write {}: {e}", path.display()))
    }

    fn run_file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.toml"))
    }

    /// Removes the run file of a grid.
    pub fn forget(&self, name: &str) -> Result<(), String> {
        let path = self.run_file(name);
        fs::remove_file(&path).map_err(|e| format!("cannot remove {}: {e}", path.display()))
    }

    /// What `check` says to grid `name` under `sets`.
    pub fn check(&self, name: &str, sets: &[String]) -> Result<(), Failed> {
        let mut command = Command::new(&self.binary);
        command.arg("check").arg(self.run_file(name)).current_dir(&self.folder);
        for set in sets {
            command.arg("--set").arg(set);
        }
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|e| Failed { code: None, reason: format!("cannot start the check: {e}") })?;
        match output.status.code() {
            Some(0) => Ok(()),
            code => Err(Failed { code, reason: last_words(&String::from_utf8_lossy(&output.stderr)) }),
        }
    }

    /// The folder of run number `number`.
    pub fn run_dir(&self, number: usize) -> PathBuf {
        self.folder.join(format!("run-{number}"))
    }

    /// Runs grid `name` in `run_dir` to its end, or (with `stop`) until it stops on request.
    pub fn run(&self, name: &str, run_dir: &Path, start: Start) -> Result<Finished, Failed> {
        self.run_within(name, run_dir, start, None)
    }

    /// [`Launcher::run`]; what takes longer than `limit` is ended.
    pub fn run_within(
        &self,
        name: &str,
        run_dir: &Path,
        start: Start,
        limit: Option<Duration>,
    ) -> Result<Finished, Failed> {
        for _ in 0..STOP_TRIES {
            let (code, seen, errors) =
                self.once(name, run_dir, start, limit).map_err(|reason| Failed { code: None, reason })?;
            match code {
                Some(0) if start.stop => {
                    // It was faster than the signal.
                    fs::remove_dir_all(run_dir).map_err(|e| Failed { code, reason: e.to_string() })?;
                }
                Some(0) | Some(STOPPED) if (code == Some(STOPPED)) == start.stop => {
                    return finished(run_dir, &seen).map_err(|reason| Failed { code, reason });
                }
                _ => {
                    return Err(Failed { code, reason: last_words(&errors) });
                }
            }
        }
        Err(Failed { code: Some(0), reason: format!("ended {STOP_TRIES} times before it could be stopped") })
    }

    fn once(
        &self,
        name: &str,
        run_dir: &Path,
        start: Start,
        limit: Option<Duration>,
    ) -> Result<(Option<i32>, Vec<Event>, String), String> {
        let mut command = Command::new(&self.binary);
        command.arg("train").arg(self.run_file(name)).arg("--run-dir").arg(run_dir).arg("--json");
        for set in start.sets {
            command.arg("--set").arg(set);
        }
        command.args(start.args).current_dir(&self.folder);
        let (mut child, output, errors) = piped(&mut command)?;
        let over = limit.map(|limit| end_after(child.id(), limit));
        let mut seen = Vec::new();
        let mut stop = start.stop;
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // The split of the time is no event.
            let Ok(event) = Event::from_line(&line) else { continue };
            if stop && matches!(event, Event::Step(_)) {
                stop = false;
                let asked = Command::new("kill").arg("-TERM").arg(child.id().to_string()).status();
                asked.map_err(|e| format!("cannot send SIGTERM: {e}"))?;
            }
            seen.push(event);
        }
        let status = child.wait().map_err(|e| format!("cannot wait: {e}"))?;
        drop(over);
        Ok((status.code(), seen, errors.join().unwrap_or_default()))
    }
}

/// Ends the process `pid` after `limit`, unless what it returns is dropped before.
fn end_after(pid: u32, limit: Duration) -> Sender<()> {
    let (over, ended) = channel::<()>();
    std::thread::spawn(move || {
        if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            eprintln!("process {pid} ran for longer than {} s and is ended", limit.as_secs());
            let _ = Command::new("kill").arg("-KILL").arg(pid.to_string()).status();
        }
    });
    over
}

/// The last line of `errors` that is an error, or the last one.
fn last_words(errors: &str) -> String {
    let error = errors.lines().rev().find(|line| line.starts_with("error: "));
    error.or(errors.lines().last()).unwrap_or("it said nothing").to_owned()
}

/// Every step and validation of a run with its numbers, as far as they outlive their way as text.
pub fn curve(seen: &[Event]) -> Vec<String> {
    let line = |event: &Event| match event {
        Event::Step(s) => {
            Some(format!("step {} loss {:.12e} norm {:.12e} lr {:.9e}", s.step, s.loss, s.grad_norm, s.lr))
        }
        Event::Validation { step, set, loss, tokens, best, .. } => {
            let set = set.as_deref().unwrap_or("main");
            Some(format!("validation {set} after {step} loss {loss:.12e} of {tokens} tokens, best {best}"))
        }
        _ => None,
    };
    seen.iter().filter_map(line).collect()
}

fn finished(run_dir: &Path, seen: &[Event]) -> Result<Finished, String> {
    let mut processes: Vec<u32> = seen
        .iter()
        .filter_map(|event| match event {
            Event::RankStarted { pid, .. } => Some(*pid),
            _ => None,
        })
        .collect();
    processes.sort_unstable();
    processes.dedup();
    let digest = seen.iter().rev().find_map(|event| match event {
        Event::Digest { step, digest, .. } => Some((*step, digest.clone())),
        _ => None,
    });
    let (step, digest) = digest.ok_or("it printed no digest")?;
    let path = run_dir.join("summary.json");
    let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let mut summary: Value = serde_json::from_str(&text).map_err(|e| format!("summary.json: {e}"))?;
    let layout = summary["layout"].as_str().unwrap_or_default().to_string();
    let ranks = serde_json::from_value(summary["ranks"].take()).map_err(|e| format!("summary.json: ranks: {e}"))?;
    Ok(Finished { digest, step, ranks, processes: processes.len(), layout, curve: curve(seen) })
}

/// Takes away all checkpoints of a run but the first.
pub fn keep_first_checkpoint(run_dir: &Path) -> Result<(), String> {
    let folder = run_dir.join("checkpoints");
    let entries = fs::read_dir(&folder).map_err(|e| format!("cannot read {}: {e}", folder.display()))?;
    let mut all: Vec<PathBuf> = entries.filter_map(Result::ok).map(|e| e.path()).filter(|p| p.is_dir()).collect();
    all.sort();
    if all.len() < 2 {
        return Err(format!("{} checkpoints where two are due", all.len()));
    }
    all[1..].iter().try_for_each(|path| fs::remove_dir_all(path).map_err(|e| e.to_string()))
}

//! Changing a run while it is at work: a request in its folder, taken between two looks at the ranks.
//!
//! Another binary is asked what it is by who makes the request, before the run hears of it; the run compares that with itself.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use control::wire::{ABOUT_COMMAND, About, PROTOCOL};
use events::regular;
use kernels::NUMERICS_VERSION;
use policy::Laws;
use serde::{Deserialize, Serialize};
use spec::{Run, Transport};

use super::{RunFolder, prove};
use crate::error::TrainError;

/// What may change bits: the recipe, not what the numbers are sums of.
const RECIPE: [&str; 7] =
    ["train.lr", "train.lr_min", "train.clip", "train.weight_decay", "train.beta1", "train.beta2", "train.eps"];
/// What never changes bits.
const FREE: [&str; 3] = ["layout.", "guard.", "checkpoint."];
const REQUEST: &str = "reload.request";
const ANSWER: &str = "reload.answer";
/// How long the run may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a binary may take to say what it is.
const ABOUT_LIMIT: Duration = Duration::from_secs(10);
/// How often the answer is looked for.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Serialize, Deserialize)]
struct Request {
    id: u64,
    sets: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    binary: Option<Binary>,
}

/// Another binary, and what it says of itself.
#[derive(Clone, Serialize, Deserialize)]
struct Binary {
    path: PathBuf,
    about: About,
}

/// What this binary is.
pub fn about() -> About {
    About { version: env!("CARGO_PKG_VERSION").into(), protocol: PROTOCOL, numerics_version: NUMERICS_VERSION }
}

/// Asks the binary at `path` what it is.
fn ask(path: &Path) -> Result<Binary, TrainError> {
    let shown = path.display();
    let refused = |why: String| {
        TrainError::BadInput(format!(
            "{shown} is no lockstep that a run can be handed over to: {why}; the run goes on unchanged"
        ))
    };
    let path = path.canonicalize().map_err(|e| refused(e.to_string()))?;
    let mut command = Command::new(&path);
    let asked = command.arg(ABOUT_COMMAND).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = asked.map_err(|e| refused(format!("it cannot be started: {e}")))?;
    let until = Instant::now() + ABOUT_LIMIT;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(refused(format!("it did not say what it is within {} s", ABOUT_LIMIT.as_secs())));
            }
        }
    }
    let mut text = String::new();
    // What it says fits into the pipe; more than that is no answer.
    let read = child.stdout.take().map(|out| out.take(4096).read_to_string(&mut text));
    let about = read.and_then(Result::ok).and_then(|_| serde_json::from_str(&text).ok());
    Ok(Binary { path, about: about.ok_or_else(|| refused("it does not say what it is".into()))? })
}

/// That `run`, which may not lose any of its ranks' state, can go over to `binary`.
fn fits(binary: &Binary, run: &Run, laws: &dyn Laws) -> Result<(), TrainError> {
    let (new, own, shown) = (&binary.about, about(), binary.path.display());
    if new.numerics_version != own.numerics_version {
        return Err(TrainError::BadInput(format!(
            "{shown} has numerics version {}, this run {}: its bits would differ; stop the run and resume it with that binary",
            new.numerics_version, own.numerics_version
        )));
    }
    if new.protocol != own.protocol {
        return Err(TrainError::BadInput(format!(
            "{shown} (version {}) has protocol {}, this run {}: they do not understand each other; stop the run and resume it with that binary",
            new.version, new.protocol, own.protocol
        )));
    }
    let world = run.layout.world();
    let alone = (0..world).find(|gone| {
        !laws.covers(run, &(0..world).map(|rank| (rank != *gone).then_some(&[][..])).collect::<Vec<_>>(), run)
    });
    match alone {
        Some(rank) => Err(TrainError::BadInput(format!(
            "ranks are replaced one by one, and state of rank {rank} has no other holder under {}; set layout.mirror=true first",
            run.layout
        ))),
        None => Ok(()),
    }
}

#[derive(Serialize, Deserialize)]
struct Answer {
    id: u64,
    refused: Option<String>,
    text: String,
}

/// Asks the run at work in `folder` to go on under `sets` (`key=value`), with rank processes of `binary`; what it answered.
///
/// # Errors
/// If no run is at work there, or it refuses; then it goes on unchanged.
pub fn request(folder: &Path, sets: &[String], binary: Option<&Path>) -> Result<String, TrainError> {
    let shown = folder.display();
    let run_folder = RunFolder::new(folder);
    run_folder.check()?;
    if run_folder.lock_if_there().is_ok() {
        return Err(TrainError::BadInput(format!(
            "no run is at work in {shown}; `lockstep train --resume` starts one under another layout"
        )));
    }
    let binary = binary.map(ask).transpose()?;
    let (path, io) =
        (folder.join(REQUEST), |source| TrainError::Io { what: "cannot write", path: folder.join(REQUEST), source });
    let id = std::process::id().into();
    let text = serde_json::to_string(&Request { id, sets: sets.to_vec(), binary }).unwrap_or_default();
    write_whole(&path, &text).map_err(io)?;
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let answer =
            regular::read_to_string(&folder.join(ANSWER)).ok().and_then(|t| serde_json::from_str::<Answer>(&t).ok());
        if let Some(answer) = answer.filter(|answer| answer.id == id) {
            let _ = fs::remove_file(folder.join(ANSWER));
            return match answer.refused {
                None => Ok(answer.text),
                Some(reason) => Err(TrainError::BadInput(format!("the run goes on unchanged: {reason}"))),
            };
        }
        std::thread::sleep(LOOK);
    }
    let _ = fs::remove_file(&path);
    Err(TrainError::BadInput(format!(
        "the run in {shown} did not answer within {} s; does it run rank processes (more than one rank, layout.transport shm or tcp)?",
        PATIENCE.as_secs()
    )))
}

fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let draft = path.with_extension("draft");
    regular::write(&draft, text)?;
    fs::rename(draft, path)
}

/// The run's side.
pub(super) struct Desk {
    folder: PathBuf,
    cores: usize,
}

/// A change that the run accepted.
pub(super) struct Change {
    pub run: Run,
    /// What it changes of the recipe, as `key=value`; empty: no bit.
    pub recipe: Vec<String>,
    /// Keys are changed.
    pub keys: bool,
    /// The program of rank processes from now on, if it is another one.
    pub binary: Option<PathBuf>,
}

impl Desk {
    pub fn new(folder: &Path, cores: usize) -> Self {
        Self { folder: folder.to_owned(), cores }
    }

    /// The change that somebody asks for, if it can be made to `run`; otherwise they are told why not.
    ///
    /// `local`: the processes are of this machine, and can be of another binary.
    pub fn look(&self, run: &Run, laws: &dyn Laws, local: bool) -> Option<Change> {
        let path = self.folder.join(REQUEST);
        let text = regular::read_to_string(&path).ok()?;
        let _ = fs::remove_file(&path);
        let request: Request = serde_json::from_str(&text).ok()?;
        let binary = request.binary.as_ref();
        let changed = change(run, &request.sets, self.cores).and_then(|mut change| {
            if binary.is_some() && !local {
                let why =
                    "the agents of several hosts start their own binary; stop the run, change it there and start again";
                return Err(TrainError::BadInput(why.into()));
            }
            binary.map_or(Ok(()), |binary| fits(binary, &change.run, laws))?;
            change.binary = binary.map(|binary| binary.path.clone());
            Ok(change)
        });
        let answer = match &changed {
            Ok(change) => Answer {
                id: request.id,
                refused: None,
                text: match &change.binary {
                    None => format!("from the next step on: {} | {}", request.sets.join(" "), change.run.layout),
                    Some(binary) => format!(
                        "from the next step on: {} | {} | rank processes go over to {} one by one",
                        request.sets.join(" "),
                        change.run.layout,
                        binary.display()
                    ),
                },
            },
            Err(e) => Answer { id: request.id, refused: Some(e.to_string()), text: String::new() },
        };
        let _ = write_whole(&self.folder.join(ANSWER), &serde_json::to_string(&answer).unwrap_or_default());
        changed.ok()
    }
}

fn change(run: &Run, sets: &[String], cores: usize) -> Result<Change, TrainError> {
    let key = |set: &str| set.split('=').next().unwrap_or_default().trim().to_owned();
    let free = |key: &str| FREE.iter().any(|section| key.starts_with(section));
    if let Some(other) = sets.iter().map(|s| key(s)).find(|k| !free(k) && !RECIPE.contains(&k.as_str())) {
        return Err(TrainError::BadInput(format!(
            "{other} cannot be changed in a run; these can: layout.*, guard.*, checkpoint.*, {}",
            RECIPE.join(", ")
        )));
    }
    let changed = Run::parse(&run.values.to_toml(), "the run", sets, cores)?;
    if changed.layout.transport == Transport::Threads {
        return Err(TrainError::BadInput("layout.transport = threads: rank processes cannot become threads".into()));
    }
    prove(&changed)?;
    let recipe = sets.iter().filter(|set| !free(&key(set))).cloned().collect();
    Ok(Change { run: changed, recipe, keys: !sets.is_empty(), binary: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_defines_the_sums_stays() {
        let text = "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n[layout]\ndp = 2\n";
        let run = Run::parse(text, "t", &[], 1).unwrap();
        let with = |set: &str| change(&run, &[set.into()], 1).map(|c| (c.run.layout.world(), c.recipe));
        assert_eq!(with("layout.dp=4").unwrap(), (4, vec![]));
        assert_eq!(with("train.lr=1e-4").unwrap(), (2, vec!["train.lr=1e-4".to_string()]));
        for (set, word) in [
            ("grid.dp=1", "grid.dp cannot be changed"),
            ("layout.dp=9", "layout.dp = 9"),
            ("layout.transport=threads", "threads"),
            ("layout.dpp=3", "layout.dp"),
            ("train.lr=-1", "train.lr"),
        ] {
            let error = with(set).unwrap_err().to_string();
            assert!(error.contains(word), "{set}: {error}");
        }
    }
}

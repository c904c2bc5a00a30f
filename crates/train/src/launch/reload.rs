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
use spec::{RECIPE, Run, Transport, is_of_recipe};

use super::record::INTERVENTIONS;
use super::{RunFolder, prove};
use crate::error::TrainError;

/// What never changes bits.
const FREE: [&str; 3] = ["layout.", "guard.", "checkpoint."];
const REQUEST: &str = "reload.request";
/// What it is called while the run deals with it.
const TAKEN: &str = "reload.taken";
const ANSWER: &str = "reload.answer";
/// How long the run may take to see the request.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take to answer then: its world has to end before a change of the recipe has a step.
const PATIENCE_TAKEN: Duration = Duration::from_secs(600);
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
    let began = Instant::now();
    let mut at_work = true;
    loop {
        let answer =
            regular::read_to_string(&folder.join(ANSWER)).ok().and_then(|t| serde_json::from_str::<Answer>(&t).ok());
        if let Some(answer) = answer.filter(|answer| answer.id == id) {
            let _ = fs::remove_file(folder.join(ANSWER));
            return match answer.refused {
                None => Ok(answer.text),
                Some(reason) => Err(TrainError::BadInput(format!("the run goes on unchanged: {reason}"))),
            };
        }
        let waited = began.elapsed();
        // Who takes it renames it; once it is gone here it never will.
        if (!at_work || waited > PATIENCE) && fs::remove_file(&path).is_ok() {
            let why = match at_work {
                true => format!(
                    "did not answer within {} s; does it run rank processes (more than one rank, layout.transport shm or tcp)?",
                    PATIENCE.as_secs()
                ),
                false => "has ended; `lockstep train --resume` starts it under another layout".into(),
            };
            return Err(TrainError::BadInput(format!("nothing is changed: the run in {shown} {why}")));
        }
        if !at_work || waited > PATIENCE_TAKEN {
            return Err(TrainError::BadInput(format!(
                "the run in {shown} took the request and {}: whether it holds stands in {}",
                if at_work { "has not answered yet" } else { "ended before it answered" },
                folder.join(INTERVENTIONS).display()
            )));
        }
        // Looked at before the answer is: the last word of a run that ends is seen.
        at_work = RunFolder::new(folder).lock_if_there().is_err();
        std::thread::sleep(LOOK);
    }
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

/// A change that the run can make.
pub(super) struct Change {
    /// Whose request it is.
    id: u64,
    /// What is changed, each `key=value`.
    pub sets: Vec<String>,
    /// The run with that.
    pub run: Run,
    /// The program of rank processes from now on, if it is another one.
    pub binary: Option<PathBuf>,
}

impl Change {
    /// It changes the recipe, and with it bits.
    pub fn of_recipe(&self) -> bool {
        self.sets.iter().any(|set| is_of_recipe(set))
    }

    /// For the person.
    pub fn shown(&self) -> String {
        format!("{} | {}", self.sets.join(" "), self.run.layout)
    }
}

impl Desk {
    /// What was asked of an earlier run in the folder is nothing that this one is asked.
    pub fn new(folder: &Path, cores: usize) -> Self {
        [REQUEST, TAKEN, ANSWER].iter().for_each(|name| drop(fs::remove_file(folder.join(name))));
        Self { folder: folder.to_owned(), cores }
    }

    /// The change that somebody asks for, if it can be made to `run`; otherwise they are told why not.
    ///
    /// `local`: the processes are of this machine, and can be of another binary.
    pub fn look(&self, run: &Run, laws: &dyn Laws, local: bool) -> Option<Change> {
        let (path, taken) = (self.folder.join(REQUEST), self.folder.join(TAKEN));
        // Who asks takes a request back by removing it: it is theirs or ours, never both.
        fs::rename(path, &taken).ok()?;
        let text = regular::read_to_string(&taken).ok()?;
        let request: Request = serde_json::from_str(&text).ok()?;
        let binary = request.binary.as_ref();
        let changed = change(run, &request.sets, self.cores).and_then(|(run, sets)| {
            if binary.is_some() && !local {
                let why =
                    "the agents of several hosts start their own binary; stop the run, change it there and start again";
                return Err(TrainError::BadInput(why.into()));
            }
            binary.map_or(Ok(()), |binary| fits(binary, &run, laws))?;
            Ok(Change { id: request.id, sets, run, binary: binary.map(|binary| binary.path.clone()) })
        });
        changed
            .map_err(|e| self.tell(&Answer { id: request.id, refused: Some(e.to_string()), text: String::new() }))
            .ok()
    }

    /// Tells who asked what became of it: the step with which a change of the recipe begins, or why nothing is changed.
    pub fn answer(&self, change: &Change, outcome: &Result<Option<u64>, String>) {
        let from = match outcome {
            Ok(Some(step)) => format!("from step {step} on"),
            _ => "from the next step on".into(),
        };
        let over = match &change.binary {
            None => String::new(),
            Some(binary) => format!(" | rank processes go over to {} one by one", binary.display()),
        };
        let text = format!("{from}: {}{over}", change.shown());
        self.tell(&Answer { id: change.id, refused: outcome.as_ref().err().cloned(), text });
    }

    fn tell(&self, answer: &Answer) {
        let _ = write_whole(&self.folder.join(ANSWER), &serde_json::to_string(answer).unwrap_or_default());
        let _ = fs::remove_file(self.folder.join(TAKEN));
    }
}

/// The run with `sets`, and these in one form.
fn change(run: &Run, sets: &[String], cores: usize) -> Result<(Run, Vec<String>), TrainError> {
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
    // However a number was written: what is written down is read again as the same.
    let plain = |set: &String| match changed.values.float(&key(set)).filter(|_| is_of_recipe(set)) {
        Some(value) => format!("{}={value:?}", key(set)),
        None => set.clone(),
    };
    Ok((changed.clone(), sets.iter().map(plain).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_defines_the_sums_stays() {
        let text = "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n[layout]\ndp = 2\n";
        let run = Run::parse(text, "t", &[], 1).unwrap();
        let with = |set: &str| change(&run, &[set.into()], 1).map(|(run, sets)| (run.layout.world(), sets.concat()));
        assert_eq!(with("layout.dp=4").unwrap(), (4, "layout.dp=4".into()));
        assert_eq!(with("train.lr = 1_0e-5").unwrap(), (2, "train.lr=0.0001".into()));
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

//! What was changed in a run on purpose, in the run's folder (`interventions.jsonl`). It is a part of what the run is: a line is on the
//! disk before anybody acts on it, and a resume that cannot read one says so and does not go on without it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use checkpoint::Meta;
use events::Intervention;
use serde::{Deserialize, Serialize};
use spec::{Interventions, Run};

use super::RunFolder;
use crate::error::TrainError;

/// Name of the file.
pub(super) const INTERVENTIONS: &str = "interventions.jsonl";

/// A line.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    told: Intervention,
    /// Of what is told, so that no bit of it changes unseen; older versions wrote none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sum: Option<String>,
}

impl Line {
    fn of(told: Intervention) -> Self {
        Self { sum: told.set.as_ref().map(|_| sum(&told)), told }
    }
}

fn sum(told: &Intervention) -> String {
    let text = serde_json::to_vec(told).unwrap_or_default();
    blake3::hash(&text).to_hex()[..16].to_owned()
}

impl RunFolder {
    /// Writes an intervention down, so that it is there however this process or machine ends. One that is there already stays.
    ///
    /// # Errors
    /// Why it is not written; nothing of it is left then.
    pub fn intervene(&self, told: &Intervention) -> Result<(), String> {
        let path = self.path().join(INTERVENTIONS);
        append(&path, told).map_err(|e| format!("{} cannot be written: {e}", path.display()))
    }

    /// What changed in the run so far, as it is written down. What older versions wrote has no steps to rely on and is left out; it
    /// is in the run file that they left.
    ///
    /// # Errors
    /// A line that cannot be read.
    pub(super) fn recorded(&self) -> Result<Interventions, TrainError> {
        let path = self.path().join(INTERVENTIONS);
        let text = match fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
            Ok(found) if !found.is_file() => Err(io::Error::other("it is no file")),
            Ok(_) => fs::read(&path),
        };
        let text = text.map_err(|source| TrainError::Io { what: "cannot read", path: path.clone(), source })?;
        read(&text).map_err(|(line, why)| {
            TrainError::BadInput(format!(
                "line {line} of {} {why}: it is a part of what the run is, which cannot go on without it; restore the line, or remove it \
                 if the run is to go on as if it had never been",
                path.display()
            ))
        })
    }
}

/// The lines of a record; a line cut short by a death was not acted on.
fn read(text: &[u8]) -> Result<Interventions, (usize, String)> {
    let mut recorded = Interventions::default();
    let whole = text.rsplitn(2, |byte| *byte == b'\n').nth(1).unwrap_or_default();
    for (number, line) in whole.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
        let refused = |why: String| (number + 1, why);
        let line: Line = serde_json::from_slice(line).map_err(|e| refused(format!("cannot be read ({e})")))?;
        let Some(set) = &line.told.set else { continue };
        if line.sum.as_deref() != Some(sum(&line.told).as_str()) {
            return Err(refused("is not what was written (its checksum differs)".into()));
        }
        let more = Interventions::of_set(set).ok_or_else(|| refused(format!("sets what cannot be set: {set}")))?;
        recorded = recorded.then(&more);
    }
    Ok(recorded)
}

fn append(path: &Path, told: &Intervention) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let text = fs::read(path)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let same = |line: &[u8]| serde_json::from_slice::<Line>(line).is_ok_and(|line| line.told == *told);
    if text[..whole].split(|byte| *byte == b'\n').any(same) {
        return Ok(());
    }
    let line = serde_json::to_string(&Line::of(told.clone())).map_err(io::Error::other)? + "\n";
    // Not made anew where it is gone: what was in it would be missing.
    let file = File::options().write(true).open(path)?;
    let write = || {
        file.set_len(whole as u64)?;
        file.write_all_at(line.as_bytes(), whole as u64)?;
        file.sync_all()?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    write().map_err(|e| match file.set_len(whole as u64).and_then(|()| file.sync_all()) {
        Ok(()) => e,
        Err(again) => io::Error::other(format!(
            "{e}; nor can it be taken back ({again}): remove its last line by hand, a resume would take it for done"
        )),
    })
}

/// Why a run cannot go on from a state.
#[derive(Debug, PartialEq)]
pub(super) enum Apart {
    /// The state has not gone through these, which were written down for steps before its own.
    Without(Interventions),
    /// The state has not gone through these, which the run file asks for.
    Asked(Interventions),
}

/// The interventions of a run that goes on after step `done` with a state that has gone through `past`: those stay. Later ones are
/// those that are `recorded` and those that the run file has (`asked`); the record has the last word on a step and key.
pub(super) fn go_on(
    asked: &Interventions,
    recorded: &Interventions,
    (done, past): (u64, &Interventions),
) -> Result<Interventions, Apart> {
    let missing = recorded.until(done).without(past);
    if !missing.is_empty() {
        return Err(Apart::Without(missing));
    }
    let all = asked.then(recorded);
    let foreign = all.until(done).without(past);
    if !foreign.is_empty() {
        return Err(Apart::Asked(foreign));
    }
    Ok(past.until(done).then(&all.after(done)))
}

/// `run`, whose folder is `folder`, with what was changed in it up to the checkpoint of `meta` and later.
///
/// # Errors
/// If the checkpoint has not gone through what the run file or the folder's record has for its steps.
pub fn with_course(folder: &Path, run: &Run, meta: &Meta, cores: usize) -> Result<Run, TrainError> {
    let (asked, recorded) = (Interventions::of(run), RunFolder::new(folder).recorded()?);
    let past = Interventions::of_definition(&meta.definition);
    match go_on(&asked, &recorded, (meta.step, &past)) {
        Ok(all) => with(run, &all, cores),
        Err(Apart::Without(missing) | Apart::Asked(missing)) => Err(TrainError::BadInput(format!(
            "the checkpoint of step {} has not gone through {missing}, which {} has; take another checkpoint",
            meta.step,
            folder.display()
        ))),
    }
}

/// `run` with these interventions and no others.
///
/// # Errors
/// If it cannot be run with them.
pub(super) fn with(run: &Run, all: &Interventions, cores: usize) -> Result<Run, TrainError> {
    if Interventions::of(run) == *all {
        return Ok(run.clone());
    }
    Ok(Run::parse(&run.values.to_toml(), "the run with what was changed in it", &all.sets(), cores)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(step: u64, set: &str) -> Intervention {
        let text = |text: &str| text.to_owned();
        Intervention { step, action: text("reload"), detail: text(set), by: text("a test"), set: Some(text(set)) }
    }

    fn all(sets: &[&str]) -> Interventions {
        sets.iter().fold(Interventions::default(), |all, set| all.then(&Interventions::of_set(set).unwrap()))
    }

    const FIRST: &str = "train.changes=[\"9: train.lr=0.5\"]";
    const AGAIN: &str = "train.changes=[\"9: train.lr=0.25\"]";
    const SKIP: &str = "train.skip=[\"12+3\"]";

    #[test]
    fn what_is_written_down_is_read_again_and_a_line_cut_short_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::new(folder.path());
        assert_eq!(run.recorded().unwrap(), Interventions::default());
        let path = folder.path().join(INTERVENTIONS);
        assert!(run.intervene(&told(9, FIRST)).unwrap_err().contains(INTERVENTIONS), "it was there at the start");
        // What older versions left has no steps to rely on.
        let old = "{\"step\":7,\"action\":\"reload\",\"detail\":\"train.lr=1e-4, from world 2 on\",\"by\":\"lockstep reload\"}\n";
        fs::write(&path, format!("{old}{{\"step\":9,\"act")).unwrap();
        for (step, set) in [(9, FIRST), (9, FIRST), (9, AGAIN), (12, SKIP)] {
            run.intervene(&told(step, set)).unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!((text.lines().count(), text.starts_with(old)), (4, true), "{text}");
        assert_eq!(run.recorded().unwrap(), all(&[AGAIN, SKIP]));
        // Half of the last line.
        fs::write(&path, &text[..text.len() - 20]).unwrap();
        assert_eq!(run.recorded().unwrap(), all(&[AGAIN]));
        // A bit of a value, and a line that is none.
        for (wrong, word) in [(text.replace("0.25", "0.27"), "line 3"), (text.replace("\"step\":12", "step"), "line 4")]
        {
            fs::write(&path, wrong).unwrap();
            let error = run.recorded().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(INTERVENTIONS), "{error}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(run.intervene(&told(9, FIRST)).is_err() && run.recorded().is_err());
    }

    #[test]
    fn a_state_has_gone_through_what_was_written_down_for_its_steps() {
        let (none, first, skip) = (all(&[]), all(&[FIRST]), all(&[SKIP]));
        let both = all(&[FIRST, SKIP]);
        // The folder is lost, and with it what the state has not come to.
        assert_eq!(go_on(&none, &none, (10, &first)), Ok(first.clone()));
        // It is there; the run file may have it, too.
        for asked in [&none, &first, &both] {
            assert_eq!(go_on(asked, &both, (10, &first)), Ok(both.clone()));
            assert_eq!(go_on(asked, &both, (8, &none)), Ok(both.clone()));
        }
        // Planned from the start.
        assert_eq!(go_on(&both, &none, (0, &none)), Ok(both.clone()));
        assert_eq!(go_on(&skip, &none, (10, &first)), Ok(both.clone()));
        // Computed by ranks that did not hear of it.
        assert_eq!(go_on(&none, &both, (10, &none)), Err(Apart::Without(first.clone())));
        assert_eq!(go_on(&first, &none, (10, &none)), Err(Apart::Asked(first.clone())));
        assert_eq!(go_on(&first, &none, (10, &all(&[AGAIN]))), Err(Apart::Asked(first.clone())));
        // The last word.
        assert_eq!(go_on(&first, &all(&[AGAIN]), (10, &all(&[AGAIN]))), Ok(all(&[AGAIN])));
        assert_eq!(go_on(&first, &all(&[AGAIN]), (8, &none)), Ok(all(&[AGAIN])));
    }
}

//! Whether a run may use its folder, and the checkpoint that it goes on from. Nothing here writes but what is fetched from a
//! store of objects.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use checkpoint::store::Store;
use checkpoint::{Checkpoint, Meta};
use events::{Event, Intervention, regular};
use kernels::NUMERICS_VERSION;
use policy::Unchecked;
use spec::{Interventions, Run};

use super::folder::LOCK;
use super::record::{self, Apart, INTERVENTIONS, go_on};
use super::{Resuming, RunFolder};
use crate::error::TrainError;
use crate::persist;

/// A run with what was changed in it so far.
#[derive(Debug)]
pub struct Went {
    /// The run.
    pub run: Run,
    /// What was changed in it that neither its run file nor its folder tells: its checkpoint does.
    pub untold: Vec<Intervention>,
}

/// What a run begins with.
#[derive(Debug)]
pub struct Resume {
    /// The run.
    pub went: Went,
    /// The checkpoint that it goes on from, every byte of it read and good.
    pub checkpoint: Option<Checkpoint>,
    /// What the person should know about it.
    pub notes: Vec<String>,
    /// Steps in the run's folder that are damaged.
    pub damaged: Vec<u64>,
    /// That nobody has checked the last steps before the checkpoint, in a run that checks steps.
    pub unchecked: Option<Unchecked>,
    /// Newer checkpoints were passed over because nobody has checked their last steps: they are not to be gone on from.
    pub distrusts: bool,
}

/// Up to which step the checkpoint of `meta` is known to be checked: what it says itself, or what the run's controller noted later.
/// None: its run checked nothing, or nobody knows.
fn checked_until(meta: &Meta, noted: Option<u64>) -> Option<u64> {
    meta.checked.map(|checked| match noted {
        // A controller notes checkpoints up to which all is good.
        Some(noted) if noted >= meta.step => meta.step,
        Some(noted) => checked.max(noted),
        None => checked,
    })
}

/// Up to which step all of it is known to be checked: steps that nobody could check any more count for ever.
fn all_checked_until(meta: &Meta, noted: Option<u64>) -> Option<u64> {
    checked_until(meta, noted).map(|until| meta.unseen.map_or(until, |first| until.min(first.saturating_sub(1))))
}

impl RunFolder {
    /// The checkpoint that the run goes on from, if any: the newest good one, in its folder or in the store; with
    /// [`Resuming::Checked`] the newest of those of which all steps were checked.
    ///
    /// # Errors
    /// A folder that holds another run, or any run without `resume`; `resume` without a whole checkpoint of this run;
    /// a store that holds another run's.
    ///
    /// `definition` is that of `run` and its data; `cores` are those of the machine.
    pub fn resume_point(
        &self,
        run: &Run,
        definition: &str,
        resume: Resuming,
        cores: usize,
    ) -> Result<Resume, TrainError> {
        let used = self.in_use()?;
        let store = run.checkpoint.store.as_ref().map(Store::open).transpose();
        let store = store.map_err(|e| TrainError::BadInput(e.to_string()))?;
        let unreachable = |e| TrainError::BadInput(format!("checkpoint.store cannot be used: {e}"));
        if resume == Resuming::No {
            if used {
                let (holds, then) = match self.begun_without_checkpoint(run) {
                    Ok(true) => ("a run that has no checkpoint yet", "start it from its beginning"),
                    _ => ("something already", "go on with the run in it"),
                };
                return Err(TrainError::BadInput(format!(
                    "the run directory {} holds {holds}; add --resume to {then}, or choose another --run-dir",
                    self.path().display()
                )));
            }
            if let Some(store) = store
                && !store.steps().map_err(unreachable)?.is_empty()
            {
                return Err(TrainError::BadInput(format!(
                    "checkpoint.store {} holds checkpoints already; add --resume to go on from them, or name another place",
                    store.name()
                )));
            }
            return Ok(Resume::of(run.clone()));
        }
        let (asked, recorded) = (Interventions::of(run), self.recorded()?);
        let only_checked = resume == Resuming::Checked;
        let noted = persist::checked(&self.checkpoints());
        let mut resume = Resume::of(run.clone());
        let near = checkpoint::list(&self.checkpoints())?.into_iter().map(|(step, path)| (step, Some(path)));
        let mut found: Vec<_> = near.collect();
        if let Some(store) = &store {
            found.extend(store.steps().map_err(unreachable)?.into_iter().map(|step| (step, None)));
        }
        // The newest first; of one step the nearer one.
        found.sort_by_key(|(step, path)| (std::cmp::Reverse(*step), path.is_none()));
        if found.is_empty() && self.begun_without_checkpoint(run)? {
            resume.notes.push(format!(
                "there is no checkpoint under {} yet: the run starts from its beginning{}",
                self.checkpoints().display(),
                match self.set_aside_before()? {
                    aside if aside.is_empty() => String::new(),
                    aside => format!(" (set aside earlier, and not gone on from: {})", aside.join(", ")),
                }
            ));
            return Ok(resume);
        }
        let mut reasons = Vec::new();
        if found.is_empty() && self.tells_of_checkpoints() {
            reasons.push("\n  events.jsonl tells of checkpoints: bring them back if they were moved".to_owned());
        }
        let older: Vec<_> = found.iter().filter_map(|(step, path)| Some((*step, path.clone()?))).collect();
        for (step, path) in found {
            let far = path.is_none();
            let opened = match (path, &store) {
                (Some(path), _) => Checkpoint::open(&path).map(|one| (path, one)),
                (None, Some(store)) => store
                    .fetch(step, &self.checkpoints())
                    .and_then(|path| Checkpoint::open(&path).map(|one| (path, one))),
                (None, None) => continue,
            };
            let problem = match opened {
                Err(e) => e,
                Ok((path, one)) => {
                    if path == checkpoint::step_dir(&self.checkpoints(), step) {
                        // A damaged one that was in its place is set aside already.
                        resume.damaged.retain(|damaged| *damaged != step);
                    }
                    self.same_run(run, definition, &one)?;
                    let past = Interventions::of_definition(&one.meta().definition);
                    let course = match go_on(&asked, &recorded, (step, &past)) {
                        Ok(course) => course,
                        Err(Apart::Asked(foreign)) => return Err(self.other_course(&one, &foreign, &past)),
                        Err(Apart::Without(missing)) => {
                            // Its ranks died before they heard of it, or it is of a time to which somebody set the folder back.
                            let why = format!("it was computed without {missing}, which {INTERVENTIONS} has");
                            resume.notes.push(format!("the checkpoint of step {step} is passed over: {why}"));
                            reasons.push(format!("\n  {}: {why}", path.display()));
                            resume.distrusts = true;
                            continue;
                        }
                    };
                    let until = checked_until(one.meta(), noted);
                    let all = all_checked_until(one.meta(), noted);
                    if only_checked && all.is_none_or(|all| all < step) {
                        let why = match all {
                            Some(all) if until > Some(all) => {
                                format!(
                                    "checks agreed up to step {all}, and nobody could check step {} any more",
                                    all + 1
                                )
                            }
                            Some(all) => format!("checks agreed up to step {all}"),
                            None => "it does not say that any step was checked".into(),
                        };
                        resume
                            .notes
                            .push(format!("the checkpoint of step {step} is passed over (--resume=checked): {why}"));
                        reasons.push(format!("\n  {}: {why}", path.display()));
                        resume.distrusts = true;
                        continue;
                    }
                    // Every byte, before anything is touched.
                    match one.verify_with(crate::pin::allowed().len()).problems.into_iter().next() {
                        Some(problem) => problem,
                        None => {
                            let place = if far { " in the store" } else { "" };
                            let text = format!("going on after step {step} of {}{place}", path.display());
                            resume.notes.push(text);
                            resume.notes.extend(older_version(run, one.meta()));
                            resume.went.run = record::with(run, &course, cores)?;
                            resume.went.untold = untold(&past.until(step).without(&asked).without(&recorded), step);
                            if course != asked {
                                let text = format!("what was changed in the run so far holds: {course}");
                                resume.notes.push(text);
                            }
                            let unseen = one.meta().unseen;
                            let doubt = until.filter(|until| *until < step || unseen.is_some());
                            if let Some(checked) = doubt.filter(|_| step < run.train.steps) {
                                self.doubt(run, &mut resume, (step, checked, unseen), &older, noted);
                            }
                            resume.checkpoint = Some(one);
                            return Ok(resume);
                        }
                    }
                }
            };
            if far {
                resume.notes.push(format!("the copy of step {step} in the store is passed over: {problem}"));
            } else {
                resume.notes.push(format!("the checkpoint of step {step} is passed over: {problem}"));
                resume.damaged.push(step);
            }
            reasons.push(format!("\n  {problem}"));
        }
        Err(TrainError::BadInput(format!(
            "--resume finds no complete {}checkpoint under {}{}; {}{}",
            if only_checked { "and checked " } else { "" },
            self.checkpoints().display(),
            store.map_or(String::new(), |store| format!(" or {}", store.name())),
            if resume.distrusts {
                "--resume alone goes on from the newest one, checked or not"
            } else {
                "start the run without --resume in another --run-dir"
            },
            reasons.concat()
        )))
    }

    /// Nobody has checked the steps after `checked` up to `step`, from which the run goes on, nor some from `unseen` on.
    fn doubt(
        &self,
        run: &Run,
        resume: &mut Resume,
        (step, checked, unseen): (u64, u64, Option<u64>),
        near: &[(u64, PathBuf)],
        noted: Option<u64>,
    ) {
        let newest = |until: fn(&Meta, Option<u64>) -> Option<u64>| {
            let good = |(step, path): &&(u64, PathBuf)| {
                Checkpoint::open(path).is_ok_and(|one| until(one.meta(), noted).is_some_and(|until| until >= *step))
            };
            near.iter().filter(|(older, _)| *older < step).find(good).cloned()
        };
        let trusted = newest(all_checked_until);
        if checked >= step {
            // All that is in doubt was before, and stays so.
            resume.unchecked = Some(Unchecked { checked, sound: trusted, unseen });
            return;
        }
        // What the run goes back to if its first step shows a broken device.
        let sound = newest(checked_until);
        let steps = if checked + 1 == step {
            format!("step {step} was")
        } else {
            format!("steps {} to {step} were", checked + 1)
        };
        let then = if run.layout.dp > run.layout.group {
            format!("step {}, the first one, is checked, which shows a device that is still broken", step + 1)
        } else {
            "nobody can check the first step (layout.dp)".into()
        };
        let or = match &trusted {
            Some((sound, _)) => format!("--resume=checked goes on after step {sound} instead"),
            None => "there is no checkpoint from before them".into(),
        };
        resume.notes.push(format!("{steps} not checked before the run ended: {then}; {or}"));
        resume.unchecked = Some(Unchecked { checked, sound, unseen });
    }

    /// Whether this run has begun in the folder, and has written no checkpoint: it can start there from its beginning.
    ///
    /// # Errors
    /// That the run in the folder is another one, or cannot be known.
    fn begun_without_checkpoint(&self, run: &Run) -> Result<bool, TrainError> {
        if !checkpoint::list(&self.checkpoints())?.is_empty() {
            return Ok(false);
        }
        let path = self.path().join("run.toml");
        let text = match regular::read_to_string(&path) {
            Ok(text) => text,
            // Killed before it was written, nothing was begun that could be another run's.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(self.path().join(LOCK).exists() && !self.in_use()?);
            }
            Err(source) => return Err(TrainError::Io { what: "cannot read", path, source }),
        };
        let name = path.display();
        let unclear = |e| {
            TrainError::BadInput(format!(
                "the run in {} has no checkpoint yet, and its run file cannot be read ({e}): choose another --run-dir",
                self.path().display()
            ))
        };
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let there = Run::parse(&text, &name.to_string(), &[], cores).map_err(unclear)?;
        // Batches that were left out on the way are not left out before the run comes to them.
        let plain = |run: &Run| run.definition().replace(&format!("skip = {}\n", run.train.skip), "");
        let differences = differences(&plain(&there), &plain(run));
        if !differences.is_empty() {
            return Err(TrainError::BadInput(format!(
                "{} holds another run, which has no checkpoint yet: {}; use its run file ({name}), or another --run-dir",
                self.path().display(),
                differences.join("; ")
            )));
        }
        // Whoever moved checkpoints away wants to be told, and not to have everything computed again.
        Ok(!self.tells_of_checkpoints() || !self.set_aside_before()?.is_empty())
    }

    /// Whether checkpoints were written here, as far as the log is there to tell.
    fn tells_of_checkpoints(&self) -> bool {
        let text = regular::read(&self.path().join("events.jsonl")).unwrap_or_default();
        let told = |line: &str| matches!(Event::from_line(line), Ok(Event::Checkpoint { .. }));
        String::from_utf8_lossy(&text).lines().any(told)
    }

    /// Names of checkpoints that were set aside.
    fn set_aside_before(&self) -> Result<Vec<String>, TrainError> {
        let root = self.checkpoints();
        let names = match fs::read_dir(&root) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            found => found.and_then(|found| found.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()),
        };
        let names = names.map_err(|source| TrainError::Io { what: "cannot list", path: root, source })?;
        let mut names: Vec<_> = names.into_iter().map(|name| name.to_string_lossy().into_owned()).collect();
        names.retain(|name| name.starts_with("step-") && name.contains(".damaged"));
        names.sort();
        Ok(names)
    }

    /// Whether something is in the folder that a new run must not touch. A place prepared for checkpoints is not, nor the lock of
    /// a run that ended before it wrote anything.
    fn in_use(&self) -> Result<bool, TrainError> {
        let refused = |reason: &dyn std::fmt::Display| {
            let path = self.path().display();
            TrainError::BadInput(format!("the run directory {path} cannot be used: {reason}; choose another --run-dir"))
        };
        match fs::metadata(self.path()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(refused(&e)),
            Ok(found) if !found.is_dir() => return Err(refused(&"it is not a folder")),
            Ok(_) => {}
        }
        for entry in fs::read_dir(self.path()).map_err(|e| refused(&e))? {
            let path = entry.map_err(|e| refused(&e))?.path();
            let empty = match () {
                () if path == self.path().join(LOCK) => true,
                () if path == self.checkpoints() => !has_steps(&path).map_err(|e| refused(&e))?,
                () => false,
            };
            if !empty {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// That the run file asks for changes which the checkpoint, of `past`, has not gone through.
    fn other_course(&self, found: &Checkpoint, foreign: &Interventions, past: &Interventions) -> TrainError {
        let past = past.until(found.meta().step);
        let past = if past.is_empty() { "none".into() } else { past.to_string() };
        TrainError::BadInput(format!(
            "{} has not gone through {foreign}, which the run file has: its changes are {past}; remove them from the run file (a resume \
             knows what was changed in a run), or begin a run with them in another --run-dir",
            found.path().display()
        ))
    }

    /// That the checkpoint is of the run in all that defines it, but for what was changed on the way.
    fn same_run(&self, run: &Run, ours: &str, found: &Checkpoint) -> Result<(), TrainError> {
        // What was changed on the way is looked at by itself.
        let first = |definition: &str| spec::definition_until(&spec::settled(definition), 0);
        let differences = differences(&first(&found.meta().definition), &first(ours));
        if !differences.is_empty() {
            return Err(TrainError::BadInput(format!(
                "{} belongs to another run: {}; use its run file ({} holds every value), or another --run-dir",
                found.path().display(),
                differences.join("; "),
                self.path().join("run.toml").display()
            )));
        }
        let tensors = spec::tensors::tensors(&run.model);
        Ok(found.check_model(&found.meta().definition, &tensors, run.grid.tp, NUMERICS_VERSION)?)
    }
}

impl Resume {
    fn of(run: Run) -> Self {
        Self {
            went: Went { run, untold: Vec::new() },
            checkpoint: None,
            notes: Vec::new(),
            damaged: Vec::new(),
            unchecked: None,
            distrusts: false,
        }
    }
}

/// What the checkpoint of `step` alone tells of, as it is to stand in the folder again.
fn untold(past: &Interventions, step: u64) -> Vec<Intervention> {
    let told = |(at, set): (u64, String)| Intervention {
        step: at,
        action: if set.starts_with("train.skip") { "skip" } else { "reload" }.into(),
        detail: set.clone(),
        by: format!("the checkpoint of step {step}"),
        set: Some(set),
    };
    past.by_step().into_iter().map(told).collect()
}

/// What a person should know of a checkpoint that does not say which validations came before it.
fn older_version(run: &Run, meta: &Meta) -> Option<String> {
    let matters = run.train.patience > 0 || run.checkpoint.best;
    (matters && meta.validations.is_none()).then(|| {
        format!(
            "the checkpoint of step {} was written by an older version and does not say which validations came before it: they are \
             taken from events.jsonl, which must be whole for train.patience to count right",
            meta.step
        )
    })
}

fn has_steps(checkpoints: &Path) -> io::Result<bool> {
    if !checkpoints.is_dir() {
        return Ok(true);
    }
    let mut names = fs::read_dir(checkpoints)?.map(|entry| Ok(entry?.file_name()));
    names.try_fold(false, |any, name: io::Result<_>| Ok(any || name?.to_string_lossy().starts_with("step-")))
}

/// The keys whose values differ between two definitions, each with both values.
pub(super) fn differences(theirs: &str, ours: &str) -> Vec<String> {
    let (theirs, ours) = (values(theirs), values(ours));
    let keys: std::collections::BTreeSet<_> = theirs.keys().chain(ours.keys()).collect();
    let differ = keys.into_iter().filter(|key| theirs.get(*key) != ours.get(*key));
    let show = |key: &str, value: Option<&&str>| value.map_or(format!("no {key}"), |value| format!("{key} = {value}"));
    differ.map(|key| format!("{} there, {} here", show(key, theirs.get(key)), show(key, ours.get(key)))).collect()
}

/// The lines of a definition, by key with its section; a resolved default counts as if it were written.
fn values(definition: &str) -> BTreeMap<String, &str> {
    let mut section = "";
    let mut values = BTreeMap::new();
    for line in definition.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name;
        } else if let Some((key, value)) = line.split_once(" = ") {
            let key = if section == "resolved" { key.into() } else { format!("{section}.{key}") };
            values.insert(key, value);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_name_keys_and_both_values() {
        let theirs = "[model]\nffn = 96\n\n[train]\nlr = 0.1\n\n[resolved]\ngrid.dp = 4\n";
        let ours = "[model]\nffn = 128\nvocab = 300\n\n[train]\nlr = 0.1\n\n[resolved]\ngrid.dp = 2\n";
        let want = ["grid.dp = 4 there, grid.dp = 2 here", "model.ffn = 96 there, model.ffn = 128 here"];
        assert_eq!(differences(theirs, ours)[..2], want);
        assert_eq!(differences(theirs, ours)[2], "no model.vocab there, model.vocab = 300 here");
        assert!(differences(ours, ours).is_empty());
    }

    #[test]
    fn what_unset_means_may_be_written_out() {
        let run = |more: &str| {
            let toml =
                "[model]\npreset = \"nano\"\n[train]\nsteps = 1\nbatch = 2\nseq = 8\n[data]\nsource = \"synthetic\"\n";
            Run::parse(&format!("{toml}{more}"), "t", &[], 1).unwrap().definition()
        };
        let plain = run("");
        assert_eq!(run("packing = \"stream\"\n[grid]\ncp = 1\naccumulate = \"local\"\n"), plain);
        assert_ne!(run("[grid]\naccumulate = \"reduced\"\n"), plain);
        // Of an older checkpoint.
        let older = plain.replace("[grid]\n", "[grid]\ncp = 1\n");
        assert!(older != plain && differences(&spec::settled(&older), &plain).is_empty());
    }
}

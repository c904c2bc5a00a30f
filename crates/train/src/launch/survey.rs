//! Which checkpoints a run can go back to, by what is on disk and not by what was told.

use std::path::{Path, PathBuf};

use checkpoint::store::Store;
use checkpoint::{Checkpoint, CheckpointError};
use control::controller::Survey;
use spec::{Interventions, Run};

/// Ends the timeline of the worlds before under `checkpoints`, so that no writer of theirs commits anything any more, then looks for
/// the newest checkpoint that is good, here and else in the slower tier. Older ones are named without being read whole.
pub(super) fn survey(checkpoints: &Path, run: &Run) -> Survey {
    let mut notes = Vec::new();
    if let Err(e) = checkpoint::go_back(checkpoints, u64::MAX) {
        notes.push(format!("a writer of the world before may still commit a checkpoint: {e}"));
    }
    let mut saved = near(checkpoints, run, &mut notes);
    if saved.is_empty() {
        saved.extend(far(checkpoints, run, &mut notes));
    }
    saved.reverse();
    Survey { saved, notes }
}

/// In the run's folder, the newest first.
fn near(checkpoints: &Path, run: &Run, notes: &mut Vec<String>) -> Vec<(u64, PathBuf)> {
    let all = checkpoint::list(checkpoints).unwrap_or_else(|e| {
        notes.push(format!("checkpoints cannot be listed: {e}"));
        Vec::new()
    });
    let mut good: Vec<(u64, PathBuf)> = Vec::new();
    for (step, path) in all.into_iter().rev() {
        let found = if good.is_empty() { whole(&path) } else { Checkpoint::open(&path) };
        match found {
            Ok(found) if !same_course(&found, run) => notes.push(other_course(step)),
            Ok(_) => good.push((step, path)),
            Err(e) => notes.push(format!("the checkpoint of step {step} is passed over: {e}")),
        }
    }
    good
}

/// The newest good one in the slower tier.
fn far(checkpoints: &Path, run: &Run, notes: &mut Vec<String>) -> Option<(u64, PathBuf)> {
    let url = run.checkpoint.store.as_ref()?;
    let store = Store::open(url).and_then(|store| store.steps().map(|steps| (store, steps)));
    let (store, mut steps) = store.map_err(|e| notes.push(format!("checkpoint.store cannot be read: {e}"))).ok()?;
    steps.sort_unstable();
    for step in steps.into_iter().rev() {
        match store.fetch(step, checkpoints).and_then(|path| whole(&path).map(|found| (path, found))) {
            Ok((_, found)) if !same_course(&found, run) => notes.push(other_course(step)),
            Ok((path, _)) => return Some((step, path)),
            Err(e) => notes.push(format!("the copy of step {step} in {url} is passed over: {e}")),
        }
    }
    None
}

/// The checkpoint at `path`, every byte of which is as it was written.
fn whole(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let found = Checkpoint::open(path)?;
    let problems = found.verify_with(crate::pin::allowed().len()).problems;
    problems.into_iter().next().map_or(Ok(found), Err)
}

/// Whether it has gone through what was changed in `run` up to its step, and through nothing else.
fn same_course(found: &Checkpoint, run: &Run) -> bool {
    let (step, past) = (found.meta().step, Interventions::of_definition(&found.meta().definition));
    past.until(step) == Interventions::of(run).until(step)
}

fn other_course(step: u64) -> String {
    format!(
        "the checkpoint of step {step} is passed over: it has not gone through the changes of the run up to its step"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_checkpoints_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let text =
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 8\n";
        let run = Run::parse(text, "test", &[], 1).unwrap();
        let root = folder.path().join("checkpoints");
        assert_eq!(survey(&root, &run), Survey::default());
        // Without its manifest, and with one that is torn.
        std::fs::create_dir_all(root.join("step-00000002")).unwrap();
        std::fs::create_dir_all(root.join("step-00000004")).unwrap();
        std::fs::write(root.join("step-00000004").join(checkpoint::MANIFEST), "{").unwrap();
        let found = survey(&root, &run);
        assert_eq!(found.saved, []);
        assert!(found.notes.iter().any(|note| note.contains("step 4 is passed over")), "{found:?}");
    }
}

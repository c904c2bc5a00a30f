//! Which timeline of a run a folder of checkpoints is of.
//!
//! A run that goes back to an earlier step goes on in another timeline. Writers of the one before may still be at work, in
//! processes that nobody reaches. So the folder says itself which one it is of: who goes back gives it another name first and
//! then sets aside what is there of later steps; who commits looks at the name, under the same lock.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;

use events::regular;

use crate::error::CheckpointError;
use crate::folder::list;
use crate::store::set_aside;

/// Where the name stands; a folder whose run never went back has none. A line for each way back, the newest first: the name that
/// the folder got, and the last step that stayed. Older folders have a name alone.
const NAME: &str = "timeline";
/// Ways back that are remembered.
const LINES_MAX: usize = 64;

/// A timeline of a run: from one way back to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timeline(String);

impl Timeline {
    /// That of the checkpoints under `root` now.
    pub fn of(root: &Path) -> Self {
        Self(ways_back(root).into_iter().next().map_or(String::new(), |(name, _)| name))
    }

    /// Its name; empty where the run never went back.
    pub fn name(&self) -> String {
        self.0.clone()
    }

    /// Whether a checkpoint of `step` that was committed in this timeline is one of the folder's timeline now: no way back since went
    /// to before it. `None`: the folder does not say.
    pub fn keeps(&self, root: &Path, step: u64) -> Option<bool> {
        let mut lowest = u64::MAX;
        for (name, after) in ways_back(root) {
            if name == self.0 {
                return Some(step <= lowest);
            }
            lowest = lowest.min(after?);
        }
        self.0.is_empty().then_some(step <= lowest)
    }
}

/// The names that the folder got and the last steps that stayed, the newest first.
fn ways_back(root: &Path) -> Vec<(String, Option<u64>)> {
    let text = regular::read_to_string(&root.join(NAME)).unwrap_or_default();
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next().and_then(|after| after.parse().ok())))
    };
    text.lines().filter_map(line).collect()
}

/// Nobody else goes back or commits under `root` as long as this is there. Best effort: where folders cannot be locked the
/// name still keeps out all that comes later.
pub(crate) fn lock(root: &Path) -> Option<File> {
    let folder = File::open(root).ok()?;
    folder.lock().ok().map(|()| folder)
}

/// The run goes on after step `after` in a timeline of its own: no attempt of the one before is committed from here on, and what
/// is under `root` of later steps is set aside; these steps.
///
/// # Errors
/// [`CheckpointError::Io`]; what was set aside before it stays so.
pub fn go_back(root: &Path, after: u64) -> Result<Vec<u64>, CheckpointError> {
    if !root.is_dir() {
        fs::create_dir_all(root).map_err(CheckpointError::io("create", root))?;
    }
    let _lock = lock(root);
    let (new, at) = (root.join("timeline.tmp"), root.join(NAME));
    let name = format!("{:016x}", RandomState::new().build_hasher().finish());
    let before = ways_back(root).into_iter().take(LINES_MAX - 1);
    let line = |(name, after): (String, Option<u64>)| match after {
        Some(after) => format!("{name} {after}\n"),
        None => format!("{name}\n"),
    };
    let text: String = std::iter::once((name, Some(after))).chain(before).map(line).collect();
    regular::write(&new, text).and_then(|()| fs::rename(&new, &at)).map_err(CheckpointError::io("write", &at))?;
    let mut aside = Vec::new();
    for (step, folder) in list(root)?.into_iter().filter(|(step, _)| *step > after) {
        set_aside(&folder)?;
        aside.push(step);
    }
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_stays_one_until_the_run_goes_back_to_before_it() {
        let folder = std::env::temp_dir().join(format!("lockstep-timeline-{}", std::process::id()));
        drop(fs::remove_dir_all(&folder));
        let first = Timeline::of(&folder);
        assert_eq!(first.keeps(&folder, 9), Some(true));
        go_back(&folder, 6).unwrap();
        let second = Timeline::of(&folder);
        assert_ne!(first, second);
        assert_eq!((first.keeps(&folder, 6), first.keeps(&folder, 7)), (Some(true), Some(false)));
        go_back(&folder, 4).unwrap();
        go_back(&folder, u64::MAX).unwrap();
        assert_eq!((first.keeps(&folder, 4), first.keeps(&folder, 5)), (Some(true), Some(false)));
        assert_eq!((second.keeps(&folder, 4), second.keeps(&folder, 5)), (Some(true), Some(false)));
        assert_eq!(Timeline::of(&folder).keeps(&folder, 9), Some(true));
        // As earlier versions wrote it.
        fs::write(folder.join(NAME), "0123456789abcdef\n").unwrap();
        assert_eq!(first.keeps(&folder, 1), None);
        assert_eq!(Timeline::of(&folder).keeps(&folder, 1), Some(true));
        fs::remove_dir_all(&folder).unwrap();
    }
}

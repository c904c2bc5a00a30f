//! What ranks answered when they were asked where they stand, kept in the run's folder.

use std::fs;
use std::path::{Path, PathBuf};

use observe::pytorch::file_name;
use serde_json::Value;

use super::folder::complain;

/// Writes the answers, by rank, as `hang-N/fr_trace_rank_R.json` under `root`, N counting up; where. None: it could not be
/// written, which is said and is no reason to stop.
pub fn save(root: &Path, answers: &[Option<Value>]) -> Option<PathBuf> {
    let name = |n: u32| root.join(format!("hang-{n}"));
    let folder = (1..).map(name).find(|path| !path.exists())?;
    let write = || {
        fs::create_dir_all(&folder)?;
        for (rank, answer) in answers.iter().enumerate() {
            if let Some(answer) = answer {
                fs::write(folder.join(file_name(rank as u32)), format!("{answer}\n"))?;
            }
        }
        std::io::Result::Ok(())
    };
    match write() {
        Ok(()) => Some(folder),
        Err(e) => {
            complain(&format!("flight records cannot be written to {}: {e}; the run goes on", folder.display()));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hang_has_its_folder_and_who_was_mute_no_file() {
        let root = tempfile::tempdir().unwrap();
        let answers = [Some(serde_json::json!({ "rank": 0 })), None, Some(serde_json::json!({ "rank": 2 }))];
        for n in 1..=2 {
            let folder = save(root.path(), &answers).unwrap();
            assert_eq!(folder, root.path().join(format!("hang-{n}")));
            let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, ["fr_trace_rank_0.json", "fr_trace_rank_2.json"]);
        }
    }
}

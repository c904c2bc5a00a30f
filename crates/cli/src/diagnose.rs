//! `lockstep diagnose`: the verdict over flight records, ours or PyTorch's.

use std::path::{Path, PathBuf};

use observe::hang::{self, RankView};
use observe::pytorch;
use train::TrainError;

use crate::show::line;

#[derive(clap::Args)]
pub struct Args {
    /// A run's folder, or any folder of flight recorder dumps in JSON, one per rank.
    folder: PathBuf,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let (folder, views) = records(&args.folder)?;
    let verdict = hang::verdict(&views);
    if args.json {
        let value = serde_json::json!({
            "kind": "diagnosis", "schema": events::SCHEMA, "folder": folder, "records": views.len(), "verdict": verdict,
        });
        line(&value.to_string());
        return Ok(0);
    }
    line(&format!("{} records in {}", views.len(), folder.display()));
    line(&verdict.to_string());
    Ok(0)
}

/// The records in `given`, in its `flight`, or in the newest folder in there.
fn records(given: &Path) -> Result<(PathBuf, Vec<RankView>), TrainError> {
    let flight = given.join("flight");
    let mut candidates = vec![given.to_owned(), flight.clone()];
    let mut troubles: Vec<PathBuf> = entries(&flight).into_iter().filter(|path| path.is_dir()).collect();
    // Troubles are numbered: the newest is the one with the highest number.
    troubles.sort_by_key(|path| path.file_name().and_then(|n| n.to_str()?.rsplit('-').next()?.parse::<u64>().ok()));
    candidates.extend(troubles.pop());
    for folder in candidates.into_iter().rev() {
        let files = entries(&folder);
        let dumps = files.iter().filter(|path| path.extension().is_some_and(|e| e == "json") && path.is_file());
        let named = dumps.filter_map(|path| Some((path, pytorch::rank_of(path.file_name()?.to_str()?)?)));
        let views: Vec<RankView> = named.map(|(path, rank)| read(path, rank)).collect::<Result<_, _>>()?;
        if !views.is_empty() {
            return Ok((folder, views));
        }
    }
    let given = given.display();
    Err(TrainError::BadInput(format!(
        "no flight records in {given}: a run writes flight/ when a rank hangs; other folders need files such as {} per rank",
        pytorch::file_name(0)
    )))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = list.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn read(path: &Path, rank: u32) -> Result<RankView, TrainError> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| TrainError::BadInput(format!("{} cannot be read: {e}", path.display())))?;
    pytorch::read(&text, Some(rank)).map_err(|e| TrainError::BadInput(format!("{}: {e}", path.display())))
}

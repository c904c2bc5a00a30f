//! `lockstep diagnose`: the verdict over flight records, ours or PyTorch's, and who was slow in a run of ours.

use std::fs;
use std::path::{Path, PathBuf};

use observe::hang;
use observe::pytorch::{self, Named};
use observe::records::{self, Attempt, File, Found};
use train::TrainError;

use crate::show::line;

#[derive(clap::Args)]
pub struct Args {
    /// A run's folder, or any folder of flight recorder dumps in JSON, one per rank.
    folder: PathBuf,
    /// JSON: one object per attempt.
    #[arg(long)]
    json: bool,
}

/// Folders in folders that are looked into, where a folder itself has no dumps: per host, per attempt.
const DEPTH: usize = 3;

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let given = &args.folder;
    if !given.is_dir() {
        let (shown, is) = (given.display(), if given.exists() { "is no folder" } else { "is not there" });
        return Err(TrainError::BadInput(format!("{shown} {is}: give the folder of a run, or of dumps, one per rank")));
    }
    let (folder, files, notes) = records(given);
    let mut found = records::sort(files).map_err(|e| TrainError::BadInput(format!("{}: {e}", folder.display())))?;
    found.notes.extend(notes);
    if found.attempts.is_empty() {
        return Err(none(given, &found));
    }
    let many = found.attempts.len();
    for (at, attempt) in found.attempts.iter().enumerate() {
        let verdict = hang::verdict(&attempt.views, &attempt.unreadable);
        if args.json {
            let value = serde_json::json!({
                "kind": "diagnosis", "schema": events::SCHEMA, "folder": folder, "records": attempt.views.len(),
                "attempt": at + 1, "attempts": many, "label": attempt.label, "files": attempt.files,
                "notes": found.notes, "verdict": verdict,
            });
            line(&value.to_string());
            continue;
        }
        if many > 1 && at == 0 {
            line(&format!("dumps of {many} attempts in {}, each judged by itself, oldest first", folder.display()));
        }
        line(&heading(attempt, at, many, &folder));
        line(&verdict.to_string());
    }
    if !args.json {
        found.notes.iter().for_each(|note| line(&format!("note: {note}")));
    }
    Ok(0)
}

fn heading(attempt: &Attempt, at: usize, many: usize, folder: &Path) -> String {
    let records = attempt.views.len();
    let records = format!("{records} record{}", if records == 1 { "" } else { "s" });
    match many {
        1 => format!("{records} in {}", folder.display()),
        _ => format!("attempt {} of {many}: {records} ({})", at + 1, attempt.label),
    }
}

fn none(given: &Path, found: &Found) -> TrainError {
    let given = given.display();
    let notes: String = found.notes.iter().map(|note| format!("; {note}")).collect();
    TrainError::BadInput(format!(
        "no flight records in {given}: a run writes flight/ when a rank hangs; other folders need files such as {} per rank, in JSON{notes}",
        pytorch::file_name(0)
    ))
}

/// Files that may be dumps, in `given`, in its `flight`, or in the newest folder in there: (the folder, the files, notes).
fn records(given: &Path) -> (PathBuf, Vec<File>, Vec<String>) {
    let flight = given.join("flight");
    let mut troubles: Vec<PathBuf> = entries(&flight).into_iter().filter(|path| path.is_dir()).collect();
    // Troubles are numbered: the newest is the one with the highest number.
    troubles.sort_by_key(|path| path.file_name().and_then(|n| n.to_str()?.rsplit('-').next()?.parse::<u64>().ok()));
    let newest = troubles.pop();
    let mut notes = Vec::new();
    if !troubles.is_empty() {
        notes.push(format!("{} older hangs lie in {}", troubles.len(), flight.display()));
    }
    if newest.is_some() || flight.is_dir() {
        let folder = newest.unwrap_or(flight);
        let files = files(&folder, "", 1);
        return (folder, files, notes);
    }
    let here = files(given, "", 1);
    let dumps =
        |file: &File| pytorch::rank_of(&file.path) != Named::No || file.text.as_ref().is_ok_and(|text| is_dump(text));
    // The folder of a run has other files, and no dumps beside those in flight/.
    let of_run = given.join("events.jsonl").exists();
    let deep = !of_run && !here.iter().any(dumps);
    (given.to_owned(), if deep { files(given, "", DEPTH) } else { here }, notes)
}

fn is_dump(text: &str) -> bool {
    pytorch::Dump::parse(text).is_ok()
}

/// Files of `folder` and of folders in it, `depth` levels in all, that are JSON by their name or named as dumps are.
fn files(folder: &Path, under: &str, depth: usize) -> Vec<File> {
    let mut found = Vec::new();
    for path in entries(folder) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let shown = if under.is_empty() { name.to_owned() } else { format!("{under}/{name}") };
        if path.is_dir() {
            if depth > 1 {
                found.extend(files(&path, &shown, depth - 1));
            }
        } else if path.is_file() && (name.ends_with(".json") || pytorch::rank_of(name) != Named::No) {
            found.push(File { text: text(&path), path: shown });
        }
    }
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = list.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn text(path: &Path) -> Result<String, String> {
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    // What Python's pickle begins with.
    if bytes.starts_with(&[0x80]) {
        return Err(format!(
            "it is a pickle; as JSON: python3 -c 'import json,pickle; json.dump(pickle.load(open(\"{0}\",\"rb\")), open(\"{0}.json\",\"w\"))'",
            path.display()
        ));
    }
    String::from_utf8(bytes).map_err(|_| "it is no text".into())
}

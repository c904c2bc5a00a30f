//! Dumps of a folder, sorted: whose each is, and which belong to one attempt of a job. Pure.
//!
//! A verdict over records of two attempts, or over records under wrong ranks, names innocents. So a dump is used only where its
//! content or its name tells whose it is, and dumps that cannot be of one attempt are judged apart.

mod moment;

use std::collections::{BTreeMap, BTreeSet};

use crate::hang::RankView;
use crate::pytorch::{Dump, Named, Stamp, rank_of};

/// A file that may be a dump.
#[derive(Debug, Clone)]
pub struct File {
    /// Its path under the folder that is looked at, with `/`.
    pub path: String,
    /// Its text, or why it cannot be read.
    pub text: Result<String, String>,
}

/// Records of one attempt.
#[derive(Debug, Clone, Default)]
pub struct Attempt {
    /// By rank.
    pub views: Vec<RankView>,
    /// Ranks whose dump cannot be read.
    pub unreadable: BTreeSet<u32>,
    /// What tells it from the others; empty where there is one.
    pub label: String,
    /// The files that were read.
    pub files: Vec<String>,
}

/// What is in a folder.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Oldest first.
    pub attempts: Vec<Attempt>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

struct Read {
    path: String,
    rank: u32,
    dump: Dump,
    stamp: (Option<u64>, Stamp),
}

/// Dumps further apart than this, and than their exchanges may take, are of two attempts.
const APART_NS: u64 = 1_800_000_000_000;

/// Sorts `files`.
///
/// # Errors
/// If two dumps claim one rank and nothing tells them apart.
pub fn sort(files: Vec<File>) -> Result<Found, String> {
    let mut found = Found::default();
    let (mut read, mut broken) = (Vec::new(), Vec::new());
    for File { path, text } in files {
        let name = path.rsplit('/').next().unwrap_or_default();
        let named = rank_of(name);
        match text.and_then(|text| Dump::parse(&text)) {
            Ok(dump) => match whose(&dump, &named) {
                Ok((rank, note)) => {
                    found.notes.extend(note.map(|note| format!("{path}: {note}")));
                    let stamp = (numbered(&path), dump.stamp());
                    read.push(Read { path, rank, dump, stamp });
                }
                Err(why) => found.notes.push(format!("{path} is left out: {why}")),
            },
            Err(why) => match named {
                Named::Rank(rank) => {
                    found.notes.push(format!("{path} is left out, rank {rank}'s dump cannot be read: {why}"));
                    broken.push((path, rank));
                }
                Named::Several(_) => found.notes.push(format!("{path} is left out: {why}")),
                // Any other file of a folder.
                Named::No => {}
            },
        }
    }
    let timed = read.iter().any(|r| r.dump.timed() == Some(true));
    let mut parts = apart(read)?;
    parts.sort_by_key(|part| part.iter().filter_map(|r| r.dump.times()).map(|(_, last)| last).max());
    let several = parts.len() > 1;
    for part in parts {
        let complete = complete(&part);
        let mut attempt = Attempt { label: if several { label(&part) } else { String::new() }, ..Attempt::default() };
        for Read { path, rank, dump, .. } in part {
            let mut view = dump.view(rank, complete);
            // One that shows nothing that has started, nor ended, was made as the others were.
            view.timed |= timed && dump.timed().is_none();
            attempt.views.push(view);
            attempt.files.push(path);
        }
        attempt.views.sort_by_key(|view| view.rank);
        found.attempts.push(attempt);
    }
    if found.attempts.is_empty() && !broken.is_empty() {
        found.attempts.push(Attempt::default());
    }
    for (path, rank) in broken {
        // It belongs to those in its folder, or to all that lack it.
        let lacks = |attempt: &&mut Attempt| attempt.views.iter().all(|view| view.rank != rank);
        let beside = |attempt: &Attempt| attempt.files.iter().any(|file| folder(file) == folder(&path));
        let near = found.attempts.iter().any(beside);
        let of = found.attempts.iter_mut().filter(lacks).filter(|attempt| !near || beside(attempt));
        of.for_each(|attempt| {
            attempt.unreadable.insert(rank);
        });
    }
    Ok(found)
}

/// These dumps list what is over, too.
fn complete(part: &[Read]) -> bool {
    part.iter().any(|one| one.dump.lists_completed())
}

fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The rank of a dump: what it says itself, then what only it can be, then its name.
fn whose(dump: &Dump, named: &Named) -> Result<(u32, Option<String>), String> {
    let could = dump.could_be();
    let only = could.as_ref().filter(|ranks| ranks.len() == 1).and_then(|ranks| ranks.first().copied());
    let list = |ranks: &BTreeSet<u32>| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    match (dump.said().or(only), named) {
        (Some(rank), Named::Rank(name)) if *name != rank => {
            Ok((rank, Some(format!("its name says rank {name}, its content is rank {rank}'s and is believed"))))
        }
        (Some(rank), _) => Ok((rank, None)),
        (None, Named::Rank(name)) => match could {
            Some(ranks) if !ranks.contains(name) => Err(match ranks.is_empty() {
                true => "its groups have no rank in common, so it cannot be one rank's".into(),
                false => format!("its name says rank {name}, its groups are of ranks {}", list(&ranks)),
            }),
            _ => Ok((*name, None)),
        },
        (None, Named::Several(names)) => {
            let names = names.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ");
            Err(format!(
                "its name is ambiguous (rank {names}?) and its content fits several ranks; name it _dump_RANK.json"
            ))
        }
        (None, Named::No) => Err("neither its content nor its name tells the rank; name it _dump_RANK.json".into()),
    }
}

/// The number of an attempt that a path names: `attempt_1/...`, `..._restart-2.json`.
fn numbered(path: &str) -> Option<u64> {
    let lower = path.to_ascii_lowercase();
    ["attempt", "restart", "cycle", "hang"].iter().find_map(|word| {
        let (_, after) = lower.split_once(word)?;
        let after = after.strip_prefix(['_', '-', '.', '=']).unwrap_or(after);
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        after[..digits].parse().ok()
    })
}

/// Parts that can each be one attempt.
fn apart(read: Vec<Read>) -> Result<Vec<Vec<Read>>, String> {
    let mut stamped: BTreeMap<(Option<u64>, Stamp), Vec<Read>> = BTreeMap::new();
    for one in read {
        stamped.entry(one.stamp.clone()).or_default().push(one);
    }
    let mut parts = Vec::new();
    for part in stamped.into_values() {
        for part in by_time(part) {
            parts.extend(by_place(part)?.into_iter().flat_map(by_moment));
        }
    }
    Ok(parts)
}

/// Cut where the dumps' last exchanges lie further apart than a hang lasts.
fn by_time(mut part: Vec<Read>) -> Vec<Vec<Read>> {
    let last = |one: &Read| one.dump.times().map(|(_, last)| last);
    part.sort_by_key(last);
    let limit = part.iter().map(|one| one.dump.timeout_ns()).max().unwrap_or(0).saturating_mul(2).max(APART_NS);
    let mut parts: Vec<Vec<Read>> = Vec::new();
    let mut before: Option<u64> = None;
    let mut idle = Vec::new();
    for one in part {
        // Who has no exchange at all has no time: it goes to the last ones.
        let Some(now) = last(&one) else {
            idle.push(one);
            continue;
        };
        if before.is_none_or(|before| now - before > limit) {
            parts.push(Vec::new());
        }
        before = Some(now);
        parts.last_mut().expect("one was pushed").push(one);
    }
    match parts.last_mut() {
        Some(last) => last.extend(idle),
        None => parts.push(idle),
    }
    parts
}

/// Where a rank has several dumps they are told apart by their folders, from the top down, then by how they are named.
fn by_place(part: Vec<Read>) -> Result<Vec<Vec<Read>>, String> {
    let Some((a, b)) = twice(&part) else { return Ok(vec![part]) };
    let twins = format!("{a} and {b} are both of one rank");
    let depth = part.iter().map(|one| one.path.matches('/').count()).max().unwrap_or(0);
    let top = |depth: usize| move |one: &Read| one.path.split('/').take(depth).collect::<Vec<_>>().join("/");
    let keys = (1..=depth).map(|depth| part.iter().map(top(depth)).collect::<Vec<_>>());
    let names = part.iter().map(|one| format!("{} {}", folder(&one.path), pattern(&one.path))).collect();
    for keys in keys.chain([names]) {
        let mut parts: BTreeMap<&String, Vec<&Read>> = BTreeMap::new();
        keys.iter().zip(&part).for_each(|(key, one)| parts.entry(key).or_default().push(one));
        let clear = |part: &Vec<&Read>| part.iter().map(|one| one.rank).collect::<BTreeSet<_>>().len() == part.len();
        if parts.values().all(clear) {
            let mut parts: BTreeMap<String, Vec<Read>> = BTreeMap::new();
            keys.into_iter().zip(part).for_each(|(key, one)| parts.entry(key).or_default().push(one));
            return Ok(parts.into_values().collect());
        }
    }
    Err(format!(
        "{twins}, and nothing tells of which attempt each is: put the dumps of each attempt into a folder of its own"
    ))
}

/// Cut where records contradict each other.
fn by_moment(mut part: Vec<Read>) -> Vec<Vec<Read>> {
    let mut parts = Vec::new();
    loop {
        let views: Vec<RankView> = part.iter().map(|one| one.dump.view(one.rank, complete(&part))).collect();
        let others = moment::others(&views);
        let (rest, kept): (Vec<Read>, Vec<Read>) = part.into_iter().partition(|one| others.contains(&one.rank));
        parts.push(kept);
        if rest.is_empty() {
            return parts;
        }
        part = rest;
    }
}

/// Two files of one rank.
fn twice(part: &[Read]) -> Option<(&str, &str)> {
    let mut seen: BTreeMap<u32, &str> = BTreeMap::new();
    part.iter().find_map(|one| seen.insert(one.rank, &one.path).map(|before| (before, one.path.as_str())))
}

/// A file's name without its rank.
fn pattern(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.split(|c: char| c.is_ascii_digit()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("#")
}

fn label(part: &[Read]) -> String {
    let Some(first) = part.first() else { return String::new() };
    let (number, stamp) = &first.stamp;
    let mut told = vec![first.path.clone()];
    if part.len() > 1 {
        told[0] += &format!(" and {} more", part.len() - 1);
    }
    told.extend(number.map(|n| format!("number {n} by its name")));
    told.extend(stamp.generation.map(|generation| format!("generation {generation}")));
    told.extend(stamp.world.map(|world| format!("{world} ranks")));
    told.extend(Some(&stamp.version).filter(|v| !v.is_empty()).map(|version| format!("format {version}")));
    told.join(", ")
}

#[cfg(test)]
mod tests;

//! Flight records in the JSON of PyTorch's flight recorder, out and in.
//!
//! Out: one file per rank, `fr_trace_rank_<r>.json`. In: those, and what PyTorch itself dumped as JSON (`_dump_<r>.json`, ...).

use std::collections::BTreeMap;

use fabric::{FlightLink, FlightRecord, FlightState, Operation};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::hang::{Exchange, GroupOf, RankView};

/// Version of the format that is written.
const VERSION: &str = "2.5";

/// The name of a rank's file.
pub fn file_name(rank: u32) -> String {
    format!("fr_trace_rank_{rank}.json")
}

/// The record of a rank in the shape of PyTorch's.
pub fn dump(record: &FlightRecord) -> Value {
    let name = |id: u32| record.groups.iter().find(|g| g.id == id).map_or("", |g| g.name.as_str());
    let mut config = serde_json::Map::new();
    let mut status = serde_json::Map::new();
    for group in &record.groups {
        let key = group.id.to_string();
        let ended = |e: &&fabric::FlightEntry| e.group == group.id && e.peer.is_none();
        let last = record.entries.iter().rfind(ended);
        let under_way = last.is_some_and(|e| e.state != FlightState::Completed);
        let begun = group.begun as i64;
        config.insert(key.clone(), json!({ "name": key, "desc": group.name, "ranks": format!("{:?}", group.ranks) }));
        status.insert(
            key,
            json!({
                "last_enqueued_collective": begun,
                "last_started_collective": begun,
                "last_completed_collective": begun - i64::from(under_way),
            }),
        );
    }
    let entries: Vec<Value> = record
        .entries
        .iter()
        .map(|e| {
            let numbers = json!([[e.bytes / 4]]);
            let p2p = e.peer.is_some();
            let profiling_name = match (e.operation, e.peer) {
                (Operation::Send, Some(peer)) => format!("lockstep:send {}->{peer}", record.rank),
                (_, Some(peer)) => format!("lockstep:recv {}<-{peer}", record.rank),
                (operation, None) => format!("lockstep:{operation}"),
            };
            json!({
                "frames": [],
                "record_id": e.id,
                "pg_id": e.group,
                "process_group": [e.group.to_string(), name(e.group)],
                "collective_seq_id": if p2p { 0 } else { e.sequence + 1 },
                "p2p_seq_id": if p2p { e.sequence + 1 } else { 0 },
                "op_id": e.id,
                "profiling_name": profiling_name,
                "time_created_ns": e.started_ns,
                "input_sizes": numbers,
                "input_dtypes": ["Float"],
                "output_sizes": numbers,
                "output_dtypes": ["Float"],
                "state": if e.state == FlightState::Completed { "completed" } else { "started" },
                "time_discovered_started_ns": e.started_ns,
                "time_discovered_completed_ns": e.ended_ns.filter(|_| e.state == FlightState::Completed),
                "retired": e.state == FlightState::Completed,
                "timeout_ms": 0,
                "is_p2p": p2p,
            })
        })
        .collect();
    json!({
        "version": VERSION,
        "rank": record.rank,
        "world": record.world,
        "generation": record.generation,
        "waits_for": record.waits_for,
        "still_ms": record.still_ms,
        "links": record.links,
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
    })
}

#[derive(Deserialize)]
struct Dump {
    #[serde(default)]
    rank: Option<u32>,
    #[serde(default)]
    waits_for: Option<u32>,
    #[serde(default)]
    still_ms: u64,
    #[serde(default)]
    links: Vec<FlightLink>,
    pg_config: BTreeMap<String, Config>,
    #[serde(default)]
    pg_status: BTreeMap<String, Status>,
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
struct Config {
    name: String,
    #[serde(default)]
    desc: String,
    /// `"[0, 1]"`: a string.
    ranks: String,
}

#[derive(Deserialize)]
struct Status {
    last_enqueued_collective: i64,
}

#[derive(Deserialize)]
struct Entry {
    pg_id: u64,
    process_group: (String, String),
    #[serde(default)]
    collective_seq_id: u64,
    #[serde(default)]
    p2p_seq_id: u64,
    profiling_name: String,
    #[serde(default)]
    time_created_ns: u64,
    #[serde(default)]
    input_sizes: Vec<Vec<u64>>,
    state: String,
    #[serde(default)]
    is_p2p: bool,
}

/// Reads a dump. `rank` is used where the dump does not say whose it is.
///
/// # Errors
/// If the text is no flight recorder's dump.
pub fn read(text: &str, rank: Option<u32>) -> Result<RankView, String> {
    let dump: Dump = serde_json::from_str(text).map_err(|e| format!("no flight recorder's dump: {e}"))?;
    view(&dump, rank)
}

/// [`read`] of JSON that is parsed already.
///
/// # Errors
/// As [`read`].
pub fn read_value(value: &Value, rank: Option<u32>) -> Result<RankView, String> {
    let dump = Dump::deserialize(value).map_err(|e| format!("no flight recorder's dump: {e}"))?;
    view(&dump, rank)
}

fn view(dump: &Dump, rank: Option<u32>) -> Result<RankView, String> {
    let rank = dump.rank.or(rank).ok_or("the dump does not say which rank's it is, and neither does its name")?;
    let list = |text: &str| -> Result<Vec<u32>, String> {
        serde_json::from_str(text).map_err(|e| format!("ranks of a group are {text:?}: {e}"))
    };
    let mut groups = BTreeMap::new();
    for config in dump.pg_config.values() {
        let of = GroupOf { desc: config.desc.clone(), ranks: list(&config.ranks)?, begun: 0 };
        groups.insert(config.name.clone(), of);
    }
    let mut exchanges = Vec::new();
    for entry in &dump.entries {
        let (name, desc) = &entry.process_group;
        let group = groups.entry(name.clone()).or_insert_with(|| GroupOf { desc: desc.clone(), ..GroupOf::default() });
        if !entry.is_p2p {
            group.begun = group.begun.max(entry.collective_seq_id);
            // The status counts by PyTorch's own number of the group, which only entries tell.
            let status = dump.pg_status.get(&entry.pg_id.to_string());
            group.begun = group.begun.max(status.map_or(0, |s| s.last_enqueued_collective.max(0) as u64));
        }
        exchanges.push(Exchange {
            group: name.clone(),
            operation: entry.profiling_name.clone(),
            sequence: if entry.is_p2p { entry.p2p_seq_id } else { entry.collective_seq_id },
            point_to_point: entry.is_p2p,
            size: entry.input_sizes.first().cloned().unwrap_or_default(),
            ended: entry.state == "completed",
            began_ns: entry.time_created_ns,
        });
    }
    let links = dump.links.iter().map(|link| (link.peer, (link.sent, link.received))).collect();
    Ok(RankView { rank, groups, exchanges, waits_for: dump.waits_for, still_ms: dump.still_ms, links })
}

/// The number at the end of a dump's file name, before its ending: `_dump_12.json` is rank 12's.
pub fn rank_of(file_name: &str) -> Option<u32> {
    let stem = file_name.strip_suffix(".json")?;
    let digits = stem.len() - stem.bytes().rev().take_while(u8::is_ascii_digit).count();
    stem[digits..].parse().ok()
}

//! Flight records in the JSON of PyTorch's flight recorder, out and in.
//!
//! Out: one file per rank, `fr_trace_rank_<r>.json`. In: those, and what PyTorch itself dumped as JSON (`_dump_<r>.json`, ...).

mod name;
mod read;

use fabric::{FlightRecord, FlightState, Operation};
use serde_json::{Value, json};

pub use name::{Named, rank_of};
pub use read::{Dump, Stamp, read_value};

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

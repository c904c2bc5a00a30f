//! A dump, read: leniently, for versions differ in what they write.

use std::collections::{BTreeMap, BTreeSet};

use fabric::FlightLink;
use serde::Deserialize;
use serde_json::Value;

use crate::hang::{Exchange, GroupOf, RankView, State};

/// A dump of one rank, before it is said whose it is.
#[derive(Debug, Clone, Deserialize)]
pub struct Dump {
    #[serde(default)]
    version: Option<Value>,
    #[serde(default)]
    rank: Option<u32>,
    #[serde(default)]
    world: Option<u32>,
    #[serde(default)]
    generation: Option<u64>,
    #[serde(default)]
    waits_for: Option<u32>,
    #[serde(default)]
    still_ms: u64,
    #[serde(default)]
    links: Vec<FlightLink>,
    #[serde(default)]
    pg_config: BTreeMap<String, Config>,
    #[serde(default)]
    pg_status: BTreeMap<String, Status>,
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(default)]
    name: String,
    #[serde(default)]
    desc: String,
    /// `"[0, 1]"`: a string; a list is taken, too.
    #[serde(default)]
    ranks: Value,
}

#[derive(Debug, Clone, Deserialize)]
struct Status {
    #[serde(default)]
    last_enqueued_collective: i64,
}

#[derive(Debug, Clone, Deserialize)]
struct Entry {
    #[serde(default)]
    record_id: u64,
    #[serde(default)]
    pg_id: u64,
    #[serde(default)]
    process_group: (String, String),
    #[serde(default)]
    collective_seq_id: i64,
    #[serde(default)]
    p2p_seq_id: i64,
    profiling_name: String,
    #[serde(default)]
    time_created_ns: u64,
    #[serde(default)]
    input_sizes: Value,
    #[serde(default)]
    output_sizes: Value,
    #[serde(default)]
    input_dtypes: Value,
    #[serde(default)]
    output_dtypes: Value,
    #[serde(default)]
    state: String,
    #[serde(default)]
    time_discovered_started_ns: Option<u64>,
    #[serde(default)]
    timeout_ms: u64,
    #[serde(default)]
    is_p2p: bool,
}

/// What tells dumps of one attempt from those of another.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Of the format.
    pub version: String,
    /// Of the world, where it is counted (ours).
    pub generation: Option<u64>,
    /// Ranks of the world, where the dump tells.
    pub world: Option<usize>,
}

/// Prefix of our own operations.
const OURS: &str = "lockstep:";

impl Dump {
    /// Reads a dump.
    ///
    /// # Errors
    /// If the text is no flight recorder's dump, or only a part of one.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("the file is empty".into());
        }
        serde_json::from_str(text).map_err(|e| match e.is_eof() {
            true => format!("it ends in the middle ({e})"),
            false => format!("no flight recorder's dump: {e}"),
        })
    }

    /// The rank that the dump says it is of.
    pub fn said(&self) -> Option<u32> {
        self.rank
    }

    /// The ranks that it can be of, as its content tells: members of all its groups, and the own side of its sends and receives.
    /// None: it tells nothing.
    pub fn could_be(&self) -> Option<BTreeSet<u32>> {
        if let Some(rank) = self.rank {
            return Some([rank].into());
        }
        let mut found: Option<BTreeSet<u32>> = None;
        let mut narrow = |ranks: BTreeSet<u32>| {
            found = Some(found.take().map_or(ranks.clone(), |known| known.intersection(&ranks).copied().collect()));
        };
        for config in self.pg_config.values() {
            let ranks = list(&config.ranks);
            if !ranks.is_empty() {
                narrow(ranks.into_iter().collect());
            }
        }
        for entry in &self.entries {
            if let Some((own, _, _)) = self.sides(entry) {
                narrow([own].into());
            }
        }
        found
    }

    /// What tells it from dumps of another attempt.
    pub fn stamp(&self) -> Stamp {
        let version = match &self.version {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => String::new(),
        };
        let all = self.pg_config.values().find(|c| c.desc == "default_pg").map(|c| list(&c.ranks).len());
        let world = self.world.map(|world| world as usize).or(all.filter(|ranks| *ranks > 0));
        Stamp { version, generation: self.generation, world }
    }

    /// When its exchanges began: the first and the last, in nanoseconds; none where it has none.
    pub fn times(&self) -> Option<(u64, u64)> {
        let times = self.entries.iter().map(|e| e.time_created_ns);
        Some((times.clone().min()?, times.max()?))
    }

    /// For how long its exchanges may take, at most, in nanoseconds; 0: it does not tell.
    pub fn timeout_ns(&self) -> u64 {
        self.entries.iter().map(|e| e.timeout_ms.saturating_mul(1_000_000)).max().unwrap_or(0)
    }

    fn ranks(&self, group: &str) -> Vec<u32> {
        let of = self.pg_config.iter().find(|(key, config)| config.name == group || key.as_str() == group);
        of.map_or_else(Vec::new, |(_, config)| list(&config.ranks))
    }

    /// Of a send or receive: (own rank, peer, it is a send). PyTorch counts both among the members of the group.
    fn sides(&self, entry: &Entry) -> Option<(u32, u32, bool)> {
        let (operation, sides) = entry.profiling_name.split_once(' ')?;
        let sends = operation.ends_with("send");
        let (own, peer) = sides.split_once(if sends { "->" } else { "<-" })?;
        let (own, peer) = (own.trim().parse::<u32>().ok()?, peer.trim().parse::<u32>().ok()?);
        if operation.starts_with(OURS) {
            return Some((own, peer, sends));
        }
        let mut ranks = self.ranks(&entry.process_group.0);
        ranks.sort_unstable();
        Some((*ranks.get(own as usize)?, *ranks.get(peer as usize)?, sends))
    }

    /// It lists exchanges that are over, too: PyTorch dumps only those under way where it is asked to.
    pub fn lists_completed(&self) -> bool {
        self.entries.iter().any(|e| e.state == "completed")
    }

    /// Collectives that this rank has begun, by group, as its status tells. It counts groups by a number of its own, which entries
    /// tell; without entries by order, for both numbers ascend as groups are made.
    fn enqueued(&self) -> BTreeMap<&str, u64> {
        let number = |text: &str| text.parse::<u64>().ok();
        let known: BTreeMap<u64, &str> = self.entries.iter().map(|e| (e.pg_id, e.process_group.0.as_str())).collect();
        let ids: Option<BTreeSet<u64>> = self.pg_status.keys().map(|id| number(id)).collect();
        let names: Option<BTreeMap<u64, &str>> =
            self.pg_config.keys().map(|name| Some((number(name)?, name.as_str()))).collect();
        let mut names_of = known.clone();
        if let (Some(ids), Some(names)) = (ids, names) {
            let pairs: BTreeMap<u64, &str> = ids.into_iter().zip(names.into_values()).collect();
            let fits = known.iter().all(|(id, name)| pairs.get(id).is_none_or(|of| of == name));
            if fits && pairs.len() == self.pg_status.len() && pairs.len() == self.pg_config.len() {
                names_of.extend(pairs);
            }
        }
        let of = |(id, name): (u64, &'_ str)| Some((name.to_owned(), self.pg_status.get(&id.to_string())?));
        let found = names_of
            .into_iter()
            .filter_map(of)
            .map(|(name, status)| (name, status.last_enqueued_collective.max(0) as u64));
        let found: BTreeMap<String, u64> = found.collect();
        self.pg_config.keys().filter_map(|key| Some((key.as_str(), *found.get(key)?))).collect()
    }

    /// What it tells, as rank `rank`'s. `complete`: dumps of this attempt list what is over, too, so that a group without entries is
    /// one that the rank has not used.
    pub fn view(&self, rank: u32, complete: bool) -> RankView {
        let whole = complete && self.entries.first().is_none_or(|first| first.record_id == 0);
        let enqueued = self.enqueued();
        let mut groups = BTreeMap::new();
        for (key, config) in &self.pg_config {
            let name = if config.name.is_empty() { key } else { &config.name };
            // Where the ring has lost the beginning a group without entries may be one that was used long ago.
            let begun = enqueued.get(key.as_str()).copied().or(whole.then_some(0));
            groups.insert(name.clone(), GroupOf { desc: config.desc.clone(), ranks: list(&config.ranks), begun });
        }
        let states = self.states();
        let mut exchanges = Vec::new();
        for (entry, state) in self.entries.iter().zip(&states) {
            let (name, desc) = &entry.process_group;
            let group =
                groups.entry(name.clone()).or_insert_with(|| GroupOf { desc: desc.clone(), ..GroupOf::default() });
            let sequence = |n: i64| n.max(0) as u64;
            if !entry.is_p2p {
                group.begun = Some(sequence(entry.collective_seq_id).max(group.begun.unwrap_or(0)));
            }
            let Some(state) = *state else { continue };
            let sides = self.sides(entry).filter(|_| entry.is_p2p);
            exchanges.push(Exchange {
                group: name.clone(),
                operation: entry.profiling_name.clone(),
                sequence: sequence(if entry.is_p2p { entry.p2p_seq_id } else { entry.collective_seq_id }),
                point_to_point: entry.is_p2p,
                sends: sides.is_some_and(|(_, _, sends)| sends),
                peer: sides.map(|(_, peer, _)| peer),
                inputs: shapes(&entry.input_sizes),
                outputs: shapes(&entry.output_sizes),
                types: [&entry.input_dtypes, &entry.output_dtypes].into_iter().flat_map(words).collect(),
                state,
                began_ns: entry.time_created_ns,
            });
        }
        let links = self.links.iter().map(|link| (link.peer, (link.sent, link.received))).collect();
        let strict = !self.entries.iter().any(|e| e.profiling_name.starts_with(OURS));
        let timed = self.timed() == Some(true);
        let (waits_for, still_ms) = (self.waits_for, self.still_ms);
        RankView { rank, groups, exchanges, waits_for, still_ms, links, timed, whole, strict }
    }

    /// Whether it tells "scheduled" from "started"; none: it shows nothing that has started.
    pub fn timed(&self) -> Option<bool> {
        let started = |e: &Entry| e.state == "started" || e.time_discovered_started_ns.is_some();
        if self.entries.iter().any(started) { Some(true) } else { self.lists_completed().then_some(false) }
    }

    /// The state of each entry; none: it only ends others that were put together, and has given them its state. Those have none of
    /// their own: PyTorch leaves them at "scheduled" for ever.
    fn states(&self) -> Vec<Option<State>> {
        let own = |e: &Entry| match e.state.as_str() {
            "completed" => State::Completed,
            "scheduled" => State::Scheduled,
            _ => State::Started,
        };
        let mut states: Vec<Option<State>> = self.entries.iter().map(|e| Some(own(e))).collect();
        let key = |e: &Entry| (e.is_p2p, if e.is_p2p { e.p2p_seq_id } else { e.collective_seq_id });
        for (at, end) in self.entries.iter().enumerate() {
            let kind = end.profiling_name.rsplit(':').next().unwrap_or_default();
            if kind != "coalesced" && !kind.ends_with("_coalesced") {
                continue;
            }
            let mut found = None;
            for before in (0..at).rev() {
                let entry = &self.entries[before];
                if entry.process_group.0 != end.process_group.0 {
                    continue;
                }
                let parts = [(true, end.p2p_seq_id), (false, end.collective_seq_id)];
                // All parts are of one kind: a collective before them may have the number that sends and receives carry along.
                let fits = found.map_or_else(|| parts.contains(&key(entry)), |part| part == key(entry));
                if entry.profiling_name == end.profiling_name || !fits {
                    break;
                }
                states[before] = states[at];
                found = Some(key(entry));
            }
            if found.is_some() || kind == "coalesced" {
                states[at] = None;
            }
        }
        states
    }
}

/// [`Dump::parse`] and [`Dump::view`] of JSON that is parsed already. `rank` is used where the dump does not say whose it is.
///
/// # Errors
/// If it is no flight recorder's dump.
pub fn read_value(value: &Value, rank: Option<u32>) -> Result<RankView, String> {
    let dump = Dump::deserialize(value).map_err(|e| format!("no flight recorder's dump: {e}"))?;
    let rank = dump.rank.or(rank).ok_or("the dump does not say which rank's it is")?;
    Ok(dump.view(rank, true))
}

/// `"[0, 1]"`, or a list.
fn list(ranks: &Value) -> Vec<u32> {
    let of = |value: &Value| -> Option<Vec<u32>> {
        value.as_array()?.iter().map(|n| u32::try_from(n.as_u64()?).ok()).collect()
    };
    match ranks {
        Value::String(text) => serde_json::from_str(text).ok().and_then(|value| of(&value)),
        value => of(value),
    }
    .unwrap_or_default()
}

fn shapes(sizes: &Value) -> Vec<Vec<u64>> {
    let shape = |value: &Value| value.as_array().map(|dims| dims.iter().filter_map(Value::as_u64).collect());
    sizes.as_array().map(|all| all.iter().filter_map(shape).collect()).unwrap_or_default()
}

fn words(value: &Value) -> Vec<String> {
    let all = value.as_array().map_or(&[][..], Vec::as_slice);
    all.iter().filter_map(|word| word.as_str().map(str::to_owned)).collect()
}

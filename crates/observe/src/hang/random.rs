//! Random jobs with one known fault: the verdict names the rank that has it, or nobody and says whom it suspects.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{Verdict, Why, verdict};
use crate::records::{File, sort};

/// Pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Its process stops before the exchange.
    Missing,
    /// It never ends an exchange that the others end.
    Lagging,
    /// Its stream never gets to the exchange, which it has scheduled.
    Stream,
    /// It does something else there.
    Operation,
    /// It does the same there with another size.
    Size,
    /// It leaves the exchange out and goes on.
    Skip,
}

const FAULTS: [Fault; 6] = [Fault::Missing, Fault::Lagging, Fault::Stream, Fault::Operation, Fault::Size, Fault::Skip];

#[derive(Debug, Clone, PartialEq)]
struct Op {
    group: usize,
    name: &'static str,
    size: u64,
    /// Index of the peer in the group, and that this is the send.
    peer: Option<(usize, bool)>,
}

#[derive(Debug, Clone)]
struct Job {
    groups: Vec<(String, Vec<u32>)>,
    /// Of each rank, what it does, in order.
    ops: Vec<Vec<Op>>,
}

const NAMES: [&str; 4] = ["all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast"];

impl Job {
    /// dp x tp x pp ranks that do random exchanges in one order for all, so that nothing hangs by itself.
    fn new(dice: &mut Dice) -> Self {
        let (dp, tp, pp) = loop {
            let grid = (1 + dice.below(4), 1 + dice.below(4), 1 + dice.below(3));
            if (2..=16).contains(&(grid.0 * grid.1 * grid.2)) {
                break grid;
            }
        };
        let rank = |d: usize, t: usize, p: usize| ((p * dp + d) * tp + t) as u32;
        let world = dp * tp * pp;
        let mut groups: Vec<(String, Vec<u32>)> = vec![("default_pg".into(), (0..world as u32).collect())];
        let mut kinds: Vec<Vec<usize>> = vec![vec![0]];
        let mut add = |desc: &str, lists: Vec<Vec<u32>>| {
            let first = groups.len();
            groups.extend(lists.into_iter().map(|ranks| (desc.to_owned(), ranks)));
            (first..groups.len()).collect::<Vec<usize>>()
        };
        let both = |a: usize, b: usize| (0..a).flat_map(move |x| (0..b).map(move |y| (x, y)));
        if tp > 1 {
            kinds.push(add("tp", both(pp, dp).map(|(p, d)| (0..tp).map(|t| rank(d, t, p)).collect()).collect()));
        }
        if dp > 1 {
            kinds.push(add("dp", both(pp, tp).map(|(p, t)| (0..dp).map(|d| rank(d, t, p)).collect()).collect()));
        }
        let lanes = match pp > 1 {
            true => add("pp", both(dp, tp).map(|(d, t)| (0..pp).map(|p| rank(d, t, p)).collect()).collect()),
            false => Vec::new(),
        };
        let mut ops = vec![Vec::new(); world];
        for _ in 0..4 + dice.below(20) {
            if !lanes.is_empty() && dice.chance(40) {
                let (from, size) = (dice.below(pp - 1), 1 + dice.next() % 64);
                let (from, to) = if dice.chance(50) { (from, from + 1) } else { (from + 1, from) };
                for &group in &lanes {
                    let (a, b) = (groups[group].1[from] as usize, groups[group].1[to] as usize);
                    ops[a].push(Op { group, name: "send", size, peer: Some((to, true)) });
                    ops[b].push(Op { group, name: "recv", size, peer: Some((from, false)) });
                }
                continue;
            }
            let (name, size) = (NAMES[dice.below(NAMES.len())], 1 + dice.next() % 64);
            for &group in &kinds[dice.below(kinds.len())] {
                for &rank in &groups[group].1 {
                    ops[rank as usize].push(Op { group, name, size, peer: None });
                }
            }
        }
        Self { groups, ops }
    }

    /// Runs it as far as it gets, `ahead` exchanges handed over before they are due: of each rank, its states.
    fn run(&self, culprit: usize, fault: Fault, at: usize, ahead: &[usize]) -> Vec<Vec<&'static str>> {
        let world = self.ops.len();
        let key = |rank: usize, i: usize| {
            let op = &self.ops[rank][i];
            let same = |other: &&Op| match (op.peer, other.peer) {
                (None, None) => other.group == op.group,
                (Some(a), Some(b)) => other.group == op.group && a == b,
                _ => false,
            };
            self.ops[rank][..i].iter().filter(same).count()
        };
        let stuck =
            |rank: usize, i: usize| rank == culprit && i == at && matches!(fault, Fault::Missing | Fault::Stream);
        let mut done = vec![0; world];
        // Whether `rank` has started its `n`-th exchange of that kind.
        let at_place = |done: &[usize], rank: usize, group: usize, peer: Option<(usize, bool)>, n: usize| {
            let fits = |i: &usize| {
                let op = &self.ops[rank][*i];
                op.group == group && op.peer == peer && key(rank, *i) == n
            };
            let i = (0..self.ops[rank].len()).find(fits)?;
            (i < done[rank] || (i == done[rank] && !stuck(rank, i))).then_some(i)
        };
        loop {
            let mut moved = false;
            let before = done.clone();
            for rank in 0..world {
                let i = before[rank];
                if i >= self.ops[rank].len() || stuck(rank, i) {
                    continue;
                }
                let (op, n) = (&self.ops[rank][i], key(rank, i));
                let members = &self.groups[op.group].1;
                let fits = |other: usize, j: usize| {
                    let their = &self.ops[other][j];
                    their.size == op.size && (op.peer.is_some() || their.name == op.name)
                };
                let all = match op.peer {
                    None => members.iter().all(|&m| {
                        at_place(&before, m as usize, op.group, None, n).is_some_and(|j| fits(m as usize, j))
                    }),
                    Some((peer, sends)) => {
                        let other = members[peer] as usize;
                        let own = members.iter().position(|&m| m as usize == rank).unwrap();
                        at_place(&before, other, op.group, Some((own, !sends)), n).is_some_and(|j| fits(other, j))
                    }
                };
                let lags = fault == Fault::Lagging && rank == culprit && i == at;
                if all && !lags {
                    done[rank] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        (0..world)
            .map(|rank| {
                let (now, all) = (done[rank], self.ops[rank].len());
                let mut end = (now + 1 + ahead[rank]).min(all);
                if rank == culprit && fault == Fault::Missing {
                    end = end.min(at);
                }
                let state = |i: usize| match i {
                    i if i < now => "completed",
                    i if i == now && !stuck(rank, i) => "started",
                    _ => "scheduled",
                };
                (0..end).map(state).collect()
            })
            .collect()
    }

    fn dump(&self, rank: usize, states: &[&str], how: &How) -> Value {
        let mut collectives: BTreeMap<usize, u64> = BTreeMap::new();
        let mut sends: BTreeMap<usize, u64> = BTreeMap::new();
        let mut entries = Vec::new();
        for (i, (op, &state)) in self.ops[rank].iter().zip(states).enumerate() {
            let (desc, ranks) = &self.groups[op.group];
            let own = ranks.iter().position(|&r| r as usize == rank).unwrap();
            let count = if op.peer.is_some() { &mut sends } else { &mut collectives };
            let count = count.entry(op.group).or_default();
            *count += 1;
            let (p2p, n) = (op.peer.is_some(), *count);
            let name = match op.peer {
                None => format!("nccl:{}", op.name),
                Some((peer, true)) => format!("nccl:send {own}->{peer}"),
                Some((peer, false)) => format!("nccl:recv {own}<-{peer}"),
            };
            let state = if how.timed || state == "completed" { state } else { "scheduled" };
            entries.push(json!({
                "record_id": i, "pg_id": op.group, "process_group": [op.group.to_string(), desc],
                "collective_seq_id": if p2p { collectives.get(&op.group).copied().unwrap_or(0) } else { n },
                "p2p_seq_id": if p2p { n } else { 0 }, "op_id": i, "profiling_name": name,
                "time_created_ns": how.skew[rank] + 1000 * i as u64,
                "input_sizes": [[op.size]], "output_sizes": [[op.size]],
                "input_dtypes": ["Float"], "output_dtypes": ["Float"],
                "state": state, "is_p2p": p2p, "retired": state == "completed", "timeout_ms": 600_000,
                "time_discovered_started_ns": if how.timed && state != "scheduled" { json!(1) } else { Value::Null },
            }));
        }
        if how.active {
            entries.retain(|e| e["state"] != "completed");
        }
        if let Some(kept) = how.kept {
            let open = entries.iter().position(|e| e["state"] != "completed").unwrap_or(entries.len());
            entries.drain(..entries.len().saturating_sub(kept).min(open));
        }
        let config: BTreeMap<String, Value> = (self.groups.iter().enumerate())
            .filter(|(_, (_, ranks))| ranks.contains(&(rank as u32)))
            .map(|(i, (desc, ranks))| {
                (i.to_string(), json!({ "name": i.to_string(), "desc": desc, "ranks": format!("{ranks:?}") }))
            })
            .collect();
        // Old versions have no status.
        let status: BTreeMap<String, Value> = (config.keys().filter(|_| how.status))
            .map(|key| {
                let n = collectives.get(&key.parse::<usize>().unwrap()).copied();
                let n = n.map_or(-1, |n| n as i64);
                (key.clone(), json!({ "last_enqueued_collective": n, "last_started_collective": -1, "last_completed_collective": -1 }))
            })
            .collect();
        json!({ "version": "2.10", "pg_config": config, "pg_status": status, "entries": entries })
    }
}

#[derive(Debug)]
struct How {
    timed: bool,
    status: bool,
    active: bool,
    kept: Option<usize>,
    skew: Vec<u64>,
}

/// What became of a case.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
enum Outcome {
    Named,
    Suspected,
    Harmless,
}

fn case(seed: u64) -> (Fault, Outcome) {
    let mut dice = Dice(seed);
    let mut job = Job::new(&mut dice);
    let world = job.ops.len();
    let (culprit, at, fault) = loop {
        let culprit = dice.below(world);
        if !job.ops[culprit].is_empty() {
            break (culprit, dice.below(job.ops[culprit].len()), FAULTS[dice.below(FAULTS.len())]);
        }
    };
    let victim = &mut job.ops[culprit];
    match fault {
        Fault::Operation if victim[at].peer.is_none() => victim[at].name = "all_to_all_single",
        Fault::Operation | Fault::Size => victim[at].size += 1000,
        Fault::Skip => drop(victim.remove(at)),
        _ => {}
    }
    let ahead: Vec<usize> = match dice.chance(50) {
        true => vec![0; world],
        false => (0..world).map(|_| dice.below(6)).collect(),
    };
    let states = job.run(culprit, fault, at, &ahead);
    let partial = dice.chance(30);
    let how = How {
        // Without times nobody can tell a stream that does not get there.
        timed: fault == Fault::Stream || dice.chance(50),
        status: dice.chance(70),
        active: partial && dice.chance(50),
        kept: (partial && dice.chance(50)).then_some(6 + dice.below(6)),
        skew: (0..world).map(|_| dice.next() % 1_000_000_000).collect(),
    };
    let lost: BTreeSet<usize> = match dice.chance(25) {
        true => [dice.below(world)].into(),
        false => BTreeSet::new(),
    };
    let torn = dice.chance(50);
    let mut files: Vec<File> = (0..world)
        .filter(|rank| torn || !lost.contains(rank))
        .map(|rank| {
            let mut text = job.dump(rank, &states[rank], &how).to_string();
            if lost.contains(&rank) {
                text.truncate(text.len() / 2);
            }
            File { path: format!("rank_{rank}_node-{:02}.json", world - rank), text: Ok(text) }
        })
        .collect();
    // In any order.
    for i in (1..files.len()).rev() {
        files.swap(i, dice.below(i + 1));
    }
    let found = sort(files).expect("one attempt");
    assert_eq!(
        found.attempts.len(),
        1,
        "seed {seed}: {:?}",
        found.attempts.iter().map(|a| &a.label).collect::<Vec<_>>()
    );
    let attempt = &found.attempts[0];
    let verdict = verdict(&attempt.views, &attempt.unreadable);
    let full = lost.is_empty() && !how.active && how.kept.is_none();
    let all_over =
        (0..world).all(|r| states[r].len() == job.ops[r].len() && !states[r].iter().any(|s| *s != "completed"));
    let told = || {
        format!(
            "seed {seed}: {fault:?} of rank {culprit} at {at} ({:?}), {how:?}, lost {lost:?} {torn}, ahead {ahead:?}, states {:?}\n{verdict}\n{verdict:#?}",
            job.ops[culprit].get(at),
            states.iter().map(|s| s.iter().filter(|s| **s == "completed").count()).collect::<Vec<_>>()
        )
    };
    let outcome = judge(&verdict, culprit as u32, all_over, &lost);
    let outcome = outcome.unwrap_or_else(|why| panic!("{why}: {}", told()));
    let members =
        job.ops[culprit].get(at).map_or(0, |op| if op.peer.is_some() { 2 } else { job.groups[op.group].1.len() });
    // Where all is there and the evidence decides, it must be named.
    let clear = match fault {
        Fault::Missing | Fault::Stream => full,
        Fault::Operation | Fault::Size => full && members > 2,
        _ => false,
    };
    let others_wait = (0..world).any(|r| r != culprit && states[r].iter().any(|s| *s != "completed"));
    if clear && others_wait && outcome != Outcome::Named {
        panic!("it is not named: {}", told());
    }
    (fault, outcome)
}

fn judge(verdict: &Verdict, culprit: u32, all_over: bool, lost: &BTreeSet<usize>) -> Result<Outcome, String> {
    let named: Vec<u32> = verdict.culprits.iter().map(|c| c.rank).collect();
    if named.iter().any(|rank| *rank != culprit) {
        return Err(format!("ranks {named:?} are named"));
    }
    if verdict.culprits.iter().any(|c| c.waiting.contains(&c.rank) || matches!(c.why, Why::NoAnswer | Why::Silent)) {
        return Err("it waits for itself".into());
    }
    if !named.is_empty() {
        return Ok(Outcome::Named);
    }
    if all_over {
        return if verdict.doubts.is_empty() { Ok(Outcome::Harmless) } else { Err("nothing hangs".into()) };
    }
    let suspected: BTreeSet<u32> =
        verdict.doubts.iter().flat_map(|d| d.ranks.iter().chain(&d.lacks).copied()).collect();
    match () {
        () if suspected.contains(&culprit) => Ok(Outcome::Suspected),
        // It says whose record is missing.
        () if verdict.doubts.iter().any(|d| d.lacks.iter().any(|r| lost.contains(&(*r as usize)))) => {
            Ok(Outcome::Suspected)
        }
        // Its record says that all is over, or is not there, and nobody waits for it.
        () if verdict.waiting.is_empty() => Ok(Outcome::Harmless),
        () => Err(format!("suspected are {suspected:?}")),
    }
}

#[test]
fn of_random_jobs_with_one_fault_nobody_innocent_is_named() {
    let cases = std::env::var("LOCKSTEP_HANG_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3_000);
    let first = std::env::var("LOCKSTEP_HANG_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut counts: BTreeMap<(String, Outcome), u64> = BTreeMap::new();
    for seed in first..first + cases {
        let (fault, outcome) = case(seed);
        *counts.entry((format!("{fault:?}"), outcome)).or_default() += 1;
    }
    println!("{counts:#?}");
    let of = |outcome: Outcome| counts.iter().filter(|((_, o), _)| *o == outcome).map(|(_, n)| n).sum::<u64>();
    assert!(cases < 100 || 2 * of(Outcome::Named) > cases, "most are named: {counts:?}");
}

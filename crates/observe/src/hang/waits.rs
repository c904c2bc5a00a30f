//! Who waits for whom, and where that ends.

use std::collections::{BTreeMap, BTreeSet};

use super::differ::Difference;
use super::pairs::{Lack, lack};
use super::table::{Reached, Table};
use super::view::Exchange;
use super::{Doubt, Why};

/// An exchange in which some ranks wait for others.
#[derive(Debug)]
pub(super) struct Wait<'a> {
    pub group: Option<usize>,
    /// Who waits: (rank, its exchange, that is what holds it up and not a later one).
    pub waiters: Vec<(u32, &'a Exchange, bool)>,
    /// For whom.
    pub missing: BTreeMap<u32, Why>,
    /// All members have come, by the records: who of them holds it up they do not tell.
    pub all_there: bool,
}

/// A rank, what it waits in, and whether that holds it up for sure.
type Waiter<'a> = (u32, &'a Exchange, bool);

/// All waits, and the sends and receives whose halves do not fit. `queued`: what a rank has scheduled counts as a wait, too, although
/// its stream has not come to it.
///
/// Where a record tells what has started, all that has holds its rank up. Else only the first open exchange does for sure: what was
/// handed over after it may wait for it.
pub(super) fn waits<'a>(table: &Table<'a>, differences: &[Difference], queued: bool) -> (Vec<Wait<'a>>, Vec<Doubt>) {
    let mut waits = Vec::new();
    let mut doubts: Vec<Doubt> = Vec::new();
    let mut collectives: BTreeMap<(usize, u64), Vec<Waiter<'a>>> = BTreeMap::new();
    for view in table.views.values() {
        let open = view.exchanges.iter().enumerate();
        let mut open = open.filter(|(_, e)| e.open() && (queued || !view.queued(e))).peekable();
        let first = open.peek().map(|(at, _)| *at);
        for (at, exchange) in open {
            let binds = (view.timed && !queued) || first == Some(at);
            let group = table.group_of(view.rank, exchange);
            if !exchange.point_to_point {
                let Some(group) = group else { continue };
                collectives.entry((group, exchange.sequence)).or_default().push((view.rank, exchange, binds));
                continue;
            }
            let waiters = vec![(view.rank, exchange, binds)];
            match lack(table, view, at) {
                Some(Lack::Peer(peer, why)) => {
                    waits.push(Wait { group, waiters, missing: [(peer, why)].into(), all_there: why == Why::Behind });
                }
                Some(Lack::Size(doubt)) if !doubts.iter().any(|d| d.ranks == doubt.ranks) => doubts.push(*doubt),
                _ => {}
            }
        }
    }
    for ((group, sequence), waiters) in collectives {
        let mut missing = missing(table, group, sequence);
        missing.retain(|_, why| !queued || *why != Why::Queued);
        if let Some(of) = differences.iter().find(|d| d.group == group && d.sequence == sequence) {
            missing.extend(of.suspects().into_iter().map(|rank| (rank, of.why())));
        }
        // Who is held up before it is missing, too, which is better known than what a rank without a record does.
        if missing.values().all(|why| matches!(why, Why::NoAnswer | Why::Unclear)) {
            let mute = !missing.is_empty();
            let held = elsewhere(table, group, sequence, mute);
            if !held.is_empty() {
                missing = held;
            }
        }
        if !missing.is_empty() {
            let all_there = missing.values().all(|why| *why == Why::Behind);
            waits.push(Wait { group: Some(group), waiters, missing, all_there });
        }
    }
    let wrong: BTreeSet<u32> =
        differences.iter().flat_map(Difference::suspects).chain(doubts.iter().flat_map(|d| d.ranks.clone())).collect();
    // Who is itself at odds with others waits for nobody who could help.
    for wait in &mut waits {
        wait.waiters.iter_mut().filter(|(rank, ..)| wrong.contains(rank)).for_each(|waiter| waiter.2 = false);
    }
    (waits, doubts)
}

/// All whose records there are have come to a collective, and some have not ended it: those of them that are held up by something
/// before it, or else, where nobody is `mute`, each other. Empty: there is one such member alone, which nobody of the others holds
/// up; or they tell themselves.
fn elsewhere(table: &Table, group: usize, sequence: u64, mute: bool) -> BTreeMap<u32, Why> {
    let Some(place) = table.places.get(&(group, sequence)) else { return BTreeMap::new() };
    let open = |(_, all): &(&u32, &Vec<&Exchange>)| all.iter().any(|e| e.open());
    let open: Vec<u32> = place.iter().filter(open).map(|(rank, _)| *rank).collect();
    if open.len() < 2 || !open.iter().all(|rank| table.views[rank].strict) {
        return BTreeMap::new();
    }
    let before = |rank: &u32| {
        let first = table.views[rank].exchanges.iter().find(|e| e.open());
        !table.views[rank].timed && first.is_some_and(|e| !place[rank].iter().any(|of| std::ptr::eq(*of, e)))
    };
    let held: Vec<u32> = open.iter().copied().filter(before).collect();
    let all = if held.is_empty() && !mute { open } else { held };
    all.into_iter().map(|rank| (rank, Why::Behind)).collect()
}

/// Members that have not come to a collective; those whose records do not tell only where nobody else is missing.
fn missing(table: &Table, group: usize, sequence: u64) -> BTreeMap<u32, Why> {
    let mut missing = BTreeMap::new();
    let mut mute = BTreeMap::new();
    let place = table.places.get(&(group, sequence));
    let mut met = false;
    for &rank in &table.groups[group].ranks {
        match table.reached(rank, group) {
            Reached::Mute => {
                mute.insert(rank, Why::NoAnswer);
            }
            Reached::Unknown if place.is_none_or(|place| !place.contains_key(&rank)) => {
                mute.insert(rank, Why::Unclear);
            }
            Reached::Begun(begun) if begun < sequence => {
                missing.insert(rank, Why::NotJoined);
            }
            _ => {
                let theirs = place.and_then(|place| place.get(&rank));
                if theirs.is_some_and(|all| all.iter().all(|e| table.views[&rank].queued(e))) {
                    missing.insert(rank, Why::Queued);
                }
                met |= theirs.is_none_or(|all| !all.iter().any(|e| e.open()));
            }
        }
    }
    // What one member has ended all have come to, also those without a record.
    let meets = place.and_then(|place| place.values().flatten().next()).is_some_and(|e| e.meets());
    match missing.is_empty() {
        true if met && meets => BTreeMap::new(),
        true => mute,
        false => missing,
    }
}

/// Where the waits end.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// Ranks that are waited for and wait for nobody.
    pub roots: BTreeSet<u32>,
    /// Ranks that wait for each other in a ring, which leads to no root.
    pub ring: BTreeSet<u32>,
}

pub(super) fn ends(waits: &[Wait]) -> Ends {
    let bound = |wait: &Wait| wait.waiters.iter().filter(|w| w.2).map(|w| w.0).collect::<BTreeSet<u32>>();
    let waiters: Vec<BTreeSet<u32>> = waits.iter().map(bound).collect();
    let waiting: BTreeSet<u32> = waiters.iter().flatten().copied().collect();
    // A wait that holds nobody up names nobody: its ranks are held up elsewhere, or at odds themselves.
    let missed: BTreeSet<u32> = waits
        .iter()
        .zip(&waiters)
        .filter(|(_, who)| !who.is_empty())
        .flat_map(|(wait, _)| wait.missing.keys().copied())
        .collect();
    let roots: BTreeSet<u32> = missed.difference(&waiting).copied().collect();
    // Who waits for a root, or for somebody who does.
    let mut leads = roots.clone();
    loop {
        let before = leads.len();
        for (wait, who) in waits.iter().zip(&waiters) {
            if wait.missing.keys().any(|rank| leads.contains(rank)) {
                leads.extend(who);
            }
        }
        if leads.len() == before {
            break;
        }
    }
    let mut ring: BTreeSet<u32> = waiting.difference(&leads).copied().collect();
    // Who is not waited for by one of them only hangs on to the ring.
    loop {
        let inside = |(wait, who): (&Wait, &BTreeSet<u32>)| {
            let held = who.iter().any(|rank| ring.contains(rank));
            wait.missing.keys().filter(|rank| held && ring.contains(rank)).copied().collect::<Vec<_>>()
        };
        let kept: BTreeSet<u32> = waits.iter().zip(&waiters).flat_map(inside).collect();
        if kept.len() == ring.len() {
            break;
        }
        ring = kept;
    }
    Ends { roots, ring }
}

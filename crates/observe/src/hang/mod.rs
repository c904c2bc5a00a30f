//! Who holds up whom: the verdict over the flight records of all ranks that answered.
//!
//! An exchange that some members of a group have begun and another has not makes them wait for it. A rank that is waited for
//! and does not itself wait for somebody is where the hang comes from; the others follow. No rank's record is believed more
//! than another's: what the members of a group say is put to the vote. Where that decides nothing nobody is accused: a
//! [`Doubt`] names those who are suspected, and what could decide.
//!
//! ```text
//! view.rs    what one record tells          table.rs   all of them, side by side
//! differ.rs  members that do not do the same at one place of their group's order
//! pairs.rs   sends and receives without their other half
//! waits.rs   who waits for whom, and where that ends
//! words.rs   the verdict, as sentences      stacks.rs  the rarest of many stacks
//! ```

mod differ;
mod pairs;
mod stacks;
mod table;
mod view;
mod waits;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

pub use stacks::rarest;
pub use view::{Exchange, GroupOf, RankView, State};

use crate::pytorch;
use differ::Difference;
use table::{Reached, Table};
use waits::Wait;

/// Why a rank is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It has not begun what the others wait in, and waits for nobody.
    NotJoined,
    /// It has not posted the send or receive that belongs to a peer's, and waits for nobody.
    NoPartner,
    /// Its record does not reach back to what the others wait in.
    Unclear,
    /// It was asked and did not answer, and others wait for it.
    NoAnswer,
    /// It is in another exchange than most of its group.
    Mismatch,
    /// It is in the same exchange with another size than most of its group.
    Size,
    /// It is in the same exchange with another type than most of its group.
    Type,
    /// It has scheduled what the others have started: its own stream does not get there.
    Queued,
    /// All have joined; it is the one that others still wait for.
    Silent,
    /// It has scheduled what the others wait in, and has not ended what they have ended before that.
    Behind,
}

/// A rank from which a hang comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Culprit {
    /// The rank.
    pub rank: u32,
    /// Why it.
    pub why: Why,
    /// The group in which it is missed first.
    pub group: String,
    /// What that group is for.
    pub desc: String,
    /// The exchange that it did not join.
    pub operation: String,
    /// Its number in the group, from 1.
    pub sequence: u64,
    /// Its shape, as those say who are in it.
    pub size: Vec<u64>,
    /// Who waits in it.
    pub waiting: Vec<u32>,
    /// Who has only scheduled it, and waits for its own stream.
    pub scheduled: Vec<u32>,
    /// What its own record shows, as a sentence.
    pub stands: Option<String>,
}

/// What is known where nobody can be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Members are in different operations, and neither has a majority.
    Operations,
    /// Members disagree about a size, and neither has a majority.
    Sizes,
    /// Members disagree about a type, and neither has a majority.
    Types,
    /// What goes into an all-to-all is not what comes out.
    Totals,
    /// Ranks wait for each other.
    Ring,
    /// Others wait for a rank of which there is no record.
    NoRecord,
    /// Others wait for a rank whose record cannot be read.
    Unreadable,
    /// All others have completed an exchange in which a rank still is.
    Behind,
    /// All members are inside.
    AllInside,
    /// No member has started what all have scheduled.
    NobodyStarted,
    /// All members have joined; the records do not tell who has started.
    AllJoined,
    /// The records do not tell who is missing.
    Unknown,
}

/// A hang that the records do not decide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Doubt {
    /// What is known.
    pub what: What,
    /// Who is suspected; at least one of them, if the records are all that there is.
    pub ranks: Vec<u32>,
    /// The group.
    pub group: String,
    /// What it is for.
    pub desc: String,
    /// The exchange.
    pub operation: String,
    /// Its number in the group, from 1.
    pub sequence: u64,
    /// Its shape.
    pub size: Vec<u64>,
    /// Who does what, where that differs.
    pub sides: Vec<(String, Vec<u32>)>,
    /// Whose record is missing and could decide.
    pub lacks: Vec<u32>,
    /// Who waits in the exchange.
    pub waiting: Vec<u32>,
}

/// Messages that left one rank and do not come to another one, which waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Cut {
    /// Who sent them.
    pub from: u32,
    /// Who looks for what comes, and sees nothing.
    pub to: u32,
    /// How many were sent.
    pub sent: u64,
    /// How many came.
    pub received: u64,
}

/// The verdict.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Links on which messages were lost: where there are any, the hang comes from them and from no rank.
    pub cut: Vec<Cut>,
    /// Where it comes from; empty: nothing hangs, or it cannot be told.
    pub culprits: Vec<Culprit>,
    /// What the records do not decide.
    pub doubts: Vec<Doubt>,
    /// Ranks with an exchange that is not over.
    pub waiting: Vec<u32>,
    /// Ranks of which there is no record that can be read.
    pub unanswered: Vec<u32>,
    /// Those of them that have one which cannot.
    pub unreadable: Vec<u32>,
}

impl Verdict {
    /// The ranks to name: both ends of the links that are cut, or the culprits; where ranks wait in a ring, these.
    pub fn named(&self) -> Vec<u32> {
        let mut ends: Vec<u32> = self.cut.iter().flat_map(|cut| [cut.from, cut.to]).collect();
        ends.sort_unstable();
        ends.dedup();
        let ring = self.doubts.iter().filter(|doubt| doubt.what == What::Ring).flat_map(|doubt| doubt.ranks.clone());
        match (ends.is_empty(), self.culprits.is_empty()) {
            (false, _) => ends,
            (true, false) => self.culprits.iter().map(|culprit| culprit.rank).collect(),
            (true, true) => ring.collect(),
        }
    }
}

/// A rank that has looked for so long has seen all that came: what was sent to it before is lost.
const LOST_MS: u64 = 200;

/// Links on which messages were lost.
fn cut(views: &[RankView]) -> Vec<Cut> {
    let of = |to: &RankView| {
        let to = (to.rank, to.still_ms, to.links.clone());
        let lost = move |from: &RankView| {
            let sent = from.links.get(&to.0).map_or(0, |(sent, _)| *sent);
            let received = to.2.get(&from.rank).map_or(0, |(_, received)| *received);
            let lost = to.1 >= LOST_MS && from.still_ms >= LOST_MS && sent > received;
            lost.then_some(Cut { from: from.rank, to: to.0, sent, received })
        };
        views.iter().filter_map(lost).collect::<Vec<_>>()
    };
    views.iter().flat_map(of).collect()
}

/// The least time for which all ranks of a world have stood still, by what they answered; 0 where one did not answer or moves.
pub fn still_ms(answers: &[Option<serde_json::Value>]) -> u64 {
    let of = |answer: &Option<serde_json::Value>| answer.as_ref()?.get("still_ms")?.as_u64();
    answers.iter().map(|answer| of(answer).unwrap_or(0)).min().unwrap_or(0)
}

/// Names the ranks from which a hang comes, and the exchanges that the others wait in, by the records that there are; of
/// `unreadable` ranks there is one that cannot be read. A record may be missing for many reasons: a rank without one is
/// suspected where others wait for it, never named.
pub fn verdict(views: &[RankView], unreadable: &BTreeSet<u32>) -> Verdict {
    let mut verdict = judge(views);
    verdict.unreadable = unreadable.iter().copied().filter(|rank| views.iter().all(|v| v.rank != *rank)).collect();
    verdict.unanswered.extend(&verdict.unreadable);
    verdict.unanswered.sort_unstable();
    verdict.unanswered.dedup();
    let (mute, named): (Vec<Culprit>, Vec<Culprit>) =
        verdict.culprits.into_iter().partition(|c| c.why == Why::NoAnswer);
    verdict.culprits = named;
    // Where somebody else is named that explains it, who has no record only has no record.
    let explained = !verdict.culprits.is_empty() || verdict.doubts.iter().any(|doubt| doubt.what <= What::Ring);
    for culprit in mute.into_iter().filter(|_| !explained) {
        let unread = verdict.unreadable.contains(&culprit.rank);
        verdict.doubts.push(Doubt {
            what: if unread { What::Unreadable } else { What::NoRecord },
            ranks: vec![culprit.rank],
            group: culprit.group,
            desc: culprit.desc,
            operation: culprit.operation,
            sequence: culprit.sequence,
            size: culprit.size,
            sides: Vec::new(),
            lacks: vec![culprit.rank],
            waiting: culprit.waiting,
        });
    }
    verdict
}

/// [`verdict`] over what ranks answered when they were asked where they stand (`pytorch::dump`), by rank; none: no answer.
/// Ranks that stand in no world answered, and tell nothing. Who was asked and is mute is named with the others.
pub fn of_answers(answers: &[Option<serde_json::Value>]) -> Verdict {
    let read = |(rank, answer): (usize, &Option<serde_json::Value>)| {
        let answer = answer.as_ref()?;
        let rank = rank as u32;
        Some(pytorch::read_value(answer, Some(rank)).unwrap_or_else(|_| RankView { rank, ..RankView::default() }))
    };
    let views: Vec<RankView> = answers.iter().enumerate().filter_map(read).collect();
    let mut verdict = judge(&views);
    let missing = (0..answers.len()).filter(|&rank| answers[rank].is_none()).map(|rank| rank as u32);
    verdict.unanswered = missing.collect();
    verdict
}

fn judge(views: &[RankView]) -> Verdict {
    let table = Table::new(views);
    let answered: BTreeSet<u32> = table.views.keys().copied().collect();
    let unanswered: Vec<u32> = table.everybody().difference(&answered).copied().collect();
    let open = |view: &&&RankView| view.exchanges.iter().any(Exchange::open);
    let waiting: Vec<u32> = table.views.values().filter(open).map(|view| view.rank).collect();

    let differences = differ::differences(&table);
    let cut = if differences.is_empty() { cut(views) } else { Vec::new() };
    if !cut.is_empty() {
        return Verdict { cut, waiting, unanswered, ..Verdict::default() };
    }
    let (mut waits, mut doubts) = waits::waits(&table, &differences, false);
    if waits.is_empty() && doubts.is_empty() {
        // Nobody is inside an exchange: who has not even scheduled what the others have is behind them.
        (waits, doubts) = waits::waits(&table, &differences, true);
    }
    let ends = waits::ends(&waits);
    let mut culprits = Vec::new();
    for difference in &differences {
        if difference.decided {
            culprits.extend(wrong(&table, difference));
        } else {
            let silent = table.groups[difference.group].ranks.iter().copied().filter(|r| !answered.contains(r));
            doubts.push(difference.doubt(&table, silent.collect()));
        }
    }
    let known: BTreeSet<u32> = differences.iter().flat_map(Difference::suspects).collect();
    let known: BTreeSet<u32> = known.into_iter().chain(doubts.iter().flat_map(|d| d.ranks.clone())).collect();
    let roots = ends.roots.iter().filter(|rank| !known.contains(rank));
    culprits.extend(roots.map(|&rank| missed(&table, rank, &waits)));
    if !ends.ring.is_empty() {
        let inside = |wait: &&Wait| wait.waiters.iter().any(|w| w.2 && ends.ring.contains(&w.0));
        match waits.iter().filter(inside).all(|wait| wait.all_there) {
            true => doubts.extend(all_there(&table, &ends.ring, &unanswered)),
            false => doubts.push(ring(&table, &ends.ring, &waits)),
        }
    }
    // Who has scheduled what another one has not joined follows, or waits for its own work; it is told with that one.
    if culprits.iter().any(|c| c.why != Why::Queued) {
        culprits.retain(|c| c.why != Why::Queued);
    }
    // Perhaps it has joined.
    let (unclear, named): (Vec<Culprit>, Vec<Culprit>) = culprits.into_iter().partition(|c| c.why == Why::Unclear);
    culprits = named;
    if culprits.is_empty() {
        doubts.extend(unclear.into_iter().map(|c| doubt_of(c, What::Unknown)));
    }
    // As for who is behind: where it has handed over what the others wait in, another one may be the first cause.
    if culprits.iter().any(|c| c.why != Why::Behind) {
        let (behind, named): (Vec<Culprit>, Vec<Culprit>) = culprits.into_iter().partition(|c| c.why == Why::Behind);
        culprits = named;
        doubts.extend(behind.iter().filter_map(|c| all_there(&table, &[c.rank].into(), &unanswered)));
    }
    culprits.sort_by_key(|culprit| culprit.rank);
    culprits.dedup_by_key(|culprit| culprit.rank);
    if culprits.is_empty() && doubts.is_empty() {
        culprits = silent(&table, &mut doubts);
    }
    if culprits.is_empty() && doubts.is_empty() {
        doubts.extend(all_there(&table, &answered, &unanswered));
    }
    Verdict { cut, culprits, doubts, waiting, unanswered, unreadable: Vec::new() }
}

fn doubt_of(culprit: Culprit, what: What) -> Doubt {
    let Culprit { rank, group, desc, operation, sequence, size, waiting, .. } = culprit;
    let (ranks, sides, lacks) = (vec![rank], Vec::new(), Vec::new());
    Doubt { what, ranks, group, desc, operation, sequence, size, sides, lacks, waiting }
}

/// Those who do not do what most of their group does.
fn wrong(table: &Table, difference: &Difference) -> Vec<Culprit> {
    let group = &table.groups[difference.group];
    let (_, right, exchange) = &difference.sides[0];
    let of = |does: &str, rank: u32| Culprit {
        rank,
        why: difference.why(),
        group: group.name.clone(),
        desc: group.desc.clone(),
        operation: exchange.operation.clone(),
        sequence: difference.sequence,
        size: exchange.size(),
        waiting: right.clone(),
        scheduled: Vec::new(),
        stands: Some(format!("rank {rank} is in {does}")),
    };
    let sides = difference.sides.iter().skip(1);
    sides.flat_map(|(does, ranks, _)| ranks.iter().map(|rank| of(does, *rank)).collect::<Vec<_>>()).collect()
}

/// The first exchange (by the clocks of those who are in it) that `rank` is missed in: one that it has not come to before one
/// that its stream has not, and a collective before a send or receive.
fn missed(table: &Table, rank: u32, waits: &[Wait]) -> Culprit {
    let of = waits.iter().filter(|wait| wait.missing.contains_key(&rank) && wait.waiters.iter().any(|w| w.2));
    let began = |wait: &&Wait| wait.waiters.iter().map(|(_, e, _)| e.began_ns).min();
    let kind = |wait: &&Wait| (wait.missing[&rank], wait.waiters[0].1.point_to_point);
    let first = of.min_by_key(|wait| (kind(wait), began(wait))).expect("somebody waits for it");
    let by = first.waiters.iter().map(|(waiter, e, _)| (*waiter, *e)).collect();
    culprit(table, rank, first.missing[&rank], first.group, by)
}

fn culprit(table: &Table, rank: u32, why: Why, group: Option<usize>, by: Vec<(u32, &Exchange)>) -> Culprit {
    let waiting: BTreeMap<u32, &Exchange> = by.into_iter().collect();
    let (_, first) = waiting.first_key_value().expect("somebody waits for it");
    let place = group.filter(|_| !first.point_to_point).and_then(|group| table.places.get(&(group, first.sequence)));
    let queued = |(other, all): (&u32, &Vec<&Exchange>)| {
        (*other != rank && all.iter().all(|e| table.views[other].queued(e))).then_some(*other)
    };
    let scheduled: Vec<u32> = place.into_iter().flatten().filter_map(queued).collect();
    Culprit {
        rank,
        why,
        group: first.group.clone(),
        desc: group.map_or_else(String::new, |group| table.groups[group].desc.clone()),
        operation: first.operation.clone(),
        sequence: first.sequence,
        // Sizes may differ by rank: as the first of them has it.
        size: first.size(),
        waiting: waiting.keys().copied().filter(|r| *r != rank && !scheduled.contains(r)).collect(),
        scheduled,
        stands: table.views.get(&rank).map(|view| stands(view)),
    }
}

/// What a rank's own record shows.
fn stands(view: &RankView) -> String {
    let rank = view.rank;
    let Some(last) = view.exchanges.iter().find(|e| e.open()).or(view.exchanges.last()) else {
        return format!("its record shows rank {rank} in no exchange");
    };
    let (operation, sequence, group) = (&last.operation, last.sequence, &last.group);
    let state = match last.state {
        State::Completed => "which is over",
        State::Started if view.timed => "started and not over",
        State::Scheduled if view.timed => "scheduled and not started",
        _ => "not over",
    };
    format!("rank {rank} came to {operation} (number {sequence} of group {group}), {state}")
}

fn ring(table: &Table, who: &BTreeSet<u32>, waits: &[Wait]) -> Doubt {
    let mut sides = Vec::new();
    for &rank in who {
        let holds = |wait: &&Wait| {
            wait.waiters.iter().any(|w| w.0 == rank && w.2) && wait.missing.keys().any(|missing| who.contains(missing))
        };
        let Some(wait) = waits.iter().find(holds) else { continue };
        let Some((_, exchange, _)) = wait.waiters.iter().find(|w| w.0 == rank) else { continue };
        let missing: Vec<u32> = wait.missing.keys().copied().filter(|missing| who.contains(missing)).collect();
        let (operation, sequence, group) = (&exchange.operation, exchange.sequence, &exchange.group);
        let does = format!("{operation} (number {sequence} of group {group}) for {}", words::ranks(&missing));
        sides.push((does, vec![rank]));
    }
    let first = waits.iter().flat_map(|wait| &wait.waiters).find(|w| who.contains(&w.0)).map(|w| w.1);
    let first = first.cloned().unwrap_or_default();
    let desc = table.groups.iter().find(|g| g.name == first.group).map_or_else(String::new, |g| g.desc.clone());
    Doubt {
        what: What::Ring,
        ranks: who.iter().copied().collect(),
        size: first.size(),
        group: first.group,
        desc,
        operation: first.operation,
        sequence: first.sequence,
        sides,
        lacks: Vec::new(),
        waiting: Vec::new(),
    }
}

/// All have joined, and the ranks themselves tell whom they wait for: who is waited for and waits for nobody, or, in a ring, most.
fn silent(table: &Table, doubts: &mut Vec<Doubt>) -> Vec<Culprit> {
    let mut votes: BTreeMap<u32, Vec<(u32, &Exchange)>> = BTreeMap::new();
    for view in table.views.values() {
        let (Some(peer), Some(under_way)) = (view.waits_for, view.exchanges.iter().rfind(|e| e.open())) else {
            continue;
        };
        votes.entry(peer).or_default().push((view.rank, under_way));
    }
    let waits = |rank: &u32| table.views.get(rank).is_some_and(|view| view.waits_for.is_some());
    let why = |rank: &u32| if table.views.contains_key(rank) { Why::Silent } else { Why::NoAnswer };
    let of = |(rank, by): (&u32, &Vec<(u32, &Exchange)>)| {
        let group = by.first().and_then(|(waiter, e)| table.group_of(*waiter, e));
        culprit(table, *rank, why(rank), group, by.clone())
    };
    let roots: Vec<Culprit> = votes.iter().filter(|(rank, _)| !waits(rank)).map(of).collect();
    if !roots.is_empty() {
        return roots;
    }
    let most = votes.values().map(Vec::len).max().unwrap_or(0);
    let mut named: Vec<Culprit> = votes.iter().filter(|(_, by)| by.len() == most).map(of).collect();
    if named.len() > 1 {
        let mut doubt = doubt_of(named.swap_remove(0), What::Ring);
        doubt.ranks = votes.iter().filter(|(_, by)| by.len() == most).map(|(rank, _)| *rank).collect();
        doubt.sides = votes
            .iter()
            .flat_map(|(peer, by)| {
                by.iter().map(move |(rank, e)| (format!("{} for rank {peer}", e.operation), vec![*rank]))
            })
            .collect();
        doubt.sides.sort_by_key(|(_, ranks)| ranks[0]);
        doubts.push(doubt);
        return Vec::new();
    }
    named
}

/// Nobody is missing, by the records: what they show of the exchange in which one of `among` has waited longest.
fn all_there(table: &Table, among: &BTreeSet<u32>, unanswered: &[u32]) -> Option<Doubt> {
    let open = |view: &RankView| view.exchanges.iter().find(|e| e.open()).map(|e| (e.began_ns, view.rank));
    let (_, rank) = among.iter().filter_map(|rank| open(table.views.get(rank)?)).min()?;
    let view = table.views[&rank];
    let first = view.exchanges.iter().find(|e| e.open() && !view.queued(e));
    let first = first.or_else(|| view.exchanges.iter().find(|e| e.open()))?;
    let group = table.group_of(rank, first);
    let place = group.filter(|_| !first.point_to_point).and_then(|group| table.places.get(&(group, first.sequence)));
    let mut by: BTreeMap<u32, &Exchange> = [(rank, first)].into();
    for (rank, exchanges) in place.into_iter().flatten() {
        by.extend(exchanges.iter().find(|e| e.open()).map(|e| (*rank, *e)));
    }
    let members = group.map_or(&[][..], |group| &table.groups[group].ranks);
    let over = place.is_some_and(|place| place.values().any(|all| all.iter().all(|e| !e.open())));
    let queued = by.iter().all(|(rank, e)| table.views[rank].queued(e));
    let timed = by.keys().all(|rank| table.views[rank].timed);
    let there = members.iter().all(|rank| by.contains_key(rank));
    let what = match () {
        () if over => What::Behind,
        () if queued => What::NobodyStarted,
        () if !there => What::Unknown,
        () if timed => What::AllInside,
        () => What::AllJoined,
    };
    let mut ranks: BTreeSet<u32> = by.keys().copied().collect();
    if let (What::Unknown, Some(group)) = (what, group) {
        ranks.extend(members.iter().filter(|rank| table.reached(**rank, group) == Reached::Unknown));
    }
    Some(Doubt {
        what,
        ranks: ranks.into_iter().collect(),
        group: first.group.clone(),
        desc: group.map_or_else(String::new, |group| table.groups[group].desc.clone()),
        operation: first.operation.clone(),
        sequence: first.sequence,
        size: first.size(),
        sides: Vec::new(),
        lacks: unanswered.to_vec(),
        waiting: Vec::new(),
    })
}

#[cfg(test)]
mod random;
#[cfg(test)]
mod tests;

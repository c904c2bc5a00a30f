//! Who holds up whom: the verdict over the flight records of all ranks that answered.
//!
//! An exchange that some members of a group have begun and another has not makes them wait for it. A rank that is waited for
//! and does not itself wait for somebody is where the hang comes from; the others follow. No rank's record is believed more
//! than another's: what the members of a group say is put to the vote.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::pytorch;

/// A group as one rank knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupOf {
    /// What it is for.
    pub desc: String,
    /// Its members.
    pub ranks: Vec<u32>,
    /// The last collective that this rank has begun, counted from 1.
    pub begun: u64,
}

/// One exchange of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exchange {
    /// The group's name.
    pub group: String,
    /// What it is.
    pub operation: String,
    /// Counted from 1.
    pub sequence: u64,
    /// A send or receive: their numbers are not compared.
    pub point_to_point: bool,
    /// Shape of what is sent.
    pub size: Vec<u64>,
    /// It is over.
    pub ended: bool,
    /// Nanoseconds, on the rank's clock.
    pub began_ns: u64,
}

/// What one rank's record tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankView {
    /// The rank.
    pub rank: u32,
    /// By name.
    pub groups: BTreeMap<String, GroupOf>,
    /// Oldest first.
    pub exchanges: Vec<Exchange>,
    /// The peer that the exchange under way waits for.
    pub waits_for: Option<u32>,
    /// Milliseconds for which it has looked for what it waits for, and nothing came or went.
    pub still_ms: u64,
    /// By peer: messages sent to it, and messages that came from it.
    pub links: BTreeMap<u32, (u64, u64)>,
}

/// Why a rank is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It has not begun what the others wait in, and waits for nobody.
    NotJoined,
    /// It did not answer, and others wait for it.
    NoAnswer,
    /// It is in another exchange than most of its group.
    Mismatch,
    /// All have joined; it is the one that others still wait for.
    Silent,
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
    /// Ranks that wait, directly or not, for others.
    pub waiting: Vec<u32>,
    /// Ranks of which there is no record.
    pub unanswered: Vec<u32>,
}

impl Verdict {
    /// The ranks to name: both ends of the links that are cut, or the culprits.
    pub fn named(&self) -> Vec<u32> {
        let mut ends: Vec<u32> = self.cut.iter().flat_map(|cut| [cut.from, cut.to]).collect();
        ends.sort_unstable();
        ends.dedup();
        if ends.is_empty() { self.culprits.iter().map(|culprit| culprit.rank).collect() } else { ends }
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

/// Names the ranks from which a hang comes, and the exchanges that the others wait in, by the records that there are. A record
/// may be missing for many reasons: a rank without one is named only if none with one is.
pub fn verdict(views: &[RankView]) -> Verdict {
    let mut verdict = judge(views);
    if verdict.culprits.iter().any(|c| c.why == Why::NotJoined) {
        verdict.culprits.retain(|c| c.why != Why::NoAnswer);
    }
    verdict
}

fn judge(views: &[RankView]) -> Verdict {
    let groups = groups(views);
    let answered: BTreeSet<u32> = views.iter().map(|view| view.rank).collect();
    let everybody: BTreeSet<u32> = groups.values().flat_map(|g| g.ranks.iter().copied()).collect();
    let unanswered: Vec<u32> = everybody.difference(&answered).copied().collect();
    let waiting: Vec<u32> =
        views.iter().filter(|v| v.exchanges.iter().any(|e| !e.ended)).map(|view| view.rank).collect();

    let wrong = mismatches(views, &groups);
    let cut = if wrong.is_empty() { cut(views) } else { Vec::new() };
    if !(wrong.is_empty() && cut.is_empty()) {
        return Verdict { cut, culprits: wrong, waiting, unanswered };
    }
    // Who waits for whom in which exchange: (missing, (when, group, exchange)) -> who waits.
    let begun = |rank: u32, group: &str| {
        views.iter().find(|v| v.rank == rank).map(|v| v.groups.get(group).map_or(0, |g| g.begun))
    };
    let mut missed: BTreeMap<u32, Vec<(u32, &Exchange)>> = BTreeMap::new();
    let mut misses = BTreeSet::new();
    for view in views {
        for exchange in view.exchanges.iter().filter(|e| !e.ended && !e.point_to_point) {
            let Some(group) = groups.get(&exchange.group) else { continue };
            let others = group.ranks.iter().copied().filter(|&r| r != view.rank);
            let absent: Vec<u32> =
                others.filter(|&r| begun(r, &exchange.group).is_none_or(|n| n < exchange.sequence)).collect();
            let (known, mute): (Vec<u32>, Vec<u32>) = absent.into_iter().partition(|r| answered.contains(r));
            // Who did not answer is held to be missing where nobody else is.
            for rank in if known.is_empty() { mute } else { known } {
                missed.entry(rank).or_default().push((view.rank, exchange));
                misses.insert(view.rank);
            }
        }
    }
    let mut culprits: Vec<Culprit> = missed
        .iter()
        .filter(|(rank, _)| !misses.contains(rank))
        .map(|(&rank, by)| {
            let why = if answered.contains(&rank) { Why::NotJoined } else { Why::NoAnswer };
            culprit(rank, why, by, &groups)
        })
        .collect();
    if culprits.is_empty() {
        culprits = silent(views, &groups);
    }
    Verdict { cut, culprits, waiting, unanswered }
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

/// Every group as most of its members describe it.
fn groups(views: &[RankView]) -> BTreeMap<String, GroupOf> {
    let mut said: BTreeMap<&str, Vec<&GroupOf>> = BTreeMap::new();
    for (name, group) in views.iter().flat_map(|view| &view.groups) {
        said.entry(name).or_default().push(group);
    }
    let most = |of: Vec<&GroupOf>| {
        let votes = |ranks: &[u32]| of.iter().filter(|g| g.ranks == ranks).count();
        let best = of.iter().max_by_key(|g| (votes(&g.ranks), g.ranks.len()));
        best.map_or_else(GroupOf::default, |g| (*g).clone())
    };
    said.into_iter().map(|(name, of)| (name.to_owned(), most(of))).collect()
}

/// The first exchange (by the clocks of those who are in it) that `rank` is missed in.
fn culprit(rank: u32, why: Why, by: &[(u32, &Exchange)], groups: &BTreeMap<String, GroupOf>) -> Culprit {
    let (_, first) = by.iter().min_by_key(|(_, e)| e.began_ns).expect("somebody waits for it");
    let same = |e: &Exchange| e.group == first.group && e.sequence == first.sequence;
    let waiting: BTreeMap<u32, &Exchange> = by.iter().copied().filter(|(_, e)| same(e)).collect();
    // Sizes may differ by rank: as the first of them has it.
    let first = waiting.values().next().copied().unwrap_or(first);
    Culprit {
        rank,
        why,
        group: first.group.clone(),
        desc: groups.get(&first.group).map_or_else(String::new, |g| g.desc.clone()),
        operation: first.operation.clone(),
        sequence: first.sequence,
        size: first.size.clone(),
        waiting: waiting.into_keys().collect(),
    }
}

/// Ranks that are in another operation than most of their group, at one number.
fn mismatches(views: &[RankView], groups: &BTreeMap<String, GroupOf>) -> Vec<Culprit> {
    let mut at: BTreeMap<(&str, u64), Vec<(u32, &Exchange)>> = BTreeMap::new();
    for view in views {
        for exchange in view.exchanges.iter().filter(|e| !e.point_to_point) {
            at.entry((&exchange.group, exchange.sequence)).or_default().push((view.rank, exchange));
        }
    }
    for who in at.values() {
        let votes = |operation: &str| who.iter().filter(|(_, e)| e.operation == operation).count();
        let most = who.iter().map(|(_, e)| e.operation.as_str()).max_by_key(|operation| votes(operation));
        let Some(most) = most.filter(|most| votes(most) < who.len()) else { continue };
        // Of two halves neither is right: nobody is named for a draw.
        if 2 * votes(most) <= who.len() {
            continue;
        }
        let right: Vec<_> = who.iter().copied().filter(|(_, e)| e.operation == most).collect();
        let wrong = who.iter().filter(|(_, e)| e.operation != most);
        return wrong.map(|(rank, _)| culprit(*rank, Why::Mismatch, &right, groups)).collect();
    }
    Vec::new()
}

/// All have joined, or send and receive: who is waited for and waits for nobody who waits on, or, in a ring, most.
fn silent(views: &[RankView], groups: &BTreeMap<String, GroupOf>) -> Vec<Culprit> {
    let mut votes: BTreeMap<u32, Vec<(u32, &Exchange)>> = BTreeMap::new();
    for view in views {
        let (Some(peer), Some(under_way)) = (view.waits_for, view.exchanges.iter().rfind(|e| !e.ended)) else {
            continue;
        };
        votes.entry(peer).or_default().push((view.rank, under_way));
    }
    let waits = |rank: u32| views.iter().any(|v| v.rank == rank && v.waits_for.is_some());
    let why = |rank: u32| if views.iter().any(|v| v.rank == rank) { Why::Silent } else { Why::NoAnswer };
    let roots: Vec<_> = votes.iter().filter(|(rank, _)| !waits(**rank)).collect();
    if !roots.is_empty() {
        return roots.into_iter().map(|(&rank, by)| culprit(rank, why(rank), by, groups)).collect();
    }
    let most = votes.values().map(Vec::len).max().unwrap_or(0);
    votes.iter().filter(|(_, by)| by.len() == most).map(|(&rank, by)| culprit(rank, why(rank), by, groups)).collect()
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, why, group, desc, operation, sequence, size, waiting } = self;
        let why = match why {
            Why::NotJoined => "did not join",
            Why::NoAnswer => "did not answer and is missing in",
            Why::Mismatch => "is in another exchange than",
            Why::Silent => "sends nothing in",
        };
        let size: Vec<String> = size.iter().map(u64::to_string).collect();
        write!(f, "rank {rank} {why} {operation} {} ", size.join("x"))?;
        write!(f, "(number {sequence} of group {group} {desc}); in it wait {}", ranks(waiting))
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, sent, received } = self;
        let lost = sent - received;
        write!(f, "rank {from} does not reach rank {to}: the last {lost} of {sent} messages did not come")
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.culprits.is_empty() && self.cut.is_empty() {
            return f.write_str(match self.waiting.is_empty() {
                true => "no rank waits in an exchange",
                false => "ranks wait in exchanges, but the records do not tell for whom",
            });
        }
        let cut = self.cut.iter().map(ToString::to_string);
        let lines: Vec<String> = cut.chain(self.culprits.iter().map(ToString::to_string)).collect();
        f.write_str(&lines.join("\n"))?;
        let named: BTreeSet<u32> =
            self.culprits.iter().flat_map(|c| c.waiting.iter().copied().chain([c.rank])).chain(self.named()).collect();
        let follow: Vec<u32> = self.waiting.iter().copied().filter(|r| !named.contains(r)).collect();
        if !follow.is_empty() {
            write!(f, "\nthe other waiting ranks follow from that: {}", ranks(&follow))?;
        }
        let mute: Vec<u32> = self.unanswered.iter().copied().filter(|r| !named.contains(r)).collect();
        if !mute.is_empty() {
            write!(f, "\nno record of {}", ranks(&mute))?;
        }
        Ok(())
    }
}

/// `ranks 0-3 7`.
fn ranks(list: &[u32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut at = 0;
    while at < list.len() {
        let run = (at..list.len()).take_while(|&i| list[i] - list[at] == (i - at) as u32).count();
        parts.push(match run {
            1 => list[at].to_string(),
            _ => format!("{}-{}", list[at], list[at + run - 1]),
        });
        at += run;
    }
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, parts.join(" "))
}

/// Groups of equal stacks, the rarest first (then the one that lies deepest): `stacks` are (who, frames). Most of a healthy
/// group stands at one place; who stands alone is looked at first.
pub fn rarest<'a>(stacks: &'a [(u64, Vec<String>)]) -> Vec<(Vec<u64>, &'a [String])> {
    let mut same: BTreeMap<&'a [String], Vec<u64>> = BTreeMap::new();
    for (who, frames) in stacks {
        same.entry(frames).or_default().push(*who);
    }
    let mut groups: Vec<_> = same.into_iter().map(|(frames, who)| (who, frames)).collect();
    groups.sort_by_key(|(who, frames)| (who.len(), std::cmp::Reverse(frames.len())));
    groups
}

#[cfg(test)]
mod tests;

//! Records that cannot be of one attempt, by what they say of each other.
//!
//! Who has completed a collective has had all members in it. So what one member has completed every other one has begun, and
//! processes overlap in time. The largest set of records that agree is kept; the others are of another attempt.

use std::collections::{BTreeMap, BTreeSet};

use crate::hang::{Exchange, RankView};

/// Clocks of hosts may differ by so much, and processes of one attempt begin so far apart, in nanoseconds.
const SLACK_NS: u64 = 60_000_000_000;

/// The ranks that cannot be of the attempt that most of `views` are of.
pub(super) fn others(views: &[RankView]) -> BTreeSet<u32> {
    let mut others = BTreeSet::new();
    loop {
        let kept: Vec<&RankView> = views.iter().filter(|view| !others.contains(&view.rank)).collect();
        let more = behind(&kept).or_else(|| before(&kept));
        match more {
            Some(more) => others.extend(more),
            None => return others,
        }
    }
}

fn met<'a>(view: &'a RankView, group: &'a str) -> impl Iterator<Item = &'a Exchange> {
    view.exchanges.iter().filter(move |e| e.group == group && !e.open() && e.meets())
}

/// A rank, and the first and last of what it did.
type Span = (u32, u64, u64);

/// Of one group, those who have not begun what others completed with them, or the reverse if these are more.
fn behind(views: &[&RankView]) -> Option<Vec<u32>> {
    let mut groups: BTreeMap<(&str, &[u32]), Vec<Span>> = BTreeMap::new();
    for view in views {
        for (name, group) in &view.groups {
            let Some(begun) = group.begun.filter(|_| group.ranks.contains(&view.rank)) else { continue };
            let completed = met(view, name).map(|e| e.sequence).max().unwrap_or(0);
            let members = groups.entry((name.as_str(), group.ranks.as_slice())).or_default();
            members.push((view.rank, completed, begun.max(completed)));
        }
    }
    groups.into_values().find_map(|members| outside(&members))
}

/// Those whose processes began long after others had done their last, although these have met them.
fn before(views: &[&RankView]) -> Option<Vec<u32>> {
    let span = |view: &&&RankView| {
        let times = view.exchanges.iter().map(|e| e.began_ns);
        let (first, last) = (times.clone().min()?, times.max()?);
        let first = if view.whole { first.saturating_sub(SLACK_NS / 2) } else { 0 };
        Some((view.rank, first, last.saturating_add(SLACK_NS / 2)))
    };
    let spans: Vec<_> = views.iter().filter_map(|view| span(&view)).collect();
    let out = outside(&spans)?;
    let has_met = |view: &RankView| {
        view.groups.iter().any(|(name, group)| group.ranks.len() > 1 && met(view, name).nth(1).is_some())
    };
    let (out_met, in_met): (Vec<&&RankView>, Vec<&&RankView>) =
        views.iter().filter(|view| has_met(view)).partition(|view| out.contains(&view.rank));
    (!out_met.is_empty() && !in_met.is_empty()).then_some(out)
}

/// Of intervals (rank, from, to) those that miss the point in which most overlap; none: all overlap.
fn outside(spans: &[(u32, u64, u64)]) -> Option<Vec<u32>> {
    let holds = |point: u64| spans.iter().filter(move |(_, from, to)| (*from..=*to).contains(&point)).count();
    let least = spans.iter().map(|span| span.2).min()?;
    if spans.iter().all(|span| span.1 <= least) {
        return None;
    }
    // The later ones where two sets are alike.
    let point = spans.iter().map(|span| span.1).max_by_key(|&point| (holds(point), point))?;
    Some(spans.iter().filter(|(_, from, to)| !(*from..=*to).contains(&point)).map(|span| span.0).collect())
}

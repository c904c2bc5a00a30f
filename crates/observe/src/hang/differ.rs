//! Members of a group that are at the same place of its order and do not do the same there.

use std::collections::BTreeMap;

use super::table::{Place, Table};
use super::view::{Exchange, RankView};
use super::{Doubt, What, Why};

/// Members that do not agree about an exchange.
#[derive(Debug)]
pub(super) struct Difference<'a> {
    pub group: usize,
    pub sequence: u64,
    pub what: What,
    /// (what they do, who does it, one of theirs), those with most members first.
    pub sides: Vec<(String, Vec<u32>, &'a Exchange)>,
    /// More than half of all members are on the first side: the others are wrong.
    pub decided: bool,
}

impl Difference<'_> {
    /// Who is at odds with whom; all of them where no side has a majority.
    pub fn suspects(&self) -> Vec<u32> {
        let sides = self.sides.iter().skip(usize::from(self.decided));
        let mut ranks: Vec<u32> = sides.flat_map(|(_, ranks, _)| ranks.iter().copied()).collect();
        ranks.sort_unstable();
        ranks
    }

    /// Why those who are wrong are named.
    pub fn why(&self) -> Why {
        match self.what {
            What::Sizes => Why::Size,
            What::Types => Why::Type,
            _ => Why::Mismatch,
        }
    }

    pub fn doubt(&self, table: &Table, lacks: Vec<u32>) -> Doubt {
        let group = &table.groups[self.group];
        let first = self.sides[0].2;
        Doubt {
            what: self.what,
            ranks: self.suspects(),
            group: group.name.clone(),
            desc: group.desc.clone(),
            operation: first.operation.clone(),
            sequence: self.sequence,
            size: first.size(),
            sides: self.sides.iter().map(|(does, ranks, _)| (does.clone(), ranks.clone())).collect(),
            lacks,
            waiting: Vec::new(),
        }
    }
}

/// The first difference of each group, among exchanges that are not over everywhere: what all have completed holds nobody up.
pub(super) fn differences<'a>(table: &Table<'a>) -> Vec<Difference<'a>> {
    let mut found: Vec<Difference> = Vec::new();
    for (&(group, sequence), place) in &table.places {
        let done = found.last().is_some_and(|last| last.group == group);
        if done || !place.values().flatten().any(|e| e.open()) {
            continue;
        }
        let members = table.groups[group].ranks.len();
        let levels = [(What::Operations, operation as Told), (What::Sizes, shapes), (What::Types, types)];
        let told = levels.into_iter().find_map(|(what, tell)| split(table, place, tell).map(|sides| (what, sides)));
        if let Some((what, sides)) = told {
            let decided = 2 * sides[0].1.len() > members;
            found.push(Difference { group, sequence, what, sides, decided });
        } else if place.len() == members && totals(table, place) {
            let all: Vec<u32> = place.keys().copied().collect();
            let Some(first) = place.values().flatten().next() else { continue };
            let sides = vec![("what goes in is not what comes out, over all members".into(), all, *first)];
            found.push(Difference { group, sequence, what: What::Totals, sides, decided: false });
        }
    }
    found
}

/// What a rank does, as far as members must agree on it; none: they need not.
type Told = fn(&RankView, &[&Exchange]) -> Option<String>;

/// The sides of a place; none: all tell the same, or nothing.
fn split<'a>(table: &Table, place: &Place<'a>, tell: Told) -> Option<Vec<(String, Vec<u32>, &'a Exchange)>> {
    let mut sides: BTreeMap<String, (Vec<u32>, &Exchange)> = BTreeMap::new();
    for (rank, exchanges) in place {
        let told = tell(table.views[rank], exchanges)?;
        sides.entry(told).or_insert((Vec::new(), exchanges[0])).0.push(*rank);
    }
    let mut sides: Vec<_> = sides.into_iter().map(|(does, (ranks, one))| (does, ranks, one)).collect();
    sides.sort_by_key(|(_, ranks, _)| (std::cmp::Reverse(ranks.len()), ranks[0]));
    (sides.len() > 1).then_some(sides)
}

fn operation(_: &RankView, exchanges: &[&Exchange]) -> Option<String> {
    Some(exchanges.iter().map(|e| e.operation.as_str()).collect::<Vec<_>>().join(" + "))
}

/// The operation without its library: `nccl:all_to_all` is `all_to_all`.
fn kind(exchange: &Exchange) -> &str {
    exchange.operation.rsplit(':').next().unwrap_or_default()
}

fn all_to_all(exchange: &Exchange) -> bool {
    let kind = kind(exchange).to_ascii_lowercase();
    kind.starts_with("all_to_all") || kind.starts_with("alltoall")
}

/// As PyTorch's analyzer compares them: in a scatter only what comes out, in a gather only what goes in, in all-to-all neither.
fn shapes(view: &RankView, exchanges: &[&Exchange]) -> Option<String> {
    let told = exchanges.iter().map(|e| {
        (view.strict && !all_to_all(e) && !(e.inputs.is_empty() && e.outputs.is_empty())).then(|| {
            let [gives, takes] = [&e.inputs, &e.outputs].map(|shapes| text(shapes));
            let kind = kind(e);
            match kind {
                "scatter" => format!("{kind} to {takes}"),
                "gather" => format!("{kind} of {gives}"),
                _ if gives == takes => format!("{kind} of {gives}"),
                _ => format!("{kind} of {gives} to {takes}"),
            }
        })
    });
    told.collect::<Option<Vec<_>>>().map(|told| told.join(" + "))
}

fn text(shapes: &[Vec<u64>]) -> String {
    let one = |shape: &Vec<u64>| shape.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
    shapes.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn types(view: &RankView, exchanges: &[&Exchange]) -> Option<String> {
    let told = exchanges.iter().map(|e| {
        let rooted = matches!(kind(e), "scatter" | "gather");
        (view.strict && !rooted && !e.types.is_empty()).then(|| {
            let mut types = e.types.clone();
            types.dedup();
            format!("{} of type {}", kind(e), types.join(" to "))
        })
    });
    told.collect::<Option<Vec<_>>>().map(|told| told.join(" + "))
}

fn elements(shapes: &[Vec<u64>]) -> u64 {
    shapes.iter().map(|shape| shape.iter().product::<u64>()).sum()
}

/// Whether all members together give more, or less, than they take.
fn totals(table: &Table, place: &Place) -> bool {
    let mut all = place.iter().map(|(rank, exchanges)| (table.views[rank], exchanges.as_slice()));
    let fits = all.all(|(view, exchanges)| {
        view.strict && matches!(exchanges, [e] if all_to_all(e) && !e.inputs.is_empty() && !e.outputs.is_empty())
    });
    let sum = |of: fn(&Exchange) -> &[Vec<u64>]| place.values().flatten().map(|e| elements(of(e))).sum::<u64>();
    fits && sum(|e| &e.inputs) != sum(|e| &e.outputs)
}

/// The elements that a send gives or a receive takes.
pub(super) fn payload(exchange: &Exchange) -> Option<u64> {
    let shapes = if exchange.sends || exchange.outputs.is_empty() { &exchange.inputs } else { &exchange.outputs };
    (!shapes.is_empty()).then(|| elements(shapes))
}

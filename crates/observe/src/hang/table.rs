//! The records of all ranks, side by side: which groups there are, and how far each member has come in them.

use std::collections::{BTreeMap, BTreeSet};

use super::view::{Exchange, RankView};

/// A group as most of its members describe it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub name: String,
    pub desc: String,
    pub ranks: Vec<u32>,
}

/// How far a member has come in the collectives of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reached {
    /// There is no record of it.
    Mute,
    /// Its record does not tell.
    Unknown,
    /// It has begun so many.
    Begun(u64),
}

/// Exchanges of members at one place of a group's order: several per rank where they are coalesced.
pub(super) type Place<'a> = BTreeMap<u32, Vec<&'a Exchange>>;

pub(super) struct Table<'a> {
    pub views: BTreeMap<u32, &'a RankView>,
    pub groups: Vec<Known>,
    /// (group, number): who is in it.
    pub places: BTreeMap<(usize, u64), Place<'a>>,
    of: BTreeMap<(u32, &'a str), usize>,
}

impl<'a> Table<'a> {
    pub fn new(views: &'a [RankView]) -> Self {
        let by_rank: BTreeMap<u32, &RankView> = views.iter().map(|view| (view.rank, view)).collect();
        let mut table = Self { views: by_rank, groups: Vec::new(), places: BTreeMap::new(), of: BTreeMap::new() };
        table.find_groups();
        let all = table.views.values().flat_map(|view| view.exchanges.iter().map(|e| (view.rank, e)));
        let mut places: BTreeMap<(usize, u64), Place<'a>> = BTreeMap::new();
        for (rank, exchange) in all.filter(|(_, e)| !e.point_to_point) {
            if let Some(group) = table.of.get(&(rank, exchange.group.as_str())) {
                let place = places.entry((*group, exchange.sequence)).or_default();
                place.entry(rank).or_default().push(exchange);
            }
        }
        table.places = places;
        table
    }

    /// Groups of one name are one group where they share members (then most votes decide who they are), else several: frameworks
    /// that split a group name all parts alike.
    fn find_groups(&mut self) {
        let mut said: BTreeMap<&'a str, BTreeMap<&'a [u32], (usize, &'a str)>> = BTreeMap::new();
        for view in self.views.values() {
            for (name, group) in &view.groups {
                let (votes, _) = said.entry(name).or_default().entry(&group.ranks).or_insert((0, &group.desc));
                *votes += 1;
            }
        }
        for (name, lists) in said {
            let mut lists: Vec<_> = lists.into_iter().collect();
            lists.sort_by_key(|(ranks, (votes, _))| std::cmp::Reverse((*votes, ranks.len())));
            let first = self.groups.len();
            for (ranks, (_, desc)) in lists {
                let taken = |known: &Known| known.ranks.iter().any(|r| ranks.contains(r));
                if !self.groups[first..].iter().any(taken) {
                    self.groups.push(Known { name: name.into(), desc: desc.into(), ranks: ranks.to_vec() });
                }
            }
            let members: Vec<(u32, usize)> =
                (first..self.groups.len()).flat_map(|g| self.groups[g].ranks.iter().map(move |&r| (r, g))).collect();
            for (rank, group) in members {
                self.of.insert((rank, name), group);
            }
            // Who uses a group that nobody counts it in is in the first one of that name.
            for view in self.views.values().filter(|view| view.groups.contains_key(name)) {
                self.of.entry((view.rank, name)).or_insert(first);
            }
        }
    }

    pub fn group_of(&self, rank: u32, exchange: &Exchange) -> Option<usize> {
        self.of.get(&(rank, exchange.group.as_str())).copied()
    }

    /// All ranks that some group has.
    pub fn everybody(&self) -> BTreeSet<u32> {
        self.groups.iter().flat_map(|g| g.ranks.iter().copied()).chain(self.views.keys().copied()).collect()
    }

    pub fn reached(&self, rank: u32, group: usize) -> Reached {
        let Some(view) = self.views.get(&rank) else { return Reached::Mute };
        match view.groups.get(&self.groups[group].name) {
            Some(of) => of.begun.map_or(Reached::Unknown, Reached::Begun),
            // Groups are told when they are first used.
            None => Reached::Begun(0),
        }
    }
}

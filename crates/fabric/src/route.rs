//! Which way a part travels, with and without hosts. Pure.
//!
//! Without hosts every member sends straight to the owner. With hosts, one member per host,
//! the *hub*, stands between the others there and the owner on another host:
//!
//! ```text
//!   reduce:  holder -> hub (merges complete subtrees) -> owner
//!   gather:  owner  -> hub                            -> the others
//! ```
//!
//! **When two levels save bytes across hosts.** A part of `n` numbers costs, for each host
//! other than its owner's:
//!
//! - gather: one crossing of `n` instead of one per member there. Saves as soon as the host
//!   has two members.
//! - reduce: `n` per *merged* subtree of the host instead of `n` per subtree of each member.
//!   Saves when members of one host hold neighbouring leaves that are siblings in the tree
//!   (hosts aligned to powers of two: one subtree per host); never costs more.
//!
//! The bytes saved travel inside the host instead, plus one more round of latency; with one
//! member per host, or all on one host, the messages are those of one level.

use crate::options::Group;
use crate::plan::ReducePlan;
use spec::tree;
use std::ops::Range;

/// Direct messages.
pub(crate) const DIRECT: u8 = 0;
/// Messages between a hub and the members of its host.
pub(crate) const INSIDE: u8 = 1;
/// The same for parts that are shared out: in an all_reduce they travel between the blocks
/// of sums.
pub(crate) const SHARE_DIRECT: u8 = 2;
/// See [`SHARE_DIRECT`].
pub(crate) const SHARE_INSIDE: u8 = 3;

/// The places of a group's members.
pub(crate) struct Places<'g> {
    hosts: Option<&'g [u32]>,
    members: usize,
}

impl<'g> Places<'g> {
    pub fn new(group: &'g Group) -> Self {
        Self { hosts: group.hosts.as_deref(), members: group.len() }
    }

    /// True if members may stand for others.
    pub fn two_levels(&self) -> bool {
        self.hosts.is_some()
    }

    /// True if `a` and `b` share a host. Without hosts everyone is alone.
    pub fn together(&self, a: usize, b: usize) -> bool {
        match self.hosts {
            Some(hosts) => hosts[a] == hosts[b],
            None => a == b,
        }
    }

    /// The members on `member`'s host, ascending, with itself.
    pub fn mates(&self, member: usize) -> Vec<usize> {
        match self.hosts {
            Some(_) => (0..self.members).filter(|&m| self.together(m, member)).collect(),
            None => vec![member],
        }
    }

    /// The hub on `member`'s host for the part of `owner`, who is elsewhere. Owners are
    /// spread over the members of the host.
    pub fn hub(&self, owner: usize, member: usize) -> usize {
        let mates = self.mates(member);
        mates[owner % mates.len()]
    }

    /// The other members in the order in which `me` serves them. Staggered when no two
    /// parts share a stream, else ascending on both sides of each stream.
    pub fn others(&self, me: usize, backwards: bool) -> Vec<usize> {
        let n = self.members;
        if self.two_levels() {
            (0..n).filter(|&m| m != me).collect()
        } else {
            (1..n).map(|step| if backwards { (me + n - step) % n } else { (me + step) % n }).collect()
        }
    }
}

/// The subtrees that `members` (ascending) hold after merging all they can.
pub(crate) fn merged(plan: &ReducePlan, members: &[usize]) -> Vec<Range<usize>> {
    let mut cells: Vec<Range<usize>> = members.iter().flat_map(|&m| plan.cells[m].iter().cloned()).collect();
    cells.sort_unstable_by_key(|range| range.start);
    tree::subtrees_of(plan.leaves, &cells)
}

/// The most subtrees in one message, the same for all members.
pub(crate) fn pieces_max(plan: &ReducePlan, places: &Places) -> usize {
    let held = |m: usize| plan.subtrees(m).len().max(merged(plan, &places.mates(m)).len());
    (0..plan.cells.len()).map(held).max().unwrap_or(0)
}

/// What `owner` receives for its part: (member, subtrees) in no special order, without
/// those who send nothing. It brings its own subtrees itself.
pub(crate) fn sources(plan: &ReducePlan, places: &Places, owner: usize) -> Vec<(usize, Vec<Range<usize>>)> {
    let mut out = Vec::new();
    for member in (0..plan.cells.len()).filter(|&m| m != owner) {
        let nodes = if places.together(member, owner) {
            plan.subtrees(member)
        } else if places.hub(owner, member) == member {
            merged(plan, &places.mates(member))
        } else {
            continue;
        };
        if !nodes.is_empty() {
            out.push((member, nodes));
        }
    }
    out
}

/// The members whose subtrees of `owner`'s part `hub` merges, if it has to wait for any but
/// itself: ascending, with itself, without those who hold nothing.
pub(crate) fn to_merge(plan: &ReducePlan, places: &Places, owner: usize, hub: usize) -> Option<Vec<usize>> {
    if owner == hub || places.together(owner, hub) || places.hub(owner, hub) != hub {
        return None;
    }
    let holders: Vec<usize> =
        places.mates(hub).into_iter().filter(|&m| plan.cells[m].iter().any(|cells| !cells.is_empty())).collect();
    holders.iter().any(|&m| m != hub).then_some(holders)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of subtrees, some of them of one
mod tests {
    use super::*;

    fn group(hosts: Option<Vec<u32>>, n: u32) -> Group {
        Group { id: 1, ranks: (0..n).collect(), name: "g".into(), hosts }
    }

    #[test]
    fn one_level_everyone_sends_its_own() {
        let plan = ReducePlan::even(6, 3, 9);
        let group = group(None, 3);
        let places = Places::new(&group);
        assert_eq!(sources(&plan, &places, 0), vec![(1, vec![2..4]), (2, vec![4..6])]);
        assert_eq!(to_merge(&plan, &places, 0, 1), None);
    }

    #[test]
    fn two_levels_one_subtree_crosses_per_aligned_host() {
        let plan = ReducePlan::even(8, 4, 8);
        let group = group(Some(vec![0, 0, 1, 1]), 4);
        let places = Places::new(&group);
        // Part of member 0: its mate directly, one merged subtree from the other host.
        assert_eq!(sources(&plan, &places, 0), vec![(1, vec![2..4]), (2, vec![4..8])]);
        assert_eq!(sources(&plan, &places, 1), vec![(0, vec![0..2]), (3, vec![4..8])]);
        assert_eq!(to_merge(&plan, &places, 0, 2), Some(vec![2, 3]));
        assert_eq!(to_merge(&plan, &places, 0, 3), None);
        assert_eq!(to_merge(&plan, &places, 2, 3), None);
    }

    #[test]
    fn every_leaf_arrives_once_whatever_the_hosts() {
        for n in 1..6u32 {
            for pattern in 0..(1u32 << n) {
                let hosts = (0..n).map(|m| pattern >> m & 1).collect();
                let group = group(Some(hosts), n);
                let places = Places::new(&group);
                let plan = ReducePlan::even(7, n as usize, 4);
                for owner in 0..n as usize {
                    let mut leaves: Vec<usize> = plan.cells[owner].iter().cloned().flatten().collect();
                    for (_, nodes) in sources(&plan, &places, owner) {
                        leaves.extend(nodes.into_iter().flatten());
                    }
                    leaves.sort_unstable();
                    assert_eq!(leaves, (0..7).collect::<Vec<_>>(), "hosts {pattern:b}, owner {owner}");
                }
            }
        }
    }
}

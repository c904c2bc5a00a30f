//! Which ranks hold the same parameters, and how these share them.
//!
//! At one pipeline and tensor position all data and context positions hold the same parameters, but for routed experts:
//! the data positions that host one group of data cells together have different experts each. An expert's holders
//! ([`Class::Experts`]) are the positions at the same place in their groups: the expert data group.

use std::ops::Range;

use super::{Coords, Layout};
use crate::grid::Grid;

/// Parameters by who holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// All data and context positions.
    Common,
    /// Those at the same place in their groups.
    Experts,
}

/// Both classes.
pub const CLASSES: [Class; 2] = [Class::Common, Class::Experts];

/// The ranks of one pipeline and tensor position that hold the same parameters of a class: numbered with context fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holders {
    /// How many they are.
    pub count: usize,
    /// Neighbours among them that share one set of shards.
    pub shard: usize,
    /// Neighbouring data positions that hold different parameters, 1: none do.
    pub apart: usize,
    /// Context positions.
    cp: usize,
}

impl Holders {
    /// Groups of holders that each have one whole set of shards.
    pub fn replicas(&self) -> usize {
        self.count / self.shard
    }

    /// The number of `at` among the holders of what it holds.
    pub fn number(&self, at: Coords) -> usize {
        at.dp / self.apart * self.cp + at.cp
    }

    /// Its place in its shard group.
    pub fn place(&self, at: Coords) -> usize {
        self.number(at) % self.shard
    }

    /// Holder number `i` of what `at` holds.
    pub fn nth(&self, at: Coords, i: usize) -> Coords {
        Coords { dp: i / self.cp * self.apart + at.dp % self.apart, cp: i % self.cp, ..at }
    }
}

impl Layout {
    /// The holders of a class.
    pub fn holders_of(&self, class: Class) -> Holders {
        let all = self.holders();
        match class {
            Class::Common => Holders { count: all, shard: self.shard, apart: 1, cp: self.cp },
            Class::Experts => {
                let (count, apart) = (all / self.group, self.group);
                // As many ranks of a shard group have an expert as a group goes into it, so that with all classes a rank
                // keeps the same share.
                let shard = if self.shard.is_multiple_of(apart) { self.shard / apart } else { gcd(self.shard, count) };
                Holders { count, shard, apart, cp: self.cp }
            }
        }
    }

    /// True if optimizer state of this class has no replica and is therefore kept by the mirror of its rank, too.
    pub fn mirrors(&self, class: Class) -> bool {
        self.mirror && self.world() > 1 && self.holders_of(class).replicas() == 1
    }

    /// True if anything is mirrored.
    pub fn mirrored(&self) -> bool {
        CLASSES.into_iter().any(|class| self.mirrors(class))
    }

    /// The experts, of `experts`, that the rank at `at` holds: blocks in ascending order.
    pub fn experts(&self, at: Coords, experts: usize) -> Range<usize> {
        let (each, place) = (experts / self.group, at.dp % self.group);
        place * each..(place + 1) * each
    }

    /// The leaves of the tree over (group of data cells, context cell), in which gradients of routed experts add up, that
    /// each holder of an expert has, ascending.
    pub fn expert_leaves(&self, grid: &Grid) -> Vec<Vec<Range<usize>>> {
        let holders = self.holders_of(Class::Experts);
        let of = |number: usize| {
            let contexts = self.context_cells(number % self.cp, grid.cp);
            let cells = &self.cells[number / self.cp * holders.apart];
            let groups = cells.start / grid.ep..(cells.end - 1) / grid.ep + 1;
            groups.map(move |g| g * grid.cp + contexts.start..g * grid.cp + contexts.end).collect()
        };
        (0..holders.count).map(of).collect()
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Run, tensors};

    fn layout(sets: &[&str]) -> Run {
        let text = "[model]\npreset = \"nano\"\nexperts = 8\n[train]\nsteps = 1\nbatch = 16\nseq = 64\n[grid]\ndp = 8\ncp = 2\nep = 4\n\
            [data]\nsource = \"synthetic\"\n";
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        Run::parse(text, "t", &sets, 1).unwrap()
    }

    #[test]
    fn holders_of_experts_are_at_the_same_place_of_their_groups() {
        let run = layout(&["layout.dp=8", "layout.cp=2", "layout.zero=1"]);
        let layout = &run.layout;
        let holders = layout.holders_of(Class::Experts);
        assert_eq!((layout.group, holders.count, holders.shard, holders.replicas()), (4, 4, 4, 1));
        for rank in 0..layout.world() {
            let at = layout.coords(rank);
            let peers: Vec<_> = (0..holders.count).map(|i| holders.nth(at, i)).collect();
            assert_eq!(peers[holders.number(at)], at);
            assert!(peers.iter().all(|peer| layout.experts(*peer, 8) == layout.experts(at, 8)));
        }
        // Every leaf of the experts has one holder.
        let mut all: Vec<_> = layout.expert_leaves(&run.grid).into_iter().flatten().collect();
        all.sort_unstable_by_key(|range| range.start);
        assert_eq!(all, [0..1, 1..2, 2..3, 3..4]);
        assert!(tensors::tensors(&run.model).iter().any(|t| t.role.is_expert()));
    }

    #[test]
    fn shards_of_experts_are_as_small_as_the_others() {
        for (sets, shard, replicas) in [
            (&["layout.dp=8", "layout.zero=1"][..], 2, 1),
            (&["layout.dp=8", "layout.zero=1", "layout.shard=4"], 1, 2),
            (&["layout.dp=8", "layout.cp=2", "layout.zero=1", "layout.shard=2"], 2, 2),
            (&["layout.dp=8"], 1, 2),
            (&["layout.dp=4"], 1, 2),
            (&["layout.dp=4", "grid.dp=4"], 1, 1),
            (&["layout.dp=2", "layout.zero=1"], 2, 1),
        ] {
            let holders = layout(sets).layout.holders_of(Class::Experts);
            assert_eq!((holders.shard, holders.replicas()), (shard, replicas), "{sets:?}");
        }
    }
}

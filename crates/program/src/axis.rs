//! The groups of ranks along each axis.

use spec::{Class, Coords, Holders, Layout};

use crate::instr::Axis;

impl Axis {
    /// The holders that a group of it is taken from.
    fn among(self, layout: &Layout) -> Holders {
        let experts = matches!(self, Axis::ExpertDp | Axis::ExpertShard | Axis::ExpertReplica);
        layout.holders_of(if experts { Class::Experts } else { Class::Common })
    }

    /// Number of members of a group.
    pub fn size(self, layout: &Layout) -> usize {
        match self {
            Axis::Tp => layout.tp,
            Axis::Cp => layout.cp,
            Axis::Dp | Axis::ExpertDp => self.among(layout).count,
            Axis::Shard | Axis::ExpertShard => self.among(layout).shard,
            Axis::Replica | Axis::ExpertReplica => self.among(layout).replicas(),
            Axis::Pp => layout.pp,
            Axis::World => layout.world(),
            Axis::Ep => layout.group,
        }
    }

    /// Member `i` of the group of `at`; members ascend, as ranks do.
    pub fn member(self, layout: &Layout, at: Coords, i: usize) -> usize {
        let among = self.among(layout);
        let (mine, shard) = (among.number(at), among.shard);
        layout.rank(match self {
            Axis::Tp => Coords { tp: i, ..at },
            Axis::Cp => Coords { cp: i, ..at },
            Axis::Dp | Axis::ExpertDp => among.nth(at, i),
            Axis::Shard | Axis::ExpertShard => among.nth(at, mine / shard * shard + i),
            Axis::Replica | Axis::ExpertReplica => among.nth(at, mine % shard + i * shard),
            Axis::Pp => Coords { pp: i, ..at },
            Axis::World => return i,
            Axis::Ep => Coords { dp: at.dp / layout.group * layout.group + i, ..at },
        })
    }

    /// The members of the group of `at`, ascending.
    pub fn members(self, layout: &Layout, at: Coords) -> impl Iterator<Item = usize> + '_ {
        (0..self.size(layout)).map(move |i| self.member(layout, at, i))
    }

    /// The lowest rank of the group of `rank`: what tells its groups apart.
    pub fn first(self, layout: &Layout, rank: usize) -> usize {
        self.member(layout, layout.coords(rank), 0)
    }
}

#[cfg(test)]
mod tests {
    use crate::check::AXES;
    use crate::testing;
    use spec::{Grid, Schedule};

    /// The groups of an axis are all ranks, each once.
    #[test]
    fn groups_are_a_partition() {
        let model = testing::model(2);
        let grid = Grid::new(&model, 4, 32, 1, Some(2), 2).unwrap().with_context(2, 32).unwrap();
        let mut layout = testing::layout(&model, &grid, [2, 2, 2], Schedule::OneFOneB, None);
        (layout.cp, layout.shard) = (2, 2);
        for axis in AXES {
            let mut seen = vec![0; layout.world()];
            for first in (0..layout.world()).filter(|rank| axis.first(&layout, *rank) == *rank) {
                let members: Vec<_> = axis.members(&layout, layout.coords(first)).collect();
                assert!(members.is_sorted() && members.len() == axis.size(&layout), "{axis:?}: {members:?}");
                members.iter().for_each(|rank| {
                    seen[*rank] += 1;
                    assert_eq!(axis.first(&layout, *rank), first);
                });
            }
            assert_eq!(seen, vec![1; layout.world()], "{axis:?}");
        }
    }
}

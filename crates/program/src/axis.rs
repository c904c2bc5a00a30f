//! The groups of ranks along each axis.

use spec::{Coords, Layout};

use crate::instr::Axis;

impl Axis {
    /// Number of members of a group.
    pub fn size(self, layout: &Layout) -> usize {
        match self {
            Axis::Tp => layout.tp,
            Axis::Cp => layout.cp,
            Axis::Dp => layout.holders(),
            Axis::Shard => layout.shard,
            Axis::Replica => layout.replicas(),
            Axis::Pp => layout.pp,
            Axis::World => layout.world(),
            Axis::Ep => layout.group,
        }
    }

    /// Member `i` of the group of `at`; members ascend, as ranks do.
    pub fn member(self, layout: &Layout, at: Coords, i: usize) -> usize {
        let holder = |h: usize| Coords { dp: h / layout.cp, cp: h % layout.cp, ..at };
        let (mine, shard) = (layout.holder(at), layout.shard);
        layout.rank(match self {
            Axis::Tp => Coords { tp: i, ..at },
            Axis::Cp => Coords { cp: i, ..at },
            Axis::Dp => holder(i),
            Axis::Shard => holder(mine / shard * shard + i),
            Axis::Replica => holder(mine % shard + i * shard),
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

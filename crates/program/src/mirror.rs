//! Who keeps the optimizer state of a rank beside the rank itself. Pure.
//!
//! Where a rank's state has no replica ([`Layout::mirrored`]) every rank is the mirror of exactly one other: the rank at the
//! same distance on every axis. The distance is the one with the fewest mirrors on their owner's host, then the one under
//! which owner and mirror share the fewest groups, so that what strikes a group leaves one of the two.

use spec::{Coords, Layout};

/// Distances on (data, context, pipeline, tensor).
type Shift = [usize; 4];

/// Pairs of owner and mirror of one layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirrors {
    shift: Shift,
}

impl Mirrors {
    /// The pairs; none where no state needs a mirror.
    pub fn of(layout: &Layout) -> Option<Self> {
        if !layout.mirrored() {
            return None;
        }
        let sizes = [layout.dp, layout.cp, layout.pp, layout.tp];
        let steps = |n: usize| {
            let mut steps = vec![0, 1 % n, n / 2];
            steps.sort_unstable();
            steps.dedup();
            steps
        };
        let [dp, cp, pp, tp] = sizes.map(steps);
        let all = dp.iter().flat_map(|d| {
            let (cp, pp, tp) = (&cp, &pp, &tp);
            cp.iter().flat_map(move |c| pp.iter().flat_map(move |p| tp.iter().map(move |t| [*d, *c, *p, *t])))
        });
        let shift =
            all.filter(|shift| *shift != [0; 4]).min_by_key(|shift| (near(layout, *shift), shared(*shift), *shift))?;
        Some(Self { shift })
    }

    /// The rank that keeps the state of `rank`, too.
    pub fn mirror(&self, layout: &Layout, rank: usize) -> usize {
        moved(layout, rank, self.shift)
    }

    /// The rank whose state `rank` keeps, too.
    pub fn ward(&self, layout: &Layout, rank: usize) -> usize {
        let [dp, cp, pp, tp] = self.shift;
        moved(layout, rank, [layout.dp - dp, layout.cp - cp, layout.pp - pp, layout.tp - tp])
    }
}

fn moved(layout: &Layout, rank: usize, [dp, cp, pp, tp]: Shift) -> usize {
    let at = layout.coords(rank);
    layout.rank(Coords {
        dp: (at.dp + dp) % layout.dp,
        cp: (at.cp + cp) % layout.cp,
        pp: (at.pp + pp) % layout.pp,
        tp: (at.tp + tp) % layout.tp,
    })
}

/// Mirrors on their owner's host, where there are several hosts.
fn near(layout: &Layout, shift: Shift) -> usize {
    if layout.ranks_per_host.is_none_or(|n| n >= layout.world()) {
        return 0;
    }
    (0..layout.world()).filter(|rank| layout.host(*rank) == layout.host(moved(layout, *rank, shift))).count()
}

/// Groups (holders, pipeline, tensor) that owner and mirror have in common.
fn shared([dp, cp, pp, tp]: Shift) -> usize {
    let holders = (dp, cp) == (0, 0);
    [pp == 0 && tp == 0, holders && tp == 0, holders && pp == 0].into_iter().filter(|common| *common).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{model, request};
    use spec::{Grid, Schedule, Transport};

    fn layout(ranks: [usize; 3], zero: usize, ranks_per_host: Option<usize>) -> Layout {
        let model = model(4);
        let grid = Grid::new(&model, 8, 32, 1, Some(4), 2).unwrap();
        let request = spec::layout::LayoutRequest {
            zero,
            ranks_per_host,
            transport: Transport::Shm,
            ..request(ranks, Schedule::OneFOneB, None)
        };
        Layout::resolve(&request, &grid, &model, 1).unwrap()
    }

    #[test]
    fn everybody_mirrors_one_other_and_where_axes_allow_shares_no_group_with_it() {
        for (ranks, zero) in
            [([2, 1, 1], 1), ([1, 2, 1], 0), ([1, 1, 4], 0), ([4, 2, 2], 1), ([3, 1, 2], 1), ([1, 2, 2], 0)]
        {
            let layout = layout(ranks, zero, None);
            let mirrors = Mirrors::of(&layout).unwrap();
            let mut seen = vec![false; layout.world()];
            for rank in 0..layout.world() {
                let mirror = mirrors.mirror(&layout, rank);
                assert_ne!(mirror, rank);
                assert!(!std::mem::replace(&mut seen[mirror], true), "{ranks:?}");
                assert_eq!(mirrors.ward(&layout, mirror), rank);
                let axes = ranks.iter().filter(|n| **n > 1).count();
                let shares = shared(mirrors.shift);
                assert_eq!(shares, usize::from(axes == 1), "{ranks:?} {mirrors:?}");
            }
        }
    }

    #[test]
    fn a_mirror_is_on_another_host() {
        for (ranks, per_host) in [([4, 1, 1], 2), ([2, 2, 2], 4), ([2, 2, 2], 2), ([1, 2, 2], 2)] {
            let layout = layout(ranks, usize::from(ranks[0] > 1), Some(per_host));
            let mirrors = Mirrors::of(&layout).unwrap();
            assert!(
                (0..layout.world()).all(|r| layout.host(r) != layout.host(mirrors.mirror(&layout, r))),
                "{ranks:?}"
            );
        }
    }

    #[test]
    fn replicas_are_mirrors_for_nothing() {
        assert_eq!(Mirrors::of(&layout([2, 1, 1], 0, None)), None);
        assert_eq!(Mirrors::of(&layout([2, 2, 1], 0, None)), None);
        assert_eq!(Mirrors::of(&layout([1, 1, 1], 0, None)), None);
    }
}

//! Which layout fits the processes that are left.

use spec::{Run, SpecError};

use crate::input::Piece;

/// What the policy asks about layouts and state; `train` knows the answers.
pub trait Laws: Send {
    /// Why the program of this run cannot be run.
    ///
    /// # Errors
    /// The reason.
    fn fits(&self, run: &Run) -> Result<(), String>;

    /// What the ranks of `after` need and no rank of `before` that holds state has, in words. `holds`, by rank: none: nothing; else
    /// all but these pieces. None: all is there.
    fn lost(&self, before: &Run, holds: &[Option<&[Piece]>], after: &Run) -> Option<String>;

    /// Whether all is there.
    fn covers(&self, before: &Run, holds: &[Option<&[Piece]>], after: &Run) -> bool {
        self.lost(before, holds, after).is_none()
    }
}

/// `run` under the layout nearest to its own that needs at most `ranks` ranks: its own if that is one; else the same tensor,
/// pipeline and context axes with fewer data positions (cells are then uneven); else whatever uses the most ranks. The law is
/// the one of `spec`.
pub fn nearest(run: &Run, ranks: usize, cores: usize, laws: &dyn Laws) -> Option<Run> {
    let own = &run.layout;
    if own.world() <= ranks {
        return Some(run.clone());
    }
    let mut shapes = Vec::new();
    for dp in (1..=own.dp).rev() {
        for cp in (1..=own.cp).rev() {
            for tp in (1..=own.tp).rev() {
                for pp in (1..=own.pp).rev() {
                    if dp * cp * tp * pp <= ranks {
                        shapes.push((dp, cp, tp, pp));
                    }
                }
            }
        }
    }
    let kept = |&(_, cp, tp, pp): &(usize, usize, usize, usize)| (cp, tp, pp) == (own.cp, own.tp, own.pp);
    shapes.sort_by_key(|s| {
        let (_, cp, tp, pp) = *s;
        std::cmp::Reverse((kept(s), s.0 * cp * tp * pp, (tp == own.tp) as usize + (pp == own.pp) as usize, pp, tp))
    });
    shapes.into_iter().find_map(|shape| {
        let run = shaped(run, shape, cores).ok()?;
        laws.fits(&run).is_ok().then_some(run)
    })
}

fn shaped(run: &Run, (dp, cp, tp, pp): (usize, usize, usize, usize), cores: usize) -> Result<Run, SpecError> {
    let own = &run.layout;
    let mut sets = vec![
        format!("layout.dp={dp}"),
        format!("layout.cp={cp}"),
        format!("layout.tp={tp}"),
        format!("layout.pp={pp}"),
        // A world of one rank would else take all cores, also those of the places that are empty now.
        format!("layout.threads={}", own.threads),
    ];
    if dp != own.dp {
        sets.push(format!("layout.cells={:?}", even(run.grid.dp, dp, run.grid.ep)));
        sets.push(format!("layout.ep={}", (run.grid.ep).min(dp)));
    }
    if pp != own.pp {
        sets.push(format!("layout.stages={:?}", even(run.model.layers, pp * own.vpp, 1)));
    }
    if own.zero > 0 && own.shard < own.holders() {
        let shard = (1..=own.shard.min(dp * cp)).rev().find(|n| (dp * cp).is_multiple_of(*n)).unwrap_or(1);
        sets.push(format!("layout.shard={shard}"));
    }
    if run.layout.ranks_per_host.is_some_and(|n| !(dp * cp * tp * pp).is_multiple_of(n)) {
        sets.push("cluster.ranks_per_host=1".into());
    }
    let text = run.values.to_toml();
    // `layout.ep` is refused where a data position has whole groups.
    let without_ep: Vec<_> = sets.iter().filter(|s| !s.starts_with("layout.ep=")).cloned().collect();
    let parse = |sets: &[String]| Run::parse(&text, "the run", sets, cores);
    parse(&without_ep).or_else(|_| parse(&sets)).or_else(|_| {
        let mut one = sets.clone();
        one.push("layout.ep=1".into());
        parse(&one)
    })
}

/// `n` in `parts` parts as even as whole units of `unit` allow.
fn even(n: usize, parts: usize, unit: usize) -> Vec<usize> {
    let (units, unit) = if n / unit >= parts { (n / unit, unit) } else { (n, 1) };
    (0..parts).map(|i| unit * (units * (i + 1) / parts - units * i / parts)).rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Anything, run};

    fn to(sets: &[&str], ranks: usize) -> Option<(usize, usize, usize, Vec<usize>)> {
        let run = nearest(&run(sets), ranks, 2, &Anything)?;
        let layout = &run.layout;
        assert!(layout.world() <= ranks);
        Some((layout.dp, layout.tp, layout.pp, layout.cells.iter().map(ExactSizeIterator::len).collect()))
    }

    #[test]
    fn data_positions_go_first_and_cells_become_uneven() {
        assert_eq!(to(&["layout.dp=4"], 4), Some((4, 1, 1, vec![1; 4])));
        assert_eq!(to(&["layout.dp=4"], 3), Some((3, 1, 1, vec![2, 1, 1])));
        assert_eq!(to(&["layout.dp=2", "layout.pp=2"], 3), Some((1, 1, 2, vec![4])));
        assert_eq!(to(&["layout.dp=2", "layout.tp=2"], 2), Some((1, 2, 1, vec![4])));
        assert_eq!(to(&["layout.dp=4", "layout.zero=1", "layout.shard=2"], 3).unwrap().0, 3);
    }

    #[test]
    fn the_other_axes_go_when_nothing_else_is_left() {
        assert_eq!(to(&["layout.tp=2", "layout.pp=2"], 3), Some((1, 1, 2, vec![4])));
        assert_eq!(to(&["layout.tp=2", "layout.pp=2"], 1), Some((1, 1, 1, vec![4])));
        assert_eq!(to(&["layout.pp=4"], 3), Some((1, 1, 3, vec![4])));
        assert_eq!(to(&["layout.dp=2"], 0), None);
    }

    #[test]
    fn what_the_checker_refuses_is_passed_over() {
        struct Never;
        impl Laws for Never {
            fn fits(&self, _: &Run) -> Result<(), String> {
                Err("no".into())
            }
            fn lost(&self, _: &Run, _: &[Option<&[Piece]>], _: &Run) -> Option<String> {
                None
            }
        }
        assert!(nearest(&run(&["layout.dp=4"]), 3, 2, &Never).is_none());
        assert!(nearest(&run(&["layout.dp=4"]), 4, 2, &Never).is_some());
    }
}

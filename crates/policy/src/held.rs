//! What the ranks of an ended world hold together (the transaction: a step is applied by all or by none).

use crate::input::{Decided, Held};
use crate::transaction::{Holding, Resumption, resume};

/// What all that are believed agree on.
#[derive(Debug, Clone, PartialEq)]
pub struct Agreement {
    /// The world whose state all go on from.
    pub generation: u64,
    /// The step from which all go on.
    pub step: u64,
    /// The decision that those one step behind apply first.
    pub forward: Option<Decided>,
    /// By rank of that world: which of `held` has state of that step, or can come to it.
    pub holders: Vec<Option<usize>>,
}

/// Where processes go on by what they hold: one step more than the lowest if anybody knows that it was committed. `held[i]` is of
/// process i, newest first; empty: it is gone, or not believed. `size(generation)` is how many ranks that world had; none: what
/// is left of it is not wanted any more. `covers(generation, holds)`: have the ranks that `holds` names all of its state, what
/// failed its hash left out? None if nobody has.
pub fn agree(
    held: &[Vec<&Held>],
    size: impl Fn(u64) -> Option<usize>,
    covers: impl Fn(u64, &[bool]) -> bool,
) -> Option<Agreement> {
    let holding = |held: &&Held| {
        let there = size(held.generation).is_some_and(|size| (held.rank as usize) < size);
        Some(Holding {
            generation: held.generation,
            settled: held.settled,
            rank: held.rank,
            step: held.step.filter(|_| there)?,
            prepared: held.prepared,
            decided: held.decided.as_ref().map(|d| (d.step, d.clone())),
        })
    };
    let processes: Vec<Vec<_>> = held.iter().map(|held| held.iter().filter_map(holding).collect()).collect();
    let holds = |generation: u64, ranks: &[u32]| {
        (0..size(generation).unwrap_or(0) as u32).map(|rank| ranks.contains(&rank)).collect::<Vec<_>>()
    };
    // How many shards there are and who keeps them only the layout knows: all are there, or they are not.
    let lost = |generation: u64, ranks: &[u32]| {
        if covers(generation, &holds(generation, ranks)) { Vec::new() } else { vec![0] }
    };
    let Resumption { generation, step, forward, holders } = resume(&processes, lost).ok()?;
    let holder = |rank: usize| holders.iter().find(|(of, _)| *of as usize == rank).map(|(_, process)| *process);
    let holders = (0..size(generation)?).map(holder).collect();
    Some(Agreement { generation, step, forward, holders })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, prepared: bool, decided: Option<u64>) -> Held {
        let decided = decided.map(|step| Decided { step, decision: serde_json::json!({ "step": step }) });
        Held { generation: 1, settled: true, step: Some(step), prepared, decided, ..Held::default() }
    }

    /// Of one world in which everybody keeps everything; by rank. Who holds something comes back.
    fn agree(held: &[Option<&Held>]) -> Option<(u64, Option<Decided>, Vec<bool>)> {
        let of = |(rank, held): (usize, &Option<&Held>)| held.map(|held| Held { rank: rank as u32, ..held.clone() });
        let owned: Vec<Option<Held>> = held.iter().enumerate().map(of).collect();
        let all: Vec<Vec<&Held>> = owned.iter().map(|held| held.iter().collect()).collect();
        let agreed = super::agree(&all, |_| Some(held.len()), |_, holds| holds.contains(&true))?;
        assert!(agreed.holders.iter().enumerate().all(|(rank, holder)| holder.is_none_or(|holder| holder == rank)));
        Some((agreed.step, agreed.forward, agreed.holders.iter().map(Option::is_some).collect()))
    }

    #[test]
    fn without_a_vote_all_stay() {
        let (a, b) = (at(4, true, None), at(4, false, None));
        let agreed = agree(&[Some(&a), None, Some(&b)]).unwrap();
        assert_eq!(agreed, (4, None, vec![true, false, true]));
    }

    #[test]
    fn who_saw_the_vote_takes_all_forward() {
        let (a, b, c) = (at(4, true, None), at(4, true, Some(5)), at(5, false, Some(5)));
        for held in [vec![Some(&a), Some(&b), None], vec![Some(&a), Some(&b), Some(&c)], vec![Some(&c), Some(&a), None]]
        {
            let agreed = agree(&held).unwrap();
            assert_eq!(agreed.0, 5);
            assert_eq!(agreed.1.unwrap().step, 5);
            assert_eq!(agreed.2, held.iter().map(Option::is_some).collect::<Vec<_>>());
        }
    }

    #[test]
    fn who_cannot_come_along_is_no_holder() {
        let (lost, done) = (at(4, false, None), at(5, false, None));
        let agreed = agree(&[Some(&lost), Some(&done)]).unwrap();
        assert_eq!(agreed, (5, None, vec![false, true]));
    }

    #[test]
    fn a_corrupt_piece_leaves_its_holder_a_source_of_the_rest() {
        let piece = crate::Piece { tensor: 0, slice: 0, elements: 0..9, mirror: false, what: "moment1 of norm".into() };
        let bad = Held { corrupt: vec![piece], ..at(4, true, Some(5)) };
        let good = at(4, true, None);
        let agreed = agree(&[Some(&bad), Some(&good)]).unwrap();
        assert_eq!((agreed.0, agreed.2), (5, vec![true, true]));
        // Whether that is enough the layout knows.
        assert_eq!(super::agree(&[vec![&bad]], |_| Some(1), |_, _| false), None);
        assert_eq!(agree(&[Some(&Held::default())]), None);
    }

    /// Every way in which three ranks may stand around a vote: what one has applied, all can come to.
    #[test]
    fn a_committed_step_is_never_lost() {
        // Prepared, voted, applied: a rank passes them in this order; nobody votes before all are prepared.
        let states = [at(4, false, None), at(4, true, None), at(4, true, Some(5)), at(5, false, Some(5))];
        for (i, a) in states.iter().enumerate() {
            for (j, b) in states.iter().enumerate() {
                if i.max(j) >= 2 && i.min(j) == 0 {
                    continue;
                }
                for held in [[Some(a), Some(b), None], [None, Some(a), Some(b)]] {
                    let agreed = agree(&held).unwrap();
                    assert_eq!(agreed.0, if i.max(j) >= 2 { 5 } else { 4 });
                    assert!(held.iter().zip(&agreed.2).all(|(h, holds)| h.is_some() == *holds));
                }
            }
        }
    }

    #[test]
    fn what_was_left_before_a_world_that_never_loaded_is_used_first() {
        let old = at(4, false, None);
        let new = |rank| Held { generation: 2, rank, settled: false, ..at(4, false, None) };
        let of = |rank| Held { rank, ..old.clone() };
        let (a, b) = (Held { before: Some(Box::new(of(0))), ..new(1) }, of(2));
        let held = [a.all().collect(), b.all().collect(), Vec::new()];
        let agreed = super::agree(&held, |_| Some(3), |_, holds| holds.iter().filter(|h| **h).count() == 2).unwrap();
        assert_eq!((agreed.generation, agreed.holders), (1, vec![Some(0), None, Some(1)]));
        // Where that is not whole any more what was loaded is.
        let agreed = super::agree(&held, |_| Some(3), |generation, _| generation == 2).unwrap();
        assert_eq!((agreed.generation, agreed.holders), (2, vec![None, Some(0), None]));
        // What is not wanted any more is not looked at, nor a rank that there was not.
        assert_eq!(super::agree(&held, |generation| (generation == 2).then_some(1), |_, _| true), None);
    }
}

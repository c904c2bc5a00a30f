//! What the ranks of an ended world hold together (the transaction: a step is applied by all or by none).

use crate::input::{Decided, Held};
use crate::transaction::{Holding, Resumption, resume};

/// What all that are believed agree on.
#[derive(Debug, Clone, PartialEq)]
pub struct Agreement {
    /// The step from which all go on.
    pub step: u64,
    /// The decision that those one step behind apply first.
    pub forward: Option<Decided>,
    /// By rank: holds state of that step, or can come to it.
    pub holds: Vec<bool>,
}

/// The step that the ranks of a world go on from: one more than the lowest if anybody knows that it was committed. `held` is by
/// rank; none: the process is gone. None if nobody holds anything.
pub fn agree(held: &[Option<&Held>]) -> Option<Agreement> {
    let holding = |(rank, held): (usize, &Option<&Held>)| {
        let held = (*held)?;
        Some(Holding {
            generation: 0,
            settled: true,
            rank: rank as u32,
            step: held.step?,
            prepared: held.prepared,
            decided: held.decided.as_ref().map(|d| (d.step, d.clone())),
            corrupt: !held.corrupt.is_empty(),
        })
    };
    let processes: Vec<Vec<_>> = held.iter().enumerate().map(|known| holding(known).into_iter().collect()).collect();
    // Whether they have every shard between them, the caller asks of the layout.
    let Resumption { step, forward, holders, .. } = resume(&processes, |_| Vec::new()).ok()?;
    let holds = (0..held.len()).map(|rank| holders.iter().any(|(holder, _)| *holder as usize == rank)).collect();
    Some(Agreement { step, forward, holds })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64, prepared: bool, decided: Option<u64>) -> Held {
        let decided = decided.map(|step| Decided { step, decision: serde_json::json!({ "step": step }) });
        Held { step: Some(step), prepared, decided, corrupt: Vec::new() }
    }

    #[test]
    fn without_a_vote_all_stay() {
        let (a, b) = (at(4, true, None), at(4, false, None));
        let agreed = agree(&[Some(&a), None, Some(&b)]).unwrap();
        assert_eq!((agreed.step, agreed.forward, agreed.holds), (4, None, vec![true, false, true]));
    }

    #[test]
    fn who_saw_the_vote_takes_all_forward() {
        let (a, b, c) = (at(4, true, None), at(4, true, Some(5)), at(5, false, Some(5)));
        for held in [vec![Some(&a), Some(&b), None], vec![Some(&a), Some(&b), Some(&c)], vec![Some(&c), Some(&a), None]]
        {
            let agreed = agree(&held).unwrap();
            assert_eq!(agreed.step, 5);
            assert_eq!(agreed.forward.unwrap().step, 5);
            assert_eq!(agreed.holds, held.iter().map(Option::is_some).collect::<Vec<_>>());
        }
    }

    #[test]
    fn who_cannot_come_along_is_no_holder() {
        let (lost, done) = (at(4, false, None), at(5, false, None));
        let agreed = agree(&[Some(&lost), Some(&done)]).unwrap();
        assert_eq!((agreed.step, agreed.forward, agreed.holds), (5, None, vec![false, true]));
    }

    #[test]
    fn corrupt_state_is_not_believed() {
        let bad = Held { corrupt: vec!["norm/moment".into()], ..at(4, true, Some(5)) };
        let good = at(4, true, None);
        let agreed = agree(&[Some(&bad), Some(&good)]).unwrap();
        // Its decision is: all ranks derive the same one.
        assert_eq!((agreed.step, agreed.holds), (5, vec![false, true]));
        assert_eq!(agree(&[None, Some(&bad)]), None);
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
                    assert_eq!(agreed.step, if i.max(j) >= 2 { 5 } else { 4 });
                    assert!(held.iter().zip(&agreed.holds).all(|(h, holds)| h.is_some() == *holds));
                }
            }
        }
    }
}

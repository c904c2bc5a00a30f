//! What becomes of the step under way when a world ends: THE decision, from what every process that answered holds.
//!
//! The step is a transaction: gradients complete at owner and mirror (**prepared**), ballots, **vote**, apply, gather. A rank
//! sends its ballot only when it is prepared, so whoever saw the vote of step k + 1 knows that all were prepared for it:
//!
//! - if any survivor saw that vote, everyone goes on at k + 1; those at k apply it to what they have prepared;
//! - else nobody alive has applied it, and all stay at k. The step is computed again, with the same bits.
//!
//! A world that ends while its ranks are still loading must not cost the state that they load from. So when a rank has its
//! state it says so to all others, and it keeps what it had of the world before until it has heard that of all; it reports both.
//! A world of which anybody has heard that is **settled**: all its ranks had their state. Nobody has stepped in an unsettled
//! one, so what was loaded there is what the settled one before it had: it is used where that is not whole any more.
//!
//! `tests/transaction` explores this function inside a model of the protocol.

/// State that a process holds of one world.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Holding<D> {
    /// The world whose layout it follows.
    pub generation: u64,
    /// This process heard from all ranks of that world that they had their state.
    pub settled: bool,
    /// The rank that it had in that world.
    pub rank: u32,
    /// The last step whose update is whole in it.
    pub step: u64,
    /// With the decision of step `step + 1` it can be brought there.
    pub prepared: bool,
    /// The last decision that this process saw: (the step that it commits, what was decided).
    pub decided: Option<(u64, D)>,
}

/// Where a new world begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumption<D> {
    /// The world whose layout the holders follow.
    pub generation: u64,
    /// The step that all holders are at, or come to with `forward`.
    pub step: u64,
    /// Those one step behind apply it first; none where nobody is behind.
    pub forward: Option<D>,
    /// (rank in that world, process as given) of everyone who can serve its state; ascending ranks.
    pub holders: Vec<(u32, usize)>,
}

/// Why the processes cannot go on by themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stuck {
    /// Nobody holds state that can be used: disk or initial weights are left.
    Nothing,
    /// Nobody who answered keeps these shards: the disk is left.
    Lost {
        /// The step at which they were.
        step: u64,
        /// Their numbers, as the caller's `keepers` count.
        shards: Vec<usize>,
    },
    /// Two processes saw different decisions of one step, which the protocol excludes.
    Contradiction {
        /// The step.
        step: u64,
    },
    /// Somebody is at a step of which nobody saw the decision, and somebody else is behind it.
    Undecided {
        /// The step.
        step: u64,
    },
}

/// Where to go on, by what the processes that answered hold. `processes[i]` lists what process i holds, of at most two
/// worlds. `lost(generation, ranks)` are the shards of that world's layout that none of `ranks` keeps (as owner, mirror,
/// replica).
///
/// # Errors
/// [`Stuck`]; the disk is left then.
pub fn resume<D: Clone + PartialEq>(
    processes: &[Vec<Holding<D>>],
    lost: impl Fn(u64, &[u32]) -> Vec<usize>,
) -> Result<Resumption<D>, Stuck> {
    let all = || processes.iter().flatten();
    // Before the first world of a run is settled its oldest one counts.
    let settled = all().filter(|h| h.settled).map(|h| h.generation).max();
    let from = settled.or_else(|| all().map(|h| h.generation).min()).ok_or(Stuck::Nothing)?;
    let mut generations: Vec<u64> = all().map(|h| h.generation).filter(|&g| g >= from).collect();
    generations.sort_unstable();
    generations.dedup();
    let mut first = None;
    for generation in generations {
        match of_world(processes, generation, |ranks| lost(generation, ranks)) {
            Ok(resumption) => return Ok(resumption),
            Err(stuck) => _ = first.get_or_insert(stuck),
        }
    }
    Err(first.unwrap_or(Stuck::Nothing))
}

/// [`resume`] with what is held of world `generation` alone.
fn of_world<D: Clone + PartialEq>(
    processes: &[Vec<Holding<D>>],
    generation: u64,
    lost: impl Fn(&[u32]) -> Vec<usize>,
) -> Result<Resumption<D>, Stuck> {
    let all = || processes.iter().enumerate().flat_map(|(i, held)| held.iter().map(move |h| (i, h)));
    let held = || all().filter(|(_, h)| h.generation == generation);
    // A decision holds whatever became of the state of the process that saw it.
    let decided = held().filter_map(|(_, h)| h.decided.as_ref()).map(|(step, _)| *step).max();
    let step = held().map(|(_, h)| h.step).max().ok_or(Stuck::Nothing)?.max(decided.unwrap_or(0));
    let mut decisions = held().filter_map(|(_, h)| h.decided.as_ref()).filter(|(of, _)| *of == step).map(|(_, d)| d);
    let decision = decisions.next();
    if decisions.any(|other| Some(other) != decision) {
        return Err(Stuck::Contradiction { step });
    }
    let behind = |h: &Holding<D>| h.step + 1 == step && h.prepared;
    let needed = held().any(|(_, h)| behind(h));
    if needed && decision.is_none() {
        return Err(Stuck::Undecided { step });
    }
    let mut holders: Vec<_> =
        held().filter(|(_, h)| h.step == step || behind(h)).map(|(process, h)| (h.rank, process)).collect();
    holders.sort_unstable();
    if holders.is_empty() {
        return Err(Stuck::Nothing);
    }
    let ranks: Vec<u32> = holders.iter().map(|(rank, _)| *rank).collect();
    let shards = lost(&ranks);
    if !shards.is_empty() {
        return Err(Stuck::Lost { step, shards });
    }
    Ok(Resumption { generation, step, forward: decision.filter(|_| needed).cloned(), holders })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rank: u32, step: u64, prepared: bool, decided: Option<u64>) -> Vec<Holding<char>> {
        let decided = decided.map(|step| (step, 'd'));
        vec![Holding { generation: 1, settled: true, rank, step, prepared, decided }]
    }

    /// Everybody keeps everything.
    fn any(_: u64, ranks: &[u32]) -> Vec<usize> {
        if ranks.is_empty() { vec![0] } else { vec![] }
    }

    /// The shards of which none of `keepers` is in `ranks`.
    fn lost(keepers: &[Vec<u32>], ranks: &[u32]) -> Vec<usize> {
        (0..keepers.len()).filter(|shard| !keepers[*shard].iter().any(|k| ranks.contains(k))).collect()
    }

    #[test]
    fn one_who_saw_the_vote_takes_all_along() {
        let held = [at(2, 4, true, Some(4)), at(0, 5, false, Some(5)), at(1, 4, true, Some(4))];
        let resumption = resume(&held, any).unwrap();
        assert_eq!((resumption.step, resumption.forward), (5, Some('d')));
        assert_eq!(resumption.holders, [(0, 1), (1, 2), (2, 0)]);
    }

    #[test]
    fn if_nobody_saw_it_all_stay() {
        let resumption = resume(&[at(0, 4, true, Some(4)), at(1, 4, false, Some(4))], any).unwrap();
        assert_eq!((resumption.step, resumption.forward, resumption.holders.len()), (4, None, 2));
    }

    #[test]
    fn seen_but_not_applied_is_seen() {
        let resumption = resume(&[at(0, 4, true, Some(5)), at(1, 4, true, Some(4))], any).unwrap();
        assert_eq!((resumption.step, resumption.forward), (5, Some('d')));
    }

    #[test]
    fn who_is_behind_and_unprepared_holds_nothing_of_use() {
        let held = [at(0, 5, false, Some(5)), at(1, 4, false, Some(4))];
        let resumption = resume(&held, any).unwrap();
        assert_eq!((resumption.forward, resumption.holders), (None, vec![(0, 0)]));
        let lost = resume(&held, |_, ranks| lost(&[vec![0, 1], vec![1, 2]], ranks));
        assert_eq!(lost, Err(Stuck::Lost { step: 5, shards: vec![1] }));
    }

    #[test]
    fn a_world_that_died_while_loading_is_used_only_where_the_one_before_is_not_whole() {
        let loading = Holding { generation: 2, settled: false, rank: 0, step: 4, prepared: false, decided: None };
        let mut first = at(0, 4, true, Some(4));
        first.insert(0, loading.clone());
        let held = [first.clone(), at(2, 4, false, Some(4)), vec![loading.clone()]];
        let resumption = resume(&held, any).unwrap();
        assert_eq!((resumption.generation, resumption.holders), (1, vec![(0, 0), (2, 1)]));
        // Shard 1 was kept by ranks 1 and 2 of the first world, which are gone; rank 0 of the second has all.
        let keepers = |generation| if generation == 1 { vec![vec![0, 1], vec![1, 2]] } else { vec![vec![0, 1]; 2] };
        let lost = |generation, ranks: &[u32]| lost(&keepers(generation), ranks);
        let resumption = resume(std::slice::from_ref(&first), lost).unwrap();
        assert_eq!((resumption.generation, resumption.step, resumption.holders), (2, 4, vec![(0, 0)]));
        // One who heard it of all of the new world: all had loaded.
        let voted = Holding { settled: true, step: 5, decided: Some((5, 'd')), ..loading };
        let resumption = resume(&[first, vec![voted]], any).unwrap();
        assert_eq!((resumption.generation, resumption.step, resumption.holders), (2, 5, vec![(0, 1)]));
    }

    #[test]
    fn what_the_protocol_excludes_is_said() {
        let mut other = at(1, 5, false, Some(5));
        other[0].decided = Some((5, 'x'));
        assert_eq!(resume(&[at(0, 5, false, Some(5)), other], any), Err(Stuck::Contradiction { step: 5 }));
        assert_eq!(resume(&[at(0, 5, false, None), at(1, 4, true, None)], any), Err(Stuck::Undecided { step: 5 }));
        assert_eq!(resume::<char>(&[vec![]], any), Err(Stuck::Nothing));
    }
}

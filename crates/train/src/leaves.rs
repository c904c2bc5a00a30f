//! Who computed which gradient leaf, and who is wrong. Pure.
//!
//! A leaf's bits depend neither on the rank that computes it nor on the time. So in the checking pass over a step each rank
//! loads the data cells of another data position, and its own ones in the pass that counts: of each leaf there are hashes by
//! two ranks. If two disagree both passes are done again, the checking one with yet another rank where there is one: a fault of
//! a moment is gone then, a device that is broken disagrees again.

use std::collections::{BTreeMap, BTreeSet};

use spec::{Class, Coords, Grid, Layout};

/// What a rank made of a leaf in one pass over a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Passes count from 0; two are a round.
    pub pass: u64,
    /// The leaf, and whose part of the model: [`key`].
    pub key: u64,
    /// Hash of the gradients.
    pub hash: u64,
}

/// The hash of one gradient of a leaf; those of all that a rank has of it add up. `from`: chunk, bucket, microbatch.
pub fn hash(from: [usize; 3], gradient: &[f32]) -> u64 {
    let seed = from.iter().fold(0, |seed, n| crate::fault::mix(seed, *n as u64));
    twox_hash::XxHash3_64::oneshot_with_seed(seed, kernels::bytes(gradient))
}

/// By how many data cells the checking pass of each of two rounds moves on: so that as few cells as possible are computed by
/// their own ranks, and in the second round by other ones than in the first where there are any. 0: there is no other rank.
pub fn shifts(grid: &Grid, layout: &Layout) -> [usize; 2] {
    let replica = |cell: usize| layout.cells.iter().position(|cells| cells.contains(&cell)).map(|d| d / layout.group);
    let own = |by: usize| (0..grid.dp).filter(|cell| replica(*cell) == replica((cell + by) % grid.dp)).count();
    let mut all: Vec<_> = (grid.ep..grid.dp).step_by(grid.ep).map(|by| (own(by), by)).collect();
    all.sort_unstable();
    let Some((_, first)) = all.first().copied().filter(|(own, _)| *own < grid.dp) else { return [0, 0] };
    if layout.dp / layout.group == 2 {
        return [first, first];
    }
    // The one in the middle of the best others, so that it pairs each rank with one far from the first.
    let least = all.get(1).map_or(0, |(own, _)| *own);
    let best: Vec<_> = all[1..].iter().filter(|(own, _)| *own == least).map(|(_, by)| *by).collect();
    [first, best.get(best.len() / 2).copied().unwrap_or(first)]
}

/// The name of leaf `leaf` of the sums of `class`, computed by the rank at `at` while all data cells stand for those `by`
/// further on.
pub fn key(grid: &Grid, layout: &Layout, at: Coords, class: Class, leaf: usize, by: usize) -> u64 {
    let (leaf, place, experts) = match class {
        Class::Common => ((leaf + by * grid.cp) % grid.leaves(), 0, 0),
        Class::Experts => ((leaf + by / grid.ep * grid.cp) % grid.expert_leaves(), at.dp % layout.group, 1),
    };
    let line = (at.pp * layout.tp + at.tp) * layout.group + place;
    experts << 63 | (line as u64) << 32 | leaf as u64
}

/// What a round came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// All who computed a leaf in it agree.
    pub agree: bool,
    /// Who was wrong, in it or before. Several may be named where nobody can say which of them it is.
    pub wrong: Vec<u32>,
}

/// Judges round `round` (from 0) by what the ranks saw in all passes up to its end. `replica`: ranks of one replica give each other
/// what they compute from.
pub fn judge(all: &[Vec<Seen>], round: u64, replica: impl Fn(u32) -> usize) -> Judgement {
    let every = || (0..).zip(all).flat_map(|(rank, seen)| seen.iter().map(move |s| (rank, *s)));
    let mut now: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    for (_, seen) in every().filter(|(_, seen)| seen.pass / 2 == round) {
        now.entry(seen.key).or_default().insert(seen.hash);
    }
    let disputed: BTreeSet<u64> = now.iter().filter(|(_, hashes)| hashes.len() > 1).map(|(key, _)| *key).collect();
    if disputed.is_empty() {
        let other = |(rank, seen): (u32, Seen)| {
            now.get(&seen.key).is_some_and(|right| !right.contains(&seen.hash)).then_some(rank)
        };
        let wrong: BTreeSet<u32> = every().filter_map(other).collect();
        return Judgement { agree: true, wrong: wrong.into_iter().collect() };
    }
    let mut by_key: BTreeMap<u64, BTreeMap<u32, BTreeSet<u64>>> = BTreeMap::new();
    for (rank, seen) in every().filter(|(_, seen)| disputed.contains(&seen.key)) {
        by_key.entry(seen.key).or_default().entry(rank).or_default().insert(seen.hash);
    }
    let suspects: Vec<BTreeSet<u32>> = by_key.values().map(suspects).collect();
    Judgement { agree: false, wrong: explain(&suspects, replica).into_iter().collect() }
}

/// Who may be wrong about one leaf. Who said the same each time has a vote; a majority is right.
fn suspects(said: &BTreeMap<u32, BTreeSet<u64>>) -> BTreeSet<u32> {
    let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
    for hashes in said.values().filter(|hashes| hashes.len() == 1) {
        hashes.iter().for_each(|hash| *votes.entry(*hash).or_default() += 1);
    }
    let most = votes.values().copied().max().unwrap_or(0);
    let mut first = votes.iter().filter(|(_, n)| **n == most);
    let right = first.next().filter(|_| first.next().is_none()).map(|(hash, _)| *hash);
    let wrong = |hashes: &BTreeSet<u64>| right.is_none_or(|right| hashes.iter().any(|hash| *hash != right));
    said.iter().filter(|(_, hashes)| wrong(hashes)).map(|(rank, _)| *rank).collect()
}

/// The fewest who explain all disputes: one rank, one replica (what one rank of it spoils the others compute on with), or all.
fn explain(suspects: &[BTreeSet<u32>], replica: impl Fn(u32) -> usize) -> BTreeSet<u32> {
    let common = |sets: &mut dyn Iterator<Item = BTreeSet<usize>>| {
        sets.reduce(|a, b| a.intersection(&b).copied().collect()).unwrap_or_default()
    };
    let all: BTreeSet<u32> = suspects.iter().flatten().copied().collect();
    let ranks = common(&mut suspects.iter().map(|set| set.iter().map(|rank| *rank as usize).collect()));
    if !ranks.is_empty() {
        return ranks.into_iter().map(|rank| rank as u32).collect();
    }
    let replicas = common(&mut suspects.iter().map(|set| set.iter().map(|rank| replica(*rank)).collect()));
    if replicas.is_empty() { all } else { all.into_iter().filter(|rank| replicas.contains(&replica(*rank))).collect() }
}

#[cfg(test)]
mod tests {
    use spec::Run;

    use super::*;

    /// Data positions and data cells; every rank is a replica. `spoilt(rank, pass, n)` changes what it computes as its n-th leaf.
    fn seen(dp: usize, cells: usize, passes: u64, spoilt: impl Fn(usize, u64, usize) -> u64) -> Vec<Vec<Seen>> {
        let run = run(dp, cells);
        let by = shifts(&run.grid, &run.layout);
        let of = |rank: usize| {
            let pass = |pass: u64| {
                let by = if pass.is_multiple_of(2) { by[pass as usize / 2] } else { 0 };
                let (grid, layout, at) = (&run.grid, &run.layout, run.layout.coords(rank));
                let leaf = move |leaf: usize| {
                    let key = key(grid, layout, at, Class::Common, leaf, by);
                    (key, leaf - layout.cells[rank].start)
                };
                run.layout.cells[rank].clone().map(leaf).map(move |(key, leaf)| (pass, key, leaf)).collect::<Vec<_>>()
            };
            let all = (0..passes).flat_map(pass);
            all.map(|(pass, key, leaf)| Seen { pass, key, hash: 1000 + key + spoilt(rank, pass, leaf) }).collect()
        };
        (0..dp).map(of).collect()
    }

    fn run(dp: usize, cells: usize) -> Run {
        let text = format!(
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 48\nseq = 32\n[grid]\ndp = {cells}\n[layout]\ndp = {dp}\n"
        );
        Run::parse(&text, "t", &[], 1).unwrap()
    }

    fn alone(rank: u32) -> usize {
        rank as usize
    }

    #[test]
    fn all_leaves_are_computed_by_another_rank() {
        for (dp, cells) in [(2, 2), (2, 8), (3, 3), (3, 4), (3, 6), (4, 4), (4, 16)] {
            let all = seen(dp, cells, 4, |_, _, _| 0);
            let mut who: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
            for (rank, seen) in all.iter().enumerate() {
                seen.iter().for_each(|s| _ = who.entry(s.key).or_default().insert(rank));
            }
            assert_eq!(who.len(), cells);
            // A third one in the second round, where there is one.
            let third = who.values().filter(|ranks| ranks.len() >= dp.min(3)).count();
            assert!(third > 0 && who.values().all(|ranks| ranks.len() > 1), "{dp} x {cells}: {who:?}");
            assert_eq!(judge(&all, 1, alone), Judgement { agree: true, wrong: vec![] });
        }
        assert_eq!(shifts(&run(1, 4).grid, &run(1, 4).layout), [0, 0]);
        // Three cells on two ranks: as many as can be.
        let uneven = run(2, 3);
        assert_eq!(uneven.layout.cells.iter().map(|cells| cells.len()).max(), Some(2));
        assert_ne!(shifts(&uneven.grid, &uneven.layout)[0], 0);
    }

    #[test]
    fn what_strikes_once_is_named_when_all_agree_again() {
        for victim in 0..2usize {
            for when in 0..2 {
                let all = seen(2, 4, 4, |rank, pass, _| u64::from((rank, pass) == (victim, when)));
                assert!(!judge(&all, 0, alone).agree);
                assert_eq!(judge(&all, 1, alone), Judgement { agree: true, wrong: vec![victim as u32] });
            }
        }
    }

    #[test]
    fn a_device_that_errs_the_same_each_time_is_named_by_the_others() {
        for (dp, cells) in [(3, 3), (3, 4), (3, 6), (4, 4), (4, 8)] {
            for victim in 0..dp {
                // In its first leaf, whatever that is of.
                let all = seen(dp, cells, 4, |rank, _, n| u64::from((rank, n) == (victim, 0)));
                assert!(!judge(&all, 0, alone).agree);
                let wrong = vec![victim as u32];
                assert_eq!(judge(&all, 1, alone), Judgement { agree: false, wrong }, "{dp} ranks, {cells} cells");
            }
        }
        // Of two nobody can say which; who says another thing each time is wrong.
        let all = seen(2, 2, 4, |rank, _, _| u64::from(rank == 1));
        assert_eq!(judge(&all, 1, alone), Judgement { agree: false, wrong: vec![0, 1] });
        let all = seen(2, 2, 4, |rank, pass, _| if rank == 1 { pass + 1 } else { 0 });
        assert_eq!(judge(&all, 1, alone), Judgement { agree: false, wrong: vec![1] });
    }

    /// The fault that no recomputation by the same rank finds.
    #[test]
    fn who_checks_himself_sees_nothing() {
        let all = vec![vec![Seen { pass: 0, key: 0, hash: 7 }, Seen { pass: 1, key: 0, hash: 7 }]];
        assert!(judge(&all, 0, alone).agree);
    }

    #[test]
    fn a_spoilt_replica_is_named_as_a_whole() {
        // Ranks 0 and 1 are a replica, 2 and 3, 4 and 5; key 0 is of the even, key 1 of the odd ranks. Rank 2 spoils both.
        let said = |pass, key, hash| Seen { pass, key, hash };
        let of = |keys: [u64; 2], hash| vec![said(0, keys[0], hash), said(1, keys[1], hash)];
        let all = [of([2, 0], 1), of([12, 10], 1), of([4, 2], 9), of([14, 12], 9), of([0, 4], 1), of([10, 14], 1)];
        let judged = judge(&all, 0, |rank| rank as usize / 2);
        assert_eq!(judged, Judgement { agree: false, wrong: vec![2, 3] });
    }
}

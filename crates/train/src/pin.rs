//! Which cores a rank and its threads keep to.
//!
//! The split of the allowed cores is pure; [`allowed`] asks the system, which tells what `taskset` and containers
//! leave, and [`hold`] keeps the calling thread, and all that it starts from then on, to some of them.

use std::ops::RangeInclusive;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use spec::Pin;

/// The cores of each rank, by rank.
pub type Shares = Vec<Vec<usize>>;

/// Ranks that [`sentence`] names one by one.
const NAMED_MAX: usize = 8;

/// The cores that the calling thread may use, ascending; none where the system does not tell.
pub fn allowed() -> Vec<usize> {
    sched_getaffinity(None).map_or(Vec::new(), |set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Keeps the calling thread to `cores`.
///
/// # Errors
/// If the system refuses, as it does where none of them may be used.
pub fn hold(cores: &[usize]) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// The cores of each of `ranks` on this machine: neighbours out of `allowed`, as even as can be, nobody's twice.
/// None without a core for each, or where it is not wanted.
pub fn shares(pin: Pin, allowed: &[usize], ranks: usize) -> Option<Shares> {
    let wanted = pin == Pin::Auto && ranks > 0 && allowed.len() >= ranks;
    wanted.then(|| (0..ranks).map(|rank| part(allowed, ranks, rank).to_vec()).collect())
}

/// Of a rank's `cores`, those of one of its `threads`; all of them where there are more threads than cores.
pub fn of_thread(cores: &[usize], threads: usize, thread: usize) -> &[usize] {
    if threads > cores.len() { cores } else { part(cores, threads, thread) }
}

fn part(cores: &[usize], parts: usize, at: usize) -> &[usize] {
    &cores[cores.len() * at / parts..cores.len() * (at + 1) / parts]
}

/// What a person is told at the start.
pub fn sentence(pin: Pin, allowed: &[usize], ranks: usize) -> String {
    let Some(shares) = shares(pin, allowed, ranks) else {
        return match pin {
            Pin::Off => "ranks are not pinned to cores (layout.pin = off)".into(),
            Pin::Auto if allowed.is_empty() => {
                "ranks are not pinned: the system does not tell the allowed cores".into()
            }
            Pin::Auto => format!("ranks are not pinned: {ranks} of them, and {} allowed", count(allowed.len())),
        };
    };
    let one = |rank: usize| format!("rank {rank} to {}", named(&shares[rank]));
    if ranks > NAMED_MAX {
        return format!("pinned: {}, ..., {} (layout.pin)", one(0), one(ranks - 1));
    }
    format!("pinned: {} (layout.pin)", (0..ranks).map(one).collect::<Vec<_>>().join(", "))
}

fn count(cores: usize) -> String {
    if cores == 1 { "1 core".into() } else { format!("{cores} cores") }
}

/// Such as `core 3` or `cores 0-2,5`.
pub fn named(cores: &[usize]) -> String {
    let mut runs: Vec<RangeInclusive<usize>> = Vec::new();
    for &core in cores {
        match runs.last_mut() {
            Some(run) if run.end() + 1 == core => *run = *run.start()..=core,
            _ => runs.push(core..=core),
        }
    }
    let run = |r: &RangeInclusive<usize>| match r.end() - r.start() {
        0 => r.start().to_string(),
        _ => format!("{}-{}", r.start(), r.end()),
    };
    let list = runs.iter().map(run).collect::<Vec<_>>().join(",");
    if cores.len() == 1 { format!("core {list}") } else { format!("cores {list}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_neighbours_and_nobody_has_one_twice() {
        let allowed = [1, 2, 3, 6, 7];
        assert_eq!(shares(Pin::Auto, &allowed, 2), Some(vec![vec![1, 2], vec![3, 6, 7]]));
        assert_eq!(shares(Pin::Auto, &allowed, 1), Some(vec![allowed.to_vec()]));
        for ranks in 1..=5 {
            let shares = shares(Pin::Auto, &allowed, ranks).unwrap();
            assert_eq!(shares.concat(), allowed);
            assert!(shares.iter().all(|share| !share.is_empty()));
        }
        assert_eq!(shares(Pin::Auto, &allowed, 6), None, "fewer cores than ranks");
        assert_eq!(shares(Pin::Auto, &[], 1), None);
        assert_eq!(shares(Pin::Off, &allowed, 1), None);
    }

    #[test]
    fn threads_share_a_ranks_cores() {
        let cores = [4, 5, 8];
        assert_eq!((0..3).map(|t| of_thread(&cores, 3, t)).collect::<Vec<_>>(), [[4], [5], [8]]);
        assert_eq!(of_thread(&cores, 2, 1), [5, 8]);
        assert_eq!(of_thread(&cores, 4, 0), cores, "more threads than cores: the system places them");
    }

    #[test]
    fn the_sentence_says_who_keeps_to_what() {
        let of = |pin, allowed: &[usize], ranks| sentence(pin, allowed, ranks);
        assert_eq!(of(Pin::Auto, &[0, 1], 2), "pinned: rank 0 to core 0, rank 1 to core 1 (layout.pin)");
        assert_eq!(of(Pin::Auto, &[0, 1, 2, 7], 1), "pinned: rank 0 to cores 0-2,7 (layout.pin)");
        let many: Vec<_> = (0..20).collect();
        assert_eq!(of(Pin::Auto, &many, 10), "pinned: rank 0 to cores 0-1, ..., rank 9 to cores 18-19 (layout.pin)");
        assert_eq!(of(Pin::Auto, &[3], 2), "ranks are not pinned: 2 of them, and 1 core allowed");
        assert_eq!(of(Pin::Off, &[0, 1], 2), "ranks are not pinned to cores (layout.pin = off)");
    }

    #[test]
    fn a_thread_is_held_where_it_may_be() {
        let before = allowed();
        let one = *before.last().expect("this test runs somewhere");
        let held = std::thread::spawn(move || {
            hold(&[one]).expect("an allowed core");
            // What it starts inherits.
            std::thread::spawn(allowed).join().expect("no panic")
        });
        assert_eq!(held.join().expect("no panic"), [one]);
        assert_eq!(allowed(), before, "other threads are as they were");
        assert!(hold(&[]).is_err());
    }
}

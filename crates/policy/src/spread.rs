//! Which ranks share a host. Pure.
//!
//! Neighbouring ranks share most (tensor cells are next to each other), so the ranks of a host are neighbours. Mirrors are
//! laid out by blocks of hosts (`cluster.ranks_per_host`): a block here is a whole number of hosts.

use std::collections::BTreeMap;

/// Fills the empty `places` from `rest`: next to ranks of the same host where that is possible, a host's together otherwise.
pub(crate) fn neighbours<T: Copy, H: Ord + Copy>(
    mut places: Vec<Option<T>>,
    mut rest: Vec<T>,
    host: impl Fn(T) -> H,
) -> Vec<T> {
    for at in 0..places.len() {
        if places[at].is_some() {
            continue;
        }
        let near = |to: Option<usize>| to.and_then(|to| *places.get(to)?).map(&host);
        let beside = [near(at.checked_sub(1)), near(Some(at + 1))];
        let same = |h: &Option<H>| h.and_then(|h| rest.iter().position(|t| host(*t) == h));
        let chosen = beside.iter().find_map(same).or_else(|| {
            let mut count: BTreeMap<H, usize> = BTreeMap::new();
            rest.iter().for_each(|t| *count.entry(host(*t)).or_default() += 1);
            let most = count.values().copied().max()?;
            rest.iter().position(|t| count[&host(*t)] == most)
        });
        places[at] = chosen.map(|chosen| rest.remove(chosen));
    }
    places.into_iter().flatten().collect()
}

/// The smallest block of ranks of which every host has its ranks in one; all ranks, where no smaller one divides them.
pub(crate) fn block<H: PartialEq>(hosts: &[H]) -> usize {
    let ranks = hosts.len();
    let whole = |n: usize| (0..ranks).all(|a| (a + 1..ranks).all(|b| hosts[a] != hosts[b] || a / n == b / n));
    (1..ranks).filter(|n| ranks.is_multiple_of(*n)).find(|n| whole(*n)).unwrap_or(ranks.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(places: &[Option<&'static str>], rest: &[&'static str]) -> String {
        neighbours(places.to_vec(), rest.to_vec(), |name| name.as_bytes()[0]).join(" ")
    }

    #[test]
    fn ranks_of_a_host_are_neighbours() {
        assert_eq!(placed(&[None; 6], &["a1", "b1", "c1", "a2", "b2", "c2"]), "a1 a2 b1 b2 c1 c2");
        assert_eq!(placed(&[Some("a1"), None, None, Some("b1")], &["b2", "a2"]), "a1 a2 b2 b1");
        assert_eq!(placed(&[Some("a1"), None, Some("b1"), None], &["c1", "c2"]), "a1 c1 b1 c2");
        assert_eq!(placed(&[None; 2], &["a1", "b1", "b2"]), "b1 b2");
    }

    #[test]
    fn a_block_is_whole_hosts() {
        assert_eq!(block(&["a", "b", "c"]), 1);
        assert_eq!(block(&["a", "a", "b", "b"]), 2);
        assert_eq!(block(&["a", "a", "b", "c"]), 2);
        assert_eq!(block(&["a", "a", "a", "b"]), 4);
        assert_eq!(block(&["a", "b", "b", "c"]), 4);
        assert_eq!(block(&["a", "b", "a", "b"]), 4);
        assert_eq!(block(&["a", "a"]), 2);
        assert_eq!(block::<&str>(&[]), 1);
    }
}

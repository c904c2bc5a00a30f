//! The order of every sum: one fixed binary tree over the leaves `0..n`.
//!
//! `sum(lo..hi) = sum(lo..mid) + sum(mid..hi)`, with `mid - lo` the largest power of two
//! below `hi - lo`. A rank that holds neighbouring leaves may add the complete subtrees
//! among them by itself; whoever holds the rest adds those in the same tree, so the result
//! does not depend on who held what. This module knows the order only; callers bring the
//! values and the addition.

use std::ops::Range;

/// Where the tree cuts a node of `len` leaves: the largest power of two below `len`.
///
/// # Panics
/// If `len < 2`: a leaf has no cut.
pub fn cut(len: usize) -> usize {
    assert!(len >= 2, "a leaf has no cut");
    1 << (usize::BITS - 1 - (len - 1).leading_zeros())
}

/// The maximal nodes of the tree over `0..n` that lie inside `part`, ascending.
///
/// These are the finished subtrees that the holder of the leaves `part` sends.
/// An empty `part` has none.
pub fn subtrees(n: usize, part: Range<usize>) -> Vec<Range<usize>> {
    fn visit(node: Range<usize>, part: &Range<usize>, out: &mut Vec<Range<usize>>) {
        if node.end <= part.start || part.end <= node.start {
            return;
        }
        if part.start <= node.start && node.end <= part.end {
            out.push(node);
            return;
        }
        let mid = node.start + cut(node.len());
        visit(node.start..mid, part, out);
        visit(mid..node.end, part, out);
    }
    let mut out = Vec::new();
    if n > 0 {
        visit(0..n, &part, &mut out);
    }
    out
}

/// [`subtrees`] of the holder of several ranges of leaves, ascending; ranges that touch are one.
pub fn subtrees_of(n: usize, parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        match runs.last_mut() {
            Some(run) if run.end == part.start => run.end = part.end,
            _ => runs.push(part.clone()),
        }
    }
    runs.into_iter().flat_map(|run| subtrees(n, run)).collect()
}

/// True if the sum over `0..n` is that of two finished subtrees, one from each of two holders: one addition, which
/// commutes, so that either may be there first. `cells`: the leaves of each holder.
pub fn is_of_two(n: usize, cells: &[Vec<Range<usize>>]) -> bool {
    cells.len() == 2 && cells.iter().all(|cells| subtrees_of(n, cells).len() == 1)
}

/// True if `left` and `right` are the two children of one node of the tree over `0..n`.
fn siblings(n: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    if left.end != right.start {
        return false;
    }
    let mut node = 0..n;
    while node.len() >= 2 {
        let mid = node.start + cut(node.len());
        if node.start == left.start && node.end == right.end {
            return mid == left.end;
        }
        node = if right.end <= mid { node.start..mid } else { mid..node.end };
        if left.start < node.start || right.end > node.end {
            return false;
        }
    }
    false
}

/// Adds values in tree order as they arrive, like a binary counter.
///
/// Push subtrees in ascending order; two siblings that meet are added at once
/// (`left += right`), so of leaves without gaps at most log2(n) + 1 values are alive.
#[derive(Debug)]
pub struct Counter<T> {
    leaves: usize,
    stack: Vec<(Range<usize>, T)>,
}

impl<T> Counter<T> {
    /// An empty sum over the tree of `0..leaves`.
    pub fn new(leaves: usize) -> Self {
        Self { leaves, stack: Vec::new() }
    }

    /// Takes in the finished subtree `node`; `add(left, right)` must do `left += right`.
    ///
    /// Returns the values that were added away, for reuse as buffers.
    ///
    /// # Panics
    /// If `node` does not lie behind the subtree pushed before it.
    pub fn push(&mut self, node: Range<usize>, value: T, mut add: impl FnMut(&mut T, &T)) -> Vec<T> {
        if let Some((last, _)) = self.stack.last() {
            assert!(last.end <= node.start, "subtrees must be pushed in ascending order");
        }
        let mut spent = Vec::new();
        let (mut node, mut value) = (node, value);
        while let Some((left, _)) = self.stack.last() {
            if !siblings(self.leaves, left, &node) {
                break;
            }
            let (left, mut sum) = self.stack.pop().expect("just seen");
            add(&mut sum, &value);
            spent.push(std::mem::replace(&mut value, sum));
            node = left.start..node.end;
        }
        self.stack.push((node, value));
        spent
    }

    /// True if `node`, pushed next, is added at once to the subtree before it.
    pub fn meets(&self, node: &Range<usize>) -> bool {
        self.stack.last().is_some_and(|(left, _)| siblings(self.leaves, left, node))
    }

    /// The subtrees held now, ascending.
    pub fn nodes(&self) -> &[(Range<usize>, T)] {
        &self.stack
    }

    /// Ends the sum: the subtrees held, ascending.
    pub fn into_nodes(self) -> Vec<(Range<usize>, T)> {
        self.stack
    }

    /// The whole sum, if every leaf was pushed.
    pub fn into_total(mut self) -> Option<T> {
        match self.stack.len() {
            1 if self.stack[0].0 == (0..self.leaves) => self.stack.pop().map(|(_, value)| value),
            _ => None,
        }
    }
}

/// The tree sum of `f64` leaves, for the small sums (norm, loss). Empty is 0.
pub fn sum_f64(leaves: &[f64]) -> f64 {
    match leaves {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (left, right) = leaves.split_at(cut(leaves.len()));
            sum_f64(left) + sum_f64(right)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The law, written out: the order of additions as text.
    fn naive(range: Range<usize>) -> String {
        if range.len() == 1 {
            return range.start.to_string();
        }
        let mid = range.start + cut(range.len());
        format!("({}+{})", naive(range.start..mid), naive(mid..range.end))
    }

    fn add(left: &mut String, right: &String) {
        *left = format!("({left}+{right})");
    }

    #[test]
    fn cut_is_the_largest_power_of_two_below() {
        let want = [(2, 1), (3, 2), (4, 2), (5, 4), (8, 4), (9, 8), (16, 8)];
        for (len, mid) in want {
            assert_eq!(cut(len), mid, "len {len}");
        }
    }

    /// Context cells of several data cells: what lies between is at another holder.
    #[test]
    fn holders_with_gaps_keep_the_order() {
        for n in 2..20 {
            for holders in 2..=n {
                let mut owner: Vec<(Range<usize>, String)> = Vec::new();
                for first in 0..holders {
                    let mine: Vec<_> = (first..n).step_by(holders).map(|leaf| leaf..leaf + 1).collect();
                    let mut holder = Counter::new(n);
                    mine.iter().for_each(|leaf| drop(holder.push(leaf.clone(), leaf.start.to_string(), add)));
                    let held: Vec<_> = holder.nodes().iter().map(|(node, _)| node.clone()).collect();
                    assert_eq!(held, subtrees_of(n, &mine));
                    owner.extend(holder.into_nodes());
                }
                owner.sort_unstable_by_key(|(node, _)| node.start);
                let mut sum = Counter::new(n);
                owner.into_iter().for_each(|(node, value)| drop(sum.push(node, value, add)));
                assert_eq!(sum.into_total(), Some(naive(0..n)));
            }
        }
    }

    proptest! {
        /// Any split of the leaves over holders gives the additions of the law.
        #[test]
        fn any_holders_give_one_order(n in 1usize..40, seed in proptest::collection::vec(0usize..40, 0..6)) {
            let mut cuts: Vec<usize> = seed.into_iter().map(|c| c % (n + 1)).collect();
            cuts.extend([0, n]);
            cuts.sort_unstable();
            let mut owner = Counter::new(n);
            for part in cuts.windows(2) {
                let mut holder = Counter::new(n);
                for leaf in part[0]..part[1] {
                    holder.push(leaf..leaf + 1, leaf.to_string(), add);
                }
                let held: Vec<_> = holder.nodes().iter().map(|(r, _)| r.clone()).collect();
                prop_assert_eq!(held, subtrees(n, part[0]..part[1]));
                for (node, value) in holder.into_nodes() {
                    owner.push(node, value, add);
                }
            }
            prop_assert_eq!(owner.into_total(), Some(naive(0..n)));
        }
    }
}

//! Who holds which leaves and who owns which part of the vector. Pure.

use spec::tree;
use std::ops::Range;

/// The ordered sum over `leaves` vectors.
///
/// Member `i` holds the leaves `cells[i]` and brings the finished subtrees
/// [`tree::subtrees`]`(leaves, cells[i])`; it receives the part of the sum that `parts[i]`
/// names. All members must pass equal plans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducePlan {
    /// Number of leaves, at least 1.
    pub leaves: usize,
    /// Leaves of each member: ascending ranges, each leaf at one member; a member may have none.
    pub cells: Vec<Vec<Range<usize>>>,
    /// Ranges of the vector that each member owns, in the order of its `out`. Parts do not
    /// overlap; they need not cover the vector.
    pub parts: Vec<Vec<Range<usize>>>,
}

impl ReducePlan {
    /// A plan in which every member's leaves and part are one range each.
    pub fn new(leaves: usize, cells: Vec<Range<usize>>, parts: Vec<Range<usize>>) -> Self {
        let each = |ranges: Vec<Range<usize>>| ranges.into_iter().map(|range| vec![range]).collect();
        Self { leaves, cells: each(cells), parts: each(parts) }
    }

    /// Leaves and vector of `len` numbers shared out as evenly as can be.
    pub fn even(leaves: usize, members: usize, len: usize) -> Self {
        Self::new(leaves, even(leaves, members), even(len, members))
    }

    /// The finished subtrees that `member` brings, ascending.
    pub fn subtrees(&self, member: usize) -> Vec<Range<usize>> {
        tree::subtrees_of(self.leaves, &self.cells[member])
    }

    /// Numbers in the part of `member`.
    pub fn part_len(&self, member: usize) -> usize {
        part_len(&self.parts[member])
    }

    /// Says what is wrong with the plan for `members` members, if anything.
    pub(crate) fn check(&self, members: usize) -> Result<(), String> {
        if self.leaves == 0 {
            return Err("a sum over 0 leaves has no value".into());
        }
        if self.cells.len() != members {
            return Err(format!("cells for {} members, the group has {members}", self.cells.len()));
        }
        if let Some(member) = self.cells.iter().position(|cells| cells.windows(2).any(|w| w[1].start < w[0].end)) {
            return Err(format!("cells of member {member} are {:?}, they must ascend", self.cells[member]));
        }
        let mut all: Vec<&Range<usize>> = self.cells.iter().flatten().filter(|cells| !cells.is_empty()).collect();
        all.sort_unstable_by_key(|cells| cells.start);
        let mut next = 0;
        for cells in all {
            if cells.start != next {
                return Err(format!("cells {cells:?} follow 0..{next}: every leaf must have one holder"));
            }
            next = cells.end;
        }
        if next != self.leaves {
            return Err(format!("cells cover 0..{next}, the sum has {} leaves", self.leaves));
        }
        check_parts(&self.parts, members)
    }
}

/// `0..len` cut into `count` ranges whose lengths differ by at most 1.
pub(crate) fn even(len: usize, count: usize) -> Vec<Range<usize>> {
    (0..count).map(|i| len * i / count..len * (i + 1) / count).collect()
}

/// Numbers in a part.
pub(crate) fn part_len(part: &[Range<usize>]) -> usize {
    part.iter().map(ExactSizeIterator::len).sum()
}

/// The smallest vector that all parts fit into.
pub(crate) fn extent(parts: &[Vec<Range<usize>>]) -> usize {
    parts.iter().flatten().map(|range| range.end).max().unwrap_or(0)
}

/// Says what is wrong with `parts`, if anything.
pub(crate) fn check_parts(parts: &[Vec<Range<usize>>], members: usize) -> Result<(), String> {
    if parts.len() != members {
        return Err(format!("parts for {} members, the group has {members}", parts.len()));
    }
    let mut all: Vec<(usize, usize)> = Vec::new();
    for range in parts.iter().flatten() {
        if range.end < range.start {
            return Err(format!("part range {range:?} ends before it starts"));
        }
        if !range.is_empty() {
            all.push((range.start, range.end));
        }
    }
    all.sort_unstable();
    match all.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        Some(pair) => {
            let ((a, b), (c, d)) = (pair[0], pair[1]);
            Err(format!("parts overlap: {a}..{b} and {c}..{d}"))
        }
        None => Ok(()),
    }
}

/// The ranges of the vector behind the positions `block` of a part's concatenation.
pub(crate) fn segments(part: &[Range<usize>], block: Range<usize>) -> Vec<Range<usize>> {
    let mut out = Vec::new();
    let mut at = 0;
    for range in part {
        let (start, end) = (block.start.max(at), block.end.min(at + range.len()));
        if start < end {
            out.push(range.start + start - at..range.start + end - at);
        }
        at += range.len();
        if at >= block.end {
            break;
        }
    }
    out
}

/// Block number `index` of a part of `len` numbers; `None` behind the end.
pub(crate) fn block(len: usize, size: usize, index: usize) -> Option<Range<usize>> {
    let start = index.checked_mul(size)?;
    (start < len).then(|| start..len.min(start + size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn wrong_plans_are_named() {
        let good = ReducePlan::even(5, 3, 7);
        assert_eq!(good.check(3), Ok(()));
        let broken = |change: fn(&mut ReducePlan)| {
            let mut plan = good.clone();
            change(&mut plan);
            plan.check(3).unwrap_err()
        };
        assert!(good.check(2).unwrap_err().contains("cells for 3 members"));
        assert!(broken(|p| p.leaves = 0).contains("0 leaves"));
        assert!(broken(|p| p.leaves = 6).contains("0..5"));
        assert!(broken(|p| p.cells[1][0].start += 1).contains("one holder"));
        assert!(broken(|p| p.cells[1].insert(0, 4..5)).contains("member 1"));
        assert!(broken(|p| p.parts[2][0].start -= 1).contains("overlap"));
        assert!(broken(|p| p.parts.truncate(2)).contains("parts for 2"));
    }

    proptest! {
        /// Segments of all blocks, in order, are the part itself.
        #[test]
        fn blocks_cover_a_part_once(lens in proptest::collection::vec((0usize..5, 0usize..3), 0..6), size in 1usize..7) {
            let mut at = 0;
            let part: Vec<_> = lens.iter().map(|(len, gap)| {
                let range = at + gap..at + gap + len;
                at = range.end;
                range
            }).collect();
            let whole: Vec<usize> = part.iter().cloned().flatten().collect();
            let mut seen = Vec::new();
            let mut index = 0;
            while let Some(block) = block(part_len(&part), size, index) {
                let got: Vec<usize> = segments(&part, block.clone()).into_iter().flatten().collect();
                prop_assert_eq!(got.len(), block.len());
                seen.extend(got);
                index += 1;
            }
            prop_assert_eq!(seen, whole);
        }
    }
}

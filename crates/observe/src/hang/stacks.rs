//! Stacks of processes that hang.

use std::collections::BTreeMap;

/// Groups of equal stacks, the rarest first (then the one that lies deepest): `stacks` are (who, frames). Most of a healthy
/// group stands at one place; who stands alone is looked at first.
pub fn rarest<'a>(stacks: &'a [(u64, Vec<String>)]) -> Vec<(Vec<u64>, &'a [String])> {
    let mut same: BTreeMap<&'a [String], Vec<u64>> = BTreeMap::new();
    for (who, frames) in stacks {
        same.entry(frames).or_default().push(*who);
    }
    let mut groups: Vec<_> = same.into_iter().map(|(frames, who)| (who, frames)).collect();
    groups.sort_by_key(|(who, frames)| (who.len(), std::cmp::Reverse(frames.len())));
    groups
}

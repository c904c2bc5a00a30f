//! Who gives what to whom. Every rank derives the same list.

use std::collections::HashMap;
use std::ops::Range;

use control::wire::Piece;
use spec::Run;
use spec::tensors::STATE_CHUNK;

use super::holdings::{Holdings, Slot, holdings};

/// The most elements of one move: so that a large piece comes from several holders (4 MiB).
const MOVE_MAX: usize = 64 * STATE_CHUNK;

/// A kind of state that travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum What {
    /// Parameters.
    Params,
    /// Both moments of the optimizer.
    Moments,
}

impl What {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Params => 4,
            Self::Moments => 8,
        }
    }
}

/// Who has a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The rank of the earlier world that it was.
    pub before: usize,
    /// The rank in the new world.
    pub now: usize,
    /// The chunk of layers that holds it, of the earlier layout.
    pub chunk: usize,
    /// It is what it mirrors, and not what it updates.
    pub mirror: bool,
}

/// Elements of a slice, and who has them.
type Known = (Range<usize>, Source);

/// A piece on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// What.
    pub what: What,
    /// From where.
    pub from: Source,
    /// To which rank of the new world; a copy, if it is the same.
    pub to: usize,
    /// It is for what the receiver mirrors.
    pub mirror: bool,
    /// The piece, and the receiver's chunk.
    pub slot: Slot,
}

/// A piece that nobody has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// What.
    pub what: What,
    /// Who wants it.
    pub to: usize,
    /// It is for what it mirrors.
    pub mirror: bool,
    /// The piece, and the receiver's chunk.
    pub slot: Slot,
}

/// All moves, in an order in which all ranks can run their own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// What is done.
    pub moves: Vec<Move>,
    /// What cannot be done.
    pub lost: Vec<Lost>,
}

impl Plan {
    /// What nobody has, in words; none: all is there. `run` is that of the new world.
    pub fn names_lost(&self, run: &Run) -> Option<String> {
        let Lost { what, slot, .. } = self.lost.first()?;
        let name = spec::tensors::tensors(&run.model).get(slot.tensor).map_or(String::new(), |t| t.name.clone());
        let what = if *what == What::Params { "parameters" } else { "moments" };
        let (slice, elements, others) = (slot.slice, &slot.elements, self.lost.len() - 1);
        Some(format!("{what} of {name} (slice {slice}, elements {elements:?}, and {others} other pieces)"))
    }
}

/// Moves what the ranks of `before` hold to where those of `after` want it. `holders`: by rank of `before` the rank in
/// `after` that has its state, if any has. Both runs have the same model and grid.
///
/// `corrupt`, by rank of `before`: pieces that are not what was written there, or fewer ranks if the others have none.
///
/// A source of a piece is who updates it: other copies of parameters may be a step behind when a world ends. A rank's own
/// copy comes first, then the source that has given least.
pub fn plan(before: &Run, holders: &[Option<usize>], corrupt: &[&[Piece]], after: &Run) -> Plan {
    // By tensor and slice.
    let mut sources: HashMap<(usize, usize), Vec<Known>> = HashMap::new();
    for (rank, held) in holdings(before).into_iter().enumerate() {
        let Some(now) = holders.get(rank).copied().flatten() else { continue };
        let owned = held.owned.into_iter().map(|slot| (false, slot));
        for (mirror, slot) in owned.chain(held.mirrored.into_iter().map(|slot| (true, slot))) {
            let Slot { chunk, tensor, slice, elements } = slot;
            let source = Source { before: rank, now, chunk, mirror };
            let bad = corrupt.get(rank).copied().unwrap_or_default().iter();
            let bad =
                bad.filter(|p| (p.tensor, p.slice, p.mirror) == (tensor, slice, mirror)).map(|p| p.elements.clone());
            for elements in without(elements, bad) {
                sources.entry((tensor, slice)).or_default().push((elements, source));
            }
        }
    }
    let mut out = Plan::default();
    // There may be more holders than places, when it is asked who of them is needed.
    let holding = holders.iter().flatten().map(|now| now + 1).max().unwrap_or(0);
    let mut given = vec![0; after.layout.world().max(holding)];
    for (to, wanted) in holdings(after).into_iter().enumerate() {
        for (what, mirror, slot) in wants(wanted) {
            let known = sources.get(&(slot.tensor, slot.slice)).map_or(&[][..], Vec::as_slice);
            for elements in cut(&slot.elements, known) {
                let slot = Slot { elements, ..slot.clone() };
                let has = |(range, _): &&Known| range.start <= slot.elements.start && slot.elements.end <= range.end;
                let least =
                    known.iter().filter(has).map(|(_, s)| *s).min_by_key(|s| (s.now != to, given[s.now], s.now));
                match least {
                    Some(from) => {
                        if from.now != to {
                            given[from.now] += what.bytes() * slot.elements.len();
                        }
                        out.moves.push(Move { what, from, to, mirror, slot });
                    }
                    None => out.lost.push(Lost { what, to, mirror, slot }),
                }
            }
        }
    }
    // Round by round each rank gives to one and gets from one.
    let world = after.layout.world();
    out.moves.sort_by_key(|m| ((m.to + world - m.from.now % world) % world, m.from.now));
    out
}

/// What is left of `whole` without `bad`.
fn without(whole: Range<usize>, bad: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut left = vec![whole];
    for bad in bad {
        let parts = |r: Range<usize>| [r.start..r.end.min(bad.start), r.start.max(bad.end)..r.end];
        left = left.into_iter().flat_map(parts).filter(|r| r.start < r.end).collect();
    }
    left
}

/// What a rank needs to keep `held`: each piece, and whether it is of what it mirrors.
fn wants(held: Holdings) -> impl Iterator<Item = (What, bool, Slot)> {
    let of = |what, mirror, slots: Vec<Slot>| slots.into_iter().map(move |slot| (what, mirror, slot));
    let own = of(What::Params, false, held.params).chain(of(What::Moments, false, held.owned));
    let mirrored = of(What::Params, true, held.mirrored.clone()).chain(of(What::Moments, true, held.mirrored));
    own.chain(mirrored)
}

/// `wanted` in pieces that a source has whole or not at all.
fn cut(wanted: &Range<usize>, sources: &[Known]) -> Vec<Range<usize>> {
    let inside = |at: &usize| wanted.start < *at && *at < wanted.end;
    let regular = (wanted.start / MOVE_MAX + 1..).map(|n| n * MOVE_MAX).take_while(|at| *at < wanted.end);
    let mut ends: Vec<_> = sources.iter().flat_map(|(range, _)| [range.start, range.end]).chain(regular).collect();
    ends.retain(inside);
    ends.push(wanted.end);
    ends.sort_unstable();
    ends.dedup();
    let starts = std::iter::once(wanted.start).chain(ends.iter().copied()).collect::<Vec<_>>();
    starts.into_iter().zip(ends).map(|(start, end)| start..end).collect()
}

#[cfg(test)]
mod tests;

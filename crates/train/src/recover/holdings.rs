//! What a rank keeps between two steps, by the layout alone.

use std::ops::Range;

use program::Mirrors;
use program::buckets::ChunkPlan;
use spec::{Coords, Grid, Layout, Model, Run};

use crate::state::{Held, of_chunk};

/// A piece of a tensor on a rank: whole state chunks of one slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// The chunk of layers that holds it there; a tied embedding may be on two.
    pub chunk: usize,
    /// The tensor, index in canonical order.
    pub tensor: usize,
    /// The tensor cell's slice.
    pub slice: usize,
    /// Elements of the slice.
    pub elements: Range<usize>,
}

/// What one rank keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Parameters that stay over a step, whoever updates them.
    pub params: Vec<Slot>,
    /// State that it updates: parameters and both moments.
    pub owned: Vec<Slot>,
    /// Likewise what it mirrors of another rank.
    pub mirrored: Vec<Slot>,
}

/// What each rank keeps under the layout of `run`, by rank.
pub fn holdings(run: &Run) -> Vec<Holdings> {
    let Run { model, grid, layout, .. } = run;
    // By place in a group, on which the experts depend, then by chunk.
    let of_place = |place| {
        let at = Coords { dp: place, ..layout.coords(0) };
        (0..layout.chunks()).map(|chunk| ChunkPlan::new(model, grid, layout, chunk, at)).collect()
    };
    let plans: Vec<Vec<_>> = (0..layout.group).map(of_place).collect();
    let mut of_ranks: Vec<_> = (0..layout.world()).map(|rank| of_rank(model, grid, layout, &plans, rank)).collect();
    if let Some(mirrors) = Mirrors::of(layout) {
        for rank in 0..layout.world() {
            of_ranks[rank].0.mirrored = of_ranks[mirrors.ward(layout, rank)].1.clone();
        }
    }
    of_ranks.into_iter().map(|(held, _)| held).collect()
}

/// What it keeps but for what it mirrors, and what its mirror keeps of it.
fn of_rank(
    model: &Model,
    grid: &Grid,
    layout: &Layout,
    plans: &[Vec<ChunkPlan>],
    rank: usize,
) -> (Holdings, Vec<Slot>) {
    let at = layout.coords(rank);
    let plans = &plans[at.dp % layout.group];
    let mut mirrored = Vec::new();
    let mut all = Holdings::default();
    for chunk in layout.chunks_of(at.pp) {
        let held = of_chunk(model, grid, layout, &plans[chunk], chunk, at.tp);
        for bucket in plans[chunk].buckets.iter().filter(|bucket| bucket.parameters) {
            let owned = slots(&held, chunk, &bucket.owned(at));
            if layout.zero == 3 {
                all.params.extend(owned.iter().cloned());
            } else {
                all.params.extend(slots(&held, chunk, &bucket.at));
            }
            if layout.mirrors(bucket.bucket.class()) {
                mirrored.extend(owned.iter().cloned());
            }
            all.owned.extend(owned);
        }
    }
    (all, mirrored)
}

fn slots(held: &[Held], chunk: usize, range: &Range<usize>) -> Vec<Slot> {
    let of = |held: &Held| {
        let tensor = held.index;
        let slot = move |(slice, elements, _)| Slot { chunk, tensor, slice, elements };
        held.pieces(range).map(slot).collect::<Vec<_>>()
    };
    held.iter().flat_map(of).collect()
}

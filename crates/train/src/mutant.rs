//! Deliberate faults that the proof must catch; never set outside of `cargo xtask prove` and tests.
//!
//! Each is one deviation at one place, of the kind that a mistake or a careless layout would bring. Deviations that
//! change no bit are no mutants, because addition of two commutes:
//!
//! - the shares of a tied embedding swapped across stages in the other order (output + input);
//! - the first two microbatches of a cell swapped, or two tensor cells swapped;
//! - all leaves of a tree of 2^k reversed: every node only swaps its two children.
//!
//! So the mutants below rotate or regroup instead.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use fabric::ReducePlan;
use program::Pass;
use serde::{Deserialize, Serialize};
use spec::{Grid, Leaf, Unit};

use crate::buffers::{LossSum, Tokens};
use crate::error::TrainError;
use crate::state::ChunkState;

macro_rules! mutants {
    ($($variant:ident $name:literal $what:literal;)+) => {
        /// A deliberate fault.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Mutant {
            $(#[doc = $what] $variant),+
        }

        impl Mutant {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// What is wrong, in a few words.
            pub fn what(self) -> &'static str {
                match self { $(Self::$variant => $what),+ }
            }
        }

        impl fmt::Display for Mutant {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $name),+ })
            }
        }
    };
}

mutants! {
    KeyGradsRotated "key-grads-rotated" "key gradients of the hosted context cells added one place further round";
    ChunkOfNext "chunk-of-next" "a context cell has the chunks of the next one";
    MaskByLocal "mask-by-local" "causal masks by the position among the queries of a context cell instead of the sequence";
    RanksAsLeaves "ranks-as-leaves" "gradients over dp: a tree over ranks instead of the tree over data cells";
    MicrobatchesReversed "microbatches-reversed" "microbatches of a data cell accumulated last to first";
    NormOwnSlice "norm-own-slice" "norm gradients not reduced over the tensor ranks";
    PartialsRotated "partials-rotated" "partial outputs of the hosted tensor cells added one place further round";
    SoftmaxRotated "softmax-rotated" "sums over vocabulary slices added one place further round";
    TiedOneAccumulator "tied-one-accumulator" "both uses of a tied embedding added into one accumulator";
    TiedOneSided "tied-one-sided" "the last stage does not add the input use of a tied embedding";
    PaddingCounted "padding-counted" "tokens without a target counted";
    OwnTokens "own-tokens" "gradients divided by the tokens of this rank alone";
    MasksIgnored "masks-ignored" "documents of one sequence see each other";
    PositionsGoOn "positions-go-on" "positions do not restart with a document";
    LastChunkLost "last-chunk-lost" "the owner of a ZeRO-1 shard updates its last state chunk without its gradient";
    TokenDropped "token-dropped" "the first row of a microbatch does not reach its first expert";
    GatesNotRenormed "gates-not-renormed" "gates are not divided by the sum of the chosen scores";
    CombineInOneBlock "combine-in-one-block" "experts of a row added as one block: a chain instead of the tree over blocks";
    GroupReversed "group-reversed" "rows of a group enter the products of expert gradients last data cell first";
    ExpertsOwnSlice "experts-own-slice" "expert gradients not reduced over the tensor ranks";
    ExpertsOtherGroup "experts-other-group" "expert gradients summed over the ranks that share a group's experts, not over those that hold the same ones";
    CellsMixed "cells-mixed" "gradients of a data cell that opens early go to the cell before";
    RecomputeUnmasked "recompute-unmasked" "recomputed attention does not know the documents";
    LeafTwice "leaf-twice" "an owner of gradients sums one leaf twice";
    StaleShard "stale-shard" "parameters gathered for a use are those of the gather before";
    StalePanels "stale-panels" "weights that were packed once are not packed again after an update";
    MomentsForgotten "moments-forgotten" "second moments not read from the checkpoint";
}

impl FromStr for Mutant {
    type Err = TrainError;

    fn from_str(name: &str) -> Result<Self, TrainError> {
        Self::ALL.iter().copied().find(|m| m.to_string() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(ToString::to_string).collect();
            TrainError::BadInput(format!("--mutant {name}: there are {}", names.join(", ")))
        })
    }
}

/// One place further round for [`Mutant::PartialsRotated`], [`Mutant::SoftmaxRotated`] and [`Mutant::KeyGradsRotated`].
pub(crate) fn rotated(on: bool, i: usize, count: usize) -> usize {
    (i + usize::from(on)) % count
}

/// [`Mutant::ChunkOfNext`].
pub(crate) fn context(mutant: Option<Mutant>, context: usize, cells: usize) -> usize {
    rotated(mutant == Some(Mutant::ChunkOfNext), context, cells)
}

/// [`Mutant::MicrobatchesReversed`].
pub(crate) fn unit(mutant: Option<Mutant>, grid: &Grid, unit: Unit) -> Unit {
    match mutant {
        Some(Mutant::MicrobatchesReversed) => Unit { mb: grid.microbatches - 1 - unit.mb, ..unit },
        _ => unit,
    }
}

/// [`Mutant::MasksIgnored`] and [`Mutant::PositionsGoOn`].
pub(crate) fn tokens(mutant: Option<Mutant>, seq: usize, mut tokens: Tokens) -> Tokens {
    match mutant {
        Some(Mutant::MasksIgnored) => tokens.doc_start.fill(0),
        Some(Mutant::PositionsGoOn) => {
            tokens.positions.iter_mut().enumerate().for_each(|(i, position)| *position = (i % seq) as u32);
        }
        _ => {}
    }
    tokens
}

/// [`Mutant::RanksAsLeaves`], for member `me` with one finished subtree.
pub(crate) fn leaves(mutant: Option<Mutant>, plan: &mut ReducePlan, mine: &mut [(Range<usize>, &[f32])], me: usize) {
    if mutant == Some(Mutant::RanksAsLeaves) {
        let (ranks, parts) = (plan.cells.len(), std::mem::take(&mut plan.parts));
        *plan =
            ReducePlan { parts, ..ReducePlan::new(ranks, (0..ranks).map(|rank| rank..rank + 1).collect(), Vec::new()) };
        mine[0].0 = me..me + 1;
    }
}

/// [`Mutant::OwnTokens`].
pub(crate) fn step_loss(mutant: Option<Mutant>, all: LossSum, own: &HashMap<Leaf, LossSum>) -> LossSum {
    match mutant {
        Some(Mutant::OwnTokens) => LossSum { tokens: own.values().map(|sum| sum.tokens).sum(), ..all },
        _ => all,
    }
}

/// [`Mutant::CellsMixed`]: what gradients of `leaf` go to.
pub(crate) fn leaf(mutant: Option<Mutant>, state: &ChunkState, leaf: Unit) -> Unit {
    let open = state.grads.at_hand().filter(|_| mutant == Some(Mutant::CellsMixed));
    open.unwrap_or(leaf)
}

/// [`Mutant::RecomputeUnmasked`]: document starts of `rows` rows, if they are not those of the tokens.
pub(crate) fn unmasked(mutant: Option<Mutant>, pass: Pass, rows: usize) -> Option<Vec<u32>> {
    (mutant == Some(Mutant::RecomputeUnmasked) && pass != Pass::Forward).then(|| vec![0; rows])
}

/// [`Mutant::LastChunkLost`].
pub(crate) fn shard(mutant: Option<Mutant>, state: &mut ChunkState) {
    if mutant == Some(Mutant::LastChunkLost)
        && let Some(bucket) = state.buckets.iter_mut().rev().find(|b| !b.total.is_empty())
    {
        let first = bucket.total.len().saturating_sub(spec::tensors::STATE_CHUNK);
        bucket.total[first..].fill(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_a_wrong_one_lists_them() {
        for mutant in Mutant::ALL {
            assert_eq!(mutant.to_string().parse::<Mutant>().unwrap(), *mutant);
        }
        let error = "off-by-one".parse::<Mutant>().unwrap_err().to_string();
        assert!(error.contains("off-by-one") && error.contains("softmax-rotated"), "{error}");
    }
}

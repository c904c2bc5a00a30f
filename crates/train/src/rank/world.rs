//! Between a rank and who runs it: how it begins, what it shows and says, how it ends and what is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use control::wire::Piece;
use events::wall::Wall;
use events::{Event, Step};
use kernels::Ctx;
use serde::{Deserialize, Serialize};

use crate::best::Best;
use crate::error::TrainError;
use crate::exec::Verdict;
use crate::guard::Guard;
use crate::recover::Peers;
use crate::state::ChunkState;

/// Where a rank's state comes from.
#[derive(Debug)]
pub enum Start {
    /// Initial weights, or the folder that the run names.
    Fresh,
    /// A checkpoint.
    Disk(PathBuf),
    /// The ranks of an earlier world.
    Peers(Box<Peers>),
}

/// What a rank shows of itself to whoever looks, at any time.
#[derive(Debug, Default)]
pub struct Pulse {
    /// The last committed step.
    pub step: AtomicU64,
    /// Instructions run.
    pub work: AtomicU64,
    /// A fault that was asked for: what this process computes is wrong from now on.
    pub broken: AtomicBool,
    /// The wall clock as this process reads it.
    pub wall: Wall,
    /// What this process has needed memory for.
    pub footprint: Footprint,
}

/// The plans that a process's largest resident memory is compared with: it outlives worlds, and each has a plan.
#[derive(Debug, Default)]
pub struct Footprint {
    base: AtomicU64,
    planned: AtomicU64,
    worlds: AtomicU64,
}

impl Footprint {
    /// A world begins, for a rank that is planned to take `planned` bytes; `resident`: what the process has before that. What
    /// it has when a later world begins is of the one before.
    pub fn enter(&self, resident: u64, planned: u64) {
        if self.worlds.fetch_add(1, Ordering::Relaxed) == 0 {
            self.base.store(resident, Ordering::Relaxed);
        }
        self.planned.fetch_max(planned, Ordering::Relaxed);
    }

    /// Resident before there was any state, the largest plan (both in bytes), and in how many worlds this process was.
    pub fn so_far(&self) -> (u64, u64, u64) {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        (of(&self.base), of(&self.planned), of(&self.worlds))
    }
}

/// What a rank says while it runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// Something happened.
    Event(Event),
    /// The digest at the end, which all ranks know and any of them may live to tell.
    Digest(Event),
    /// A step that is decided, of which nobody may have told, because its world ends.
    Carried(Step),
    /// What this rank made of the leaves of a committed step, which spares check: (leaf, hash of its gradients).
    Leaves {
        /// The step.
        step: u64,
        /// By leaf.
        leaves: Vec<(u64, u64)>,
    },
    /// The state is here and verified.
    Loaded {
        /// The last committed step in it.
        step: u64,
        /// Bytes that came from peers or disk.
        bytes: u64,
        /// Seconds that this took.
        seconds: f64,
    },
}

/// The end of a rank before its time.
#[derive(Debug)]
pub struct Ending {
    /// Why.
    pub error: TrainError,
    /// What it holds, if it got that far.
    pub remains: Option<Box<Remains>>,
}

impl From<TrainError> for Ending {
    fn from(error: TrainError) -> Self {
        Self { error, remains: None }
    }
}

/// What is left of a world on a rank.
#[derive(Debug)]
pub struct Remains {
    /// The world; 0: the one that has just ended.
    pub generation: u64,
    /// All ranks of it had said that they had their state.
    pub settled: bool,
    /// The rank, in that world.
    pub rank: usize,
    /// State by chunk.
    pub chunks: BTreeMap<usize, ChunkState>,
    /// The rank whose state is mirrored here, and that state by its chunks.
    pub mirrors: Option<(usize, BTreeMap<usize, ChunkState>)>,
    /// The last step whose update is whole in it.
    pub step: u64,
    /// The gradients of the step after it are complete.
    pub prepared: bool,
    /// The last vote that this rank saw.
    pub decided: Option<Verdict>,
    /// State that is not what was written.
    pub corrupt: Vec<Piece>,
    /// What was.
    pub guard: Guard,
    /// Validations up to the last step, without those that follow it.
    pub best: Best,
    /// What this world started from, as long as it is not settled.
    pub before: Option<Box<Remains>>,
}

impl Remains {
    /// What is held of world `generation`; the rest is given up.
    pub fn of(self: Box<Self>, generation: u64) -> Option<Box<Self>> {
        let mut held = Some(self);
        while let Some(mut remains) = held {
            if remains.generation == generation {
                remains.before = None;
                return Some(remains);
            }
            held = remains.before.take();
        }
        None
    }

    /// Looks again: memory may have changed since the world ended.
    pub fn look(&mut self, ctx: &Ctx) {
        let mirrored = self.mirrors.iter().flat_map(|(_, chunks)| chunks.values());
        let bad = self.guard.check(ctx, self.chunks.values().chain(mirrored), self.chunks.len());
        let new: Vec<_> = bad.into_iter().filter(|piece| !self.corrupt.contains(piece)).collect();
        self.corrupt.extend(new);
    }

    /// The vote of the last step was to stop after it.
    pub fn stops(&self) -> bool {
        self.decided.as_ref().is_some_and(|verdict| verdict.step == self.step && verdict.decision.stop)
    }
}

/// How a rank ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// All steps done.
    Finished,
    /// Stopped on request, after a checkpoint at this step.
    Stopped(u64),
    /// Ended after this step: `train.patience` validations in a row brought no new best.
    Exhausted(u64),
}

#[cfg(test)]
mod tests {
    use kernels::Simd;
    use spec::Run;

    use super::*;
    use crate::place::Place;

    const RUN: &str = "[model]\npreset = \"tiny\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 32\n[grid]\ndp = 2\n";

    #[test]
    fn what_changes_after_a_world_has_ended_is_named_once() {
        let ctx = Ctx::new(Simd::detect(), 1);
        let run = Run::parse(RUN, "test", &["layout.dp=2".into(), "layout.zero=1".into()], 1).unwrap();
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, 0);
        let ward = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, 1);
        let (state, mirrored) = (ChunkState::new(&run, &place, 0), ChunkState::mirror(&run, &ward, 0));
        let mut guard = Guard::default();
        guard.fill(&ctx, [&state, &mirrored].into_iter());
        let mut remains = Remains {
            generation: 1,
            settled: true,
            rank: 0,
            chunks: BTreeMap::from([(0, state)]),
            mirrors: Some((1, BTreeMap::from([(0, mirrored)]))),
            step: 1,
            prepared: false,
            decided: None,
            corrupt: Vec::new(),
            guard,
            best: Best::default(),
            before: None,
        };
        remains.look(&ctx);
        assert_eq!(remains.corrupt, []);
        let mirrored = remains.mirrors.as_mut().unwrap().1.get_mut(&0).unwrap();
        let bucket = mirrored.buckets.iter().position(|b| !b.moment1.is_empty()).unwrap();
        mirrored.buckets[bucket].moment1[0] = f32::from_bits(1);
        remains.look(&ctx);
        let first = remains.corrupt.clone();
        assert!(!first.is_empty() && first.iter().all(|piece| piece.mirror), "{first:?}");
        remains.look(&ctx);
        assert_eq!(remains.corrupt, first);
    }
}

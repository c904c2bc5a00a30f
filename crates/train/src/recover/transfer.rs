//! Runs a plan over the fabric of the new world.

use std::collections::BTreeMap;

use control::wire::Piece;
use serde::{Deserialize, Serialize};
use spec::Run;

use super::plan::{Move, Plan, What, plan};
use crate::best::Best;
use crate::error::TrainError;
use crate::exec::{Executor, Verdict};
use crate::rank::Remains;
use crate::state::{BucketState, ChunkState};

/// What is known of an earlier world, and what of it is here.
#[derive(Debug)]
pub struct Peers {
    /// Its run.
    pub before: Run,
    /// By its ranks: the rank in this world that holds their state.
    pub holders: Vec<Option<u32>>,
    /// The step that all are brought to.
    pub step: u64,
    /// The decision that who is one step behind applies first.
    pub forward: Option<Verdict>,
    /// What this process holds of it.
    pub remains: Option<Box<Remains>>,
    /// This rank has its state, and validations up to here, although not all others may have theirs.
    pub whole: Option<Best>,
}

/// What a rank tells all others before anything travels.
#[derive(Serialize, Deserialize)]
struct Claim {
    /// The rank of the earlier world whose state it has, at the step.
    holds: Option<usize>,
    /// What of it is not what was written.
    corrupt: Vec<Piece>,
    /// Validations before those that follow the step.
    best: Option<Best>,
    /// The step's vote was to stop after it.
    stop: bool,
}

/// What a world goes on from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fetched {
    /// Validations before those that follow the step.
    pub best: Best,
    /// The step's vote was to stop after it.
    pub stop: bool,
    /// Bytes that came from other ranks.
    pub bytes: u64,
}

/// Fills the state of this rank, which has no value yet, from the ranks of the earlier world. All ranks call it; none
/// returns well before all have what they need. `peers` stays whole: if this world fails here, the next one starts from it.
///
/// # Errors
/// [`TrainError::Lost`] on every rank if a piece has no holder; the fabric's.
pub fn fetch(executor: &mut Executor, peers: &mut Peers) -> Result<Fetched, TrainError> {
    let Peers { before, holders, step, forward, remains, whole } = peers;
    if (&before.model, &before.grid) != (&executor.run.model, &executor.run.grid) {
        return Err(TrainError::Internal("the earlier world had another model or grid".into()));
    }
    let me = executor.place.rank;
    let mine = holders.iter().position(|now| *now == Some(me as u32));
    if let (Some(mine), Some(remains)) = (mine, remains.as_deref_mut()) {
        remains.look(executor.ctx);
        roll_forward(executor, before, remains, mine, *step, forward.as_ref());
    }
    let held = remains.as_deref().filter(|remains| mine == Some(remains.rank) && remains.step == *step);
    let claim = Claim {
        holds: held.map(|remains| remains.rank),
        // What is not as it was written is no source.
        corrupt: held.map_or(Vec::new(), |remains| remains.corrupt.clone()),
        best: held.map(|remains| remains.best),
        stop: held.is_some_and(|remains| remains.stops()),
    };
    let claims = all_claims(executor, &claim)?;
    let holders: Vec<_> = (0..holders.len()).map(|rank| claims.iter().position(|c| c.holds == Some(rank))).collect();
    let bad = |holder: &Option<usize>| holder.map_or(&[][..], |now| &claims[now].corrupt);
    let plan = plan(before, &holders, &holders.iter().map(bad).collect::<Vec<_>>(), executor.run);
    let bytes = carry_out(executor, &plan, held)?;
    executor.remember();
    let best = claims.iter().find_map(|claim| claim.best).unwrap_or_default();
    *whole = Some(best);
    executor.strike_loading(*step + 1);
    // Nobody gives up what it held before all have what they need.
    all_claims(executor, &claim)?;
    executor.comm.endpoint.take_counters();
    Ok(Fetched { best, stop: claims.iter().any(|claim| claim.stop), bytes })
}

/// Applies the step that others have committed, if this rank has its gradients.
fn roll_forward(
    executor: &Executor,
    before: &Run,
    remains: &mut Remains,
    mine: usize,
    step: u64,
    forward: Option<&Verdict>,
) {
    let Some(verdict) = forward.filter(|verdict| verdict.step == step) else { return };
    if remains.rank == mine && remains.prepared && remains.step + 1 == step {
        let mirrored = remains.mirrors.iter_mut().flat_map(|(_, chunks)| chunks.values_mut());
        for (number, state) in remains.chunks.values_mut().chain(mirrored).enumerate() {
            let written = verdict.apply(executor.ctx, before, state, before.guard.hash_state);
            remains.guard.wrote(number, state, written);
        }
        (remains.step, remains.prepared, remains.decided) = (step, false, Some(verdict.clone()));
    }
}

fn all_claims(executor: &Executor, mine: &Claim) -> Result<Vec<Claim>, TrainError> {
    let unclear = |e: serde_json::Error| TrainError::Internal(format!("a peer's claim is unclear: {e}"));
    let mine = serde_json::to_vec(mine).map_err(unclear)?;
    let all = executor.comm.endpoint.all_gather_bytes(&executor.comm.world, &mine)?;
    all.iter().map(|claim| serde_json::from_slice(claim).map_err(unclear)).collect()
}

/// This rank's part of the plan; the bytes that came from others.
fn carry_out<'h>(executor: &mut Executor, plan: &Plan, held: Option<&'h Remains>) -> Result<u64, TrainError> {
    if let Some(lost) = plan.names_lost(executor.run) {
        return Err(TrainError::Lost(format!("nobody holds {lost}")));
    }
    let Executor { chunks, mirrors, comm, place, .. } = executor;
    let me = place.rank;
    let source = |m: &Move| {
        let of = |held: &'h Remains| match m.from.mirror {
            true => held.mirrors.as_ref().and_then(|(_, chunks)| chunks.get(&m.from.chunk)),
            false => held.chunks.get(&m.from.chunk),
        };
        let state = held.and_then(of);
        state.ok_or_else(|| TrainError::Internal(format!("chunk {} is not here", m.from.chunk)))
    };
    let (mut bytes, mut buffer) = (0, Vec::new());
    for m in &plan.moves {
        let (gives, gets) = (m.from.now == me, m.to == me);
        for vector in 0..m.what.bytes() / 4 {
            let from = if gives { Some(vector_of(source(m)?, m, vector)?) } else { None };
            match (from, gets) {
                (Some(from), true) => vector_into(target(chunks, mirrors, m), m, vector)?.copy_from_slice(from),
                (Some(from), false) => comm.endpoint.send(&comm.world, m.to, from)?,
                (None, true) => {
                    buffer.resize(m.slot.elements.len(), 0.0);
                    comm.endpoint.recv(&comm.world, m.from.now, &mut buffer)?;
                    vector_into(target(chunks, mirrors, m), m, vector)?.copy_from_slice(&buffer);
                    bytes += 4 * buffer.len() as u64;
                }
                (None, false) => {}
            }
        }
    }
    executor.states().flat_map(|state| &state.buckets).for_each(BucketState::rest);
    Ok(bytes)
}

/// By chunk.
type Chunks = BTreeMap<usize, ChunkState>;

/// The state that a move fills.
fn target<'s>(
    chunks: &'s mut Chunks,
    mirrors: &'s mut Option<(usize, Chunks)>,
    m: &Move,
) -> Option<&'s mut ChunkState> {
    let chunks = if m.mirror { &mut mirrors.as_mut()?.1 } else { chunks };
    chunks.get_mut(&m.slot.chunk)
}

fn absent(m: &Move) -> TrainError {
    TrainError::Internal(format!("{:?} is not held where the layout says", m.slot))
}

/// Vector number `vector` of a move: parameters, or one of the two moments.
fn vector_of<'s>(state: &'s ChunkState, m: &Move, vector: usize) -> Result<&'s [f32], TrainError> {
    let (bucket, at) = state.place_of(m.slot.tensor, m.slot.slice, &m.slot.elements).ok_or_else(|| absent(m))?;
    let (params, kept) = state.kept(bucket);
    let bucket = &state.buckets[bucket];
    let (data, range) = match (m.what, vector) {
        (What::Params, _) => (params, kept),
        (What::Moments, 0) => (&bucket.moment1[..], bucket.owned.clone()),
        (What::Moments, _) => (&bucket.moment2[..], bucket.owned.clone()),
    };
    let inside = range.start <= at.start && at.end <= range.end;
    if inside { Ok(&data[at.start - range.start..at.end - range.start]) } else { Err(absent(m)) }
}

fn vector_into<'s>(state: Option<&'s mut ChunkState>, m: &Move, vector: usize) -> Result<&'s mut [f32], TrainError> {
    let state = state.ok_or_else(|| absent(m))?;
    let (bucket, at) = state.place_of(m.slot.tensor, m.slot.slice, &m.slot.elements).ok_or_else(|| absent(m))?;
    let (data, range) = match (m.what, vector) {
        (What::Params, _) => state.kept_mut(bucket),
        (What::Moments, n) => {
            let bucket = &mut state.buckets[bucket];
            let moment = if n == 0 { &mut bucket.moment1 } else { &mut bucket.moment2 };
            (&mut moment[..], bucket.owned.clone())
        }
    };
    let inside = range.start <= at.start && at.end <= range.end;
    if inside { Ok(&mut data[at.start - range.start..at.end - range.start]) } else { Err(absent(m)) }
}

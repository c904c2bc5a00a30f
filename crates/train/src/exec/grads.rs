//! Ordered sums of gradients, and updated parameters from their owners.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;

use fabric::{Group, ReducePlan};
use kernels::Ctx;
use program::buckets::BucketPlan;
use program::{Axis, Bucket, Exchange, Instr};
use spec::tree::Counter;
use spec::{Accumulate, Class, Grid, Run, Unit};

use super::{Executor, unhosted, unit_of};
use crate::comm::Comm;
use crate::error::TrainError;
use crate::fault;
use crate::leaves;
use crate::mutant::{self, Mutant};
use crate::place::Place;
use crate::segments;
use crate::state::{BucketState, ChunkState};

/// Numbers that go to a mirror before some come from the ward: a part of a ring.
const MIRROR_PIECE: usize = 1 << 18;

impl Executor<'_> {
    /// Norm gradients of one unit: those of each lane summed over its slices, then onto the lane's accumulators.
    pub(super) fn norm_grads(&mut self, instr: &Instr) -> Result<(), TrainError> {
        let unit = unit_of(instr)?;
        let lanes = self.place.lanes(unit).len();
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        let (places, of_lane) = segments::norm_layout(state);
        state.grads.turn_to(mutant::leaf(self.mutant, state, leaf_of(&self.run.grid, unit)));
        let leaves = std::mem::take(&mut self.memory.regs.norm_leaves);
        let apart = self.mutant == Some(Mutant::NormOwnSlice);
        let total = over_tensor_cells(self.ctx, &self.comm, self.run, &self.place, leaves, apart)?;
        debug_assert_eq!(total.len(), lanes * of_lane);
        for ((layer, role), at) in places {
            let to = state.held(layer, role).at.clone();
            for (lane, total) in total.chunks_exact(of_lane).enumerate() {
                kernels::add_assign(self.ctx, state.grads.lane(lane, to.clone()), &total[at.clone()]);
            }
        }
        self.counts.units += 1;
        Ok(())
    }

    /// Gradients of a bucket: over the data cells, or (`AllGather`) from the owner of a part to the replicas of its shard.
    pub(super) fn grads(&mut self, instr: &Instr, exchange: Exchange, bucket: Bucket) -> Result<(), TrainError> {
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let ctx = self.ctx;
        let add = |left: &mut [f32], right: &[f32]| kernels::add_assign(ctx, left, right);
        let grid = &self.run.grid;
        let class = bucket.class();
        if exchange == Exchange::AllGather {
            let replica = self.comm.group(Axis::replica(class));
            let parts = relative(&state.buckets[at].plan, state.buckets[at].owned.start, replica, self.run);
            let mut total = state.grads.pool.take(state.buckets[at].owned.len());
            let sum = std::mem::take(&mut state.buckets[at].sum);
            self.comm.endpoint.all_gather(replica, &parts, &sum, &mut total)?;
            state.grads.pool.give(sum);
            state.complete(at, total, add);
            return Ok(());
        }
        if let Some(sum) = self.posted_sum(instr, exchange, bucket)? {
            return self.summed(instr, exchange, bucket, sum);
        }
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let mut nodes = state.take_closed(at, bucket.leaves(grid));
        let astray = self.mutant == Some(Mutant::ExpertsOtherGroup) && class == Class::Experts;
        let group = self.comm.group(if astray { Axis::Ep } else { Axis::holders(class) });
        let sum = if group.len() == 1 {
            let sum = nodes.pop().map(|(_, data)| data).ok_or_else(|| unhosted(instr))?;
            state.grads.alive.sub(sum.len());
            sum
        } else {
            let plan = &state.buckets[at].plan;
            let me = if astray { self.place.at.dp % plan.holders.apart } else { plan.holders.number(self.place.at) };
            let mut plan = sum_plan(self.run, plan);
            let mut mine: Vec<_> = nodes.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
            mutant::leaves(self.mutant, &mut plan, &mut mine, me);
            if astray {
                mine[0].0 = plan.subtrees(me)[0].clone();
            }
            let own = plan.parts[me][0].clone();
            let mut sum = if exchange == Exchange::AllReduce {
                let mut sum = state.grads.pool.take(state.buckets[at].owned.len());
                self.comm.endpoint.all_reduce(group, &plan, &mine, &mut sum)?;
                sum
            } else {
                let mut sum = state.grads.pool.take(own.len());
                self.comm.endpoint.reduce_scatter(group, &plan, &mine, &mut sum)?;
                sum
            };
            if self.mutant == Some(Mutant::LeafTwice) && exchange != Exchange::AllReduce && me == 0 {
                add(&mut sum, &mine[0].1[own]);
            }
            state.grads.recycle(nodes.into_iter().map(|(_, data)| data));
            sum
        };
        self.summed(instr, exchange, bucket, sum)
    }

    /// A sum over the data cells is taken: the next of those that add up, or the gradients of the step.
    fn summed(&mut self, instr: &Instr, exchange: Exchange, bucket: Bucket, sum: Vec<f32>) -> Result<(), TrainError> {
        let (ctx, grid, class) = (self.ctx, &self.run.grid, bucket.class());
        let add = |left: &mut [f32], right: &[f32]| kernels::add_assign(ctx, left, right);
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let last = grid.accumulate == Accumulate::Local || instr.unit.is_some_and(|u| u.mb + 1 == grid.microbatches);
        let whole = self.run.layout.holders_of(class).replicas() == 1 || exchange == Exchange::AllReduce;
        let bucket = &mut state.buckets[at];
        if bucket.sum.is_empty() {
            bucket.sum = sum;
        } else {
            add(&mut bucket.sum, &sum);
            state.grads.pool.give(sum);
        }
        if last && whole {
            let total = std::mem::take(&mut state.buckets[at].sum);
            state.complete(at, total, add);
        }
        Ok(())
    }

    /// Parameters of a bucket from their owners: updated ones, or all of it for its use.
    pub(super) fn params(&mut self, instr: &Instr, bucket: Bucket) -> Result<(), TrainError> {
        if self.run.layout.zero < 3 {
            self.lent.settle();
        }
        if self.posted_params(instr, bucket)? {
            return Ok(());
        }
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let plan = &state.buckets[at].plan;
        let parts = shard_parts(plan);
        let whole = plan.at.clone();
        let (endpoint, group) = (&self.comm.endpoint, self.comm.group(Axis::shard(bucket.class())));
        if !state.gathers {
            endpoint.all_gather_in_place(group, &parts, &mut state.params[whole])?;
            return Ok(());
        }
        let mut full = state.grads.pool.take(whole.len());
        state.gathered.add(full.len());
        endpoint.all_gather(group, &parts, &state.buckets[at].shard, &mut full)?;
        if self.mutant == Some(Mutant::StaleShard) {
            let fresh = full.clone();
            if let Some(stale) = self.stale.insert((instr.chunk, bucket), fresh) {
                full.copy_from_slice(&stale);
            }
        }
        state.put_gathered(at, full);
        Ok(())
    }

    /// The gradients of the step to the rank that mirrors this one, and those of the mirrored one here.
    pub(super) fn mirror_grads(&mut self) -> Result<(), TrainError> {
        self.end_later();
        let Some((ward, mirrored)) = &mut self.mirrors else {
            return Err(TrainError::Internal("no state is mirrored here".into()));
        };
        let mirrors = program::Mirrors::of(&self.run.layout);
        let to = mirrors.map(|mirrors| mirrors.mirror(&self.run.layout, self.place.rank));
        let to = to.ok_or_else(|| TrainError::Internal("no rank mirrors this one".into()))?;
        let (endpoint, group) = (&self.comm.endpoint, &self.comm.mirror);
        let layout = &self.run.layout;
        let updated = |state: &ChunkState| {
            let mirrored = |b: &BucketState| b.plan.parameters && layout.mirrors(b.plan.bucket.class());
            let buckets = state.buckets.iter().enumerate();
            buckets.filter(|(_, b)| mirrored(b) && !b.owned.is_empty()).map(|(i, _)| i).collect::<Vec<_>>()
        };
        for state in mirrored.values_mut() {
            for bucket in updated(state) {
                let total = state.grads.pool.take(state.buckets[bucket].owned.len());
                state.buckets[bucket].total = total;
            }
        }
        let mut mine =
            (self.chunks.values().flat_map(|s| updated(s).into_iter().map(move |b| &s.buckets[b].total[..])))
                .flat_map(|total| total.chunks(MIRROR_PIECE));
        let mut theirs = (mirrored.values_mut())
            .flat_map(|state| state.buckets.iter_mut().map(|bucket| &mut bucket.total[..]))
            .flat_map(|total| total.chunks_mut(MIRROR_PIECE));
        // Piece by piece, so that what comes while this rank sends does not pile up.
        loop {
            let (piece, room) = (mine.next(), theirs.next());
            if piece.is_none() && room.is_none() {
                return Ok(());
            }
            piece.map_or(Ok(()), |piece| endpoint.send(group, to, piece))?;
            room.map_or(Ok(()), |room| endpoint.recv(group, *ward, room))?;
        }
    }

    /// Frees gathered parameters.
    pub(super) fn release(&mut self, instr: &Instr, bucket: Bucket) -> Result<(), TrainError> {
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        state.release(at);
        Ok(())
    }

    /// Ends the leaf of a data cell.
    pub(super) fn close(&mut self, instr: &Instr, cell: usize, bucket: Bucket) -> Result<(), TrainError> {
        let unit = Unit { cell, ..leaf_of(&self.run.grid, unit_of(instr)?) };
        let class = bucket.class();
        let leaves: Vec<usize> = match class {
            Class::Common => self.place.leaves(unit).collect(),
            Class::Experts => self.place.expert_leaves(unit).collect(),
        };
        let ctx = self.ctx;
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let (grid, layout, coords) = (&self.run.grid, &self.run.layout, self.place.at);
        let made = |leaf: usize, gradient: &mut [f32]| {
            self.faults.spoil(gradient);
            if self.pulse.broken.load(Ordering::Relaxed) {
                fault::flip(gradient, fault::STUCK);
            }
            if let Some(watch) = &mut self.watch {
                let sum = watch.entry(leaves::key(grid, layout, coords, class, leaf, 0)).or_default();
                *sum = sum.wrapping_add(leaves::hash([instr.chunk, at, unit.mb], gradient));
            }
            if self.recheck.on() {
                let by = self.recheck.shift();
                let key = leaves::key(grid, layout, coords, class, leaf, by);
                self.recheck.see(key, [instr.chunk, at, unit.mb], gradient);
                // Those that are its own for good it sees, too, but for itself.
                let own = class == Class::Common && self.place.data_cells.contains(&((leaf / grid.cp + by) % grid.dp));
                self.counts.leaves_checked += u64::from(by > 0 && !own);
            }
        };
        state.close(at, unit, leaves.into_iter(), made, |left, right| kernels::add_assign(ctx, left, right));
        Ok(())
    }
}

/// What `unit` adds to: all microbatches of its cell, or it alone.
pub(super) fn leaf_of(grid: &Grid, unit: Unit) -> Unit {
    match grid.accumulate {
        Accumulate::Local => Unit { mb: 0, ..unit },
        Accumulate::Reduced => unit,
    }
}

pub(super) fn bucket_of<'s>(
    chunks: &'s mut BTreeMap<usize, ChunkState>,
    instr: &Instr,
    bucket: Bucket,
) -> Result<(&'s mut ChunkState, usize), TrainError> {
    let state = chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
    let at = state.find(bucket).ok_or_else(|| unhosted(instr))?;
    Ok((state, at))
}

/// The parts of the members of a group of replicas, counted from the start of their shard.
fn relative(plan: &BucketPlan, start: usize, replicas: &Group, run: &Run) -> Vec<Vec<Range<usize>>> {
    let part = |rank: &u32| vec![counted_from(start, &plan.part(run.layout.coords(*rank as usize)))];
    replicas.ranks.iter().map(part).collect()
}

/// The sum of a bucket's gradients over the cells (d, c), in parts of its holders.
pub(super) fn sum_plan(run: &Run, plan: &BucketPlan) -> ReducePlan {
    let parts = plan.parts.iter().map(|part| vec![counted_from(plan.at.start, part)]).collect();
    let cells = plan.bucket.leaves_of(&run.grid, &run.layout);
    ReducePlan { leaves: plan.bucket.leaves(&run.grid), cells, parts }
}

/// The shards of a bucket, by member of their group, counted from its start.
pub(super) fn shard_parts(plan: &BucketPlan) -> Vec<Vec<Range<usize>>> {
    plan.shards.iter().map(|shard| vec![counted_from(plan.at.start, shard)]).collect()
}

/// `range` of the flat vector, counted from `start`.
pub(super) fn counted_from(start: usize, range: &Range<usize>) -> Range<usize> {
    range.start - start..range.end - start
}

/// The ordered sum of a vector per tensor cell, on every rank of the tensor group; `leaves`: those of the hosted cells.
/// `apart`: a rank keeps to its own, a deliberate fault.
pub(super) fn over_tensor_cells(
    ctx: &Ctx,
    comm: &Comm,
    run: &Run,
    place: &Place,
    leaves: Vec<Vec<f32>>,
    apart: bool,
) -> Result<Vec<f32>, TrainError> {
    let mut sum = Counter::new(place.grid_tp);
    for (cell, leaf) in place.cells.clone().zip(leaves) {
        sum.push(cell..cell + 1, leaf, |left, right| kernels::add_assign(ctx, left, right));
    }
    let mut nodes = sum.into_nodes();
    let len = nodes.first().map(|(_, data)| data.len());
    let len = len.ok_or_else(|| TrainError::Internal("a sum over tensor cells without a leaf".into()))?;
    let (group, members) = (&comm.tp, comm.tp.len());
    if members == 1 || apart {
        return Ok(nodes.swap_remove(0).1);
    }
    let cells = (0..members).map(|t| run.layout.tensor_cells(t, place.grid_tp)).collect();
    let parts = (0..members).map(|i| len * i / members..len * (i + 1) / members).collect();
    let plan = ReducePlan::new(place.grid_tp, cells, parts);
    let mine: Vec<_> = nodes.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
    let mut total = vec![0.0; len];
    comm.endpoint.all_reduce(group, &plan, &mine, &mut total)?;
    Ok(total)
}

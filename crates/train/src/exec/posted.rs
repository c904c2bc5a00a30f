//! Exchanges in two halves: what leaves when it is ready and is taken when it is needed.

use std::time::Instant;

use fabric::{Posted, ReducePlan, Taken};
use observe::Flight;
use program::{Axis, Bucket, Exchange, Instr, Value};

use super::grads::{bucket_of, counted_from, shard_parts, sum_plan};
use super::{Executor, unhosted};
use crate::error::TrainError;

/// Something that has left.
pub(super) struct InFlight {
    posted: Posted,
    flight: Option<Flight>,
}

impl Executor<'_> {
    /// Lets this rank's share of the exchange leave. Deliberate faults are about exchanges in one piece: with one nothing is
    /// posted, on any rank.
    pub(super) fn post(&mut self, instr: &Instr, exchange: Exchange, value: Value) -> Result<(), TrainError> {
        if self.mutant.is_some() {
            return Ok(());
        }
        let began = Instant::now();
        let posted = match value {
            Value::Grads(bucket) => self.post_grads(instr, exchange, bucket)?,
            Value::Params(bucket) => self.post_params(instr, bucket)?,
            _ => return Err(TrainError::Internal(format!("`{instr}`: {value:?} is not posted"))),
        };
        if let Some(posted) = posted {
            let flight = self.recorder.as_ref().and_then(|recorder| recorder.depart(began));
            self.posted.insert((instr.chunk, value), InFlight { posted, flight });
        }
        Ok(())
    }

    /// The result was there at `came`.
    fn landed(&mut self, flight: Option<Flight>, came: Instant) {
        if let (Some(recorder), Some(flight)) = (&mut self.recorder, flight) {
            recorder.land(flight, came);
        }
    }

    fn post_grads(&mut self, instr: &Instr, exchange: Exchange, bucket: Bucket) -> Result<Option<Posted>, TrainError> {
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let group = self.comm.posts(Axis::holders(bucket.class()), instr.chunk, at);
        if group.len() == 1 {
            return Ok(None);
        }
        let nodes = state.take_closed(at, bucket.leaves(&self.run.grid));
        let plan = sum_plan(self.run, &state.buckets[at].plan);
        let all = exchange == Exchange::AllReduce;
        Ok(Some(self.comm.endpoint.post_sum(&group, &plan, nodes, all)?))
    }

    /// The sum of the gradients of a bucket, if they were posted: of all of it (`AllReduce`), or of this rank's part.
    pub(super) fn posted_sum(
        &mut self,
        instr: &Instr,
        exchange: Exchange,
        bucket: Bucket,
    ) -> Result<Option<Vec<f32>>, TrainError> {
        let Some(InFlight { posted, flight }) = self.posted.remove(&(instr.chunk, Value::Grads(bucket))) else {
            return Ok(None);
        };
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let group = self.comm.posts(Axis::holders(bucket.class()), instr.chunk, at);
        let plan: ReducePlan = sum_plan(self.run, &state.buckets[at].plan);
        let endpoint = &self.comm.endpoint;
        let in_place = posted.in_place();
        let (sum, Taken { buffers, came }) = if exchange == Exchange::AllReduce {
            let len = if in_place { 0 } else { state.buckets[at].owned.len() };
            let mut sum = if in_place { Vec::new() } else { state.grads.pool.take(len) };
            let mut taken = endpoint.take_whole(&group, &plan, posted, &mut sum)?;
            if in_place {
                sum = taken.buffers.pop().ok_or_else(|| unhosted(instr))?;
                state.grads.alive.sub(sum.len());
            }
            (sum, taken)
        } else {
            let mut sum = state.grads.pool.take(state.buckets[at].part.len());
            let taken = endpoint.take_part(&group, &plan, posted, &mut sum)?;
            (sum, taken)
        };
        state.grads.recycle(buffers);
        self.landed(flight, came);
        Ok(Some(sum))
    }

    fn post_params(&mut self, instr: &Instr, bucket: Bucket) -> Result<Option<Posted>, TrainError> {
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let group = self.comm.posts(Axis::shard(bucket.class()), instr.chunk, at);
        if group.len() == 1 || group.hosts.is_some() {
            return Ok(None);
        }
        let plan = &state.buckets[at].plan;
        let parts = shard_parts(plan);
        let own = counted_from(plan.at.start, &state.buckets[at].owned);
        let mut full = state.grads.pool.take(plan.at.len());
        full[own].copy_from_slice(&state.buckets[at].shard);
        state.gathered.add(full.len());
        Ok(Some(self.comm.endpoint.post_gather(&group, &parts, full)?))
    }

    /// The gathered parameters of a bucket, if they were posted.
    pub(super) fn posted_params(&mut self, instr: &Instr, bucket: Bucket) -> Result<bool, TrainError> {
        let Some(InFlight { posted, flight }) = self.posted.remove(&(instr.chunk, Value::Params(bucket))) else {
            return Ok(false);
        };
        let (state, at) = bucket_of(&mut self.chunks, instr, bucket)?;
        let group = self.comm.posts(Axis::shard(bucket.class()), instr.chunk, at);
        let parts = shard_parts(&state.buckets[at].plan);
        let mut taken = self.comm.endpoint.take_gather(&group, &parts, posted)?;
        state.put_gathered(at, taken.buffers.pop().ok_or_else(|| unhosted(instr))?);
        self.landed(flight, taken.came);
        Ok(true)
    }
}

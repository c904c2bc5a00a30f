//! Exchanges in two halves: what leaves when it is ready and is taken when it is needed.

use std::time::Instant;

use fabric::{Posted, ReducePlan, Taken};
use observe::Flight;
use program::{Axis, Bucket, Exchange, Instr, Value};

use super::grads::{bucket_of, counted_from, shard_parts, sum_plan};
use super::{Executor, unhosted, unit_of};
use crate::buffers::Memory;
use crate::error::TrainError;
use crate::segments::need;

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
            value if value.of_rows() => self.post_rows(instr, value)?,
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

    /// Rows of a unit between the tensor positions, out of the register where their exchange would find them.
    fn post_rows(&mut self, instr: &Instr, value: Value) -> Result<Option<Posted>, TrainError> {
        if self.comm.tp.len() == 1 {
            return Ok(None);
        }
        let unit = unit_of(instr)?;
        let (lanes, embed) = (self.place.lanes(unit).len(), self.of_embedding(instr, value)?);
        let (at, Memory { pool, regs, .. }) = ((instr.chunk, value), &mut self.memory);
        let posted = match value {
            Value::Rows => {
                let local = need(&mut regs.normed, "normed")?;
                let posted = self.comm.post_gather(at, pool, lanes, &local)?;
                pool.give(local);
                posted
            }
            Value::GradRows => {
                let local = regs.grad.as_ref();
                let local = local.ok_or_else(|| TrainError::Internal("there is no gradient to gather".into()))?;
                self.comm.post_gather(at, pool, lanes, local)?
            }
            _ => self.comm.post_partials(at, pool, lanes, need(&mut regs.partials, "partials")?, embed)?,
        };
        Ok(Some(posted))
    }

    /// Puts rows that were posted where their exchange leaves them, if they were.
    pub(super) fn posted_rows(&mut self, instr: &Instr, value: Value) -> Result<bool, TrainError> {
        let at = (instr.chunk, value);
        let Some(InFlight { posted, flight }) = self.posted.remove(&at) else { return Ok(false) };
        let (lanes, embed) = (self.place.lanes(unit_of(instr)?).len(), self.of_embedding(instr, value)?);
        let Memory { pool, regs, .. } = &mut self.memory;
        let came = if matches!(value, Value::Rows | Value::GradRows) {
            let mut taken = self.comm.take_gather(at, lanes, posted)?;
            let full = taken.buffers.pop();
            *(if value == Value::Rows { &mut regs.rows } else { &mut regs.grad_rows }) = full;
            taken.came
        } else {
            let (sum, came) = self.comm.take_partials(at, pool, lanes, posted, embed)?;
            regs.reduced = Some(sum);
            came
        };
        self.landed(flight, came);
        Ok(true)
    }

    /// True if partial sums are those of the embedding, which opens the forward of chunk 0: no layer has left its stream yet.
    pub(super) fn of_embedding(&self, instr: &Instr, value: Value) -> Result<bool, TrainError> {
        Ok(value == Value::Partial && instr.chunk == 0 && !self.memory.begun(0, unit_of(instr)?))
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

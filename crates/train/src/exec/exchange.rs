//! Exchanges inside a task: over the tensor cells, and point to point between chunks.

use kernels::XentStat;
use program::{Axis, Bucket, Exchange, Instr, Mode, Value};

use super::experts::Trip;
use super::{Executor, unhosted, unit_of};
use crate::buffers::Memory;
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::saver::Word;
use crate::segments::need;
use crate::state::ChunkState;
use crate::vote::Ballot;

impl Executor<'_> {
    pub(super) fn collective(
        &mut self,
        mode: Mode,
        instr: &Instr,
        exchange: Exchange,
        value: Value,
        axis: Axis,
    ) -> Result<(), TrainError> {
        if value.of_rows() && self.posted_rows(instr, value)? {
            return Ok(());
        }
        let lanes = instr.unit.map_or(0, |unit| self.place.lanes(unit).len());
        let Memory { pool, regs, .. } = &mut self.memory;
        match value {
            Value::Rows => {
                let local = need(&mut regs.normed, "normed")?;
                regs.rows = Some(if self.comm.tp.len() == 1 {
                    local
                } else {
                    let full = self.comm.gather_rows(pool, lanes, &local)?;
                    pool.give(local);
                    full
                });
            }
            Value::GradRows => {
                if self.comm.tp.len() > 1 {
                    let local = need(&mut regs.grad, "grad")?;
                    regs.grad_rows = Some(self.comm.gather_rows(pool, lanes, &local)?);
                    regs.grad = Some(local);
                }
            }
            Value::Partial | Value::GradPartial => {
                let partials = need(&mut regs.partials, "partials")?;
                let embed = self.of_embedding(instr, value)?;
                let Memory { pool, regs, .. } = &mut self.memory;
                regs.reduced = Some(self.comm.scatter_partials(pool, lanes, partials, embed)?);
            }
            Value::KeyValues(layer) => {
                let unit = unit_of(instr)?;
                let cells = self.place.lanes(unit).cells.len();
                let layers = &self.memory.saved.entry((instr.chunk, unit)).or_default().layers;
                let kept = layers.get(&layer).ok_or_else(|| unhosted(instr))?;
                let local = [kept.k.as_slice(), &kept.v].concat();
                let Memory { pool, regs, .. } = &mut self.memory;
                regs.keys = Some(self.comm.gather_keys(pool, cells, &local)?);
            }
            Value::KeyValueGrads(_) => {
                let cells = self.place.lanes(unit_of(instr)?).cells.len();
                let partials = need(&mut regs.key_partials, "key_partials")?;
                let both = self.comm.scatter_key_grads(pool, cells, partials)?;
                let halves = both.chunks_exact(both.len() / 2).map(|half| {
                    let mut own = pool.take(half.len());
                    own.copy_from_slice(half);
                    own
                });
                let [dk, dv] = halves.collect::<Vec<_>>().try_into().expect("two halves");
                regs.d_keys = Some([dk, dv]);
                pool.give(both);
            }
            Value::Stats => self.gather_stats()?,
            Value::RouterCounts => self.router_counts(instr.chunk, unit_of(instr)?, axis)?,
            Value::Dispatch(layer) => self.travel(mode, instr, layer, Trip::Out)?,
            Value::Combine(layer) => self.travel(mode, instr, layer, Trip::Back)?,
            Value::DispatchGrad(layer) => self.travel(mode, instr, layer, Trip::GradOut)?,
            Value::CombineGrad(layer) => self.travel(mode, instr, layer, Trip::GradBack)?,
            Value::SliceGrads => self.slice_grads(instr)?,
            Value::NormGrads => self.norm_grads(instr)?,
            Value::Grads(bucket) => self.grads(instr, exchange, bucket)?,
            Value::Params(bucket) => self.params(instr, bucket)?,
            Value::MirrorGrads => self.mirror_grads()?,
            Value::Ballot => {
                let began = std::time::Instant::now();
                let corrupt = mode == Mode::Train && self.is_corrupt();
                self.counts.guard += began.elapsed();
                let leaves = if mode == Mode::Train { self.recheck.tell() } else { Vec::new() };
                let writer = self.writer.as_ref().filter(|_| mode == Mode::Train).map(Word::now);
                let ballot = Ballot { corrupt, writer, leaves, ..self.fill_ballot(mode) }.encode();
                if mode == Mode::Train {
                    self.prepared = Some(self.step);
                }
                self.ballot = self.comm.endpoint.all_gather_bytes(self.comm.group(axis), &ballot)?;
            }
            Value::Activation | Value::ActivationGrad | Value::TiedGrads => {
                return Err(TrainError::Internal(format!("{value:?} travels point to point")));
            }
        }
        Ok(())
    }

    pub(super) fn gather_stats(&mut self) -> Result<(), TrainError> {
        let group = &self.comm.tp;
        if group.len() == 1 {
            return Ok(());
        }
        let stats = &mut self.memory.regs.stats;
        let mine: Vec<f32> = stats.iter().flat_map(|s| [s.max, s.sum, s.target]).collect();
        let part = |i: usize| std::iter::once(i * mine.len()..(i + 1) * mine.len()).collect();
        let parts: Vec<_> = (0..group.len()).map(part).collect();
        let mut all = vec![0.0; mine.len() * group.len()];
        self.comm.endpoint.all_gather(group, &parts, &mine, &mut all)?;
        *stats = all.chunks_exact(3).map(|s| XentStat { max: s[0], sum: s[1], target: s[2] }).collect();
        Ok(())
    }

    pub(super) fn send(&mut self, mode: Mode, instr: &Instr, value: Value, to: usize) -> Result<(), TrainError> {
        let regs = &mut self.memory.regs;
        let buffer = match value {
            Value::Activation => need(&mut regs.x, "x")?,
            Value::ActivationGrad => need(&mut regs.grad, "grad")?,
            Value::TiedGrads => {
                let state = self.chunks.get(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                let bucket = tied(state).ok_or_else(|| unhosted(instr))?;
                let embed = &state.buckets[bucket].total;
                if to != self.place.rank {
                    return Ok(self.comm.send(value, instr.chunk, to, embed)?);
                }
                let mut copy = self.memory.pool.take(embed.len());
                copy.copy_from_slice(embed);
                copy
            }
            _ => return Err(TrainError::Internal(format!("{value:?} does not travel point to point"))),
        };
        let buffer = if value.is_stream() { self.with_pooled(mode, instr, buffer)? } else { buffer };
        if to == self.place.rank {
            self.memory.handed.entry((value, instr.chunk)).or_default().push_back(buffer);
        } else {
            self.comm.post(value, instr.chunk, to, buffer)?;
            self.comm.endpoint.spent().into_iter().for_each(|buffer| self.memory.pool.give(buffer));
        }
        Ok(())
    }

    pub(super) fn recv(&mut self, mode: Mode, instr: &Instr, value: Value, from: usize) -> Result<(), TrainError> {
        match value {
            Value::Activation | Value::ActivationGrad => {
                let forward = value == Value::Activation;
                let sender = if forward { instr.chunk.checked_sub(1) } else { Some(instr.chunk + 1) };
                let sender = sender.ok_or_else(|| TrainError::Internal("chunk 0 receives no activation".into()))?;
                let rows = self.place.lanes(unit_of(instr)?).len() * self.place.rows_lane_local() * self.place.hidden;
                let mut buffer = self.taken(value, sender, from, rows + self.pooled_experts(mode))?;
                self.keep_pooled(instr, &buffer[rows..])?;
                if buffer.len() > rows {
                    let mut stream = self.memory.pool.take(rows);
                    stream.copy_from_slice(&buffer[..rows]);
                    self.memory.pool.give(std::mem::replace(&mut buffer, stream));
                }
                *(if forward { &mut self.memory.regs.x } else { &mut self.memory.regs.grad }) = Some(buffer);
            }
            Value::TiedGrads => {
                let sender = if instr.chunk == 0 { self.run.layout.chunks() - 1 } else { 0 };
                let state = self.chunks.get(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                let bucket = tied(state).ok_or_else(|| unhosted(instr))?;
                let other = self.taken(value, sender, from, state.buckets[bucket].total.len())?;
                // input + output: addition of two commutes, so both uses have the same bits.
                if self.mutant != Some(Mutant::TiedOneSided) || instr.chunk == 0 {
                    let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                    kernels::add_assign(self.ctx, &mut state.buckets[bucket].total, &other);
                }
                self.memory.pool.give(other);
            }
            _ => return Err(TrainError::Internal(format!("{value:?} does not travel point to point"))),
        }
        Ok(())
    }

    /// What chunk `sender` on rank `from` sends next: a message, or what it left on this rank.
    fn taken(&mut self, value: Value, sender: usize, from: usize, len: usize) -> Result<Vec<f32>, TrainError> {
        if from == self.place.rank {
            let handed = self.memory.handed.get_mut(&(value, sender)).and_then(|queue| queue.pop_front());
            return handed.ok_or_else(|| TrainError::Internal(format!("chunk {sender} left no {value:?}")));
        }
        let mut buffer = self.memory.pool.take(len);
        self.comm.recv(value, sender, from, &mut buffer)?;
        Ok(buffer)
    }
}

/// The bucket with this chunk's use of a tied embedding.
fn tied(state: &ChunkState) -> Option<usize> {
    state.find(if state.chunk == 0 { Bucket::Embed } else { Bucket::Head })
}

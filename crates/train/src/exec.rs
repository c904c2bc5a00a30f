//! The executor: runs a rank's program, instruction by instruction, and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fabric::ReducePlan;
use kernels::{Ctx, RopeTable, XentStat};
use program::{Axis, Exchange, Instr, Mode, Op, Pass, Program, Segment, Value};
use spec::tensors::{Cut, Role, Tensor};
use spec::tree::Counter;
use spec::{Run, Unit};

use crate::buffers::{Memory, Tokens};
use crate::comm::Comm;
use crate::error::TrainError;
use crate::mutant::{self, Mutant};
use crate::place::Place;
use crate::segments::{self, Env, need};
use crate::state::ChunkState;
use crate::vote::{self, Ballot, Decision};
use crate::{init, optim};

/// What the executor counted.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Instructions run.
    pub instructions: u64,
    /// Units whose backward this rank took part in.
    pub units: u64,
    /// Time in segments and updates.
    pub compute: Duration,
    /// Time in exchanges, waiting included.
    pub exchange: Duration,
}

/// Everything of one rank that lives across steps.
pub struct Executor<'a> {
    /// The run.
    pub run: &'a Run,
    /// What this rank hosts.
    pub place: Place,
    /// How to compute.
    pub ctx: &'a Ctx,
    /// The fabric.
    pub comm: Comm,
    /// State, by chunk.
    pub chunks: BTreeMap<usize, ChunkState>,
    /// All tensors of the model, canonical.
    pub tensors: Vec<Tensor>,
    /// What ran.
    pub counts: Counts,
    /// What its checkpoints belong to.
    pub definition: String,
    /// A deliberate fault.
    pub mutant: Option<Mutant>,
    /// Where logits are kept for who asks for them.
    pub capture: Option<Vec<crate::eval::Captured>>,
    rope: RopeTable,
    memory: Memory,
    stop: Arc<AtomicBool>,
    ballot: Vec<Vec<u8>>,
    decision: Option<Decision>,
    step: u64,
}

/// What one pass over a program came to.
#[derive(Debug, Clone, Copy)]
pub enum Outcome {
    /// A training step: decided, and applied if finite.
    Step(Decision),
    /// A validation: its loss sums.
    Eval(crate::buffers::LossSum),
}

impl<'a> Executor<'a> {
    /// A rank with freshly initialised parameters; `stop` asks for a stop after the step under way.
    pub fn new(run: &'a Run, ctx: &'a Ctx, endpoint: fabric::Endpoint, stop: Arc<AtomicBool>) -> Self {
        let rank = endpoint.rank() as usize;
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, rank);
        let comm = Comm::new(endpoint, &run.layout, &place);
        let mut chunks = BTreeMap::new();
        for chunk in run.layout.chunks_of(place.at.pp) {
            let mut state = ChunkState::new(run, &place, chunk);
            init::fill(run, ctx, &mut state);
            chunks.insert(chunk, state);
        }
        Self {
            rope: RopeTable::new(run.model.head_dim, run.model.rope_theta, run.train.seq),
            tensors: spec::tensors::tensors(&run.model),
            run,
            place,
            ctx,
            comm,
            chunks,
            counts: Counts::default(),
            definition: run.definition(),
            mutant: None,
            capture: None,
            memory: Memory::default(),
            stop,
            ballot: Vec::new(),
            decision: None,
            step: 0,
        }
    }

    /// Runs `program` once; `load` brings the tokens of a unit. `step` (from 1) sets the learning rate.
    ///
    /// # Errors
    /// What the fabric reports, or a program that cannot be run.
    pub fn run(
        &mut self,
        program: &Program,
        mode: Mode,
        step: u64,
        load: &dyn Fn(Unit) -> Tokens,
    ) -> Result<Outcome, TrainError> {
        self.decision = None;
        self.step = step;
        for instr in &program.instrs {
            let began = Instant::now();
            match instr.op {
                Op::Load => {
                    let unit = unit_of(instr)?;
                    self.put_tokens(unit, load(unit));
                }
                _ => self.instruction(instr, mode)?,
            }
            let exchange = matches!(instr.op, Op::Collective { .. } | Op::Send { .. } | Op::Recv { .. });
            self.counts.instructions += 1;
            *(if exchange { &mut self.counts.exchange } else { &mut self.counts.compute }) += began.elapsed();
        }
        let outcome = match mode {
            Mode::Train => {
                Outcome::Step(self.decision.ok_or_else(|| TrainError::Internal("a step without a vote".into()))?)
            }
            Mode::Eval => Outcome::Eval(self.tally(mode)?.loss),
        };
        self.memory.tokens.clear();
        self.memory.losses.clear();
        Ok(outcome)
    }

    /// Runs one instruction; tokens come from [`Executor::put_tokens`].
    pub(crate) fn instruction(&mut self, instr: &Instr, mode: Mode) -> Result<(), TrainError> {
        match instr.op {
            Op::Load => return Err(TrainError::Internal("tokens are loaded by the caller".into())),
            Op::Compute(pass, segment) => self.compute(mode, instr, pass, segment)?,
            Op::Collective { exchange, value, axis, .. } => self.collective(mode, instr, exchange, value, axis)?,
            Op::Send { value, to, .. } => self.send(instr, value, to)?,
            Op::Recv { value, from, .. } => self.recv(instr, value, from)?,
            Op::CloseCell { cell } => {
                let ctx = self.ctx;
                let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                state.close_cell(cell, |left, right| kernels::add_assign(ctx, left, right));
            }
            Op::Vote => {
                let mut tally = self.tally(mode)?;
                tally.loss = mutant::step_loss(self.mutant, tally.loss, &self.memory.losses);
                self.decision = Some(vote::decide(&tally, &self.run.train));
            }
            Op::Apply => {
                let decision = self.decision.ok_or_else(|| TrainError::Internal("apply before the vote".into()))?;
                let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                mutant::shard(self.mutant, state);
                if decision.finite {
                    optim::apply(self.ctx, &self.run.train, self.step, &decision, state);
                }
                let spent = std::mem::take(&mut state.total);
                state.recycle([spent]);
            }
        }
        Ok(())
    }

    /// Gives the tokens of a unit for the instructions that follow.
    pub(crate) fn put_tokens(&mut self, unit: Unit, tokens: Tokens) {
        self.memory.tokens.insert(unit, tokens);
    }

    /// Drops what is known of a unit whose forward is over.
    pub(crate) fn forget(&mut self, unit: Unit) {
        self.memory.saved.retain(|(_, kept), _| *kept != unit);
        self.memory.tokens.remove(&unit);
        self.memory.losses.remove(&unit);
    }

    fn compute(&mut self, mode: Mode, instr: &Instr, pass: Pass, segment: Segment) -> Result<(), TrainError> {
        let unit = unit_of(instr)?;
        let env = Env {
            ctx: self.ctx,
            model: &self.run.model,
            place: &self.place,
            rope: &self.rope,
            mode,
            mutant: self.mutant,
        };
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        if mode == Mode::Train {
            state.open_cell();
        }
        segments::run(&env, state, &mut self.memory, unit, pass, segment)?;
        if let (Some(capture), Segment::Logits(block)) = (&mut self.capture, segment) {
            let logits = self.memory.regs.logits.iter().enumerate();
            capture.extend(logits.map(|(cell, logits)| (unit, block, cell, logits.clone())));
        }
        if let (Pass::Forward, Segment::Residual(layer)) = (pass, segment) {
            match mode {
                Mode::Train if layer + 1 == self.run.model.layers => {
                    segments::keep_input(&mut self.memory, instr.chunk, unit)?;
                }
                Mode::Train => {}
                Mode::Eval => self.memory.forget_layer(instr.chunk, unit, layer),
            }
        }
        Ok(())
    }

    fn collective(
        &mut self,
        mode: Mode,
        instr: &Instr,
        exchange: Exchange,
        value: Value,
        axis: Axis,
    ) -> Result<(), TrainError> {
        let Memory { pool, regs, .. } = &mut self.memory;
        match value {
            Value::Rows => {
                let local = need(&mut regs.normed, "normed")?;
                regs.rows = Some(if self.comm.tp.len() == 1 {
                    local
                } else {
                    let full = self.comm.gather_rows(pool, &local)?;
                    pool.give(local);
                    full
                });
            }
            Value::GradRows => {
                if self.comm.tp.len() > 1 {
                    let local = need(&mut regs.grad, "grad")?;
                    regs.grad_rows = Some(self.comm.gather_rows(pool, &local)?);
                    regs.grad = Some(local);
                }
            }
            Value::Partial | Value::GradPartial => {
                let partials = need(&mut regs.partials, "partials")?;
                // The embedding opens the forward of chunk 0: no layer has left its stream yet.
                let embed = value == Value::Partial && instr.chunk == 0 && !self.memory.begun(0, unit_of(instr)?);
                let Memory { pool, regs, .. } = &mut self.memory;
                regs.reduced = Some(self.comm.scatter_partials(pool, partials, embed)?);
            }
            Value::Stats => self.gather_stats()?,
            Value::NormGrads => self.norm_grads(instr.chunk)?,
            Value::Grads => self.grads(instr, exchange)?,
            Value::Params => self.params(instr)?,
            Value::Ballot => {
                let ballot = self.fill_ballot(mode).encode();
                self.ballot = self.comm.endpoint.all_gather_bytes(self.comm.group(axis), &ballot)?;
            }
            Value::Activation | Value::ActivationGrad | Value::TiedGrads => {
                return Err(TrainError::Internal(format!("{value:?} travels point to point")));
            }
        }
        Ok(())
    }

    fn gather_stats(&mut self) -> Result<(), TrainError> {
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

    /// Norm gradients of one unit: summed over the slices, then onto the accumulators.
    fn norm_grads(&mut self, chunk: usize) -> Result<(), TrainError> {
        let state = self.chunks.get_mut(&chunk).ok_or_else(|| TrainError::Internal(format!("no chunk {chunk}")))?;
        let (places, len) = segments::norm_layout(state);
        let leaves = std::mem::take(&mut self.memory.regs.norm_leaves);
        let mut sum = Counter::new(self.place.grid_tp);
        for (cell, leaf) in self.place.cells.clone().zip(leaves) {
            sum.push(cell..cell + 1, leaf, |left, right| kernels::add_assign(self.ctx, left, right));
        }
        let nodes = sum.into_nodes();
        let group = &self.comm.tp;
        let total = if group.len() == 1 || self.mutant == Some(Mutant::NormOwnSlice) {
            nodes.into_iter().next().map(|(_, data)| data).unwrap_or_default()
        } else {
            let members = group.len();
            let cells = (0..members).map(|t| self.run.layout.tensor_cells(t, self.place.grid_tp)).collect();
            let parts = (0..members).map(|i| len * i / members..len * (i + 1) / members).collect();
            let plan = ReducePlan::new(self.place.grid_tp, cells, parts);
            let mine: Vec<_> = nodes.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
            let mut total = vec![0.0; len];
            self.comm.endpoint.all_reduce(group, &plan, &mine, &mut total)?;
            total
        };
        for ((layer, role), at) in places {
            let to = state.held(layer, role).at.clone();
            kernels::add_assign(self.ctx, &mut state.grads[to], &total[at]);
        }
        self.counts.units += 1;
        Ok(())
    }

    /// Gradients of a chunk over the data cells.
    fn grads(&mut self, instr: &Instr, exchange: Exchange) -> Result<(), TrainError> {
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        let mut nodes = state.take_closed(self.run.grid.dp);
        let group = &self.comm.dp;
        if group.len() == 1 {
            state.total = nodes.pop().map(|(_, data)| data).ok_or_else(|| unhosted(instr))?;
        } else {
            let cells = self.run.layout.cells.clone();
            let mut plan = ReducePlan { leaves: self.run.grid.dp, cells, parts: state.parts.clone() };
            let mut mine: Vec<_> = nodes.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
            mutant::leaves(self.mutant, &mut plan, &mut mine, self.place.at.dp);
            let mut total = state.buffer();
            match exchange {
                Exchange::AllReduce => self.comm.endpoint.all_reduce(group, &plan, &mine, &mut total)?,
                _ => {
                    let parts = &plan.parts[self.place.at.dp];
                    let mut own = self.memory.pool.take(parts.iter().map(|r| r.len()).sum());
                    self.comm.endpoint.reduce_scatter(group, &plan, &mine, &mut own)?;
                    let mut at = 0;
                    for range in parts {
                        total[range.clone()].copy_from_slice(&own[at..at + range.len()]);
                        at += range.len();
                    }
                    self.memory.pool.give(own);
                }
            }
            state.total = total;
            state.recycle(nodes.into_iter().map(|(_, data)| data));
        }
        if let Some(output) = state.tied_output.clone() {
            // Input + output, where this rank has both sums.
            let embed = state.held(0, Role::Embed).at.clone();
            let (flat, tail) = state.total.split_at_mut(output.start);
            let (lo, hi) = (embed.start.max(state.owned.start), embed.end.min(state.owned.end));
            if lo < hi {
                let from = lo - embed.start..hi - embed.start;
                kernels::add_assign(self.ctx, &mut flat[lo..hi], &tail[from]);
            }
        }
        Ok(())
    }

    /// Updated parameters from their owners.
    fn params(&mut self, instr: &Instr) -> Result<(), TrainError> {
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        let parts: Vec<_> = state.owners.iter().map(|r| vec![r.clone()]).collect();
        self.comm.endpoint.all_gather_in_place(&self.comm.dp, &parts, &mut state.params)?;
        Ok(())
    }

    fn send(&mut self, instr: &Instr, value: Value, to: usize) -> Result<(), TrainError> {
        let regs = &mut self.memory.regs;
        let buffer = match value {
            Value::Activation => need(&mut regs.x, "x")?,
            Value::ActivationGrad => need(&mut regs.grad, "grad")?,
            Value::TiedGrads => {
                let state = self.chunks.get(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                let embed = state.held(0, Role::Embed).at.clone();
                return Ok(self.comm.send(value, instr.chunk, to, &state.total[embed])?);
            }
            _ => return Err(TrainError::Internal(format!("{value:?} does not travel point to point"))),
        };
        self.comm.send(value, instr.chunk, to, &buffer)?;
        self.memory.pool.give(buffer);
        Ok(())
    }

    fn recv(&mut self, instr: &Instr, value: Value, from: usize) -> Result<(), TrainError> {
        let last = self.run.layout.chunks() - 1;
        match value {
            Value::Activation | Value::ActivationGrad => {
                let forward = value == Value::Activation;
                let sender = if forward { instr.chunk.checked_sub(1) } else { Some(instr.chunk + 1) };
                let sender = sender.ok_or_else(|| TrainError::Internal("chunk 0 receives no activation".into()))?;
                let mut buffer = self.memory.pool.take(self.place.rows_local() * self.place.hidden);
                self.comm.recv(value, sender, from, &mut buffer)?;
                *(if forward { &mut self.memory.regs.x } else { &mut self.memory.regs.grad }) = Some(buffer);
            }
            Value::TiedGrads => {
                let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                let embed = state.held(0, Role::Embed).at.clone();
                let mut other = self.memory.pool.take(embed.len());
                self.comm.recv(value, if instr.chunk == 0 { last } else { 0 }, from, &mut other)?;
                // input + output: addition of two commutes, so both ranks have the same bits.
                if self.mutant != Some(Mutant::TiedOneSided) || instr.chunk == 0 {
                    kernels::add_assign(self.ctx, &mut state.total[embed], &other);
                }
                self.memory.pool.give(other);
            }
            _ => return Err(TrainError::Internal(format!("{value:?} does not travel point to point"))),
        }
        Ok(())
    }

    /// What this rank speaks for: every unit's loss and every state chunk's gradient has one speaker.
    fn fill_ballot(&self, mode: Mode) -> Ballot {
        let mut ballot = Ballot { stop: self.stop.load(Ordering::Relaxed), ..Ballot::default() };
        if self.place.at.tp == 0 {
            ballot.losses = self.memory.losses.iter().map(|(unit, sum)| (*unit, *sum)).collect();
            ballot.losses.sort_unstable_by_key(|(unit, _)| *unit);
        }
        if mode == Mode::Eval {
            return ballot;
        }
        for state in self.chunks.values() {
            let mine = &state.owners[self.place.at.dp];
            for (held, slice, elements, at) in state.pieces(mine) {
                let replica = held.tensor.cut == Cut::Whole && self.place.at.tp > 0;
                if replica || !held.counts {
                    continue;
                }
                let chunks = state.total[at].chunks(spec::tensors::STATE_CHUNK);
                let sums = chunks.map(|chunk| kernels::sum_squares(self.ctx, chunk)).collect();
                ballot.squares.push((held.index, slice, elements.start / spec::tensors::STATE_CHUNK, sums));
            }
        }
        ballot
    }

    /// What the last exchange of ballots came to.
    pub(crate) fn tally(&self, mode: Mode) -> Result<vote::Tally, TrainError> {
        let ballots = self.ballot.iter().map(|b| Ballot::decode(b)).collect::<Result<Vec<_>, _>>()?;
        vote::tally(&ballots, &self.run.grid, if mode == Mode::Train { &self.tensors } else { &[] })
    }
}

fn unit_of(instr: &Instr) -> Result<Unit, TrainError> {
    instr.unit.ok_or_else(|| TrainError::Internal(format!("`{instr}` names no microbatch")))
}

fn unhosted(instr: &Instr) -> TrainError {
    TrainError::Internal(format!("`{instr}` names a chunk that this rank does not hold, or has no gradients"))
}

//! The executor: runs a rank's program, instruction by instruction, and nothing else.

mod ballot;
mod exchange;
mod experts;
mod grads;
mod later;
mod posted;
mod recheck;
mod record;
mod routers;
mod shelved;
mod verdict;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kernels::{Ctx, RopeTable};
use program::{Bucket, Instr, Mirrors, Mode, Op, Packed, Pass, Program, Segment, Value};
use spec::tensors::Tensor;
use spec::{Leaf, Run, Unit};

use crate::buffers::{Memory, Tokens};
use crate::comm::Comm;
use crate::error::TrainError;
use crate::fault::{self, Faults, Strike};
use crate::guard::Guard;
use crate::init;
use crate::lent::{Lent, Loan};
use crate::mutant::{self, Mutant};
use crate::persist;
use crate::place::Place;
use crate::rank::Pulse;
use crate::saver::Word;
use crate::segments::{self, Env};
use crate::shelf::Shelf;
use crate::state::ChunkState;
use crate::vote::{self, Decision};

pub use recheck::Recheck;
pub use record::Recorder;
pub use verdict::Verdict;

/// What the executor counted.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Instructions run.
    pub instructions: u64,
    /// Units whose backward this rank took part in.
    pub units: u64,
    /// Most bytes kept for backward at once, in a training step.
    pub peak_kept: u64,
    /// Gradients, each of one bucket, that this rank made of other ranks' leaves to check them.
    pub leaves_checked: u64,
    /// Time in segments and updates.
    pub compute: Duration,
    /// Time in exchanges, waiting included.
    pub exchange: Duration,
    /// Time in hashes of state at rest.
    pub guard: Duration,
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
    /// What of the state is being copied; before `chunks`, so that it is waited for before they are freed.
    lent: Lent,
    /// State, by chunk.
    pub chunks: BTreeMap<usize, ChunkState>,
    /// The rank whose state is mirrored here, and that state by its chunks.
    pub mirrors: Option<(usize, BTreeMap<usize, ChunkState>)>,
    /// The update of that state, if it is not complete.
    later: Option<later::Later>,
    /// Time that went into it since that was asked last.
    late: Duration,
    /// The look before the vote is for all that is mirrored, too: its last update has not looked at it, or found something.
    looks_at_mirrors: bool,
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
    /// Where it is kept what routers do in a forward without a backward, for who asks for it.
    pub routing: Option<Vec<segments::Routing>>,
    /// Writes down when instructions run, if that is wanted.
    pub recorder: Option<Recorder>,
    /// Checks a step by other ranks, if that is wanted.
    pub recheck: Recheck,
    /// Up to this step all were checked, by the ranks or by spares; none: nobody does.
    pub checked: Option<u64>,
    /// The first step that nobody can check any more, if there is one.
    pub unseen: Option<u64>,
    /// By leaf, what the last pass made of it, where spares check it.
    pub watch: Option<BTreeMap<u64, u64>>,
    /// What has left and is not taken yet, by chunk.
    posted: HashMap<(usize, Value), posted::InFlight>,
    /// For [`Mutant::StaleShard`]: parameters as they were last gathered.
    stale: HashMap<(usize, Bucket), Vec<f32>>,
    rope: RopeTable,
    /// Weights that stay packed in a training step.
    packed: Packed,
    memory: Memory,
    /// Where what layers keep goes meanwhile, if it does.
    shelf: Option<Shelf>,
    /// Bytes kept for backward.
    kept: u64,
    stop: Arc<AtomicBool>,
    ballot: Vec<Vec<u8>>,
    decision: Option<Decision>,
    /// The last vote of a training step.
    pub verdict: Option<Verdict>,
    /// When that was.
    pub voted: Option<Instant>,
    /// The step whose gradients were complete last.
    pub prepared: Option<u64>,
    /// What the state was when it was written, if that is wanted.
    pub guard: Guard,
    /// State is hashed when it is written.
    pub guarded: bool,
    /// Faults to come.
    pub faults: Faults<'a>,
    /// Where work is shown.
    pub pulse: Arc<Pulse>,
    /// Rows of each expert in the last step, by layer.
    pub loads: Vec<Vec<u64>>,
    /// Rows sent in it to ranks with their experts, all layers.
    pub copies: u64,
    /// What goes with the ballot if a checkpoint is due after the step.
    pub writer: Option<Word>,
    /// What came with all ballots of the last vote then.
    pub writers: Option<Vec<[u64; 4]>>,
    step: u64,
}

/// Brings the whole sequences of a microbatch of a data cell.
pub type Load<'a> = dyn Fn(Unit) -> Result<Tokens, TrainError> + 'a;

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
        let mut executor = Self::empty(run, ctx, endpoint, stop);
        executor.states_mut().for_each(|state| init::fill(run, ctx, state));
        executor
    }

    /// A rank whose state is yet to come.
    pub fn empty(run: &'a Run, ctx: &'a Ctx, endpoint: fabric::Endpoint, stop: Arc<AtomicBool>) -> Self {
        let rank = endpoint.rank() as usize;
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, rank);
        let comm = Comm::new(endpoint, &run.layout, &place);
        let mut chunks = BTreeMap::new();
        for chunk in run.layout.chunks_of(place.at.pp) {
            chunks.insert(chunk, ChunkState::new(run, &place, chunk));
        }
        let mirror = |mirrors: Mirrors| {
            let ward = mirrors.ward(&run.layout, rank);
            let theirs = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, ward);
            let chunks = run.layout.chunks_of(theirs.at.pp);
            (ward, chunks.map(|chunk| (chunk, ChunkState::mirror(run, &theirs, chunk))).collect())
        };
        Self {
            mirrors: Mirrors::of(&run.layout).map(mirror),
            later: None,
            late: Duration::ZERO,
            looks_at_mirrors: true,
            rope: RopeTable::new(run.model.head_dim, run.model.rope_theta, run.train.seq),
            tensors: spec::tensors::tensors(&run.model),
            run,
            place,
            ctx,
            comm,
            lent: Lent::default(),
            chunks,
            counts: Counts::default(),
            definition: run.definition(),
            mutant: None,
            capture: None,
            routing: None,
            recorder: None,
            recheck: Recheck::default(),
            checked: None,
            unseen: None,
            watch: None,
            posted: HashMap::new(),
            stale: HashMap::new(),
            packed: Packed::default(),
            memory: Memory::default(),
            shelf: None,
            kept: 0,
            stop,
            ballot: Vec::new(),
            decision: None,
            verdict: None,
            voted: None,
            prepared: None,
            guard: Guard::default(),
            guarded: false,
            faults: Faults::default(),
            pulse: Arc::default(),
            loads: Vec::new(),
            copies: 0,
            writer: None,
            writers: None,
            step: 0,
        }
    }

    /// Puts what `layout.offload` names into files in `folder`, before it has values.
    ///
    /// # Errors
    /// [`TrainError::Io`] where the folder has no room for it.
    pub fn offload(&mut self, folder: &Path) -> Result<(), TrainError> {
        let fail = |what| move |source| TrainError::Io { what, path: folder.to_owned(), source };
        if self.run.layout.offload.activations() {
            self.shelf = Some(Shelf::new(folder).map_err(fail("keep activations in a file in"))?);
        }
        if self.run.layout.offload.optimizer() {
            let states = &mut self.states_mut();
            states.try_for_each(|state| state.offload(folder)).map_err(fail("put optimizer state into a file in"))?;
        }
        Ok(())
    }

    /// Bytes of the buffers for the values of a step, none of which is in use between steps.
    pub fn buffers_bytes(&self) -> u64 {
        self.memory.pool.bytes()
    }

    /// Lends what this rank writes to who copies it: until then updates wait.
    pub fn lend(&mut self) -> Loan {
        self.lent.settle();
        let mut lent = std::mem::take(&mut self.lent);
        // SAFETY: the pieces lie in `chunks`, which nothing changes, moves out or frees but after `settle`: an update, gathered
        // parameters, a fault, `states_mut` and `remains` call it, and `lent` is dropped first.
        let loan = unsafe { lent.lend(&persist::own_pieces(self)) };
        self.lent = lent;
        loan
    }

    /// Waits until nothing of the state is lent, and ends the update of what is mirrored: before state is changed, taken out, or
    /// looked at as a whole.
    pub fn settle(&mut self) {
        self.lent.settle();
        self.end_later();
    }

    /// Ends the update of what is mirrored.
    fn end_later(&mut self) {
        let Some(mut later) = self.later.take() else { return };
        let first = self.chunks.len();
        let Some((_, mirrored)) = &mut self.mirrors else { return };
        while later.block(self.ctx, self.run, mirrored, &self.guard, first) {}
        self.late += later.spent;
        let done = later.done();
        for (number, (state, written)) in mirrored.values().zip(done.written).enumerate() {
            self.guard.wrote(first + number, state, written);
        }
        self.looks_at_mirrors = done.spoilt || !self.guarded;
    }

    /// True if the update of what is mirrored may wait: others are waited for where rows travel to their experts, and nothing
    /// but the gradients and the vote is needed for it.
    fn may_wait(&self) -> bool {
        let biases = self.run.model.moe.as_ref().is_some_and(|moe| moe.bias_rate > 0.0);
        self.mirrors.is_some() && self.comm.ep.len() > 1 && !biases && !self.run.layout.offload.optimizer()
    }

    /// The state of this rank, then what it mirrors.
    pub fn states_mut(&mut self) -> impl Iterator<Item = &mut ChunkState> {
        self.settle();
        self.chunks.values_mut().chain(self.mirrors.iter_mut().flat_map(|(_, chunks)| chunks.values_mut()))
    }

    /// [`Executor::states_mut`], to look at; after [`Executor::settle`].
    pub fn states(&self) -> impl Iterator<Item = &ChunkState> {
        self.chunks.values().chain(self.mirrors.iter().flat_map(|(_, chunks)| chunks.values()))
    }

    /// Runs `program` once; `load` brings the whole sequences of a microbatch of a data cell. `step` (from 1) sets the
    /// learning rate.
    ///
    /// # Errors
    /// What the fabric reports, or a program that cannot be run.
    pub fn run(&mut self, program: &Program, mode: Mode, step: u64, load: &Load) -> Result<Outcome, TrainError> {
        self.decision = None;
        self.step = step;
        if mode == Mode::Train {
            self.watch.iter_mut().for_each(BTreeMap::clear);
        }
        // One reading of the clock ends an instruction and begins the next.
        let mut began = Instant::now();
        if let Some(recorder) = &mut self.recorder {
            recorder.run(began);
        }
        if mode == Mode::Train {
            self.packed = Packed::new(&self.run.model, &self.run.grid, &self.run.layout, program);
        }
        let moves = self.shelf.as_ref().filter(|_| mode == Mode::Train).map(|_| program::Shelf::new(program));
        for (at, instr) in program.instrs.iter().enumerate() {
            if let Some(moves) = &moves {
                moves.before(at).iter().try_for_each(|step| self.shelve(*step))?;
            }
            if mode == Mode::Train && !self.faults.none() {
                self.strike(program, at);
            }
            match instr.op {
                Op::Load => self.load(unit_of(instr)?, load)?,
                _ => self.instruction(instr, mode)?,
            }
            if mode == Mode::Train && at + 1 == program.instrs.len() {
                self.remember();
            }
            let exchange =
                matches!(instr.op, Op::Collective { .. } | Op::Post { .. } | Op::Send { .. } | Op::Recv { .. });
            let mut over = Instant::now();
            if let Some(more) = self.faults.drag(step, over - began).filter(|_| !exchange) {
                std::thread::sleep(more);
                over = Instant::now();
            }
            let late = std::mem::take(&mut self.late).min(over - began);
            *(if exchange { &mut self.counts.exchange } else { &mut self.counts.compute }) += over - began - late;
            self.counts.compute += late;
            let mut moved = Duration::ZERO;
            if self.comm.endpoint.in_flight() {
                self.comm.endpoint.progress()?;
                let now = Instant::now();
                moved = now - over;
                over = now;
                self.counts.exchange += moved;
            }
            self.counts.instructions += 1;
            self.pulse.work.fetch_add(1, Ordering::Relaxed);
            began = over;
            if let Some(recorder) = &mut self.recorder {
                recorder.mark(over, exchange.then_some(|| self.comm.endpoint.waited_ns()));
                recorder.moved(moved);
                recorder.late(late);
            }
        }
        let outcome = match mode {
            Mode::Train => {
                Outcome::Step(self.decision.ok_or_else(|| TrainError::Internal("a step without a vote".into()))?)
            }
            Mode::Eval => Outcome::Eval(self.tally(mode)?.loss),
        };
        self.memory.tokens.clear();
        self.memory.losses.clear();
        self.memory.loads.clear();
        self.memory.aux.clear();
        self.memory.copies = 0;
        if let Some((chunk, value)) = self.posted.keys().next() {
            return Err(TrainError::Internal(format!("{value:?} of chunk {chunk} was posted and never taken")));
        }
        let left = self.memory.in_flight();
        if !left.is_empty() {
            return Err(TrainError::Internal(format!("values of {left:?} (chunk, unit) were made and never used")));
        }
        Ok(outcome)
    }

    /// Remembers the state as it is: what an update did not tell, and all of it in a world that has had none yet.
    pub(crate) fn remember(&mut self) {
        if !self.guarded {
            return;
        }
        let began = Instant::now();
        let mut guard = std::mem::take(&mut self.guard);
        match self.later {
            // It tells what it writes.
            Some(_) => guard.fill(self.ctx, self.chunks.values()),
            None => guard.fill(self.ctx, self.states()),
        }
        self.guard = guard;
        self.counts.guard += began.elapsed();
    }

    /// True if state is not what was written. What is mirrored was looked at when it was updated, unless that was at once.
    pub(super) fn is_corrupt(&self) -> bool {
        let (ctx, own) = (self.ctx, self.chunks.len());
        let bad = match self.looks_at_mirrors {
            true => self.guard.check(ctx, self.states(), own),
            false => self.guard.check(ctx, self.chunks.values(), own),
        };
        !bad.is_empty()
    }

    /// Runs one instruction; tokens come from [`Executor::load`].
    pub(crate) fn instruction(&mut self, instr: &Instr, mode: Mode) -> Result<(), TrainError> {
        let Some(unit) = instr.unit.filter(|_| mode == Mode::Train) else { return self.one(instr, mode) };
        let before = self.memory.kept_bytes(instr.chunk, unit);
        self.one(instr, mode)?;
        self.kept = self.kept + self.memory.kept_bytes(instr.chunk, unit) - before;
        self.counts.peak_kept = self.counts.peak_kept.max(self.kept);
        Ok(())
    }

    fn one(&mut self, instr: &Instr, mode: Mode) -> Result<(), TrainError> {
        if let Some(unit) = instr.unit {
            self.memory.turn_to(instr.chunk, unit);
        }
        match instr.op {
            Op::Load => return Err(TrainError::Internal("tokens are loaded by the caller".into())),
            Op::Compute(pass, segment) => self.compute(mode, instr, pass, segment)?,
            Op::Post { exchange, value, .. } => self.post(instr, exchange, value)?,
            Op::Collective { exchange, value, axis, .. } => self.collective(mode, instr, exchange, value, axis)?,
            Op::Drop(segment) => match segment {
                Segment::Attn(layer) => self.memory.drop_kept(instr.chunk, unit_of(instr)?, layer, false),
                Segment::Residual(layer) => self.memory.drop_kept(instr.chunk, unit_of(instr)?, layer, true),
                _ => return Err(TrainError::Internal(format!("`{instr}`: nothing is kept under this name"))),
            },
            Op::Send { value, to, .. } => self.send(mode, instr, value, to)?,
            Op::Recv { value, from, .. } => self.recv(mode, instr, value, from)?,
            Op::Close { cell, bucket } => self.close(instr, cell, bucket)?,
            Op::Release(bucket) => self.release(instr, bucket)?,
            Op::Vote => {
                let mut tally = self.tally(mode)?;
                if !tally.corrupt.is_empty() {
                    // Gradients of corrupt weights are never applied.
                    self.prepared = None;
                    return Err(TrainError::Corrupt { ranks: tally.corrupt });
                }
                tally.loss = mutant::step_loss(self.mutant, tally.loss, &self.memory.losses);
                let mut decision = vote::decide(&tally, &self.run.train.recipe.at(self.step));
                let replica = |rank: u32| self.run.layout.coords(rank as usize).dp / self.run.layout.group;
                if mode == Mode::Train && self.recheck.close(&tally.leaves, replica) {
                    decision.commit = false;
                }
                if !decision.commit {
                    // The gradients go with the vote: nobody could roll forward with them.
                    self.prepared = None;
                }
                self.decision = Some(decision);
                (self.loads, self.copies) = (tally.loads, tally.copies);
                if let (Mode::Train, Some(decision)) = (mode, self.decision) {
                    self.writers = tally.writers;
                    self.voted = Some(Instant::now());
                    self.verdict = Some(Verdict { step: self.step, decision, loads: self.loads.clone() });
                }
            }
            Op::Apply => {
                self.lent.settle();
                let verdict = self.verdict.as_ref().filter(|_| self.decision.is_some());
                let verdict = verdict.ok_or_else(|| TrainError::Internal("apply before the vote".into()))?;
                let later = verdict.decision.commit && self.may_wait();
                let (number, mirrors_from) = (self.chunks.range(..instr.chunk).count(), self.chunks.len());
                let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
                mutant::shard(self.mutant, state);
                let mut apply = |number: usize, state: &mut ChunkState| {
                    let written = verdict.apply(self.ctx, self.run, state, self.guarded);
                    if verdict.decision.commit {
                        self.guard.wrote(number, state, written);
                    }
                };
                apply(number, state);
                if number == 0 && later {
                    self.later = Some(later::Later::new(verdict.clone(), self.guarded));
                } else if number == 0 {
                    self.looks_at_mirrors = true;
                    let mirrored = self.mirrors.iter_mut().flat_map(|(_, chunks)| chunks.values_mut());
                    mirrored.enumerate().for_each(|(i, state)| apply(mirrors_from + i, state));
                }
            }
        }
        Ok(())
    }

    /// Does what faults ask for while state is loaded, `step` being next.
    pub(crate) fn strike_loading(&mut self, step: u64) {
        self.faults.strike_loading(step);
    }

    /// Does what faults ask for before instruction `at`.
    fn strike(&mut self, program: &Program, at: usize) {
        for strike in self.faults.strike(self.step, program, at) {
            match strike {
                Strike::Moment(number) | Strike::Weight(number) => {
                    self.lent.settle();
                    let weight = matches!(strike, Strike::Weight(_));
                    let Some(state) = self.chunks.values_mut().next() else { continue };
                    let Some(bucket) = state.buckets.iter().position(|b| !b.moment1.is_empty()) else { continue };
                    let data = if weight { state.kept_mut(bucket).0 } else { &mut state.buckets[bucket].moment1[..] };
                    fault::flip(data, number);
                }
                Strike::Device => self.pulse.broken.store(true, Ordering::Relaxed),
                Strike::Message(number) => self.comm.endpoint.inject(fabric::Fault::FlipPayloadBit(number)),
                Strike::Lose => self.comm.endpoint.inject(fabric::Fault::Lose),
                Strike::Clock(seconds) => self.pulse.wall.jump(seconds),
                Strike::Partition(peer) => self.comm.endpoint.partition(peer),
            }
        }
    }

    /// Takes in the hosted lanes of a unit for the instructions that follow; `load` as in [`Executor::run`].
    ///
    /// # Errors
    /// What `load` reports.
    pub(crate) fn load(&mut self, unit: Unit, load: &Load) -> Result<(), TrainError> {
        let lanes = self.place.lanes(unit);
        let mut tokens = Tokens::default();
        for cell in lanes.cells.clone() {
            // In a checking pass, those of other ranks.
            let whole = load(Unit { cell: (cell + self.recheck.shift()) % self.run.grid.dp, ..unit })?;
            for context in lanes.contexts.clone() {
                let context = mutant::context(self.mutant, context, self.place.grid_cp);
                for rows in self.place.rows_of_context(context) {
                    tokens.extend(&whole, rows);
                }
            }
        }
        self.memory.tokens.insert(unit, tokens);
        Ok(())
    }

    /// Drops what is known of a unit whose forward is over.
    pub(crate) fn forget(&mut self, unit: Unit) {
        self.memory.saved.retain(|(_, kept), _| *kept != unit);
        self.memory.tokens.remove(&unit);
        for cell in self.place.leaves(unit) {
            self.memory.losses.remove(&Leaf { cell, mb: unit.mb });
        }
    }

    fn compute(&mut self, mode: Mode, instr: &Instr, pass: Pass, segment: Segment) -> Result<(), TrainError> {
        let unit = unit_of(instr)?;
        let env = Env::new(self.ctx, &self.run.model, &self.place, unit, &self.rope, mode, self.mutant);
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        // What adds to weight gradients finds the accumulators of the unit's lanes.
        let adds = matches!(pass, Pass::Backward | Pass::BackwardWeight) || matches!(segment, Segment::Loss(_));
        if mode == Mode::Train && adds {
            let leaf = grads::leaf_of(&self.run.grid, unit);
            state.grads.turn_to(mutant::leaf(self.mutant, state, leaf));
        }
        if mode == Mode::Train {
            let uses = program::packed::uses(pass, segment, self.run.grid.cp > 1).into_iter();
            state.packed.stale = self.mutant == Some(Mutant::StalePanels);
            state.pack(self.ctx, uses.filter(|of| self.packed.keeps(instr.chunk, *of)));
        }
        segments::run(&env, state, &mut self.memory, unit, pass, segment)?;
        if let (Some(capture), Segment::Logits(block)) = (&mut self.capture, segment) {
            let logits = self.memory.regs.logits.iter().enumerate();
            capture.extend(logits.map(|(cell, logits)| (unit, block, cell, logits.clone())));
        }
        if let (Some(kept), Mode::Eval, Segment::Route(layer)) = (&mut self.routing, mode, segment) {
            kept.extend(segments::routing(&env, &self.run.grid, &mut self.memory, instr.chunk, unit, layer));
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
}

fn unit_of(instr: &Instr) -> Result<Unit, TrainError> {
    instr.unit.ok_or_else(|| TrainError::Internal(format!("`{instr}` names no microbatch")))
}

fn unhosted(instr: &Instr) -> TrainError {
    TrainError::Internal(format!("`{instr}` names a chunk that this rank does not hold, or has no gradients"))
}

//! One rank's list against the law.
//!
//! The instructions that name one chunk and one unit must be those of [`Laws`], each after those that it needs; between
//! the units the list is free, but for the weight gradients and gathered parameters (`buckets`).

mod buckets;
mod diagnose;
mod end;
mod unit;

use spec::{Coords, Grid, Layout, Model, Unit};

use super::VIOLATIONS_PER_RANK_MAX;
use super::law::{Law, Laws, Sums};
use super::violation::{Place, Violation};
use crate::bytes::Sizes;
use crate::instr::{Axis, Exchange, Instr, Mode, Op, Program, Scope, Value};
use buckets::BucketOrder;
use unit::{Progress, Turnstile};

/// A step, as the law sees it.
pub(super) struct Step<'a> {
    pub model: &'a Model,
    pub grid: &'a Grid,
    pub layout: &'a Layout,
    pub mode: Mode,
    pub sizes: &'a Sizes,
    pub laws: &'a Laws,
    pub sums: Sums,
}

/// What is wrong with `program` by itself, the first few.
pub(super) fn check(step: &Step<'_>, program: &Program) -> Vec<Violation> {
    let at = step.layout.coords(program.rank);
    let chunks: Vec<ChunkOrder<'_>> =
        step.layout.chunks_of(at.pp).map(|chunk| ChunkOrder::new(chunk, step, at)).collect();
    let cells: Vec<usize> = step.grid.unit_cells(step.layout.cells[at.dp].clone()).collect();
    let loaded = vec![false; cells.len() * step.grid.microbatches];
    let mut order = Order {
        step,
        program,
        at,
        cells,
        loaded,
        chunks,
        mirrored: false,
        ballot: false,
        vote: false,
        violations: Vec::new(),
    };
    for (index, instr) in program.instrs.iter().enumerate() {
        if order.violations.len() >= VIOLATIONS_PER_RANK_MAX {
            return order.violations;
        }
        order.instr(index, instr);
    }
    order.finish();
    order.violations
}

/// How far a chunk is.
struct ChunkOrder<'a> {
    chunk: usize,
    /// Backward in one part, and in two.
    laws: &'a [Law; 2],
    /// The ranks of the chunks before and after.
    before: usize,
    after: usize,
    /// By unit.
    units: Vec<Progress>,
    /// By data cell and accumulator of the law: whose turn it is.
    turns: Vec<Vec<Turnstile>>,
    buckets: Vec<BucketOrder>,
    /// Exchanges of rows that were posted and not taken: of which unit, and its entry of the law.
    posted: Vec<(Value, usize, usize)>,
    /// Leaves whose gradients by sequence slice are summed.
    sliced: usize,
    tied_sent: bool,
    tied_received: bool,
    applied: bool,
}

impl<'a> ChunkOrder<'a> {
    fn new(chunk: usize, step: &Step<'a>, at: Coords) -> Self {
        let (layout, grid) = (step.layout, step.grid);
        let rank_of = |chunk: usize| layout.rank(Coords { pp: layout.chunk_pp(chunk), ..at });
        let last = layout.chunks() - 1;
        let (laws, cells) = (step.laws.of(chunk, at), grid.unit_cells(layout.cells[at.dp].clone()).count());
        Self {
            chunk,
            laws,
            before: rank_of(if chunk == 0 { last } else { chunk - 1 }),
            after: rank_of(if chunk == last { 0 } else { chunk + 1 }),
            units: vec![Progress::new(&laws[0]); cells * grid.microbatches],
            turns: vec![vec![Turnstile::default(); laws[0].accumulators.len()]; cells],
            buckets: step.sizes.buckets(chunk).map(|bucket| BucketOrder::new(bucket, &laws[0])).collect(),
            posted: Vec::new(),
            sliced: 0,
            tied_sent: false,
            tied_received: false,
            applied: false,
        }
    }

    /// The microbatch whose turn it is to add to accumulator `index` of data cell number `cell` of the rank. Units that
    /// were reported stand in nobody's way.
    fn turn(&self, cell: usize, index: usize) -> usize {
        let microbatches = self.units.len() / self.turns.len();
        let units = &self.units[cell * microbatches..(cell + 1) * microbatches];
        let first = self.turns[cell][index].mb;
        (first..microbatches).find(|mb| !units[*mb].broken).unwrap_or(microbatches)
    }

    /// The law of a unit, once it is known whether its backward is in parts.
    fn law(&self, unit: usize) -> &'a Law {
        &self.laws[usize::from(self.units[unit].split)]
    }
}

/// A list under examination.
struct Order<'a> {
    step: &'a Step<'a>,
    program: &'a Program,
    at: Coords,
    /// The data cells by which the rank's units are named.
    cells: Vec<usize>,
    loaded: Vec<bool>,
    chunks: Vec<ChunkOrder<'a>>,
    mirrored: bool,
    ballot: bool,
    vote: bool,
    violations: Vec<Violation>,
}

impl Order<'_> {
    fn place(&self, at: usize) -> Place {
        Place::of(self.program, at)
    }

    fn wrong(&mut self, at: usize, why: impl Into<String>) {
        self.violations.push(Violation::Wrong { place: self.place(at), why: why.into() });
    }

    fn double(&mut self, at: usize) {
        self.violations.push(Violation::Double { place: self.place(at) });
    }

    fn out_of_order(&mut self, at: usize, law: impl Into<String>) {
        self.violations.push(Violation::OutOfOrder { place: self.place(at), law: law.into() });
    }

    fn want_bytes(&mut self, at: usize, bytes: u64, want: u64) {
        if bytes != want {
            self.violations.push(Violation::Bytes { place: self.place(at), want });
        }
    }

    /// Index of the chunk among this rank's.
    fn local_chunk(&mut self, at: usize, chunk: usize) -> Option<usize> {
        let local = self.chunks.iter().position(|c| c.chunk == chunk);
        if local.is_some() {
            return local;
        }
        self.wrong(at, format!("the rank is at pipeline position {} and does not hold chunk {chunk}", self.at.pp));
        None
    }

    /// Index of the unit among this rank's.
    fn local_unit(&mut self, at: usize, unit: Option<Unit>) -> Option<usize> {
        let microbatches = self.step.grid.microbatches;
        match unit {
            Some(Unit { cell, mb }) if mb < microbatches && self.local_cell(cell).is_some() => {
                self.local_cell(cell).map(|local| local * microbatches + mb)
            }
            Some(Unit { cell, mb }) => {
                self.wrong(
                    at,
                    format!("the rank is at data position {} and does not host cell {cell} mb {mb}", self.at.dp),
                );
                None
            }
            None => {
                self.wrong(at, "it names no microbatch");
                None
            }
        }
    }

    /// The unit of this rank with index `i`.
    fn unit(&self, i: usize) -> Unit {
        let microbatches = self.step.grid.microbatches;
        Unit { cell: self.cells[i / microbatches], mb: i % microbatches }
    }

    /// The number of a data cell among those by which the rank's units are named.
    fn local_cell(&self, cell: usize) -> Option<usize> {
        self.cells.iter().position(|known| *known == cell)
    }

    fn instr(&mut self, at: usize, instr: &Instr) {
        match (instr.op.scope(), instr.unit) {
            (Scope::Unit, None) => return self.wrong(at, "it names no microbatch"),
            (Scope::Step, Some(_)) => return self.wrong(at, "it is of the whole step and names a microbatch"),
            _ => {}
        }
        match instr.op {
            Op::Load => self.load(at, instr),
            Op::Compute(..) | Op::Drop(_) => self.of_unit(at, instr),
            Op::Collective { value: Value::SliceGrads, axis: Axis::Tp, exchange: Exchange::AllReduce, bytes } => {
                self.slice_grads(at, instr, bytes);
            }
            Op::Collective { axis: Axis::Tp | Axis::Cp | Axis::Ep, .. } => self.of_unit(at, instr),
            Op::Collective { exchange, value, axis, bytes } => self.of_step(at, instr, exchange, value, axis, bytes),
            Op::Post { exchange, value, axis: Axis::Tp } => self.post_rows(at, instr, exchange, value),
            Op::Post { exchange, value, axis } => self.post(at, instr, exchange, value, axis),
            Op::Send { value: Value::TiedGrads, to, bytes } => self.tied(at, instr, true, to, bytes),
            Op::Recv { value: Value::TiedGrads, from, bytes } => self.tied(at, instr, false, from, bytes),
            Op::Send { .. } | Op::Recv { .. } => self.of_unit(at, instr),
            Op::Close { cell, bucket } => self.close(at, instr, cell, bucket),
            Op::Release(bucket) => self.release(at, instr, bucket),
            Op::Vote => self.cast(at),
            Op::Apply => self.apply(at, instr),
        }
    }

    fn load(&mut self, at: usize, instr: &Instr) {
        if self.local_chunk(at, instr.chunk).is_none() {
            return;
        }
        let Some(unit) = self.local_unit(at, instr.unit) else { return };
        if std::mem::replace(&mut self.loaded[unit], true) {
            self.double(at);
        }
    }
}

//! Buckets: whose gradients are where, and which parameters are there.

use spec::{Accumulate, Unit};

use super::super::law::{Law, Sums, reads};
use super::super::violation::Violation;
use super::{ChunkOrder, Order};
use crate::buckets::Bucket;
use crate::instr::{Axis, Exchange, Instr, Mode, Pass, Segment, Value};

/// How far a bucket of a chunk is.
pub(super) struct BucketOrder {
    pub bucket: Bucket,
    /// The accumulators of the law that it is made of, by index.
    accumulators: Vec<usize>,
    /// Leaves pushed onto the tree over the cells.
    closed: usize,
    /// Sums over the cells.
    sums: usize,
    /// Sums gone to the replicas.
    spread: bool,
    /// The sum that is due next has been posted.
    posted: bool,
    /// Gathered parameters are here (zero 3).
    pub present: bool,
    /// Their gather has been posted and not been taken.
    pub coming: bool,
    /// Updated parameters have come (zero 1 and 2).
    updated: bool,
}

impl BucketOrder {
    pub fn new(bucket: Bucket, law: &Law) -> Self {
        let of = law.accumulators.iter().enumerate().filter(|(_, (a, _))| a.is_of(bucket)).map(|(i, _)| i);
        let (posted, present, coming) = (false, false, false);
        let accumulators = of.collect();
        Self { bucket, accumulators, closed: 0, sums: 0, spread: false, posted, present, coming, updated: false }
    }

    /// All its sums are where they must be before the vote.
    pub fn summed(&self, sums: &Sums) -> bool {
        self.sums == sums.count && (self.spread || !sums.spread(self.bucket))
    }
}

impl ChunkOrder<'_> {
    /// `what` of a bucket, in words.
    pub fn at(&self, what: &str, bucket: Bucket) -> String {
        format!("{what} of {bucket:?} for chunk {}", self.chunk)
    }

    fn index(&self, bucket: Bucket) -> Option<usize> {
        self.buckets.iter().position(|b| b.bucket == bucket)
    }
}

impl Order<'_> {
    /// Indices of the chunk and the bucket.
    fn local_bucket(&mut self, at: usize, chunk: usize, bucket: Bucket) -> Option<(usize, usize)> {
        let local = self.local_chunk(at, chunk)?;
        let Some(index) = self.chunks[local].index(bucket) else {
            self.wrong(at, format!("chunk {chunk} has no bucket {bucket:?}"));
            return None;
        };
        Some((local, index))
    }

    /// Leaf number `i` of this rank, in the order of the sums: its cell, and its microbatch (0 where all add up first).
    fn leaf(&self, i: usize) -> (usize, usize) {
        let cells = self.cells.len();
        if self.step.sums.count == 1 { (self.cells[i], 0) } else { (self.cells[i % cells], i / cells) }
    }

    /// True if each microbatch is summed over the cells by itself.
    fn each_microbatch(&self) -> bool {
        self.step.grid.accumulate == Accumulate::Reduced
    }

    /// Leaves of this rank in a step.
    fn leaves(&self) -> usize {
        self.cells.len() * self.step.sums.count
    }

    /// A microbatch of leaf number `leaf` that has yet to add to one of the accumulators given.
    fn yet_to_add(&self, local: usize, leaf: usize, accumulators: impl Iterator<Item = usize>) -> Option<usize> {
        let (cell, mb) = self.leaf(leaf);
        let end = if self.step.sums.count == 1 { self.step.grid.microbatches } else { mb + 1 };
        let number = self.local_cell(cell).expect("a leaf of this rank");
        let turn = accumulators.map(|index| self.chunks[local].turn(number, index)).min();
        turn.filter(|turn| *turn < end)
    }

    pub(super) fn close(&mut self, at: usize, instr: &Instr, cell: usize, bucket: Bucket) {
        let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
        if self.step.mode == Mode::Eval {
            return self.wrong(at, "an evaluation has no gradients");
        }
        let Some(number) = self.local_cell(cell) else {
            return self.wrong(at, format!("the rank does not host cell {cell}"));
        };
        let BucketOrder { closed, sums, posted, .. } = self.chunks[local].buckets[index];
        if posted {
            self.out_of_order(at, format!("the gradients of {bucket:?} have been posted and not been taken"));
        }
        if closed == self.leaves() || (self.step.sums.count == 1 && cell < self.leaf(closed).0) {
            return self.double(at);
        }
        let (due, mb) = self.leaf(closed);
        if cell != due {
            self.out_of_order(at, format!("cells are closed in ascending order, and {due} is not closed"));
        }
        // Where each microbatch is a leaf of its own, the close names it.
        if self.each_microbatch() && instr.unit.is_none_or(|unit| unit.mb != mb) {
            self.out_of_order(at, format!("the leaf of mb {mb} is due"));
        }
        if self.step.sums.early && sums < mb {
            self.out_of_order(at, format!("the sum over cells of mb {sums} has not been taken"));
        }
        // In the order of a step without sums of single microbatches, a close that comes early skips cells.
        let leaf = if self.step.sums.count == 1 { number } else { closed };
        let accumulators = self.chunks[local].buckets[index].accumulators.clone();
        if let Some(mb) = self.yet_to_add(local, leaf, accumulators.into_iter()) {
            self.out_of_order(at, format!("mb {mb} of the cell has yet to add to the weight gradients of {bucket:?}"));
        }
        if bucket.is_per_slice() && self.chunks[local].sliced <= leaf {
            self.out_of_order(at, "the cell's gradients by sequence slice are not summed");
        }
        self.chunks[local].buckets[index].closed = leaf + 1;
    }

    /// Gradients with a leaf per slice are summed once for every leaf, when nothing more adds to them.
    pub(super) fn slice_grads(&mut self, at: usize, instr: &Instr, bytes: u64) {
        let Some(local) = self.local_chunk(at, instr.chunk) else { return };
        let Some(unit) = self.local_unit(at, instr.unit) else { return };
        if self.step.mode == Mode::Eval || !self.step.sizes.has_slice_grads() {
            return self.wrong(at, "the step has no gradients by sequence slice");
        }
        self.want_bytes(at, bytes, self.step.sizes.slice_grads(instr.chunk, self.at.tp));
        let Unit { cell, mb } = self.unit(unit);
        let number = self.local_cell(cell).expect("a unit of this rank");
        let leaf = if self.step.sums.count == 1 { number } else { mb * self.cells.len() + number };
        let chunk = &self.chunks[local];
        if leaf < chunk.sliced {
            return self.double(at);
        }
        let experts = || chunk.buckets.iter().filter(|b| b.bucket.is_per_slice());
        let in_turn = leaf == chunk.sliced && experts().all(|b| b.closed == leaf);
        let open = self.yet_to_add(local, leaf, experts().flat_map(|b| b.accumulators.clone()));
        if !in_turn {
            self.out_of_order(at, "slices are summed cell by cell, before the cell is closed");
        }
        if let Some(mb) = open {
            self.out_of_order(at, format!("mb {mb} of the cell has yet to add to the gradients of experts"));
        }
        self.chunks[local].sliced = leaf + 1;
    }

    /// A share of an exchange that leaves ahead of it: gradients when they are complete, parameters before their use.
    pub(super) fn post(&mut self, at: usize, instr: &Instr, exchange: Exchange, value: Value, axis: Axis) {
        let train = self.step.mode == Mode::Train;
        let (zero, vote) = (self.step.layout.zero, self.vote);
        match value {
            Value::Grads(bucket) if train && axis == Axis::holders(bucket.class()) => {
                let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
                let Sums { count, exchange: want, .. } = self.step.sums;
                if exchange != want {
                    return self.wrong(at, format!("with zero {zero} it is {want:?}"));
                }
                let BucketOrder { sums, closed, posted, .. } = self.chunks[local].buckets[index];
                if posted || sums == count {
                    return self.double(at);
                }
                self.chunks[local].buckets[index].posted = true;
                if closed < (sums + 1) * self.cells.len() {
                    let (open, _) = self.leaf(closed);
                    let law =
                        format!("the gradients of {bucket:?} are not complete: cell {open} of the chunk is not closed");
                    self.out_of_order(at, law);
                }
            }
            Value::Params(bucket) if zero == 3 && axis == Axis::shard(bucket.class()) => {
                let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
                if exchange != Exchange::AllGather || !self.step.sizes.has_parameters(instr.chunk, bucket) {
                    return self.wrong(at, "parameters are gathered, where the chunk has any");
                }
                let state = &mut self.chunks[local].buckets[index];
                if state.present || std::mem::replace(&mut state.coming, true) {
                    return self.double(at);
                }
                if vote {
                    let law = "some ranks may have updated their parameters after the vote, and others not";
                    self.out_of_order(at, law);
                }
            }
            _ => self.wrong(at, "no such exchange is posted"),
        }
    }

    /// A sum over the data cells.
    pub(super) fn sum(&mut self, at: usize, instr: &Instr, exchange: Exchange, bucket: Bucket, bytes: u64) {
        let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
        let want = self.step.sums.exchange;
        if exchange != want {
            return self.wrong(at, format!("with zero {} it is {want:?}", self.step.layout.zero));
        }
        self.want_bytes(at, bytes, self.step.sizes.grads(instr.chunk, bucket, self.at, exchange));
        let BucketOrder { sums, closed, .. } = self.chunks[local].buckets[index];
        if sums == self.step.sums.count {
            return self.double(at);
        }
        // Where each microbatch is summed by itself, the exchange names it: whoever takes the last one has them all.
        if self.each_microbatch() && instr.unit.is_none_or(|unit| unit.mb != sums) {
            self.out_of_order(at, format!("the sum of mb {sums} is due"));
        }
        self.chunks[local].buckets[index].sums = sums + 1;
        self.chunks[local].buckets[index].posted = false;
        if closed < (sums + 1) * self.cells.len() {
            let (open, _) = self.leaf(closed);
            let of = if self.step.sums.count > 1 { format!(" in mb {sums}") } else { String::new() };
            self.out_of_order(at, format!("cell {open} of the chunk is not closed{of}"));
        }
    }

    /// Sums to the replicas of their owner.
    pub(super) fn spread(&mut self, at: usize, instr: &Instr, bucket: Bucket, bytes: u64) {
        let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
        if !self.step.sums.spread(bucket) {
            return self.wrong(at, "no other rank owns the same shard, or all have the sum");
        }
        self.want_bytes(at, bytes, self.step.sizes.grads(instr.chunk, bucket, self.at, Exchange::AllGather));
        let state = &mut self.chunks[local].buckets[index];
        if std::mem::replace(&mut state.spread, true) {
            return self.double(at);
        }
        if state.sums < self.step.sums.count {
            let (have, want) = (state.sums, self.step.sums.count);
            self.out_of_order(at, format!("{have} of {want} sums over the cells have been taken"));
        }
    }

    /// Parameters from their owners: updated ones after apply, or (zero 3) just in time.
    pub(super) fn params(&mut self, at: usize, instr: &Instr, bucket: Bucket, bytes: u64) {
        let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
        let (zero, train) = (self.step.layout.zero, self.step.mode == Mode::Train);
        if zero == 0 {
            return self.wrong(at, "with zero 0 every rank updates all of its parameters");
        }
        if zero < 3 && !train {
            return self.wrong(at, "an evaluation changes no parameters");
        }
        if !self.step.sizes.has_parameters(instr.chunk, bucket) {
            return self.wrong(at, format!("{bucket:?} has no parameters of its own on this chunk"));
        }
        self.want_bytes(at, bytes, self.step.sizes.params(instr.chunk, bucket, self.at));
        let vote = self.vote;
        let chunk = &mut self.chunks[local];
        let state = &mut chunk.buckets[index];
        state.coming = false;
        let there = if zero == 3 { &mut state.present } else { &mut state.updated };
        if std::mem::replace(there, true) {
            return self.double(at);
        }
        if zero == 3 && vote {
            self.out_of_order(at, "some ranks may have updated their parameters after the vote, and others not");
        } else if zero < 3 && !chunk.applied {
            self.out_of_order(at, "parameters are gathered after the chunk's apply");
        }
    }

    pub(super) fn release(&mut self, at: usize, instr: &Instr, bucket: Bucket) {
        let Some((local, index)) = self.local_bucket(at, instr.chunk, bucket) else { return };
        if !std::mem::replace(&mut self.chunks[local].buckets[index].present, false) {
            self.wrong(at, format!("the parameters of {bucket:?} are not gathered"));
        }
    }

    /// With zero 3 a segment finds its parameters gathered.
    pub(super) fn reads(&mut self, at: usize, local: usize, pass: Pass, segment: Segment) {
        if self.step.layout.zero < 3 {
            return;
        }
        for bucket in reads(self.step.model, self.step.layout, pass, segment).into_iter().flatten() {
            let chunk = &self.chunks[local];
            if chunk.index(bucket).is_some_and(|index| !chunk.buckets[index].present) {
                let missing = format!("the gather of the parameters of {bucket:?}");
                self.violations.push(Violation::Missing { place: self.place(at), missing });
            }
        }
    }

    /// What the list should have had of a bucket.
    pub(super) fn lacks(&self, chunk: &ChunkOrder<'_>, bucket: &BucketOrder) -> Vec<String> {
        let sums = &self.step.sums;
        let zero = self.step.layout.zero;
        let updates = matches!(zero, 1 | 2) && self.step.sizes.has_parameters(chunk.chunk, bucket.bucket);
        let parts = [
            (bucket.closed < self.leaves(), "the close of its last cell"),
            (bucket.sums < sums.count, "the exchange of Grads"),
            (sums.spread(bucket.bucket) && !bucket.spread, "the gather of Grads for replicas"),
            (updates && !bucket.updated, "the gather of Params"),
            (bucket.posted && bucket.sums == sums.count, "the exchange of posted Grads"),
        ];
        parts.iter().filter(|(lacks, _)| *lacks).map(|(_, what)| chunk.at(what, bucket.bucket)).collect()
    }
}

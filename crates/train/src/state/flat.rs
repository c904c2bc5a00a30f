//! A chunk's flat vector in memory: bucket by bucket, because buckets come and go.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut, Range};

use spec::Unit;

use super::Alive;
use crate::buffers::Pool;

/// Where buckets begin in the flat vector; the end comes last.
#[derive(Debug, Clone)]
struct Starts(Vec<usize>);

impl Starts {
    /// The bucket of `at`, and where it stands there.
    fn find(&self, at: &Range<usize>) -> (usize, Range<usize>) {
        let bucket = self.0.partition_point(|start| *start <= at.start) - 1;
        let first = self.0[bucket];
        (bucket, at.start - first..at.end - first)
    }

    fn len(&self, bucket: usize) -> usize {
        self.0[bucket + 1] - self.0[bucket]
    }
}

/// One flat vector; a bucket that is not there is empty. A range lies in one bucket.
#[derive(Debug)]
pub struct Flat {
    starts: Starts,
    buckets: Vec<Vec<f32>>,
    /// By bucket, how often it may have changed.
    versions: Vec<u64>,
}

impl Flat {
    /// A vector of which nothing is there.
    pub fn new(starts: &[usize]) -> Self {
        let buckets = starts.len() - 1;
        Self { starts: Starts(starts.to_vec()), buckets: vec![Vec::new(); buckets], versions: vec![1; buckets] }
    }

    /// Another number, above 0, after anything that could have changed the bucket of `at`.
    pub fn version(&self, at: &Range<usize>) -> u64 {
        self.versions[self.starts.find(at).0]
    }

    /// Puts in a whole bucket.
    pub fn put(&mut self, bucket: usize, values: Vec<f32>) {
        self.versions[bucket] += 1;
        self.buckets[bucket] = values;
    }

    /// Takes a bucket out.
    pub fn take(&mut self, bucket: usize) -> Vec<f32> {
        self.versions[bucket] += 1;
        std::mem::take(&mut self.buckets[bucket])
    }
}

impl Index<Range<usize>> for Flat {
    type Output = [f32];

    fn index(&self, at: Range<usize>) -> &[f32] {
        let (bucket, at) = self.starts.find(&at);
        &self.buckets[bucket][at]
    }
}

impl IndexMut<Range<usize>> for Flat {
    fn index_mut(&mut self, at: Range<usize>) -> &mut [f32] {
        let (bucket, at) = self.starts.find(&at);
        self.versions[bucket] += 1;
        &mut self.buckets[bucket][at]
    }
}

/// Gradient accumulators of the leaves under way: of each unit, or of all microbatches of a cell, one vector per lane.
/// A bucket begins with zeros when it is first added to, and is gone when it is taken: a gradient takes no memory before
/// its backward and after its sum.
#[derive(Debug)]
pub struct Grads {
    starts: Starts,
    /// By unit and lane; a schedule may begin one before the last is closed.
    open: BTreeMap<(Unit, usize), Vec<Vec<f32>>>,
    /// The unit that is added to.
    unit: Unit,
    /// Buffers of the size of a bucket.
    pub pool: Pool,
    /// Open and closed leaves, in elements.
    pub alive: Alive,
}

impl Grads {
    /// Nothing is open.
    pub fn new(starts: &[usize]) -> Self {
        let unit = Unit { cell: 0, mb: 0 };
        let starts = Starts(starts.to_vec());
        Self { starts, open: BTreeMap::new(), unit, pool: Pool::default(), alive: Alive::default() }
    }

    /// What is added from now on belongs to `unit`.
    pub fn turn_to(&mut self, unit: Unit) {
        self.unit = unit;
    }

    /// The unit that is added to, if it is open.
    pub fn at_hand(&self) -> Option<Unit> {
        self.open.contains_key(&(self.unit, 0)).then_some(self.unit)
    }

    /// The accumulator of a lane of the unit at hand, at a range of the flat vector.
    pub fn lane(&mut self, lane: usize, at: Range<usize>) -> &mut [f32] {
        let (bucket, at) = self.starts.find(&at);
        &mut self.bucket(lane, bucket)[at]
    }

    /// Several accumulators of a lane, at ranges of one bucket that do not overlap.
    ///
    /// # Panics
    /// If they do, or lie in two buckets.
    pub fn lane_parts(&mut self, lane: usize, at: &[Range<usize>]) -> Vec<&mut [f32]> {
        let found: Vec<_> = at.iter().map(|at| self.starts.find(at)).collect();
        let Some(&(bucket, _)) = found.first() else { return Vec::new() };
        assert!(found.iter().all(|(other, _)| *other == bucket), "accumulators {at:?} lie in several buckets");
        let mut order: Vec<usize> = (0..at.len()).collect();
        order.sort_unstable_by_key(|&i| found[i].1.start);
        let (mut rest, mut passed) = (&mut self.bucket(lane, bucket)[..], 0);
        let mut parts: Vec<_> = at.iter().map(|_| None).collect();
        for i in order {
            let range = &found[i].1;
            let (part, after) = std::mem::take(&mut rest)[range.start - passed..].split_at_mut(range.len());
            (rest, passed, parts[i]) = (after, range.end, Some(part));
        }
        parts.into_iter().flatten().collect()
    }

    /// Ends `bucket` of a lane of `unit`: all that was added to it.
    pub fn take(&mut self, unit: Unit, lane: usize, bucket: usize) -> Vec<f32> {
        self.turn_to(unit);
        let done = std::mem::take(self.bucket(lane, bucket));
        if self.open[&(unit, lane)].iter().all(Vec::is_empty) {
            self.open.remove(&(unit, lane));
        }
        done
    }

    /// Takes back the buffers of leaves.
    pub fn recycle(&mut self, buffers: impl IntoIterator<Item = Vec<f32>>) {
        for buffer in buffers {
            self.alive.sub(buffer.len());
            self.pool.give(buffer);
        }
    }

    /// Zeros, unless the bucket of the lane has begun.
    fn bucket(&mut self, lane: usize, bucket: usize) -> &mut Vec<f32> {
        let Self { starts, open, unit, pool, alive } = self;
        let buckets = open.entry((*unit, lane)).or_insert_with(|| vec![Vec::new(); starts.0.len() - 1]);
        let values = &mut buckets[bucket];
        if values.is_empty() {
            *values = pool.take(starts.len(bucket));
            values.fill(0.0);
            alive.add(values.len());
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_begins_at_zero_and_ends_when_taken() {
        let mut grads = Grads::new(&[0, 4, 6]);
        let [first, second] = [0, 1].map(|mb| Unit { cell: 0, mb });
        grads.turn_to(first);
        grads.lane(1, 4..6).fill(1.0);
        grads.turn_to(second);
        grads.lane(0, 1..3).fill(2.0);
        assert_eq!(grads.alive.peak, 6);
        assert_eq!(grads.take(first, 1, 1), [1.0, 1.0]);
        let done = grads.take(second, 0, 0);
        assert_eq!(done, [0.0, 2.0, 2.0, 0.0]);
        grads.recycle([done]);
        grads.turn_to(first);
        assert_eq!(grads.lane(0, 0..4), [0.0; 4]);
        assert_eq!(grads.alive.peak, 6);
    }
}

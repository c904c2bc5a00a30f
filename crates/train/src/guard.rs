//! Checksums of state at rest: each rank knows those of what it wrote, and looks again before it speaks for the next step.
//!
//! A bit that changes in memory between two steps would otherwise go into every later number. The update itself takes the
//! checksums of what it writes, so that memory is not read a second time for them; of what came otherwise (made, loaded, from
//! an earlier world, gathered) they are taken once it is there. They are of blocks of a state chunk's size, and no part of
//! any result.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use checkpoint::Kind;
use control::wire::Piece;
use kernels::Ctx;
use spec::tensors::STATE_CHUNK;

use crate::optim::Written;
use crate::persist;
use crate::state::{BucketState, ChunkState, Tier};

/// What a rank wrote last, or came to have.
#[derive(Debug, Default)]
pub struct Guard {
    /// By chunk, those of the rank before those that it mirrors, the sums of its [`blocks`]; `None`, or none at all:
    /// nothing is known.
    sums: Vec<Vec<Option<u64>>>,
}

impl Guard {
    /// An update wrote what the rank owns of state number `number`; what others own of it is yet to come.
    pub fn wrote(&mut self, number: usize, state: &ChunkState, written: Option<Written>) {
        if self.sums.len() <= number {
            self.sums.resize(number + 1, Vec::new());
        }
        let sums = &mut self.sums[number];
        sums.clear();
        let Some(written) = written else { return };
        for (bucket, written) in written.iter().enumerate() {
            for Part { kind, data, owned, .. } in parts(state, bucket) {
                let column = match kind {
                    Kind::Param => 0,
                    Kind::Moment1 => 1,
                    Kind::Moment2 => 2,
                };
                let known = |i: usize| written.get(i).filter(|_| owned).map(|sums| sums[column]);
                sums.extend((0..data.len().div_ceil(STATE_CHUNK)).map(known));
            }
        }
    }

    /// What is remembered of parameters and both moments in block `block` of what the rank owns of a bucket.
    pub fn of_block(&self, number: usize, state: &ChunkState, bucket: usize, block: usize) -> [Option<u64>; 3] {
        let Some(sums) = self.sums.get(number) else { return [None; 3] };
        let count = |part: &Part| part.data.len().div_ceil(STATE_CHUNK);
        let mut first: usize = (0..bucket).flat_map(|bucket| parts(state, bucket)).map(|part| count(&part)).sum();
        let (mut known, mut kind) = ([None; 3], 0);
        for part in parts(state, bucket) {
            if part.owned {
                known[kind] = sums.get(first + block).copied().flatten().filter(|_| block < count(&part));
                kind += 1;
            }
            first += count(&part);
        }
        known
    }

    /// Takes the sums that are not known.
    pub fn fill<'s>(&mut self, ctx: &Ctx, states: impl Iterator<Item = &'s ChunkState>) {
        for (number, state) in states.enumerate() {
            if self.sums.len() <= number {
                self.sums.push(Vec::new());
            }
            let known = &mut self.sums[number];
            let mut first = 0;
            for buckets in at_once(state) {
                let blocks = blocks(state, buckets.clone());
                known.resize(known.len().max(first + blocks.len()), None);
                let missing: Vec<_> = (0..blocks.len()).filter(|&i| known[first + i].is_none()).collect();
                let sums = checksums(ctx, &missing.iter().map(|&i| blocks[i]).collect::<Vec<_>>());
                missing.into_iter().zip(sums).for_each(|(i, sum)| known[first + i] = Some(sum));
                first += blocks.len();
                state.buckets[buckets].iter().for_each(BucketState::rest);
            }
        }
    }

    /// What is not as it was remembered; empty: all is well, or nothing is known. From state number `own` on it is mirrored.
    pub fn check<'s>(&self, ctx: &Ctx, states: impl Iterator<Item = &'s ChunkState>, own: usize) -> Vec<Piece> {
        let mut bad = Vec::new();
        let known = self.sums.iter().zip(states).enumerate().filter(|(_, (known, _))| !known.is_empty());
        for (number, (known, state)) in known {
            let mut known = known.iter().enumerate();
            for buckets in at_once(state) {
                state.buckets.iter().skip(buckets.start).take(buckets.len() + 1).for_each(BucketState::want);
                let blocks = blocks(state, buckets.clone());
                let of_known = known.by_ref().take(blocks.len()).zip(blocks);
                let (expected, data): (Vec<_>, Vec<_>) =
                    of_known.filter_map(|((i, sum), data)| Some(((i, (*sum)?), data))).unzip();
                let differs = expected.into_iter().zip(checksums(ctx, &data)).filter(|((_, a), b)| a != b);
                bad.extend(differs.flat_map(|((i, _), _)| pieces(state, i, number >= own)));
                state.buckets[buckets].iter().for_each(BucketState::rest);
            }
        }
        bad
    }
}

/// State of one kind in a bucket that one rank writes.
struct Part<'s> {
    kind: Kind,
    data: &'s [f32],
    /// First element, in the flat vector.
    first: usize,
    /// This rank writes it.
    owned: bool,
}

/// The parts of a bucket in one order: parameters (those of others before and behind the owned ones), then the moments.
fn parts(state: &ChunkState, bucket: usize) -> impl Iterator<Item = Part<'_>> {
    let owned = &state.buckets[bucket].owned;
    persist::kinds(state, bucket).into_iter().flat_map(move |(kind, data, range)| {
        let (low, high) = (owned.start.clamp(range.start, range.end), owned.end.clamp(range.start, range.end));
        [(range.start..low, false), (low..high, true), (high..range.end, false)].map(|(at, owned)| {
            let first = at.start;
            Part { kind, data: &data[at.start - range.start..at.end - range.start], first, owned }
        })
    })
}

/// The blocks of `buckets` of a chunk's state in one order: by bucket and [`parts`].
fn blocks(state: &ChunkState, buckets: Range<usize>) -> Vec<&[f32]> {
    let of = |bucket| parts(state, bucket).flat_map(|part| part.data.chunks(STATE_CHUNK));
    buckets.flat_map(of).collect()
}

/// The buckets that are looked at together: all, or one by one if they come from files.
fn at_once(state: &ChunkState) -> Vec<Range<usize>> {
    let all = state.buckets.len();
    let files = state.buckets.iter().any(|b| matches!(b.moment1, Tier::File(_)));
    if files { (0..all).map(|i| i..i + 1).collect() } else { std::iter::once(0..all).collect() }
}

fn checksums(ctx: &Ctx, blocks: &[&[f32]]) -> Vec<u64> {
    let out: Vec<AtomicU64> = blocks.iter().map(|_| AtomicU64::new(0)).collect();
    ctx.split(blocks.len(), |range| {
        for i in range {
            out[i].store(kernels::checksum(ctx, blocks[i]), Ordering::Relaxed);
        }
    });
    out.into_iter().map(AtomicU64::into_inner).collect()
}

/// The tensors' pieces in block number `i` of [`blocks`].
fn pieces(state: &ChunkState, i: usize, mirror: bool) -> Vec<Piece> {
    let mut before = 0;
    for part in (0..state.buckets.len()).flat_map(|bucket| parts(state, bucket)) {
        let count = part.data.len().div_ceil(STATE_CHUNK);
        if i < before + count {
            let first = part.first + (i - before) * STATE_CHUNK;
            let at = first..(first + STATE_CHUNK).min(part.first + part.data.len());
            let piece = |held: &crate::state::Held, slice, elements| {
                let what = format!("{} of {}", part.kind, held.tensor.name);
                Piece { tensor: held.index, slice, elements, mirror, what }
            };
            let of = |held| {
                crate::state::Held::pieces(held, &at).map(move |(slice, elements, _)| piece(held, slice, elements))
            };
            return state.held.iter().flat_map(of).collect();
        }
        before += count;
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim;
    use crate::place::Place;
    use crate::vote::Decision;
    use kernels::Simd;
    use spec::Run;

    const RUN: &str = "[model]\npreset = \"tiny\"\ntied = true\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 32\n[grid]\ndp = 4\n";

    /// What the update says of what it wrote is what a look at it says, and each flipped bit of it is found.
    #[test]
    fn an_update_tells_the_sums_of_what_it_wrote() {
        let ctx = Ctx::new(Simd::detect(), 2);
        for zero in [0, 1, 3] {
            let sets = ["layout.dp=4".into(), format!("layout.zero={zero}"), "grid.accumulate=reduced".into()];
            let run = Run::parse(RUN, "test", &sets, 1).unwrap();
            let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, 1);
            let mut state = ChunkState::new(&run, &place, 0);
            let mut guard = Guard::default();
            guard.fill(&ctx, [&state].into_iter());
            let before = guard.sums.clone();
            state.buckets.iter_mut().for_each(|b| b.total = vec![0.5; b.owned.len()]);
            let decision = Decision {
                loss: 1.0,
                grad_norm: 1.0,
                grad_scale: 1.0,
                finite: true,
                commit: true,
                stop: false,
                aux: 0.0,
                targets: 1,
            };
            let written = optim::apply(&ctx, &run.train, 1, &decision, &mut state, true);
            assert!(!guard.check(&ctx, [&state].into_iter(), 1).is_empty(), "the state is another one");
            guard.wrote(0, &state, written);
            let told = guard.sums[0].iter().flatten().count();
            assert!(told > 0 && (zero == 1) == (told < before[0].len()), "zero {zero}: {told} of {}", before[0].len());
            assert!(guard.check(&ctx, [&state].into_iter(), 1).is_empty());
            guard.fill(&ctx, [&state].into_iter());
            let mut fresh = Guard::default();
            fresh.fill(&ctx, [&state].into_iter());
            assert_eq!(guard.sums, fresh.sums, "zero {zero}");
            // Whichever block fails, all of its elements are named.
            for (i, block) in blocks(&state, 0..state.buckets.len()).into_iter().enumerate() {
                let named: usize = pieces(&state, i, false).iter().map(|p| p.elements.len()).sum();
                assert_eq!(named, block.len(), "zero {zero} block {i}");
            }
            let bucket = state.buckets.iter().position(|b| !b.moment2.is_empty()).unwrap();
            let last = state.buckets[bucket].moment2.last_mut().unwrap();
            *last = f32::from_bits(last.to_bits() ^ 1);
            let found = guard.check(&ctx, [&state].into_iter(), 0);
            let element = state.held.iter().map(|held| held.at.end).max();
            assert!(!found.is_empty() && found.iter().all(|p| p.what.contains("moment2") && p.mirror), "{found:?}");
            // The piece of the last tensor ends where the flipped element stands.
            let last = found.last().unwrap();
            let held = state.held.iter().find(|held| held.index == last.tensor).unwrap();
            let end = held.slice(last.slice - held.slices.start).start + last.elements.end;
            assert!(end == state.buckets[bucket].owned.end && Some(end) <= element, "{found:?}");
            guard.wrote(0, &state, None);
            assert!(guard.check(&ctx, [&state].into_iter(), 1).is_empty(), "nothing is known");
        }
    }
}

//! The team of threads of one rank, and static splits of work over it.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::mat::MatMut;
use crate::simd::{Level, Simd};
use crate::team::Team;

/// Elements below which a second thread costs more than it brings.
const GRAIN_ELEMENTS: usize = 32 * 1024;

/// How to compute, never what: an instruction path and a team of threads of one rank.
pub struct Ctx {
    simd: Simd,
    level: Level,
    threads: usize,
    team: Option<Team>,
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx").field("simd", &self.simd).field("threads", &self.threads).finish()
    }
}

impl Ctx {
    /// A team of `threads` (at least 1) on path `simd`.
    ///
    /// # Panics
    /// If the CPU lacks `simd` (parsing a [`Simd`] or [`Simd::checked`] reports that as an error), or if the system
    /// refuses the threads.
    pub fn new(simd: Simd, threads: usize) -> Self {
        Self::with_start(simd, threads, |_| {})
    }

    /// [`Ctx::new`] where each of several threads first calls `start` with its number, such as to keep to a core;
    /// thread 0 is the caller.
    ///
    /// # Panics
    /// As [`Ctx::new`].
    pub fn with_start(simd: Simd, threads: usize, start: impl Fn(usize) + Send + Sync + 'static) -> Self {
        let level = Level::new(simd).unwrap_or_else(|e| panic!("{e}"));
        let threads = threads.max(1);
        let team = (threads > 1).then(|| {
            Team::new(threads, start)
                .unwrap_or_else(|e| panic!("cannot start {threads} kernel threads: {e}; use fewer"))
        });
        Ctx { simd, level, threads, team }
    }

    /// The instruction path.
    pub fn simd(&self) -> Simd {
        self.simd
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// Runs `f` on contiguous ranges that cover `0..n_items`, at most one range a thread.
    pub fn split<F: Fn(Range<usize>) + Sync>(&self, n_items: usize, f: F) {
        self.split_parts(n_items, self.threads, (), &|range, ()| f(range));
    }

    /// Row-wise split of outputs of `n` rows with about `width` elements of work a row.
    pub(crate) fn split_rows<P: Part>(&self, n: usize, width: usize, part: P, f: impl Fn(Range<usize>, P) + Sync) {
        let pieces = (n.saturating_mul(width) / GRAIN_ELEMENTS).clamp(1, self.threads);
        self.split_parts(n, pieces, part, &f);
    }

    /// Cuts `0..n` and the parts that belong to it in `pieces` fixed ranges, run as by [`Ctx::each`].
    pub(crate) fn split_parts<P: Part>(&self, n: usize, pieces: usize, part: P, f: &(impl Fn(Range<usize>, P) + Sync)) {
        let pieces = pieces.min(n);
        if n == 0 {
            return;
        }
        if pieces <= 1 || self.team.is_none() {
            return f(0..n, part);
        }
        let (mut items, mut rest) = (Vec::with_capacity(pieces), part);
        for i in 0..pieces {
            let range = n * i / pieces..n * (i + 1) / pieces;
            let (part, after) = rest.cut(range.len());
            items.push((range, part));
            rest = after;
        }
        self.each(items, &|_, (range, part)| f(range, part));
    }

    /// Calls `f` once for every item, with its index. Threads begin at different items, and take what is left.
    pub(crate) fn each<P: Send>(&self, items: Vec<P>, f: &(impl Fn(usize, P) + Sync)) {
        let turn = self.team.as_ref().filter(|_| items.len() > 1).and_then(Team::turn);
        let Some(turn) = turn else {
            return items.into_iter().enumerate().for_each(|(i, item)| f(i, item));
        };
        let slots: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
        turn.run(&|thread| {
            let first = slots.len() * thread / self.threads;
            for i in (first..slots.len()).chain(0..first) {
                let item = slots[i].lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(item) = item {
                    f(i, item);
                }
            }
        });
    }
}

/// Something that can be cut in front of item `at`.
pub(crate) trait Part: Send + Sized {
    fn cut(self, at: usize) -> (Self, Self);
}

impl Part for () {
    fn cut(self, _: usize) -> ((), ()) {
        ((), ())
    }
}

/// Contiguous rows of `width` elements.
pub(crate) struct Rows<'a, T>(pub &'a mut [T], pub usize);

impl<T: Send> Part for Rows<'_, T> {
    fn cut(self, at: usize) -> (Self, Self) {
        let (a, b) = self.0.split_at_mut(at * self.1);
        (Rows(a, self.1), Rows(b, self.1))
    }
}

impl Part for MatMut<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        self.split_rows(at)
    }
}

impl<A: Part, B: Part> Part for (A, B) {
    fn cut(self, at: usize) -> (Self, Self) {
        let ((a0, a1), (b0, b1)) = (self.0.cut(at), self.1.cut(at));
        ((a0, b0), (a1, b1))
    }
}

impl<A: Part, B: Part, C: Part> Part for (A, B, C) {
    fn cut(self, at: usize) -> (Self, Self) {
        let ((a0, a1), (b0, b1), (c0, c1)) = (self.0.cut(at), self.1.cut(at), self.2.cut(at));
        ((a0, b0, c0), (a1, b1, c1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_thread_of_a_team_starts_with_the_hook() {
        let (tell, started) = std::sync::mpsc::channel();
        let ctx = Ctx::with_start(Simd::Scalar, 3, move |thread| tell.send(thread).expect("somebody listens"));
        let wait = std::time::Duration::from_secs(20);
        let mut seen: Vec<_> = (0..3).map(|_| started.recv_timeout(wait).expect("a thread starts")).collect();
        seen.sort_unstable();
        assert_eq!((seen, ctx.threads()), (vec![0, 1, 2], 3));
    }

    #[test]
    fn split_covers_once_in_order() {
        for threads in [1, 2, 3] {
            let ctx = Ctx::new(Simd::Scalar, threads);
            for n in [0, 1, 2, 7, 100] {
                let seen = Mutex::new(Vec::new());
                ctx.split(n, |r| seen.lock().expect("lock").extend(r));
                let mut seen = seen.into_inner().expect("lock");
                seen.sort_unstable();
                assert_eq!(seen, (0..n).collect::<Vec<_>>());
            }
        }
    }
}

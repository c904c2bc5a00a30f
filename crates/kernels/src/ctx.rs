//! The team of threads of one rank, and static splits of work over it.

use std::fmt;
use std::ops::Range;

use crate::mat::MatMut;
use crate::simd::{Level, Simd};

/// Elements below which a second thread costs more than it brings.
const GRAIN_ELEMENTS: usize = 32 * 1024;

/// How to compute, never what: an instruction path and a team of threads of one rank.
pub struct Ctx {
    simd: Simd,
    level: Level,
    threads: usize,
    pool: Option<rayon::ThreadPool>,
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

    /// [`Ctx::new`] where each of several threads first calls `start` with its number, such as to keep to a core.
    ///
    /// # Panics
    /// As [`Ctx::new`].
    pub fn with_start(simd: Simd, threads: usize, start: impl Fn(usize) + Send + Sync + 'static) -> Self {
        let level = Level::new(simd).unwrap_or_else(|e| panic!("{e}"));
        let threads = threads.max(1);
        let pool = (threads > 1).then(|| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|i| format!("kernel-{i}"))
                .start_handler(start)
                .build()
                .unwrap_or_else(|e| panic!("cannot start {threads} kernel threads: {e}; use fewer"))
        });
        Ctx { simd, level, threads, pool }
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

    /// Cuts `0..n` and the parts that belong to it in `pieces` fixed ranges; idle threads steal whole ranges.
    pub(crate) fn split_parts<P: Part>(&self, n: usize, pieces: usize, part: P, f: &(impl Fn(Range<usize>, P) + Sync)) {
        if n == 0 {
            return;
        }
        let pieces = pieces.clamp(1, n);
        match &self.pool {
            Some(pool) if pieces > 1 => pool.install(|| cut_and_run(0..n, pieces, part, f)),
            _ => f(0..n, part),
        }
    }
}

fn cut_and_run<P: Part>(range: Range<usize>, pieces: usize, part: P, f: &(impl Fn(Range<usize>, P) + Sync)) {
    if pieces <= 1 {
        return f(range, part);
    }
    let left = pieces / 2;
    let mid = range.start + range.len() * left / pieces;
    let (a, b) = part.cut(mid - range.start);
    rayon::join(|| cut_and_run(range.start..mid, left, a, f), || cut_and_run(mid..range.end, pieces - left, b, f));
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

/// A matrix that is cut along its columns.
pub(crate) struct Columns<'a>(pub MatMut<'a>);

impl Part for Columns<'_> {
    fn cut(self, at: usize) -> (Self, Self) {
        let (a, b) = self.0.split_cols(at);
        (Columns(a), Columns(b))
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

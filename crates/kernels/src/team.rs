//! The threads of a rank: the caller and helpers that spin a little for the next job before they sleep.
//!
//! A kernel of a small model takes some tens of microseconds, which is what waking a thread costs: so helpers stay awake
//! from one kernel to the next, and nobody waits for a helper that did not wake in time.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// Looks at the state before a thread sleeps or gives its core away: about 50 us.
const SPINS: usize = 1000;

/// State of a round: this bit while helpers may enter, the helpers inside, and above them the number of the round.
const OPEN: usize = 1;
const INSIDE: usize = 2;
const ROUND: usize = 1 << 16;
/// Set for ever when the team is dropped.
const QUIT: usize = 1 << (usize::BITS - 1);

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// Helpers of one caller.
pub(crate) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
}

struct Shared {
    state: AtomicUsize,
    // Invariant: written only by the holder of the team's turn while the round is closed and nobody is inside; read
    // only from inside.
    job: UnsafeCell<Job<'static>>,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
}

// SAFETY: `job` is guarded by `state`, see its invariant; all else is made for sharing.
unsafe impl Sync for Shared {}
// SAFETY: as above; what `job` points at is `Sync`.
unsafe impl Send for Shared {}

impl Team {
    /// The caller (thread 0) and `threads - 1` helpers; each first calls `start` with its number.
    pub(crate) fn new(threads: usize, start: impl Fn(usize) + Send + Sync + 'static) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicUsize::new(0),
            job: UnsafeCell::new(&|_| {}),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
        });
        let start = Arc::new(start);
        let mut team = Team { shared, helpers: Vec::new(), turn: Mutex::new(()) };
        for number in 1..threads {
            let (shared, start) = (team.shared.clone(), start.clone());
            let helper = std::thread::Builder::new().name(format!("kernel-{number}")).spawn(move || {
                start(number);
                shared.help(number);
            })?;
            team.helpers.push(helper);
        }
        start(0);
        Ok(team)
    }

    /// The right to run a job; `None` inside of a job.
    pub(crate) fn turn(&self) -> Option<Turn<'_>> {
        let guard = match self.turn.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(after_panic)) => after_panic.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Turn { shared: &self.shared, _guard: guard })
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.fetch_or(QUIT, Ordering::SeqCst);
        self.shared.wake();
        for helper in self.helpers.drain(..) {
            // A panic in a job was passed on to the caller.
            let _ = helper.join();
        }
    }
}

pub(crate) struct Turn<'a> {
    shared: &'a Shared,
    _guard: MutexGuard<'a, ()>,
}

impl Turn<'_> {
    /// Calls `job` with 0 here, and with the number of each helper that wakes in time. All calls are over on return.
    ///
    /// # Panics
    /// If one of the calls does.
    pub(crate) fn run(self, job: Job<'_>) {
        let shared = self.shared;
        // SAFETY: the round is closed and nobody is inside, as `Close` left it. The longer lifetime is a lie that no
        // helper lives to see: they enter only an open round, and `Close` waits for those inside, also in a panic.
        unsafe { *shared.job.get() = std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        let round = shared.state.load(Ordering::Relaxed).wrapping_add(ROUND) & !QUIT;
        shared.state.store(round | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            shared.wake();
        }
        let close = Close(shared);
        job(0);
        drop(close);
        assert!(
            !shared.panicked.swap(false, Ordering::Relaxed),
            "a thread of the team panicked: see its message above"
        );
    }
}

/// Closes the round and waits until nobody is inside.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        let state = &self.0.state;
        state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0;
        // Acquire: what the helpers wrote is seen by the caller.
        while state.load(Ordering::Acquire) & (ROUND - INSIDE) != 0 {
            pause(&mut spins);
        }
    }
}

/// A short wait, long ones by giving the core away.
fn pause(spins: &mut usize) {
    *spins += 1;
    if *spins < SPINS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

impl Shared {
    fn wake(&self) {
        drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner));
        self.bell.notify_all();
    }

    /// The life of helper `number`.
    fn help(&self, number: usize) {
        let mut served = 0;
        loop {
            let state = self.next(served);
            if state & QUIT != 0 {
                return;
            }
            // Acquire: the job of an open round is seen.
            if self.state.compare_exchange(state, state + INSIDE, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            served = state / ROUND;
            // SAFETY: we are inside.
            let job = unsafe { *self.job.get() };
            if catch_unwind(AssertUnwindSafe(|| job(number))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            // Release: what the job wrote is seen by the caller.
            self.state.fetch_sub(INSIDE, Ordering::Release);
        }
    }

    /// Waits for an open round that is not `served`, or for the end.
    fn next(&self, served: usize) -> usize {
        let ready = |state: usize| state & QUIT != 0 || (state & OPEN != 0 && state / ROUND != served);
        for _ in 0..SPINS {
            let state = self.state.load(Ordering::Relaxed);
            if ready(state) {
                return state;
            }
            std::hint::spin_loop();
        }
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        // Ordered before the look at the state, as the caller's store is before its look at the sleepers.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            let state = self.state.load(Ordering::SeqCst);
            if ready(state) {
                break state;
            }
            bed = self.bell.wait(bed).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_caller_always_works_and_helpers_join() {
        let team = Team::new(3, |_| {}).expect("threads");
        let calls = [const { AtomicUsize::new(0) }; 3];
        for round in 0..2000 {
            if round % 500 == 0 {
                // Long enough for all to fall asleep.
                std::thread::sleep(Duration::from_millis(20));
            }
            let turn = team.turn().expect("free");
            turn.run(&|number| {
                calls[number].fetch_add(1, Ordering::Relaxed);
                std::hint::black_box((0..2000).sum::<usize>());
            });
        }
        let calls = calls.map(AtomicUsize::into_inner);
        assert_eq!(calls[0], 2000);
        assert!(calls[1] <= 2000 && calls[2] <= 2000 && calls[1] + calls[2] > 0, "{calls:?}");
    }

    #[test]
    fn a_job_inside_of_a_job_has_no_turn() {
        let team = Team::new(2, |_| {}).expect("threads");
        team.turn().expect("free").run(&|_| assert!(team.turn().is_none()));
        assert!(team.turn().is_some());
    }

    /// The caller stays until helpers have left: what a job borrows is alive, also when a call panics.
    #[test]
    fn panics_reach_the_caller_after_all_calls_are_over() {
        let team = Team::new(2, |_| {}).expect("threads");
        for culprit in [0, 1] {
            let joined = AtomicBool::new(false);
            let over = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.turn().expect("a panic gives the turn back").run(&|number| {
                    joined.fetch_or(number == 1, Ordering::SeqCst);
                    while number == 0 && !joined.load(Ordering::SeqCst) {
                        std::thread::yield_now();
                    }
                    if number == 1 {
                        std::thread::sleep(Duration::from_millis(10));
                        over.fetch_add(1, Ordering::SeqCst);
                    }
                    assert!(number != culprit, "on purpose");
                });
            }));
            assert!(result.is_err() && over.load(Ordering::SeqCst) == 1, "thread {culprit} panicked");
        }
        team.turn().expect("free").run(&|_| {});
    }
}

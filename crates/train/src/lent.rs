//! State that is lent to the writer of checkpoints while the next step computes with it.
//!
//! From one update to the next nobody changes what a rank owns, so its writer may copy it meanwhile. Whoever is about to change
//! or free it calls [`Lent::settle`] first, which waits for the copy if it is not over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::{Kind, PieceRef, Snapshot};

/// What became of a copy.
#[derive(Debug, Default)]
pub struct Copied {
    over: Mutex<bool>,
    changed: Condvar,
    waited_ns: AtomicU64,
}

impl Copied {
    /// How long it was waited for.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }
}

/// The lender's side; when it is dropped it waits for the copy.
#[derive(Debug, Default)]
pub struct Lent(Option<Arc<Copied>>);

/// The borrower's side: pieces that can be copied, once. Dropped, it says that it is over.
#[derive(Debug)]
pub struct Loan {
    pieces: Vec<(usize, Kind, usize, std::ops::Range<usize>, *const f32)>,
    copied: Arc<Copied>,
}

// SAFETY: the pointers are read by `copy_into` alone, on whatever thread; by the contract of `Lent::lend` what they point to
// is neither changed nor freed until the loan is dropped.
unsafe impl Send for Loan {}

impl Lent {
    /// Lends `pieces`, after a loan before it is over.
    ///
    /// # Safety
    /// What the pieces point to must be neither changed nor freed before [`Lent::settle`] returned or this was dropped.
    pub unsafe fn lend(&mut self, pieces: &[PieceRef<'_>]) -> Loan {
        self.settle();
        let copied = Arc::<Copied>::default();
        self.0 = Some(copied.clone());
        let raw = |p: &PieceRef<'_>| {
            debug_assert_eq!(p.data.len(), p.elements.len());
            (p.tensor, p.kind, p.slice, p.elements.clone(), p.data.as_ptr())
        };
        Loan { pieces: pieces.iter().map(raw).collect(), copied }
    }

    /// Waits until nothing is lent.
    pub fn settle(&mut self) {
        let Some(copied) = self.0.take() else { return };
        let began = Instant::now();
        let mut over = copied.over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*over {
            over = copied.changed.wait(over).unwrap_or_else(PoisonError::into_inner);
        }
        copied.waited_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.settle();
    }
}

impl Loan {
    /// What becomes of it.
    pub fn copied(&self) -> Arc<Copied> {
        self.copied.clone()
    }

    /// Copies the pieces over whatever was in `snapshot`; the lender is free again.
    pub fn copy_into(self, snapshot: &mut Snapshot) {
        let piece =
            |(tensor, kind, slice, elements, data): &(usize, Kind, usize, std::ops::Range<usize>, *const f32)| {
                // SAFETY: the pointer came from a slice of so many elements, which the lender keeps unchanged while this loan lives.
                let data = unsafe { std::slice::from_raw_parts(*data, elements.len()) };
                PieceRef { tensor: *tensor, kind: *kind, slice: *slice, elements: elements.clone(), data }
            };
        snapshot.take(&self.pieces.iter().map(piece).collect::<Vec<_>>());
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        *self.copied.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.copied.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn piece(data: &[f32]) -> PieceRef<'_> {
        PieceRef { tensor: 3, kind: Kind::Moment1, slice: 1, elements: 16..16 + data.len(), data }
    }

    /// What is changed after `settle` is not in the copy, however late the copier comes.
    #[test]
    fn who_changes_state_waits_for_the_copy() {
        let (mut lent, mut state) = (Lent::default(), vec![1.0; 100_000]);
        lent.settle();
        // SAFETY: `state` is changed after `settle` alone, and outlives `lent`'s loan.
        let loan = unsafe { lent.lend(&[piece(&state)]) };
        let copied = loan.copied();
        let copier = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            let mut snapshot = Snapshot::default();
            loan.copy_into(&mut snapshot);
            snapshot
        });
        lent.settle();
        state.fill(2.0);
        assert!(copied.waited() > Duration::from_millis(20));
        let snapshot = copier.join().unwrap();
        let pieces = snapshot.pieces();
        assert_eq!((pieces[0].tensor, pieces[0].slice, pieces[0].elements.clone()), (3, 1, 16..100_016));
        assert!(pieces[0].data.iter().all(|x| *x == 1.0));
        assert_eq!(state[0], 2.0);
    }

    #[test]
    fn a_copier_that_never_copies_holds_nobody_up() {
        let (mut lent, state) = (Lent::default(), [1.0; 4]);
        // SAFETY: `state` is not changed, and outlives the loan.
        let loan = unsafe { lent.lend(&[piece(&state)]) };
        drop(loan);
        lent.settle();
        // SAFETY: as above.
        drop(unsafe { lent.lend(&[piece(&state)]) });
        drop(lent);
    }
}

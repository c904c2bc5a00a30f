//! Threads that measure at the same time.

use std::sync::{Barrier, OnceLock};

/// Runs `work` on `threads` threads, this one included, which meet at the barrier that it is given. Where the system refuses some
/// of the threads, fewer do it: nobody waits at the barrier for one that never came. The results, at least one.
pub(crate) fn together<T: Send>(threads: usize, work: impl Fn(&Barrier) -> T + Sync) -> Vec<T> {
    // How many meet is known when all that can be started are.
    let barrier = OnceLock::new();
    std::thread::scope(|scope| {
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, || work(barrier.wait())).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mut all = vec![work(barrier.get_or_init(|| Barrier::new(others.len() + 1)))];
        all.extend(others.into_iter().map(|thread| thread.join().expect("measuring does not panic")));
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_meet() {
        for threads in [0, 1, 4] {
            let leaders = together(threads, |barrier| barrier.wait().is_leader());
            assert_eq!(leaders.len(), threads.max(1));
            assert_eq!(leaders.iter().filter(|leader| **leader).count(), 1);
        }
    }
}

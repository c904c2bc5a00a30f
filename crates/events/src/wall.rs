//! The wall clock: it dates things, and nothing waits or measures by it, because it jumps. Whoever reads it reads it here.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// What counts as a jump: a clock that is set right in small steps moves less between two looks.
const JUMP_S: f64 = 0.5;
/// Two readings that are so close count as one: a process may be put aside between them.
const CLOSE: Duration = Duration::from_millis(20);
const TRIES: usize = 10;

/// The wall clock as a process reads it.
#[derive(Debug, Clone, Default)]
pub struct Wall {
    /// How far it was moved on purpose, to see what follows; seconds.
    moved_s: Arc<AtomicI64>,
}

impl Wall {
    /// Time since 1970; never before it.
    pub fn since_1970(&self) -> Duration {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let moved = self.moved_s.load(Ordering::Relaxed);
        let by = Duration::from_secs(moved.unsigned_abs());
        if moved < 0 { now.saturating_sub(by) } else { now + by }
    }

    /// From now on it shows so many seconds more; all who share it see it. A deliberate fault.
    pub fn jump(&self, seconds: i64) {
        self.moved_s.fetch_add(seconds, Ordering::Relaxed);
    }
}

/// Sees the wall clock jump, by the clock that does not.
#[derive(Debug)]
pub struct Watcher {
    wall: Wall,
    /// When it looked last, by both.
    last: (Instant, Duration),
}

impl Watcher {
    /// From now on.
    pub fn new(wall: Wall) -> Self {
        Self { last: both(&wall), wall }
    }

    /// By how many seconds the wall clock has jumped since the last look, if it has.
    pub fn look(&mut self) -> Option<f64> {
        let (now, wall) = both(&self.wall);
        self.look_at(now, wall)
    }

    fn look_at(&mut self, now: Instant, wall: Duration) -> Option<f64> {
        let (then, before) = std::mem::replace(&mut self.last, (now, wall));
        let moved = (wall.as_secs_f64() - before.as_secs_f64()) - now.duration_since(then).as_secs_f64();
        (moved.abs() > JUMP_S).then_some(moved)
    }
}

/// Now, by both clocks: read again where something came between.
fn both(wall: &Wall) -> (Instant, Duration) {
    let read = || (Instant::now(), wall.since_1970(), Instant::now());
    let mut seen = read();
    for _ in 0..TRIES {
        if seen.2 - seen.0 < CLOSE {
            break;
        }
        seen = read();
    }
    (seen.0, seen.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_seen_once_in_either_direction_and_time_that_passes_is_none() {
        let wall = Wall::default();
        let mut watcher = Watcher::new(wall.clone());
        assert_eq!(watcher.look(), None);
        for seconds in [3600, -7200, 1] {
            wall.jump(seconds);
            let seen = watcher.look().unwrap();
            assert!((seen - seconds as f64).abs() < 0.4, "{seen}");
            assert_eq!(watcher.look(), None);
        }
        // An hour in which both went on.
        let (now, shown) = watcher.last;
        let hour = Duration::from_secs(3600);
        assert_eq!(watcher.look_at(now + hour, shown + hour), None);
        // The same hour, which the wall clock did not show.
        assert_eq!(watcher.look_at(now + 2 * hour, shown + hour).map(f64::round), Some(-3600.0));
    }

    #[test]
    fn there_is_nothing_before_1970() {
        let wall = Wall::default();
        wall.jump(i64::MIN / 2);
        assert_eq!(wall.since_1970(), Duration::ZERO);
    }
}

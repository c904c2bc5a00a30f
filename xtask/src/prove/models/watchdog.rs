//! Ends this process when a run in it does not end, and says which.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often it looks.
const PAUSE: Duration = Duration::from_millis(500);

type Watched = Arc<Mutex<Option<(Instant, String)>>>;

/// A thread that looks at the run under way.
pub struct Watchdog {
    watched: Watched,
}

/// A run under way, until it is dropped.
pub struct Watch(Watched);

impl Watchdog {
    /// Runs may take `limit`.
    pub fn start(limit: Duration) -> Self {
        let watched = Watched::default();
        let weak = Arc::downgrade(&watched);
        std::thread::spawn(move || {
            while let Some(watched) = weak.upgrade() {
                let now = watched.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((since, what)) = now.as_ref().filter(|(since, _)| since.elapsed() > limit) {
                    println!("FAULT: a run does not end; it began {:.0} s ago:\n{what}", since.elapsed().as_secs_f64());
                    std::process::exit(1);
                }
                drop(now);
                drop(watched);
                std::thread::sleep(PAUSE);
            }
        });
        Self { watched }
    }

    /// Looks at a run until the answer is dropped.
    pub fn watch(&self, what: String) -> Watch {
        *self.watched.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), what));
        Watch(self.watched.clone())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

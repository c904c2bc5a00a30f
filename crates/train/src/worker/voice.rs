//! The standard output of a rank process, and its heartbeat.

use std::io::{Stdout, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use control::wire::FromRank;

use crate::rank::Pulse;

/// Says one line at a time.
pub struct Voice {
    out: Mutex<Stdout>,
}

impl Voice {
    /// On the standard output.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { out: Mutex::new(std::io::stdout()) })
    }

    /// Says it, whole and at once. A closed output: the agent is gone, and with it soon this process.
    pub fn say(&self, message: &FromRank) {
        let Ok(mut line) = serde_json::to_vec(message) else { return };
        line.push(b'\n');
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = out.write_all(&line).and_then(|()| out.flush());
    }

    /// From now on a sign of life every `every_ms`.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn beat(
        self: &Arc<Self>,
        every_ms: u64,
        pulse: Arc<Pulse>,
        still_ms: impl Fn() -> u64 + Send + 'static,
    ) -> std::io::Result<()> {
        let voice = self.clone();
        let beat = move || {
            loop {
                let [step, work] = [&pulse.step, &pulse.work].map(|n| n.load(Ordering::Relaxed));
                voice.say(&FromRank::Beat { step, work, still_ms: still_ms() });
                std::thread::sleep(Duration::from_millis(every_ms.max(1)));
            }
        };
        std::thread::Builder::new().name("beat".into()).spawn(beat).map(drop)
    }
}

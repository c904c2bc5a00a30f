//! Hearing the agent, at any time: a thread of its own.

use std::collections::VecDeque;
use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use control::wire::{FromRank, ToRank};
use fabric::{Aborter, Flight};

use super::voice::Voice;
use crate::rank::Pulse;

/// The fabric of a world.
struct Inside {
    generation: u64,
    aborter: Aborter,
    flight: Flight,
}

/// The world that this process is in, as the ear must know it to end it, and to tell where it stands.
#[derive(Default)]
struct World {
    inside: Option<Inside>,
    /// Worlds up to this one are over: the agent said so, perhaps before this process was in them.
    over: Option<(u64, String)>,
}

impl World {
    fn end(&mut self, generation: u64, reason: &str) {
        if self.over.as_ref().is_none_or(|(over, _)| *over < generation) {
            self.over = Some((generation, reason.into()));
        }
        if let Some(inside) = self.inside.as_ref().filter(|inside| inside.generation <= generation) {
            inside.aborter.abort(reason);
        }
    }
}

/// What the agent said, and what it has set.
pub struct Ear {
    words: Receiver<ToRank>,
    /// Heard, for later.
    later: VecDeque<ToRank>,
    world: Arc<Mutex<World>>,
    stop: Arc<AtomicBool>,
    pulse: Arc<Pulse>,
}

fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ear {
    /// Listens from now on; the end of the input is the end of this process.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn listen(input: impl BufRead + Send + 'static, voice: Arc<Voice>) -> std::io::Result<Self> {
        let (tell, words) = channel();
        let ear =
            Self { words, later: VecDeque::new(), world: Arc::default(), stop: Arc::default(), pulse: Arc::default() };
        let (world, stop, pulse) = (ear.world.clone(), ear.stop.clone(), ear.pulse.clone());
        let hear = move || {
            for line in input.lines().map_while(Result::ok) {
                let Ok(word) = serde_json::from_str(&line) else { continue };
                match &word {
                    ToRank::Stop => stop.store(true, Ordering::Relaxed),
                    ToRank::Abort { generation, reason } => lock(&world).end(*generation, reason),
                    // A new world is the end of those before it.
                    ToRank::Assign(next) if next.generation > 0 => {
                        lock(&world).end(next.generation - 1, "a new world is formed");
                    }
                    ToRank::Dump => {
                        let [step, work] = [&pulse.step, &pulse.work].map(|n| n.load(Ordering::Relaxed));
                        let record = lock(&world).inside.as_ref().map(|inside| inside.flight.record());
                        let mut told = record.map_or_else(|| serde_json::json!({}), |r| observe::pytorch::dump(&r));
                        (told["step"], told["work"]) = (step.into(), work.into());
                        voice.say(&FromRank::Flight(told));
                    }
                    _ => {}
                }
                if tell.send(word).is_err() {
                    break;
                }
            }
            // The agent closed our input: it is gone, or wants us gone.
            std::process::exit(70);
        };
        std::thread::Builder::new().name("ear".into()).spawn(hear)?;
        Ok(ear)
    }

    /// The next word that asks for something of this thread. Waits; if nothing can come any more the process is ending.
    pub fn next(&mut self) -> ToRank {
        if let Some(word) = self.later.pop_front() {
            return word;
        }
        match self.words.recv() {
            Ok(word) => word,
            Err(_) => loop {
                std::thread::park();
            },
        }
    }

    /// [`Ear::next`]; none: nothing came for so long.
    pub fn next_within(&mut self, limit: Option<Duration>) -> Option<ToRank> {
        match limit {
            Some(limit) if self.later.is_empty() => match self.words.recv_timeout(limit) {
                Ok(word) => Some(word),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(self.next()),
            },
            _ => Some(self.next()),
        }
    }

    /// Puts a word back: it will be the next one.
    pub fn put_back(&mut self, word: ToRank) {
        self.later.push_front(word);
    }

    /// Why world `generation` is over, if the agent said so.
    pub fn over(&self, generation: u64) -> Option<String> {
        lock(&self.world).over.as_ref().filter(|(over, _)| *over >= generation).map(|(_, reason)| reason.clone())
    }

    /// This process is in world `generation`; if that is over already it is left at once.
    pub fn enter(&self, generation: u64, aborter: Aborter, flight: Flight) {
        let mut world = lock(&self.world);
        if let Some((_, reason)) = world.over.as_ref().filter(|(over, _)| *over >= generation) {
            aborter.abort(reason);
        }
        world.inside = Some(Inside { generation, aborter, flight });
    }

    /// This process is in no world.
    pub fn leave(&self) {
        lock(&self.world).inside = None;
    }

    /// Tells at any time for how long the exchange under way has not moved; 0 outside of a world.
    pub fn still_ms(&self) -> impl Fn() -> u64 + Send + 'static {
        let world = self.world.clone();
        move || lock(&world).inside.as_ref().map_or(0, |inside| inside.flight.still_ms())
    }

    /// Asks for a stop after the step under way.
    pub fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// Where progress is shown.
    pub fn pulse(&self) -> &Arc<Pulse> {
        &self.pulse
    }
}

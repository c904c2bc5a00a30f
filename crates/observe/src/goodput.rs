//! The goodput ledger: what became of every second of a run.
//!
//! A second is classified by what became of it. A step that was committed is productive, once: if it was computed again later,
//! the first time was wasted and the repeat is ordinary. The classes sum to the wall clock, because the ledger cuts it at the
//! events and gives each piece away once.
//!
//! Events mark the end of what they tell of: between two of them one rank, which speaks for the run, did one thing.
//! The vocabulary follows ml-goodput-measurement (AI-Hypercomputer).

use std::collections::{BTreeSet, HashMap};

use events::{Anatomy, Event};
use serde::Serialize;

/// What became of a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Checks, processes, data, state: before the first step.
    Startup,
    /// Steps whose update is part of the result.
    Train,
    /// Loss on held-out sequences.
    Validation,
    /// Text that the model wrote.
    Sample,
    /// Ranks waited for a checkpoint.
    Checkpoint,
    /// The digest, or hashes per tensor.
    Digest,
    /// Work that a disruption threw away: steps computed again, and the one under way.
    Wasted,
    /// From a fault to when somebody noticed.
    Detection,
    /// Deciding, ending a world, placing and connecting its successor.
    Recovery,
    /// State from peers or disk after a disruption.
    Restore,
    /// After the last step's work: reports, files, the end of processes.
    Shutdown,
    /// Nothing tells.
    Unknown,
}

/// All classes, in the order in which they are shown.
pub const CLASSES: [Class; 12] = [
    Class::Startup,
    Class::Train,
    Class::Validation,
    Class::Sample,
    Class::Checkpoint,
    Class::Digest,
    Class::Wasted,
    Class::Detection,
    Class::Recovery,
    Class::Restore,
    Class::Shutdown,
    Class::Unknown,
];

impl Class {
    /// Its name in tables and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Sample => "sample",
            Self::Checkpoint => "checkpoint",
            Self::Digest => "digest",
            Self::Wasted => "wasted",
            Self::Detection => "detection",
            Self::Recovery => "recovery",
            Self::Restore => "restore",
            Self::Shutdown => "shutdown",
            Self::Unknown => "unknown",
        }
    }
}

/// A piece of the run's time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Piece {
    /// Seconds since the first session began, sessions one after the other.
    from: f64,
    to: f64,
    class: Class,
}

/// Takes events as they come; see [`Ledger::account`].
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    pieces: Vec<Piece>,
    /// Piece of the last commit of each step.
    committed: HashMap<u64, usize>,
    /// Up to where the time is given away.
    cursor: f64,
    /// Where this session (a process that was started, perhaps with `--resume`) began.
    session: f64,
    /// Its last event.
    last: f64,
    sessions: u64,
    stepped: bool,
    /// Ranks waited this long for checkpoints; charged to the next piece that has room for it.
    checkpoint: f64,
    /// The piece of unexplained time before the last steps, while more of them come than there was time for: ranks stepped on
    /// while nobody could hear them, and tell it now.
    unheard: Option<usize>,
    redone: u64,
    restarts: Vec<Anatomy>,
}

/// The account of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Account {
    /// Seconds in which the run's processes were there.
    pub wall_s: f64,
    /// (class, seconds), those with time only; they sum to `wall_s`.
    pub time_s: Vec<(Class, f64)>,
    /// Productive share of the wall clock, 0 to 1 (ETTR).
    pub goodput: f64,
    /// Times that the run was started (1, and one more for each `--resume`).
    pub sessions: u64,
    /// Different steps that were committed.
    pub steps: u64,
    /// Commits of a step that had been committed before.
    pub steps_redone: u64,
    /// What each recovery took.
    pub restarts: Vec<Anatomy>,
}

impl Ledger {
    /// Takes in what happened `seconds` after the session began. Times that go back begin another session.
    pub fn take(&mut self, seconds: f64, event: &Event) {
        if self.sessions == 0 {
            self.sessions = 1;
        } else if self.session + seconds < self.last - 1e-3 {
            self.give(self.last, Class::Shutdown);
            (self.session, self.stepped, self.checkpoint, self.unheard) = (self.cursor, false, 0.0, None);
            self.sessions += 1;
        }
        let at = (self.session + seconds).max(self.last);
        self.last = at;
        match event {
            Event::Step(step) => {
                self.rest(at - step.seconds);
                let late = self.late(at, step.seconds);
                self.stepped = true;
                if let Some(&earlier) = self.committed.get(&step.step) {
                    // It is charged once: what came of the first time was thrown away.
                    self.pieces[earlier].class = Class::Wasted;
                    self.redone += 1;
                }
                if let Some(piece) = late.or(self.give(at, Class::Train)) {
                    self.committed.insert(step.step, piece);
                }
            }
            Event::Validation { .. } => self.work(at, Class::Validation),
            Event::Sample { .. } => self.work(at, Class::Sample),
            Event::TensorHashes { .. } | Event::Digest { .. } => self.work(at, Class::Digest),
            Event::Replayed { .. } => self.work(at, Class::Wasted),
            // Others may go on meanwhile: only what ranks waited is taken from the time that nothing else explains.
            Event::Checkpoint { seconds, .. } => self.checkpoint += seconds,
            Event::Recovery(anatomy) => self.recovery(anatomy),
            _ => {}
        }
    }

    /// What a recovery took lies before its first step, which has been taken in when the recovery is complete: that time is given
    /// away again.
    fn recovery(&mut self, anatomy: &Anatomy) {
        self.restarts.push(anatomy.clone());
        self.unheard = None;
        let moments = [
            (anatomy.fault.or(anatomy.last_sign), Class::Wasted),
            (anatomy.detected, if anatomy.moments()[0].1.is_some() { Class::Detection } else { Class::Wasted }),
            (anatomy.decided, Class::Recovery),
            (anatomy.aborted, Class::Recovery),
            (anatomy.placed, Class::Recovery),
            (anatomy.connected, Class::Recovery),
            (anatomy.loaded, Class::Restore),
        ];
        let mut cuts: Vec<(f64, Class)> =
            moments.iter().filter_map(|(at, class)| at.map(|at| (self.session + at, *class))).collect();
        cuts.sort_by(|a, b| a.0.total_cmp(&b.0));
        let Some(end) = cuts.last().map(|cut| cut.0) else { return };
        self.give(end.max(self.cursor), Class::Unknown);
        let mut pieces = Vec::with_capacity(self.pieces.len() + cuts.len());
        let mut moved = HashMap::new();
        for (i, piece) in self.pieces.iter().enumerate() {
            // Only unexplained time is explained; from the last work before the trouble on.
            let mut from = piece.from;
            if piece.class == Class::Unknown && piece.to > cuts[0].0.min(end) - 1e-9 && piece.from < end {
                for &(at, class) in &cuts {
                    let to = at.min(piece.to);
                    if to > from {
                        pieces.push(Piece { from, to, class });
                        from = to;
                    }
                }
            }
            if piece.to > from {
                moved.insert(i, pieces.len());
                pieces.push(Piece { from, ..*piece });
            }
        }
        self.committed.values_mut().for_each(|at| *at = moved.get(at).copied().unwrap_or(usize::MAX));
        self.committed.retain(|_, at| *at != usize::MAX);
        self.pieces = pieces;
    }

    /// The account of all time up to `wall` seconds after the (last) session began; what lies behind the last event is its end.
    pub fn account(&self, wall: f64) -> Account {
        self.within(wall, f64::INFINITY)
    }

    /// [`Ledger::account`] of the last `window` seconds.
    pub fn within(&self, wall: f64, window: f64) -> Account {
        let mut all = self.clone();
        let end = (all.session + wall).max(all.cursor);
        all.work(end, if all.stepped { Class::Shutdown } else { Class::Startup });
        let begin = (end - window).max(0.0);
        let seconds = |class: Class| -> f64 {
            let of = all.pieces.iter().filter(|piece| piece.class == class);
            of.map(|piece| (piece.to - piece.from.max(begin)).max(0.0)).sum()
        };
        let time_s: Vec<_> =
            CLASSES.into_iter().map(|class| (class, seconds(class))).filter(|(_, s)| *s > 0.0).collect();
        let wall_s = end - begin;
        Account {
            goodput: if wall_s > 0.0 { seconds(Class::Train) / wall_s } else { 0.0 },
            wall_s,
            time_s,
            sessions: all.sessions.max(1),
            steps: all.committed.len() as u64,
            steps_redone: all.redone,
            restarts: all.restarts,
        }
    }

    /// Gives the time up to `to` to `class`; the number of the piece, if there was any time.
    fn give(&mut self, to: f64, class: Class) -> Option<usize> {
        if to <= self.cursor {
            return None;
        }
        self.pieces.push(Piece { from: self.cursor, to, class });
        self.cursor = to;
        Some(self.pieces.len() - 1)
    }

    /// A step that took `seconds` and is told `at` a time when less than that is left to give away: its time is taken from what
    /// was unexplained before. Its piece.
    fn late(&mut self, at: f64, seconds: f64) -> Option<usize> {
        let missing = seconds - (at - self.cursor);
        if missing <= 1e-6 {
            self.unheard = self.pieces.len().checked_sub(1).filter(|last| self.pieces[*last].class == Class::Unknown);
            return None;
        }
        let unheard = &mut self.pieces[self.unheard?];
        let from = (unheard.to - missing).max(unheard.from);
        let to = std::mem::replace(&mut unheard.to, from);
        if to <= from {
            return None;
        }
        self.pieces.push(Piece { from, to, class: Class::Train });
        let piece = self.pieces.len() - 1;
        self.give(at, Class::Train);
        Some(piece)
    }

    /// Gives away the time up to `to` that no event claims: waiting for checkpoints first.
    fn rest(&mut self, to: f64) {
        if !self.stepped {
            self.give(to, Class::Startup);
            return;
        }
        self.waited(to);
        self.give(to, Class::Unknown);
    }

    /// What ranks waited for checkpoints, as far as there is room before `to`.
    fn waited(&mut self, to: f64) {
        let seconds = std::mem::take(&mut self.checkpoint);
        self.give(to.min(self.cursor + seconds), Class::Checkpoint);
    }

    /// Work of `class` that ended at `to`, behind a checkpoint if there was one.
    fn work(&mut self, to: f64, class: Class) {
        self.waited(to);
        self.give(to, class);
    }
}

impl Account {
    /// Seconds of a class.
    pub fn seconds(&self, class: Class) -> f64 {
        self.time_s.iter().find(|(c, _)| *c == class).map_or(0.0, |(_, s)| *s)
    }

    /// `wall 12.34 s = startup 0.51 s + train 11.02 s + ... | goodput 89.3%`: the parts sum to the whole.
    pub fn line(&self) -> String {
        let parts: Vec<_> = self.time_s.iter().map(|(class, s)| format!("{} {s:.2} s", class.name())).collect();
        format!("wall {:.2} s = {} | goodput {:.1}%", self.wall_s, parts.join(" + "), 100.0 * self.goodput)
    }
}

/// What a log tells.
#[derive(Debug, Clone, PartialEq)]
pub struct OfLog {
    /// The account of all of it.
    pub all: Account,
    /// Of its last seconds.
    pub window: Account,
    /// Lines that are no events (of a later version, or torn by a death), which are left out.
    pub unread: u64,
    /// Steps from the first to the last that it does not have (their lines were lost, to a full disk for one): first and last of each
    /// hole, ascending.
    pub holes: Vec<(u64, u64)>,
}

/// The account of a run whose log is `lines` of `events.jsonl`, and of its last `window` seconds.
pub fn of_log<'a>(lines: impl Iterator<Item = &'a str>, window: f64) -> OfLog {
    let mut steps = BTreeSet::new();
    let mut ledger = Ledger::default();
    let mut unread = 0;
    let mut last = 0.0;
    for line in lines.filter(|line| !line.is_empty()) {
        match Event::timed(line) {
            Ok((t, event)) => {
                if let Event::Step(step) = &event {
                    steps.insert(step.step);
                }
                ledger.take(t, &event);
                last = t;
            }
            Err(_) => unread += 1,
        }
    }
    let pairs = steps.iter().zip(steps.iter().skip(1));
    let holes = pairs.filter(|(a, b)| **b > **a + 1).map(|(a, b)| (a + 1, b - 1)).collect();
    OfLog { all: ledger.account(last), window: ledger.within(last, window), unread, holes }
}

#[cfg(test)]
mod tests;

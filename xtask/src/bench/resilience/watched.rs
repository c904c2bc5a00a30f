//! A run under an outside clock, whose processes can be struck.

use std::cell::Cell;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use events::Event;

use super::super::machine::Machine;
use super::super::shapes::{MODES, Mode, SHAPES, Shape};
use super::super::stats::median;
use super::peer::Figures;
use crate::prove::launch::piped;

/// Longest run.
const LIMIT: Duration = Duration::from_secs(150);
/// A row begins no other round after so long.
const ROW: Duration = Duration::from_secs(150);
/// Steps that do not count.
pub const WARMUP: usize = 2;

/// The binary, a folder for its runs, and the machine.
pub struct Bench<'a> {
    pub binary: PathBuf,
    pub folder: &'a Path,
    pub machine: &'a Machine,
    pub peer: Figures,
    runs: Cell<usize>,
}

/// What is trained.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    pub shape: Shape,
    pub mode: &'a str,
    pub steps: u64,
    pub sets: &'a [&'a str],
    pub args: &'a [&'a str],
}

/// A run that ended.
pub struct Run {
    /// Its folder.
    pub folder: PathBuf,
    /// Each event, and when its line came, in seconds since the start.
    pub events: Vec<(f64, Event)>,
    /// Exit code.
    pub code: Option<i32>,
}

/// The processes of a run under way.
pub struct Hand {
    began: Instant,
    parent: u32,
    ranks: Vec<u32>,
    /// A signal that is sent later: when, to whom.
    due: Option<(f64, &'static str, u32)>,
    /// When signals were sent, in seconds since the start.
    pub struck: Vec<f64>,
}

impl Hand {
    /// Sends `signal` to a rank in so many seconds.
    pub fn strike(&mut self, signal: &'static str, rank: usize, in_s: f64) {
        self.due = self.ranks.get(rank).map(|pid| (self.began.elapsed().as_secs_f64() + in_s, signal, *pid));
    }

    /// Asks the run to stop.
    pub fn stop(&self) {
        send("-TERM", self.parent);
    }

    fn look(&mut self) {
        let now = self.began.elapsed().as_secs_f64();
        if let Some((_, signal, pid)) = self.due.take_if(|(at, ..)| *at <= now) {
            self.struck.push(self.began.elapsed().as_secs_f64());
            send(signal, pid);
        }
    }

    fn wait(&self) -> Duration {
        let now = self.began.elapsed().as_secs_f64();
        self.due.map_or(LIMIT, |(at, ..)| Duration::from_secs_f64((at - now).max(0.0)))
    }
}

fn send(signal: &str, pid: u32) {
    let _ = Command::new("kill").arg(signal).arg(pid.to_string()).status();
}

/// The shape called `name`, with so many tokens a step if that is given.
pub fn shape(name: &str, tokens: Option<usize>) -> Shape {
    let shape = *SHAPES.iter().find(|shape| shape.name == name).expect("a shape of the table");
    Shape { batch: tokens.map_or(shape.batch, |tokens| (tokens / shape.seq).max(2)), ..shape }
}

/// The mode called `name`.
pub fn mode(name: &str) -> &'static Mode {
    MODES.iter().find(|mode| mode.name == name).expect("a mode of the table")
}

impl<'a> Bench<'a> {
    pub fn new(binary: PathBuf, folder: &'a Path, machine: &'a Machine, peer: Figures) -> Self {
        Self { binary, folder, machine, peer, runs: Cell::new(0) }
    }

    /// The numbers of the rounds of a row: `rounds`, at least one, and no further one once the row has taken long.
    pub fn rounds(&self, rounds: u32) -> impl Iterator<Item = u32> {
        let began = Instant::now();
        (0..rounds).take_while(move |round| *round == 0 || began.elapsed() < ROW)
    }

    /// Runs `job` to its end; `watch` sees each event with its time and may strike. The folder stays until [`Bench::forget`].
    pub fn watch(&self, job: &Job, watch: &mut dyn FnMut(f64, &Event, &mut Hand)) -> Result<(Run, Hand), String> {
        self.runs.set(self.runs.get() + 1);
        let folder = self.folder.join(format!("run-{}", self.runs.get()));
        let run_file = self.folder.join("resilience.toml");
        fs::write(&run_file, job.shape.run_file(job.steps)).map_err(|e| format!("cannot write the run file: {e}"))?;
        let mode = mode(job.mode);
        let mut command = self.machine.command(mode.cores(), &self.binary);
        command.arg("train").arg(&run_file).arg("--run-dir").arg(&folder).arg("--json");
        command.arg("--set").args(mode.sets(&job.shape)).args(job.sets).args(job.args);
        let began = Instant::now();
        let (mut child, output, errors) = piped(&mut command)?;
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.take_while(|line| tell.send((began.elapsed().as_secs_f64(), line.clone())).is_ok()).for_each(drop);
        });
        let mut hand = Hand { began, parent: child.id(), ranks: Vec::new(), due: None, struck: Vec::new() };
        let mut events = Vec::new();
        loop {
            match lines.recv_timeout(hand.wait().min(LIMIT.saturating_sub(began.elapsed()))) {
                Ok((at, line)) => {
                    let Ok(event) = Event::from_line(&line) else { continue };
                    if let Event::RankStarted { rank, pid } = event {
                        hand.ranks.resize(hand.ranks.len().max(rank + 1), 0);
                        hand.ranks[rank] = pid;
                    }
                    watch(at, &event, &mut hand);
                    events.push((at, event));
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if began.elapsed() >= LIMIT => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("the run did not end within {} s", LIMIT.as_secs()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            hand.look();
        }
        let code = child.wait().map_err(|e| format!("cannot wait: {e}"))?.code();
        let errors = errors.join().unwrap_or_default();
        // 3: stopped on request.
        if !matches!(code, Some(0 | 3)) {
            let last = errors.lines().last().unwrap_or("it said nothing");
            return Err(format!("the run ended with {code:?}: {last}"));
        }
        Ok((Run { folder, events, code }, hand))
    }

    /// Runs `job` undisturbed.
    pub fn run(&self, job: &Job) -> Result<Run, String> {
        self.watch(job, &mut |_, _, _| {}).map(|(run, _)| run)
    }

    /// Gives back the space of a run.
    pub fn forget(&self, run: &Run) {
        let _ = fs::remove_dir_all(&run.folder);
    }
}

impl Run {
    /// Median seconds of the steps after the warm-up.
    pub fn step_s(&self) -> Result<f64, String> {
        self.step_s_after(WARMUP)
    }

    /// Median seconds of the steps after so many.
    pub fn step_s_after(&self, warmup: usize) -> Result<f64, String> {
        let steps = self.events.iter().filter_map(|(_, e)| if let Event::Step(s) = e { Some(s.seconds) } else { None });
        median(steps.skip(warmup)).ok_or_else(|| "no step after the warm-up".into())
    }

    /// When the first event after `since` that `wanted` wants came.
    pub fn after(&self, since: f64, wanted: impl Fn(&Event) -> bool) -> Option<f64> {
        self.events.iter().find(|(at, event)| *at >= since && wanted(event)).map(|(at, _)| *at)
    }
}

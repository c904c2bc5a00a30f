//! `cargo xtask bench resilience`: what protection costs, how soon a fault is named, and how long it takes to be back; each figure
//! beside the peer's and beside what is to be reached.
//!
//! Times of faults are those of an outside clock: from the signal that is sent here to the line that the run prints.

mod disk;
mod faults;
mod mirror;
mod peer;
mod recheck;
mod watched;

use std::path::Path;
use std::time::Instant;

use super::machine::Machine;
use super::stats::{median, quartiles};
use crate::prove::launch::build;
use watched::Bench;

#[derive(clap::Args)]
pub struct Args {
    /// Rows, such as kill,stop [default: all]
    #[arg(long, value_delimiter = ',')]
    rows: Vec<String>,
    /// Rounds of each row, fewer where they take longer than a minute and a half; medians are shown.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Tokens of a step in the rows of mirrors.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Seconds of the run whose goodput is taken; a fault strikes every 20 s.
    #[arg(long, default_value_t = 90.0)]
    seconds: f64,
    /// Also measure torchrun with DCP (PyTorch is installed once, under target/peer-env); else its figures are those of earlier.
    #[arg(long)]
    peer: bool,
}

/// A figure.
struct Figure {
    /// What it is of.
    what: String,
    /// Of each round.
    rounds: Vec<f64>,
    unit: &'static str,
    /// What it is made of, or measured with.
    note: String,
    /// What is to be reached.
    reach: String,
    /// The peer's figure, if it has one.
    peer: String,
}

impl Figure {
    fn new(what: impl Into<String>, rounds: Vec<f64>, unit: &'static str) -> Self {
        Self { what: what.into(), rounds, unit, note: String::new(), reach: String::new(), peer: String::new() }
    }

    fn reach(self, reach: impl Into<String>) -> Self {
        Self { reach: reach.into(), ..self }
    }

    fn peer(self, peer: impl Into<String>) -> Self {
        Self { peer: peer.into(), ..self }
    }

    fn note(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }
}

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |v: f64| if v.abs() >= 100.0 { format!("{v:.0}") } else { format!("{v:.2}") };
        let middle = median(self.rounds.iter().copied()).map_or("-".into(), shown);
        let rounds: Vec<_> = self.rounds.iter().map(|v| shown(*v)).collect();
        writeln!(f, "{:<44} {middle:>8} {:<5} | reach {} | peer {}", self.what, self.unit, self.reach, self.peer)?;
        write!(f, "    {} rounds: {}", self.rounds.len(), rounds.join(" "))?;
        if let (Some((low, high)), 2..) = (quartiles(&self.rounds), self.rounds.len()) {
            write!(f, " (quartiles {} and {})", shown(low), shown(high))?;
        }
        if self.note.is_empty() { Ok(()) } else { write!(f, " | {}", self.note) }
    }
}

type Measure = fn(&Bench, &Args) -> Result<Vec<Figure>, String>;

/// The rows by name.
const ROWS: [(&str, Measure); 12] = [
    ("mirror-m0", |b, a| mirror::row(b, a, "M", "dp2-zero0")),
    ("mirror-m1", |b, a| mirror::row(b, a, "M", "dp2-zero1")),
    ("mirror-l0", |b, a| mirror::row(b, a, "L", "dp2-zero0")),
    ("mirror-l1", |b, a| mirror::row(b, a, "L", "dp2-zero1")),
    ("recheck", recheck::row),
    ("kill", faults::kill),
    ("stop", faults::stop),
    ("cut", faults::cut),
    ("controller", faults::controller),
    ("checkpoint", disk::checkpoint),
    ("goodput", faults::goodput),
    ("verify", disk::verify),
];

/// Measures; true if every row asked for gave its figures.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let rows = super::shapes::pick(&ROWS, |(name, _)| name, &args.rows)?;
    let machine = Machine::look();
    let binary = build(root)?;
    let folder = tempfile::tempdir().map_err(|e| format!("cannot make a folder: {e}"))?;
    machine.notes(2).iter().for_each(|note| println!("# {note}"));
    let mut complete = true;
    let peer = match args.peer {
        true => peer::Figures::measure(root, folder.path()).unwrap_or_else(|why| {
            complete = false;
            println!("# peer: error: {why}");
            peer::Figures::earlier()
        }),
        false => peer::Figures::earlier(),
    };
    println!("# peer: {}", peer.origin);
    let bench = Bench::new(binary, folder.path(), &machine, peer);
    for (name, measure) in rows {
        let began = Instant::now();
        match measure(&bench, args) {
            Ok(figures) => figures.iter().for_each(|figure| println!("{name:<11} {figure}")),
            Err(why) => {
                complete = false;
                println!("{name:<11} error: {why}");
            }
        }
        println!("# {name}: {:.0} s", began.elapsed().as_secs_f64());
    }
    Ok(complete)
}

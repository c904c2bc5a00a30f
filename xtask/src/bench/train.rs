//! `cargo xtask bench train`: rounds of ours and of the peer in turn.

use std::path::{Path, PathBuf};

use super::machine::Machine;
use super::ours::Ours;
use super::peer::Peer;
use super::report::Report;
use super::row::Row;
use super::shapes::{MODES, Mode, ONE, SHAPES, Shape, pick};
use crate::prove::launch;

#[derive(clap::Args)]
pub struct Args {
    /// Also train the same with PyTorch (installed once, under target/peer-env), in turn, and print ratios.
    #[arg(long)]
    peer: bool,
    /// Also train on one rank with one thread, in turn, and print how many times as fast each row is.
    #[arg(long)]
    against_one: bool,
    /// One JSON object per measurement.
    #[arg(long)]
    json: bool,
    /// Rounds of each side; medians are compared.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds that a round measures at least.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Shapes, such as S,M [default: all]
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Modes, such as 1x1,tp2 [default: all]
    #[arg(long, value_delimiter = ',')]
    modes: Vec<String>,
    /// Override a key of our runs, such as `grid.microbatch=4`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

/// Both sides.
struct Sides<'a> {
    ours: Ours<'a>,
    peer: Option<Peer<'a>>,
    args: &'a Args,
}

/// Measures; true if everything asked for was.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let shapes = pick(&SHAPES, |s| s.name, &args.shapes)?;
    let modes = pick(&MODES, |m| m.name, &args.modes)?;
    let machine = Machine::look();
    let binary = launch::build(root)?;
    let temporary = tempfile::tempdir().map_err(|e| format!("cannot create a temporary folder: {e}"))?;
    let (peer, missing) = match args.peer.then(|| Peer::make(root, &machine)) {
        None => (None, None),
        Some(Ok(peer)) => (Some(peer), None),
        Some(Err(why)) => (None, Some(why)),
    };
    let mut report = Report::new(args.json, peer.as_ref().map(|peer| peer.versions.import_bytes));
    machine.notes(modes.iter().map(Mode::all_cores).max().unwrap_or(1)).iter().for_each(|note| report.note(note));
    peer.iter().flat_map(Peer::notes).for_each(|note| report.note(&note));
    if let Some(why) = &missing {
        eprintln!("error: {why}; only our side is measured");
    }
    let ours = Ours {
        binary,
        folder: temporary.path().to_owned(),
        kept: root.join("target").join("bench-weights"),
        machine: &machine,
        sets: &args.sets,
    };
    let sides = Sides { ours, peer, args };
    let mut complete = missing.is_none();
    for shape in &shapes {
        let folder = match sides.saved(shape) {
            Ok(folder) => folder,
            Err(why) => {
                eprintln!("error: {}: {why}; only our side is measured", shape.name);
                complete = false;
                None
            }
        };
        for mode in modes.iter().filter(|mode| mode.fits(shape)) {
            let row = sides.row(shape, mode, folder.as_deref());
            complete &= row.refused.is_none() && row.notes.is_empty();
            report.row(&row);
        }
    }
    Ok(complete)
}

impl Sides<'_> {
    /// The folder with the weights and tokens that both sides start from.
    fn saved(&self, shape: &Shape) -> Result<Option<PathBuf>, String> {
        // Trained weights are compared with our own one rank alone.
        let Some(peer) = self.peer.as_ref().filter(|_| shape.balancing == 0) else { return Ok(None) };
        let folder = self.ours.folder.join(shape.name);
        peer.save(shape, &folder)?;
        Ok(Some(folder))
    }

    /// A row; what fails is a note in it.
    fn row(&self, shape: &Shape, mode: &Mode, folder: Option<&Path>) -> Row {
        let mut row = Row { shape: shape.name, mode: mode.name, ..Row::default() };
        if let Err(why) = self.rounds(&mut row, shape, mode, folder) {
            row.notes.push(format!("our side failed: {why}"));
        }
        row
    }

    fn rounds(&self, row: &mut Row, shape: &Shape, mode: &Mode, folder: Option<&Path>) -> Result<(), String> {
        let seconds = self.args.seconds;
        row.loss = folder.map(|folder| self.ours.loss(shape, mode, folder)).transpose()?;
        let steps = self.ours.steps(shape, mode, seconds)?;
        let one = (self.args.against_one && *mode != ONE).then(|| self.ours.steps(shape, &ONE, seconds)).transpose()?;
        // Without the weights that both sides start from there is nothing to compare.
        let peer = self.peer.as_ref().filter(|_| folder.is_some());
        let variants = peer.map_or(Vec::new(), |peer| peer.variants(mode));
        // All are warm before the first round; they sleep while another is measured.
        let mut contestants = Vec::new();
        for (variant, peer) in variants.into_iter().zip(peer.into_iter().cycle()) {
            match peer.start(shape, mode, variant, seconds) {
                Ok(contestant) => contestants.push(contestant),
                Err(why) => row.notes.push(format!("{variant} failed: {why}")),
            }
        }
        for _ in 0..self.args.rounds {
            row.ours.push(self.ours.train(shape, mode, steps)?);
            if let Some(steps) = one {
                row.one.push(self.ours.train(shape, &ONE, steps)?);
            }
            contestants.retain_mut(|contestant| match contestant.measure() {
                Ok(sample) => {
                    row.add(contestant.variant, contestant.loss, sample);
                    row.refused.is_none()
                }
                Err(why) => {
                    row.notes.push(format!("{} failed: {why}", contestant.variant));
                    false
                }
            });
            if row.refused.is_some() {
                contestants.clear();
            }
        }
        Ok(())
    }
}

//! `cargo xtask prove --models`: random models, grids, recipes and data under random layouts.
//!
//! Each layout is either refused by what `lockstep check` runs, or trains to the numbers of one rank: the digest, the
//! loss and gradient norm of every step, every validation; and its counters are those of its program. A layout that the
//! check accepts and that does not train, a panic, and a run that does not end are faults. A model follows from the seed
//! and its number alone, so that each can be repeated by itself.

mod corpora;
mod draw;
mod layouts;
mod shrink;
mod tally;
mod trial;
mod watchdog;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kernels::Simd;
use spec::Run;
use train::launch::prove;

use super::audit::counted;
use super::launch::Launcher;
use super::random::Random;
use corpora::Corpora;
use draw::Drawn;
use layouts::Asked;
pub use tally::Tally;
use tally::class;
use trial::{DIVERGED, End, REFUSED, guarded};
use watchdog::Watchdog;

/// Models that `--all` adds: about a minute and a half on two cores.
pub const OF_ALL: usize = 60;
/// Layouts of a model.
const LAYOUTS: usize = 6;
/// Of the data, which are the same in every search.
const CORPORA_SEED: u64 = 14;
/// A run that takes longer hangs: exchanges have a deadline of their own, far below it.
const LIMIT: Duration = Duration::from_secs(180);
/// Faults after which a search ends.
const FAULTS_MAX: usize = 8;

/// What to search.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Models.
    pub models: usize,
    /// The number of the first is this, of the second one more.
    pub seed: u64,
    /// No model is begun after so long.
    pub time: Option<Duration>,
}

/// What came of a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// The numbers of one rank.
    Equal {
        /// Its ranks.
        ranks: usize,
    },
    /// Refused by the check; the reason.
    Refused(String),
    /// What is wrong.
    Fault(String),
}

/// A search under way.
pub struct Search {
    launcher: Launcher,
    /// The binary is there.
    processes: bool,
    corpora: Corpora,
    watchdog: Watchdog,
    runs: usize,
}

impl Search {
    /// A search in `folder`, with processes of `binary` if there is one.
    ///
    /// # Errors
    /// The data cannot be written.
    pub fn new(folder: PathBuf, binary: Option<PathBuf>) -> Result<Self, String> {
        let corpora = Corpora::write(&folder.join("data"), &mut Random::new(CORPORA_SEED))?;
        let processes = binary.is_some();
        let launcher = Launcher { binary: binary.unwrap_or_default(), folder };
        Ok(Self { launcher, processes, corpora, watchdog: Watchdog::start(LIMIT), runs: 0 })
    }

    /// Runs `plan`; `told` gets a line about each model, and several about each fault.
    ///
    /// # Errors
    /// What has nothing to do with lockstep: no room for its files.
    pub fn run(&mut self, plan: Plan, told: &mut dyn FnMut(&str)) -> Result<Tally, String> {
        let began = Instant::now();
        let mut tally = Tally::default();
        let mut number = plan.seed;
        while tally.models < plan.models && tally.faults.len() < FAULTS_MAX {
            if plan.time.is_some_and(|time| began.elapsed() > time) {
                break;
            }
            self.model(number, &mut tally, told)?;
            number += 1;
        }
        Ok(tally)
    }

    /// The model of `number`, and its layouts.
    fn model(&mut self, number: u64, tally: &mut Tally, told: &mut dyn FnMut(&str)) -> Result<(), String> {
        let mut random = Random::new(number);
        let drawn = draw::run_file(&mut random, &self.corpora);
        let name = format!("model-{number}");
        self.launcher.write(&name, &drawn.toml())?;
        let (whole, reference) = match self.reference(&drawn) {
            Ok(both) => both,
            Err(Verdict::Fault(reason)) => {
                self.fault(number, &drawn, None, &reason, tally, told);
                return Ok(());
            }
            Err(Verdict::Refused(reason)) => {
                *tally.refused_models.entry(class(&reason)).or_default() += 1;
                return self.launcher.forget(&name);
            }
            Err(Verdict::Equal { .. }) => unreachable!("a reference is compared with nothing"),
        };
        tally.models += 1;
        tally.diverging += usize::from(!matches!(reference, End::Trained(_)));
        let (mut equal, mut refused) = (0, 0);
        for _ in 0..LAYOUTS {
            let asked = layouts::draw(&mut random, &whole, self.processes);
            match self.judge(&drawn, &name, &reference, &asked) {
                Verdict::Equal { ranks } => {
                    equal += 1;
                    tally.equal += 1;
                    tally.ranks += ranks;
                    tally.processes += usize::from(asked.processes);
                }
                Verdict::Refused(reason) => {
                    refused += 1;
                    *tally.refused.entry(class(&reason)).or_default() += 1;
                }
                Verdict::Fault(reason) => self.fault(number, &drawn, Some(&asked), &reason, tally, told),
            }
        }
        told(&format!("model {number}: {} | {equal} layouts equal, {refused} refused", about(&whole)));
        self.launcher.forget(&name)
    }

    /// The run on one rank, and how it ends; a verdict where there is nothing to compare with.
    fn reference(&mut self, drawn: &Drawn) -> Result<(Run, End), Verdict> {
        let one = Asked { sets: vec!["layout.threads=1".into()], simd: None, processes: false };
        let run = checked(drawn, &one)?;
        let end = self.here(&run, &one);
        match &end {
            End::Trained(_) | End::Failed { code: Some(DIVERGED), .. } => Ok((run, end)),
            // The data are looked at when training begins.
            End::Failed { code: Some(REFUSED), reason } => Err(Verdict::Refused(reason.clone())),
            End::Failed { reason, .. } => Err(Verdict::Fault(format!("one rank fails: {reason}"))),
            End::Panicked(words) => Err(Verdict::Fault(format!("one rank panics: {words}"))),
        }
    }

    fn here(&mut self, run: &Run, asked: &Asked) -> End {
        self.runs += 1;
        let folder = self.launcher.run_dir(self.runs);
        let _watched = self.watchdog.watch(format!("{}\nunder {}", run.values.to_toml(), asked.label()));
        trial::here(run, asked.simd.unwrap_or_else(Simd::detect), &folder)
    }

    /// Runs `asked` and compares it with one rank.
    fn judge(&mut self, drawn: &Drawn, name: &str, reference: &End, asked: &Asked) -> Verdict {
        let run = match checked(drawn, asked) {
            Ok(run) => run,
            Err(verdict) => return verdict,
        };
        let end = if asked.processes {
            self.runs += 1;
            trial::through_binary(&self.launcher, name, &self.launcher.run_dir(self.runs), asked, LIMIT)
        } else {
            self.here(&run, asked)
        };
        let ranks = run.layout.world();
        match (reference, end) {
            (End::Trained(one), End::Trained(all)) => {
                if one.digest != all.digest {
                    return Verdict::Fault(format!("digest {:.12} for {:.12}", all.digest, one.digest));
                }
                let differs = one.curve.iter().zip(&all.curve).find(|(a, b)| a != b);
                if let Some((want, got)) = differs {
                    return Verdict::Fault(format!("the digest is right, but `{got}` for `{want}`"));
                }
                if one.curve.len() != all.curve.len() {
                    let (want, got) = (one.curve.len(), all.curve.len());
                    return Verdict::Fault(format!("{got} steps and validations for {want}"));
                }
                match counted(&run, &all, 0) {
                    Err(reason) => Verdict::Fault(reason),
                    Ok((_, wrong)) => wrong.first().map_or(Verdict::Equal { ranks }, |w| Verdict::Fault(w.clone())),
                }
            }
            (End::Failed { reason: one, .. }, End::Failed { code: Some(DIVERGED), reason }) => {
                // Through the binary only the last line is known.
                let alike = one.lines().next() == reason.trim_start_matches("error: ").lines().next();
                if alike { Verdict::Equal { ranks } } else { Verdict::Fault(format!("`{reason}` for `{one}`")) }
            }
            (_, End::Trained(_)) => Verdict::Fault("it trains, and one rank diverges".into()),
            (_, End::Failed { code, reason }) => {
                let code = code.map_or("a signal".into(), |code| code.to_string());
                Verdict::Fault(format!("the check accepts it, and training ends with {code}: {reason}"))
            }
            (_, End::Panicked(words)) => Verdict::Fault(format!("training panics: {words}")),
        }
    }

    /// Keeps and tells what repeats a fault, made small where it can be.
    fn fault(
        &mut self,
        number: u64,
        drawn: &Drawn,
        asked: Option<&Asked>,
        reason: &str,
        tally: &mut Tally,
        told: &mut dyn FnMut(&str),
    ) {
        let label = asked.map_or("one rank".into(), Asked::label);
        tally.faults.push(format!("model {number}, {label}: {reason}"));
        told(&format!("FAULT: model {number} under {label}: {reason}"));
        let (drawn, asked) = match asked.filter(|asked| !asked.processes) {
            Some(asked) => self.shrink(drawn, asked),
            None => (drawn.clone(), asked.cloned().unwrap_or_default()),
        };
        let path = self.launcher.folder.join(format!("fault-{number}-{}.toml", tally.faults.len()));
        let written = std::fs::write(&path, drawn.toml());
        told(&format!("  the model again: cargo xtask prove --models 1 --seed {number}"));
        let at = written.map_or("RUN.toml".into(), |()| path.display().to_string());
        let quoted: Vec<String> = asked.args().iter().map(|arg| format!("'{arg}'")).collect();
        told(&format!("  made small: lockstep train {at} {}\n{}", quoted.join(" "), drawn.toml()));
    }
}

/// The run of `drawn` under `asked`, if what `lockstep check` runs accepts it.
fn checked(drawn: &Drawn, asked: &Asked) -> Result<Run, Verdict> {
    let text = drawn.toml();
    let parsed = guarded(|| Run::parse(&text, "model", &asked.sets, 1));
    let run = match parsed {
        Err(words) => return Err(Verdict::Fault(format!("reading the run file panics: {words}"))),
        Ok(Err(e)) => return Err(Verdict::Refused(e.to_string())),
        Ok(Ok(run)) => run,
    };
    match guarded(|| prove(&run)) {
        Err(words) => Err(Verdict::Fault(format!("the check panics: {words}"))),
        // The run file is valid, but the checker refuses the programs that are lowered from it.
        Ok(Err(e)) => Err(Verdict::Fault(format!("the checker refuses what was lowered: {e}"))),
        Ok(Ok(_)) => Ok(run),
    }
}

/// A model in some words.
fn about(run: &Run) -> String {
    let (model, grid) = (&run.model, &run.grid);
    let experts = model.moe.as_ref().map_or("dense".into(), |moe| format!("{} experts", moe.experts));
    format!(
        "{} layers of {} {experts}{}, grid dp{} cp{} tp{} ep{} x {} microbatches, {}",
        model.layers,
        model.hidden,
        if model.tied { " tied" } else { "" },
        grid.dp,
        grid.cp,
        grid.tp,
        grid.ep,
        grid.microbatches,
        run.data.source
    )
}

#[cfg(test)]
mod tests;

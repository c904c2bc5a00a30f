//! `cargo xtask prove`: the same run under many layouts, and one digest; deliberate faults, and another.

mod audit;
mod grids;
pub mod launch;
mod models;
mod mutants;
mod mutations;
pub mod random;
mod rows;
mod table;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use kernels::Simd;
use tempfile::TempDir;
use train::mutant::Mutant;

use audit::{Counts, audit};
use grids::GRIDS;
use launch::{Failed, Finished, Launcher, Start};
use models::Plan;
use mutants::Expect;
use rows::{Course, Row};
use table::{Line, Table};

/// Layouts that `--all` adds.
const RANDOM_ROWS: usize = 40;
/// The step in the middle, whose checkpoint a restored run goes on from.
const HALF: u64 = 3;
/// Checkpoints kept: all.
const KEEP: u64 = 9;

#[derive(clap::Args)]
pub struct Args {
    /// Also run 40 random layouts, and 60 random models under random layouts.
    #[arg(long)]
    all: bool,
    /// Instead: so many random models, grids, recipes and data, each under random layouts. Each is refused, or trains to
    /// the numbers of one rank.
    #[arg(long, value_name = "N", conflicts_with_all = ["all", "mutations", "filter"])]
    models: Option<usize>,
    /// With --models: begin no model after so many minutes.
    #[arg(long, value_name = "M", requires = "models")]
    minutes: Option<f64>,
    /// Instead: 10,000 mutations of programs, and all that the checker accepts run.
    #[arg(long, conflicts_with = "all")]
    mutations: bool,
    /// Seed of the random layouts, models or mutations [default: from the clock; printed]
    #[arg(long)]
    seed: Option<u64>,
    /// The binary of lockstep [default: the release binary, built first]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    /// Run only rows whose grid and layout (or mutant) contain this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Keep the run folders and say where they are.
    #[arg(long)]
    keep: bool,
}

/// Everything that rows share.
struct Proof {
    launcher: Launcher,
    table: Table,
    filter: Option<String>,
    /// The digest of each grid, once its reference ran.
    references: Vec<Option<String>>,
    runs: usize,
    /// Where everything lies, until it is to be kept.
    temporary: Option<TempDir>,
}

/// Proves the workspace at `root`; true if every row passed.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let began = Instant::now();
    let binary = match &args.binary {
        // Runs have their own working folder.
        Some(path) => path.canonicalize().map_err(|e| format!("--binary {}: {e}", path.display()))?,
        None => launch::build(root)?,
    };
    let temporary = tempfile::tempdir().map_err(|e| format!("cannot create a temporary folder: {e}"))?;
    let folder: PathBuf = temporary.path().to_owned();
    let mut temporary = Some(temporary);
    if let Some(kept) = temporary.take_if(|_| args.keep) {
        eprintln!("run folders are kept in {}", kept.keep().display());
    }
    let launcher = Launcher { binary, folder };
    for grid in GRIDS {
        launcher.write(grid.name, grid.toml)?;
    }
    let table = Table::new(args.json);
    let (filter, references) = (args.filter.clone(), vec![None; GRIDS.len()]);
    let mut proof = Proof { launcher, table, filter, references, runs: 0, temporary };
    if args.mutations {
        proof.mutations(args.seed.unwrap_or_else(seed))?;
        return Ok(proof.table.end(began.elapsed()));
    }
    if let Some(models) = args.models {
        let time = args.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes.max(0.0)));
        proof.models(Plan { models, seed: args.seed.unwrap_or_else(seed), time })?;
        return Ok(proof.table.end(began.elapsed()));
    }
    proof.layouts(args)?;
    proof.mutants()?;
    proof.programs()?;
    if args.all && args.filter.is_none() {
        proof.models(Plan { models: models::OF_ALL, seed: args.seed.unwrap_or_else(seed), time: None })?;
    }
    match (proof.table.rows(), &args.filter) {
        (0, Some(text)) => Err(format!("--filter {text}: no row contains it; without --filter all are printed")),
        _ => Ok(proof.table.end(began.elapsed())),
    }
}

/// A row that came to its end.
struct Ran {
    /// The run before the interruption.
    first: Option<Finished>,
    /// The run that ended.
    last: Finished,
    /// The step after which it began.
    after: u64,
}

impl Ran {
    /// Counters of all its parts, and what is wrong with them.
    fn audit(&self, row: &Row, reference: Option<&str>) -> Result<(Counts, Vec<String>), String> {
        let before = grids::parse(row.grid, &row.sets)?;
        let (Some(first), Course::Stopped(then) | Course::Restored(then)) = (&self.first, &row.course) else {
            return audit(&before, &self.last, 0);
        };
        let (counts, mut wrong) = audit(&before, first, 0)?;
        let (more, also) = audit(&grids::parse(row.grid, then)?, &self.last, self.after)?;
        wrong.extend(also);
        if first.step == before.train.steps && reference.is_some_and(|digest| first.digest != digest) {
            wrong.push(format!("without the interruption its digest is {:.12}", first.digest));
        }
        if self.after == 0 || self.after >= before.train.steps {
            wrong.push(format!("it was interrupted after step {}, not in the middle", self.after));
        }
        Ok((counts.and(&more), wrong))
    }
}

fn paths() -> Vec<&'static str> {
    let name = |simd| match simd {
        Simd::Scalar => "scalar",
        Simd::Avx2 => "avx2",
        Simd::Avx512 => "avx512",
    };
    Simd::available().map(name).collect()
}

fn seed() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.subsec_nanos().into())
}

impl Proof {
    fn wanted(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|text| name.contains(text.as_str()))
    }

    fn layouts(&mut self, args: &Args) -> Result<(), String> {
        let mut rows = rows::rows(&paths());
        if args.all {
            let seed = args.seed.unwrap_or_else(seed);
            self.table.note(&format!("random layouts of --seed {seed}"));
            rows.extend(random::rows(RANDOM_ROWS, &mut random::Random::new(seed)));
            rows.sort_by_key(|row| row.grid);
        }
        rows.retain(|row| self.wanted(&format!("{} {}", GRIDS[row.grid].name, row.label())));
        if !rows.is_empty() {
            self.table.head();
        }
        for row in &rows {
            let reference = self.reference(row.grid)?;
            let line = self.row(row, &reference);
            self.table.row(GRIDS[row.grid].name, &row.label(), line);
        }
        Ok(())
    }

    /// The digest of a grid on one rank, in one process, on one thread; run when it is first asked for.
    fn reference(&mut self, grid: usize) -> Result<String, String> {
        if let Some(digest) = &self.references[grid] {
            return Ok(digest.clone());
        }
        let row = Row { grid, sets: rows::sets("threads=1"), simd: None, course: Course::Straight };
        let name = GRIDS[grid].name;
        let finished = self.course(&row, &[]).map_err(|e| format!("the reference of {name} failed: {}", e.reason))?;
        let (counts, wrong) = finished.audit(&row, None)?;
        let digest = finished.last.digest.clone();
        self.table.note(&format!("{name}: {}", GRIDS[grid].about));
        let line = Line { ranks: 1, digest: digest.clone(), equal: true, counts, wrong };
        self.table.row(name, "reference: 1 rank, 1 thread", line);
        self.references[grid] = Some(digest.clone());
        Ok(digest)
    }

    fn row(&mut self, row: &Row, reference: &str) -> Line {
        let args: Vec<&str> = row.simd.map_or_else(Vec::new, |path| vec!["--simd", path]);
        let ran = self.course(row, &args);
        let (digest, audited) = match &ran {
            Ok(finished) => (finished.last.digest.clone(), finished.audit(row, Some(reference))),
            Err(failed) => (String::new(), Err(failed.reason.clone())),
        };
        let (counts, wrong) = audited.unwrap_or_else(|reason| (Counts::default(), vec![reason]));
        let ranks = ran.as_ref().map_or(0, |finished| finished.last.ranks.len());
        Line { ranks, equal: digest == reference, digest, counts, wrong }
    }

    /// Runs a row to its end.
    fn course(&mut self, row: &Row, args: &[&str]) -> Result<Ran, Failed> {
        self.runs += 1;
        let (name, folder) = (GRIDS[row.grid].name, self.launcher.run_dir(self.runs));
        // What goes wrong in a proof is to be seen, not repaired.
        let go = |start: Start| {
            let sets: Vec<String> = start.sets.iter().cloned().chain(["guard.restarts_max=0".into()]).collect();
            self.launcher.run(name, &folder, Start { sets: &sets, ..start })
        };
        let on = |sets: &[String], args: &[&str]| {
            let args: Vec<&str> = args.iter().copied().chain(["--resume"]).collect();
            go(Start { sets, args: &args, stop: false })
        };
        match &row.course {
            Course::Straight => {
                Ok(Ran { first: None, after: 0, last: go(Start { sets: &row.sets, args, stop: false })? })
            }
            Course::Stopped(then) => {
                let first = go(Start { sets: &row.sets, args, stop: true })?;
                Ok(Ran { after: first.step, last: on(then, args)?, first: Some(first) })
            }
            Course::Restored(then) => {
                let every = [format!("checkpoint.every={HALF}"), format!("checkpoint.keep={KEEP}")];
                let sets: Vec<String> = row.sets.iter().cloned().chain(every).collect();
                // The first half of a mutant is sound: only what follows the checkpoint may differ.
                let first = go(Start { sets: &sets, args: &[], stop: false })?;
                launch::keep_first_checkpoint(&folder).map_err(|reason| Failed { code: None, reason })?;
                Ok(Ran { after: HALF, last: on(then, args)?, first: Some(first) })
            }
        }
    }

    fn mutants(&mut self) -> Result<(), String> {
        let wanted: Vec<Mutant> = Mutant::ALL.iter().copied().filter(|m| self.wanted(&format!("mutant {m}"))).collect();
        if !wanted.is_empty() {
            self.table
                .note("mutants: each must end with another digest, or fail because two holders of one state disagree");
        }
        for mutant in wanted {
            let (row, expect) = mutants::case(mutant);
            let reference = self.reference(row.grid)?;
            let name = mutant.to_string();
            let ran = self.course(&row, &["--mutant", &name]);
            let (caught, how) = match (ran, expect) {
                (Ok(f), Expect::OtherDigest) if f.last.digest != reference => {
                    (true, format!("another digest: {:.12}", f.last.digest))
                }
                (Ok(f), _) => (false, format!("NOT CAUGHT, digest {:.12}", f.last.digest)),
                (Err(f), Expect::Disagreement)
                    if matches!(f.code, Some(5 | 70)) && f.reason.contains("holders disagree") =>
                {
                    (true, format!("refused: {}", f.reason))
                }
                (Err(f), _) => (false, format!("failed otherwise: {}", f.reason)),
            };
            let place = format!("{} {}", GRIDS[row.grid].name, row.label());
            self.table.mutant(&name, mutant.what(), &place, caught, &how);
        }
        Ok(())
    }

    /// Random models under random layouts.
    fn models(&mut self, plan: Plan) -> Result<(), String> {
        let Plan { models, seed, .. } = plan;
        self.table.note(&format!("{models} random models of --seed {seed}"));
        let Launcher { binary, folder } = &self.launcher;
        let mut search = models::Search::new(folder.join("models"), Some(binary.clone()))?;
        let table = &self.table;
        let tally = search.run(plan, &mut |line| table.progress(line))?;
        if !tally.faults.is_empty() {
            // What repeats a fault names files in it.
            if let Some(temporary) = self.temporary.take() {
                self.table.note(&format!("the files of the faults are kept in {}", temporary.keep().display()));
            }
        }
        self.table.search(&tally);
        Ok(())
    }

    /// Mutations of programs; what the checker accepts must run to the digest of the program as it was.
    fn mutations(&mut self, seed: u64) -> Result<(), String> {
        let note = format!("{} mutations of --seed {seed}; all that are accepted run", mutations::MUTATIONS);
        self.table.note(&note);
        let told = |layout: &str, t: &mutations::Tally| {
            eprintln!(
                "{layout}: {} of {} legal, {} of {} others accepted",
                t.legal_accepted, t.legal, t.other_accepted, t.other
            );
        };
        let outcome = mutations::run(mutations::MUTATIONS, seed, told);
        let (kept, how) = match &outcome {
            Ok(tally) => (tally.holds(), tally.to_string()),
            Err(e) => (false, e.clone()),
        };
        self.table.mutant("mutations", "of sound programs", "", kept, &how);
        Ok(())
    }

    fn programs(&mut self) -> Result<(), String> {
        let wanted = mutants::WRONG.iter().filter(|w| self.wanted(&format!("program {}", w.what)));
        let wanted: Vec<_> = wanted.collect();
        if !wanted.is_empty() {
            self.table.note("mutants of programs: the checker must refuse each");
        }
        for wrong in wanted {
            let refusal = mutants::refusal(wrong)?;
            let how = refusal.as_ref().map_or("NOT REFUSED".into(), |text| format!("refused: {text}"));
            let right = refusal.is_some_and(|text| text.contains(wrong.reason));
            self.table.mutant("program", wrong.what, wrong.layout, right, &how);
        }
        Ok(())
    }
}

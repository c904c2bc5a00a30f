//! Random faults that runs are asked to suffer (`--inject`), over random layouts of a small run. Each run must end with the digest
//! of the undisturbed one. Prints how long recoveries took, by kind of fault.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use events::{Anatomy, Event};

use super::Args;
use crate::prove::launch::{Launcher, Start};
use crate::prove::random::Random;

/// The run.
pub(super) const RUN: &str = "configs/tiny.toml";
/// Its steps.
const STEPS: usize = 24;
/// With a broken device: steps between those that another rank checks.
const CHECKED: usize = 4;
/// What makes the same run with gradients that are summed for each microbatch: another digest, and ZeRO-2/3 are allowed.
pub(super) const REDUCED: &str = "grid.accumulate=reduced";
/// Layouts over its grid (dp 4, tp 2, six layers): the state with and without replicas, even and uneven.
const LAYOUTS: [&str; 15] = [
    "layout.dp=2",
    "layout.dp=3",
    "layout.dp=4",
    "layout.tp=2",
    "layout.pp=2",
    "layout.dp=2 layout.zero=1",
    "layout.dp=3 layout.zero=1",
    "layout.dp=4 layout.zero=1",
    "layout.tp=2 layout.pp=2",
    "layout.dp=2 layout.tp=2",
    "layout.dp=2 layout.pp=2",
    "layout.dp=2 layout.pp=2 layout.zero=1",
    "layout.dp=2 layout.zero=3",
    "layout.dp=4 layout.zero=2",
    "layout.dp=2 layout.pp=2 layout.zero=3",
];
/// Short limits, so that a minute sees many faults.
const LIMITS: [&str; 5] = [
    "guard.beat_ms=50",
    "guard.heartbeat_timeout_ms=1000",
    "guard.stopped_timeout_ms=150",
    "layout.exchange_timeout_ms=2000",
    "guard.progress_floor_ms=3000",
];

/// One run: where, and what it suffers.
struct Trial {
    sets: Vec<String>,
    ranks: usize,
    faults: Vec<String>,
}

/// The digests of the undisturbed run, and of that with [`REDUCED`].
pub(super) fn undisturbed(launcher: &Launcher, sets: &[String]) -> Result<[String; 2], String> {
    let alone = |name: &str, sets: &[String]| {
        let start = Start { sets, args: &[], stop: false };
        launcher.run("chaos", &launcher.folder.join(name), start).map(|end| end.digest).map_err(|e| e.reason)
    };
    let local = alone("local", sets)?;
    let reduced = alone("reduced", &[sets, &[REDUCED.to_owned()]].concat())?;
    println!("undisturbed: {local}; with {REDUCED}: {reduced}");
    Ok([local, reduced])
}

pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let seed = args.seed();
    let binary = args.binary(root)?;
    let folder = tempfile::tempdir().map_err(|e| format!("cannot make a folder: {e}"))?;
    let launcher = Launcher { binary, folder: folder.path().to_owned() };
    let path = root.join(RUN);
    let toml = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    launcher.write("chaos", &toml)?;
    println!("seed {seed}: random faults over random layouts of {RUN}");
    let [local, reduced] = undisturbed(&launcher, &[])?;
    let (began, limit) = (Instant::now(), Duration::from_secs_f64(60.0 * args.minutes));
    let mut random = Random::new(seed);
    let mut times = Times::default();
    let (mut runs, mut wrong) = (0, 0);
    while began.elapsed() < limit {
        runs += 1;
        let trial = trial(&mut random, args.faults);
        let run_dir = launcher.run_dir(runs);
        let inject = trial.faults.join(",");
        let result =
            launcher.run("chaos", &run_dir, Start { sets: &trial.sets, args: &["--inject", &inject], stop: false });
        let log = std::fs::read_to_string(run_dir.join("events.jsonl")).unwrap_or_default();
        let recoveries = times.take(&log);
        let undisturbed = if trial.sets.iter().any(|set| set == REDUCED) { &reduced } else { &local };
        let verdict = match &result {
            Ok(finished) if finished.digest == *undisturbed => "equal".to_owned(),
            Ok(finished) => format!("DIFFERS: {}", finished.digest),
            Err(failed) => format!("FAILED (exit {:?}): {}", failed.code, failed.reason),
        };
        let well = verdict == "equal";
        let (ranks, layout) = (trial.ranks, shown(&trial.sets));
        println!("{runs:>3} {ranks} ranks {layout:<48} {inject:<44} {recoveries} recoveries | {verdict}");
        if well {
            let _ = std::fs::remove_dir_all(&run_dir);
        } else {
            wrong += 1;
        }
    }
    times.print();
    println!("{runs} runs, {wrong} wrong (seed {seed})");
    if wrong > 0 {
        println!("their folders are kept in {}", folder.keep().display());
    }
    Ok(wrong == 0)
}

/// The ranks of a layout.
pub(super) fn ranks_of(sets: &[String]) -> usize {
    let axes = sets.iter().filter(|set| ["dp=", "tp=", "pp="].iter().any(|axis| set.contains(axis)));
    axes.filter_map(|set| set.split_once('=')?.1.parse::<usize>().ok()).product()
}

/// Gradients are sharded only where they are summed for each microbatch.
pub(super) fn needs_reduced(sets: &[String]) -> bool {
    sets.iter().any(|set| matches!(set.as_str(), "layout.zero=2" | "layout.zero=3"))
}

pub(super) fn shown(sets: &[String]) -> String {
    let told = |set: &&String| !LIMITS.contains(&set.as_str()) && *set != REDUCED;
    sets.iter().filter(told).map(|set| set.replace("layout.", "").replace("guard.", "")).collect::<Vec<_>>().join(" ")
}

fn trial(random: &mut Random, faults_max: usize) -> Trial {
    let layout = random.one(&LAYOUTS);
    let mut sets: Vec<String> = layout.split(' ').map(str::to_owned).collect();
    let ranks = ranks_of(&sets);
    if needs_reduced(&sets) {
        sets.push(REDUCED.into());
    }
    sets.push(format!("layout.transport={}", random.one(&["shm", "tcp"])));
    sets.push(format!("guard.spares={}", random.upto(2) - 1));
    if random.upto(3) == 1 {
        // The place stays empty for a while: fewer ranks go on, and more again later.
        sets.push("guard.respawn_after_ms=400".into());
    }
    sets.push("checkpoint.every=5".into());
    sets.push("guard.restarts_max=50".into());
    sets.extend(LIMITS.map(str::to_owned));
    let mut faults: Vec<(usize, String)> = (0..random.upto(faults_max)).map(|_| fault(random, ranks)).collect();
    faults.sort();
    faults.dedup_by_key(|fault| fault.0);
    let device = |fault: &(usize, String)| fault.1.ends_with(":device");
    let seen = |step: usize| step.next_multiple_of(CHECKED) <= STEPS;
    let alone = !sets.iter().any(|set| set.starts_with("layout.dp=") && set != "layout.dp=1");
    faults.retain(|fault| !device(fault) || !alone && seen(fault.0));
    if let Some(at) = faults.iter().position(device) {
        // Who dies before it is checked takes what is known of its device along: it comes alone.
        faults = vec![faults.swap_remove(at)];
        sets.push(format!("guard.recompute_every={CHECKED}"));
    }
    if faults.is_empty() {
        faults.push((7, "kill:0@7".into()));
    }
    if faults.iter().any(|(_, fault)| fault.ends_with(":gradient")) {
        // A gradient that is computed once tells nobody.
        sets.push("guard.recompute_every=1".into());
    }
    Trial { sets, ranks, faults: faults.into_iter().map(|(_, fault)| fault).collect() }
}

/// (step, `kill:1@7`)
fn fault(random: &mut Random, ranks: usize) -> (usize, String) {
    let (rank, step) = (random.upto(ranks) - 1, 1 + random.upto(STEPS - 2));
    let kinds = [
        "kill",
        "kill",
        "stop",
        "nan",
        "moment",
        "weight",
        "message",
        "gradient",
        "slow",
        "diskfull",
        "partition",
        "controller",
        "clock",
        "device",
    ];
    let text = match random.one(&kinds) {
        "controller" => format!("controller@{step}"),
        "clock" => format!("clock:{}{}@{step}", random.one(&["+", "-"]), 3600 * random.upto(48)),
        "slow" => format!("slow:{rank}@{step}x{}:3", 1 + random.upto(4)),
        "partition" => format!("partition:{rank}-{}@{step}", (rank + 1) % ranks),
        kind @ ("moment" | "weight" | "message" | "gradient" | "device") => format!("flip:{rank}@{step}:{kind}"),
        kind => format!("{kind}:{rank}@{step}"),
    };
    (step, text)
}

/// Recoveries by kind of fault.
#[derive(Default)]
struct Times(BTreeMap<String, Vec<Anatomy>>);

impl Times {
    /// Takes in a run's log; how many recoveries there were.
    fn take(&mut self, log: &str) -> usize {
        let mut kind = "none".to_owned();
        let mut count = 0;
        for event in log.lines().filter_map(|line| Event::from_line(line).ok()) {
            match event {
                Event::FaultFired { fault, .. } => kind = word(&fault),
                Event::Recovery(anatomy) => {
                    count += 1;
                    self.0.entry(kind.clone()).or_default().push(*anatomy);
                }
                _ => {}
            }
        }
        count
    }

    fn print(&self) {
        println!(
            "\n{:<12} {:>5} {:>13} {:>13} {:>13}  slowest phase of the worst",
            "fault", "n", "median ms", "worst ms", "detected ms"
        );
        for (kind, all) in &self.0 {
            let mut ms: Vec<f64> = all.iter().filter_map(Anatomy::seconds).map(|s| 1000.0 * s).collect();
            let mut noticed: Vec<f64> = all.iter().filter_map(|a| Some(1000.0 * (a.detected? - a.fault?))).collect();
            ms.sort_by(f64::total_cmp);
            noticed.sort_by(f64::total_cmp);
            let mid = |values: &[f64]| values.get(values.len() / 2).map_or("-".into(), |v| format!("{v:.0}"));
            let worst = all.iter().max_by(|a, b| a.seconds().unwrap_or(0.0).total_cmp(&b.seconds().unwrap_or(0.0)));
            let phase = worst.and_then(|a| a.phases().into_iter().max_by(|a, b| a.1.total_cmp(&b.1)));
            let phase = phase.map_or(String::new(), |(name, s)| format!("{name} {:.0} ms", 1000.0 * s));
            let last = ms.last().map_or("-".into(), |v| format!("{v:.0}"));
            println!("{kind:<12} {:>5} {:>13} {last:>13} {:>13}  {phase}", all.len(), mid(&ms), mid(&noticed));
        }
    }
}

/// `kill` of `kill:1@7`; `flip moment` of `flip:1@7:moment`.
fn word(fault: &str) -> String {
    let kind = fault.split([':', ',', ' ', '@']).next().unwrap_or(fault);
    match (kind, fault.rsplit(':').next()) {
        ("flip", Some(what)) if what.chars().all(char::is_alphabetic) => format!("flip {what}"),
        _ => kind.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_are_possible_and_follow_from_the_seed() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..200).map(|_| trial(&mut random, 3)).map(|t| (t.sets, t.ranks, t.faults)).collect::<Vec<_>>()
        };
        let all = draw(7);
        assert_eq!(all, draw(7));
        assert_ne!(all, draw(8));
        assert!(all.iter().all(|(_, ranks, faults)| (2..=4).contains(ranks) && (1..=3).contains(&faults.len())));
        assert_eq!(
            [word("kill:1@7"), word("flip:1@7:moment"), word("kill, from outside")],
            ["kill", "flip moment", "kill"]
        );
    }
}

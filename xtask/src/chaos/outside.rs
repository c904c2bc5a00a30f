//! `cargo xtask chaos --outside`: chains of starts whose processes are killed and stopped from outside, at every phase: one rank,
//! two, all, the process that leads them. What is left is resumed under another layout, without its logs at times, from the store
//! alone at times. Each chain must end with the step and the digest of the undisturbed run, in time, and lose no checkpoint.

mod chain;
mod counts;
mod life;
mod plan;
mod signs;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use chain::{Chain, Undisturbed};
use counts::Counts;
use life::Places;
use plan::{Life, Loss, Plan, RECIPES, RUN, plan};

use super::Args;
use crate::prove::launch::{Launcher, Start};

/// See the module; true if nothing was wrong.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let seed = args.seed();
    let binary = args.binary(root)?;
    let folder = tempfile::tempdir().map_err(|e| format!("cannot make a folder: {e}"))?;
    let launcher = Launcher { binary: binary.clone(), folder: folder.path().to_owned() };
    launcher.write("chaos", RUN)?;
    println!("seed {seed}: processes are struck from outside; a chain again: --seed {seed} --chain N");
    let undisturbed = undisturbed(&launcher)?;
    let (began, limit) = (Instant::now(), Duration::from_secs_f64(60.0 * args.minutes));
    let mut counts = Counts::default();
    let (mut chains, mut wrong) = (0, 0);
    while began.elapsed() < limit && args.chain.is_none_or(|_| chains == 0) {
        let number = args.chain.unwrap_or(chains + 1);
        chains += 1;
        let plan = plan(seed, number, args.faults);
        let at = folder.path().join(format!("chain-{number}"));
        std::fs::create_dir(&at).map_err(|e| format!("cannot make a folder: {e}"))?;
        let places = Places {
            binary: binary.clone(),
            toml: folder.path().join("chaos.toml"),
            run: at.join("run"),
            store: plan.store.then(|| at.join("store")),
        };
        let mut chain = Chain::new(&plan, &places, &undisturbed[&plan.recipe], &mut counts);
        chain.run()?;
        let (faults, log) = (chain.faults, chain.log);
        println!("{number:>4} {:<70} | {}", told(&plan), if faults.is_empty() { "equal" } else { "WRONG" });
        if faults.is_empty() {
            let _ = std::fs::remove_dir_all(&at);
        } else {
            wrong += 1;
            for fault in &faults {
                println!("       {}", fault.lines().next().unwrap_or_default());
                counts.fault(fault);
            }
            let text = format!("{plan:#?}\n{}\n", log.join("\n"));
            std::fs::write(at.join("log.txt"), text).map_err(|e| format!("cannot write a log: {e}"))?;
            println!("       what was done: {}", at.join("log.txt").display());
        }
    }
    counts.print();
    let seconds = began.elapsed().as_secs();
    println!("{chains} chains, {} strikes, {wrong} wrong, {seconds} s (seed {seed})", counts.total());
    if wrong > 0 {
        println!("their folders are kept in {}", folder.keep().display());
    }
    Ok(wrong == 0)
}

/// What each recipe ends with.
fn undisturbed(launcher: &Launcher) -> Result<BTreeMap<usize, Undisturbed>, String> {
    let mut all = BTreeMap::new();
    for (recipe, (name, sets)) in RECIPES.iter().enumerate() {
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let start = Start { sets: &sets, args: &[], stop: false };
        let finished = launcher.run("chaos", &launcher.folder.join(name), start).map_err(|e| e.reason)?;
        println!("undisturbed, {name}: step {}, {}", finished.step, finished.digest);
        all.insert(recipe, (finished.step, finished.digest));
    }
    Ok(all)
}

/// A chain in a line.
fn told(plan: &Plan) -> String {
    let of = |life: &Life| {
        let layout: Vec<_> = life.sets.iter().filter_map(|set| set.strip_prefix("layout.")).collect();
        let layout = if layout.is_empty() { "one rank".into() } else { layout.join(" ") };
        let loss = match life.loss {
            Loss::Nothing => "",
            Loss::Events => "(no events) ",
            Loss::Logs => "(no logs) ",
            Loss::Folder => "(store only) ",
        };
        let strikes: Vec<_> = life.strikes.iter().map(ToString::to_string).collect();
        format!("{loss}{layout}: {}", strikes.join(", "))
    };
    let lives: Vec<_> = plan.lives.iter().map(of).collect();
    format!("{} | {}", RECIPES[plan.recipe].0, lives.join(" | "))
}

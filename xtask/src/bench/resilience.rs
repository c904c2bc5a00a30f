//! `cargo xtask bench resilience`: what protection costs, and how long it takes to be back.

use std::path::Path;

use events::{Anatomy, Event};

use super::stats::median;
use crate::prove::launch::{Launcher, Start, build};

#[derive(clap::Args)]
pub struct Args {
    /// Kills per layout.
    #[arg(long, default_value_t = 5)]
    kills: usize,
    /// Pairs of runs with and without hashes of state.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// The run file.
    #[arg(long, default_value = "configs/tiny.toml")]
    run: String,
    /// Steps of a run.
    #[arg(long, default_value_t = 24)]
    steps: u64,
}

/// What is compared, pair by pair: (name, off, on).
const PAIRS: [(&str, &str, &str); 2] = [
    ("state hashes", "guard.hash_state=false", "guard.hash_state=true"),
    ("mirrors", "layout.mirror=false", "layout.mirror=true"),
];
const LAYOUTS: [&str; 3] = ["layout.dp=2", "layout.dp=2 layout.zero=1", "layout.pp=2"];

pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let binary = build(root)?;
    let folder = tempfile::tempdir().map_err(|e| format!("cannot make a folder: {e}"))?;
    let launcher = Launcher { binary, folder: folder.path().to_owned() };
    let path = root.join(&args.run);
    let toml = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    launcher.write("resilience", &toml)?;
    let mut number = 0;
    let mut events = |layout: &str, set: &[&str], arguments: &[&str]| -> Result<Vec<Event>, String> {
        number += 1;
        let steps = format!("train.steps={}", args.steps);
        let sets: Vec<String> =
            layout.split(' ').chain(set.iter().copied()).chain([steps.as_str()]).map(str::to_owned).collect();
        let run_dir = launcher.run_dir(number);
        launcher
            .run("resilience", &run_dir, Start { sets: &sets, args: arguments, stop: false })
            .map_err(|e| e.reason)?;
        let log = std::fs::read_to_string(run_dir.join("events.jsonl")).map_err(|e| e.to_string())?;
        Ok(log.lines().filter_map(|line| Event::from_line(line).ok()).collect())
    };
    println!("{:<28} {:<14} {:>10} {:>10} {:>8}", "layout", "what", "off ms", "on ms", "cost");
    for layout in LAYOUTS {
        for (name, off, on) in PAIRS {
            let mut ratios = Vec::new();
            let (mut without, mut with) = (Vec::new(), Vec::new());
            for pair in 0..args.pairs {
                // Which goes first alternates, so that a drift of the machine falls on both.
                let order = if pair % 2 == 0 { [off, on] } else { [on, off] };
                let mut both = [0.0; 2];
                for set in order {
                    let steps = step_ms(&events(layout, &[set], &[])?);
                    both[usize::from(set == on)] = median(steps).ok_or("a run without steps")?;
                }
                without.push(both[0]);
                with.push(both[1]);
                ratios.push(both[1] / both[0]);
            }
            let middle = |values: Vec<f64>| median(values).unwrap_or(f64::NAN);
            let (off, on, cost) = (middle(without), middle(with), 100.0 * (middle(ratios) - 1.0));
            println!("{layout:<28} {name:<14} {off:>10.2} {on:>10.2} {cost:>+7.1}%");
        }
    }
    println!(
        "\n{:<28} {:>6} {:>12} {:>12} {:>14}  phases of the median, ms",
        "layout", "kills", "median ms", "worst ms", "exit seen ms"
    );
    for layout in LAYOUTS {
        let mut all: Vec<Anatomy> = Vec::new();
        for kill in 0..args.kills {
            let inject = format!("kill:{}@{}", kill % 2, 5 + kill as u64 % (args.steps / 2).max(1));
            let seen = events(layout, &[], &["--inject", &inject])?;
            all.extend(
                seen.into_iter().filter_map(|event| if let Event::Recovery(a) = event { Some(*a) } else { None }),
            );
        }
        all.retain(|a| a.seconds().is_some());
        all.sort_by(|a, b| a.seconds().unwrap_or(0.0).total_cmp(&b.seconds().unwrap_or(0.0)));
        let (Some(mid), Some(worst)) = (all.get(all.len() / 2), all.last()) else {
            return Err(format!("no recovery under {layout}"));
        };
        let ms = |a: &Anatomy| 1000.0 * a.seconds().unwrap_or(0.0);
        let seen = median(all.iter().filter_map(|a| Some(1000.0 * (a.detected? - a.fault?)))).unwrap_or(f64::NAN);
        let phases: Vec<_> = mid.phases().iter().map(|(name, s)| format!("{name} {:.0}", 1000.0 * s)).collect();
        let (n, mid, worst) = (all.len(), ms(mid), ms(worst));
        println!("{layout:<28} {n:>6} {mid:>12.0} {worst:>12.0} {seen:>14.1}  {}", phases.join(" + "));
    }
    Ok(true)
}

/// Durations of steps after the first three, milliseconds.
fn step_ms(events: &[Event]) -> Vec<f64> {
    let of = |event: &Event| if let Event::Step(step) = event { Some(1000.0 * step.seconds) } else { None };
    events.iter().filter_map(of).skip(3).collect()
}

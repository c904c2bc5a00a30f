//! `lockstep goodput`: what became of every second of a run.

use std::path::PathBuf;

use observe::goodput::{self, Account, OfLog};
use train::TrainError;

use crate::show::line;
use crate::trouble;

#[derive(clap::Args)]
pub struct Args {
    /// The run's folder, also of a run under way.
    run_dir: PathBuf,
    /// Seconds of the sliding window.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600.0)]
    window: f64,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let path = args.run_dir.join("events.jsonl");
    let text = events::regular::read(&path).map_err(|e| {
        let path = path.display();
        TrainError::BadInput(format!(
            "{path} cannot be read: {e}; give the folder that `train` named as its run directory"
        ))
    })?;
    let text = String::from_utf8_lossy(&text);
    if !args.window.is_finite() || args.window <= 0.0 {
        return Err(TrainError::BadInput(format!("--window {}: give seconds above 0", args.window)));
    }
    let OfLog { all, window, unread, holes } = goodput::of_log(text.lines(), args.window);
    if args.json {
        let value = serde_json::json!({
            "kind": "goodput", "schema": events::SCHEMA, "run": all, "window_s": args.window, "window": window, "lines_unread": unread, "steps_missing": holes,
        });
        line(&value.to_string());
        return Ok(0);
    }
    lines(&all).iter().for_each(|text| line(text));
    if window.wall_s < all.wall_s {
        line(&format!("last {:.0} s: goodput {:.1}%", window.wall_s, 100.0 * window.goodput));
    }
    if !holes.is_empty() {
        let text = |(a, b): &(u64, u64)| if a == b { format!("{a}") } else { format!("{a} to {b}") };
        let holes: Vec<_> = holes.iter().map(text).collect();
        line(&format!(
            "events.jsonl lacks steps {}: lines were lost, and the time of these steps is counted as unknown",
            holes.join(", ")
        ));
    }
    if unread > 0 {
        line(&format!("{unread} lines of {} are no events of this version and are left out", path.display()));
    }
    Ok(0)
}

/// The account as lines: a table, then each recovery.
fn lines(account: &Account) -> Vec<String> {
    let share = |s: f64| 100.0 * s / account.wall_s.max(f64::MIN_POSITIVE);
    let row = |name: &str, s: f64| format!("{name:<12} {s:>10.2} s {:>5.1}%", share(s));
    let mut lines: Vec<_> = account.time_s.iter().map(|(class, s)| row(class.name(), *s)).collect();
    lines.push(row("wall", account.wall_s));
    lines.push(format!(
        "goodput {:.1}% | {} steps, {} redone | started {} times | {} recoveries",
        100.0 * account.goodput,
        account.steps,
        account.steps_redone,
        account.sessions,
        account.restarts.len()
    ));
    lines.extend(account.restarts.iter().map(trouble::recovery));
    lines
}

//! `cargo xtask chaos`: small runs of real processes that suffer faults and must end as if nothing had happened.
//!
//! Three kinds: faults that the run is asked to suffer (`injected`, the default), faults of hosts and links (`hosts`), and
//! signals from outside at every phase of a run, with resumes in between (`outside`).

mod hosts;
mod injected;
mod outside;
mod process;

use std::path::{Path, PathBuf};

use crate::prove::launch::build;

#[derive(clap::Args)]
pub struct Args {
    /// Ends after so many minutes; the run or chain under way is finished.
    #[arg(long, default_value_t = 2.0)]
    minutes: f64,
    /// What chooses layouts and faults [default: the clock]; printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Faults of a run at most; with --outside those between two starts.
    #[arg(long, default_value_t = 3)]
    faults: usize,
    /// On three hosts in network namespaces: links are cut and slowed, agents and controllers killed, too. Needs root and `ip`.
    #[arg(long, conflicts_with = "outside")]
    hosts: bool,
    /// Processes are killed and stopped from outside, the parent too, at every phase; then the run is resumed under another layout.
    #[arg(long)]
    outside: bool,
    /// With --outside: only the chain of this number, again.
    #[arg(long, value_name = "N", requires = "outside", requires = "seed")]
    chain: Option<usize>,
    /// A lockstep binary [default: one is built for release].
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
}

impl Args {
    fn seed(&self) -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        self.seed.unwrap_or_else(|| since.map_or(1, |d| d.as_secs()))
    }

    /// The binary to run.
    fn binary(&self, root: &Path) -> Result<PathBuf, String> {
        match &self.binary {
            Some(path) => path.canonicalize().map_err(|e| format!("--binary {}: {e}", path.display())),
            None => build(root),
        }
    }
}

pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    if args.faults == 0 || !args.minutes.is_finite() || args.minutes <= 0.0 {
        return Err("--faults and --minutes must be above 0".into());
    }
    if args.hosts {
        hosts::run(root, args)
    } else if args.outside {
        outside::run(root, args)
    } else {
        injected::run(root, args)
    }
}

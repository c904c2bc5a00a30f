//! `cargo xtask`: the checks of the workspace that are more than a test.

mod bench;
mod chaos;
mod flaky;
mod floors;
mod parity;
mod prove;

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check that crates use only crates on lower floors.
    Check,
    /// Train the same runs under many layouts and compare the digests.
    Prove(prove::Args),
    /// Compare with transformers, both ways; makes its own Python environment under `target/`.
    Parity,
    /// Random faults over random layouts of a small run; each must end with the digest of the undisturbed one.
    Chaos(chaos::Args),
    /// Run the tests many times on a busy machine, and tell which fail.
    Flaky(flaky::Args),
    /// Measure the speed, beside others.
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace");
    let result = match Cli::parse().command {
        Command::Check => floors::check(root),
        Command::Prove(args) => prove::run(root, &args),
        Command::Chaos(args) => chaos::run(root, &args),
        Command::Flaky(args) => flaky::run(root, &args),
        Command::Parity => parity::run(root),
        Command::Bench(what) => bench::run(root, &what),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

//! The `lockstep` binary: parse, call, print.

mod check;
mod ckpt;
mod data_cmd;
mod demo;
mod diagnose;
mod doctor;
mod eval;
mod goodput;
mod hosts;
mod profile_table;
mod reload;
mod show;
mod train_cmd;
mod trouble;
mod words;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ::train::TrainError;
use ::train::launch::wire::{ABOUT_COMMAND, RANK_COMMAND};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

/// What the person sees under `--help`.
const EXIT_CODES: &str = "\
Exit codes of a run:
   0  done
   2  bad input: nothing was written
   3  stopped on request, after a checkpoint
   4  training diverged
   5  too many failures (guard.restarts_max)
   6  all steps done, but the last checkpoint could not be written
   7  something that the run was given, such as its data, could not be used any more when it had begun
  70  internal error";

/// Trains large language models on many machines. The grid defines the numbers; the layout
/// only says where they are computed.
#[derive(Parser)]
#[command(version, about, propagate_version = true, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small model on real text three ways, strike a fourth run, and compare the digests.
    Demo(demo::Args),
    /// Train the run in a run file.
    Train(train_cmd::Args),
    /// Train on several hosts: agents call this controller, which decides and keeps the run's folder.
    Controller(hosts::ControllerArgs),
    /// Run the ranks of this host for a controller.
    Agent(hosts::AgentArgs),
    /// Change the layout or the recipe of a run at work at its next step, or hand it over to another binary; state stays.
    Reload(reload::Args),
    /// Prove a run's program without running it, and show its schedule.
    Check(check::Args),
    /// Loss, logits and gradients of a Hugging Face model on a batch, under any layout.
    Eval(eval::Args),
    /// Look into checkpoints, verify and compare them, turn them into other forms.
    Ckpt(ckpt::Args),
    /// Turn text into tokens, look at data.
    #[command(subcommand)]
    Data(data_cmd::Command),
    /// What became of every second of a run.
    Goodput(goodput::Args),
    /// Which rank holds the others up: the verdict over flight records.
    Diagnose(diagnose::Args),
    /// Is this machine fit, and how fast is it.
    Doctor(doctor::Args),
}

/// A run file with overrides, as every command takes them.
#[derive(clap::Args)]
struct RunArgs {
    /// The run file.
    run: PathBuf,
    /// Override a key, such as `layout.dp=2`; may be repeated, and takes several at once.
    #[arg(long = "set", value_name = "KEY=VALUE", num_args = 1..)]
    sets: Vec<String>,
}

impl RunArgs {
    fn load(&self) -> Result<spec::Run, TrainError> {
        let run = spec::Run::load(&self.run, &self.sets, cores())?;
        run.check_effects()?;
        Ok(run)
    }

    /// The same where `set` stands before what the person overrides.
    fn load_with(&self, set: &str) -> Result<spec::Run, TrainError> {
        let sets: Vec<_> = std::iter::once(set.to_owned()).chain(self.sets.iter().cloned()).collect();
        let run = spec::Run::load(&self.run, &sets, cores())?;
        run.check_effects()?;
        Ok(run)
    }

    /// The run file's name without its ending.
    fn name(&self) -> String {
        self.run.file_stem().map_or("run".into(), |s| s.to_string_lossy().into_owned())
    }
}

/// Most threads that a person may ask for: beyond any host's cores, and few enough to start.
const THREADS_MAX: usize = 1024;

/// A number of threads.
fn threads(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|n| (1..=THREADS_MAX).contains(n));
    count.ok_or_else(|| format!("give 1 to {THREADS_MAX} threads, or leave it out for one a core"))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Lets these signals do nothing by themselves.
fn outlive(signals: &[i32]) {
    for signal in signals {
        let _ = signal_hook::flag::register(*signal, Arc::new(AtomicBool::new(false)));
    }
}

/// What one process of this binary says to another: no command of a person's.
fn internal(command: Option<&str>) -> Option<ExitCode> {
    match command {
        Some(RANK_COMMAND) => {
            // Ctrl-C at a terminal, its hangup, `timeout` and service managers signal every process of the group; the parent
            // decides.
            outlive(&[SIGINT, SIGTERM, SIGHUP]);
            Some(ExitCode::from(::train::worker::rank_main() as u8))
        }
        // Asked before a run is handed over to this binary.
        Some(ABOUT_COMMAND) => {
            let text = serde_json::to_string(&::train::launch::reload::about()).unwrap_or_default();
            show::line(&text);
            Some(ExitCode::SUCCESS)
        }
        _ => None,
    }
}

fn main() -> ExitCode {
    // A file that may not grow (ulimit -f) is an error of the write that says so, not a death without a word.
    outlive(&[SIGXFSZ]);
    let args: Vec<_> = std::env::args_os().collect();
    if let Some(code) = internal(args.get(1).filter(|_| args.len() == 2).and_then(|word| word.to_str())) {
        return code;
    }
    let (args, json) = (words::settled(args, |path| path.exists()), words::wants_json(std::env::args_os()));
    let parsed = Cli::command().try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let result = match parsed {
        Ok(cli) => run(cli.command),
        Err(error) => return words::refuse(error, &Cli::command(), json),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            words::tell(&error, json);
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

fn run(command: Command) -> Result<u8, TrainError> {
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::Train(args) => train_cmd::run(&args),
        Command::Controller(args) => hosts::controller(&args),
        Command::Agent(args) => hosts::agent(&args),
        Command::Reload(args) => reload::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Data(command) => data_cmd::run(&command),
        Command::Eval(args) => eval::run(&args),
        Command::Ckpt(args) => ckpt::run(&args),
        Command::Goodput(args) => goodput::run(&args),
        Command::Diagnose(args) => diagnose::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    }
}

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

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ::train::TrainError;
use clap::{Parser, Subcommand};

/// Trains large language models on many machines. The grid defines the numbers; the layout
/// only says where they are computed.
#[derive(Parser)]
#[command(version, about, propagate_version = true)]
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
    /// A rank process; started by `train`.
    #[command(name = ::train::launch::wire::RANK_COMMAND, hide = true)]
    Rank,
    /// What this binary is; asked before a run is handed over to it.
    #[command(name = ::train::launch::wire::ABOUT_COMMAND, hide = true)]
    About,
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

fn about() -> Result<u8, TrainError> {
    let text = serde_json::to_string(&::train::launch::reload::about());
    show::line(&text.map_err(|e| TrainError::Internal(e.to_string()))?);
    Ok(0)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
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
        Command::About => about(),
        Command::Rank => {
            // Ctrl-C at a terminal, `timeout` and service managers signal every process of the group; the parent decides.
            for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
                let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
            }
            return ExitCode::from(::train::worker::rank_main() as u8);
        }
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            // That nobody listens must not change the exit code.
            let _ = writeln!(std::io::stderr(), "error: {e}");
            ExitCode::from(e.exit_code() as u8)
        }
    }
}

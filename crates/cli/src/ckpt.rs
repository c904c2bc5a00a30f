//! `lockstep ckpt`: what is in a run's checkpoints, whether it is whole, and out as a Hugging Face folder.

use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use checkpoint::hf::{self, Dtype, ExportOptions};
use spec::Run;
use spec::hf::{Export, HfConfig, Style};
use train::TrainError;

use crate::show::line;

#[derive(clap::Subcommand)]
pub enum Command {
    /// List the checkpoints of a run.
    Ls {
        /// The run's folder.
        run_dir: PathBuf,
    },
    /// Read a checkpoint whole and check every hash.
    Verify {
        /// The run's folder (its newest checkpoint), or one checkpoint.
        path: PathBuf,
    },
    /// Write a checkpoint as a Hugging Face folder.
    Export {
        /// The run's folder (its newest checkpoint), or one checkpoint in it.
        path: PathBuf,
        /// The folder to write; it must not exist or be empty.
        #[arg(long, value_name = "DIR")]
        hf: PathBuf,
        /// Type of the weights: f32 or bf16.
        #[arg(long, default_value = "f32")]
        dtype: String,
        /// Largest shard, in bytes.
        #[arg(long, value_name = "BYTES", default_value_t = hf::SHARD_BYTES_MAX)]
        shard_bytes_max: u64,
    },
}

pub fn run(command: &Command) -> Result<u8, TrainError> {
    match command {
        Command::Ls { run_dir } => list(run_dir),
        Command::Verify { path } => verify(path),
        Command::Export { path, hf, dtype, shard_bytes_max } => export(path, hf, dtype, *shard_bytes_max),
    }
}

fn list(run_dir: &Path) -> Result<u8, TrainError> {
    let root = run_dir.join("checkpoints");
    let found = checkpoint::list(&root)?;
    if found.is_empty() {
        line(&format!("no checkpoint under {}", root.display()));
    }
    for (step, path) in found {
        match Checkpoint::open(&path) {
            Ok(open) => {
                let bytes: u64 = open.files().iter().map(|f| f.bytes).sum();
                let digest = open.meta().digest.clone().unwrap_or_default();
                line(&format!("step {step} | {:.1} MB | digest {digest} | {}", bytes as f64 / 1e6, path.display()));
            }
            Err(e) => line(&format!("step {step} | damaged: {e}")),
        }
    }
    Ok(0)
}

/// The checkpoint at `path`, or the newest one of the run at `path`, with the run's folder.
fn open(path: &Path) -> Result<(Checkpoint, PathBuf), TrainError> {
    if path.join(checkpoint::MANIFEST).exists() {
        let run = path.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        return Ok((Checkpoint::open(path)?, run.to_owned()));
    }
    let newest = checkpoint::newest(&path.join("checkpoints"))?;
    newest.skipped.iter().for_each(|(step, e)| line(&format!("the checkpoint of step {step} is passed over: {e}")));
    match newest.checkpoint {
        Some(found) => Ok((found, path.to_owned())),
        None => Err(TrainError::BadInput(format!(
            "{} is neither a checkpoint nor a run's folder with one; give runs/NAME or runs/NAME/checkpoints/step-NNNNNNNN",
            path.display()
        ))),
    }
}

fn verify(path: &Path) -> Result<u8, TrainError> {
    let (found, _) = open(path)?;
    let report = found.verify();
    report.problems.iter().for_each(|problem| line(&format!("{problem}")));
    let verdict = if report.good() { "good" } else { "DAMAGED" };
    line(&format!(
        "{verdict}: step {}, {} files, {:.1} MB read, {} problems",
        report.step,
        report.files,
        report.bytes as f64 / 1e6,
        report.problems.len()
    ));
    Ok(if report.good() { 0 } else { 2 })
}

fn export(path: &Path, out: &Path, dtype: &str, shard_bytes_max: u64) -> Result<u8, TrainError> {
    let dtype = match dtype {
        "f32" => Dtype::F32,
        "bf16" => Dtype::Bf16,
        other => return Err(TrainError::BadInput(format!("--dtype {other}: it must be f32 or bf16"))),
    };
    let (found, folder) = open(path)?;
    let run = Run::load(&folder.join("run.toml"), &[], crate::cores())?;
    spec::hf::Arch::holds(&run.model)?;
    let source = run.from.as_ref().map(|from| HfConfig::read(&from.join(hf::CONFIG))).transpose()?;
    // A folder goes back in the style in which it came.
    let newer = source.as_ref().is_some_and(|config| config.key("rope_parameters").is_some());
    let config = Export {
        style: if newer { Style::Hf5 } else { Style::Public },
        dtype: dtype.name(),
        max_positions: run.train.seq,
        eos_token_id: run.data.eod.then_some(data::EOD as usize),
        base: source.as_ref(),
    };
    let config = config.config_json(&run.model);
    let options = ExportOptions { dtype, shard_bytes_max };
    let written = hf::export_checkpoint(&found, &run.model, out, &config, options)?;
    if let Some(from) = &run.from {
        hf::copy_companions(from, out)?;
    }
    line(&format!(
        "step {} as {}: {} parameters, {} files, {:.1} MB",
        found.meta().step,
        out.display(),
        written.parameters,
        written.files,
        written.bytes as f64 / 1e6
    ));
    Ok(0)
}

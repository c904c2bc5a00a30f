//! `lockstep ckpt`: what is in checkpoints, whether it is whole, and from one form to another.

mod export;
mod look;
mod make;

use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use train::TrainError;

use crate::RunArgs;
use crate::show::line;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
    /// One JSON object per line.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List the checkpoints of a run, or the tensors of a torch DCP or safetensors folder.
    Ls {
        /// The run's folder, or a foreign checkpoint.
        path: PathBuf,
    },
    /// Read checkpoints whole and check every hash; of foreign ones the structure. Exit code 2 if something is wrong.
    Verify {
        /// The run's folder (all its checkpoints), or one checkpoint, or a foreign one.
        path: PathBuf,
        /// Of a run's folder the newest checkpoint only.
        #[arg(long)]
        newest: bool,
        /// Every checkpoint of the run, which is what is done without it.
        #[arg(long, hide = true, conflicts_with = "newest")]
        all: bool,
        /// Threads, 1 to 1024 [default: all cores]
        #[arg(long, value_name = "N", value_parser = crate::threads)]
        jobs: Option<usize>,
    },
    /// Compare two checkpoints tensor by tensor. Exit code 1 if they differ.
    Diff {
        /// A run's folder (its newest checkpoint), or one checkpoint.
        a: PathBuf,
        /// Another.
        b: PathBuf,
    },
    /// Prove that a layout loads a checkpoint; rewrite it where another grid.tp cuts it otherwise.
    Reshard {
        /// A run's folder (its newest checkpoint), or one checkpoint in it.
        path: PathBuf,
        /// The target, such as `layout.dp=4` or `grid.tp=2`.
        #[arg(long = "set", value_name = "KEY=VALUE", num_args = 1..)]
        sets: Vec<String>,
        /// The run's folder to write, where something is to be rewritten.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Average the parameters of checkpoints in float64; moments are those of the latest.
    Average {
        /// Checkpoints of one model.
        #[arg(required = true, num_args = 2..)]
        paths: Vec<PathBuf>,
        /// The run's folder to write; it must not exist or be empty.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// A Hugging Face folder as the checkpoint of step 0 of a run.
    Import {
        /// The folder: config.json and safetensors.
        hf: PathBuf,
        #[command(flatten)]
        run: RunArgs,
        /// The run's folder to write; it must not exist or be empty.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
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
        #[arg(long, value_name = "BYTES", default_value_t = checkpoint::hf::SHARD_BYTES_MAX)]
        shard_bytes_max: u64,
    },
}

/// Lines for a person, or objects for a program.
#[derive(Clone, Copy)]
struct Say {
    json: bool,
}

impl Say {
    fn line(self, text: &str) {
        if !self.json {
            line(text);
        }
    }

    fn object(self, kind: &str, mut object: serde_json::Value) {
        if self.json {
            object["kind"] = kind.into();
            object["schema"] = events::SCHEMA.into();
            line(&object.to_string());
        }
    }
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let say = Say { json: args.json };
    match &args.command {
        Command::Ls { path } => look::list(say, path),
        Command::Verify { path, newest, all: _, jobs } => look::verify(say, path, *newest, *jobs),
        Command::Diff { a, b } => look::diff(say, a, b),
        Command::Reshard { path, sets, out } => make::reshard(say, path, sets, out.as_deref()),
        Command::Average { paths, out } => make::average(say, paths, out),
        Command::Import { hf, run, out } => make::import(say, hf, &run.load()?, out),
        Command::Export { path, hf, dtype, shard_bytes_max } => export::export(say, path, hf, dtype, *shard_bytes_max),
    }
}

/// Checks that a file of a run is a regular file before it is opened: reading from a pipe might never end.
fn regular(path: &Path) -> Result<(), TrainError> {
    events::regular::check(path).map_err(|e| TrainError::BadInput(format!("{}: {e}", path.display())))
}

/// Where the checkpoints of the run at `path` are, if it is a run's folder.
fn checkpoints_of(path: &Path) -> Option<PathBuf> {
    let root = path.join("checkpoints");
    root.is_dir().then_some(root)
}

/// The checkpoint at `path`, or the newest one of the run at `path`, with the run's folder.
fn open(say: Say, path: &Path) -> Result<(Checkpoint, PathBuf), TrainError> {
    if path.join(checkpoint::MANIFEST).exists() {
        let run = path.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        return Ok((Checkpoint::open(path)?, run.to_owned()));
    }
    let newest = checkpoint::newest(&path.join("checkpoints"))?;
    for (step, e) in &newest.skipped {
        let text = format!("the checkpoint of step {step} is passed over: {e}");
        say.line(&text);
        say.object("notice", serde_json::json!({ "text": text }));
    }
    match newest.checkpoint {
        Some(found) => Ok((found, path.to_owned())),
        None if !newest.skipped.is_empty() => {
            let reasons: Vec<_> = newest.skipped.iter().map(|(step, e)| format!("step {step}: {e}")).collect();
            Err(TrainError::BadInput(format!(
                "every checkpoint of {} is damaged; a copy of one may be in checkpoint.store\n  {}",
                path.display(),
                reasons.join("\n  ")
            )))
        }
        None => Err(TrainError::BadInput(format!(
            "{} is neither a checkpoint nor a run's folder with one; give runs/NAME or runs/NAME/checkpoints/step-NNNNNNNN",
            path.display()
        ))),
    }
}

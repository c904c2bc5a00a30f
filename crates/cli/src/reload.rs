//! `lockstep reload`.

use std::path::PathBuf;

use train::TrainError;
use train::launch::reload;

use crate::show;

#[derive(clap::Args)]
pub struct Args {
    /// The folder of a run that is at work.
    run_dir: PathBuf,
    /// A key to change from the next step on, such as `layout.dp=2` or `train.lr=1e-4`; takes several at once.
    #[arg(long = "set", value_name = "KEY=VALUE", num_args = 1.., required_unless_present = "binary")]
    sets: Vec<String>,
    /// A lockstep binary of the same numerics version: rank processes are replaced by processes of it, one by one, and hand
    /// their state over in memory. The process that was started as `train` stays what it is.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    show::line(&reload::request(&args.run_dir, &args.sets, args.binary.as_deref())?);
    Ok(0)
}

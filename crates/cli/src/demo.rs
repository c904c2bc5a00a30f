//! `lockstep demo`.
use train::TrainError;

#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: &Args) -> Result<u8, TrainError> {
    todo!()
}

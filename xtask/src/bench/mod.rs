//! `cargo xtask bench`: how fast the trainer is, alone and beside others.

mod balanced;
mod collectives;
mod kernels;
mod machine;
mod ours;
mod peer;
pub mod process;
mod report;
mod resilience;
mod row;
mod shapes;
mod stats;
mod train;

use std::path::Path;

use clap::Subcommand;

/// What is measured.
#[derive(Subcommand)]
pub enum Bench {
    /// Tokens/s, MFU and peak memory of training, beside PyTorch.
    Train(train::Args),
    /// Time and bandwidth of collectives on each transport, beside gloo and Open MPI.
    Collectives(collectives::Args),
    /// One rank of `collectives`; started by it.
    #[command(hide = true)]
    CollectivesRank(collectives::rank::Args),
    /// What protection costs, and how long it takes to be back after a kill.
    Resilience(resilience::Args),
    /// GFLOP/s and GB/s of each kernel, beside the machine's limits and other products.
    Kernels(kernels::Args),
}

/// Measures the workspace at `root`; true if everything asked for was measured.
pub fn run(root: &Path, bench: &Bench) -> Result<bool, String> {
    match bench {
        Bench::Train(args) => train::run(root, args),
        Bench::Collectives(args) => collectives::run(root, args),
        Bench::CollectivesRank(args) => collectives::rank::run(args),
        Bench::Resilience(args) => resilience::run(root, args),
        Bench::Kernels(args) => kernels::run(root, args),
    }
}

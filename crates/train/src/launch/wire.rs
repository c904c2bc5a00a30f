//! The training job of a run, as text: what every rank of every world shares, and agents do not read.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use control::fault::Fault;
pub use control::wire::{ABOUT_COMMAND, RANK_COMMAND};
use data::content::Known;
use serde::{Deserialize, Serialize};
use spec::Run;

use super::Profiling;
use crate::corpus::Corpus;
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::rank::{Job, Pulse};

/// A job as text; see [`Job`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the run file, for messages.
    pub name: String,
    /// The resolved run file that the run began with: every process of it comes to the same identity by it.
    pub run_toml: String,
    /// Files of tokens that the parent has read whole.
    pub known: Known,
    /// Cores of the machine, as the parent saw them.
    pub cores: usize,
    /// Instruction path.
    pub simd: String,
    /// Folder of checkpoints.
    pub checkpoints: PathBuf,
    /// Steps between hashes of every tensor.
    pub digest_every: u64,
    /// Measured peak of the run's cores, GFLOP/s.
    pub peak_gflops: f64,
    /// Which steps are profiled, if any.
    pub profiling: Option<Profiling>,
    /// A deliberate fault, that a proof must catch.
    pub mutant: Option<Mutant>,
}

/// What a job is in one world, on one rank.
#[derive(Debug, Clone)]
pub struct Part {
    /// The resolved run file of the world.
    pub run_toml: String,
    /// The rank's cores; empty: the system places it.
    pub cores: Vec<usize>,
    /// Faults to come, of the rank.
    pub faults: Vec<Fault>,
    /// The first steps are checked by other ranks: [`crate::rank::Job::recheck`].
    pub recheck: bool,
    /// Where steps are checked: the last one that was.
    pub checked: Option<u64>,
    /// The first step that nobody can check any more, if there is one.
    pub unseen: Option<u64>,
}

impl JobSpec {
    /// The job of a rank; `stop` asks for a stop after the step under way.
    ///
    /// # Errors
    /// Bad input that the parent must have refused already.
    pub fn job(
        &self,
        part: Part,
        data: Arc<Corpus>,
        stop: Arc<AtomicBool>,
        pulse: Arc<Pulse>,
    ) -> Result<Job, TrainError> {
        Ok(Job {
            run: self.run(&part.run_toml)?,
            data,
            simd: self.simd.parse()?,
            checkpoints: self.checkpoints.clone(),
            digest_every: self.digest_every,
            peak_gflops: self.peak_gflops,
            cores: part.cores,
            profiling: self.profiling.clone(),
            stop,
            pulse,
            faults: part.faults,
            mutant: self.mutant,
            recheck: part.recheck,
            checked: part.checked,
            unseen: part.unseen,
        })
    }

    /// The run of a resolved run file.
    ///
    /// # Errors
    /// Bad input that the parent must have refused already.
    pub fn run(&self, run_toml: &str) -> Result<Run, TrainError> {
        Ok(Run::parse(run_toml, &self.name, &[], self.cores)?)
    }
}

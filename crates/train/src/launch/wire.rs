//! What parent and rank process say to each other: JSON lines on the rank's standard input and output.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use events::Event;
use serde::{Deserialize, Serialize};
use spec::Run;

use super::Profiling;
use crate::best::Best;
use crate::corpus::Corpus;
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::pin::Shares;
use crate::rank::{Ended, Job};

/// The hidden command under which the binary is a rank.
pub const RANK_COMMAND: &str = "__rank";

/// A job as text; see [`Job`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobSpec {
    /// The resolved run file.
    pub run_toml: String,
    /// Its name, for messages.
    pub name: String,
    /// Cores of the machine, as the parent saw them.
    pub cores: usize,
    /// Instruction path.
    pub simd: String,
    /// Folder of checkpoints.
    pub checkpoints: PathBuf,
    /// The checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// Steps between hashes of every tensor.
    pub digest_every: u64,
    /// Measured peak of the run's cores, GFLOP/s.
    pub peak_gflops: f64,
    /// The cores of each rank, by rank; empty: the system places them.
    pub pins: Shares,
    /// Which steps are profiled, if any.
    pub profiling: Option<Profiling>,
    /// Validations before the resume.
    pub best: Best,
    /// A deliberate fault, that a proof must catch.
    pub mutant: Option<Mutant>,
}

impl JobSpec {
    /// The job, with the data opened unless the caller has them.
    ///
    /// # Errors
    /// Bad input that the parent must have refused already.
    pub fn job(&self, data: Option<Arc<Corpus>>, stop: Arc<AtomicBool>) -> Result<Job, TrainError> {
        let run = Run::parse(&self.run_toml, &self.name, &[], self.cores)?;
        let data = match data {
            Some(data) => data,
            None => Arc::new(Corpus::open(&run)?),
        };
        Ok(Job {
            run,
            data,
            simd: self.simd.parse()?,
            checkpoints: self.checkpoints.clone(),
            resume: self.resume.clone(),
            digest_every: self.digest_every,
            peak_gflops: self.peak_gflops,
            pins: self.pins.clone(),
            profiling: self.profiling.clone(),
            stop,
            best: self.best,
            mutant: self.mutant,
        })
    }
}

/// From the parent.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToRank {
    /// First: who you are.
    Start {
        /// The rank.
        rank: u32,
        /// All ranks.
        world: u32,
        /// Process id of the parent.
        parent: u32,
        /// What to run.
        job: Box<JobSpec>,
        /// How to reach the others.
        fabric: FabricSpec,
    },
    /// TCP: where every rank listens.
    Addresses(Vec<String>),
    /// Stop after the step under way.
    Stop,
}

/// How a rank process joins the fabric.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum FabricSpec {
    /// Shared memory behind this path.
    Shm(PathBuf),
    /// Sockets; only who has the token is let in.
    Tcp {
        /// Random, made by the parent.
        token: [u8; 32],
    },
}

/// From a rank.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromRank {
    /// TCP: where this rank listens.
    Listening(String),
    /// Something happened.
    Event(Event),
    /// The end of the rank.
    Done(Ended),
    /// The end of the rank, with its exit code.
    Failed {
        /// Exit code that fits.
        code: i32,
        /// Why.
        reason: String,
    },
}

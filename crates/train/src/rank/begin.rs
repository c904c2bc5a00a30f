//! How a rank comes to the state that it goes on from.

use checkpoint::Checkpoint;
use checkpoint::hf::HfFolder;

use spec::{Interventions, Run};

use super::{Ending, Job, Remains, Start};
use crate::best::Best;
use crate::error::TrainError;
use crate::exec::Executor;
use crate::launch::RunFolder;
use crate::persist;
use crate::recover::{self, Fetched, Peers};

/// Where a rank goes on.
pub struct Loaded {
    /// The last step in the state.
    pub step: u64,
    /// Bytes that came.
    pub bytes: u64,
    /// Validations so far.
    pub best: Best,
    /// What follows the step, such as a validation, may not have been done.
    pub open: bool,
    /// The step's vote was to stop after it.
    pub stop: bool,
    /// It came from an earlier world, and all have theirs.
    pub from_peers: bool,
}

/// Brings the state to where the job goes on.
pub fn load(job: &Job, executor: &mut Executor, start: Start) -> Result<Loaded, Ending> {
    let fresh = Loaded { step: 0, bytes: 0, best: Best::default(), open: false, stop: false, from_peers: false };
    match start {
        Start::Peers(mut peers) => match recover::fetch(executor, &mut peers) {
            Ok(fetched) => {
                let Fetched { best, stop, bytes } = fetched;
                Ok(Loaded { step: peers.step, bytes, best, open: peers.step > 0, stop, from_peers: true })
            }
            Err(error) => Err(Ending { error, remains: half_loaded(executor, peers) }),
        },
        Start::Disk(path) => {
            let from = Checkpoint::open(&path).map_err(TrainError::from)?;
            same_course(&job.run, &from)?;
            persist::load(executor, &from)?;
            let bytes = executor.chunks.values().map(|state| 4 * state.resident() as u64).sum();
            let step = from.meta().step;
            executor.remember();
            let best = match from.meta().validations {
                Some(validations) => validations.into(),
                // Of an older version: the run's log is the only one that knows.
                None => job.checkpoints.parent().map_or(Best::default(), |run| RunFolder::new(run).best_until(step)),
            };
            Ok(Loaded { step, bytes, best, ..fresh })
        }
        Start::Fresh => {
            if let Some(folder) = &job.run.from {
                let folder = HfFolder::open(folder, &job.run.model).map_err(TrainError::from)?;
                executor.load_folder(&folder)?;
            }
            executor.remember();
            Ok(fresh)
        }
    }
}

/// That the checkpoint has gone through what was changed in the run up to its step, and nothing else.
fn same_course(run: &Run, from: &Checkpoint) -> Result<(), TrainError> {
    let step = from.meta().step;
    let (ours, theirs) = (Interventions::of(run), Interventions::of_definition(&from.meta().definition));
    let (ours, theirs) = (ours.until(step), theirs.until(step));
    if ours == theirs {
        return Ok(());
    }
    let path = from.path().display();
    Err(TrainError::Internal(format!("{path} has gone through other changes ({theirs}) than the run ({ours})")))
}

/// What there is after state was to come and not all had theirs: what it was to come from, and what has come if it is whole here.
fn half_loaded(executor: &mut Executor, peers: Box<Peers>) -> Option<Box<Remains>> {
    let Peers { remains: before, whole, step, .. } = *peers;
    let Some(best) = whole else { return before };
    executor.settle();
    Some(Box::new(Remains {
        generation: 0,
        settled: false,
        rank: executor.place.rank,
        chunks: std::mem::take(&mut executor.chunks),
        mirrors: executor.mirrors.take(),
        step,
        prepared: false,
        decided: None,
        corrupt: Vec::new(),
        guard: std::mem::take(&mut executor.guard),
        best,
        before,
    }))
}

//! Given lists on ranks that are threads of this process: the way to see what a list computes, whoever made it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use data::Split;
use fabric::FabricOptions;
use kernels::{Ctx, Simd};
use program::{Mode, Program};
use spec::{Run, Unit};

use crate::corpus::{self, Corpus};
use crate::error::TrainError;
use crate::exec::{Executor, Outcome};
use crate::persist;

/// Runs `body` on every rank of `run`, each a thread with fresh parameters; the results by rank.
///
/// # Errors
/// The first rank's error.
pub fn on_threads<T: Send>(
    run: &Run,
    simd: Simd,
    options: &FabricOptions,
    body: impl Fn(&mut Executor) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    let endpoints = fabric::threads(run.layout.world() as u32, options)?;
    let body = &body;
    std::thread::scope(|scope| {
        let rank = |endpoint: fabric::Endpoint| {
            scope.spawn(move || {
                let ctx = Ctx::new(simd, run.layout.threads);
                let mut executor = Executor::new(run, &ctx, endpoint, Arc::new(AtomicBool::new(false)));
                body(&mut executor)
            })
        };
        let handles: Vec<_> = endpoints.into_iter().map(rank).collect();
        let join = |handle: std::thread::ScopedJoinHandle<Result<T, TrainError>>| match handle.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        // All are joined before the first error ends the scope.
        handles.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
    })
}

/// The digest after `steps` steps of `run` by `programs`, one training list per rank.
///
/// # Errors
/// The first rank's error; ranks that wait for ever end at the fabric's deadline, see `options`.
pub fn digest(
    run: &Run,
    programs: &[Program],
    steps: u64,
    data: &Corpus,
    options: &FabricOptions,
) -> Result<String, TrainError> {
    let batch = run.grid.batch() as u64;
    let digests = on_threads(run, Simd::detect(), options, |executor| {
        let program = &programs[executor.place.rank];
        for step in 1..=steps {
            let load = |unit: Unit| {
                let indices = run.grid.sequences(unit).map(|i| (step - 1) * batch + i as u64);
                corpus::read(&data.main, Split::Train, indices)
            };
            let Outcome::Step(_) = executor.run(program, Mode::Train, step, &load)? else {
                return Err(TrainError::Internal("a training program gave no decision".into()));
            };
        }
        Ok(persist::digest(executor, steps * batch)?.to_string())
    })?;
    Ok(digests.into_iter().next().unwrap_or_default())
}

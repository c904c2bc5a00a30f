//! One run of a model, in this process or through the binary, and what came of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kernels::Simd;
use spec::Run;
use train::launch::{Request, Resuming, train};

use super::super::launch::{Finished, Launcher, Start, curve};
use super::layouts::Asked;

/// How a run ended.
#[derive(Debug, Clone)]
pub enum End {
    /// It did its steps, or stopped early by itself.
    Trained(Box<Finished>),
    /// It gave an error, with its exit code (none: a signal).
    Failed {
        /// The exit code.
        code: Option<i32>,
        /// Its words.
        reason: String,
    },
    /// It panicked.
    Panicked(String),
}

/// Exit code of bad input.
pub const REFUSED: i32 = 2;
/// Exit code of a loss that is no number.
pub const DIVERGED: i32 = 4;

/// Trains `run` in `folder`, all ranks as threads of this process.
pub fn here(run: &Run, simd: Simd, folder: &Path) -> End {
    let mut events = Vec::new();
    let request = Request {
        run: run.clone(),
        simd,
        folder: folder.to_owned(),
        resume: Resuming::No,
        digest_every: 0,
        profile: None,
        stop: Arc::new(AtomicBool::new(false)),
        program: PathBuf::new(),
        inject: String::new(),
        hosts: None,
    };
    let ended = guarded(|| train(&request, &mut |event| events.push(event.clone())));
    // What it leaves is not looked at, and thousands follow.
    let _ = std::fs::remove_dir_all(folder);
    match ended {
        Err(panic) => End::Panicked(panic),
        Ok(Err(e)) => End::Failed { code: Some(e.exit_code()), reason: e.to_string() },
        Ok(Ok(summary)) => End::Trained(Box::new(Finished {
            digest: summary.digest,
            step: summary.step,
            ranks: summary.ranks,
            processes: 1,
            layout: run.layout.to_string(),
            curve: curve(&events),
        })),
    }
}

/// Checks and trains the run file `name` of `launcher` under `asked` through the binary.
pub fn through_binary(launcher: &Launcher, name: &str, folder: &Path, asked: &Asked, limit: Duration) -> End {
    let simd = asked.simd.map(|simd| simd.to_string());
    let args: Vec<&str> = simd.iter().flat_map(|simd| ["--simd", simd]).collect();
    // What goes wrong in a proof is to be seen, not repaired.
    let sets: Vec<String> = asked.sets.iter().cloned().chain(["guard.restarts_max=0".into()]).collect();
    let start = Start { sets: &sets, args: &args, stop: false };
    let ended = launcher.check(name, &asked.sets).and_then(|()| launcher.run_within(name, folder, start, Some(limit)));
    let _ = std::fs::remove_dir_all(folder);
    match ended {
        Ok(finished) => End::Trained(Box::new(finished)),
        Err(failed) => End::Failed { code: failed.code, reason: failed.reason },
    }
}

/// `body`, or the words of its panic.
pub fn guarded<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without words".into())
    })
}

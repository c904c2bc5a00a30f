//! All ranks as threads of this process.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use fabric::Aborter;
use spec::Run;

use super::wire::{JobSpec, Part};
use super::{Failure, News};
use crate::comm::fabric_options;
use crate::corpus::Corpus;
use crate::error::TrainError;
use crate::rank::{self, Ending, Said, Start};

pub struct ThreadRanks {
    count: usize,
    news: Receiver<News>,
    aborters: Vec<Aborter>,
    handles: Vec<JoinHandle<()>>,
}

/// Starts a thread per rank; they share `stop` with the caller.
pub fn start(
    run: &Run,
    spec: &JobSpec,
    part: &dyn Fn(usize) -> Part,
    resume: Option<PathBuf>,
    data: Arc<Corpus>,
    stop: Arc<AtomicBool>,
) -> Result<ThreadRanks, TrainError> {
    let world = run.layout.world();
    let endpoints = fabric::threads(world as u32, &fabric_options(run, 0))?;
    let aborters = endpoints.iter().map(|e| e.aborter()).collect();
    let (tell, news) = channel();
    let mut handles = Vec::new();
    for endpoint in endpoints {
        let number = endpoint.rank() as usize;
        let job = spec.job(part(number), data.clone(), stop.clone(), Arc::default())?;
        let tell = tell.clone();
        let start = resume.clone().map_or(Start::Fresh, Start::Disk);
        let body = move || {
            let sink = |said| {
                if let Said::Event(event) = said {
                    drop(tell.send(News::Event(event)));
                }
            };
            let run = std::panic::AssertUnwindSafe(|| rank::run(&job, endpoint, start, &sink));
            let ended = match std::panic::catch_unwind(run) {
                Ok(Ok(ended)) => Ok(ended),
                Ok(Err(Ending { error, .. })) => {
                    let error = error.of_begun();
                    Err(Failure { code: error.exit_code(), reason: error.to_string(), silent: false })
                }
                Err(_) => Err(Failure { code: 70, reason: "it panicked; the message is above".into(), silent: true }),
            };
            drop(tell.send(News::Ended(number, ended)));
        };
        let thread = std::thread::Builder::new().name(format!("rank-{number}"));
        let handle = thread.spawn(body).map_err(|e| TrainError::Internal(format!("cannot start a thread: {e}")))?;
        handles.push(handle);
    }
    Ok(ThreadRanks { count: world, news, aborters, handles })
}

impl ThreadRanks {
    /// Number of ranks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// What they say.
    pub fn news(&self) -> &Receiver<News> {
        &self.news
    }

    /// Ends them now.
    pub fn end(&mut self) {
        self.aborters.iter().for_each(|a| a.abort("another rank failed"));
    }
}

impl Drop for ThreadRanks {
    fn drop(&mut self) {
        self.end();
        self.handles.drain(..).for_each(|h| drop(h.join()));
    }
}

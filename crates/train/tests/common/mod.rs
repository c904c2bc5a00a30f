#![allow(dead_code)] // each test takes what it needs
//! Trains with all ranks as threads of the test.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use events::Event;
use kernels::Simd;
use spec::Run;
use train::corpus::Corpus;
use train::rank::{self, Ended, Job, Said, Start};

/// Small, with two tensor cells and four data cells.
pub const BASE: &str = r#"
[model]
preset = "nano"
[data]
source = "synthetic"
[train]
steps = 3
batch = 8
seq = 32
lr = 1e-2
eval_sequences = 3
[grid]
dp = 4
tp = 2
"#;

/// What a run said, in order of the speaking rank.
pub struct Told {
    pub events: Vec<Event>,
    pub ended: Ended,
}

impl Told {
    pub fn digest(&self) -> &str {
        let digest = |e: &Event| matches!(e, Event::Digest { .. });
        match self.events.iter().rev().find(|e| digest(e)) {
            Some(Event::Digest { digest, .. }) => digest,
            _ => panic!("no digest"),
        }
    }
}

/// Trains [`BASE`] under `sets`, with checkpoints in `folder`, going on from `resume`.
pub fn train_in(folder: &Path, sets: &[&str], resume: Option<&Path>) -> Told {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    let run = Run::parse(BASE, "base", &sets, 1).unwrap();
    let data = Arc::new(Corpus::open(&run).unwrap());
    let events = Mutex::new(Vec::new());
    let endpoints = fabric::threads(run.layout.world() as u32, &fabric::FabricOptions::default()).unwrap();
    let mut ended = Vec::new();
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for endpoint in endpoints {
            let job = Job {
                run: run.clone(),
                data: data.clone(),
                simd: Simd::detect(),
                checkpoints: folder.to_owned(),
                digest_every: 0,
                peak_gflops: 1.0,
                cores: Vec::new(),
                profiling: None,
                stop: Arc::new(AtomicBool::new(false)),
                pulse: Arc::default(),
                faults: Vec::new(),
                mutant: None,
                recheck: false,
                checked: None,
                unseen: None,
            };
            let events = &events;
            let start = resume.map_or(Start::Fresh, |path| Start::Disk(path.to_owned()));
            handles.push(scope.spawn(move || {
                let sink = |said| {
                    if let Said::Event(event) = said {
                        events.lock().unwrap().push(event);
                    }
                };
                rank::run(&job, endpoint, start, &sink).unwrap_or_else(|e| panic!("{}", e.error))
            }));
        }
        ended.extend(handles.into_iter().map(|h| h.join().unwrap()));
    });
    assert!(ended.iter().all(|e| *e == ended[0]), "all ranks end alike: {ended:?}");
    Told { events: events.into_inner().unwrap(), ended: ended.swap_remove(0) }
}

/// The same in a folder that goes away.
pub fn train(sets: &[&str]) -> Told {
    let folder = tempfile::tempdir().unwrap();
    train_in(folder.path(), sets, None)
}

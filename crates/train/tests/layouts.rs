//! The law, in one process: every layout of a grid ends with the digest of one rank.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use data::Dataset;
use events::Event;
use kernels::Simd;
use spec::Run;
use train::rank::{self, Job};

const BASE: &str = r#"
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

/// Trains with all ranks as threads; the digest, and the loss of the last validation.
fn train(sets: &[&str]) -> (String, f64) {
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    let run = Run::parse(BASE, "base", &sets, 1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let data = Arc::new(Dataset::open(&run.data, run.train.seq, None).unwrap());
    let seen = Mutex::new((String::new(), 0.0));
    let endpoints = fabric::threads(run.layout.world() as u32, &fabric::FabricOptions::default()).unwrap();
    std::thread::scope(|scope| {
        for endpoint in endpoints {
            let job = Job {
                run: run.clone(),
                data: data.clone(),
                simd: Simd::detect(),
                checkpoints: folder.path().to_owned(),
                resume: None,
                digest_every: 0,
                peak_gflops: 1.0,
                stop: Arc::new(AtomicBool::new(false)),
                mutant: None,
            };
            let seen = &seen;
            scope.spawn(move || {
                let sink = |event| match event {
                    Event::Digest { digest, .. } => seen.lock().unwrap().0 = digest,
                    Event::Validation { loss, .. } => seen.lock().unwrap().1 = loss,
                    _ => {}
                };
                rank::run(&job, endpoint, &sink).unwrap_or_else(|e| panic!("{e}"));
            });
        }
    });
    seen.into_inner().unwrap()
}

fn all_equal(extra: &[&str], layouts: &[&[&str]]) {
    let one = train(extra);
    assert_eq!(one.0.len(), 64);
    for layout in layouts {
        let sets: Vec<&str> = extra.iter().chain(layout.iter()).copied().collect();
        let got = train(&sets);
        assert_eq!(got, one, "{layout:?} {extra:?}");
    }
}

const LAYOUTS: &[&[&str]] = &[
    &["layout.dp=2"],
    &["layout.dp=3"],
    &["layout.dp=2", "layout.cells=[1, 3]"],
    &["layout.dp=4", "layout.zero=1"],
    &["layout.tp=2"],
    &["layout.pp=2"],
    &["layout.pp=3", "layout.schedule=gpipe"],
    &["layout.pp=2", "layout.schedule=interleaved"],
    &["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1"],
    &["layout.threads=2"],
];

#[test]
fn untied() {
    all_equal(&[], LAYOUTS);
}

#[test]
fn tied_with_qk_norm() {
    all_equal(&["model.tied=true", "model.qk_norm=true"], LAYOUTS);
}

#[test]
fn without_masks_and_with_larger_microbatches() {
    all_equal(&["data.masks=false", "grid.microbatch=2"], &LAYOUTS[..6]);
}

#[test]
fn the_grid_does_change_the_numbers() {
    assert_ne!(train(&["grid.dp=2"]).0, train(&[]).0);
    assert_ne!(train(&["grid.tp=1"]).0, train(&[]).0);
}

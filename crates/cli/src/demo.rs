//! `lockstep demo`: one run, three layouts, then one of them struck while it runs; one digest.

mod struck;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use data::{Dataset, Split};
use events::Event;
use kernels::Simd;
use spec::Run;
use train::TrainError;
use train::launch::{self, Request, Summary};
use train::sample::{self, Sampling};

use crate::show::line;
use crate::train_cmd::{default_folder, own_binary};

const RUN: &str = include_str!("../../../configs/demo.toml");
/// The reference first, then two ways to split it over four processes.
const LAYOUTS: [(&str, &[&str]); 3] = [
    ("one process", &[]),
    ("2 data x 2 pipeline", &["layout.dp=2", "layout.pp=2"]),
    ("2 data x 2 tensor", &["layout.dp=2", "layout.tp=2"]),
];
/// Exit code when the digests differ.
const DIFFERENT: u8 = 70;
/// Every so many steps a line is shown.
const SHOW_EVERY: u64 = 10;
const PROMPT: &str = "She could not ";
const SAMPLE_BYTES: usize = 200;

#[derive(clap::Args)]
pub struct Args {
    /// Override a key of the demo's run, such as `train.steps=20`.
    #[arg(long = "set", value_name = "KEY=VALUE", num_args = 1..)]
    sets: Vec<String>,
}

/// One of the three runs.
struct Ran {
    name: &'static str,
    summary: Summary,
    /// (step, name, hash): to find the first tensor that differs.
    hashes: Vec<(u64, String, String)>,
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let began = Instant::now();
    let folder = default_folder("demo");
    let reference = load(args, &[])?;
    let data = Dataset::open(&reference.data, reference.train.seq, None)?;
    line(&format!(
        "lockstep demo: {} parameters, {} steps of {} tokens, four times; everything goes to {}",
        spec::tensors::parameters(&reference.model),
        reference.train.steps,
        reference.tokens_per_step(),
        folder.display()
    ));
    data.describe().iter().for_each(|text| line(text));
    let mut all = Vec::new();
    for (number, (name, sets)) in LAYOUTS.iter().enumerate() {
        let run = load(args, sets)?;
        line(&format!("\n[{} of {}] {name}: {}", number + 1, LAYOUTS.len() + 1, run.layout));
        let folder = folder.join(format!("{}-{}", number + 1, name.replace(' ', "-")));
        all.push(one(name, &request(run, folder)?, &mut |_| {})?);
    }
    let run = load(args, LAYOUTS[1].1)?;
    line(&format!("\n[{0} of {0}] {1}: {2}", LAYOUTS.len() + 1, struck::NAME, run.layout));
    let folder_struck = folder.join(format!("{}-struck", LAYOUTS.len() + 1));
    all.push(struck::run(request(run, folder_struck)?)?);
    line("");
    compare_with_compressors(&data, &all[0].summary);
    if let Some(floor) = data.floor_bits_per_byte() {
        line(&format!("the language's entropy is {floor:.3} bits per byte: no model gets below it"));
    }
    show_sample(&reference, &checkpoint_of(&folder, &all[0].summary))?;
    Ok(verdict(&all, began))
}

fn load(args: &Args, layout: &[&str]) -> Result<Run, TrainError> {
    let sets: Vec<String> = args.sets.iter().cloned().chain(layout.iter().map(|s| s.to_string())).collect();
    let run = Run::parse(RUN, "the demo's run file", &sets, crate::cores())?;
    run.check_effects()?;
    Ok(run)
}

fn request(run: Run, folder: PathBuf) -> Result<Request, TrainError> {
    let digest_every = run.train.steps.div_ceil(4);
    Ok(Request {
        run,
        simd: Simd::detect(),
        folder,
        resume: train::launch::Resuming::No,
        digest_every,
        profile: None,
        stop: Arc::new(AtomicBool::new(false)),
        program: own_binary()?,
        inject: String::new(),
        hosts: None,
    })
}

/// Runs one; `also` sees each event after it was shown.
fn one(name: &'static str, request: &Request, also: &mut dyn FnMut(&Event)) -> Result<Ran, TrainError> {
    let mut hashes = Vec::new();
    let mut pids = Vec::new();
    let world = request.run.layout.world();
    let mut observe = |event: &Event| match event {
        Event::RankStarted { pid, .. } => {
            pids.push(*pid);
            if pids.len() == world {
                pids.sort_unstable();
                line(&format!("  process{} {pids:?}", if world == 1 { "" } else { "es" }));
            }
        }
        Event::Step(step) if step.step % SHOW_EVERY == 0 || step.step == 1 => line(&format!(
            "  step {:>3}/{} | loss {} | tok/s {:.0} | {:.0} ms",
            step.step,
            step.steps,
            crate::show::loss(step),
            step.tokens_per_s,
            1000.0 * step.seconds
        )),
        Event::TensorHashes { step, hashes: of_step } => {
            hashes.extend(of_step.iter().map(|(name, hash)| (*step, name.clone(), hash.clone())));
        }
        Event::Failed { rank, reason, .. } => line(&format!("  rank {rank} failed: {reason}")),
        Event::CheckpointFailed { reason, .. } => line(&format!("  checkpoint failed: {reason}")),
        _ => {}
    };
    let mut observe = |event: &Event| {
        observe(event);
        also(event);
    };
    let summary = launch::train(request, &mut observe)?;
    line(&format!("  digest {}", summary.digest));
    Ok(Ran { name, summary, hashes })
}

/// The model's loss beside what two compressors need for the same held-out bytes.
fn compare_with_compressors(data: &Dataset, summary: &Summary) {
    let bytes = data.bytes(Split::Validation);
    let per_byte = |compressed: usize| 8.0 * compressed as f64 / bytes.len().max(1) as f64;
    let gzip = gzip(&bytes).map_or_else(|e| e.to_string(), |n| format!("{:.3}", per_byte(n)));
    let xz = xz(&bytes).map_or_else(|e| e.to_string(), |n| format!("{:.3}", per_byte(n)));
    let model = summary.bits_per_byte.map_or("none".into(), |b| format!("{b:.3}"));
    line(&format!("held-out text, bits per byte: model {model} | gzip -9 {gzip} | xz -6 {xz} | uniform 8.000"));
    line("  (the model has read other files; a compressor has only the held-out text itself, and its repetitions)");
}

fn gzip(bytes: &[u8]) -> std::io::Result<usize> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    out.write_all(bytes)?;
    Ok(out.finish()?.len())
}

fn xz(bytes: &[u8]) -> std::io::Result<usize> {
    let mut out = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(6))?;
    out.write_all(bytes)?;
    Ok(out.finish()?.len())
}

fn checkpoint_of(folder: &Path, summary: &Summary) -> PathBuf {
    let first = format!("1-{}", LAYOUTS[0].0.replace(' ', "-"));
    checkpoint::step_dir(&folder.join(first).join("checkpoints"), summary.step)
}

fn show_sample(run: &Run, from: &Path) -> Result<(), TrainError> {
    let sampling = Sampling { temperature: 0.7, top_k: 40, seed: 1 };
    let text = sample::continue_text(run, from, PROMPT, SAMPLE_BYTES, sampling, Simd::detect())?;
    line("\na sample (temperature 0.7, top 40):");
    text.lines().for_each(|l| line(&format!("  | {l}")));
    Ok(())
}

/// Prints the three digests; 0 if they are equal.
fn verdict(all: &[Ran], began: Instant) -> u8 {
    line("");
    for ran in all {
        line(&format!("{:<22} digest {}", ran.name, ran.summary.digest));
    }
    let seconds = began.elapsed().as_secs_f64();
    let Some(other) = all.iter().find(|r| r.summary.digest != all[0].summary.digest) else {
        line(&format!("equal: neither the layout nor what strikes a run touches the numbers ({seconds:.0} s)"));
        return 0;
    };
    let differs = all[0].hashes.iter().zip(&other.hashes).find(|(a, b)| a != b);
    match differs {
        Some(((step, tensor, _), _)) => {
            line(&format!("DIFFERENT: first seen at step {step} in {tensor} of `{}` ({seconds:.0} s)", other.name));
        }
        None => line(&format!("DIFFERENT: `{}`, after the last recorded hashes ({seconds:.0} s)", other.name)),
    }
    DIFFERENT
}

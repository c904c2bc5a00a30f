//! Checkpoints on disk: how long ranks wait, how fast they are written beside a plain file, how fast they are verified.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use events::Event;

use super::super::process;
use super::super::stats::median;
use super::watched::{Bench, Job, Run, WARMUP, shape};
use super::{Args, Figure};

/// Bytes of one write of the plain file.
const BLOCK: usize = 4 << 20;
/// Steps between two checkpoints.
const EVERY: u64 = 4;

/// A plain file of so many bytes, synced, under `folder`: GB/s.
fn plain(folder: &Path, bytes: u64) -> Result<f64, String> {
    let path = folder.join("plain");
    let block: Vec<u8> = (0..BLOCK).map(|i| (i as u32).wrapping_mul(2_654_435_761) as u8).collect();
    let write = || -> std::io::Result<f64> {
        let began = Instant::now();
        let mut file = File::create(&path)?;
        let mut rest = bytes as usize;
        while rest > 0 {
            let n = rest.min(BLOCK);
            file.write_all(&block[..n])?;
            rest -= n;
        }
        file.sync_all()?;
        Ok(bytes as f64 / 1e9 / began.elapsed().as_secs_f64())
    };
    let result = write().map_err(|e| format!("cannot write {}: {e}", path.display()));
    let _ = fs::remove_file(&path);
    result
}

/// (seconds that ranks waited, seconds until the manifest, bytes) of each checkpoint.
fn checkpoints(run: &Run) -> Vec<(f64, Option<f64>, f64)> {
    let of = |event: &Event| match event {
        Event::Checkpoint { bytes, seconds, written_s, .. } => Some((*seconds, *written_s, *bytes as f64)),
        _ => None,
    };
    run.events.iter().filter_map(|(_, event)| of(event)).collect()
}

/// What the step that follows a checkpoint takes longer than those that come before the next one, seconds.
fn slowed(run: &Run) -> Option<f64> {
    let of = |place: u64| {
        let steps = run.events.iter().filter_map(|(_, e)| if let Event::Step(s) = e { Some(s) } else { None });
        let wanted = move |step: u64| step > EVERY && step % EVERY == place;
        median(steps.filter(|s| wanted(s.step)).map(|s| s.seconds))
    };
    Some(of(1)? - of(0)?)
}

pub fn checkpoint(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let shape = shape("M", None);
    let every = format!("checkpoint.every={EVERY}");
    let (mut waits, mut shares, mut beside, mut behind) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut stopped, mut whole, mut size, mut slower) = (Vec::new(), Vec::new(), 0.0, Vec::new());
    for _ in bench.rounds(args.rounds) {
        // Beside the steps, which leave no core idle; the plain file is written by as humble a process.
        let mut plains = Vec::new();
        let steps = WARMUP as u64 + 4 * EVERY;
        let job = Job { shape, mode: "dp2-zero0", steps, sets: &[&every], args: &[] };
        let watch = &mut |_, event: &Event, _: &mut super::watched::Hand| {
            if let Event::Checkpoint { bytes, written_s: Some(_), .. } = event {
                plains.extend(humble(bench, *bytes));
            }
        };
        let (run, _) = bench.watch(&job, watch)?;
        let step = run.step_s()?;
        let made = checkpoints(&run);
        let rate = |all: &[(f64, Option<f64>, f64)]| median(all.iter().filter_map(|(_, s, b)| Some(b / 1e9 / (*s)?)));
        let wait =
            median(made.iter().filter(|(_, s, _)| s.is_some()).map(|(wait, ..)| *wait)).ok_or("no checkpoint")?;
        waits.push(1000.0 * wait);
        slower.push(1000.0 * slowed(&run).ok_or("too few steps")?);
        shares.push(100.0 * wait / step);
        beside.push(rate(&made).ok_or("no checkpoint")?);
        behind.push(median(plains).unwrap_or(f64::NAN));
        bench.forget(&run);
        // With nothing else to do.
        let sets = ["checkpoint.background=false", "checkpoint.every=1"];
        let run = bench.run(&Job { shape, mode: "dp2-zero0", steps: 5, sets: &sets, args: &[] })?;
        let made = checkpoints(&run);
        size = made.last().map_or(0.0, |(.., bytes)| *bytes);
        let plains = (0..made.len()).map(|_| plain(bench.folder, size as u64)).collect::<Result<Vec<_>, _>>()?;
        stopped.push(median(made.iter().map(|(s, _, b)| b / 1e9 / s)).ok_or("no checkpoint")?);
        whole.push(median(plains).unwrap_or(f64::NAN));
        bench.forget(&run);
    }
    let percent = |ours: &[f64], plain: &[f64]| ours.iter().zip(plain).map(|(a, b)| 100.0 * a / b).collect::<Vec<_>>();
    let note = |ours: Vec<f64>, plain: Vec<f64>| {
        let (ours, plain) = (median(ours).unwrap_or(f64::NAN), median(plain).unwrap_or(f64::NAN));
        format!("{:.0} MB: {ours:.2} GB/s, plain write and fsync {plain:.2} GB/s", size / 1e6)
    };
    let (idle, busy) = (percent(&stopped, &whole), percent(&beside, &behind));
    Ok(vec![
        Figure::new("checkpoint: ranks wait, M dp2", shares, "%")
            .reach("1 % of a step")
            .peer(bench.peer.wait.as_str())
            .note(format!(
                "{:.1} ms each; the step in which it is copied and written takes {:+.0} ms, as the writers share its cores (and the plain file of the third row does)",
                median(waits).unwrap_or(f64::NAN),
                median(slower).unwrap_or(f64::NAN)
            )),
        Figure::new("checkpoint while ranks wait, of a plain write", idle, "%")
            .reach("80 %")
            .peer(bench.peer.bandwidth.as_str())
            .note(note(stopped, whole)),
        Figure::new("checkpoint beside steps, of a plain write so", busy, "%")
            .reach("80 %")
            .peer("-")
            .note(note(beside, behind) + ", both at nice 10"),
    ])
}

/// GB/s of a plain file that a process with the writers' niceness writes at this moment.
fn humble(bench: &Bench, bytes: u64) -> Option<f64> {
    let path = bench.folder.join("humble");
    let mut command = Command::new("nice");
    command.args(["-n", "10", "dd", "if=/dev/zero", "bs=4M", "conv=fsync", "status=none", "iflag=count_bytes"]);
    command.arg(format!("of={}", path.display())).arg(format!("count={bytes}"));
    let began = Instant::now();
    let done = process::output(&mut command, Duration::from_secs(60));
    let seconds = began.elapsed().as_secs_f64();
    let _ = fs::remove_file(&path);
    done.ok().map(|_| bytes as f64 / 1e9 / seconds)
}

/// How fast one core reads and hashes a checkpoint.
pub fn verify(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let run = bench.run(&Job { shape: shape("L", Some(512)), mode: "dp2-zero0", steps: 1, sets: &[], args: &[] })?;
    let bytes = checkpoints(&run).last().map(|(.., bytes)| *bytes).ok_or("no checkpoint")?;
    let mut rates = Vec::new();
    for _ in bench.rounds(args.rounds) {
        let mut command = bench.machine.command(1, &bench.binary);
        let began = Instant::now();
        process::output(command.arg("ckpt").arg("verify").arg("--newest").arg(&run.folder), Duration::from_secs(120))?;
        rates.push(bytes / 1e9 / began.elapsed().as_secs_f64());
    }
    bench.forget(&run);
    let note = format!("{:.0} MB, from the page cache, with the start of the process", bytes / 1e6);
    Ok(vec![Figure::new("ckpt verify, one core", rates, "GB/s").reach("1 GB/s").peer("-").note(note)])
}

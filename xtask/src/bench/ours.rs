//! Our side: the release binary.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use events::{Event, RankReport};
use serde_json::Value;

use super::balanced;
use super::machine::Machine;
use super::process;
use super::shapes::{Mode, Shape};
use super::stats::median;

/// Steps that do not count.
pub const WARMUP: usize = 3;
/// Fewest steps that count.
pub const STEPS_MIN: usize = 3;
/// Longest run of a binary.
pub const LIMIT: Duration = Duration::from_secs(900);

/// What one run of one side came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// Tokens per second, median over the steps that count.
    pub tokens_per_s: f64,
    /// Model FLOPs over peak, median; NaN where it is not measured.
    pub mfu: f64,
    /// Resident memory of the largest rank at its peak.
    pub peak_bytes: f64,
    /// Share of the steps' time that ranks computed, mean over ranks; NaN where it is not measured.
    pub compute: f64,
    /// The same for moving data and waiting for it.
    pub exchange: f64,
    /// Rows of the fullest expert over the mean, of the worst layer, median; NaN without experts, or where it is not measured.
    pub load: f64,
}

/// The binary, and a folder for its runs.
pub struct Ours<'a> {
    /// The binary.
    pub binary: PathBuf,
    /// A temporary folder.
    pub folder: PathBuf,
    /// Where trained weights are kept that runs start from.
    pub kept: PathBuf,
    /// The machine.
    pub machine: &'a Machine,
    /// Further overrides of its runs.
    pub sets: &'a [String],
}

impl Ours<'_> {
    /// Steps after which a run has measured for `seconds`.
    pub fn steps(&self, shape: &Shape, mode: &Mode, seconds: f64) -> Result<usize, String> {
        let sample = self.train(shape, mode, WARMUP + 1)?;
        let step = (shape.seq * shape.batch) as f64 / sample.tokens_per_s;
        Ok(WARMUP + ((seconds / step).ceil() as usize).max(STEPS_MIN))
    }

    /// Trains for `steps`, [`Mode::apart`] times at once.
    pub fn train(&self, shape: &Shape, mode: &Mode, steps: usize) -> Result<Sample, String> {
        let run_file = self.folder.join("bench.toml");
        let text = balanced::weights(self, shape)?
            .map_or_else(|| shape.run_file(steps as u64), |weights| shape.run_file_from(steps as u64, &weights));
        fs::write(&run_file, text).map_err(|e| format!("cannot write the run file: {e}"))?;
        let runs = thread::scope(|scope| {
            let start = |place| {
                let run_file = &run_file;
                scope.spawn(move || self.train_at(place, shape, mode, run_file))
            };
            let started: Vec<_> = (0..mode.apart).map(start).collect();
            started.into_iter().map(|run| run.join().expect("a run does not panic")).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(together(&runs))
    }

    /// One run of those that are at work at once, on its own cores.
    fn train_at(&self, place: usize, shape: &Shape, mode: &Mode, run_file: &Path) -> Result<Sample, String> {
        let run_dir = self.folder.join(format!("run-{place}"));
        let mut command = self.machine.command_at(place, mode.cores(), &self.binary);
        command.arg("train").arg(run_file).arg("--run-dir").arg(&run_dir).arg("--json");
        command.arg("--set").args(mode.sets(shape)).args(self.sets);
        let output = process::output(&mut command, LIMIT);
        // The checkpoint of its end is no use to anybody.
        let _ = fs::remove_dir_all(&run_dir);
        let events: Vec<_> = output?.lines().filter_map(|line| Event::from_line(line).ok()).collect();
        sample(&events, mode.ranks())
    }

    /// The loss of the weights in `folder` on its batch, under the layout of `mode`.
    pub fn loss(&self, shape: &Shape, mode: &Mode, folder: &Path) -> Result<f64, String> {
        let mut command = self.machine.command(mode.cores(), &self.binary);
        command.arg("eval").arg("--model").arg(folder).arg("--batch").arg(folder.join("batch.json")).arg("--json");
        command.arg("--set").args(mode.sets(shape)).args(self.sets);
        let output = process::output(&mut command, LIMIT)?;
        evaluated(&output).ok_or_else(|| "lockstep eval printed no loss".into())
    }
}

/// Runs at once as one: their tokens add up.
fn together(runs: &[Sample]) -> Sample {
    let sum = |field: fn(&Sample) -> f64| runs.iter().map(field).sum::<f64>();
    let mean = |field| sum(field) / runs.len() as f64;
    Sample {
        tokens_per_s: sum(|run| run.tokens_per_s),
        mfu: mean(|run| run.mfu),
        peak_bytes: runs.iter().map(|run| run.peak_bytes).fold(0.0, f64::max),
        compute: mean(|run| run.compute),
        exchange: mean(|run| run.exchange),
        load: mean(|run| run.load),
    }
}

fn evaluated(output: &str) -> Option<f64> {
    let objects = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    objects.filter(|object| object["kind"] == "evaluation").find_map(|object| object["loss"].as_f64())
}

/// Reads what a run of `ranks` ranks said.
fn sample(events: &[Event], ranks: usize) -> Result<Sample, String> {
    let steps = events.iter().filter_map(|event| match event {
        Event::Step(step) => Some(step),
        _ => None,
    });
    let counted: Vec<_> = steps.skip(WARMUP).collect();
    let finished: Vec<&RankReport> = events
        .iter()
        .filter_map(|event| match event {
            Event::RankFinished(report) => Some(report),
            _ => None,
        })
        .collect();
    if counted.is_empty() || finished.len() != ranks {
        return Err(format!(
            "{} steps after {WARMUP} of warm-up, and {} of {ranks} ranks finished",
            counted.len(),
            finished.len()
        ));
    }
    let of = |value: fn(&events::Step) -> f64| median(counted.iter().map(|step| value(step))).unwrap_or(f64::NAN);
    let spent = |report: &RankReport, class: &str| {
        report.time.iter().find(|(name, _)| name == class).map_or(f64::NAN, |(_, seconds)| *seconds)
    };
    let share =
        |class| finished.iter().map(|r| spent(r, class) / spent(r, "train")).sum::<f64>() / finished.len() as f64;
    let loads = median(counted.iter().filter_map(|step| Some(step.experts.as_ref()?.max_over_mean)));
    Ok(Sample {
        load: loads.unwrap_or(f64::NAN),
        tokens_per_s: of(|step| step.tokens_per_s),
        mfu: of(|step| step.mfu),
        peak_bytes: finished.iter().map(|report| report.peak_bytes).max().unwrap_or(0) as f64,
        compute: share("compute"),
        exchange: share("exchange"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, tokens_per_s: f64) -> Event {
        let mfu = tokens_per_s / 1000.0;
        Event::Step(events::Step {
            step,
            steps: 6,
            loss: 1.0,
            targets: None,
            grad_norm: 1.0,
            lr: 1e-3,
            tokens: 64,
            seconds: 64.0 / tokens_per_s,
            tokens_per_s,
            tokens_per_s_rank: tokens_per_s,
            mfu,
            experts: Some(events::ExpertLoad {
                max_over_mean: 1.5,
                max_vio: 0.5,
                copies_per_token: 0.0,
                aux_loss: None,
            }),
        })
    }

    fn finished(rank: usize, peak_bytes: u64) -> Event {
        let time = [("train", 4.0), ("compute", 3.0), ("exchange", 1.0)].map(|(class, s)| (class.to_owned(), s));
        Event::RankFinished(RankReport { rank, peak_bytes, time: time.into(), ..RankReport::default() })
    }

    #[test]
    fn the_median_leaves_the_warm_up_out() {
        let mut events: Vec<_> = [1.0, 2.0, 3.0, 500.0, 300.0, 400.0].map(|rate| step(1, rate)).into();
        events.extend([finished(0, 70), finished(1, 90)]);
        let want = Sample { tokens_per_s: 400.0, mfu: 0.4, peak_bytes: 90.0, compute: 0.75, exchange: 0.25, load: 1.5 };
        assert_eq!(sample(&events, 2).unwrap(), want);
    }

    #[test]
    fn tokens_of_runs_at_once_add_up() {
        let run = |tokens_per_s, mfu, peak_bytes| Sample {
            tokens_per_s,
            mfu,
            peak_bytes,
            compute: 1.0,
            exchange: 0.0,
            load: 1.5,
        };
        let want = Sample { tokens_per_s: 700.0, mfu: 0.5, peak_bytes: 90.0, compute: 1.0, exchange: 0.0, load: 1.5 };
        assert_eq!(together(&[run(400.0, 0.6, 70.0), run(300.0, 0.4, 90.0)]), want);
    }

    #[test]
    fn a_run_that_did_not_end_is_no_sample() {
        let events: Vec<_> = (1..=6).map(|i| step(i, 10.0)).chain([finished(0, 1)]).collect();
        assert!(sample(&events, 2).unwrap_err().contains("1 of 2 ranks"));
        assert!(sample(&[step(1, 1.0), finished(0, 1)], 1).unwrap_err().contains("0 steps"));
    }

    #[test]
    fn the_loss_is_that_of_the_evaluation() {
        let output = "{\"kind\":\"notice\",\"loss\":1.0}\nnot json\n{\"kind\":\"evaluation\",\"loss\":5.5}\n";
        assert_eq!(evaluated(output), Some(5.5));
        assert_eq!(evaluated("{}"), None);
    }
}

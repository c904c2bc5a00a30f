//! Events as lines on standard output, or as JSON; a progress bar on a terminal.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use events::Event;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use train::launch::Summary;

use crate::{profile_table, trouble};

/// Writes to standard output. A closed pipe (`| head`) is no reason to stop training.
pub fn line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// A bar of bytes on a terminal that a person watches.
#[cfg(feature = "tokenizers")]
pub fn byte_bar(json: bool, total: u64) -> Option<ProgressBar> {
    (!json && std::io::stderr().is_terminal()).then(|| {
        let template = "{bar:40} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_style(style)
    })
}

/// Shows the events of one run.
pub struct Show {
    json: bool,
    began: Instant,
    bar: Option<ProgressBar>,
}

impl Show {
    /// JSON objects, or lines with a bar if a person watches.
    pub fn new(json: bool, steps: u64) -> Self {
        let watched = !json && std::io::stderr().is_terminal();
        let bar = watched.then(|| {
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {elapsed} of about {duration}");
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { json, began: Instant::now(), bar }
    }

    /// Shows one event.
    pub fn event(&self, event: &Event) {
        if self.json {
            // The digest is the last line.
            if matches!(event, Event::Digest { .. }) {
                return;
            }
            return line(&event.to_line(self.began.elapsed().as_secs_f64()));
        }
        if let (Some(bar), Event::Step(step)) = (&self.bar, event) {
            bar.set_position(step.step);
        }
        if let Some(text) = text(event) {
            self.line(&text);
        }
    }

    /// A line that does not tear the bar.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| line(text)),
            None => line(text),
        }
    }

    /// The last lines of a run.
    pub fn summary(&self, summary: &Summary) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let wall = self.began.elapsed().as_secs_f64();
        if self.json {
            let split = serde_json::json!({
                "kind": "goodput", "schema": events::SCHEMA, "wall_s": summary.wall, "time_s": summary.time, "restarts": summary.recoveries.len(),
            });
            line(&split.to_string());
            let digest = Event::Digest {
                step: summary.step,
                digest: summary.digest.clone(),
                numerics_version: kernels::NUMERICS_VERSION,
            };
            return line(&digest.to_line(wall));
        }
        if let Some(text) = memory(summary) {
            line(&text);
        }
        let parts: Vec<_> = summary.time.iter().map(|(class, s)| format!("{class} {s:.2} s")).collect();
        let train = summary.time.iter().find(|(class, _)| class == "train").map_or(0.0, |(_, s)| *s);
        line(&format!(
            "wall {:.2} s = {} | goodput {:.1}%",
            summary.wall,
            parts.join(" + "),
            100.0 * train / summary.wall
        ));
        line(&format!("restarts {}", summary.recoveries.len()));
        line(&format!("digest {}", summary.digest));
    }
}

/// The largest resident memory of a rank beside its plan; none where ranks share a process.
fn memory(summary: &Summary) -> Option<String> {
    let largest =
        summary.ranks.iter().filter(|r| r.planned_bytes > 0 && r.peak_bytes > 0).max_by_key(|r| r.peak_bytes)?;
    let worlds = largest.worlds;
    let [peak, base, plan] = [largest.peak_bytes, largest.base_bytes, largest.planned_bytes].map(|b| b as f64 / 1e6);
    if worlds > 1 {
        // State of two worlds lies side by side while it moves: the plan of one is no measure of that.
        return Some(format!(
            "memory: rank {} had at most {peak:.1} MB resident, in {worlds} worlds, of which the largest was planned to take {plan:.1} + process {base:.1} = {:.1} MB",
            largest.rank,
            plan + base
        ));
    }
    Some(format!(
        "memory: rank {} had at most {peak:.1} MB resident | planned {plan:.1} + process {base:.1} = {:.1} MB ({:+.1}%)",
        largest.rank,
        plan + base,
        100.0 * (peak / (plan + base) - 1.0)
    ))
}

/// What the step line says about experts.
fn load(experts: &events::ExpertLoad) -> String {
    let aux = experts.aux_loss.map_or(String::new(), |aux| format!(" | aux {aux:.4}"));
    let copies = match experts.copies_per_token {
        0.0 => String::new(),
        copies => format!(" | copies/token {copies:.2}"),
    };
    format!(" | load {:.2} max/mean, MaxVio {:.2}{copies}{aux}", experts.max_over_mean, experts.max_vio)
}

/// The loss of a step; the mean over nothing is no number.
pub fn loss(step: &events::Step) -> String {
    match step.targets {
        Some(0) => "none (no token of its batch has a target)".into(),
        _ => format!("{:.4}", step.loss),
    }
}

fn text(event: &Event) -> Option<String> {
    Some(match event {
        Event::Notice { text } => text.clone(),
        Event::RankStarted { rank, pid } => format!("rank {rank} is process {pid}"),
        Event::Step(s) => format!(
            "step {}/{} | loss {} | grad_norm {:.2} | lr {} | tok/s {:.0} | tok/s/rank {:.0} | mfu {:.1}% | {:.0} ms{}",
            s.step,
            s.steps,
            loss(s),
            s.grad_norm,
            exponent(s.lr),
            s.tokens_per_s,
            s.tokens_per_s_rank,
            100.0 * s.mfu,
            1000.0 * s.seconds,
            s.experts.as_ref().map_or_else(String::new, load)
        ),
        Event::Validation { step, set, loss, bits_per_byte, best, kept, .. } => {
            let mark = match (best, kept) {
                (true, true) => " | best so far, its checkpoint is kept",
                (true, false) => " | best so far, not kept (checkpoint.best)",
                (false, _) => "",
            };
            let set = set.as_ref().map_or(String::new(), |name| format!(" on {name}"));
            let bits = bits_per_byte.map_or(String::new(), |bits| format!(" | {bits:.3} bits per byte"));
            format!("validation{set} after step {step} | loss {loss:.4}{bits}{mark}")
        }
        Event::Sample { step, text } => {
            let lines: Vec<_> = text.lines().map(|l| format!("  | {l}")).collect();
            format!("sample after step {step}\n{}", lines.join("\n"))
        }
        Event::Checkpoint { step, path, bytes, seconds, written_s } => {
            let mb = *bytes as f64 / 1e6;
            let beside =
                written_s.map_or(String::new(), |s| format!(", written beside the steps in {:.0} ms", 1000.0 * s));
            format!("checkpoint of step {step} | {mb:.1} MB | {:.0} ms{beside} | {path}", 1000.0 * seconds)
        }
        Event::CheckpointFailed { step, reason, retry_at } if retry_at == step => {
            format!("checkpoint of step {step} FAILED, and it is the last: {reason}")
        }
        Event::CheckpointFailed { step, reason, retry_at } => {
            format!("checkpoint of step {step} FAILED, the run goes on and tries again after step {retry_at}: {reason}")
        }
        Event::TensorHashes { step, hashes } => {
            let lines: Vec<_> = hashes.iter().map(|(name, hash)| format!("hash {step} {name} {hash}")).collect();
            lines.join("\n")
        }
        Event::Profile(profile) => profile_table::lines(profile).join("\n"),
        Event::Failed { rank, reason, .. } => format!("rank {rank} failed: {reason}"),
        // The digest is the last line.
        Event::Digest { .. } | Event::RankFinished(_) | Event::SpansRecorded { .. } => return None,
        about => return trouble::text(about),
    })
}

/// 0.0003 as 3.00e-04.
fn exponent(x: f64) -> String {
    let text = format!("{x:.2e}");
    match text.split_once('e') {
        Some((digits, power)) => {
            let power: i32 = power.parse().unwrap_or(0);
            format!("{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs())
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_one_line_of_the_contract() {
        let step = events::Step {
            step: 12,
            steps: 200,
            loss: 3.14151,
            grad_norm: 0.979,
            lr: 3e-4,
            tokens: 4096,
            seconds: 0.3329,
            tokens_per_s: 12345.2,
            tokens_per_s_rank: 3086.3,
            mfu: 0.6123,
            targets: Some(4000),
            experts: None,
        };
        let want = "step 12/200 | loss 3.1415 | grad_norm 0.98 | lr 3.00e-04 | tok/s 12345 | tok/s/rank 3086 | mfu 61.2% | 333 ms";
        assert_eq!(text(&Event::Step(step.clone())).unwrap(), want);
        let none = events::Step { targets: Some(0), loss: 0.0, ..step };
        let line = text(&Event::Step(none)).unwrap();
        assert!(line.starts_with("step 12/200 | loss none (no token of its batch has a target) | grad_norm"), "{line}");
        assert_eq!(exponent(0.0), "0.00e+00");
    }
}

//! Medians as a table or as JSON lines.

use std::io::Write;

use serde_json::json;

use super::super::stats::median;
use super::sides::Side;
use super::{Plan, Sample, bus_bandwidth};

/// Prints measurements as they come.
pub struct Table {
    json: bool,
}

impl Table {
    /// A table, or one JSON object per measurement.
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Something to know beside the numbers; JSON lines stay pure.
    pub fn note(&self, text: &str) {
        if self.json {
            eprintln!("{text}");
        } else {
            print_line(text);
        }
    }

    /// Prints what all rounds with one number of ranks came to; `rounds` by side.
    pub fn ranks(&self, plan: &Plan, sides: &[Side], rounds: &[Vec<Sample>]) {
        if !self.json {
            let heads: Vec<_> = sides.iter().map(|side| format!("{:>11} {:>6}", side.name(), "GB/s")).collect();
            print_line(&format!("{:<15} {:>5} {:>9} | {}", "operation", "ranks", "bytes", heads.join(" | ")));
        }
        for operation in &plan.operations {
            for &(bytes, iterations) in &plan.sizes {
                let of = |samples: &Vec<Sample>| {
                    let mine = samples.iter().filter(|s| s.operation == *operation && s.bytes == bytes);
                    median(mine.map(|s| s.seconds))
                };
                let times: Vec<Option<f64>> = rounds.iter().map(of).collect();
                if self.json {
                    for ((side, seconds), samples) in sides.iter().zip(&times).zip(rounds) {
                        let rounds = samples.iter().filter(|s| s.operation == *operation && s.bytes == bytes).count();
                        let Some(seconds) = *seconds else { continue };
                        print_line(&object(plan.ranks, operation, bytes, iterations, side, seconds, rounds));
                    }
                } else {
                    print_line(&line(plan.ranks, operation, bytes, &times));
                }
            }
        }
    }
}

fn object(
    ranks: usize,
    operation: &str,
    bytes: usize,
    iterations: usize,
    side: &Side,
    seconds: f64,
    rounds: usize,
) -> String {
    json!({
        "bench": "collectives", "schema": events::SCHEMA, "operation": operation, "ranks": ranks, "bytes": bytes,
        "side": side.name(), "ours": matches!(side, Side::Ours(_)), "seconds": seconds,
        "algorithm_bytes_per_s": bytes as f64 / seconds,
        "bus_bytes_per_s": bus_bandwidth(operation, bytes, ranks, seconds),
        "iterations": iterations, "rounds": rounds,
    })
    .to_string()
}

/// Microseconds and bus bandwidth of every side.
fn line(ranks: usize, operation: &str, bytes: usize, times: &[Option<f64>]) -> String {
    let cells: Vec<_> = (times.iter())
        .map(|time| match time {
            Some(s) => {
                let bus = bus_bandwidth(operation, bytes, ranks, *s) * 1e-9;
                format!("{:>8.1} us {bus:>6.2}", s * 1e6)
            }
            None => format!("{:>11} {:>6}", "-", "-"),
        })
        .collect();
    format!("{operation:<15} {ranks:>5} {bytes:>9} | {}", cells.join(" | "))
}

/// A closed pipe (`| head`) is no reason to fail.
fn print_line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_time_and_bus_bandwidth_of_every_side() {
        let line = line(2, "all_reduce", 1 << 20, &[Some(1e-3), None]);
        assert!(line.ends_with("|   1000.0 us   1.05 |           -      -"), "{line}");
    }

    #[test]
    fn an_object_has_both_bandwidths() {
        let text = object(4, "all_reduce", 1000, 5, &Side::Gloo, 1e-6, 3);
        let object: serde_json::Value = serde_json::from_str(&text).unwrap();
        let near = |key: &str, want: f64| (object[key].as_f64().unwrap() / want - 1.0).abs() < 1e-9;
        assert!(near("algorithm_bytes_per_s", 1e9) && near("bus_bytes_per_s", 1.5e9), "{text}");
        assert_eq!((&object["side"], &object["ours"]), (&json!("gloo"), &json!(false)));
    }
}

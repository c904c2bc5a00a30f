//! Rows as a table or as JSON lines.

use std::io::Write;

use serde_json::json;

use super::row::{Measurement, Row};

/// Prints rows as they come.
pub struct Report {
    json: bool,
    import_bytes: Option<u64>,
    headed: bool,
}

impl Report {
    /// A table, or one JSON object per measurement.
    pub fn new(json: bool, import_bytes: Option<u64>) -> Self {
        Self { json, import_bytes, headed: false }
    }

    /// Something to know beside the numbers; JSON lines stay pure.
    pub fn note(&self, text: &str) {
        if self.json {
            eprintln!("{text}");
        } else {
            print_line(text);
        }
    }

    /// Prints a row.
    pub fn row(&mut self, row: &Row) {
        let all = row.measurements(self.import_bytes);
        if self.json {
            all.iter().filter(|m| m.value.is_some()).for_each(|m| print_line(&object(row, m)));
        } else {
            if !std::mem::replace(&mut self.headed, true) {
                print_line(&head());
            }
            print_line(&line(row, &all));
        }
        row.notes.iter().for_each(|note| self.note(&format!("  {} {}: {note}", row.shape, row.mode)));
        if let Some(why) = &row.refused {
            self.note(&format!("  {} {} REFUSED: {why}", row.shape, row.mode));
        }
    }
}

/// A closed pipe (`| head`) is no reason to fail.
fn print_line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn object(row: &Row, m: &Measurement) -> String {
    let mut object = json!({
        "bench": "train", "schema": events::SCHEMA, "shape": row.shape, "mode": row.mode, "metric": m.metric,
        "unit": m.unit, "value": m.value, "peer": m.peer, "ratio": m.ratio, "rounds": row.ours.len(),
    });
    if let Some((peer, _)) = row.best() {
        object["peer_name"] = peer.variant.into();
    }
    if let Some(why) = &row.refused {
        object["refused"] = why.as_str().into();
    }
    object.to_string()
}

fn head() -> String {
    format!(
        "{:<10} {:<17} {:>8} {:>5} {:>8} {:<9} {:>6} {:>6} | {:>6} {:>6} | {:>8} {:>8} {:>6} {:>6} | {:>7} {:>8} {:>5}",
        "shape",
        "mode",
        "tok/s",
        "+-",
        "peer",
        "(best)",
        "ratio",
        "x 1x1",
        "mfu",
        "peer",
        "peak MB",
        "peer",
        "ratio",
        "(net)",
        "compute",
        "exchange",
        "load"
    )
}

fn line(row: &Row, all: &[Measurement]) -> String {
    let find = |metric: &str| all.iter().find(|m| m.metric == metric);
    let show = |value: Option<f64>, scale: f64, digits: usize, unit: &str| match value {
        Some(v) => format!("{:.digits$}{unit}", v * scale),
        None => "-".into(),
    };
    let value = |metric: &str| find(metric).and_then(|m| m.value);
    let peer = |metric: &str| find(metric).and_then(|m| m.peer);
    let ratio = |metric: &str| show(find(metric).and_then(|m| m.ratio), 1.0, 2, "");
    let percent = |value| show(value, 100.0, 0, "%");
    format!(
        "{:<10} {:<17} {:>8} {:>5} {:>8} {:<9} {:>6} {:>6} | {:>6} {:>6} | {:>8} {:>8} {:>6} {:>6} | {:>7} {:>8} {:>5}",
        row.shape,
        row.mode,
        show(value("tokens_per_s"), 1.0, 0, ""),
        percent(value("spread")),
        show(peer("tokens_per_s"), 1.0, 0, ""),
        row.best().map_or("-", |(peer, _)| peer.variant),
        ratio("tokens_per_s"),
        show(value("times_one_rank"), 1.0, 2, ""),
        percent(value("mfu")),
        percent(peer("mfu")),
        show(value("peak_bytes"), 1e-6, 0, ""),
        show(peer("peak_bytes"), 1e-6, 0, ""),
        ratio("peak_bytes"),
        ratio("peak_bytes_over_import"),
        percent(value("compute_share")),
        percent(value("exchange_share")),
        show(value("max_over_mean"), 1.0, 2, ""),
    )
}

#[cfg(test)]
mod tests {
    use super::super::ours::Sample;
    use super::*;

    fn row() -> Row {
        let at = |tokens_per_s, peak_bytes| Sample {
            tokens_per_s,
            peak_bytes,
            mfu: 0.5,
            compute: 0.9,
            exchange: 0.1,
            load: 1.5,
        };
        let mut row = Row { shape: "S", mode: "1x1", ours: vec![at(1000.0, 1e8)], loss: Some(5.0), ..Row::default() };
        row.add("eager", 5.0, at(800.0, 8e8));
        row
    }

    #[test]
    fn an_object_has_the_fields_of_the_contract() {
        let row = row();
        let all = row.measurements(Some(300_000_000));
        let text = object(&row, &all[0]);
        let object: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (field, want) in [("bench", "train"), ("shape", "S"), ("mode", "1x1"), ("metric", "tokens_per_s")] {
            assert_eq!(object[field], want);
        }
        assert_eq!(
            (&object["value"], &object["peer"], &object["ratio"]),
            (&json!(1000.0), &json!(800.0), &json!(1.25))
        );
        assert_eq!(object["unit"], "tokens/s");
    }

    #[test]
    fn a_refused_row_says_so_and_has_no_ratio() {
        let mut row = row();
        row.add("eager", 6.0, Sample::default());
        let all = row.measurements(None);
        let object: serde_json::Value = serde_json::from_str(&object(&row, &all[0])).unwrap();
        assert!(object["ratio"].is_null() && object["refused"].as_str().unwrap().contains("6.000000"));
    }

    #[test]
    fn a_line_is_as_wide_as_the_head() {
        let row = row();
        let line = line(&row, &row.measurements(Some(300_000_000)));
        assert_eq!(line.len(), head().len(), "{}\n{line}", head());
        assert!(line.contains("1.25") && line.contains("0.12") && line.contains("0.20"), "{line}");
    }
}

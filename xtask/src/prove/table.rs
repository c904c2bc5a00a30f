//! What a proof prints.

use std::time::Duration;

use serde_json::json;

use super::audit::{AXES, COMPARED, Counts};
use super::models::Tally;

/// Version of the objects of `--json`.
const SCHEMA: u32 = 1;
/// Hex digits of a digest that are shown.
const DIGEST_SHOWN: usize = 12;

/// What the columns say.
const EXPLAINED: &str =
    "instr, units: instructions run, units taken backward; then exchanges and bytes sent by axis; all of all ranks
= program: instructions, units and bytes of every rank are exactly those of its program, over all steps and validations;
           bytes on tp, cp, pp, dp and its groups (world also carries hashes of the digest). Where ranks lie on several hosts some pass
           on what others send: there the ratio of the bytes on these axes to those of the program";

/// One layout's row.
pub struct Line {
    /// Ranks of the run that ended; 0: it failed.
    pub ranks: usize,
    /// Its digest; empty: it failed.
    pub digest: String,
    /// The digest is the reference's.
    pub equal: bool,
    /// What was counted.
    pub counts: Counts,
    /// What else is wrong.
    pub wrong: Vec<String>,
}

/// Rows as text or JSON, and how many passed.
pub struct Table {
    json: bool,
    passed: usize,
    failed: usize,
}

impl Table {
    /// An empty one.
    pub fn new(json: bool) -> Self {
        Self { json, passed: 0, failed: 0 }
    }

    fn count(&mut self, passed: bool) {
        *(if passed { &mut self.passed } else { &mut self.failed }) += 1;
    }

    /// Rows so far.
    pub fn rows(&self) -> usize {
        self.passed + self.failed
    }

    /// A line between rows.
    pub fn note(&self, text: &str) {
        if self.json {
            println!("{}", json!({ "kind": "note", "schema": SCHEMA, "text": text }));
        } else {
            println!("\n{text}");
        }
    }

    /// The names of the columns.
    pub fn head(&self) {
        if !self.json {
            println!("{EXPLAINED}");
            let (grid, layout, ranks, digest, verdict) = ("grid", "layout", "ranks", "digest", "verdict");
            println!("{grid:4} {layout:62} {ranks:>5} {digest:12} {verdict:9} {:>7} {:>6}  traffic", "instr", "units");
        }
    }

    /// A layout.
    pub fn row(&mut self, grid: &str, layout: &str, line: Line) {
        let Line { ranks, digest, equal, counts, wrong } = line;
        let passed = equal && wrong.is_empty();
        self.count(passed);
        if self.json {
            let by_axis = |of: [u64; AXES.len()], axes: usize| {
                AXES.into_iter().zip(of).take(axes).collect::<std::collections::BTreeMap<_, _>>()
            };
            let object = json!({
                "kind": "layout", "schema": SCHEMA, "grid": grid, "layout": layout, "ranks": ranks, "digest": digest,
                "equal": equal, "passed": passed, "instructions": counts.instructions, "units": counts.units,
                "exchanges": by_axis(counts.calls, AXES.len()), "bytes": by_axis(counts.bytes, AXES.len()),
                "bytes_predicted": by_axis(counts.predicted, COMPARED), "bytes_between_hosts": counts.between_hosts, "wrong": wrong,
            });
            println!("{object}");
            return;
        }
        let verdict = match (digest.is_empty(), equal) {
            (true, _) => "FAILED",
            (false, true) => "equal",
            (false, false) => "DIFFERENT",
        };
        let sound = match () {
            () if !wrong.is_empty() => String::new(),
            () if counts.between_hosts > 0 => format!(" | {:.2}x program", counts.ratio()),
            () => " | = program".into(),
        };
        let Counts { instructions, units, .. } = counts;
        println!(
            "{grid:4} {layout:62} {ranks:>5} {digest:DIGEST_SHOWN$.DIGEST_SHOWN$} {verdict:9} {instructions:>7} {units:>6}  {}{sound}",
            counts.traffic()
        );
        wrong.iter().for_each(|text| println!("     FAILED: {text}"));
    }

    /// A deliberate fault.
    pub fn mutant(&mut self, name: &str, what: &str, place: &str, caught: bool, how: &str) {
        self.count(caught);
        if self.json {
            let object = json!({
                "kind": "mutant", "schema": SCHEMA, "name": name, "what": what, "place": place, "passed": caught, "outcome": how,
            });
            println!("{object}");
        } else {
            let verdict = if caught { "caught" } else { "FAILED" };
            println!("{verdict} {name:22} {place:24} {what}\n       {how}");
        }
    }

    /// How far a search is, for who watches.
    pub fn progress(&self, line: &str) {
        if self.json {
            println!("{}", json!({ "kind": "progress", "schema": SCHEMA, "text": line }));
        } else {
            println!("{line}");
        }
    }

    /// A search over models: each layout with the numbers of one rank has passed, each fault has failed.
    pub fn search(&mut self, tally: &Tally) {
        self.passed += tally.equal;
        self.failed += tally.faults.len();
        if self.json {
            let object = json!({
                "kind": "models", "schema": SCHEMA, "models": tally.models, "diverging": tally.diverging,
                "refused_models": tally.refused_models, "layouts": tally.layouts(), "equal": tally.equal,
                "processes": tally.processes, "ranks": tally.ranks, "refused": tally.refused, "faults": tally.faults,
            });
            println!("{object}");
        } else {
            tally.lines().iter().for_each(|line| println!("{line}"));
            tally.faults.iter().for_each(|fault| println!("FAILED: {fault}"));
        }
    }

    /// The last line; true if nothing failed.
    pub fn end(&self, took: Duration) -> bool {
        let (passed, failed, seconds) = (self.passed, self.failed, took.as_secs_f64());
        if self.json {
            let object =
                json!({ "kind": "proof", "schema": SCHEMA, "passed": passed, "failed": failed, "seconds": seconds });
            println!("{object}");
        } else {
            println!("\ntook {seconds:.1} s, the build included");
            println!("{passed} passed, {failed} failed");
        }
        failed == 0
    }
}

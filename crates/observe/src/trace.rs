//! A trace of all ranks on one time axis, in the Trace Event Format (JSON) that Perfetto and chrome://tracing open.
//!
//! A rank is a process with one track of instructions inside steps, and one of exchanges that ran beside them. Arrows
//! go from each send to its receive, and in a collective from the member that came last to those that waited for it.
//! <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::Observed;
use crate::flows::{Flow, flows};
use crate::label::label;
use crate::record::{RankRecord, Span, StepRecord};

/// Instructions in one trace; about 200 bytes each.
const SPANS_MAX: usize = 400_000;
/// The track of instructions.
const MAIN: u32 = 0;
/// The track of exchanges beside them.
const BESIDE: u32 = 1;

/// What a trace holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Steps in it.
    pub steps: usize,
    /// Steps that were recorded: more, where the trace would be too large.
    pub recorded: usize,
    /// Arrows in it.
    pub flows: usize,
}

/// Writes the trace of `records`, which [`crate::profile`] has accepted; the last steps are left out if they are too
/// many.
///
/// # Errors
/// What `out` reports.
pub fn write_trace(out: &mut impl Write, of: &Observed, records: &[RankRecord]) -> io::Result<Written> {
    let each: usize = of.programs.iter().map(|p| p.instrs.len()).sum();
    let recorded = records.first().map_or(0, |r| r.steps.len());
    let steps = (SPANS_MAX / each.max(1)).clamp(1, recorded.max(1)).min(recorded);
    let zero = records.iter().filter_map(|r| r.steps.first()).map(|s| s.began_ns).min().unwrap_or(0);
    let mut events = Events { out, zero, first: true };
    events.open(recorded, steps)?;
    for record in records {
        events.rank(of, record)?;
        for step in &record.steps[..steps] {
            events.step(of, record.rank, step)?;
        }
    }
    let flows = flows(of.programs, of.layout);
    let mut arrows = 0;
    for nth in 0..steps {
        let spans: Vec<Vec<Span>> = records.iter().map(|r| r.steps[nth].spans().collect()).collect();
        let at = |(rank, instr): (usize, usize)| spans[rank][instr];
        for (from, to) in flows.iter().flat_map(|flow| arrows_of(flow, &at)) {
            arrows += 1;
            events.arrow(arrows, (from.0, at(from)), (to.0, at(to)))?;
        }
    }
    events.close()?;
    Ok(Written { steps, recorded, flows: arrows })
}

type End = (usize, usize);

/// The arrows of one flow. A member that brings nothing may come after others are done: nobody waits for it.
fn arrows_of(flow: &Flow, at: &dyn Fn(End) -> Span) -> Vec<(End, End)> {
    match flow {
        Flow::Message { from, to } => {
            if at(*from).began_ns < at(*to).ended_ns {
                vec![(*from, *to)]
            } else {
                Vec::new()
            }
        }
        Flow::Together(members) => {
            let from = |to: &End| {
                let in_time = |from: &&End| (at(*to).began_ns..at(*to).ended_ns).contains(&at(**from).began_ns);
                members.iter().filter(|m| *m != to).filter(in_time).max_by_key(|m| at(**m).began_ns)
            };
            members.iter().filter_map(|to| Some((*from(to)?, *to))).collect()
        }
    }
}

/// Writes events one by one.
struct Events<'a, W> {
    out: &'a mut W,
    /// The begin of the trace.
    zero: u64,
    first: bool,
}

impl<W: Write> Events<'_, W> {
    fn open(&mut self, recorded: usize, steps: usize) -> io::Result<()> {
        let about = json!({
            "clock": "CLOCK_MONOTONIC, one machine: the ranks' times are on one axis",
            "steps": steps, "steps_recorded": recorded,
        });
        write!(self.out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":[")
    }

    fn close(&mut self) -> io::Result<()> {
        writeln!(self.out, "\n]}}")?;
        self.out.flush()
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        let comma = if std::mem::replace(&mut self.first, false) { "" } else { "," };
        write!(self.out, "{comma}\n{event}")
    }

    /// Microseconds since the begin of the trace.
    fn us(&self, ns: u64) -> f64 {
        ns.saturating_sub(self.zero) as f64 / 1e3
    }

    fn rank(&mut self, of: &Observed, record: &RankRecord) -> io::Result<()> {
        let rank = record.rank;
        let at = of.layout.coords(rank);
        let name = format!("rank {rank} (dp {} cp {} tp {} pp {})", at.dp, at.cp, at.tp, at.pp);
        let about = |what: &str, tid: u32, args: Value| json!({ "ph": "M", "name": what, "pid": rank, "tid": tid, "args": args });
        self.event(&about("process_name", MAIN, json!({ "name": name })))?;
        self.event(&about("process_sort_index", MAIN, json!({ "sort_index": rank })))?;
        self.event(&about("thread_name", MAIN, json!({ "name": "instructions" })))?;
        if record.steps.iter().any(|s| !s.flights.is_empty()) {
            self.event(&about("thread_name", BESIDE, json!({ "name": "exchanges beside them" })))?;
        }
        Ok(())
    }

    fn step(&mut self, of: &Observed, rank: usize, step: &StepRecord) -> io::Result<()> {
        let slice = |events: &Self, name: &str, cat: &str, began: u64, ended: u64, args: Value| {
            let dur = (ended - began) as f64 / 1e3;
            json!({ "ph": "X", "name": name, "cat": cat, "pid": rank, "tid": MAIN, "ts": events.us(began), "dur": dur, "args": args })
        };
        let name = format!("step {}", step.step);
        let whole = step.whole();
        let event = slice(self, &name, "step", whole.start, whole.end, json!({}));
        self.event(&event)?;
        let instrs = &of.programs[rank].instrs;
        for (span, instr) in step.spans().zip(instrs) {
            let label = label(instr);
            // Both directions have the same segments.
            let name = match label.group {
                group @ ("forward" | "backward") => format!("{group} {}", label.name),
                _ => label.name,
            };
            let args = json!({ "instruction": instr.to_string(), "waited_us": span.waited_ns as f64 / 1e3 });
            let event = slice(self, &name, label.group, span.began_ns, span.ended_ns, args);
            self.event(&event)?;
        }
        for (nth, flight) in step.flights.iter().enumerate() {
            let name = instrs.get(flight.instr).map_or("exchange".into(), |i| label(i).name);
            let id = format!("{rank}.{}.{nth}", step.step);
            for (ph, ns) in [("b", flight.began_ns), ("e", flight.ended_ns)] {
                let event = json!({ "ph": ph, "name": name, "cat": "beside", "id": id, "pid": rank, "tid": BESIDE, "ts": self.us(ns) });
                self.event(&event)?;
            }
        }
        Ok(())
    }

    /// From the begin of one span into the other: at its begin, or later if the first one began later.
    fn arrow(&mut self, id: usize, (from, source): (usize, Span), (to, sink): (usize, Span)) -> io::Result<()> {
        let arrives = source.began_ns.max(sink.began_ns);
        let end = |ph: &str, rank: usize, ts: f64| json!({ "ph": ph, "name": "depends", "cat": "flow", "id": id, "pid": rank, "tid": MAIN, "ts": ts });
        let start = end("s", from, self.us(source.began_ns));
        self.event(&start)?;
        let mut finish = end("f", to, self.us(arrives));
        finish["bp"] = "e".into();
        self.event(&finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Flight;
    use crate::testing::{World, record};

    fn trace(world: &World, records: &[RankRecord]) -> (Written, Vec<Value>) {
        let mut out = Vec::new();
        let written = write_trace(&mut out, &world.observed(), records).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        (written, value["traceEvents"].as_array().unwrap().clone())
    }

    fn is<'a>(events: &'a [Value], ph: &'a str) -> impl Iterator<Item = &'a Value> {
        events.iter().filter(move |e| e["ph"] == ph)
    }

    #[test]
    fn arrows_go_from_send_to_receive_and_from_the_last_member() {
        let world = World::new([2, 1, 2]);
        // Ranks are ever slower, so on all exchanges of two ranks the higher one comes last.
        let (written, events) = trace(&world, &record(&world, 2));
        let starts: Vec<_> = is(&events, "s").collect();
        let ends: Vec<_> = is(&events, "f").collect();
        assert_eq!((starts.len(), ends.len()), (written.flows, written.flows));
        for (start, end) in starts.iter().zip(&ends) {
            assert_eq!(start["id"], end["id"]);
            assert!(start["ts"].as_f64() <= end["ts"].as_f64() && start["pid"] != end["pid"]);
        }
        let grads: Vec<_> = events.iter().filter(|e| e["name"] == "all-reduce grads (dp)").collect();
        // Four ranks with four buckets each.
        assert_eq!(grads.len(), 2 * 4 * 4);
        let last = grads.iter().filter(|e| e["pid"] == 2).map(|e| &e["ts"]);
        let from_last = |ts: &Value| starts.iter().any(|s| s["pid"] == 2 && s["ts"] == *ts);
        assert!(last.into_iter().all(from_last));
    }

    #[test]
    fn what_ran_beside_has_a_track_of_its_own() {
        let world = World::new([2, 1, 1]);
        let mut records = record(&world, 1);
        let flight = Flight { instr: 3, began_ns: 2_000, ended_ns: 2_500 };
        records[1].steps[0].flights.push(flight);
        let (_, events) = trace(&world, &records);
        let [begin, end] = ["b", "e"].map(|ph| is(&events, ph).next().unwrap());
        assert_eq!((&begin["id"], &begin["pid"], &begin["tid"]), (&end["id"], &json!(1), &json!(BESIDE)));
        assert_eq!((&begin["ts"], &end["ts"]), (&json!(1.0), &json!(1.5)));
    }

    #[test]
    fn a_large_trace_is_cut_to_whole_steps() {
        let world = World::new([1, 1, 1]);
        let steps = SPANS_MAX / world.programs[0].instrs.len();
        let one = record(&world, 1).remove(0);
        let records = [RankRecord { rank: 0, steps: vec![one.steps[0].clone(); steps + 3] }];
        let mut out = Vec::new();
        let written = write_trace(&mut out, &world.observed(), &records).unwrap();
        assert_eq!((written.steps, written.recorded), (steps, steps + 3));
        assert!(out.len() < 300 * SPANS_MAX, "{}", out.len());
    }
}

//! What it costs that another rank computes the gradients of a step, too (`guard.recompute_every`).

use events::Event;

use super::super::stats::median;
use super::watched::{Bench, Job, Run, shape};
use super::{Args, Figure};

/// Steps that do not count.
const WARMUP: usize = 2;
/// Steps that count: twice the longer interval.
const STEPS: usize = 20;
/// Steps between two checks in the runs with few.
const FEW: usize = 10;

/// Seconds of the steps that count.
fn steps(run: &Run) -> Vec<f64> {
    let all = run.events.iter().filter_map(|(_, e)| if let Event::Step(s) = e { Some(s.seconds) } else { None });
    all.skip(WARMUP).collect()
}

/// Per round a run without, one that checks every step and one that checks a tenth of them; the order turns.
pub fn row(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let [mut every, mut tenth, mut hundredth, mut lone, mut extra] = [const { Vec::new() }; 5];
    let intervals = [0, 1, FEW];
    for round in bench.rounds(args.rounds) {
        let mut took = [const { Vec::new() }; 3];
        for turn in 0..3 {
            let which = (turn + round as usize) % 3;
            let set = format!("guard.recompute_every={}", intervals[which]);
            let count = WARMUP + if which == 1 { STEPS / 2 } else { STEPS };
            let sets = [set.as_str(), "checkpoint.every=0"];
            let job = Job { shape: shape("M", None), mode: "dp2-zero0", steps: count as u64, sets: &sets, args: &[] };
            let run = bench.run(&job)?;
            took[which] = steps(&run);
            bench.forget(&run);
        }
        let middle = |steps: &[f64]| median(steps.iter().copied()).ok_or("no step after the warm-up");
        let [without, with, few] = took;
        let plain = middle(&without)?;
        let checked = |i: usize| (i + 1 + WARMUP).is_multiple_of(FEW);
        let part = |wanted: bool| few.iter().enumerate().filter(move |(i, _)| checked(*i) == wanted).map(|(_, s)| *s);
        let (rest, check) = (median(part(false)).ok_or("no step")?, median(part(true)).ok_or("no checked step")?);
        let percent = |seconds: f64| 100.0 * seconds / plain;
        every.push(percent(middle(&with)? - plain));
        // Of its own run: what a checked step takes more than its neighbours.
        tenth.push(percent((check - rest) / FEW as f64));
        hundredth.push(percent((check - rest) / 100.0));
        lone.push(1000.0 * plain);
        extra.push(1000.0 * (rest - plain));
    }
    let of = |values: &[f64]| median(values.iter().copied()).unwrap_or(f64::NAN);
    let note = format!(
        "{:.0} ms a step without; steps between two checks differ by {:+.1} ms (noise: nothing else is done in them)",
        of(&lone),
        of(&extra)
    );
    let figure = |n: usize, rounds: Vec<f64>| {
        let expected = format!("1/{n} of forward and backward: {:.0} % at most", 100.0 / n as f64);
        Figure::new(format!("checks by another rank, every {n}, M dp2"), rounds, "%").reach(expected).peer("-")
    };
    Ok(vec![
        figure(1, every).note(note),
        figure(FEW, tenth).note("a checked step against its neighbours in the same run"),
        figure(100, hundredth).note("from the same checked steps"),
    ])
}

//! What it costs that a second process keeps the state of every step: runs with and without, in pairs.

use super::super::stats::median;
use super::watched::{Bench, Job, WARMUP, shape};
use super::{Args, Figure};

/// Tokens of a step for which the aim is stated.
const TOKENS: f64 = 8192.0;
/// Steps of a run that count.
const STEPS: usize = 3;

pub fn row(bench: &Bench, args: &Args, name: &str, mode: &str) -> Result<Vec<Figure>, String> {
    // A step of L of that many tokens takes ten seconds on two cores.
    let tokens = args.tokens.unwrap_or(if name == "L" { 2048 } else { TOKENS as usize });
    let shape = shape(name, Some(tokens));
    let steps = (WARMUP + STEPS) as u64;
    let (mut costs, mut lone, mut extra) = (Vec::new(), Vec::new(), Vec::new());
    for round in bench.rounds(args.rounds) {
        let mut step = [0.0; 2];
        // Which goes first alternates, so that a drift of the machine falls on both.
        for on in [round % 2 == 1, round % 2 == 0] {
            let set = format!("layout.mirror={on}");
            let job = Job { shape, mode, steps, sets: &[&set, "checkpoint.every=0"], args: &[] };
            let run = bench.run(&job)?;
            step[usize::from(on)] = run.step_s()?;
            bench.forget(&run);
        }
        costs.push(100.0 * (step[1] / step[0] - 1.0));
        lone.push(step[0]);
        extra.push(step[1] - step[0]);
    }
    let (lone, extra) = (median(lone).unwrap_or(f64::NAN), median(extra).unwrap_or(f64::NAN));
    let tokens = shape.batch * shape.seq;
    let mut note = format!("{tokens} tokens a step, {:.0} ms without, {:+.1} ms with", 1000.0 * lone, 1000.0 * extra);
    if (tokens as f64) < TOKENS {
        // What is sent does not depend on the tokens.
        note += &format!("; at {TOKENS} tokens {:+.2} % by estimate", 100.0 * extra / (lone * TOKENS / tokens as f64));
    }
    let reach = if mode.ends_with('0') { "0.5 %" } else { "2 % (aim 1 %)" };
    let what = format!("mirrors every step, {name} {mode}");
    Ok(vec![Figure::new(what, costs, "%").reach(reach).peer(bench.peer.mirror.as_str()).note(note)])
}

//! Faults from outside, and the time until the run prints what it made of them.

use std::process::Command;
use std::time::Duration;

use events::Event;
use serde_json::Value;

use super::super::process;
use super::super::stats::median;
use super::watched::{Bench, Hand, Job, Run, shape};
use super::{Args, Figure};

/// The step after which a fault strikes: all before it are warm-up.
const STRIKE: u64 = 5;
/// Steps after that.
const AFTER: u64 = 4;
/// Two faults of the run whose goodput is taken are so far apart.
const EVERY: &str = "random:seed=7,every=20s";

fn is_step(event: &Event) -> bool {
    matches!(event, Event::Step(_))
}

fn is_trouble(event: &Event) -> bool {
    matches!(event, Event::Trouble(_))
}

/// A run of shape M that gets `signal` on rank 1 in the course of a step, at another moment of it in every round.
fn struck(bench: &Bench, signal: &'static str, round: u32, rounds: u32) -> Result<(Run, f64), String> {
    let job = Job { shape: shape("M", None), mode: "dp2-zero0", steps: STRIKE + AFTER, sets: &[], args: &[] };
    let part = (f64::from(round) + 0.5) / f64::from(rounds);
    let strike = &mut |_, event: &Event, hand: &mut Hand| {
        if let Event::Step(step) = event
            && step.step == STRIKE
        {
            hand.strike(signal, 1, part * step.seconds);
        }
    };
    let (run, hand) = bench.watch(&job, strike)?;
    let at = hand.struck.first().copied().ok_or("there was nobody to strike")?;
    Ok((run, at))
}

/// The end of a rank: how soon it is seen, how soon the next step is there.
pub fn kill(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let (mut seen, mut back, mut over, mut lost) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let mut phases = String::new();
    for round in bench.rounds(args.rounds) {
        let (run, at) = struck(bench, "-KILL", round, args.rounds)?;
        let trouble = run.after(at, is_trouble).ok_or("nobody saw that a rank was gone")?;
        let next = run.after(trouble, is_step).ok_or("no step after the kill")?;
        seen.push(1000.0 * (trouble - at));
        back.push(next - at);
        over.push(next - at - 2.0 * run.step_s()?);
        for (_, event) in &run.events {
            if let Event::Recovery(anatomy) = event {
                lost += anatomy.steps_redone;
                let shown = anatomy.phases().into_iter().map(|(name, s)| format!("{name} {:.0}", 1000.0 * s));
                phases = shown.collect::<Vec<_>>().join(" + ");
            }
        }
        bench.forget(&run);
    }
    let over =
        format!("{:+.2} s over two steps, {lost} steps lost | last, ms: {phases}", median(over).unwrap_or(f64::NAN));
    Ok(vec![
        Figure::new("kill -9 to the next committed step, M dp2", back, "s")
            .reach("0.3 s + two steps, a fourth of the peer")
            .peer(bench.peer.restart.as_str())
            .note(over),
        Figure::new("exit seen", seen, "ms").reach("50 ms").peer(bench.peer.exit.as_str()),
    ])
}

/// A rank that stands still.
pub fn stop(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let (mut named, mut limit) = (Vec::new(), Vec::new());
    for round in bench.rounds(args.rounds) {
        let (run, at) = struck(bench, "-STOP", round, args.rounds)?;
        let by_name = |e: &Event| matches!(e, Event::Trouble(t) if t.rank == Some(1));
        named.push(run.after(at, by_name).ok_or("the stopped rank was not named")? - at);
        limit.push(3.0 * run.step_s()? + 1.0);
        bench.forget(&run);
    }
    let limit = median(limit).unwrap_or(f64::NAN);
    let figure = Figure::new("stopped rank named, M dp2", named, "s").reach(format!("3 steps + 1 s = {limit:.2} s"));
    Ok(vec![figure.peer(bench.peer.hang.as_str())])
}

/// A link on which nothing arrives any more.
pub fn cut(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let inject = format!("partition:0-1@{STRIKE}");
    let shape = shape("M", None);
    let job = Job { shape, mode: "dp2-zero0", steps: STRIKE + AFTER, sets: &[], args: &["--inject", inject.as_str()] };
    let (mut named, mut limit) = (Vec::new(), Vec::new());
    for _ in bench.rounds(args.rounds) {
        let run = bench.run(&job)?;
        let at = run.after(0.0, |e| matches!(e, Event::FaultFired { .. })).ok_or("no link was cut")?;
        named.push(run.after(at, is_trouble).ok_or("the cut was not noticed")? - at);
        limit.push(3.0 * run.step_s()? + 1.0);
        bench.forget(&run);
    }
    let limit = median(limit).unwrap_or(f64::NAN);
    let figure = Figure::new("cut link named, M dp2", named, "s").reach(format!("3 steps + 1 s = {limit:.2} s"));
    Ok(vec![figure.peer(bench.peer.hang.as_str())])
}

/// The controller is thrown away and built again from its journal.
pub fn controller(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let inject = format!("controller@{STRIKE}");
    let shape = shape("M", None);
    let job = Job { shape, mode: "dp2-zero0", steps: STRIKE + AFTER, sets: &[], args: &["--inject", inject.as_str()] };
    let mut delays = Vec::new();
    for _ in bench.rounds(args.rounds) {
        let run = bench.run(&job)?;
        let steps: Vec<(f64, u64)> = run
            .events
            .iter()
            .filter_map(|(at, e)| if let Event::Step(s) = e { Some((*at, s.step)) } else { None })
            .collect();
        let gaps = |near: bool| {
            let wanted = move |step: u64| (step.abs_diff(STRIKE) <= 1) == near && step > 2;
            steps.windows(2).filter(move |pair| wanted(pair[1].1)).map(|pair| pair[1].0 - pair[0].0)
        };
        let usual = median(gaps(false)).ok_or("too few steps")?;
        delays.push(1000.0 * (gaps(true).fold(0.0, f64::max) - usual));
        bench.forget(&run);
    }
    Ok(vec![
        Figure::new("controller gone and back: longest step over usual", delays, "ms")
            .reach("no step delayed")
            .peer("torchft: the survivor died 3 times of 3 (measured earlier)"),
    ])
}

/// The share of a run's time that made steps which were kept, while ranks are killed and stopped.
pub fn goodput(bench: &Bench, args: &Args) -> Result<Vec<Figure>, String> {
    let job = Job {
        shape: shape("S", None),
        mode: "dp2-zero0",
        steps: 1_000_000,
        sets: &["checkpoint.every=\"auto\"", "guard.restarts_max=1000"],
        args: &["--inject", EVERY],
    };
    let mut asked = false;
    let stop = &mut |at: f64, _: &Event, hand: &mut Hand| {
        if at >= args.seconds && !asked {
            asked = true;
            hand.stop();
        }
    };
    let (run, _) = bench.watch(&job, stop)?;
    let faults = run.events.iter().filter(|(_, e)| matches!(e, Event::FaultFired { .. })).count();
    let mut command = Command::new(&bench.binary);
    let text = process::output(command.arg("goodput").arg(&run.folder).arg("--json"), Duration::from_secs(60))?;
    let value: Value = serde_json::from_str(text.trim()).map_err(|e| format!("lockstep goodput: {e}"))?;
    let share = value["run"]["goodput"].as_f64().ok_or("lockstep goodput gave no figure")?;
    let spent = value["run"]["time_s"].to_string();
    bench.forget(&run);
    Ok(vec![
        Figure::new("goodput, S dp2, a fault every 20 s", vec![100.0 * share], "%")
            .reach("90 %")
            .peer("-")
            .note(format!("{faults} faults in {:.0} s, exit {:?} | {spent}", args.seconds, run.code)),
    ])
}

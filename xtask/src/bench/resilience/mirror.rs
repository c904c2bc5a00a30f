//! What it costs that a second process keeps the state of every step: runs with and without, in pairs, and what of it the
//! profile can name.

use events::{Event, Profile};
use program::{Mode, lower_all};
use spec::Run;

use super::super::shapes::Shape;
use super::super::stats::median;
use super::watched::{Bench, Job, Run as Watched, mode, shape};
use super::{Args, Figure};

/// Steps of a run that do not count.
const WARMUP: u64 = 1;
/// Steps of a run that count.
const STEPS: u64 = 6;
/// Those of L, of which one of 8,192 tokens takes ten seconds on two cores.
const STEPS_L: u64 = 3;

pub fn row(bench: &Bench, args: &Args, name: &str, mode: &'static str) -> Result<Vec<Figure>, String> {
    let shape = shape(name, Some(args.tokens));
    let reach = if mode.ends_with('0') { "0.5 %" } else { "2 % (aim 1 %)" };
    let what = format!("mirrors every step, {name} {mode}");
    let tokens = shape.batch * shape.seq;
    let figure = |rounds| Figure::new(&what, rounds, "%").reach(reach).peer(bench.peer.mirror.as_str());
    if same_program(&shape, mode)? {
        let pair = Pair::measure(bench, shape, mode, true)?;
        let note = format!(
            "replicas mirror each other: with and without it all ranks have the same instructions; one pair of runs of \
             {tokens} tokens a step still differs by {:+.2} %: noise",
            pair.cost()
        );
        return Ok(vec![figure(vec![0.0]).note(note)]);
    }
    let pairs = bench.rounds(args.rounds).map(|round| Pair::measure(bench, shape, mode, round % 2 == 0));
    let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
    let middle = |of: &dyn Fn(&Pair) -> f64| median(pairs.iter().map(of)).unwrap_or(f64::NAN);
    let without = middle(&|pair| pair.step[0]);
    let note = format!(
        "{tokens} tokens a step, {:.0} ms without, {:+.1} ms with",
        1000.0 * without,
        1000.0 * middle(&|pair| pair.step[1] - pair.step[0])
    );
    let named = |of: &dyn Fn(&Named) -> f64| 1000.0 * middle(&|pair| of(&pair.named[1]) - of(&pair.named[0]));
    let parts = format!(
        "sends {:.1} ms, update of what is mirrored {:.1}, its hashes {:.1}, waiting {:+.1} (not counted)",
        named(&|n| n.sent),
        named(&|n| n.update),
        named(&|n| n.vote),
        named(&|n| n.waiting)
    );
    let timed = pairs.iter().map(|pair| 100.0 * (pair.named[1].work() - pair.named[0].work()) / pair.step[0]);
    Ok(vec![
        figure(pairs.iter().map(Pair::cost).collect()).note(note),
        Figure::new(format!("as its instructions are timed, {name} {mode}"), timed.collect(), "%")
            .reach(reach)
            .peer("-")
            .note(parts),
    ])
}

/// Whether mirrors change no rank's list.
fn same_program(shape: &Shape, name: &str) -> Result<bool, String> {
    let program = |on: bool| {
        let mode = mode(name);
        let mut sets = mode.sets(shape);
        sets.push(format!("layout.mirror={on}"));
        let run = Run::parse(&shape.run_file(1), shape.name, &sets, mode.cores()).map_err(|e| e.to_string())?;
        Ok::<_, String>(lower_all(&run, Mode::Train))
    };
    Ok(program(true)? == program(false)?)
}

/// A run without mirrors and one with.
struct Pair {
    /// Median seconds of a step.
    step: [f64; 2],
    named: [Named; 2],
}

impl Pair {
    /// Which goes first alternates, so that a drift of the machine falls on both.
    fn measure(bench: &Bench, shape: Shape, mode: &str, without_first: bool) -> Result<Self, String> {
        let counted = if shape.name == "L" { STEPS_L } else { STEPS };
        let (steps, counted) = (WARMUP + counted, counted.to_string());
        let mut pair = Self { step: [0.0; 2], named: [Named::default(), Named::default()] };
        for on in [!without_first, without_first] {
            let set = format!("layout.mirror={on}");
            let warmup = WARMUP.to_string();
            let args = ["--profile", "--profile-warmup", warmup.as_str(), "--profile-steps", counted.as_str()];
            let run = bench.run(&Job { shape, mode, steps, sets: &[&set, "checkpoint.every=0"], args: &args })?;
            pair.step[usize::from(on)] = run.step_s_after(WARMUP as usize)?;
            pair.named[usize::from(on)] = Named::of(&run)?;
            bench.forget(&run);
        }
        Ok(pair)
    }

    /// What mirrors add to a step, percent.
    fn cost(&self) -> f64 {
        100.0 * (self.step[1] / self.step[0] - 1.0)
    }
}

/// Seconds of a step, mean over its ranks.
#[derive(Default)]
struct Named {
    sent: f64,
    update: f64,
    vote: f64,
    waiting: f64,
}

impl Named {
    fn of(run: &Watched) -> Result<Self, String> {
        let profile = run.events.iter().find_map(|(_, e)| if let Event::Profile(p) = e { Some(p) } else { None });
        let profile: &Profile = profile.ok_or("the run gave no profile")?;
        let sum = |wanted: &dyn Fn(&str, &str) -> bool| {
            profile.rows.iter().filter(|row| wanted(&row.group, &row.name)).map(|row| row.mean_s()).sum()
        };
        Ok(Self {
            sent: sum(&|group, name| group == "exchange" && name.contains("mirror")),
            update: sum(&|group, _| group == "optimizer"),
            vote: sum(&|group, _| group == "vote"),
            waiting: sum(&|group, _| group == "waiting"),
        })
    }

    fn work(&self) -> f64 {
        self.sent + self.update + self.vote
    }
}

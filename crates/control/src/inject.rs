//! `--inject`: the faults that a person asks a run to suffer.
//!
//! A list with commas: `kill:R@S`, `kill:R@S:load` (while state is loaded in the first recovery from which step S or a
//! later one comes next), `stop:R@S`, `nan:R@S`, `poison:R@S` (no number whenever that step's batch is computed), `diskfull:R@S`, `flip:R@S[:moment|weight|message|gradient]`,
//! `flip:R@S:device` (a bit of every gradient that the process of rank R makes, from step S until another process is in its place),
//! `slow:R@SxF[:N]` (F times as slow for N steps, else to the end), `partition:A-B@S`, `controller@S`,
//! `clock:+3600@S`, `clock:-60@S` (the wall clock jumps by so many seconds, as every process of the run reads it), `random:seed=7,every=5s`. R is a rank of the run's layout, S a step.

use spec::{Coords, Run};

use crate::fault::{Fault, FaultKind, Moment};

/// What a run is asked to suffer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Injection {
    /// Faults of ranks.
    pub faults: Vec<Fault>,
    /// The controller is thrown away and built again from its journal before these steps.
    pub controller: Vec<u64>,
    /// Before this step the wall clock jumps by so many seconds, as every rank and the controller read it.
    pub clock: Vec<(u64, i64)>,
    /// Processes are killed or stopped from outside, at random.
    pub random: Option<Random>,
}

/// A process every so often, chosen by a seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Random {
    /// What chooses.
    pub seed: u64,
    /// Milliseconds between two faults.
    pub every_ms: u64,
}

const FORMS: &str = "kill:R@S[:load], stop:R@S, nan:R@S, poison:R@S, diskfull:R@S, flip:R@S[:moment|weight|message|gradient|device], slow:R@SxF[:N], partition:A-B@S, controller@S, clock:+SECONDS@S, clock:-SECONDS@S or random:seed=N,every=5s";

fn unclear(part: &str) -> String {
    format!("--inject {part}: expected {FORMS} (R a rank, S a step, separated by commas)")
}

impl Injection {
    /// Reads what was written behind `--inject`.
    ///
    /// # Errors
    /// What is not understood, and every form there is.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut out = Self::default();
        // Nothing at all is what a script passes that wants none.
        if text.trim().is_empty() {
            return Ok(out);
        }
        // A part that is empty may be a fault that somebody forgot.
        if text.split(',').any(|part| part.trim().is_empty()) {
            return Err(unclear(&format!("{text:?} has an empty part")));
        }
        let mut parts = text.split(',').map(str::trim).peekable();
        while let Some(part) = parts.next() {
            if let Some(rest) = part.strip_prefix("random:") {
                // Its operands have a comma between them.
                let mut operands = vec![rest];
                while let Some(next) = parts.next_if(|next| next.starts_with("seed=") || next.starts_with("every=")) {
                    operands.push(next);
                }
                out.random = Some(random(part, &operands)?);
            } else if let Some(step) = part.strip_prefix("controller@") {
                out.controller.push(step.parse().map_err(|_| unclear(part))?);
            } else if let Some(jump) = part.strip_prefix("clock:") {
                out.clock.push(clock(jump).ok_or_else(|| unclear(part))?);
            } else {
                out.faults.push(fault(part).ok_or_else(|| unclear(part))?);
            }
        }
        Ok(out)
    }

    /// All faults of ranks, in a run of `ranks`.
    pub fn of_ranks(&self, ranks: usize) -> Vec<Fault> {
        let jump = |(step, seconds): &(u64, i64)| {
            let (step, kind) = (*step, FaultKind::Clock { seconds: *seconds });
            (0..ranks as u32).map(move |rank| Fault { rank, step, kind })
        };
        self.faults.iter().copied().chain(self.clock.iter().flat_map(jump)).collect()
    }

    /// Nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// That every fault can strike in `run`, of which `done` steps are done.
    ///
    /// # Errors
    /// The first that cannot, and why.
    pub fn check(&self, run: &Run, done: u64) -> Result<(), String> {
        if self.is_empty() {
            return Ok(());
        }
        let (world, steps) = (run.layout.world(), run.train.steps);
        if world == 1 || run.layout.transport == spec::Transport::Threads {
            return Err(format!(
                "--inject strikes rank processes, and there are none: {world} ranks, layout.transport = {}; set layout.dp, layout.tp, layout.pp or layout.cp above 1 and layout.transport to shm or tcp",
                run.layout.transport
            ));
        }
        let of_step = |what: &dyn std::fmt::Display, step: u64| {
            if (done + 1..=steps).contains(&step) {
                return Ok(());
            }
            Err(format!("--inject: {what} can never strike: the run goes from step {} to {steps}", done + 1))
        };
        for fault in &self.faults {
            of_step(fault, fault.step)?;
            let peer = if let FaultKind::Partition { peer } = fault.kind { peer } else { fault.rank };
            let beyond = [fault.rank, peer].into_iter().find(|rank| *rank as usize >= world);
            if let Some(rank) = beyond {
                return Err(format!(
                    "--inject: {fault} can never strike: there is no rank {rank}, ranks are 0 to {}",
                    world - 1
                ));
            }
            if fault.kind == FaultKind::Poison && run.guard.skip_batches == 0 {
                return Err(format!(
                    "--inject: {fault} ends the run (exit code 4): guard.skip_batches = 0; set it to 1 to leave that batch out"
                ));
            }
            let every = run.guard.recompute_every;
            let step = fault.step;
            let checked = every > 0 && (step.is_multiple_of(every) || step == steps);
            if fault.kind == FaultKind::FlipGradient && !checked {
                return Err(format!(
                    "--inject: nobody would notice {fault}: guard.recompute_every = {every} computes no gradient of step {step} \
                     twice; set it to 1, or to a divisor of {step}"
                ));
            }
            // What goes on for ever the next check finds; the last step is always one.
            // So do spares, after the next checkpoint.
            let spares = run.spares_check() == Ok(true)
                && run.checkpoint.every.is_none_or(|n| (step - 1).max(1).next_multiple_of(n) < steps);
            if fault.kind == FaultKind::FlipDevice && !spares && every == 0 {
                return Err(format!(
                    "--inject: nobody would notice {fault}: guard.recompute_every = {every} computes no gradient of steps {step} to \
                     {steps} twice; set it to 1, or to a divisor of {step}, or set guard.spares and checkpoint.every"
                ));
            }
            if fault.kind == FaultKind::FlipDevice && !spares && run.layout.dp == run.layout.group {
                return Err(format!(
                    "--inject: nobody would notice {fault}: no other rank can compute its gradients (layout.dp = {}, of which {} share \
                     their experts); raise layout.dp",
                    run.layout.dp, run.layout.group
                ));
            }
            if fault.kind == FaultKind::FlipDevice
                && !spares
                && let Some((all, check)) = self.alike(run, fault)
            {
                let named: Vec<_> = all.iter().map(ToString::to_string).collect();
                return Err(format!(
                    "--inject: nobody would notice {}: when guard.recompute_every = {every} checks step {check} all ranks that compute \
                     the same gradients (layout.dp = {}) err alike; leave one of them sound, raise layout.dp, or set guard.spares and \
                     checkpoint.every",
                    named.join(" and "),
                    run.layout.dp
                ));
            }
            if matches!(fault.kind, FaultKind::Partition { .. }) && peer == fault.rank {
                return Err(format!("--inject: {fault} can never strike: a rank sends nothing to itself"));
            }
        }
        self.clock.iter().try_for_each(|(step, seconds)| of_step(&format!("clock:{seconds:+}@{step}"), *step))?;
        self.controller.iter().try_for_each(|step| of_step(&format!("controller@{step}"), *step))
    }
}

impl Injection {
    /// The broken devices, of which `first` is the first, that stand for each other when `first` could be found, if all of those
    /// there are err by then; and the step of that check.
    fn alike(&self, run: &Run, first: &Fault) -> Option<(Vec<&Fault>, u64)> {
        let layout = &run.layout;
        let check = first.step.next_multiple_of(run.guard.recompute_every.max(1)).min(run.train.steps);
        let place = |rank: usize| {
            let at = layout.coords(rank);
            Coords { dp: at.dp % layout.group, ..at }
        };
        let replaced = |of: &Fault| {
            let ends = |f: &Fault| matches!(f.kind, FaultKind::Kill | FaultKind::Stop) && f.rank == of.rank;
            self.faults.iter().any(|f| ends(f) && f.step > of.step && f.step <= check)
        };
        let errs = |rank: usize| {
            let device = |f: &&Fault| f.kind == FaultKind::FlipDevice && f.rank as usize == rank;
            self.faults.iter().filter(device).find(|f| (first.step..=check).contains(&f.step) && !replaced(f))
        };
        let peers = (0..layout.world()).filter(|rank| place(*rank) == place(first.rank as usize));
        peers.map(errs).collect::<Option<Vec<_>>>().map(|all| (all, check))
    }
}

fn random(part: &str, operands: &[&str]) -> Result<Random, String> {
    let mut random = Random { seed: 1, every_ms: 5_000 };
    for operand in operands {
        let (key, value) = operand.split_once('=').ok_or_else(|| unclear(part))?;
        let (digits, scale) = match value.strip_suffix("ms") {
            Some(digits) => (digits, 1),
            None => (value.strip_suffix('s').unwrap_or(value), 1000),
        };
        let number: u64 = digits.parse().map_err(|_| unclear(part))?;
        match key {
            "seed" => random.seed = value.parse().map_err(|_| unclear(part))?,
            "every" => random.every_ms = number.checked_mul(scale).ok_or_else(|| unclear(part))?,
            _ => return Err(unclear(part)),
        }
    }
    if random.every_ms > spec::TIME_MAX_MS {
        return Err(format!(
            "--inject {part}: every = {} ms is more than a year; give less, such as 5s",
            random.every_ms
        ));
    }
    if random.every_ms < 100 {
        return Err(format!(
            "--inject {part}: every = {} ms leaves no time between faults; set it to at least 100ms",
            random.every_ms
        ));
    }
    Ok(random)
}

/// `+3600@7`: the step, and the seconds, which are not too few to be a jump.
fn clock(jump: &str) -> Option<(u64, i64)> {
    let (seconds, step) = jump.split_once('@')?;
    let seconds: i64 = seconds.parse().ok()?;
    let far = (1..=10_000_000_000).contains(&seconds.unsigned_abs());
    Some((step.parse().ok()?, seconds)).filter(|_| far && jump.starts_with(['+', '-']))
}

fn fault(part: &str) -> Option<Fault> {
    let (word, rest) = part.split_once(':')?;
    let (who, when) = rest.split_once('@')?;
    let (step, tail) = match when.find(|c: char| !c.is_ascii_digit()) {
        Some(end) => when.split_at(end),
        None => (when, ""),
    };
    let step = step.parse().ok()?;
    let plain = |kind| tail.is_empty().then_some(kind);
    let (rank, kind) = match word {
        "kill" if tail == ":load" => (who, FaultKind::KillAt(Moment::Load)),
        "kill" => (who, plain(FaultKind::Kill)?),
        "stop" => (who, plain(FaultKind::Stop)?),
        "nan" => (who, plain(FaultKind::Nan)?),
        "poison" => (who, plain(FaultKind::Poison)?),
        "diskfull" => (who, plain(FaultKind::DiskFull)?),
        "flip" => {
            let kind = match tail {
                "" | ":moment" => FaultKind::FlipMoment,
                ":weight" => FaultKind::FlipWeight,
                ":message" => FaultKind::FlipMessage,
                ":gradient" => FaultKind::FlipGradient,
                ":device" => FaultKind::FlipDevice,
                _ => return None,
            };
            (who, kind)
        }
        "slow" => {
            let (factor, steps) = match tail.strip_prefix('x')?.split_once(':') {
                Some((factor, steps)) => (factor, steps.parse().ok().filter(|n| *n > 0)?),
                None => (tail.strip_prefix('x')?, u64::MAX),
            };
            let factor: f64 = factor.parse().ok().filter(|f| (1.0..=1000.0).contains(f))?;
            (who, FaultKind::Slow { factor_percent: (100.0 * factor) as u32, steps })
        }
        "partition" => {
            let (a, b) = who.split_once('-')?;
            (a, plain(FaultKind::Partition { peer: b.parse().ok()? })?)
        }
        _ => return None,
    };
    Some(Fault { rank: rank.parse().ok()?, step, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read() {
        let text = "kill:1@7, stop:2@12,nan:0@15,flip:3@17,flip:0@3:weight,flip:1@3:device,slow:1@4x2.5:3,slow:1@9x4,diskfull:0@5,partition:0-1@6,controller@9,random:seed=7,every=500ms,kill:0@20,kill:2@20:load,poison:0@9,clock:+3600@4,clock:-60@5";
        let read = Injection::parse(text).unwrap();
        let fault = |rank, step, kind| Fault { rank, step, kind };
        let want = [
            fault(1, 7, FaultKind::Kill),
            fault(2, 12, FaultKind::Stop),
            fault(0, 15, FaultKind::Nan),
            fault(3, 17, FaultKind::FlipMoment),
            fault(0, 3, FaultKind::FlipWeight),
            fault(1, 3, FaultKind::FlipDevice),
            fault(1, 4, FaultKind::Slow { factor_percent: 250, steps: 3 }),
            fault(1, 9, FaultKind::Slow { factor_percent: 400, steps: u64::MAX }),
            fault(0, 5, FaultKind::DiskFull),
            fault(0, 6, FaultKind::Partition { peer: 1 }),
            fault(0, 20, FaultKind::Kill),
            fault(2, 20, FaultKind::KillAt(Moment::Load)),
            fault(0, 9, FaultKind::Poison),
        ];
        assert_eq!(read.faults, want);
        assert_eq!((read.controller.clone(), read.random), (vec![9], Some(Random { seed: 7, every_ms: 500 })));
        assert_eq!(read.clock, [(4, 3600), (5, -60)]);
        let jump = fault(1, 4, FaultKind::Clock { seconds: 3600 });
        assert_eq!((read.of_ranks(2).len(), read.of_ranks(2)[14]), (17, jump));
        assert!(Injection::parse("").unwrap().is_empty() && Injection::parse(" ").unwrap().is_empty());
    }

    #[test]
    fn what_is_not_a_fault_is_told_with_the_forms() {
        let wrong = [
            "kill",
            "kill:1",
            "kill:x@3",
            "kill:1@",
            "kill:1@3x",
            "flip:1@3:bit",
            "slow:1@3",
            "slow:1@3x0.5",
            "partition:1@3",
            "random:every=1ms",
            "random:every=18446744073709551615ms",
            "random:sead=3",
            "controller@x",
            "clock:3600@4",
            "clock:+0@4",
            "clock:+x@4",
            ",",
            "kill:1@3,,",
            "kill:1@3,",
            ",kill:1@3",
            "kill:1@3, ,stop:0@4",
        ];
        for text in wrong {
            let error = Injection::parse(text).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
        assert!(Injection::parse("boom:1@3").unwrap_err().contains("partition:A-B@S"));
    }

    #[test]
    fn what_can_never_strike_is_refused() {
        let text =
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n";
        let run = |set: &str| Run::parse(text, "t", &[set.into()], 1).unwrap();
        let check = |inject: &str, set: &str, done| Injection::parse(inject).unwrap().check(&run(set), done);
        assert_eq!(check("kill:1@7,controller@10", "layout.dp=2", 0), Ok(()));
        assert!(check("kill:1@7", "layout.dp=1", 0).unwrap_err().contains("layout.dp"));
        assert!(check("kill:2@7", "layout.dp=2", 0).unwrap_err().contains("no rank 2"));
        assert!(check("kill:1@11", "layout.dp=2", 0).unwrap_err().contains("from step 1 to 10"));
        assert!(check("kill:1@3", "layout.dp=2", 5).unwrap_err().contains("from step 6 to 10"));
        assert!(check("controller@11", "layout.dp=2", 0).is_err());
        let device = |dp: &str| check("flip:0@3:device", dp, 0).unwrap_err();
        assert!(device("layout.dp=2").contains("guard.recompute_every = 0"));
        let twice = |inject: &str, dp: usize| {
            let sets = [format!("layout.dp={dp}"), "guard.recompute_every=4".into(), "grid.dp=4".into()];
            Injection::parse(inject).unwrap().check(&Run::parse(text, "t", &sets, 1).unwrap(), 0)
        };
        let error = twice("flip:0@5:device,flip:1@6:device", 2).unwrap_err();
        let named = ["of rank 0 in step 5 and", "of rank 1 in step 6", "checks step 8", "layout.dp = 2"];
        assert!(named.iter().all(|part| error.contains(part)), "{error}");
        // One is found before the other errs, or is gone; or a third knows better.
        assert_eq!(twice("flip:0@5:device,flip:1@9:device", 2), Ok(()));
        assert_eq!(twice("flip:0@5:device,flip:1@6:device,kill:0@7", 2), Ok(()));
        assert_eq!(twice("flip:0@5:device,flip:1@5:device", 4), Ok(()));
        // The last step is always checked.
        assert_eq!((twice("flip:0@9:device", 2), twice("flip:0@10:gradient", 2)), (Ok(()), Ok(())));
        assert!(twice("flip:0@9:device,flip:1@10:device", 2).unwrap_err().contains("checks step 10"));
        assert!(check("partition:1-1@3", "layout.dp=2", 0).unwrap_err().contains("itself"));
        assert_eq!(check("", "layout.dp=1", 0), Ok(()));
    }
}

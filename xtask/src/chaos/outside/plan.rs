//! What a chain shall suffer: all of it follows from a number, none of it from what happens.

use crate::prove::random::Random;

/// The run, without what a recipe and a chain add.
pub const RUN: &str = r#"[model]
preset = "nano"
qk_norm = true
tied = true
[data]
source = "synthetic"
[train]
steps = 36
batch = 8
seq = 16
lr = 3e-3
warmup = 2
eval_every = 4
eval_sequences = 2
[grid]
dp = 4
tp = 2
"#;

/// Short limits, so that a minute sees many faults.
const LIMITS: [&str; 7] = [
    "guard.beat_ms=50",
    "guard.heartbeat_timeout_ms=1500",
    "guard.stopped_timeout_ms=150",
    "guard.progress_floor_ms=3000",
    "guard.assemble_timeout_ms=10000",
    "guard.restarts_max=60",
    "layout.exchange_timeout_ms=3000",
];

/// What decides the numbers: runs of one recipe end alike.
pub const RECIPES: [(&str, &[&str]); 4] = [
    ("plain", &[]),
    ("reduced", &["grid.accumulate=reduced"]),
    // Ends by itself before the last step.
    ("patience", &["train.patience=2", "train.lr=3e-2", "train.eval_every=3", "train.steps=60"]),
    ("experts", &["model.experts=4", "model.experts_per_token=2", "model.tied=false", "train.steps=24"]),
];
const REDUCED: usize = 1;
const PATIENCE: usize = 2;

/// Layouts over the grid: one rank, threads, processes with and without replicas.
const LAYOUTS: [&str; 12] = [
    "",
    "layout.dp=2 layout.transport=threads",
    "layout.dp=2",
    "layout.dp=2",
    "layout.dp=3",
    "layout.dp=4",
    "layout.tp=2",
    "layout.pp=2",
    "layout.dp=2 layout.zero=1",
    "layout.dp=4 layout.zero=1",
    "layout.dp=2 layout.tp=2",
    "layout.dp=2 layout.pp=2 layout.zero=1",
];
/// With gradients that are summed for each microbatch.
const SHARDED: [&str; 3] =
    ["layout.dp=2 layout.zero=3", "layout.dp=3 layout.zero=2", "layout.dp=2 layout.pp=2 layout.zero=3"];

/// The moment of a strike, as it shows from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The process was started.
    Begun,
    /// Every rank of the first world has told its process.
    Placed,
    /// So many steps of this start are told.
    Steps(usize),
    /// A checkpoint begins to be written.
    Writing,
    /// A checkpoint got its name: nobody may have heard of it.
    Committed,
    /// A copy begins to be written to the store.
    Copying,
    /// Ranks were struck, and that was noticed.
    Noticed,
    /// Ranks have their places in a new world, and load.
    Formed,
    /// The last step is told: validation, checkpoint and digest follow.
    LastStep,
    /// The digest is told: ranks end.
    Digest,
    /// So many ranks have ended.
    Finished(usize),
}

/// Who is struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whom {
    /// One rank.
    One,
    /// Two ranks.
    Two,
    /// All ranks.
    All,
    /// The process that was started.
    Parent,
    /// It, and one rank.
    ParentAndOne,
    /// It, and all ranks.
    ParentAndAll,
}

/// What strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// SIGKILL.
    Kill,
    /// SIGSTOP; that must be noticed.
    Stop,
    /// SIGSTOP, and SIGKILL so many milliseconds later.
    StopKill(u64),
    /// SIGSTOP, and SIGCONT so many milliseconds later.
    StopContinue(u64),
    /// A request to stop: the signal's name.
    Ask(&'static str),
}

/// One strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strike {
    /// When.
    pub at: Moment,
    /// So many microseconds later.
    pub delay_us: u64,
    /// Whom.
    pub whom: Whom,
    /// With what.
    pub how: How,
    /// Which ranks, and in which order.
    pub draw: usize,
}

/// What is done to the folder before a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Nothing.
    Nothing,
    /// `events.jsonl` is deleted.
    Events,
    /// All that a run writes down of itself is deleted: events, journal, summary, best.
    Logs,
    /// The folder is deleted; what is in the store is there.
    Folder,
}

/// One start of the binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    /// What is done before it.
    pub loss: Loss,
    /// It begins while processes of the life before may still be there.
    pub at_once: bool,
    /// Keys of this start.
    pub sets: Vec<String>,
    /// Ranks of its layout.
    pub ranks: usize,
    /// In order.
    pub strikes: Vec<Strike>,
}

/// A run that is struck, ends and is resumed until it is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Of [`RECIPES`].
    pub recipe: usize,
    /// Keys of every start.
    pub sets: Vec<String>,
    /// Checkpoints are copied.
    pub store: bool,
    /// Further arguments.
    pub args: Vec<&'static str>,
    /// Starts with strikes. More follow without, until the run is done.
    pub lives: Vec<Life>,
    /// The last start, and any further one.
    pub last: Life,
}

/// Chain number `number` of `seed`.
pub fn plan(seed: u64, number: usize, faults_max: usize) -> Plan {
    let mut random = Random::new(seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let random = &mut random;
    let recipe = random.upto(RECIPES.len()) - 1;
    let mut sets: Vec<String> = RECIPES[recipe].1.iter().chain(&LIMITS).map(ToString::to_string).collect();
    let every = 1 + random.upto(5);
    sets.push(format!("checkpoint.every={every}"));
    sets.push(format!("checkpoint.keep={}", random.one(&[1, 1, 2, 3])));
    if random.upto(4) == 1 {
        sets.push("checkpoint.background=false".into());
    } else {
        sets.push(format!("checkpoint.stagger_ms={}", random.one(&[0, 0, 5, 20])));
    }
    if recipe == PATIENCE && random.upto(2) == 1 {
        sets.push("checkpoint.best=true".into());
    }
    let store = random.upto(3) == 1;
    let args = if random.upto(4) == 1 { vec!["--digest-every", "3"] } else { Vec::new() };
    let count = random.upto(3);
    let lives = (0..count).map(|at| life(random, recipe, store, at, faults_max)).collect();
    let last = Life { strikes: Vec::new(), ..life(random, recipe, store, count, faults_max) };
    Plan { recipe, sets, store, args, lives, last }
}

fn life(random: &mut Random, recipe: usize, store: bool, at: usize, faults_max: usize) -> Life {
    let layout = if recipe == REDUCED && random.upto(3) == 1 { random.one(&SHARDED) } else { random.one(&LAYOUTS) };
    let mut sets: Vec<String> = layout.split_whitespace().map(str::to_owned).collect();
    let ranks = super::super::injected::ranks_of(&sets);
    let processes = ranks > 1 && !layout.contains("threads");
    if processes {
        if random.upto(3) == 1 {
            sets.push("layout.transport=tcp".into());
        }
        if random.upto(3) == 1 {
            sets.push("guard.spares=1".into());
        }
        if random.upto(5) == 1 {
            sets.push("guard.respawn_after_ms=300".into());
        }
    }
    let loss = match random.upto(if store { 8 } else { 6 }) {
        _ if at == 0 => Loss::Nothing,
        1 | 2 => Loss::Events,
        3 => Loss::Logs,
        7 | 8 => Loss::Folder,
        _ => Loss::Nothing,
    };
    let mut strikes: Vec<Strike> = Vec::new();
    for _ in 0..random.upto(faults_max) {
        let again = strikes.last().is_some_and(|last| processes && last.strikes_ranks()) && random.upto(2) == 1;
        strikes.push(strike(random, processes, ranks, store, again));
    }
    Life { loss, at_once: random.upto(2) == 1, sets, ranks, strikes }
}

impl Strike {
    /// The run is expected to repair it.
    fn strikes_ranks(&self) -> bool {
        matches!(self.whom, Whom::One | Whom::Two | Whom::All)
            && !matches!(self.how, How::Ask(_) | How::StopContinue(_))
    }
}

/// One strike; `again`: while the run recovers from the one before.
fn strike(random: &mut Random, processes: bool, ranks: usize, store: bool, again: bool) -> Strike {
    let at = match random.upto(if store { 14 } else { 12 }) {
        _ if again => random.one(&[Moment::Noticed, Moment::Formed, Moment::Formed]),
        1 => Moment::Begun,
        2 => Moment::Placed,
        3 | 4 => Moment::Steps(random.upto(14)),
        5 | 6 => Moment::Writing,
        7 | 8 => Moment::Committed,
        9 | 10 => Moment::LastStep,
        11 => Moment::Digest,
        12 => Moment::Finished(random.upto(ranks)),
        _ => Moment::Copying,
    };
    let most_us = match at {
        Moment::Begun => 400_000,
        Moment::Placed | Moment::Noticed | Moment::Formed => 60_000,
        Moment::Steps(_) | Moment::Writing | Moment::Copying => 10_000,
        Moment::LastStep => 30_000,
        Moment::Committed => 3_000,
        Moment::Digest | Moment::Finished(_) => 2_000,
    };
    // Half of them as soon as can be.
    let delay_us = if random.upto(2) == 1 && at != Moment::Begun { 0 } else { random.upto(most_us) as u64 };
    let whom = match random.upto(12) {
        _ if !processes => Whom::Parent,
        1..=4 => Whom::One,
        5 | 6 => Whom::Two,
        7 | 8 => Whom::All,
        9 | 10 => Whom::Parent,
        11 => Whom::ParentAndOne,
        _ => Whom::ParentAndAll,
    };
    let parent = matches!(whom, Whom::Parent | Whom::ParentAndOne | Whom::ParentAndAll);
    let ms = random.upto(400) as u64;
    let how = match random.upto(8) {
        1..=3 => How::Kill,
        4 if !parent => How::Stop,
        4 | 5 => How::StopKill(ms),
        6 => How::StopContinue(ms),
        7 if !parent => How::Stop,
        _ if parent && whom != Whom::ParentAndOne => How::Ask(random.one(&["TERM", "INT", "HUP"])),
        _ => How::Kill,
    };
    Strike { at, delay_us, whom, how, draw: random.upto(1 << 16) }
}

impl std::fmt::Display for Strike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.how.name(), self.whom.name(), self.at)?;
        if self.delay_us > 0 { write!(f, " +{:.1} ms", self.delay_us as f64 / 1e3) } else { Ok(()) }
    }
}

impl How {
    /// For people.
    pub fn name(self) -> String {
        match self {
            Self::Kill => "kill".into(),
            Self::Stop => "stop".into(),
            Self::StopKill(ms) => format!("stop, {ms} ms, kill"),
            Self::StopContinue(ms) => format!("stop, {ms} ms, continue"),
            Self::Ask(signal) => format!("SIG{signal}"),
        }
    }

    /// Of all that differ in milliseconds only.
    pub fn kind(self) -> String {
        match self {
            Self::StopKill(_) => "stop, then kill".into(),
            Self::StopContinue(_) => "stop, then continue".into(),
            other => other.name(),
        }
    }
}

impl Whom {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::One => "one rank",
            Self::Two => "two ranks",
            Self::All => "all ranks",
            Self::Parent => "parent",
            Self::ParentAndOne => "parent and a rank",
            Self::ParentAndAll => "parent and ranks",
        }
    }
}

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Begun => f.write_str("after the start"),
            Self::Placed => f.write_str("when ranks are there"),
            Self::Steps(n) => write!(f, "after {n} steps"),
            Self::Writing => f.write_str("when a checkpoint is written"),
            Self::Committed => f.write_str("when a checkpoint is there"),
            Self::Copying => f.write_str("when a copy is written"),
            Self::Noticed => f.write_str("when a trouble is told"),
            Self::Formed => f.write_str("when a new world loads"),
            Self::LastStep => f.write_str("after the last step"),
            Self::Digest => f.write_str("after the digest"),
            Self::Finished(n) => write!(f, "when {n} ranks are done"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_follows_from_its_number_and_every_moment_and_kind_comes() {
        let all = |seed| (0..400).map(|n| plan(seed, n, 3)).collect::<Vec<_>>();
        let plans = all(7);
        assert_eq!(plans, all(7));
        assert_ne!(plans, all(8));
        let strikes: Vec<_> = plans.iter().flat_map(|p| &p.lives).flat_map(|l| &l.strikes).collect();
        for at in [Moment::Begun, Moment::Placed, Moment::Writing, Moment::Committed, Moment::Copying, Moment::Noticed]
            .into_iter()
            .chain([Moment::Formed, Moment::LastStep, Moment::Digest, Moment::Finished(1), Moment::Finished(4)])
        {
            assert!(strikes.iter().any(|s| s.at == at), "{at:?}");
        }
        for whom in [Whom::One, Whom::Two, Whom::All, Whom::Parent, Whom::ParentAndOne, Whom::ParentAndAll] {
            assert!(strikes.iter().any(|s| s.whom == whom), "{whom:?}");
        }
        // Nobody notices that the parent stands still: it must be let go on or be killed.
        let parent = |w: Whom| matches!(w, Whom::Parent | Whom::ParentAndOne | Whom::ParentAndAll);
        assert!(!strikes.iter().any(|s| parent(s.whom) && s.how == How::Stop));
    }

    #[test]
    fn every_start_is_a_sound_run() {
        for plan in (0..400).map(|n| plan(3, n, 3)) {
            for life in plan.lives.iter().chain([&plan.last]) {
                let sets = [&plan.sets[..], &life.sets].concat();
                let run = spec::Run::parse(RUN, "chaos", &sets, 2).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
                assert_eq!(run.layout.world(), life.ranks);
                train::launch::prove(&run).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
            }
        }
    }
}

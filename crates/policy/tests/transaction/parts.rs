//! What the model is made of: processes, what they hold, worlds, messages; what is explored and what must not happen.

/// Processes at most, and shards of state.
pub const PROCESSES: usize = 4;
pub const SHARDS: usize = 3;
/// Steps of the run.
pub const TARGET: u8 = 2;
/// Worlds at most, and none.
pub const GENERATIONS: usize = 4;

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Ranks of the first world.
    pub ranks: usize,
    /// Processes that wait for a place.
    pub spares: usize,
    /// Faults at most.
    pub faults: u8,
    /// Which of kill, stop, partition and false alarm (a world ends although all its ranks are well).
    pub kinds: [bool; 4],
    pub mutant: Option<Mutant>,
}

/// Ways to get the protocol wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A rank applies what it has before the vote.
    ApplyBeforeVote,
    /// Messages of any generation are taken.
    NoFence,
    /// All stay although one has applied.
    StayAlthoughApplied,
    /// The ballot does not wait for the gradients of what the rank mirrors.
    MirrorNotPrepared,
    /// A rank drops what it had as soon as it has loaded.
    ForgetsTooEarly,
    /// A rank takes its world for settled, and forgets, before it has heard of all that they have their state.
    SettlesUnheard,
    /// All go forward as soon as one is prepared, without a vote.
    ForwardWithoutVote,
}

/// What must never happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A gradient of step `of` met a shard at step `at`.
    Applied { process: usize, shard: usize, of: u8, at: u8 },
    /// Gradients were computed from parameters of several steps, or of another one.
    Mixed { process: usize },
    /// A message of another world was taken.
    Zombie { process: usize, from: usize },
    /// A rank applied a gradient that it did not have.
    NoGradient { process: usize, shard: usize },
    /// The run went on before a step that somebody who answered had committed.
    Lost { to: u8, committed: u8 },
    /// Every shard had a holder among those who answered, and yet the run could not go on.
    Unavailable { why: String },
    /// Nothing can happen, and the run is not done.
    Stopped,
    /// The end of the run is not the state of the undisturbed one.
    WrongEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Life {
    Running,
    Stopped,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// In no world: a spare, or said what it holds.
    Waits,
    Sends,
    Loads,
    /// It has its state, and has not heard that of all others.
    Claims,
    Computes,
    Reduces,
    Mirrors,
    Votes,
    Applies,
    Gathers,
    Done,
}

/// State by the layout of one world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub generation: u8,
    pub settled: bool,
    pub step: u8,
    pub decided: u8,
    /// Updates in each shard that is kept here; none: not kept.
    pub shards: [Option<u8>; SHARDS],
    /// Shards whose summed gradient of the next step is here, a bit each.
    pub grads: u8,
    /// Updates in the parameters of each shard.
    pub params: [u8; SHARDS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Process {
    pub life: Life,
    pub generation: u8,
    pub phase: Phase,
    pub state: Option<State>,
    pub before: Option<State>,
}

/// Who is in a world, by rank, and what it started from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub members: [u8; PROCESSES],
    pub len: u8,
    /// The world whose layout the state was in; 0: initial weights.
    pub from: u8,
    pub step: u8,
    pub forward: bool,
    /// Process that sends each shard.
    pub sources: [u8; SHARDS],
}

impl World {
    pub fn list(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.members[..self.len as usize].iter().map(|&m| m as usize)
    }

    pub fn rank(&self, process: usize) -> Option<usize> {
        self.list().position(|m| m == process)
    }

    /// Ranks that keep `shard`: owner, then mirror.
    pub fn keepers(&self, shard: usize) -> Vec<u32> {
        let n = self.len as usize;
        let mut keepers = vec![(shard % n) as u32];
        if n > 1 {
            keepers.push(((shard + 1) % n) as u32);
        }
        keepers
    }

    pub fn owner(&self, shard: usize) -> usize {
        self.members[shard % self.len as usize] as usize
    }

    pub fn mirror(&self, shard: usize) -> Option<usize> {
        (self.len > 1).then(|| self.members[(shard + 1) % self.len as usize] as usize)
    }

    pub fn keeps(&self, process: usize, shard: usize) -> bool {
        self.owner(shard) == process || self.mirror(shard) == Some(process)
    }
}

/// Kinds of messages: transfer, contribution, reduced, parameters of a shard; the ballot; that all is loaded.
#[derive(Clone, Copy)]
pub enum Kind {
    Transfer(usize),
    Contribution(usize, u8),
    Reduced(usize, u8),
    Params(usize, u8),
    Ballot(u8),
    Claim,
}

impl Kind {
    pub const COUNT: usize = SHARDS + 3 * SHARDS * TARGET as usize + TARGET as usize + 1;

    pub fn index(self) -> usize {
        let of = |kind: usize, shard: usize, step: u8| {
            SHARDS + (kind * SHARDS + shard) * TARGET as usize + usize::from(step - 1)
        };
        match self {
            Self::Transfer(shard) => shard,
            Self::Contribution(shard, step) => of(0, shard, step),
            Self::Reduced(shard, step) => of(1, shard, step),
            Self::Params(shard, step) => of(2, shard, step),
            Self::Ballot(step) => SHARDS + 3 * SHARDS * TARGET as usize + usize::from(step - 1),
            Self::Claim => Self::COUNT - 1,
        }
    }
}

const _: () = assert!(Kind::COUNT <= 32, "a word holds a bit per kind");

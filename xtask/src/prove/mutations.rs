//! `cargo xtask prove --mutations`: seeded mutations of sound programs. The checker must accept legal reorderings, and
//! whatever it accepts must run, on ranks that are threads, to the digest of the lists as they were.
//!
//! Whether a reordering is legal is decided here by [`may_swap`], which knows nothing of the checker: it is about what two
//! neighbouring instructions share. Other mutations may or may not change what is computed; there only the second law holds.

use std::fmt;

use fabric::FabricOptions;
use program::check::check;
use program::{Axis, Instr, Mode, Op, Pass, Program, Segment, Value};
use spec::{Coords, Layout, Run};
use train::corpus::Corpus;
use train::virtual_ranks;

use super::random::Random;
use super::rows::sets;

/// Mutations of `prove --mutations`.
pub const MUTATIONS: usize = 10_000;
/// Longest stretch of a list that is put in another order.
const WINDOW_MAX: usize = 160;
/// Ranks that wait this long wait for ever.
const DEADLINE_MS: u64 = 20_000;

/// The runs that are mutated, without their layouts: small, so that thousands run. Dense; with context cells, for which
/// gradients leave microbatch by microbatch; with experts; and with experts, a tied embedding and router counts that travel
/// with the stream.
const RUNS: [&str; 4] = [DENSE, CONTEXT, EXPERTS, POOLED];

const CONTEXT: &str = r#"
[model]
preset = "nano"
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
layers = 2
[data]
source = "synthetic"
[train]
steps = 1
batch = 8
seq = 16
lr = 1e-2
[grid]
dp = 2
cp = 2
accumulate = "reduced"
"#;

const EXPERTS: &str = r#"
[model]
preset = "nano"
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
layers = 2
experts = 4
experts_per_token = 2
expert_ffn = 16
shared_ffn = 16
aux_loss = 0.01
[data]
source = "synthetic"
[train]
steps = 1
batch = 8
seq = 16
lr = 1e-2
[grid]
dp = 4
tp = 2
ep = 2
"#;

const POOLED: &str = r#"
[model]
preset = "nano"
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
layers = 4
tied = true
experts = 4
experts_per_token = 2
expert_ffn = 16
aux_loss = 0.01
aux_scope = "pooled"
[data]
source = "synthetic"
[train]
steps = 1
batch = 8
seq = 16
lr = 1e-2
[grid]
dp = 2
accumulate = "reduced"
"#;

const DENSE: &str = r#"
[model]
preset = "nano"
hidden = 32
heads = 4
kv_heads = 2
head_dim = 8
ffn = 48
layers = 4
tied = true
qk_norm = true
[data]
source = "synthetic"
[train]
steps = 1
batch = 8
seq = 16
lr = 1e-2
[grid]
dp = 2
tp = 2
"#;

/// Their layouts, with the number of the run: every axis, schedule, and way to keep activations and shards.
const LAYOUTS: &[(usize, &str)] = &[
    (0, "threads=1"),
    (0, "dp=2 zero=1"),
    (0, "tp=2"),
    (0, "pp=2"),
    (0, "pp=4 schedule=gpipe"),
    (0, "pp=2 schedule=interleaved"),
    (0, "dp=2 pp=2 zero=1"),
    (0, "tp=2 pp=2"),
    (0, "pp=2 schedule=zb-h1"),
    (0, "pp=4 schedule=zb-h1"),
    (0, "pp=2 schedule=zbv"),
    (0, "tp=2 pp=2 schedule=zbv"),
    (0, "pp=2 schedule=dualpipe-v"),
    (0, "dp=2 pp=2 schedule=dualpipe-v"),
    (0, "recompute=full threads=1"),
    (0, "pp=2 recompute=selective"),
    (0, "pp=2 schedule=zbv recompute=full"),
    (1, "cp=2 zero=1"),
    (1, "dp=2 cp=2 zero=2"),
    (1, "dp=2 pp=2 schedule=zb-h1 zero=3"),
    (1, "cp=2 pp=2 schedule=zb-h1 zero=3"),
    (2, "threads=1"),
    (2, "dp=2"),
    (2, "dp=4 recompute=full"),
    (2, "tp=2 pp=2"),
    (2, "dp=2 pp=2 schedule=zb-h1 recompute=full"),
    (3, "pp=2 schedule=zbv"),
    (3, "pp=2 schedule=dualpipe-v"),
    (3, "dp=2 pp=2 schedule=interleaved zero=2"),
];

/// What came of all mutations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Legal reorderings.
    pub legal: usize,
    /// Those that the checker accepts.
    pub legal_accepted: usize,
    /// Other mutations.
    pub other: usize,
    /// Those that the checker accepts.
    pub other_accepted: usize,
}

impl Tally {
    /// At least three of ten mutations are legal, and of those 95 of 100 accepted.
    pub fn holds(&self) -> bool {
        self.legal * 10 >= 3 * (self.legal + self.other) && self.legal_accepted * 100 >= 95 * self.legal
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { legal, legal_accepted, other, other_accepted } = self;
        write!(
            f,
            "{legal_accepted} of {legal} legal reorderings accepted, {other_accepted} of {other} other mutations; \
             all {} that were accepted run to the digest",
            legal_accepted + other_accepted
        )
    }
}

/// A sound program with the digest of its step.
struct Base {
    run: Run,
    data: Corpus,
    programs: Vec<Program>,
    digest: String,
}

impl Base {
    fn new(run: usize, layout: &str) -> Result<Self, String> {
        let run = Run::parse(RUNS[run], layout, &sets(layout), 1).map_err(|e| e.to_string())?;
        let data = Corpus::open(&run).map_err(|e| e.to_string())?;
        let programs = program::lower_all(&run, Mode::Train);
        let mut base = Self { run, data, programs, digest: String::new() };
        base.digest = base.digest_of(&base.programs)?;
        Ok(base)
    }

    fn digest_of(&self, programs: &[Program]) -> Result<String, String> {
        let options = FabricOptions { deadline_ms: DEADLINE_MS, ..FabricOptions::default() };
        virtual_ranks::digest(&self.run, programs, 1, &self.data, &options).map_err(|e| e.to_string())
    }

    fn accepts(&self, programs: &[Program]) -> bool {
        let Run { model, grid, layout, train, .. } = &self.run;
        check(programs, model, grid, layout, train.seq, Mode::Train).is_ok()
    }
}

/// Runs `count` mutations from `seed`.
///
/// # Errors
/// The first accepted mutation that does not run to the digest of its base.
pub fn run(count: usize, seed: u64, mut told: impl FnMut(&str, &Tally)) -> Result<Tally, String> {
    let mut random = Random::new(seed);
    let mut all = Tally::default();
    for (i, (run, layout)) in LAYOUTS.iter().enumerate() {
        let base = Base::new(*run, layout)?;
        if i == 0 {
            continue_digest(&base, &mut random)?;
        }
        let mut here = Tally::default();
        let share = (count * (i + 1)) / LAYOUTS.len() - (count * i) / LAYOUTS.len();
        for number in 0..share {
            mutate(&base, number, &mut random, &mut here)
                .map_err(|e| format!("{layout}, mutation {number} of --seed {seed}: {e}"))?;
        }
        told(layout, &here);
        all.legal += here.legal;
        all.legal_accepted += here.legal_accepted;
        all.other += here.other;
        all.other_accepted += here.other_accepted;
    }
    Ok(all)
}

/// The digest tells one order of sums from another: two microbatches more of a cell, in another order.
fn continue_digest(base: &Base, random: &mut Random) -> Result<(), String> {
    let _ = random.upto(2);
    let mut programs = base.programs.clone();
    for instr in programs.iter_mut().flat_map(|p| &mut p.instrs) {
        if let Some(unit) = &mut instr.unit
            && !matches!(instr.op, Op::Close { .. })
        {
            unit.mb = (unit.mb + 1) % base.run.grid.microbatches;
        }
    }
    match base.digest_of(&programs)? == base.digest {
        true => Err("microbatches added in another order have the same digest: it would see nothing".into()),
        false => Ok(()),
    }
}

/// One mutation, judged.
fn mutate(base: &Base, number: usize, random: &mut Random, tally: &mut Tally) -> Result<(), String> {
    // Two of five are reorderings.
    let legal = number % 5 < 2;
    let (what, programs) = loop {
        let mut programs = base.programs.clone();
        let what = if legal { reorder(base, &mut programs, random)? } else { damage(&mut programs, random) };
        // Two equal instructions that change places are no mutation.
        if programs != base.programs {
            break (what, programs);
        }
    };
    let accepted = base.accepts(&programs);
    let [of, accepted_of] = match legal {
        true => [&mut tally.legal, &mut tally.legal_accepted],
        false => [&mut tally.other, &mut tally.other_accepted],
    };
    *of += 1;
    if !accepted {
        return Ok(());
    }
    *accepted_of += 1;
    match base.digest_of(&programs) {
        Ok(digest) if digest == base.digest => Ok(()),
        Ok(digest) => Err(format!("{what}: accepted, and ends with {digest:.12} for {:.12}", base.digest)),
        Err(e) => Err(format!("{what}: accepted, but fails: {e}")),
    }
}

/// A stretch of the lists of one tensor group in another order that keeps what must stay in order.
fn reorder(base: &Base, programs: &mut [Program], random: &mut Random) -> Result<String, String> {
    let layout = &base.run.layout;
    for _ in 0..4096 {
        let at = layout.coords(random.upto(programs.len()) - 1);
        let group: Vec<usize> = (0..layout.tp).map(|tp| layout.rank(Coords { tp, ..at })).collect();
        let len = programs[group[0]].instrs.len();
        let first = random.upto(len) - 1;
        let window = first..len.min(first + 1 + random.upto(WINDOW_MAX));
        let order = extension(layout, &programs[group[0]].instrs[window.clone()], random);
        if order.iter().enumerate().any(|(i, from)| i != *from) {
            for &rank in &group {
                let old = programs[rank].instrs[window.clone()].to_vec();
                for (to, from) in order.iter().enumerate() {
                    programs[rank].instrs[window.start + to] = old[*from];
                }
            }
            return Ok(format!("instructions {window:?} of ranks {group:?} in another order"));
        }
    }
    Err(format!("nothing of {layout} may change places"))
}

/// A random order of `instrs` in which two change places only if they may: at each point one of those that nothing left
/// behind holds back.
fn extension(layout: &Layout, instrs: &[Instr], random: &mut Random) -> Vec<usize> {
    let mut left: Vec<usize> = (0..instrs.len()).collect();
    let mut order = Vec::with_capacity(instrs.len());
    while !left.is_empty() {
        let free: Vec<usize> = (0..left.len())
            .filter(|at| left[..*at].iter().all(|earlier| may_swap(layout, &instrs[*earlier], &instrs[left[*at]])))
            .collect();
        order.push(left.remove(random.one(&free)));
    }
    order
}

/// True if `b`, which follows `a`, may as well come before it (on all ranks of the tensor group at once).
fn may_swap(layout: &Layout, a: &Instr, b: &Instr) -> bool {
    let size = |axis| match axis {
        Axis::Tp => layout.tp,
        Axis::Cp => layout.cp,
        Axis::Dp => layout.holders(),
        Axis::ExpertDp => layout.holders_of(spec::Class::Experts).count,
        Axis::Pp => layout.pp,
        _ => layout.world(),
    };
    // What others may wait for, and what waits for others.
    let gives = |i: &Instr| match i.op {
        Op::Send { .. } | Op::Post { .. } => true,
        Op::Collective { axis, .. } => size(axis) > 1,
        _ => false,
    };
    let waits =
        |i: &Instr| matches!(i.op, Op::Recv { .. }) || matches!(i.op, Op::Collective { axis, .. } if size(axis) > 1);
    // A wait may not move ahead of what somebody may need first; two tensor exchanges swap on all members at once.
    let exchanged = |i: &Instr| matches!(i.op, Op::Collective { axis: Axis::Tp, .. });
    if gives(a) && waits(b) && !(exchanged(a) && exchanged(b)) {
        return false;
    }
    // Rows of one kind on a chunk are on their way once at a time.
    let rows = |i: &Instr| match i.op {
        Op::Post { value, .. } | Op::Collective { value, .. } if value.of_rows() => Some((i.chunk, value)),
        _ => None,
    };
    let posts = |i: &Instr| matches!(i.op, Op::Post { .. });
    if (posts(a) || posts(b)) && rows(a).is_some() && rows(a) == rows(b) {
        return false;
    }
    // The end of a step keeps its order, but for updates of different chunks.
    let unitless = |i: &Instr| i.unit.is_none();
    if unitless(a) || unitless(b) {
        return a.op == Op::Apply && b.op == Op::Apply && a.chunk != b.chunk;
    }
    if a.chunk == b.chunk && a.unit == b.unit {
        return same_unit_may_swap(a, b);
    }
    // Messages of one kind between two chunks arrive in order.
    let channel = |i: &Instr| match i.op {
        Op::Send { value, .. } => Some((true, value, i.chunk)),
        Op::Recv { value, .. } => Some((false, value, i.chunk)),
        _ => None,
    };
    if channel(a).is_some() && channel(a) == channel(b) {
        return false;
    }
    // What a chunk of this rank hands to another.
    if gives(a) && matches!(b.op, Op::Recv { .. }) {
        return false;
    }
    // Parameters are here from their gather to their release, whichever unit brought them.
    let params = |i: &Instr| {
        matches!(i.op, Op::Collective { value: Value::Params(_), .. } | Op::Post { value: Value::Params(_), .. })
    };
    let comes_or_goes = |i: &Instr| matches!(i.op, Op::Release(_)) || params(i);
    if a.chunk == b.chunk && (comes_or_goes(a) || comes_or_goes(b)) {
        return false;
    }
    let loads = |i: &Instr| i.op == Op::Load;
    if (loads(a) || loads(b)) && a.unit == b.unit {
        return false;
    }
    !(a.chunk == b.chunk && adds(a) && adds(b))
}

/// Weight parts of one unit are free of each other and of what follows the norms; a send is free of the last sums.
fn same_unit_may_swap(a: &Instr, b: &Instr) -> bool {
    let weights = |i: &Instr| matches!(i.op, Op::Compute(Pass::BackwardWeight, _));
    let norms = |i: &Instr| matches!(i.op, Op::Collective { value: Value::NormGrads, .. });
    let sends = |i: &Instr| matches!(i.op, Op::Send { value: Value::ActivationGrad, .. });
    let closes = |i: &Instr| matches!(i.op, Op::Close { .. });
    let light = |i: &Instr| weights(i) || norms(i) || sends(i);
    light(a) && light(b) || sends(a) && closes(b)
}

/// It adds to weight gradients, or ends their cell.
fn adds(i: &Instr) -> bool {
    matches!(
        i.op,
        Op::Compute(Pass::Backward | Pass::BackwardWeight, _)
            | Op::Compute(Pass::Forward, Segment::Loss(_))
            | Op::Collective {
                value: Value::NormGrads | Value::CombineGrad(_) | Value::SliceGrads | Value::Grads(_),
                ..
            }
            | Op::Post { value: Value::Grads(_), .. }
            | Op::Close { .. }
    )
}

/// Something that a mistake would do to one list, or to all.
fn damage(programs: &mut [Program], random: &mut Random) -> String {
    let rank = random.upto(programs.len()) - 1;
    let len = programs[rank].instrs.len();
    let (at, other) = (random.upto(len) - 1, random.upto(len) - 1);
    let list = &mut programs[rank].instrs;
    let words = |what: &str, instr: Instr| format!("rank {rank}: `{instr}` {what}");
    match random.upto(10) {
        1 => words("lost", list.remove(at)),
        2 => {
            let instr = list[at];
            list.insert(other, instr);
            words("twice", instr)
        }
        3 => {
            list.swap(at, other);
            words(&format!("changes places with instruction {at}"), list[at])
        }
        4 => {
            let instr = list.remove(at);
            list.insert(other.min(len - 1), instr);
            words(&format!("moved from {at} to {other}"), instr)
        }
        5 => {
            let next = (at + 1).min(len - 1);
            list.swap(at, next);
            words("one earlier", list[at])
        }
        6 => {
            if let Some(unit) = &mut list[at].unit {
                unit.mb ^= 1;
            }
            words("of another microbatch", list[at])
        }
        7 => {
            match &mut list[at].op {
                Op::Send { to: peer, .. } | Op::Recv { from: peer, .. } => *peer ^= 1,
                Op::Collective { bytes, .. } => *bytes += 4,
                _ => list[at].chunk ^= 1,
            }
            words("with another operand", list[at])
        }
        8 => {
            list[at].unit = list[other].unit;
            words(&format!("named as `{}`", list[other]), list[at])
        }
        9 => {
            // The same loss on every rank: nobody waits.
            let kind = list[at].op;
            programs.iter_mut().for_each(|p| p.instrs.retain(|i| i.op != kind));
            format!("every `{kind:?}` lost")
        }
        _ => {
            let span = at.min(other)..at.max(other).min(at.min(other) + WINDOW_MAX);
            let middle = random.upto(span.len().max(1)) - 1;
            list[span.clone()].rotate_left(middle);
            format!("rank {rank}: instructions {span:?} turned by {middle}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_mutations_keeps_both_laws() {
        let tally = run(260, 1, |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(tally.legal + tally.other, 260);
        assert!(tally.holds(), "{tally}");
        assert!(tally.other_accepted * 2 < tally.other, "{tally:?}");
    }
}

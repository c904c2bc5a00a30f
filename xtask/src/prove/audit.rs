//! Whether a run did what its layout claims: counters against the program.
//!
//! Compared, rank by rank and exactly: instructions, units taken backward, the most bytes kept for backward, the bytes of
//! state and of gathered parameters, the bytes sent to mirrors, and those on the axes tp, cp, pp, dp and its shard and replica groups, over
//! all training steps and validation rounds. Not compared: the axis `world`, because besides the ballots of the program it carries the hashes of the digest and of checkpoints; and bytes where ranks lie on several hosts, because
//! there some ranks pass on what others send (the program knows one level).

use std::fmt::Write as _;

use data::{Dataset, Split};
use events::RankReport;
use program::bytes::Sizes;
use program::check::{RankReport as Priced, check};
use program::{ChunkPlan, Instr, Mode, Op, Value};
use spec::{Run, Transport};
use train::corpus::Corpus;

use super::launch::Finished;

/// The axes by the names of their groups, in the order of [`program::check::AXES`].
pub const AXES: [&str; 11] = ["tp", "cp", "pp", "dp", "shard", "replica", "edp", "eshard", "ereplica", "world", "ep"];
/// Axes whose bytes are compared.
pub const COMPARED: usize = 9;
/// The row of what goes to mirrors; the program has it on `world`.
const MIRROR: &str = "mirror send";
/// What the rows that count bytes between hosts end with.
const BETWEEN_HOSTS: &str = "between hosts";

/// Sums over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions run.
    pub instructions: u64,
    /// Units taken backward, once for each chunk and rank.
    pub units: u64,
    /// Exchanges and sends, by axis.
    pub calls: [u64; AXES.len()],
    /// Bytes sent, by axis.
    pub bytes: [u64; AXES.len()],
    /// Bytes sent from host to host, all axes.
    pub between_hosts: u64,
    /// Bytes that the program predicts, by axis (without `world`).
    pub predicted: [u64; AXES.len()],
}

impl Counts {
    /// Both.
    pub fn and(mut self, other: &Self) -> Self {
        self.instructions += other.instructions;
        self.units += other.units;
        self.between_hosts += other.between_hosts;
        for i in 0..AXES.len() {
            self.calls[i] += other.calls[i];
            self.bytes[i] += other.bytes[i];
            self.predicted[i] += other.predicted[i];
        }
        self
    }

    /// Counted over predicted bytes, on the axes that are compared.
    pub fn ratio(&self) -> f64 {
        let sum = |of: &[u64; AXES.len()]| of[..COMPARED].iter().sum::<u64>() as f64;
        sum(&self.bytes) / sum(&self.predicted)
    }

    /// `tp 120x 1.5MB, dp ...`: the axes with any traffic.
    pub fn traffic(&self) -> String {
        let mut out = String::new();
        for (i, axis) in AXES.iter().enumerate().filter(|(i, _)| self.calls[*i] > 0) {
            let _ = write!(out, "{axis} {}x {} ", self.calls[i], size(self.bytes[i]));
        }
        if self.between_hosts > 0 {
            let _ = write!(out, "hosts {} ", size(self.between_hosts));
        }
        out.trim_end().to_string()
    }
}

/// 1536000 as 1.5MB.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes}B"),
        1_000..1_000_000 => format!("{:.1}kB", bytes as f64 / 1e3),
        _ => format!("{:.1}MB", bytes as f64 / 1e6),
    }
}

/// What one rank sent.
#[derive(Debug, Default)]
struct Sent {
    calls: [u64; AXES.len()],
    bytes: [u64; AXES.len()],
    between_hosts: u64,
}

fn sent(report: &RankReport) -> Sent {
    let mut sent = Sent::default();
    for (name, calls, bytes) in &report.traffic {
        let (group, operation) = name.split_once(' ').unwrap_or((name, ""));
        if operation.ends_with(BETWEEN_HOSTS) {
            sent.between_hosts += bytes;
        } else if let Some(axis) = AXES.iter().position(|axis| *axis == group) {
            // A receive is the other end of a send.
            sent.calls[axis] += if operation == "recv" { 0 } else { *calls };
            sent.bytes[axis] += bytes;
        }
    }
    sent
}

/// Validation rounds after steps `after + 1` to `step`, over all held-out sets.
fn rounds(run: &Run, after: u64, step: u64) -> Result<u64, String> {
    let data = Corpus::open(run).map_err(|e| e.to_string())?;
    let batch = run.grid.batch() as u64;
    let of_set =
        |set: &Dataset| (run.train.eval_sequences as u64).min(set.sequences(Split::Validation)).div_ceil(batch);
    let each: u64 = std::iter::once(&data.main).chain(data.sets.iter().map(|(_, set)| set)).map(of_set).sum();
    let every = run.train.eval_every;
    let due = |s: &u64| (every > 0 && s.is_multiple_of(every)) || *s == run.train.steps;
    Ok((after + 1..=step).filter(due).count() as u64 * each)
}

/// The program's price of one pass, by rank.
fn price(run: &Run, mode: Mode) -> Result<Vec<Priced>, String> {
    let programs = program::lower_all(run, mode);
    let report = check(&programs, &run.model, &run.grid, &run.layout, run.train.seq, mode);
    report.map(|r| r.ranks).map_err(|violations| format!("the program is refused: {}", violations[0]))
}

/// The counters of `finished`, which ran steps `after + 1` and on, and everything that is wrong with them, or with the
/// choice of its layout: every axis that it has is used.
pub fn audit(run: &Run, finished: &Finished, after: u64) -> Result<(Counts, Vec<String>), String> {
    let (counts, mut wrong) = counted(run, finished, after)?;
    if finished.ranks.len() == run.layout.world() {
        let ranks = finished.ranks.iter().enumerate();
        wrong.extend(ranks.flat_map(|(rank, report)| unclaimed(run, rank, &sent(report))));
    }
    if run.layout.zero > 0 && run.layout.holders() == 1 {
        wrong.push(format!("zero = {} with one rank on dp shards nothing", run.layout.zero));
    }
    Ok((counts, wrong))
}

/// The counters of `finished`, and what of them is not as its program has it.
pub fn counted(run: &Run, finished: &Finished, after: u64) -> Result<(Counts, Vec<String>), String> {
    let mut wrong = Vec::new();
    let layout = &run.layout;
    let (ranks, world) = (&finished.ranks, layout.world());
    if ranks.len() != world {
        wrong.push(format!("{} ranks reported, the layout has {world}", ranks.len()));
        return Ok((Counts::default(), wrong));
    }
    let processes = if layout.transport == Transport::Threads { 1 } else { world };
    if finished.processes != processes {
        wrong.push(format!("{} processes, {} has {processes}", finished.processes, layout.transport));
    }
    if finished.layout != layout.to_string() {
        wrong.push(format!("ran as `{}`, asked for `{layout}`", finished.layout));
    }
    let (train, eval) = (price(run, Mode::Train)?, price(run, Mode::Eval)?);
    let (steps, rounds) = (finished.step - after, rounds(run, after, finished.step)?);
    let mut counts = Counts::default();
    for (rank, report) in ranks.iter().enumerate() {
        let sent = sent(report);
        let expect = |train: u64, eval: u64| steps * train + rounds * eval;
        let mut differ = |what: &str, counted: u64, predicted: u64| {
            if counted != predicted {
                let ratio = counted as f64 / predicted as f64;
                wrong.push(format!("rank {rank} {what}: counted {counted}, program {predicted} ({ratio:.4}x)"));
            }
        };
        let length = expect(train[rank].instructions as u64, eval[rank].instructions as u64);
        differ("instructions", report.instructions, length);
        differ("units", report.units, steps * units(run, rank));
        // How many rows travel to the experts of a rank is up to the routers.
        if layout.group == 1 {
            differ("bytes kept for backward", report.peak_kept, train[rank].peak_kept);
        }
        differ("bytes of state", report.state_bytes, state_bytes(run, rank));
        let mirrored = report.traffic.iter().filter(|(name, ..)| name == MIRROR).map(|(.., bytes)| bytes).sum();
        differ("bytes to the mirror", mirrored, steps * mirror_bytes(run, rank));
        differ("bytes of gathered parameters", report.gathered_bytes, gathered_bytes(run, rank));
        for (axis, name) in AXES.into_iter().enumerate().take(COMPARED) {
            let bytes = expect(train[rank].bytes[axis], eval[rank].bytes[axis]);
            if layout.ranks_per_host.is_none() {
                differ(&format!("bytes on {name}"), sent.bytes[axis], bytes);
            }
            counts.predicted[axis] += bytes;
        }
        counts = counts.and(&Counts {
            instructions: report.instructions,
            units: report.units,
            calls: sent.calls,
            bytes: sent.bytes,
            between_hosts: sent.between_hosts,
            predicted: [0; AXES.len()],
        });
    }
    if layout.ranks_per_host.is_some_and(|n| n < world) && counts.between_hosts == 0 {
        wrong.push("several hosts, but no byte between them".into());
    }
    Ok((counts, wrong))
}

/// The formula of the state of `rank`: 16 bytes (parameter, two moments, summed gradient) for each element that it owns,
/// and with zero below 3 also 4 for each parameter of the others of its shard group.
fn state_bytes(run: &Run, rank: usize) -> u64 {
    let (layout, at) = (&run.layout, run.layout.coords(rank));
    let plans = layout.chunks_of(at.pp).map(|chunk| ChunkPlan::new(&run.model, &run.grid, layout, chunk, at));
    let buckets = plans.flat_map(|plan| plan.buckets).filter(|bucket| bucket.parameters);
    let of = |bucket: program::buckets::BucketPlan| {
        let owned = bucket.owned(at).len();
        4 * (3 * owned + if layout.zero == 3 { owned } else { bucket.at.len() })
    };
    buckets.map(of).sum::<usize>() as u64
}

/// Bytes that `rank` sends to its mirror in a step.
fn mirror_bytes(run: &Run, rank: usize) -> u64 {
    let bytes = |instr: &Instr| match instr.op {
        Op::Collective { value: Value::MirrorGrads, bytes, .. } => bytes,
        _ => 0,
    };
    program::lower(run, rank, Mode::Train).instrs.iter().map(bytes).sum()
}

/// Most bytes of parameters that the lists of `rank` have gathered at once, summed over its chunks.
fn gathered_bytes(run: &Run, rank: usize) -> u64 {
    if run.layout.zero < 3 {
        return 0;
    }
    let sizes = Sizes::new(&run.model, &run.grid, &run.layout, run.train.seq);
    let lists = [Mode::Train, Mode::Eval].map(|mode| program::lower(run, rank, mode).instrs);
    let peak = |list: &Vec<Instr>, chunk: usize| {
        let (mut now, mut most, mut posted) = (0, 0, Vec::new());
        for instr in list.iter().filter(|instr| instr.chunk == chunk) {
            match instr.op {
                Op::Post { value: Value::Params(bucket), .. } => {
                    now += sizes.whole(chunk, bucket);
                    posted.push(bucket);
                }
                Op::Collective { value: Value::Params(bucket), .. } => match posted.iter().position(|b| *b == bucket) {
                    Some(at) => drop(posted.swap_remove(at)),
                    None => now += sizes.whole(chunk, bucket),
                },
                Op::Release(bucket) => now -= sizes.whole(chunk, bucket),
                _ => {}
            }
            most = most.max(now);
        }
        most
    };
    let chunks = run.layout.chunks_of(run.layout.coords(rank).pp);
    chunks.map(|chunk| lists.iter().map(|list| peak(list, chunk)).max().unwrap_or(0)).sum()
}

/// Units that `rank` takes backward in a step, once for each chunk.
fn units(run: &Run, rank: usize) -> u64 {
    let ends = |op: &Op| matches!(op, Op::Collective { value: Value::NormGrads, .. });
    program::lower(run, rank, Mode::Train).instrs.iter().filter(|i| ends(&i.op)).count() as u64
}

/// Axes that the layout has and on which `rank` sent nothing. Some rank may own nothing of a small model, so what is
/// gathered from owners is asked of the first.
fn unclaimed(run: &Run, rank: usize, sent: &Sent) -> Vec<String> {
    let layout = &run.layout;
    let replicas = if layout.zero > 0 { layout.replicas() } else { 1 };
    let experts = layout.holders_of(spec::Class::Experts);
    let owners =
        if rank == 0 { [("shard", layout.shard), ("replica", replicas)] } else { [("shard", 1), ("replica", 1)] };
    let claims = [
        ("tp", layout.tp),
        ("cp", layout.cp),
        ("pp", layout.pp),
        ("dp", layout.holders()),
        ("world", layout.world()),
        ("ep", layout.group),
        ("edp", if run.model.moe.is_some() { experts.count } else { 1 }),
    ];
    let idle = |(axis, ranks): &(&str, usize)| {
        let i = AXES.iter().position(|a| a == axis).expect("an axis");
        *ranks > 1 && (sent.bytes[i] == 0 || sent.calls[i] == 0)
    };
    let claims = claims.into_iter().chain(owners).filter(idle);
    claims.map(|(axis, n)| format!("rank {rank} sent nothing on {axis} = {n}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prove::{grids, rows};

    /// A run that sent exactly what its program says.
    fn exact(run: &Run) -> Finished {
        let (train, eval) = (price(run, Mode::Train).unwrap(), price(run, Mode::Eval).unwrap());
        let rounds = rounds(run, 0, run.train.steps).unwrap();
        let ranks = (0..run.layout.world()).map(|rank| {
            let sum = |train: u64, eval: u64| run.train.steps * train + rounds * eval;
            let row = |(i, name): (usize, String)| (name, 1, sum(train[rank].bytes[i], eval[rank].bytes[i]));
            let operations = [
                "all_gather",
                "all_gather",
                "send",
                "reduce_scatter",
                "all_gather",
                "all_gather",
                "reduce_scatter",
                "all_gather",
                "all_gather",
                "all_gather_bytes",
            ];
            let names: Vec<String> = AXES.iter().zip(operations).map(|(a, o)| format!("{a} {o}")).collect();
            RankReport {
                rank,
                instructions: sum(train[rank].instructions as u64, eval[rank].instructions as u64),
                units: run.train.steps * units(run, rank),
                peak_kept: train[rank].peak_kept,
                state_bytes: state_bytes(run, rank),
                gathered_bytes: gathered_bytes(run, rank),
                traffic: (names.into_iter().enumerate().map(row))
                    .chain([(MIRROR.into(), 1, run.train.steps * mirror_bytes(run, rank))])
                    .collect(),
                ..RankReport::default()
            }
        });
        Finished {
            digest: String::new(),
            step: run.train.steps,
            ranks: ranks.collect(),
            processes: run.layout.world(),
            layout: run.layout.to_string(),
            curve: Vec::new(),
        }
    }

    #[test]
    fn exact_counters_pass_and_any_difference_is_named() {
        let run = grids::parse(0, &rows::sets("dp=2 tp=2 pp=2 zero=1")).unwrap();
        let good = exact(&run);
        let (counts, wrong) = audit(&run, &good, 0).unwrap();
        assert_eq!(wrong, [""; 0]);
        assert_eq!(counts.bytes[..COMPARED], counts.predicted[..COMPARED]);
        assert!(counts.traffic().starts_with("tp 8x "), "{}", counts.traffic());

        let broken = |change: fn(&mut Finished)| {
            let mut bad = good.clone();
            change(&mut bad);
            audit(&run, &bad, 0).unwrap().1.join("\n")
        };
        assert!(broken(|f| f.ranks[3].traffic[0].2 += 4).contains("rank 3 bytes on tp"));
        assert!(broken(|f| f.ranks[4].traffic[10].2 -= 4).contains("rank 4 bytes to the mirror"));
        assert!(broken(|f| f.ranks[1].traffic[2].2 = 0).contains("rank 1 sent nothing on pp = 2"));
        assert!(broken(|f| f.ranks[0].instructions -= 1).contains("rank 0 instructions"));
        assert!(broken(|f| f.ranks[2].units += 1).contains("rank 2 units"));
        assert!(broken(|f| f.ranks[5].peak_kept /= 2).contains("rank 5 bytes kept for backward"));
        assert!(broken(|f| f.processes = 1).contains("1 processes, shm has 8"));
        assert!(broken(|f| f.ranks[0].traffic[4].2 = 0).contains("rank 0 sent nothing on shard = "));
        assert!(broken(|f| drop(f.ranks.pop())).contains("7 ranks reported"));
    }
}

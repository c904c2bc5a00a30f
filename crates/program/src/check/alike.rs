//! Many ranks at the price of few: data positions that differ only in their coordinate are proved once.
//!
//! **The argument.** Let two data positions be *alike* if the lists of their ranks are equal, list by list, after ranks are
//! renamed by the distance between the positions and data cells by the distance between their first cells, and but for
//! the sizes of exchanges that span data positions (`Dp`, `Shard`, `Replica`, those of experts, `World`). Ranks are numbered with the data
//! axis outermost, so every tensor and context group, pipeline and message lies inside of one position; only those groups
//! span positions, and they hold the ranks of the same places of every position. (With shard groups that have replicas
//! this does not hold: then every list is proved itself.)
//!
//! 1. What a list must be by itself is said in terms of its own cells and ranks ([`super::order`]). Renaming keeps it, so a
//!    list is sound if the one that it was renamed from is, but for those sizes: they are compared with the law here.
//! 2. Whether all lists together end does not depend on the order in which ranks are looked at ([`super::run`]). Look at
//!    alike positions in step: they stand at the same instruction at all times. A message or an exchange inside of a
//!    position happens in one of them when it happens in all. An exchange that spans positions happens when all members
//!    have come, which is when one member of each class of alike positions has. So all lists end if and only if those of one
//!    position per class do, with groups of one member per class; and every clock is that of its renamed rank.
//!
//! An exchange over `Ep` spans neighbouring positions, and those of experts (`ExpertDp`, `ExpertShard`, `ExpertReplica`)
//! every so manieth one where positions share experts. If all positions are alike the members of all of them come together,
//! so one stands for them; if not, all lists are proved.
//!
//! Nothing is assumed of how the lists came about: every list is made and compared. A position that is like no other (more
//! data cells than its neighbours, say) is a class of its own and is proved itself.

use spec::{Coords, Grid, Layout, Model};

use super::report::{AXES, RankReport, Report};
use super::violation::{Place, Violation, Wait};
use super::{law, order, run};
use crate::bytes::Sizes;
use crate::instr::{Axis, Instr, Mode, Op, Program, Value};
use crate::kept::Kept;
use crate::placement::STATES;

/// Proves the lists that `lower` makes of every rank, as [`super::check`] would.
///
/// # Errors
/// The violations of the positions that were proved themselves, and sizes that are wrong anywhere.
pub fn check_alike(
    model: &Model,
    grid: &Grid,
    layout: &Layout,
    seq: usize,
    mode: Mode,
    lower: impl Fn(usize) -> Program,
) -> Result<Report, Vec<Violation>> {
    if layout.replicas() > 1 && layout.shard > 1 {
        let programs: Vec<Program> = (0..layout.world()).map(lower).collect();
        return super::check(&programs, model, grid, layout, seq, mode);
    }
    let sizes = Sizes::new(model, grid, layout, seq);
    let line = layout.world() / layout.dp;
    let mut violations = Vec::new();
    // The first position of each class with its lists, and the class of every position.
    let mut firsts: Vec<(usize, Vec<Program>)> = Vec::new();
    let mut class_of = Vec::with_capacity(layout.dp);
    for dp in 0..layout.dp {
        let like = |first: usize| Renaming {
            ranks: (first * line, dp * line),
            cells: (layout.cells[first].start, layout.cells[dp].start),
        };
        let mut lists: Vec<Program> = Vec::with_capacity(line);
        // Most positions are like the first of some class: each list is compared as it is made, and let go.
        let candidate = firsts.iter().position(|(first, _)| layout.cells[*first].len() == layout.cells[dp].len());
        let mut alike = candidate;
        for i in 0..line {
            let list = lower(dp * line + i);
            if let Some(class) = alike {
                let (first, of) = &firsts[class];
                if like(*first).equal(&of[i], &list) {
                    spanning_sizes(&sizes, layout, &list, &mut violations);
                    continue;
                }
                alike = None;
                lists = (dp * line..dp * line + i).map(&lower).collect();
            }
            lists.push(list);
        }
        class_of.push(alike.unwrap_or_else(|| {
            firsts.push((dp, lists));
            firsts.len() - 1
        }));
    }

    if layout.group > 1 && firsts.len() > 1 {
        // Neighbours of one group are not alike: what they exchange is looked at in full.
        let all: Vec<Program> = (0..layout.world()).map(&lower).collect();
        return super::check(&all, model, grid, layout, seq, mode);
    }

    let laws = law::Laws::new(model, &sizes, layout, mode);
    let sums = law::Sums::new(grid, layout);
    let step = order::Step { model, grid, layout, mode, sizes: &sizes, laws: &laws, sums };
    violations.extend(firsts.iter().flat_map(|(_, lists)| lists).flat_map(|p| order::check(&step, p)));

    // One position per class, renamed to stand side by side.
    let few = Layout {
        dp: firsts.len(),
        shard: if layout.replicas() == 1 { firsts.len() * layout.cp } else { 1 },
        group: 1,
        cells: firsts.iter().map(|(first, _)| layout.cells[*first].clone()).collect(),
        ..layout.clone()
    };
    let renamed: Vec<Program> = firsts
        .iter()
        .enumerate()
        .flat_map(|(class, (first, lists))| {
            let renaming = Renaming { ranks: (first * line, class * line), cells: (0, 0) };
            lists.iter().map(move |list| renaming.of(list))
        })
        .collect();
    let kept = Kept::new(model, grid, layout, seq);
    let mut outcome = run::run(&renamed, &few, mode, &kept);
    super::shelve(&mut outcome.ranks, &renamed, &few, mode, &kept);
    let back = |rank: usize| match firsts.get(rank / line) {
        Some((first, _)) => first * line + rank % line,
        None => rank,
    };
    let place = |p: Place| {
        let (_, lists) = &firsts[p.rank / line];
        Place::of(&lists[p.rank % line], p.at)
    };
    violations.extend(outcome.violations.into_iter().map(|v| renamed_back(v, &back, &place)));
    if !violations.is_empty() {
        return Err(violations);
    }
    let of = |rank: usize| {
        let class = class_of[rank / line];
        let report = &outcome.ranks[class * line + rank % line];
        let mut own = RankReport { rank, ..report.clone() };
        own.spans.iter_mut().for_each(|span| {
            if let Some(unit) = &mut span.unit {
                unit.cell += layout.cells[rank / line].start;
                unit.cell -= few.cells[class].start;
            }
        });
        respan(&sizes, layout, &mut own, &firsts[class].1[rank % line]);
        own
    };
    Ok(Report::new((0..layout.world()).map(of).collect(), layout))
}

/// New names for the ranks and cells of a data position: from, to.
#[derive(Clone, Copy)]
struct Renaming {
    ranks: (usize, usize),
    cells: (usize, usize),
}

impl Renaming {
    fn rank(&self, rank: usize) -> usize {
        (rank + self.ranks.1).wrapping_sub(self.ranks.0)
    }

    fn cell(&self, cell: usize) -> usize {
        (cell + self.cells.1).wrapping_sub(self.cells.0)
    }

    fn instr(&self, instr: &Instr) -> Instr {
        let op = match instr.op {
            Op::Send { value, to, bytes } => Op::Send { value, to: self.rank(to), bytes },
            Op::Recv { value, from, bytes } => Op::Recv { value, from: self.rank(from), bytes },
            Op::Close { cell, bucket } => Op::Close { cell: self.cell(cell), bucket },
            other => other,
        };
        let unit = instr.unit.map(|unit| spec::Unit { cell: self.cell(unit.cell), ..unit });
        Instr { op, unit, ..*instr }
    }

    fn of(&self, list: &Program) -> Program {
        Program { rank: self.rank(list.rank), instrs: list.instrs.iter().map(|i| self.instr(i)).collect() }
    }

    /// True if `list` is `from` renamed, but for the sizes of exchanges that span data positions.
    fn equal(&self, from: &Program, list: &Program) -> bool {
        let same = |a: &Instr, b: &Instr| {
            let a = self.instr(a);
            match (a.op, b.op) {
                (
                    Op::Collective { exchange: e, value: v, axis: x, .. },
                    Op::Collective { exchange: f, value: w, axis: y, .. },
                ) if spans(x) => (e, v, x) == (f, w, y) && (a.chunk, a.unit) == (b.chunk, b.unit),
                _ => a == *b,
            }
        };
        self.rank(from.rank) == list.rank
            && from.instrs.len() == list.instrs.len()
            && from.instrs.iter().zip(&list.instrs).all(|(a, b)| same(a, b))
    }
}

/// True for the axes whose groups have members in several data positions.
fn spans(axis: Axis) -> bool {
    use Axis::{Dp, ExpertDp, ExpertReplica, ExpertShard, Replica, Shard, World};
    matches!(axis, Dp | Shard | Replica | ExpertDp | ExpertShard | ExpertReplica | World)
}

/// The size by the law of an exchange that spans data positions.
fn size(sizes: &Sizes, at: Coords, instr: &Instr) -> Option<u64> {
    match instr.op {
        Op::Collective { value: Value::MirrorGrads, .. } => Some(sizes.mirror_grads(at)),
        Op::Collective { value: Value::Grads(bucket), exchange, .. } => {
            Some(sizes.grads(instr.chunk, bucket, at, exchange))
        }
        Op::Collective { value: Value::Params(bucket), .. } => Some(sizes.params(instr.chunk, bucket, at)),
        _ => None,
    }
}

/// Compares the sizes of a list's exchanges over data positions with the law.
fn spanning_sizes(sizes: &Sizes, layout: &Layout, list: &Program, violations: &mut Vec<Violation>) {
    let at = layout.coords(list.rank);
    let train = list.instrs.iter().rev().any(|i| i.op == Op::Vote);
    for (index, instr) in list.instrs.iter().enumerate() {
        let Op::Collective { bytes, value, axis, .. } = instr.op else { continue };
        if !spans(axis) {
            continue;
        }
        let want = match value {
            Value::Ballot if train => Some(sizes.ballot(at)),
            Value::Ballot => Some(sizes.ballot_eval(at)),
            _ => size(sizes, at, instr),
        };
        if let Some(want) = want.filter(|want| *want != bytes) {
            violations.push(Violation::Bytes { place: Place::of(list, index), want });
        }
    }
}

/// Puts the rank's own sizes over data positions in place of those of the list that stood for it.
fn respan(sizes: &Sizes, layout: &Layout, report: &mut RankReport, list: &Program) {
    let (at, stood) = (layout.coords(report.rank), layout.coords(list.rank));
    if at.dp == stood.dp {
        return;
    }
    let index = |axis: Axis| AXES.iter().position(|a| *a == axis);
    for instr in &list.instrs {
        if let (Op::Collective { axis, value, bytes, .. }, Some(own)) = (instr.op, size(sizes, at, instr))
            && let Some(axis) = index(axis)
        {
            report.bytes[axis] = report.bytes[axis] + own - bytes;
            if let Some(state) = STATES.iter().position(|s| value.state() == Some(*s)) {
                report.moved[state] = report.moved[state] + own - bytes;
            }
        }
    }
    let votes = list.instrs.iter().rev().any(|i| i.op == Op::Vote);
    let ballot = |at| if votes { sizes.ballot(at) } else { sizes.ballot_eval(at) };
    if let Some(axis) = index(Axis::World) {
        report.bytes[axis] = report.bytes[axis] + ballot(at) - ballot(stood);
    }
}

/// A violation in the names of all ranks.
fn renamed_back(v: Violation, rank: &impl Fn(usize) -> usize, place: &impl Fn(Place) -> Place) -> Violation {
    match v {
        Violation::Crossed { receiver, sender } => {
            Violation::Crossed { receiver: place(receiver), sender: place(sender) }
        }
        Violation::Mismatch { place: p, other } => Violation::Mismatch { place: place(p), other: place(other) },
        Violation::Unposted { taker, other } => Violation::Unposted { taker: place(taker), other: place(other) },
        Violation::Unreceived { place: p } => Violation::Unreceived { place: place(p) },
        Violation::Deadlock { waits, cycle, ended } => Violation::Deadlock {
            waits: waits
                .into_iter()
                .map(|w| Wait { place: place(w.place), on: w.on.into_iter().map(rank).collect() })
                .collect(),
            cycle: cycle.into_iter().map(rank).collect(),
            ended: ended.map(rank),
        },
        other => other,
    }
}

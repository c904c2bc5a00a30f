//! All lists at once, symbolically: sends and posts never wait, receives take messages of one kind
//! from one chunk in order, a collective ends when all members are in it. (One that was posted may end as soon as all
//! have posted, which is no later: who waits here for ever is found, and whoever can go on here can go on there.)
//!
//! What is held back by what does not depend on the order in which ranks are looked at, so
//! one run decides. Clocks ride along: work takes ticks, exchanges none.

use std::collections::{HashMap, HashSet, VecDeque};

use spec::Layout;

use super::report::{AXES, RankReport, Span, TICKS_PER_LAYER};
use super::violation::{Place, Violation, Wait};
use crate::instr::{Axis, Instr, Mode, Op, Pass, Program, Segment, Value};
use crate::kept::Kept;

/// Ranks that a waiting rank is reported to wait for.
const WAITS_ON_MAX: usize = 8;

/// How the lists came out.
pub(super) struct Outcome {
    pub violations: Vec<Violation>,
    pub ranks: Vec<RankReport>,
}

/// Runs `programs` to the end or until nobody can go on.
pub(super) fn run(programs: &[Program], layout: &Layout, mode: Mode, sizes: &Kept) -> Outcome {
    let world = layout.world();
    let mut run = Run {
        programs,
        layout,
        mode,
        at: vec![0; world],
        clocks: vec![0; world],
        parked: vec![false; world],
        alive: vec![0; world],
        kept: vec![0; world],
        sizes,
        ranks: (0..world).map(|rank| RankReport { rank, ..RankReport::default() }).collect(),
        groups: AXES.map(|_| vec![Meeting::default(); world]),
        channels: HashMap::new(),
        posted: HashSet::new(),
        ready: (0..world).rev().collect(),
        violations: Vec::new(),
    };
    while let Some(rank) = run.ready.pop() {
        while run.step(rank) {}
    }
    run.close();
    Outcome { violations: run.violations, ranks: run.ranks }
}

/// Members that have come to a collective of one group.
#[derive(Clone, Default)]
struct Meeting {
    arrived: Vec<usize>,
    /// They take what they have posted.
    posted: bool,
    clock: u64,
}

/// Messages that arrive in the order in which they are sent: from, to, what, and the chunk that sends.
type Channel = (usize, usize, Value, usize);

/// A message on its way: the index of its send, and when.
type Letter = (usize, u64);

struct Run<'a> {
    programs: &'a [Program],
    layout: &'a Layout,
    mode: Mode,
    at: Vec<usize>,
    clocks: Vec<u64>,
    /// Ranks that are in a collective whose other members have yet to come, or in the wrong one for ever.
    parked: Vec<bool>,
    /// Activations alive, in layers x microbatches.
    alive: Vec<usize>,
    /// Bytes kept for backward.
    kept: Vec<i64>,
    sizes: &'a Kept,
    ranks: Vec<RankReport>,
    /// By axis and the first rank of the group.
    groups: [Vec<Meeting>; AXES.len()],
    /// By sender, receiver, kind and the sender's chunk.
    channels: HashMap<Channel, VecDeque<Letter>>,
    /// What was posted and not taken: rank, chunk, what.
    posted: HashSet<(usize, usize, Value)>,
    /// Ranks that may go on; the last to come first, which keeps to one group while it can go on.
    ready: Vec<usize>,
    violations: Vec<Violation>,
}

fn axis_index(axis: Axis) -> usize {
    AXES.iter().position(|a| *a == axis).expect("every axis is listed")
}

/// Two instructions that are one collective. Over the data axis every member brings another cell.
fn same_collective(a: &Instr, b: &Instr) -> bool {
    match (a.op, b.op) {
        (
            Op::Collective { exchange: e, value: v, axis: x, .. },
            Op::Collective { exchange: f, value: w, axis: y, .. },
        ) => {
            let units = match x {
                // The ranks of a group name its unit by different cells, and have one group each.
                Axis::Dp
                | Axis::Shard
                | Axis::Replica
                | Axis::ExpertDp
                | Axis::ExpertShard
                | Axis::ExpertReplica
                | Axis::Ep => a.unit.map(|u| u.mb) == b.unit.map(|u| u.mb),
                _ => a.unit == b.unit,
            };
            (e, v, x) == (f, w, y) && a.chunk == b.chunk && units
        }
        _ => false,
    }
}

impl Run<'_> {
    /// One instruction of `rank`; false if it cannot go on now.
    fn step(&mut self, rank: usize) -> bool {
        let at = self.at[rank];
        let Some(&instr) = self.programs[rank].instrs.get(at) else { return false };
        match instr.op {
            Op::Compute(pass, segment) => {
                self.compute(rank, &instr, pass, segment);
                self.keep(rank, &instr);
            }
            Op::Send { value, to, bytes } => {
                let report = &mut self.ranks[rank];
                report.exchanges[axis_index(Axis::Pp)] += u64::from(to != rank);
                report.bytes[axis_index(Axis::Pp)] += bytes;
                report.moves(value, bytes);
                let channel = (rank, to, value, instr.chunk);
                self.channels.entry(channel).or_default().push_back((at, self.clocks[rank]));
                if to < self.at.len() && to != rank && self.waits_for(to, channel) {
                    self.ready.push(to);
                }
            }
            Op::Recv { value, from, .. } => {
                let channel = (from, rank, value, self.sending_chunk(value, instr.chunk));
                let Some(letter) = self.channels.get_mut(&channel).and_then(VecDeque::pop_front) else {
                    return false;
                };
                self.receive(rank, from, letter);
            }
            Op::Collective { axis, value, bytes, .. } => return self.meet(rank, &instr, axis, value, bytes),
            Op::Drop(_) => {
                self.alive[rank] = self.alive[rank].saturating_sub(1);
                self.keep(rank, &instr);
            }
            Op::Post { value, .. } => {
                self.posted.insert((rank, instr.chunk, value));
            }
            Op::Load | Op::Close { .. } | Op::Release(_) | Op::Vote | Op::Apply => {}
        }
        self.at[rank] += 1;
        true
    }

    /// The chunk at the other end of a receive on `chunk`.
    fn sending_chunk(&self, value: Value, chunk: usize) -> usize {
        match value {
            Value::Activation => chunk.wrapping_sub(1),
            Value::ActivationGrad => chunk + 1,
            // The other use of a tied embedding.
            _ => self.layout.chunks() - 1 - chunk.min(self.layout.chunks() - 1),
        }
    }

    fn waits_for(&self, rank: usize, channel: Channel) -> bool {
        let Some(Instr { op: Op::Recv { value, from, .. }, chunk, .. }) = self.programs[rank].instrs.get(self.at[rank])
        else {
            return false;
        };
        (*from, rank, *value, self.sending_chunk(*value, *chunk)) == channel
    }

    /// What the instruction keeps for backward, or lets go.
    fn keep(&mut self, rank: usize, instr: &Instr) {
        if self.mode == Mode::Train {
            self.kept[rank] += self.sizes.change(instr);
            let report = &mut self.ranks[rank];
            report.peak_kept = report.peak_kept.max(self.kept[rank].max(0) as u64);
        }
    }

    fn compute(&mut self, rank: usize, instr: &Instr, pass: Pass, segment: Segment) {
        if self.mode == Mode::Train && matches!(segment, Segment::Attn(_)) {
            // A layer's share lives from its (last) forward to the last of its backward.
            let (alive, report) = (&mut self.alive[rank], &mut self.ranks[rank]);
            match pass {
                Pass::Forward | Pass::Recompute | Pass::RecomputeKept => *alive += 1,
                Pass::Backward | Pass::BackwardWeight => *alive = alive.saturating_sub(1),
                Pass::BackwardInput => {}
            }
            report.peak_activations = report.peak_activations.max(*alive);
        }
        if !matches!(segment, Segment::Attn(_) | Segment::Mlp(_) | Segment::Experts(_)) {
            return;
        }
        let ticks = TICKS_PER_LAYER / 2 * if pass == Pass::Backward { 2 } else { 1 };
        let start = self.clocks[rank];
        let end = start + ticks;
        self.clocks[rank] = end;
        let pass = if pass == Pass::RecomputeKept { Pass::Recompute } else { pass };
        let report = &mut self.ranks[rank];
        report.busy += ticks;
        let Instr { chunk, unit, .. } = *instr;
        // Where exchanges run beside the weight parts of one backward, it is shown in one piece.
        let whole = self.layout.overlaps_tp() && matches!(pass, Pass::BackwardInput | Pass::BackwardWeight);
        match report.spans.last_mut() {
            Some(s)
                if whole
                    && matches!(
                        (s.pass, pass),
                        (Pass::BackwardInput | Pass::Backward, Pass::BackwardWeight) | (Pass::Backward, _)
                    )
                    && (s.chunk, s.unit, s.end) == (chunk, unit, start) =>
            {
                (s.pass, s.end) = (Pass::Backward, end);
            }
            Some(s) if (s.pass, s.chunk, s.unit, s.end) == (pass, chunk, unit, start) => s.end = end,
            _ => report.spans.push(Span { pass, chunk, unit, start, end }),
        }
    }

    fn receive(&mut self, rank: usize, from: usize, (sent, clock): Letter) {
        self.clocks[rank] = self.clocks[rank].max(clock);
        let receiver = Place::of(&self.programs[rank], self.at[rank]);
        let sender = Place::of(&self.programs[from], sent);
        let (here, there) = (receiver.instr, sender.instr);
        let (Op::Recv { value, bytes, .. }, Op::Send { bytes: sent, .. }) = (here.op, there.op) else { return };
        let neighbours = match value {
            Value::Activation => here.chunk == there.chunk + 1,
            Value::ActivationGrad => here.chunk + 1 == there.chunk,
            _ => here.chunk != there.chunk,
        };
        if here.unit != there.unit || !neighbours || bytes != sent {
            self.violations.push(Violation::Crossed { receiver, sender });
        }
    }

    fn meet(&mut self, rank: usize, instr: &Instr, axis: Axis, value: Value, bytes: u64) -> bool {
        if self.parked[rank] {
            return false;
        }
        let index = axis_index(axis);
        let (group, size) = (axis.first(self.layout, rank), axis.size(self.layout));
        let posted = self.posted.contains(&(rank, instr.chunk, value));
        let meeting = &mut self.groups[index][group];
        if let Some(&first) = meeting.arrived.first() {
            let other = Place::of(&self.programs[first], self.at[first]);
            if !same_collective(instr, &other.instr) {
                let place = Place::of(&self.programs[rank], self.at[rank]);
                self.violations.push(Violation::Mismatch { place, other });
                self.parked[rank] = true;
                return false;
            }
            if posted != meeting.posted {
                let place = Place::of(&self.programs[rank], self.at[rank]);
                let (taker, other) = if posted { (place, other) } else { (other, place) };
                self.violations.push(Violation::Unposted { taker, other });
            }
        }
        self.posted.remove(&(rank, instr.chunk, value));
        meeting.posted = posted;
        meeting.arrived.push(rank);
        meeting.clock = meeting.clock.max(self.clocks[rank]);
        let report = &mut self.ranks[rank];
        report.exchanges[index] += 1;
        report.bytes[index] += bytes;
        report.moves(value, bytes);
        if meeting.arrived.len() < size {
            self.parked[rank] = true;
            return false;
        }
        let clock = std::mem::take(&mut meeting.clock);
        for member in meeting.arrived.drain(..) {
            self.clocks[member] = clock;
            self.at[member] += 1;
            self.parked[member] = false;
            if member != rank {
                self.ready.push(member);
            }
        }
        true
    }

    /// After the run: who waits, and what was never received.
    fn close(&mut self) {
        for report in &mut self.ranks {
            report.instructions = self.programs[report.rank].instrs.len();
        }
        if self.violations.iter().any(|v| matches!(v, Violation::Mismatch { .. })) {
            return;
        }
        let waits: Vec<Wait> = (0..self.at.len()).filter_map(|rank| self.wait_of(rank)).collect();
        if !waits.is_empty() {
            let (cycle, ended) = self.chain(waits[0].place.rank);
            self.violations.push(Violation::Deadlock { waits, cycle, ended });
            return;
        }
        let mut left: Vec<(usize, usize)> =
            self.channels.iter().flat_map(|((from, ..), letters)| letters.iter().map(|l| (*from, l.0))).collect();
        left.sort_unstable();
        let place = |(from, at): (usize, usize)| Place::of(&self.programs[from], at);
        self.violations.extend(left.into_iter().map(|l| Violation::Unreceived { place: place(l) }));
    }

    /// What `rank` waits for, if it does.
    fn wait_of(&self, rank: usize) -> Option<Wait> {
        let at = self.at[rank];
        let instr = self.programs[rank].instrs.get(at)?;
        let on = match instr.op {
            Op::Recv { from, .. } => vec![from],
            Op::Collective { axis, .. } => {
                let group = axis.first(self.layout, rank);
                let absent = |r: &usize| !self.parked[*r] || !self.groups[axis_index(axis)][group].arrived.contains(r);
                let members = axis.members(self.layout, self.layout.coords(rank));
                members.filter(absent).take(WAITS_ON_MAX).collect()
            }
            _ => Vec::new(),
        };
        Some(Wait { place: Place::of(&self.programs[rank], at), on })
    }

    /// Follows who waits for whom from `rank`: the cycle, or the ended rank at the end of the chain.
    fn chain(&self, rank: usize) -> (Vec<usize>, Option<usize>) {
        let mut seen = vec![rank];
        loop {
            let here = *seen.last().expect("starts with one");
            let waits = if here < self.at.len() { self.wait_of(here) } else { None };
            let Some(wait) = waits else { return (Vec::new(), Some(here)) };
            // A member that itself waits shows a cycle; one that has ended ends the chain.
            let Some(&next) = wait.on.first() else { return (Vec::new(), None) };
            if let Some(start) = seen.iter().position(|r| *r == next) {
                return (seen.split_off(start), None);
            }
            seen.push(next);
        }
    }
}

//! Collectives that move and do not add: `all_gather`, `all_gather_bytes`, `broadcast`,
//! `barrier`.

use crate::bits::{bytes, bytes_mut};
use crate::endpoint::{Endpoint, Inner, check_member};
use crate::error::FabricError;
use crate::frame::Operation;
use crate::op::Task;
use crate::options::Group;
use crate::plan::{block, check_parts, extent, part_len, segments};
use crate::route::{DIRECT, Places, SHARE_DIRECT, SHARE_INSIDE};
use std::ops::Range;

/// Numbers in a block.
pub(crate) const BLOCK: usize = 64 << 10;

impl Endpoint {
    /// Every member's part to every member: `mine` is the ranges `parts[me]` one after the
    /// other; in `full` every part lands at its ranges. What lies in no part is left alone.
    ///
    /// # Errors
    /// Those of [`Endpoint`]; `Argument` if the lengths do not fit.
    pub fn all_gather(
        &self,
        group: &Group,
        parts: &[Vec<Range<usize>>],
        mine: &[f32],
        full: &mut [f32],
    ) -> Result<(), FabricError> {
        self.run(group, Operation::AllGather, size_of_val(full), |task, inner| {
            check(task, parts, full.len())?;
            let part = &parts[task.me];
            if mine.len() != part_len(part) {
                let want = part_len(part);
                return Err(task.argument(format!("mine has {} numbers, the part {want}", mine.len())));
            }
            place(mine, part, full);
            share_parts(task, inner, parts, full)
        })
    }

    /// [`Endpoint::all_gather`] when this member's part already lies in `full`.
    ///
    /// # Errors
    /// As [`Endpoint::all_gather`].
    pub fn all_gather_in_place(
        &self,
        group: &Group,
        parts: &[Vec<Range<usize>>],
        full: &mut [f32],
    ) -> Result<(), FabricError> {
        self.run(group, Operation::AllGather, size_of_val(full), |task, inner| {
            check(task, parts, full.len())?;
            share_parts(task, inner, parts, full)
        })
    }

    /// Every member's bytes to every member, of any size each; by member.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn all_gather_bytes(&self, group: &Group, mine: &[u8]) -> Result<Vec<Vec<u8>>, FabricError> {
        self.run(group, Operation::AllGatherBytes, mine.len(), |task, inner| {
            let mut out = vec![Vec::new(); group.len()];
            let (me, members) = (task.me, group.len());
            for to in (1..members).map(|step| (me + step) % members) {
                inner.mail.send(task, to, DIRECT, &[mine])?;
            }
            for from in (1..members).map(|step| (me + members - step) % members) {
                out[from] = inner.mail.recv_vec(task, from, DIRECT)?;
            }
            out[me] = mine.to_vec();
            Ok(out)
        })
    }

    /// The bytes of member `root` to all others, whose `buf` is replaced.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn broadcast(&self, group: &Group, root: usize, buf: &mut Vec<u8>) -> Result<(), FabricError> {
        let all = buf.len();
        self.run(group, Operation::Broadcast, all, |task, inner| {
            check_member(task, root)?;
            if task.me == root {
                for to in (0..group.len()).filter(|&m| m != root) {
                    inner.mail.send(task, to, DIRECT, &[buf])?;
                }
            } else {
                *buf = inner.mail.recv_vec(task, root, DIRECT)?;
            }
            Ok(())
        })
    }

    /// Returns when all members have called it. log2(members) rounds.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn barrier(&self, group: &Group) -> Result<(), FabricError> {
        self.run(group, Operation::Barrier, 0, |task, inner| {
            let members = group.len();
            let mut step = 1;
            while step < members {
                inner.mail.send(task, (task.me + step) % members, DIRECT, &[])?;
                inner.mail.recv_into(task, (task.me + members - step) % members, DIRECT, &mut [])?;
                step *= 2;
            }
            Ok(())
        })
    }
}

/// An error unless the parts are sound and fit into `len` numbers.
pub(crate) fn check(task: &Task, parts: &[Vec<Range<usize>>], len: usize) -> Result<(), FabricError> {
    check_parts(parts, task.group.len()).map_err(|problem| task.argument(problem))?;
    let end = extent(parts);
    if end > len {
        return Err(task.argument(format!("parts end at {end}, the vector has {len} numbers")));
    }
    Ok(())
}

/// Sends this member's part of `full` to all, and fills in theirs.
fn share_parts(
    task: &mut Task,
    inner: &mut Inner,
    parts: &[Vec<Range<usize>>],
    full: &mut [f32],
) -> Result<(), FabricError> {
    let share = Share::new(task, parts, inner.mail.block(BLOCK, 1));
    (0..share.steps()).try_for_each(|step| share.step(task, inner, full, step))
}

/// The way of all parts to all members, in steps of a block: in step `i` this member sends
/// its block `i`, and takes in block `i - 1` of the others.
pub(crate) struct Share<'p> {
    parts: &'p [Vec<Range<usize>>],
    lens: Vec<usize>,
    size: usize,
    /// Who gets this member's blocks from it.
    targets: Vec<usize>,
    /// (owner, from whom its blocks come, lane, whether to pass them on to the mates).
    owners: Vec<(usize, usize, u8, bool)>,
    mates: Vec<usize>,
}

impl<'p> Share<'p> {
    /// Blocks of `size` numbers, the same for all members.
    pub fn new(task: &Task, parts: &'p [Vec<Range<usize>>], size: usize) -> Self {
        let me = task.me;
        let places = Places::new(task.group);
        let targets = (places.others(me, false).into_iter())
            .filter(|&m| places.together(m, me) || places.hub(me, m) == m)
            .collect();
        let from = |owner: usize| {
            let hub = if places.together(owner, me) { owner } else { places.hub(owner, me) };
            let (from, lane) = if hub == owner || hub == me { (owner, SHARE_DIRECT) } else { (hub, SHARE_INSIDE) };
            (owner, from, lane, hub == me)
        };
        let owners = places.others(me, true).into_iter().map(from).collect();
        let mates = places.mates(me).into_iter().filter(|&m| m != me).collect();
        Self { parts, lens: parts.iter().map(|part| part_len(part)).collect(), size, targets, owners, mates }
    }

    /// Steps until all is shared out.
    pub fn steps(&self) -> usize {
        1 + self.lens.iter().max().map_or(0, |len| len.div_ceil(self.size))
    }

    /// One step; beyond the last there is nothing to do.
    pub fn step(&self, task: &mut Task, inner: &mut Inner, full: &mut [f32], step: usize) -> Result<(), FabricError> {
        let me = task.me;
        if let Some(block) = block(self.lens[me], self.size, step) {
            let segments = segments(&self.parts[me], block);
            for &to in &self.targets {
                send_segments(task, inner, full, &segments, to, SHARE_DIRECT)?;
            }
        }
        let Some(before) = step.checked_sub(1) else { return Ok(()) };
        for &(owner, from, lane, pass) in &self.owners {
            let Some(block) = block(self.lens[owner], self.size, before) else { continue };
            let segments = segments(&self.parts[owner], block);
            recv_segments(task, inner, full, &segments, from, lane)?;
            for &mate in self.mates.iter().filter(|_| pass) {
                send_segments(task, inner, full, &segments, mate, SHARE_INSIDE)?;
            }
        }
        Ok(())
    }
}

fn send_segments(
    task: &mut Task,
    inner: &mut Inner,
    full: &[f32],
    segments: &[Range<usize>],
    to: usize,
    lane: u8,
) -> Result<(), FabricError> {
    if let [one] = segments {
        return inner.mail.send(task, to, lane, &[bytes(&full[one.clone()])]);
    }
    let mut message = inner.take(0);
    segments.iter().for_each(|range| message.extend_from_slice(&full[range.clone()]));
    let sent = inner.mail.send(task, to, lane, &[bytes(&message)]);
    inner.give(message);
    sent
}

fn recv_segments(
    task: &mut Task,
    inner: &mut Inner,
    full: &mut [f32],
    segments: &[Range<usize>],
    from: usize,
    lane: u8,
) -> Result<(), FabricError> {
    if let [one] = segments {
        return inner.mail.recv_into(task, from, lane, bytes_mut(&mut full[one.clone()]));
    }
    let mut message = inner.take(part_len(segments));
    inner.mail.recv_into(task, from, lane, bytes_mut(&mut message))?;
    place(&message, segments, full);
    inner.give(message);
    Ok(())
}

/// Copies a concatenation to its ranges.
pub(crate) fn place(from: &[f32], ranges: &[Range<usize>], full: &mut [f32]) {
    let mut at = 0;
    for range in ranges {
        full[range.clone()].copy_from_slice(&from[at..at + range.len()]);
        at += range.len();
    }
}

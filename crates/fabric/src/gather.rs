//! Collectives that move and do not add: `all_gather`, `all_gather_bytes`, `broadcast`,
//! `barrier`.

use crate::bits::{bytes, bytes_mut};
use crate::endpoint::{Endpoint, Inner, check_member};
use crate::error::FabricError;
use crate::frame::Operation;
use crate::op::Task;
use crate::options::Group;
use crate::plan::{block, check_parts, extent, part_len, segments};
use crate::route::{DIRECT, INSIDE, Places};
use std::ops::Range;

/// Numbers in a block.
const BLOCK: usize = 64 << 10;

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
        self.run(group, Operation::AllGather, |task, inner| {
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
        self.run(group, Operation::AllGather, |task, inner| {
            check(task, parts, full.len())?;
            share_parts(task, inner, parts, full)
        })
    }

    /// Every member's bytes to every member, of any size each; by member.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn all_gather_bytes(&self, group: &Group, mine: &[u8]) -> Result<Vec<Vec<u8>>, FabricError> {
        self.run(group, Operation::AllGatherBytes, |task, inner| {
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
        self.run(group, Operation::Broadcast, |task, inner| {
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
        self.run(group, Operation::Barrier, |task, inner| {
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
pub(crate) fn share_parts(
    task: &mut Task,
    inner: &mut Inner,
    parts: &[Vec<Range<usize>>],
    full: &mut [f32],
) -> Result<(), FabricError> {
    let me = task.me;
    let places = Places::new(task.group);
    let size = inner.mail.block(BLOCK, 1);
    let lens: Vec<usize> = parts.iter().map(|part| part_len(part)).collect();
    let blocks = lens.iter().max().map_or(0, |len| len.div_ceil(size));
    let targets: Vec<usize> =
        (places.others(me, false).into_iter()).filter(|&m| places.together(m, me) || places.hub(me, m) == m).collect();
    let owners = places.others(me, true);
    let mates: Vec<usize> = places.mates(me).into_iter().filter(|&m| m != me).collect();
    for step in 0..=blocks {
        if let Some(block) = block(lens[me], size, step) {
            let segments = segments(&parts[me], block);
            for &to in &targets {
                send_segments(task, inner, full, &segments, to, DIRECT)?;
            }
        }
        for &owner in &owners {
            let Some(block) = step.checked_sub(1).and_then(|i| block(lens[owner], size, i)) else { continue };
            let segments = segments(&parts[owner], block);
            let hub = if places.together(owner, me) { owner } else { places.hub(owner, me) };
            let (from, lane) = if hub == owner || hub == me { (owner, DIRECT) } else { (hub, INSIDE) };
            recv_segments(task, inner, full, &segments, from, lane)?;
            if hub == me {
                for &mate in &mates {
                    send_segments(task, inner, full, &segments, mate, INSIDE)?;
                }
            }
        }
    }
    Ok(())
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
fn place(from: &[f32], ranges: &[Range<usize>], full: &mut [f32]) {
    let mut at = 0;
    for range in ranges {
        full[range.clone()].copy_from_slice(&from[at..at + range.len()]);
        at += range.len();
    }
}

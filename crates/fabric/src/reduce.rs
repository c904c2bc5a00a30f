//! Ordered sums over the members of a group: `reduce_scatter` and `all_reduce`.
//!
//! By direct exchange: every holder sends its finished subtrees of a part to the part's
//! owner, who adds them in tree order. One round, the bytes of a ring. Parts travel in
//! blocks that stay in the cache; senders run one block ahead of receivers. In an all_reduce
//! a block leaves for the other members as soon as it is summed.

use crate::bits::bytes;
use crate::endpoint::{Endpoint, Inner};
use crate::error::FabricError;
use crate::frame::Operation;
use crate::gather::{self, Share};
use crate::op::Task;
use crate::options::Group;
use crate::plan::{self, ReducePlan, block, segments};
use crate::route::{self, DIRECT, INSIDE, Places};
use crate::sums::{Mine, Source, add_block};
use std::ops::Range;

/// Numbers in a block. Several must fit into a ring: a sender that waits for room takes what
/// arrives meanwhile into the mailbox, which is a copy.
const BLOCK: usize = 32 << 10;

impl Endpoint {
    /// The ordered sum of all members' vectors; this member receives its part in `out`.
    ///
    /// `mine` holds exactly the subtrees `plan.subtrees(me)`, ascending, each with its whole
    /// vector; `out` takes the ranges of `plan.parts[me]`, one after the other. The bits are
    /// those of the serial tree over all leaves, whoever holds them.
    ///
    /// # Errors
    /// Those of [`Endpoint`]; `Argument` if plan, `mine` and `out` do not fit together.
    pub fn reduce_scatter(
        &self,
        group: &Group,
        plan: &ReducePlan,
        mine: &[(Range<usize>, &[f32])],
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        self.run(
            group,
            Operation::ReduceScatter,
            mine.iter().map(|(_, numbers)| size_of_val(*numbers)).sum(),
            |task, inner| {
                check(task, plan, mine)?;
                let want = plan.part_len(task.me);
                if out.len() != want {
                    return Err(task.argument(format!("out has {} numbers, the part {want}", out.len())));
                }
                let scatter = Scatter::new(task, inner, plan, mine);
                let mut out = Out::Part(out);
                (0..scatter.steps()).try_for_each(|step| scatter.step(task, inner, &mut out, step))
            },
        )
    }

    /// [`Endpoint::reduce_scatter`], then all parts to all members: `out` is a whole vector.
    /// What lies in no part of the plan is left as it is.
    ///
    /// # Errors
    /// As [`Endpoint::reduce_scatter`].
    pub fn all_reduce(
        &self,
        group: &Group,
        plan: &ReducePlan,
        mine: &[(Range<usize>, &[f32])],
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        self.run(group, Operation::AllReduce, size_of_val(out), |task, inner| {
            check(task, plan, mine)?;
            gather::check(task, &plan.parts, out.len())?;
            let scatter = Scatter::new(task, inner, plan, mine);
            let share = Share::new(task, &plan.parts, scatter.size);
            for step in 0..scatter.last + share.steps() {
                scatter.step(task, inner, &mut Out::Whole(out), step)?;
                if let Some(summed) = step.checked_sub(scatter.last) {
                    share.step(task, inner, out, summed)?;
                }
            }
            Ok(())
        })
    }
}

pub(crate) fn check(task: &Task, plan: &ReducePlan, mine: &Mine) -> Result<(), FabricError> {
    plan.check(task.group.len()).map_err(|problem| task.argument(problem))?;
    let want = plan.subtrees(task.me);
    if !mine.iter().map(|(node, _)| node).eq(&want) {
        let got: Vec<_> = mine.iter().map(|(node, _)| node).collect();
        return Err(task.argument(format!("the subtrees brought are {got:?}, the plan says {want:?}")));
    }
    let extent = plan::extent(&plan.parts);
    match mine.iter().find(|(_, data)| data.len() < extent) {
        Some((node, data)) => {
            let len = data.len();
            Err(task.argument(format!("the vector of {node:?} has {len} numbers, parts end at {extent}")))
        }
        None => Ok(()),
    }
}

/// Where the sum of this member's part goes.
pub(crate) enum Out<'o> {
    /// Its ranges one after the other.
    Part(&'o mut [f32]),
    /// Into its ranges of the whole vector.
    Whole(&'o mut [f32]),
}

/// The way of all sums to their owners, in steps of a block: in step `i` this member sends
/// block `i` of the other parts, and finishes block `i - last` of its own.
pub(crate) struct Scatter<'p> {
    plan: &'p ReducePlan,
    mine: &'p Mine<'p>,
    /// Numbers in a block, the same for all members.
    pub size: usize,
    /// Steps from a block's start to its sum: a hub needs one.
    pub last: usize,
    lens: Vec<usize>,
    /// (owner, to whom its blocks go, lane).
    outgoing: Vec<(usize, usize, u8)>,
    /// Owners for whom this member merges what these others hold.
    merges: Vec<(usize, Vec<Source>)>,
    /// What comes for this member's own part.
    sources: Vec<Source>,
}

impl<'p> Scatter<'p> {
    pub fn new(task: &Task, inner: &Inner, plan: &'p ReducePlan, mine: &'p Mine<'p>) -> Self {
        let me = task.me;
        let places = Places::new(task.group);
        let others = places.others(me, false);
        let from = |holders: Vec<usize>| {
            let others = holders.into_iter().filter(|&m| m != me);
            others.map(|member| Source { member, lane: INSIDE, nodes: plan.subtrees(member) }).collect()
        };
        let merges: Vec<(usize, Vec<Source>)> = (others.iter())
            .filter_map(|&owner| Some((owner, from(route::to_merge(plan, &places, owner, me)?))))
            .collect();
        let outgoing = (others.iter())
            .filter(|&&owner| !mine.is_empty() && merges.iter().all(|(merged, _)| *merged != owner))
            .map(|&owner| {
                let hub = if places.together(owner, me) { me } else { places.hub(owner, me) };
                if hub == me { (owner, owner, DIRECT) } else { (owner, hub, INSIDE) }
            })
            .collect();
        let direct = |(member, nodes)| Source { member, lane: DIRECT, nodes };
        Self {
            plan,
            mine,
            size: inner.mail.block(BLOCK, route::pieces_max(plan, &places)),
            last: if places.two_levels() { 2 } else { 1 },
            lens: (0..plan.cells.len()).map(|m| plan.part_len(m)).collect(),
            outgoing,
            merges,
            sources: route::sources(plan, &places, me).into_iter().map(direct).collect(),
        }
    }

    /// What this member sends of itself, block by block, as positions in each of its vectors; then it is not sent again.
    pub fn outgoing(&mut self) -> Vec<(usize, u8, Vec<Range<usize>>)> {
        let mut out = Vec::new();
        for step in 0..self.steps() {
            for &(owner, to, lane) in &self.outgoing {
                if let Some(block) = block(self.lens[owner], self.size, step) {
                    out.push((to, lane, segments(&self.plan.parts[owner], block)));
                }
            }
        }
        self.outgoing.clear();
        out
    }

    /// What it sends of itself has left before.
    pub fn posted(mut self) -> Self {
        self.outgoing.clear();
        self
    }

    /// Steps until all is summed.
    pub fn steps(&self) -> usize {
        self.last + self.lens.iter().max().map_or(0, |len| len.div_ceil(self.size))
    }

    /// One step; beyond the last there is nothing to do.
    pub fn step(&self, task: &mut Task, inner: &mut Inner, out: &mut Out, step: usize) -> Result<(), FabricError> {
        let Self { plan, mine, size, .. } = *self;
        for &(owner, to, lane) in &self.outgoing {
            if let Some(block) = block(self.lens[owner], size, step) {
                send_block(task, inner, &segments(&plan.parts[owner], block), mine, to, lane)?;
            }
        }
        for (owner, from) in &self.merges {
            let Some(block) = step.checked_sub(1).and_then(|i| block(self.lens[*owner], size, i)) else { continue };
            let segments = segments(&plan.parts[*owner], block);
            let sums = add_block(task, inner, plan.leaves, &segments, mine, from, None)?.sums;
            let pieces: Vec<&[u8]> = sums.iter().map(|(_, value)| bytes(value.get())).collect();
            inner.mail.send(task, *owner, DIRECT, &pieces)?;
            sums.into_iter().for_each(|(_, value)| value.reclaim(&mut inner.spare));
        }
        let own = step.checked_sub(self.last).and_then(|i| block(self.lens[task.me], size, i));
        let Some(block) = own else { return Ok(()) };
        let segments = segments(&plan.parts[task.me], block.clone());
        match (out, &segments[..]) {
            (Out::Part(part), _) => self.sum(task, inner, &segments, &mut part[block]),
            (Out::Whole(whole), [one]) => self.sum(task, inner, &segments, &mut whole[one.clone()]),
            (Out::Whole(whole), _) => {
                let mut sum = inner.take(block.len());
                self.sum(task, inner, &segments, &mut sum)?;
                gather::place(&sum, &segments, whole);
                inner.give(sum);
                Ok(())
            }
        }
    }

    /// The sum of a block of this member's part.
    fn sum(
        &self,
        task: &mut Task,
        inner: &mut Inner,
        segments: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<(), FabricError> {
        let leaves = self.plan.leaves;
        let mut block = add_block(task, inner, leaves, segments, self.mine, &self.sources, Some(out))?;
        for (node, sum) in block.sums {
            debug_assert_eq!(node, 0..leaves);
            if let Some(out) = &mut block.out {
                out.copy_from_slice(sum.get());
            }
            sum.reclaim(&mut inner.spare);
        }
        Ok(())
    }
}

/// Sends the `segments` of every subtree of `mine` in one message.
fn send_block(
    task: &mut Task,
    inner: &mut Inner,
    segments: &[Range<usize>],
    mine: &Mine,
    to: usize,
    lane: u8,
) -> Result<(), FabricError> {
    if let [one] = segments {
        let pieces: Vec<&[u8]> = mine.iter().map(|(_, data)| bytes(&data[one.clone()])).collect();
        return inner.mail.send(task, to, lane, &pieces);
    }
    let mut message = inner.take(0);
    for (_, data) in mine {
        segments.iter().for_each(|range| message.extend_from_slice(&data[range.clone()]));
    }
    let sent = inner.mail.send(task, to, lane, &[bytes(&message)]);
    inner.give(message);
    sent
}

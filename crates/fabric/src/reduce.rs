//! Ordered sums over the members of a group: `reduce_scatter` and `all_reduce`.
//!
//! By direct exchange: every holder sends its finished subtrees of a part to the part's
//! owner, who adds them in tree order. One round, the bytes of a ring. Parts travel in
//! blocks that stay in the cache; senders run one block ahead of receivers.

use crate::bits::{bytes, bytes_mut};
use crate::endpoint::{Endpoint, Inner};
use crate::error::FabricError;
use crate::frame::Operation;
use crate::gather;
use crate::op::Task;
use crate::options::Group;
use crate::plan::{self, ReducePlan, block, segments};
use crate::route::{self, DIRECT, INSIDE, Places};
use spec::tree::Counter;
use std::ops::Range;
use std::rc::Rc;

/// Numbers in a block.
const BLOCK: usize = 64 << 10;

/// A member's finished subtrees: the leaves that each covers and its whole vector.
type Mine<'a> = [(Range<usize>, &'a [f32])];

/// One subtree's block: lent by the caller, inside a message, or a sum of its own.
enum Value<'a> {
    Lent(&'a [f32]),
    Shared(Rc<Vec<f32>>, Range<usize>),
    Own(Vec<f32>),
}

impl Value<'_> {
    fn get(&self) -> &[f32] {
        match self {
            Self::Lent(data) => data,
            Self::Shared(message, range) => &message[range.clone()],
            Self::Own(data) => data,
        }
    }
}

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
        self.run(group, Operation::ReduceScatter, |task, inner| {
            check(task, plan, mine)?;
            let want = plan.part_len(task.me);
            if out.len() != want {
                return Err(task.argument(format!("out has {} numbers, the part {want}", out.len())));
            }
            scatter_sums(task, inner, plan, mine, |block, sum| out[block].copy_from_slice(sum))
        })
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
        self.run(group, Operation::AllReduce, |task, inner| {
            check(task, plan, mine)?;
            gather::check(task, &plan.parts, out.len())?;
            let part = &plan.parts[task.me];
            scatter_sums(task, inner, plan, mine, |block, sum| {
                let mut at = 0;
                for range in segments(part, block) {
                    let len = range.len();
                    out[range].copy_from_slice(&sum[at..at + len]);
                    at += len;
                }
            })?;
            gather::share_parts(task, inner, &plan.parts, out)
        })
    }
}

fn check(task: &Task, plan: &ReducePlan, mine: &Mine) -> Result<(), FabricError> {
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

/// Sends, merges and adds; `sink` gets the sum of each block of this member's part.
fn scatter_sums(
    task: &mut Task,
    inner: &mut Inner,
    plan: &ReducePlan,
    mine: &Mine,
    mut sink: impl FnMut(Range<usize>, &[f32]),
) -> Result<(), FabricError> {
    let me = task.me;
    let places = Places::new(task.group);
    let members = plan.cells.len();
    let size = inner.mail.block(BLOCK, route::pieces_max(plan, &places));
    let lens: Vec<usize> = (0..members).map(|m| plan.part_len(m)).collect();
    let blocks = lens.iter().max().map_or(0, |len| len.div_ceil(size));
    let others = places.others(me, false);
    let merges: Vec<(usize, Vec<usize>)> =
        (others.iter()).filter_map(|&owner| Some((owner, route::to_merge(plan, &places, owner, me)?))).collect();
    let outgoing: Vec<(usize, usize, u8)> = (others.iter())
        .filter(|&&owner| !mine.is_empty() && merges.iter().all(|(merged, _)| *merged != owner))
        .map(|&owner| {
            let hub = if places.together(owner, me) { me } else { places.hub(owner, me) };
            if hub == me { (owner, owner, DIRECT) } else { (owner, hub, INSIDE) }
        })
        .collect();
    let sources = route::sources(plan, &places, me);
    let last = if places.two_levels() { 2 } else { 1 };
    for step in 0..blocks + last {
        for &(owner, to, lane) in &outgoing {
            if let Some(block) = block(lens[owner], size, step) {
                send_block(task, inner, &segments(&plan.parts[owner], block), mine, to, lane)?;
            }
        }
        for (owner, holders) in &merges {
            let Some(block) = step.checked_sub(1).and_then(|i| block(lens[*owner], size, i)) else { continue };
            let from: Vec<_> = (holders.iter().filter(|&&m| m != me)).map(|&m| (m, INSIDE, plan.subtrees(m))).collect();
            let segments = segments(&plan.parts[*owner], block);
            let sums = add_block(task, inner, plan.leaves, &segments, mine, &from)?;
            let pieces: Vec<&[u8]> = sums.iter().map(|(_, value)| bytes(value.get())).collect();
            inner.mail.send(task, *owner, DIRECT, &pieces)?;
            sums.into_iter().for_each(|(_, value)| reclaim(&mut inner.spare, value));
        }
        if let Some(block) = step.checked_sub(last).and_then(|i| block(lens[me], size, i)) {
            let from: Vec<_> = sources.iter().map(|(m, nodes)| (*m, DIRECT, nodes.clone())).collect();
            let segments = segments(&plan.parts[me], block.clone());
            let sums = add_block(task, inner, plan.leaves, &segments, mine, &from)?;
            for (node, value) in sums {
                debug_assert_eq!(node, 0..plan.leaves);
                sink(block.clone(), value.get());
                reclaim(&mut inner.spare, value);
            }
        }
    }
    Ok(())
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

/// Adds this member's subtrees and those that come `from` (member, lane, subtrees) in tree
/// order. Gives the sums that cannot be added further, ascending.
fn add_block<'a>(
    task: &mut Task,
    inner: &mut Inner,
    leaves: usize,
    segments: &[Range<usize>],
    mine: &Mine<'a>,
    from: &[(usize, u8, Vec<Range<usize>>)],
) -> Result<Vec<(Range<usize>, Value<'a>)>, FabricError> {
    let len = plan::part_len(segments);
    // (subtree, who brings it: None is this member, its place in the message)
    let mut order: Vec<(&Range<usize>, Option<usize>, usize)> = Vec::new();
    order.extend(mine.iter().enumerate().map(|(i, (node, _))| (node, None, i)));
    for (source, (_, _, nodes)) in from.iter().enumerate() {
        order.extend(nodes.iter().enumerate().map(|(i, node)| (node, Some(source), i)));
    }
    order.sort_unstable_by_key(|(node, ..)| node.start);
    let mut messages: Vec<Option<Rc<Vec<f32>>>> = vec![None; from.len()];
    let mut done = Vec::new();
    let mut counter = Counter::new(leaves);
    let mut next = order.first().map_or(0, |(node, ..)| node.start);
    for (node, source, i) in order {
        let value = match source {
            None => lend(inner, mine[i].1, segments),
            Some(source) => {
                let (member, lane, nodes) = &from[source];
                let slot = &mut messages[source];
                if slot.is_none() {
                    let mut message = inner.take(nodes.len() * len);
                    inner.mail.recv_into(task, *member, *lane, bytes_mut(&mut message))?;
                    *slot = Some(Rc::new(message));
                }
                let whole = if i + 1 == nodes.len() { slot.take() } else { slot.clone() };
                Value::Shared(whole.expect("received above"), i * len..(i + 1) * len)
            }
        };
        if node.start != next {
            done.extend(std::mem::replace(&mut counter, Counter::new(leaves)).into_nodes());
        }
        next = node.end;
        let spent = counter.push(node.clone(), value, |left, right| add(&mut inner.spare, left, right.get()));
        spent.into_iter().for_each(|value| reclaim(&mut inner.spare, value));
    }
    done.extend(counter.into_nodes());
    Ok(done)
}

/// A block of the caller's vector: lent as it lies, or gathered.
fn lend<'a>(inner: &mut Inner, data: &'a [f32], segments: &[Range<usize>]) -> Value<'a> {
    if let [one] = segments {
        return Value::Lent(&data[one.clone()]);
    }
    let mut buffer = inner.spare.pop().unwrap_or_default();
    buffer.clear();
    segments.iter().for_each(|range| buffer.extend_from_slice(&data[range.clone()]));
    Value::Own(buffer)
}

/// `left += right`; makes `left` a buffer of its own first.
fn add(spare: &mut Vec<Vec<f32>>, left: &mut Value, right: &[f32]) {
    if let Value::Own(left) = left {
        for (l, r) in left.iter_mut().zip(right) {
            *l += r;
        }
        return;
    }
    let mut sum = spare.pop().unwrap_or_default();
    sum.clear();
    sum.extend(left.get().iter().zip(right).map(|(l, r)| l + r));
    reclaim(spare, std::mem::replace(left, Value::Own(sum)));
}

/// Keeps the buffer of a value that is no longer needed.
fn reclaim(spare: &mut Vec<Vec<f32>>, value: Value) {
    match value {
        Value::Own(buffer) => spare.push(buffer),
        Value::Shared(message, _) => spare.extend(Rc::try_unwrap(message)),
        Value::Lent(_) => {}
    }
}

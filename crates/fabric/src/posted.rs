//! Exchanges in two halves. A *post* gives away this member's part and returns at once; the *take* returns the result and
//! waits for what has not come by then. All members must post and take the exchanges of a group in one order.
//!
//! Between two members with one finished subtree each, all of it happens in the buffer that was posted: what comes is added
//! where it belongs, and of an all_reduce the sums leave again, whenever this member waits or calls
//! [`Endpoint::progress`]. Other sums send early and add when they are taken, in tree order as ever. A sum whose result has a
//! buffer of its own ([`Endpoint::post_scatter`]) is built there as it comes, and what was posted stays as it is.

use crate::endpoint::{Endpoint, check_member};
use crate::error::FabricError;
use crate::frame::Operation;
use crate::gather::{self, Share};
use crate::mail::{Letter, Stage};
use crate::op::Task;
use crate::options::Group;
use crate::plan::{ReducePlan, block, part_len};
use crate::reduce::{self, Out, Scatter};
use crate::route::{DIRECT, Places, SHARE_DIRECT};
use spec::tree;
use std::ops::Range;
use std::time::Instant;

/// Something that was posted and is to be taken.
#[derive(Debug)]
pub struct Posted {
    id: u64,
    /// The subtrees brought.
    nodes: Vec<Range<usize>>,
    /// The sum is built in the buffer that was posted.
    in_place: bool,
}

impl Posted {
    /// True if an all_reduce needs no buffer for its result.
    pub fn in_place(&self) -> bool {
        self.in_place
    }
}

/// What a post came to.
#[derive(Debug)]
pub struct Taken {
    /// The buffers that were posted.
    pub buffers: Vec<Vec<f32>>,
    /// When the last of what did not need this member's hands had come.
    pub came: Instant,
}

/// The ranges of `part` in blocks: none crosses from one range to the next.
fn cut(part: &[Range<usize>], size: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    part.iter().flat_map(move |range| {
        let blocks = (0..).map_while(move |i| block(range.len(), size, i));
        blocks.map(|at| range.start + at.start..range.start + at.end)
    })
}

/// Messages that carry `part` of buffer 0 in blocks.
fn blocks(member: usize, lane: u8, part: &[Range<usize>], size: usize) -> impl Iterator<Item = Letter> {
    cut(part, size).map(move |at| Letter { member, lane, at: vec![(0, at)] })
}

/// What a scatter of two subtrees sends of buffer 1, and what of it comes into buffer 0, where this member's part lies range
/// after range.
fn onto(other: usize, mine: &[Range<usize>], theirs: &[Range<usize>], size: usize) -> Stage {
    let out = cut(theirs, size).map(|at| Letter { member: other, lane: DIRECT, at: vec![(1, at)] }).collect();
    let mut end = 0;
    let place = |at: Range<usize>| {
        let start = end;
        end += at.len();
        Letter { member: other, lane: DIRECT, at: vec![(0, start..end), (1, at)] }
    };
    Stage { out, awaits: cut(mine, size).map(place).collect(), adds: true }
}

/// True if the sum of `plan` is that of two subtrees, one from each of two members.
fn of_two(plan: &ReducePlan, group: &Group) -> bool {
    let ranges = plan.parts.iter().all(|part| part.len() <= 1);
    group.hosts.is_none() && tree::is_of_two(plan.leaves, &plan.cells) && ranges
}

impl Endpoint {
    /// Posts numbers for a member, who takes them with [`Endpoint::recv`]; never waits for room. The buffer comes back by
    /// [`Endpoint::spent`].
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn post_send(&self, group: &Group, to: usize, data: Vec<f32>) -> Result<(), FabricError> {
        self.run_between(group, Operation::Send, to, size_of_val(&data[..]), |task, inner| {
            check_member(task, to)?;
            let letter = Letter { member: to, lane: DIRECT, at: vec![(0, 0..data.len())] };
            let stage = Stage { out: vec![letter], ..Stage::default() };
            inner.mail.post(task, vec![data], vec![stage], true).map(drop)
        })
    }

    /// The first half of [`Endpoint::reduce_scatter`] or (`all`) [`Endpoint::all_reduce`]; `mine` as there.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn post_sum(
        &self,
        group: &Group,
        plan: &ReducePlan,
        mine: Vec<(Range<usize>, Vec<f32>)>,
        all: bool,
    ) -> Result<Posted, FabricError> {
        let operation = operation(all);
        let bytes = mine.iter().map(|(_, numbers)| size_of_val(&numbers[..])).sum();
        self.run(group, operation, bytes, |task, inner| {
            task.posts = true;
            let lent: Vec<_> = mine.iter().map(|(node, data)| (node.clone(), &data[..])).collect();
            reduce::check(task, plan, &lent)?;
            let mut scatter = Scatter::new(task, inner, plan, &lent);
            let (me, size) = (task.me, scatter.size);
            let in_place = of_two(plan, group);
            let stages = if in_place {
                let (other, parts) = (1 - me, &plan.parts);
                let sums = Stage {
                    out: blocks(other, DIRECT, &parts[other], size).collect(),
                    awaits: blocks(other, DIRECT, &parts[me], size).collect(),
                    adds: true,
                };
                let share = Stage {
                    out: blocks(other, SHARE_DIRECT, &parts[me], size).collect(),
                    awaits: blocks(other, SHARE_DIRECT, &parts[other], size).collect(),
                    adds: false,
                };
                if all { vec![sums, share] } else { vec![sums] }
            } else {
                let letter = |(member, lane, segments): (usize, u8, Vec<Range<usize>>)| {
                    let of = |i: usize| segments.iter().map(move |segment| (i, segment.clone()));
                    Letter { member, lane, at: (0..lent.len()).flat_map(of).collect() }
                };
                vec![Stage { out: scatter.outgoing().into_iter().map(letter).collect(), ..Stage::default() }]
            };
            let (nodes, buffers) = mine.into_iter().unzip();
            let id = inner.mail.post(task, buffers, stages, false)?;
            Ok(Posted { id, nodes, in_place })
        })
    }

    /// The second half of [`Endpoint::reduce_scatter`]: this member's part of the sum.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn take_part(
        &self,
        group: &Group,
        plan: &ReducePlan,
        posted: Posted,
        out: &mut [f32],
    ) -> Result<Taken, FabricError> {
        self.run(group, operation(false), size_of_val(out), |task, inner| {
            let taken = settle(task, inner, &posted, plan)?;
            let want = plan.part_len(task.me);
            if out.len() != want {
                return Err(task.argument(format!("out has {} numbers, the part {want}", out.len())));
            }
            if posted.in_place {
                let part = plan.parts[task.me].first().cloned().unwrap_or(0..0);
                out.copy_from_slice(&taken.buffers[0][part]);
                return Ok(taken);
            }
            let mine = lent(&posted, &taken);
            let scatter = Scatter::new(task, inner, plan, &mine).posted();
            let mut out = Out::Part(out);
            (0..scatter.steps()).try_for_each(|step| scatter.step(task, inner, &mut out, step))?;
            drop(scatter);
            drop(mine);
            Ok(taken)
        })
    }

    /// The second half of [`Endpoint::all_reduce`]: the whole sum in `out`, or, of what is summed in place, in the first of
    /// the buffers.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn take_whole(
        &self,
        group: &Group,
        plan: &ReducePlan,
        posted: Posted,
        out: &mut [f32],
    ) -> Result<Taken, FabricError> {
        self.run(group, operation(true), size_of_val(out), |task, inner| {
            let taken = settle(task, inner, &posted, plan)?;
            if posted.in_place {
                return Ok(taken);
            }
            gather::check(task, &plan.parts, out.len())?;
            let mine = lent(&posted, &taken);
            let scatter = Scatter::new(task, inner, plan, &mine).posted();
            let share = Share::new(task, &plan.parts, scatter.size);
            for step in 0..scatter.last + share.steps() {
                scatter.step(task, inner, &mut Out::Whole(out), step)?;
                if let Some(summed) = step.checked_sub(scatter.last) {
                    share.step(task, inner, out, summed)?;
                }
            }
            drop(scatter);
            drop(mine);
            Ok(taken)
        })
    }

    /// The first half of [`Endpoint::reduce_scatter`] into a buffer that the post owns meanwhile; `mine` as there, its vectors
    /// stay as they are. The sum of two members with a subtree each is built as it comes, whatever this member does.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn post_scatter(
        &self,
        group: &Group,
        plan: &ReducePlan,
        mine: Vec<(Range<usize>, Vec<f32>)>,
        out: Vec<f32>,
    ) -> Result<Posted, FabricError> {
        let bytes = mine.iter().map(|(_, numbers)| size_of_val(&numbers[..])).sum();
        self.run(group, operation(false), bytes, |task, inner| {
            task.posts = true;
            let lent: Vec<_> = mine.iter().map(|(node, data)| (node.clone(), &data[..])).collect();
            reduce::check(task, plan, &lent)?;
            let want = plan.part_len(task.me);
            if out.len() != want {
                return Err(task.argument(format!("out has {} numbers, the part {want}", out.len())));
            }
            let mut scatter = Scatter::new(task, inner, plan, &lent);
            let (me, size) = (task.me, scatter.size);
            let in_place = tree::is_of_two(plan.leaves, &plan.cells);
            let stage = if in_place {
                onto(1 - me, &plan.parts[me], &plan.parts[1 - me], size)
            } else {
                let letter = |(member, lane, segments): (usize, u8, Vec<Range<usize>>)| {
                    let of = |i: usize| segments.iter().map(move |segment| (1 + i, segment.clone()));
                    Letter { member, lane, at: (0..lent.len()).flat_map(of).collect() }
                };
                Stage { out: scatter.outgoing().into_iter().map(letter).collect(), ..Stage::default() }
            };
            let (nodes, vectors): (Vec<_>, Vec<_>) = mine.into_iter().unzip();
            let buffers = std::iter::once(out).chain(vectors).collect();
            let id = inner.mail.post(task, buffers, vec![stage], false)?;
            Ok(Posted { id, nodes, in_place })
        })
    }

    /// The second half: the buffer with this member's part of the sum, then the vectors that were brought.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn take_scatter(&self, group: &Group, plan: &ReducePlan, posted: Posted) -> Result<Taken, FabricError> {
        self.run(group, operation(false), 0, |task, inner| {
            let mut taken = settle(task, inner, &posted, plan)?;
            if posted.in_place {
                return Ok(taken);
            }
            let (out, vectors) = taken.buffers.split_first_mut().expect("the result has a buffer");
            let nodes = posted.nodes.iter().cloned();
            let mine: Vec<_> = nodes.zip(vectors.iter().map(|data| &data[..])).collect();
            let scatter = Scatter::new(task, inner, plan, &mine).posted();
            let mut out = Out::Part(out);
            (0..scatter.steps()).try_for_each(|step| scatter.step(task, inner, &mut out, step))?;
            drop(scatter);
            drop(mine);
            Ok(taken)
        })
    }

    /// The first half of [`Endpoint::all_gather_in_place`] in a group of one level ([`Group::one_level`]).
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn post_gather(
        &self,
        group: &Group,
        parts: &[Vec<Range<usize>>],
        full: Vec<f32>,
    ) -> Result<Posted, FabricError> {
        self.run(group, Operation::AllGather, size_of_val(&full[..]), |task, inner| {
            task.posts = true;
            gather::check(task, parts, full.len())?;
            if !group.one_level() {
                return Err(task.argument("a gather whose members stand for others of their host is not posted".into()));
            }
            let size = inner.mail.block(gather::BLOCK, 1);
            let others = Places::new(group).others(task.me, false);
            let out = others.iter().flat_map(|&to| blocks(to, SHARE_DIRECT, &parts[task.me], size)).collect();
            let awaits = others.iter().flat_map(|&from| blocks(from, SHARE_DIRECT, &parts[from], size)).collect();
            let id = inner.mail.post(task, vec![full], vec![Stage { out, awaits, adds: false }], false)?;
            Ok(Posted { id, nodes: Vec::new(), in_place: true })
        })
    }

    /// The second half: the whole vector, as the only buffer.
    ///
    /// # Errors
    /// Those of [`Endpoint`].
    pub fn take_gather(
        &self,
        group: &Group,
        parts: &[Vec<Range<usize>>],
        posted: Posted,
    ) -> Result<Taken, FabricError> {
        self.run(group, Operation::AllGather, 0, |task, inner| {
            let (buffers, came) = inner.mail.settle(task, posted.id)?;
            let me = task.me;
            (0..group.len())
                .filter(|member| *member != me)
                .for_each(|member| count_received(task, member, part_len(&parts[member])));
            Ok(Taken { buffers, came })
        })
    }
}

fn count_received(task: &mut Task, member: usize, numbers: usize) {
    let crosses = task.group.crosses(task.me, member);
    let count = &mut task.count;
    let bytes = if crosses { &mut count.inter_bytes_received } else { &mut count.intra_bytes_received };
    *bytes += (numbers * size_of::<f32>()) as u64;
}

fn operation(all: bool) -> Operation {
    if all { Operation::AllReduce } else { Operation::ReduceScatter }
}

fn lent<'t>(posted: &Posted, taken: &'t Taken) -> Vec<(Range<usize>, &'t [f32])> {
    posted.nodes.iter().cloned().zip(taken.buffers.iter().map(|data| &data[..])).collect()
}

/// Waits until a posted sum has left, and in place until it is summed.
fn settle(
    task: &mut Task,
    inner: &mut crate::endpoint::Inner,
    posted: &Posted,
    plan: &ReducePlan,
) -> Result<Taken, FabricError> {
    let (buffers, came) = inner.mail.settle(task, posted.id)?;
    if posted.in_place {
        let (mine, theirs) = (plan.part_len(task.me), plan.part_len(1 - task.me));
        let numbers = mine + if task.operation == Operation::AllReduce { theirs } else { 0 };
        count_received(task, 1 - task.me, numbers);
    }
    // Other sums are made by this member's hands, from now on.
    Ok(Taken { buffers, came: if posted.in_place { came } else { Instant::now() } })
}

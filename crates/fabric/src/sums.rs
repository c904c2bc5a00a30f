//! The ordered sum of one block: subtrees of this member and subtrees that arrive.
//!
//! A message that holds one subtree is added from where the transport has it; only a
//! subtree whose left sibling is not finished yet is put aside first.

use crate::bits::bytes_mut;
use crate::endpoint::Inner;
use crate::error::FabricError;
use crate::mail::Mail;
use crate::op::Task;
use crate::plan;
use spec::tree::Counter;
use std::ops::Range;
use std::rc::Rc;

/// A member's finished subtrees: the leaves that each covers and its whole vector.
pub(crate) type Mine<'a> = [(Range<usize>, &'a [f32])];

/// Where further subtrees come from.
pub(crate) struct Source {
    pub member: usize,
    pub lane: u8,
    /// The subtrees in each of its messages, ascending.
    pub nodes: Vec<Range<usize>>,
}

/// One subtree's block.
pub(crate) enum Value<'a> {
    /// As it lies in the caller's vector.
    Lent(&'a [f32]),
    /// Inside a message.
    Shared(Rc<Vec<f32>>, Range<usize>),
    /// A sum of its own.
    Own(Vec<f32>),
    /// A sum in its last place.
    Out(&'a mut [f32]),
    /// All of the next message of this source, to be added as it comes.
    Coming(usize),
}

impl Value<'_> {
    pub fn get(&self) -> &[f32] {
        match self {
            Self::Lent(data) => data,
            Self::Shared(message, range) => &message[range.clone()],
            Self::Own(data) => data,
            Self::Out(data) => data,
            Self::Coming(_) => &[],
        }
    }

    /// True if it may be added to.
    fn is_sum(&self) -> bool {
        matches!(self, Self::Own(_) | Self::Out(_))
    }

    /// The numbers of a sum; of what is none, nothing.
    fn get_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Own(data) => data,
            Self::Out(data) => data,
            Self::Lent(_) | Self::Shared(..) | Self::Coming(_) => &mut [],
        }
    }

    /// Keeps the buffer of a value that is no longer needed.
    pub fn reclaim(self, spare: &mut Vec<Vec<f32>>) {
        match self {
            Self::Own(buffer) => spare.push(buffer),
            Self::Shared(message, _) => spare.extend(Rc::try_unwrap(message)),
            Self::Lent(_) | Self::Out(_) | Self::Coming(_) => {}
        }
    }
}

/// What a block came to.
pub(crate) struct Block<'a> {
    /// The sums that cannot be added further, ascending.
    pub sums: Vec<(Range<usize>, Value<'a>)>,
    /// The place of the first of them, if it was not built there.
    pub out: Option<&'a mut [f32]>,
}

/// Adds this member's subtrees and those that come `from` others in tree order. The first
/// sum is built in `out`, if that is given and if any addition is needed.
pub(crate) fn add_block<'a>(
    task: &mut Task,
    inner: &mut Inner,
    leaves: usize,
    segments: &[Range<usize>],
    mine: &Mine<'a>,
    from: &[Source],
    out: Option<&'a mut [f32]>,
) -> Result<Block<'a>, FabricError> {
    // (subtree, who brings it: None is this member, its place in the message)
    let mut order: Vec<(&Range<usize>, Option<usize>, usize)> = Vec::new();
    order.extend(mine.iter().enumerate().map(|(i, (node, _))| (node, None, i)));
    for (source, Source { nodes, .. }) in from.iter().enumerate() {
        order.extend(nodes.iter().enumerate().map(|(i, node)| (node, Some(source), i)));
    }
    order.sort_unstable_by_key(|(node, ..)| node.start);
    let Inner { mail, spare, .. } = inner;
    let messages = vec![None; from.len()];
    let mut sums = Sums { task, mail, spare, from, len: plan::part_len(segments), messages, out, failed: None };
    let mut done = Vec::new();
    let mut counter = Counter::new(leaves);
    let mut next = order.first().map_or(0, |(node, ..)| node.start);
    for (place, (node, source, i)) in order.into_iter().enumerate() {
        if node.start != next {
            done.extend(std::mem::replace(&mut counter, Counter::new(leaves)).into_nodes());
        }
        next = node.end;
        let first = place == 0;
        let value = match source {
            None => sums.lend(mine[i].1, segments),
            Some(source) if from[source].nodes.len() > 1 => sums.share(source, i)?,
            Some(source) if counter.meets(node) => Value::Coming(source),
            Some(source) => sums.put_aside(source, first)?,
        };
        let spent = counter.push(node.clone(), Term { first, value }, |left, right| sums.add(left, &right.value));
        sums.failed.take().map_or(Ok(()), Err)?;
        spent.into_iter().for_each(|term| term.value.reclaim(sums.spare));
    }
    done.extend(counter.into_nodes());
    let sums_done = done.into_iter().map(|(node, term)| (node, term.value)).collect();
    Ok(Block { sums: sums_done, out: sums.out })
}

/// A subtree in the making.
struct Term<'a> {
    /// Its first leaf is the block's first: its sum is built in `out`.
    first: bool,
    value: Value<'a>,
}

/// What the additions of one block work with.
struct Sums<'s, 'g, 'a> {
    task: &'s mut Task<'g>,
    mail: &'s mut Mail,
    spare: &'s mut Vec<Vec<f32>>,
    from: &'s [Source],
    /// Numbers of a subtree.
    len: usize,
    /// Messages of several subtrees, while any of them is to come.
    messages: Vec<Option<Rc<Vec<f32>>>>,
    out: Option<&'a mut [f32]>,
    /// What an addition could not say.
    failed: Option<FabricError>,
}

impl<'a> Sums<'_, '_, 'a> {
    /// A block of the caller's vector: lent as it lies, or gathered.
    fn lend(&mut self, data: &'a [f32], segments: &[Range<usize>]) -> Value<'a> {
        if let [one] = segments {
            return Value::Lent(&data[one.clone()]);
        }
        let mut buffer = self.buffer();
        buffer.clear();
        segments.iter().for_each(|range| buffer.extend_from_slice(&data[range.clone()]));
        Value::Own(buffer)
    }

    /// A buffer of a subtree's length, of unknown value.
    fn buffer(&mut self) -> Vec<f32> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(self.len, 0.0);
        buffer
    }

    /// Room for a sum: its last place if it is the first.
    fn room(&mut self, first: bool) -> Value<'a> {
        match self.out.take_if(|_| first) {
            Some(out) => Value::Out(out),
            None => Value::Own(self.buffer()),
        }
    }

    /// The subtree at place `i` of a message of several.
    fn share(&mut self, source: usize, i: usize) -> Result<Value<'a>, FabricError> {
        let Source { member, lane, nodes } = &self.from[source];
        if self.messages[source].is_none() {
            let mut message = self.spare.pop().unwrap_or_default();
            message.resize(nodes.len() * self.len, 0.0);
            self.mail.recv_into(self.task, *member, *lane, bytes_mut(&mut message))?;
            self.messages[source] = Some(Rc::new(message));
        }
        let slot = &mut self.messages[source];
        let whole = if i + 1 == nodes.len() { slot.take() } else { slot.clone() };
        Ok(Value::Shared(whole.expect("received above"), i * self.len..(i + 1) * self.len))
    }

    /// Receives a subtree that cannot be added yet.
    fn put_aside(&mut self, source: usize, first: bool) -> Result<Value<'a>, FabricError> {
        let mut room = self.room(first);
        let Source { member, lane, .. } = &self.from[source];
        self.mail.recv_into(self.task, *member, *lane, bytes_mut(room.get_mut()))?;
        Ok(room)
    }

    /// `left += right`; makes `left` a sum of its own first.
    fn add(&mut self, left: &mut Term<'a>, right: &Value) {
        let added = if left.value.is_sum() {
            self.add_to(left.value.get_mut(), None, right)
        } else {
            let room = self.room(left.first);
            let addend = std::mem::replace(&mut left.value, room);
            let added = self.add_to(left.value.get_mut(), Some(addend.get()), right);
            addend.reclaim(self.spare);
            added
        };
        self.failed = self.failed.take().or(added.err());
    }

    /// `sum = left + right`; without `left`, `sum += right`.
    fn add_to(&mut self, sum: &mut [f32], left: Option<&[f32]>, right: &Value) -> Result<(), FabricError> {
        let Value::Coming(source) = right else {
            add_piece(sum, left, right.get());
            return Ok(());
        };
        let Source { member, lane, .. } = &self.from[*source];
        self.mail.recv_with(self.task, *member, *lane, self.len, &mut |at, piece| {
            let range = at..at + piece.len();
            add_piece(&mut sum[range.clone()], left.map(|left| &left[range]), piece);
        })
    }
}

/// `sum = left + right`; without `left`, `sum += right`.
fn add_piece(sum: &mut [f32], left: Option<&[f32]>, right: &[f32]) {
    match left {
        Some(left) => {
            for ((s, l), r) in sum.iter_mut().zip(left).zip(right) {
                *s = l + r;
            }
        }
        None => {
            for (s, r) in sum.iter_mut().zip(right) {
                *s += r;
            }
        }
    }
}

//! Which rows go where, and how they lie in a parcel. Pure: the exchange itself is the executor's.
//!
//! A row is sent once to every rank of its group that has some of its experts, not once per expert, and comes back as one
//! vector: the ranks hold aligned blocks of experts, so what a rank adds up is a complete subtree of the sum.
//!
//! Rows of a parcel stand by leaf (context cell, tensor cell), then data cell, then position. At the receiver rows are
//! numbered through parcel by parcel, and are read where they lie: what stays here is in no parcel. By leaf, and then by
//! ascending data cells, is the order in which a group's rows enter the product of an expert's weight gradient, whoever hosts
//! which cells.

use std::ops::Range;

use kernels::{Groups, Pieces, Terms};
use spec::{Moe, Unit};

use crate::buffers::Pool;
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::segments::Env;

/// The ranks that host the data cells of a group together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupRanks {
    /// How many.
    pub ranks: usize,
    /// Data cells of a group (`grid.ep`), which is also the number of blocks of experts.
    pub blocks: usize,
    /// Which of them this rank is.
    pub me: usize,
}

impl GroupRanks {
    /// The member that works on `expert` of `experts`.
    pub fn rank_of(&self, expert: u32, experts: usize) -> usize {
        expert as usize * self.ranks / experts
    }

    /// Experts lie in blocks in ascending order.
    fn block_of(&self, expert: u32, experts: usize) -> u32 {
        (expert as usize * self.blocks / experts) as u32
    }
}

/// Rows and their experts as one rank works on them.
#[derive(Debug, Default)]
pub struct Work {
    /// What came, by member; of this rank nothing. Empty: all rows are local.
    pub parcels: Vec<Vec<f32>>,
    /// Where the rows of a parcel begin.
    bodies: Vec<usize>,
    /// Row r goes to the experts `first[r]..first[r + 1]` of `chosen`.
    pub first: Vec<u32>,
    /// Experts, ascending in a row.
    pub chosen: Vec<u32>,
    /// Their gates.
    pub gates: Vec<f32>,
    /// Their blocks, counted from the first one of this rank.
    pub blocks: Vec<u32>,
    /// Rows by expert and leaf.
    pub groups: Groups,
    /// Where the row of every slot lies among the local rows and, behind them, those of the parcels.
    pub at: Vec<u32>,
    /// The rows of every member.
    pub from: Vec<Range<usize>>,
}

impl Work {
    fn new(
        env: &Env,
        moe: &Moe,
        first: Vec<u32>,
        chosen: Vec<u32>,
        gates: Vec<f32>,
        parts: &[Vec<Range<usize>>],
    ) -> Self {
        let per_rank = (env.group.blocks / env.group.ranks) as u32;
        let mut blocks: Vec<u32> =
            chosen.iter().map(|e| env.group.block_of(*e, moe.experts) % per_rank.max(1)).collect();
        if env.mutant == Some(Mutant::CombineInOneBlock) {
            blocks.fill(0);
        }
        let groups = Groups::new(&first, &chosen, moe.experts, parts);
        Self { at: groups.rows.clone(), first, chosen, gates, blocks, groups, ..Self::default() }
    }

    /// What came, with nothing else.
    pub fn take_parcels(&mut self) -> Self {
        Self { parcels: std::mem::take(&mut self.parcels), ..Self::default() }
    }

    /// How the outputs of the experts add up to the rows `rows`; `gates` empty: unweighted.
    pub fn terms<'a>(&'a self, group: GroupRanks, gates: &'a [f32], rows: Range<usize>) -> Terms<'a> {
        let (first, num_blocks) = (&self.first[rows.start..=rows.end], group.blocks / group.ranks);
        Terms { first, slots: &self.groups.slots, gates, blocks: &self.blocks, num_blocks }
    }

    /// The choices of the rows of `member`.
    pub fn choices_of(&self, member: usize) -> Range<usize> {
        let rows = &self.from[member];
        self.first[rows.start] as usize..self.first[rows.end] as usize
    }

    /// The rows that [`Work::at`] tells, of `local` and what came.
    pub fn rows<'a>(&'a self, local: &'a [f32], hidden: usize) -> Pieces<'a> {
        let came = self.parcels.iter().zip(&self.bodies).map(|(parcel, body)| &parcel[(*body).min(parcel.len())..]);
        Pieces::new(hidden, std::iter::once(local).chain(came))
    }
}

/// What one member was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sent {
    /// Local rows.
    pub rows: Vec<u32>,
    /// The (row, choice) of every term, in the order of the parcel.
    pub choices: Vec<u32>,
}

/// The local rows of every leaf (context cell, tensor cell) that this rank has of a group, in the order of the group.
fn leaves(env: &Env) -> Vec<Vec<Range<usize>>> {
    let contexts = env.lanes.contexts.len();
    let cells = env.lanes.cells.len();
    let reversed = env.mutant == Some(Mutant::GroupReversed);
    let leaf = |(context, i): (usize, usize)| {
        let of_cell =
            |d: usize| env.place.cell_rows((if reversed { cells - 1 - d } else { d }) * contexts + context, i);
        (0..cells).flat_map(of_cell).collect()
    };
    (0..contexts).flat_map(|c| (0..env.place.num_cells()).map(move |i| (c, i))).map(leaf).collect()
}

/// The work where one rank hosts the whole group: all experts on the local rows.
pub(super) fn at_home(env: &Env, moe: &Moe, chosen: &[u32], gates: &[f32]) -> Work {
    let first = (0..=env.rows_local()).map(|row| (row * moe.per_token) as u32).collect();
    Work::new(env, moe, first, chosen.to_vec(), gates.to_vec(), &leaves(env))
}

/// A parcel for each member, with what was put in it. A parcel is, in words of 32 bits: the rows of each leaf; of each row
/// the number of its terms; of each term expert and gate; then the rows, `hidden` numbers each, but for those that stay here.
pub fn pack(
    env: &Env,
    pool: &mut Pool,
    moe: &Moe,
    chosen: &[u32],
    gates: &[f32],
    n: &[f32],
) -> (Vec<Vec<f32>>, Vec<Sent>) {
    let hidden = env.place.hidden;
    let leaves = leaves(env);
    let one = |member: usize| {
        let mut sent = Sent::default();
        let (mut head, mut counts) = (Vec::new(), Vec::new());
        for leaf in &leaves {
            let before = sent.rows.len();
            for row in leaf.iter().cloned().flatten() {
                let terms = sent.choices.len();
                let choices = row * moe.per_token..(row + 1) * moe.per_token;
                let here = choices.filter(|c| env.group.rank_of(chosen[*c], moe.experts) == member);
                sent.choices.extend(here.map(|c| c as u32));
                if sent.choices.len() > terms {
                    sent.rows.push(row as u32);
                    counts.push(word(sent.choices.len() - terms));
                }
            }
            head.push(word(sent.rows.len() - before));
        }
        head.append(&mut counts);
        head.extend(sent.choices.iter().flat_map(|c| [word(chosen[*c as usize] as usize), gates[*c as usize]]));
        if member == env.group.me {
            return (head, sent);
        }
        let mut parcel = pool.take_loose(head.len() + sent.rows.len() * hidden);
        let (words, rows) = parcel.split_at_mut(head.len());
        words.copy_from_slice(&head);
        kernels::gather_rows(env.ctx, n, hidden, &sent.rows, rows);
        (parcel, sent)
    };
    (0..env.group.ranks).map(one).unzip()
}

/// The gradients of what every other member returned for the rows that it was sent.
pub fn pack_gradients(env: &Env, pool: &mut Pool, grad: &[f32], sent: &[Sent]) -> Vec<Vec<f32>> {
    let one = |(member, sent): (usize, &Sent)| {
        let rows = if member == env.group.me { &[][..] } else { &sent.rows };
        let mut out = pool.take_loose(rows.len() * env.place.hidden);
        kernels::gather_rows(env.ctx, grad, env.place.hidden, rows, &mut out);
        out
    };
    sent.iter().enumerate().map(one).collect()
}

/// The work out of the parcels of all members; `own` is what stays here.
///
/// # Errors
/// If a parcel breaks off.
pub fn unpack(env: &Env, moe: &Moe, mut parcels: Vec<Vec<f32>>, own: &Sent) -> Result<Work, TrainError> {
    let (hidden, me) = (env.place.hidden, env.group.me);
    let num_leaves = env.lanes.contexts.len() * env.place.num_cells();
    let (mut first, mut chosen, mut gates) = (vec![0u32], Vec::new(), Vec::new());
    let (mut from, mut bodies) = (Vec::new(), Vec::new());
    let mut parts: Vec<Vec<Range<usize>>> = vec![Vec::new(); num_leaves];
    // Where the rows lie: local ones by number, then those of the parcels.
    let (mut lie, mut next) = (Vec::new(), env.rows_local() as u32);
    for (member, parcel) in parcels.iter().enumerate() {
        let Parcel { of_leaf, counts, terms, body } = Parcel::open(parcel, num_leaves)?;
        let start = first.len() - 1;
        let mut row = start;
        for (part, rows) in parts.iter_mut().zip(&of_leaf) {
            part.push(row..row + rows);
            row += rows;
        }
        for count in counts {
            first.push(first[first.len() - 1] + count.to_bits());
        }
        for term in terms.chunks_exact(2) {
            chosen.push(term[0].to_bits());
            gates.push(term[1]);
        }
        if member == me {
            lie.extend(&own.rows);
        } else {
            if parcel.len() - body != (row - start) * hidden {
                return Err(short(parcel));
            }
            lie.extend(next..next + (row - start) as u32);
            next += (row - start) as u32;
        }
        from.push(start..row);
        bodies.push(body);
    }
    if let Some(stray) = chosen.iter().find(|e| **e as usize >= moe.experts) {
        return Err(TrainError::Internal(format!("a parcel names expert {stray} of {}", moe.experts)));
    }
    parcels[me] = Vec::new();
    let work = Work::new(env, moe, first, chosen, gates, &parts);
    let at = work.at.iter().map(|row| lie[*row as usize]).collect();
    Ok(Work { parcels, bodies, from, at, ..work })
}

/// A count as it travels among numbers.
fn word(n: usize) -> f32 {
    f32::from_bits(n as u32)
}

/// A parcel under reading.
struct Parcel<'a> {
    of_leaf: Vec<usize>,
    counts: &'a [f32],
    terms: &'a [f32],
    /// Where its rows begin.
    body: usize,
}

fn short(parcel: &[f32]) -> TrainError {
    TrainError::Internal(format!("a parcel of {} words breaks off", parcel.len()))
}

impl<'a> Parcel<'a> {
    fn open(parcel: &'a [f32], num_leaves: usize) -> Result<Self, TrainError> {
        let short = || short(parcel);
        let (head, rest) = parcel.split_at_checked(num_leaves).ok_or_else(short)?;
        let of_leaf: Vec<usize> = head.iter().map(|n| n.to_bits() as usize).collect();
        let (counts, rest) = rest.split_at_checked(of_leaf.iter().sum()).ok_or_else(short)?;
        let terms: usize = counts.iter().map(|n| n.to_bits() as usize).sum();
        let (terms, rows) = rest.split_at_checked(2 * terms).ok_or_else(short)?;
        Ok(Self { of_leaf, counts, terms, body: parcel.len() - rows.len() })
    }
}

/// Where the vectors that the members return for each local row stand among all of them, for [`kernels::combine`].
pub struct Returned {
    first: Vec<u32>,
    slots: Vec<u32>,
    members: Vec<u32>,
}

impl Returned {
    /// From what was sent to each member; they return in the same order.
    pub fn new(sent: &[Sent], rows: usize) -> Self {
        let mut first = vec![0u32; rows + 1];
        for row in sent.iter().flat_map(|sent| &sent.rows) {
            first[*row as usize + 1] += 1;
        }
        (1..first.len()).for_each(|i| first[i] += first[i - 1]);
        let mut next = first.clone();
        let total = first[rows] as usize;
        let (mut slots, mut members) = (vec![0; total], vec![0; total]);
        let mut slot = 0;
        for (member, sent) in sent.iter().enumerate() {
            for row in &sent.rows {
                let at = &mut next[*row as usize];
                (slots[*at as usize], members[*at as usize]) = (slot, member as u32);
                (*at, slot) = (*at + 1, slot + 1);
            }
        }
        Self { first, slots, members }
    }

    /// Each row's vectors, one per member that worked on it: the upper levels of the tree over blocks.
    pub fn terms(&self, group: GroupRanks) -> Terms<'_> {
        Terms { first: &self.first, slots: &self.slots, gates: &[], blocks: &self.members, num_blocks: group.ranks }
    }
}

/// The unit, for messages.
pub fn missing(what: &str, unit: Unit, layer: usize) -> TrainError {
    TrainError::Internal(format!("{what} of {unit:?} in layer {layer} is not there"))
}

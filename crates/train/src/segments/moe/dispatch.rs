//! Which rows go where, and how they lie in a parcel. Pure: the exchange itself is the executor's.
//!
//! A row is sent once to every rank of its group that has some of its experts, not once per expert, and comes back as one
//! vector: the ranks hold aligned blocks of experts, so what a rank adds up is a complete subtree of the sum.
//!
//! Rows of a parcel stand by leaf (context cell, tensor cell), then data cell, then position; at the receiver the parcels
//! of a leaf follow one another by ascending data cells. That is the order in which a group's rows enter the product of an
//! expert's weight gradient, whoever hosts which cells.

use std::ops::Range;

use kernels::{Groups, Terms};
use spec::{Moe, Unit};

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
    /// The rows, where they came from other ranks; empty: the local rows.
    pub x: Vec<f32>,
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
    /// For every member that sent rows: which rows of `x` they are, in its order.
    pub from: Vec<Vec<u32>>,
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
        Self { x: Vec::new(), first, chosen, gates, blocks, groups, from: Vec::new() }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.first.len() - 1
    }

    /// How the outputs of the experts add up here; `gates` empty: unweighted.
    pub fn terms<'a>(&'a self, group: GroupRanks, gates: &'a [f32]) -> Terms<'a> {
        let num_blocks = group.blocks / group.ranks;
        Terms { first: &self.first, slots: &self.groups.slots, gates, blocks: &self.blocks, num_blocks }
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
/// the number of its terms; of each term expert and gate; then the rows, `hidden` numbers each.
pub fn pack(env: &Env, moe: &Moe, chosen: &[u32], gates: &[f32], n: &[f32]) -> (Vec<Vec<f32>>, Vec<Sent>) {
    let hidden = env.place.hidden;
    let leaves = leaves(env);
    let one = |member: usize| {
        let mut sent = Sent::default();
        let (mut head, mut terms, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for leaf in &leaves {
            let before = sent.rows.len();
            for row in leaf.iter().cloned().flatten() {
                let choices = row * moe.per_token..(row + 1) * moe.per_token;
                let here = choices.filter(|c| env.group.rank_of(chosen[*c], moe.experts) == member);
                let here: Vec<usize> = here.collect();
                if here.is_empty() {
                    continue;
                }
                sent.rows.push(row as u32);
                rows.push(word(here.len()));
                terms.extend(here.iter().flat_map(|c| [word(chosen[*c] as usize), gates[*c]]));
                sent.choices.extend(here.iter().map(|c| *c as u32));
            }
            head.push(word(sent.rows.len() - before));
        }
        let mut parcel = head;
        parcel.extend(rows);
        parcel.extend(terms);
        sent.rows.iter().for_each(|row| parcel.extend(&n[*row as usize * hidden..(*row as usize + 1) * hidden]));
        (parcel, sent)
    };
    (0..env.group.ranks).map(one).unzip()
}

/// The work out of the parcels of all members.
///
/// # Errors
/// If a parcel breaks off.
pub fn unpack(env: &Env, moe: &Moe, parcels: &[Vec<f32>]) -> Result<Work, TrainError> {
    let hidden = env.place.hidden;
    let num_leaves = env.lanes.contexts.len() * env.place.num_cells();
    let mut opened =
        parcels.iter().map(|parcel| Parcel::open(parcel, num_leaves, hidden)).collect::<Result<Vec<_>, _>>()?;
    let (mut first, mut chosen, mut gates, mut x) = (vec![0u32], Vec::new(), Vec::new(), Vec::new());
    let mut from = vec![Vec::new(); parcels.len()];
    let mut parts = Vec::new();
    for leaf in 0..num_leaves {
        let start = first.len() - 1;
        for (member, parcel) in opened.iter_mut().enumerate() {
            for _ in 0..parcel.of_leaf[leaf] {
                let (terms, row) = parcel.next_row();
                from[member].push(first.len() as u32 - 1);
                for term in terms.chunks_exact(2) {
                    chosen.push(term[0].to_bits());
                    gates.push(term[1]);
                }
                x.extend_from_slice(row);
                first.push(chosen.len() as u32);
            }
        }
        parts.push(std::iter::once(start..first.len() - 1).collect());
    }
    if let Some(stray) = chosen.iter().find(|e| **e as usize >= moe.experts) {
        return Err(TrainError::Internal(format!("a parcel names expert {stray} of {}", moe.experts)));
    }
    Ok(Work { x, from, ..Work::new(env, moe, first, chosen, gates, &parts) })
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
    rows: &'a [f32],
    hidden: usize,
}

impl<'a> Parcel<'a> {
    fn open(parcel: &'a [f32], num_leaves: usize, hidden: usize) -> Result<Self, TrainError> {
        let short = || TrainError::Internal(format!("a parcel of {} words breaks off", parcel.len()));
        let (head, rest) = parcel.split_at_checked(num_leaves).ok_or_else(short)?;
        let of_leaf: Vec<usize> = head.iter().map(|n| n.to_bits() as usize).collect();
        let total: usize = of_leaf.iter().sum();
        let (counts, rest) = rest.split_at_checked(total).ok_or_else(short)?;
        let terms: usize = counts.iter().map(|n| n.to_bits() as usize).sum();
        let (terms, rows) = rest.split_at_checked(2 * terms).ok_or_else(short)?;
        if rows.len() != total * hidden {
            return Err(short());
        }
        Ok(Self { of_leaf, counts, terms, rows, hidden })
    }

    /// Terms and numbers of the next row; `open` has seen that they are there.
    fn next_row(&mut self) -> (&'a [f32], &'a [f32]) {
        let (count, counts) = self.counts.split_first().expect("counted");
        let (terms, left) = self.terms.split_at(2 * count.to_bits() as usize);
        let (row, rows) = self.rows.split_at(self.hidden);
        (self.counts, self.terms, self.rows) = (counts, left, rows);
        (terms, row)
    }
}

/// `rows` of `x` one after the other.
pub fn gather(env: &Env, x: &[f32], rows: &[u32]) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() * env.place.hidden];
    kernels::gather_rows(env.ctx, x, env.place.hidden, rows, &mut out);
    out
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

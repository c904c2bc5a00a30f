//! What can be wrong with a list, in words.

use std::fmt;

use spec::Unit;

use crate::instr::{Instr, Program};

/// An instruction and where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// Index in its list.
    pub at: usize,
    /// The instruction.
    pub instr: Instr,
}

impl Place {
    /// Instruction `at` of `program`.
    pub(crate) fn of(program: &Program, at: usize) -> Self {
        Self { rank: program.rank, at, instr: program.instrs[at] }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} instruction {} `{}`", self.rank, self.at, self.instr)
    }
}

/// A rank that waits for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The instruction that never ends.
    pub place: Place,
    /// The ranks that it waits for, the first few.
    pub on: Vec<usize>,
}

/// A broken law.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Not one list per rank.
    #[error("the layout has {want} ranks, but there are {got} programs")]
    Programs {
        /// Ranks of the layout.
        want: usize,
        /// Lists given.
        got: usize,
    },
    /// Lists in the wrong order.
    #[error("program number {index} is that of rank {rank}: give them by ascending rank")]
    Rank {
        /// Its place.
        index: usize,
        /// Its rank.
        rank: usize,
    },
    /// An instruction that has no business on this rank or in this step.
    #[error("{place} does not belong here: {why}")]
    Wrong {
        /// The instruction.
        place: Place,
        /// The law.
        why: String,
    },
    /// Something that should have come before.
    #[error("{place} comes where {missing} is due, which the list lacks")]
    Missing {
        /// The instruction found in its place.
        place: Place,
        /// What is missing.
        missing: String,
    },
    /// Something that should have come before the end of the list.
    #[error("rank {rank} ends without {missing}")]
    MissingAtEnd {
        /// The rank.
        rank: usize,
        /// What is missing.
        missing: String,
    },
    /// An instruction that was there before.
    #[error("{place} is one too many")]
    Double {
        /// The instruction.
        place: Place,
    },
    /// An instruction too early or too late.
    #[error("{place} is out of order: {law}")]
    OutOfOrder {
        /// The instruction.
        place: Place,
        /// The law.
        law: String,
    },
    /// Weight gradients not first in, first out.
    #[error(
        "{place} adds to weight gradients before cell {} mb {} has: they add up in ascending order",
        earlier.cell, earlier.mb
    )]
    Fifo {
        /// The instruction.
        place: Place,
        /// The unit whose turn it is.
        earlier: Unit,
    },
    /// A size that does not follow from the shapes.
    #[error("{place} has the wrong size: the shapes say {want} B")]
    Bytes {
        /// The instruction.
        place: Place,
        /// The size by the shapes.
        want: u64,
    },
    /// A message to or from the wrong rank.
    #[error("{place} names the wrong rank: it is rank {want}")]
    Peer {
        /// The instruction.
        place: Place,
        /// The rank by the layout.
        want: usize,
    },
    /// A receive that gets another message than it asks for.
    #[error("{receiver} gets what {sender} sent: messages of one kind between two ranks arrive in order")]
    Crossed {
        /// The receive.
        receiver: Place,
        /// The send.
        sender: Place,
    },
    /// Members of a group that meet in different collectives.
    #[error("{place} meets {other} in one group")]
    Mismatch {
        /// The later one.
        place: Place,
        /// The first of the group.
        other: Place,
    },
    /// An exchange that some members have posted and others have not: its halves do not find each other.
    #[error("{taker} takes what was posted, {other} has posted nothing")]
    Unposted {
        /// Who posted.
        taker: Place,
        /// Who did not.
        other: Place,
    },
    /// A message that nobody takes.
    #[error("{place} is never received")]
    Unreceived {
        /// The send.
        place: Place,
    },
    /// Ranks that wait for ever.
    #[error("{} ranks wait for ever{}{}", waits.len(), cycle_text(cycle, *ended), waits_text(waits))]
    Deadlock {
        /// Every rank that waits.
        waits: Vec<Wait>,
        /// Ranks that wait for each other, each for the next and the last for the first.
        cycle: Vec<usize>,
        /// Without a cycle: the rank at the end of the chain, which has ended.
        ended: Option<usize>,
    },
}

/// Waiting ranks that the text of a deadlock shows.
const WAITS_SHOWN_MAX: usize = 16;

fn cycle_text(cycle: &[usize], ended: Option<usize>) -> String {
    match (cycle, ended) {
        ([first, ..], _) => {
            let chain: Vec<String> = cycle.iter().chain([first]).map(usize::to_string).collect();
            format!(", in a cycle: {}", chain.join(" waits for "))
        }
        (_, Some(rank)) => format!(", for rank {rank} in the end, whose list has ended"),
        _ => String::new(),
    }
}

fn waits_text(waits: &[Wait]) -> String {
    let mut text: String =
        waits.iter().take(WAITS_SHOWN_MAX).map(|w| format!("\n  {} waits for ranks {:?}", w.place, w.on)).collect();
    if waits.len() > WAITS_SHOWN_MAX {
        text += &format!("\n  and {} more", waits.len() - WAITS_SHOWN_MAX);
    }
    text
}

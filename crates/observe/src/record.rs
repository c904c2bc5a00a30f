//! What a rank writes down. Times are nanoseconds of the machine's monotonic clock, which all its processes share.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The profiled steps of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankRecord {
    /// The rank.
    pub rank: usize,
    /// In order.
    pub steps: Vec<StepRecord>,
}

/// One step of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counts from 1.
    pub step: u64,
    /// The step began.
    pub began_ns: u64,
    /// Its first instruction began.
    pub ran_ns: u64,
    /// The step was over.
    pub ended_ns: u64,
    /// By instruction: when it was over (the next one began), and how much of it was waiting for other ranks.
    pub marks: Vec<(u64, u64)>,
    /// Exchanges that ran beside other instructions.
    pub flights: Vec<Flight>,
    /// Instructions after which what had been posted was moved on, and how long that took; it is part of their span.
    #[serde(default)]
    pub moved: Vec<(usize, u64)>,
    /// Instructions in which mirrored state was updated, and how long that took; it is part of their span.
    #[serde(default)]
    pub late: Vec<(usize, u64)>,
}

/// An exchange between its start and the moment when its result was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flight {
    /// The instruction that takes its result.
    pub instr: usize,
    /// It started.
    pub began_ns: u64,
    /// Its result was there.
    pub ended_ns: u64,
}

/// An instruction's stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// It began.
    pub began_ns: u64,
    /// It was over.
    pub ended_ns: u64,
    /// Waiting for other ranks within it.
    pub waited_ns: u64,
}

impl Span {
    /// Nanoseconds from begin to end.
    pub fn len_ns(&self) -> u64 {
        self.ended_ns - self.began_ns
    }
}

impl StepRecord {
    /// The span of every instruction, in order: each begins where the one before ended.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        let mut began_ns = self.ran_ns;
        self.marks.iter().map(move |&(ended_ns, waited_ns)| {
            let ended_ns = ended_ns.max(began_ns);
            let span = Span { began_ns, ended_ns, waited_ns: waited_ns.min(ended_ns - began_ns) };
            began_ns = ended_ns;
            span
        })
    }

    /// The whole step.
    pub fn whole(&self) -> Range<u64> {
        self.began_ns..self.ended_ns
    }
}

/// Why records cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(pub String);

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreadable {}

/// That the records are those of `programs`: a rank each, one mark per instruction, the same steps everywhere.
///
/// # Errors
/// What does not fit.
pub fn check(records: &[RankRecord], programs: &[program::Program]) -> Result<(), Unreadable> {
    if records.len() != programs.len() || !records.iter().zip(programs).all(|(r, p)| r.rank == p.rank) {
        let ranks: Vec<_> = records.iter().map(|r| r.rank).collect();
        return Err(Unreadable(format!("records of ranks {ranks:?}, programs of {}", programs.len())));
    }
    let steps = |record: &RankRecord| record.steps.iter().map(|s| s.step).collect::<Vec<_>>();
    for (record, program) in records.iter().zip(programs) {
        if steps(record) != steps(&records[0]) || record.steps.is_empty() {
            let (mine, first) = (steps(record), steps(&records[0]));
            return Err(Unreadable(format!("rank {} recorded the steps {mine:?}, rank 0 {first:?}", record.rank)));
        }
        let instrs = program.instrs.len();
        if let Some(bad) = record.steps.iter().find(|s| s.marks.len() != instrs) {
            let (step, marks) = (bad.step, bad.marks.len());
            return Err(Unreadable(format!(
                "step {step} of rank {}: {marks} marks, {instrs} instructions",
                record.rank
            )));
        }
    }
    Ok(())
}

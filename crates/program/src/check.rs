//! The checker: proves the lists of all ranks before any of them runs.
//!
//! It never looks at how lists are made. What it knows is the law:
//!
//! - `law`: what one unit does on one chunk, derived from what each segment reads and leaves; `touch`: what comes before
//!   what, derived from the places that each operation reads and writes;
//! - `order`: one rank's list obeys it, for every unit that the rank hosts and for no other,
//!   with gradients first in, first out, each bucket's summed over the cells before the next
//!   microbatch's, parameters there when they are read, and the end of the step in order;
//! - `run`: all lists together come to an end, every message finds its receiver, every
//!   collective all its members. The same run takes the times under unit costs;
//! - `alike`: many ranks at the price of few.

mod alike;
mod law;
mod order;
mod report;
mod run;
mod touch;
mod violation;

use spec::{Grid, Layout, Model};

pub use alike::check_alike;
pub use report::{AXES, RankReport, Report, Span, TICKS_PER_LAYER};
pub use violation::{Place, Violation, Wait};

use crate::bytes::Sizes;
use crate::instr::{Mode, Program};
use crate::kept::Kept;
use crate::shelf::Shelf;

/// Violations that are kept of one rank; what follows the first few is mostly their echo.
const VIOLATIONS_PER_RANK_MAX: usize = 16;

/// Proves `programs`, one per rank ascending, for sequences of `seq` tokens.
///
/// # Errors
/// Every violation found, those of single lists first, then those of the lists together.
pub fn check(
    programs: &[Program],
    model: &Model,
    grid: &Grid,
    layout: &Layout,
    seq: usize,
    mode: Mode,
) -> Result<Report, Vec<Violation>> {
    if programs.len() != layout.world() {
        return Err(vec![Violation::Programs { want: layout.world(), got: programs.len() }]);
    }
    if let Some((index, program)) = programs.iter().enumerate().find(|(i, p)| *i != p.rank) {
        return Err(vec![Violation::Rank { index, rank: program.rank }]);
    }
    let sizes = Sizes::new(model, grid, layout, seq);
    let laws = law::Laws::new(model, &sizes, layout, mode);
    let sums = law::Sums::new(grid, layout);
    let step = order::Step { model, grid, layout, mode, sizes: &sizes, laws: &laws, sums };
    let mut violations: Vec<Violation> = programs.iter().flat_map(|p| order::check(&step, p)).collect();
    let kept = Kept::new(model, grid, layout, seq);
    let mut outcome = run::run(programs, layout, mode, &kept);
    shelve(&mut outcome.ranks, programs, layout, mode, &kept);
    violations.extend(outcome.violations);
    if violations.is_empty() { Ok(Report::new(outcome.ranks, layout)) } else { Err(violations) }
}

/// Where layers go to files, what is kept for backward in memory is less.
fn shelve(ranks: &mut [RankReport], programs: &[Program], layout: &Layout, mode: Mode, kept: &Kept) {
    if mode == Mode::Train && layout.offload.activations() {
        for (report, program) in ranks.iter_mut().zip(programs) {
            report.peak_kept = Shelf::new(program).most_kept(program, kept);
        }
    }
}

#[cfg(test)]
mod tests;

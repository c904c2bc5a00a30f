//! The step program: what every rank does in one step, as data.
//!
//! [`lower`](lower::lower) turns a validated run into one instruction list per rank,
//! [`check`](check::check) proves the lists before they run, [`mod@print`] shows them. No I/O.
//!
//! The order of pipeline work comes from [`schedule`], sizes of messages from [`bytes`],
//! who updates which state from [`buckets`], [`ownership`] and [`state`], [`cost`] tells how much work it is,
//! and [`balance`] how evenly a pipeline shares it.

mod axis;
pub mod balance;
pub mod buckets;
pub mod bytes;
pub mod check;
pub mod cost;
mod flow;
pub mod instr;
pub mod kept;
pub mod lower;
pub mod memory;
pub mod mirror;
pub mod ownership;
pub mod packed;
pub mod placement;
pub mod print;
pub mod schedule;
pub mod shelf;
pub mod state;
#[cfg(test)]
mod testing;

pub use buckets::{Bucket, ChunkPlan};
pub use check::check;
pub use cost::{Costs, Work};
pub use instr::{Axis, Exchange, Instr, Mode, Op, Pass, Program, Scope, Segment, TokenBlocks, Value};
pub use lower::{lower, lower_all, lower_all_parts, lower_parts};
pub use mirror::Mirrors;
pub use packed::Packed;
pub use schedule::{Task, tasks};
pub use shelf::Shelf;
pub use state::chunk_tensors;

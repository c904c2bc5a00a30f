//! The controller's decisions, pure: state, time and input in; actions with their reasons out. No clock, no socket.
//!
//! ```text
//!  input.rs   what happened, as the shell saw it
//!  action.rs  what is to be done
//!  held.rs    what the ranks of an ended world hold together: the step from which all go on, and who is believed
//!  transaction.rs  THE decision between staying and going forward, explored with a model of the protocol
//!  shrink.rs  which layout fits the processes that are left
//!  spread.rs  which ranks share a host
//!  hosts.rs   processes, their hosts, failures in a window
//!  ladder/    the state machine: trouble, settling, forming, running, changes of the run (intervene), another program (renew),
//!             processes of another run (unfit)
//! ```
//!
//! The ladder, from the cheapest answer up: replay the step with the same processes; restart a process; a spare in its place;
//! fewer ranks over the same grid; more again when there is a place; the checkpoint on disk where a piece of state has no
//! living holder; the end, with a reason, when the budget is spent.

mod action;
mod held;
mod hosts;
mod input;
mod ladder;
mod shrink;
mod spread;
#[cfg(test)]
mod tests;
pub mod transaction;

pub use action::{Action, Decision, Origin, Trouble, World};
pub use held::{Agreement, agree};
pub use input::{Cause, Decided, Held, Input, Piece, Process};
pub use ladder::{Policy, Start, Unchecked};
pub use shrink::{Laws, nearest};

/// Exit code of a run whose budget of failures is spent.
pub const BUDGET_SPENT: i32 = 5;
/// Exit code of a run that was asked to stop.
pub const STOPPED: i32 = 3;
/// Exit code of a run that diverged.
pub const DIVERGED: i32 = 4;
/// Exit code of a run that found its input to be another one than it began with.
pub const CHANGED: i32 = 7;
/// Exit code of an internal error.
pub const INTERNAL: i32 = 70;

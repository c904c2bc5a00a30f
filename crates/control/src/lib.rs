//! Controller and agents: the shells around `policy`, and what they and rank processes say to each other.
//!
//! ```text
//!  wire.rs        agent and rank process, line by line
//!  fault.rs       deliberate faults; inject.rs: as a person asks for them
//!  agent.rs       what a controller wants of agents; local.rs: the one of this machine
//!  processes.rs   rank processes of this machine
//!  remote/        agents of other hosts, by TCP; lease.rs: one controller at a time
//!  signs.rs       what processes show of themselves: life, work, waiting in vain
//!  journal.rs     what a controller went through, on disk
//!  repair.rs      times of recoveries, and what became of deliberate faults
//!  controller.rs  hears agents, asks the policy, does what it says
//! ```

pub mod agent;
pub mod controller;
pub mod fault;
pub mod identity;
pub mod inject;
pub mod journal;
pub mod lease;
pub mod local;
pub mod processes;
pub mod remote;
mod repair;
mod signs;
pub mod wire;

pub use repair::Repairs;

//! Controller and agents: the shells around `policy`, and what they and rank processes say to each other.
//!
//! ```text
//!  wire.rs        agent and rank process, line by line
//!  fault.rs       deliberate faults; inject.rs: as a person asks for them
//!  agent.rs       what a controller wants of agents; local.rs: the one of this machine
//!  journal.rs     what a controller went through, on disk
//!  repair.rs      times of recoveries, and what became of deliberate faults
//!  controller.rs  hears agents, asks the policy, does what it says
//! ```

pub mod agent;
pub mod controller;
pub mod fault;
pub mod inject;
pub mod journal;
pub mod local;
mod repair;
pub mod wire;

pub use repair::Repairs;

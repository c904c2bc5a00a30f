//! Executes the step program on a rank: segments, optimizer, data order, checkpoints; and starts the ranks.
pub mod against;
pub mod best;
pub mod buffers;
pub mod comm;
pub mod corpus;
mod error;
pub mod eval;
pub mod exec;
pub mod fault;
pub mod guard;
pub mod init;
pub mod launch;
pub mod load;
pub mod mutant;
pub mod optim;
pub mod persist;
pub mod pin;
pub mod place;
pub mod rank;
pub mod recover;
pub mod sample;
pub mod segments;
pub mod state;
pub mod virtual_ranks;
pub mod vote;
pub mod worker;

pub use error::TrainError;

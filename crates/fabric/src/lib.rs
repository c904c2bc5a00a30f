//! Point-to-point transports and ordered collectives.
//!
//! A collective here adds in the order that [`spec::tree`] fixes, so the bits of a sum do
//! not depend on who held which leaves, on the transport or on the number of ranks.
//!
//! ```text
//!  reduce.rs gather.rs   collectives: which message goes where (they know only Endpoint)
//!  plan.rs  route.rs     pure: parts, blocks, who merges and who owns
//!  endpoint.rs op.rs     one rank's end: one operation at a time, abort, counters
//!  mail.rs  frame.rs     messages: header, checksum, sequence, mailbox
//!  link.rs               bytes: a non-blocking stream per peer
//!  shm/     tcp/         the transports (threads are shared memory inside one process)
//! ```
//!
//! A failed [`Endpoint`] stays failed: the streams under it may have stopped inside a
//! message. Build a new one with the next generation.

mod bits;
mod counters;
mod endpoint;
mod error;
mod frame;
mod gather;
mod link;
mod mail;
mod op;
mod options;
mod plan;
mod reduce;
mod route;
mod shm;
mod tcp;

pub use counters::{Count, Counters};
pub use endpoint::{Aborter, Endpoint};
pub use error::FabricError;
pub use frame::Operation;
pub use mail::Fault;
pub use options::{FabricOptions, Group, RankId};
pub use plan::ReducePlan;
pub use shm::{ShmWorld, threads};
pub use tcp::TcpListenerHandle;

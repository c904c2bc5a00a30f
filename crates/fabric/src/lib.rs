//! Point-to-point transports and ordered collectives.
//!
//! A collective here adds in the order that [`spec::tree`] fixes, so the bits of a sum do
//! not depend on who held which leaves, on the transport or on the number of ranks.
//!
//! ```text
//!  reduce.rs gather.rs   collectives: which message goes where (they know only Endpoint)
//!  posted.rs             sums and gathers in two halves: post, and take when the result is needed
//!  exchange.rs           all-to-all with sizes that only the senders know
//!  sums.rs               the ordered sum of one block, added as it arrives
//!  plan.rs  route.rs     pure: parts, blocks, who merges and who owns
//!  endpoint.rs op.rs     one rank's end: one operation at a time, abort, counters
//!  flight.rs             the last exchanges, readable while one is stuck
//!  core_wait.rs          how long a thread had no core
//!  mail/    frame.rs     messages: header, checksum, sequence, mailbox, what was posted
//!  link.rs               bytes: a non-blocking stream per peer
//!  shm/     tcp/         the transports (threads are shared memory inside one process)
//! ```
//!
//! ```
//! use fabric::{FabricOptions, Group, ReducePlan, threads};
//!
//! # fn main() -> Result<(), fabric::FabricError> {
//! let group = Group::new(1, "dp", vec![0, 1, 2]);
//! // Five leaves over three members, a vector of 8 numbers.
//! let plan = ReducePlan::even(5, 3, 8);
//! let ends = threads(3, &FabricOptions::default())?;
//! std::thread::scope(|scope| {
//!     for end in &ends {
//!         let (group, plan) = (&group, &plan);
//!         scope.spawn(move || {
//!             // Each leaf is a vector of ones, so a subtree is as large as its leaves are many.
//!             let trees = plan.subtrees(end.rank() as usize);
//!             let sums: Vec<_> = trees.iter().map(|t| vec![t.len() as f32; 8]).collect();
//!             let mine: Vec<_> = trees.into_iter().zip(sums.iter().map(|s| &s[..])).collect();
//!             let mut out = [0.0; 8];
//!             end.all_reduce(group, plan, &mine, &mut out).expect("all members take part");
//!             assert_eq!(out, [5.0; 8]);
//!         });
//!     }
//! });
//! # Ok(())
//! # }
//! ```
//!
//! A failed [`Endpoint`] stays failed: the streams under it may have stopped inside a
//! message. Build a new one with the next generation.

mod bits;
mod core_wait;
mod counters;
mod endpoint;
mod error;
mod exchange;
mod flight;
mod frame;
mod gather;
mod link;
mod mail;
mod op;
mod options;
mod plan;
mod posted;
mod reduce;
mod route;
mod shm;
mod sums;
mod tcp;

pub use core_wait::CoreWait;
pub use counters::{Count, Counters};
pub use endpoint::{Aborter, Endpoint};
pub use error::FabricError;
pub use flight::{Flight, FlightEntry, FlightGroup, FlightLink, FlightRecord, FlightState};
pub use frame::Operation;
pub use mail::Fault;
pub use options::{FabricOptions, Group, RankId};
pub use plan::ReducePlan;
pub use posted::{Posted, Taken};
pub use shm::{ShmWorld, threads};
pub use tcp::TcpListenerHandle;

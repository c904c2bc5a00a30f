//! State of an earlier world into a new one: survivors keep what they hold, whoever misses something gets it from them.
//!
//! ```text
//!  holdings.rs   pure: what a rank keeps under a layout
//!  plan.rs       pure: who gives what to whom; the same list on every rank
//!  transfer.rs   runs the list over the fabric of the new world
//! ```

mod holdings;
mod plan;
mod transfer;

pub use holdings::{Holdings, Slot, holdings};
pub use plan::{Lost, Move, Plan, Source, What, plan};
pub use transfer::{Fetched, Peers, fetch};

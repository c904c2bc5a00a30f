//! The run as validated, immutable data: model, grid, layout, and the laws that bind them.
//!
//! The grid defines the numbers, the layout only says where they are computed; rows are
//! free, sums are ordered. This crate knows the shapes and the orders; it computes nothing
//! and reads nothing but the run file, the schedule file that it names, a model's `config.json` and the text of a cluster
//! file.

mod batch;
pub mod cluster;
mod document;
mod effect;
mod error;
mod faults;
pub mod grid;
pub mod guard;
pub mod hf;
mod interventions;
pub mod keys;
pub mod layout;
pub mod model;
pub mod moe;
mod recipe;
pub mod run;
pub mod runfile;
pub mod schedule;
pub mod schedule_file;
mod skip;
mod store;
pub mod tensors;
mod train_law;
pub mod tree;
mod typed;

pub use error::SpecError;
pub use grid::{Accumulate, Grid, Lanes, Leaf, Unit};
pub use guard::{Guard, TIME_MAX_MS};
pub use interventions::{Interventions, definition_until, is_of_recipe};
pub use layout::{CLASSES, Class, Coords, Holders, Layout, Offload, Pin, Reshard, Transport};
pub use model::Model;
pub use moe::Moe;
pub use recipe::{Change, Changes, RECIPE, Recipe, Recipes};
pub use run::Run;
pub use runfile::settled;
pub use schedule::{Recompute, Schedule};
pub use skip::Skips;
pub use store::StoreUrl;

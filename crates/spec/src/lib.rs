//! The run as validated, immutable data: model, grid, layout, and the laws that bind them.
pub mod tree;

//! Hugging Face folders: what is read, what is refused, what is written.

#[path = "../common/mod.rs"]
mod common;

mod build;
mod faults;
mod golden;
mod native;
mod refuse;
mod round_trip;

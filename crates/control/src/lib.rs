//! Controller and agents: the shells around `policy`, and what they and rank processes say to each other.

pub mod fault;
pub mod inject;
pub mod wire;

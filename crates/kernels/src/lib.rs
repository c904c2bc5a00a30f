//! CPU float32 kernels of a Llama/Qwen3-style decoder, forward and backward.
//!
//! **The bit law.** The result for one row depends on that row alone: not on how many rows are computed together, on
//! alignment, strides, threads, or the instruction path. Every sum has one order, set by constants of this crate.
//! Hence no platform libm (see [`math`]), no reassociation, and blocks whose size is never read from the host.
//!
//! Each kernel has a textbook twin in [`naive`]; the tests compare the two within a tolerance, and compare bits across
//! everything that must not matter.
#![warn(missing_docs)]

mod attention;
mod bandwidth;
mod bits;
mod checksum;
mod ctx;
mod elementwise;
mod embed;
mod experts;
mod lanes;
mod mat;
pub mod math;
pub mod naive;
mod norm;
mod optimizer;
mod peak;
mod product;
mod random;
mod rope;
mod router;
mod simd;
mod team;
mod together;
mod xent;

pub use attention::{AttnShape, Queries, attention, attention_backward};
pub use bandwidth::measure_bandwidth;
pub use bits::bytes;
pub use checksum::checksum;
pub use ctx::Ctx;
pub use elementwise::{add_assign, chunk_squares, sum_squares, swiglu, swiglu_backward, swiglu_gradients};
pub use embed::{embed, embed_backward};
pub use experts::{Groups, Pieces, Terms, combine, combine_pieces, experts_backward, gather_pieces, gather_rows};
pub use mat::{Mat, MatMut};
pub use norm::{rms_norm, rms_norm_backward, rms_norm_weight_grad};
pub use optimizer::{AdamW, AdamWState, adamw, adamw_parts};
pub use peak::measure_peak;
pub use product::{KC, Packed, Right, product, products, scratch_bytes};
pub use random::{fill_normal, uniform_u64};
pub use rope::{RopeTable, rope, rope_backward};
pub use router::{RouterShape, route, route_backward, score_sums};
pub use simd::{Simd, SimdError};
pub use xent::{IGNORE, XentStat, XentTotal, xent_combine, xent_grad, xent_stats};

/// Version of the bits: changes with any kernel whose results change.
pub const NUMERICS_VERSION: u32 = 1;

/// What a kernel does with its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acc {
    /// Overwrite the output.
    Store,
    /// Add to the output.
    Add,
}

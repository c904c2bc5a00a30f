//! Named shards of training state on disk, and the digest that proves two states equal.
//!
//! Every parameter tensor has three kinds of state: the parameter and its two moments. A
//! tensor is cut in slices by the tensor cells of the grid, a slice in chunks of
//! [`STATE_CHUNK`] elements: the unit of hashing and of sharding. Ranks hold *pieces*:
//! (tensor, kind, slice, elements), cut on chunk boundaries. What is on disk names tensors,
//! slices and elements, never ranks, so any later layout can read it.
//!
//! - [`chunk_hashes`] and [`DigestBuilder`]: the digest, also the comparison of replicas.
//! - [`write_pieces`] by every rank, then [`commit`] by one: a checkpoint exists once its
//!   manifest, written last, is in place.
//! - [`Snapshot`] and [`Attempt`]: the same while the run goes on, without a word between the writers.
//! - [`newest`], [`Checkpoint::open`], [`Checkpoint::read`], [`Checkpoint::verify`],
//!   [`retain`]: everything read is checked against its hash; an error names the tensor.
//! - [`store`]: copies in a slower tier, made in the background.
//! - [`hf`]: weights of Hugging Face folders in and out; [`foreign`]: the structure of other programs' checkpoints.

mod attempt;
mod commit;
mod compare;
mod digest;
mod error;
mod folder;
pub mod foreign;
#[cfg(test)]
mod fuzz;
mod hash;
mod header;
pub mod hf;
pub mod interval;
mod manifest;
mod read;
mod rewrite;
mod snapshot;
mod storage;
pub mod store;
mod tensor;
mod timeline;
mod verify;
mod whole;
mod write;

pub use attempt::{Attempt, Committed, Unwritten, sweep};
pub use commit::{commit, commit_to};
pub use compare::{Difference, Differing};
pub use digest::{Digest, DigestBuilder, HashPiece, TensorDigest, decode_pieces, encode_pieces};
pub use error::{CheckpointError, DigestError, Place};
pub use folder::{Newest, Retention, discard, list, newest, newest_before, prune, retain, step_dir};
pub use hash::{Hash, chunk_hashes, chunks};
pub use manifest::{FileEntry, MANIFEST, MANIFEST_BYTES_MAX, Meta, PieceEntry, SCHEMA, Validations};
pub use read::Checkpoint;
pub use rewrite::{WholeTensor, mean, write_tensors};
pub use snapshot::Snapshot;
pub use spec::tensors::STATE_CHUNK;
pub use storage::{Disk, Storage, StorageFile};
pub use tensor::{Kind, TensorEntry};
pub use timeline::{Timeline, go_back};
pub use verify::{Report, TensorReport};
pub use write::{PieceRef, Unhashed, write_pieces, write_pieces_to, write_unhashed};

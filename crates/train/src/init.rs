//! Initial parameters: a function of (seed, tensor, element) alone, so every layout starts from the same bits.

use spec::Run;
use spec::tensors::Tensor;

use crate::state::ChunkState;

/// The random stream of a tensor: a hash of its name.
fn stream(tensor: &Tensor) -> u64 {
    let hash = blake3::hash(tensor.name.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"))
}

/// Fills the parameters of `state`: normal matrices, norms of one, padding of zero.
pub fn fill(run: &Run, ctx: &kernels::Ctx, state: &mut ChunkState) {
    let ChunkState { held, params, .. } = state;
    for held in held.iter() {
        let tensor = &held.tensor;
        let stream = stream(tensor);
        for (i, slice) in held.slices.clone().enumerate() {
            let out = &mut params[held.slice(i)];
            let Some(std) = tensor.init_std else {
                out.fill(1.0);
                continue;
            };
            let (rows, cols) = tensor.slice(slice, run.grid.tp);
            for (row, out) in rows.zip(out.chunks_exact_mut(cols.len())) {
                if row < tensor.real_rows && tensor.role.is_trained() {
                    // Counted by the element's place in the whole tensor.
                    let first = (row * tensor.cols + cols.start) as u64;
                    kernels::fill_normal(ctx, run.train.seed, stream, first, std, out);
                } else {
                    out.fill(0.0);
                }
            }
        }
    }
}

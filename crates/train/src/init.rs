//! Initial parameters: a function of (seed, tensor, element) alone, so every layout starts from the same bits.

use spec::Run;
use spec::tensors::Tensor;

use crate::state::ChunkState;

/// The random stream of a tensor: a hash of its name.
fn stream(tensor: &Tensor) -> u64 {
    let hash = blake3::hash(tensor.name.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"))
}

/// Fills the parameters of `state` that this rank keeps: normal matrices, norms of one, padding of zero.
pub fn fill(run: &Run, ctx: &kernels::Ctx, state: &mut ChunkState) {
    let mut slice = Vec::new();
    for i in 0..state.held.len() {
        let held = state.held[i].clone();
        for (n, cell) in held.slices.clone().enumerate() {
            let at = held.slice(n);
            for bucket in 0..state.buckets.len() {
                let (params, kept) = state.kept_mut(bucket);
                let (lo, hi) = (at.start.max(kept.start), at.end.min(kept.end));
                if lo >= hi {
                    continue;
                }
                if (lo, hi) == (at.start, at.end) {
                    fill_slice(run, ctx, &held.tensor, cell, &mut params[lo - kept.start..hi - kept.start]);
                } else {
                    slice.resize(at.len(), 0.0);
                    fill_slice(run, ctx, &held.tensor, cell, &mut slice);
                    params[lo - kept.start..hi - kept.start].copy_from_slice(&slice[lo - at.start..hi - at.start]);
                }
            }
        }
    }
}

/// The slice of tensor cell `cell`.
fn fill_slice(run: &Run, ctx: &kernels::Ctx, tensor: &Tensor, cell: usize, out: &mut [f32]) {
    let Some(std) = tensor.init_std else { return out.fill(1.0) };
    let stream = stream(tensor);
    let (rows, cols) = tensor.slice(cell, run.grid.tp);
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

//! Embedding lookup and its gradient, over one slice of the vocabulary.

use crate::ctx::{Ctx, Rows};
use crate::simd::by_level;

/// `out[row] = w[id - first] + 0.0` for the ids of the slice, else zeros.
///
/// The sum makes -0 a +0, as a sum over slices would.
///
/// ids: rows; w: slice rows x h; out: rows x h.
pub fn embed(ctx: &Ctx, ids: &[u32], w: &[f32], h: usize, first: u32, out: &mut [f32]) {
    assert_eq!(out.len(), ids.len() * h, "embedding of {} rows x {h}", ids.len());
    ctx.split_rows(ids.len(), h, Rows(out, h), |r, out| {
        for (i, &id) in ids[r].iter().enumerate() {
            let out = &mut out.0[i * h..(i + 1) * h];
            match id.checked_sub(first).and_then(|id| w.get(id as usize * h..(id as usize + 1) * h)) {
                Some(w) => out.iter_mut().zip(w).for_each(|(o, w)| *o = w + 0.0),
                None => out.fill(0.0),
            }
        }
    });
}

/// `dw[id - first] += dx[row]`, rows ascending, for the ids of the slice.
///
/// ids: rows; dx: rows x h; dw: slice rows x h. Threads split the rows of dw, so each of its elements is one chain.
pub fn embed_backward(ctx: &Ctx, ids: &[u32], dx: &[f32], h: usize, first: u32, dw: &mut [f32]) {
    assert_eq!(dx.len(), ids.len() * h, "embedding gradient of {} rows x {h}", ids.len());
    if h == 0 {
        return;
    }
    let vocabulary = dw.len() / h;
    // Work lies in the tokens, not in the vocabulary.
    let width = dx.len() / vocabulary.max(1);
    ctx.split_rows(vocabulary, width, Rows(dw, h), |range, dw| {
        for (&id, dx) in ids.iter().zip(dx.chunks_exact(h)) {
            let Some(id) = id.checked_sub(first).map(|id| id as usize) else { continue };
            if range.contains(&id) {
                let at = id - range.start;
                add_row(ctx.level(), &mut dw.0[at * h..(at + 1) * h], dx);
            }
        }
    });
}

by_level! {
    fn add_row(dst: &mut [f32], src: &[f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d += s;
        }
    }
}

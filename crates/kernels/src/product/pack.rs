//! Packing: strips of a matrix, inner index first, so that the tile loop reads in order.

use crate::mat::Mat;
use crate::simd::{Level, by_level};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

#[derive(Default)]
/// Reusable scratch, aligned to cache lines; grows, never shrinks.
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    pub(crate) const fn new() -> Self {
        Buffer(Vec::new())
    }

    /// The first `len` floats, contents unspecified.
    pub(crate) fn take(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is 16 floats without padding, and the lines are initialised.
        let all = unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<f32>(), self.0.len() * 16) };
        &mut all[..len]
    }
}

/// Packs the rows of `m` (rows x k) in strips of `width` rows: out[strip][k][row], missing rows are zero.
pub(super) fn pack(level: Level, m: Mat, width: usize, out: &mut [f32]) {
    for (r, strip) in (0..m.rows).step_by(width).zip(out.chunks_exact_mut(m.cols * width)) {
        let rows = width.min(m.rows - r);
        let part = m.rows_range(r..r + rows);
        if rows < width {
            strip.fill(0.0);
        }
        match width {
            6 => strip_6(level, part, strip),
            14 => strip_14(level, part, strip),
            16 => strip_16(level, part, strip),
            _ => strip_32(level, part, strip),
        }
    }
}

by_level! { fn strip_6(m: Mat<'_>, out: &mut [f32]) { strip::<6>(m, out) } }
by_level! { fn strip_14(m: Mat<'_>, out: &mut [f32]) { strip::<14>(m, out) } }
by_level! { fn strip_16(m: Mat<'_>, out: &mut [f32]) { strip::<16>(m, out) } }
by_level! { fn strip_32(m: Mat<'_>, out: &mut [f32]) { strip::<32>(m, out) } }

#[inline(always)]
fn strip<const W: usize>(m: Mat, out: &mut [f32]) {
    let out = out.as_chunks_mut::<W>().0;
    if m.rows == W && m.rs == 1 {
        for (k, out) in out.iter_mut().enumerate() {
            out.copy_from_slice(&m.data[k * m.cs..k * m.cs + W]);
        }
    } else if m.rows == W && m.cs == 1 {
        let rows: [&[f32]; W] = std::array::from_fn(|i| &m.data[i * m.rs..i * m.rs + m.cols]);
        for (k, out) in out.iter_mut().enumerate() {
            for i in 0..W {
                out[i] = rows[i][k];
            }
        }
    } else {
        for (k, out) in out.iter_mut().enumerate() {
            for (i, out) in out[..m.rows].iter_mut().enumerate() {
                *out = m.data[i * m.rs + k * m.cs];
            }
        }
    }
}

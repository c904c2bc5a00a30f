//! Register tiles: the innermost loop of the product.

use crate::mat::MatMut;
use crate::simd::Level;
#[cfg(target_arch = "x86_64")]
use crate::simd::Path;

/// Tile rows and columns of the 256-bit and scalar paths: 12 accumulators.
pub(super) const AVX2: (usize, usize) = (6, 16);
/// Tile rows and columns of the 512-bit path: 28 accumulators.
pub(super) const AVX512: (usize, usize) = (14, 32);
const LARGEST: usize = AVX512.0 * AVX512.1;

/// c = s or c += s for one tile (edges may be smaller); s from panels `a` (k x MR) and `b` (k x NR).
pub(super) fn tile(level: Level, k: usize, a: &[f32], b: &[f32], mut c: MatMut, add: bool) {
    let (mr, nr) = super::tile(level);
    assert!(a.len() == k * mr && b.len() == k * nr, "panels of {} and {} for k = {k}", a.len(), b.len());
    if c.rows() == mr && c.cols() == nr {
        // SAFETY: the panels have k rows, c is a whole tile with its stride, and the level is proven.
        unsafe { run(level, k, a.as_ptr(), b.as_ptr(), c.ptr_at(0, 0), c.rs(), add) };
    } else {
        // Edges take the same path into a full tile, of which a part is kept.
        let mut full = [0.0f32; LARGEST];
        // SAFETY: as above; `full` holds mr rows of stride nr.
        unsafe { run(level, k, a.as_ptr(), b.as_ptr(), full.as_mut_ptr(), nr, false) };
        for i in 0..c.rows() {
            let row = c.row_mut(i);
            let part = &full[i * nr..];
            if add {
                row.iter_mut().zip(part).for_each(|(c, s)| *c += s);
            } else {
                row.copy_from_slice(&part[..row.len()]);
            }
        }
    }
}

/// # Safety
/// `a` and `b` hold k * MR and k * NR floats; c is MR rows of NR writable floats with stride `rs`.
unsafe fn run(level: Level, k: usize, a: *const f32, b: *const f32, c: *mut f32, rs: usize, add: bool) {
    // SAFETY: the caller's promise; a `Level` exists only for a path that the CPU has.
    unsafe {
        match level.path() {
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => x86::avx512::<{ AVX512.0 }>(k, a, b, c, rs, add),
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => x86::avx2::<{ AVX2.0 }>(k, a, b, c, rs, add),
            #[cfg(target_arch = "x86_64")]
            Path::Fma => scalar_fma(k, a, b, c, rs, add),
            _ => scalar(k, a, b, c, rs, add),
        }
    }
}

/// # Safety
/// As [`run`], and the CPU has fused multiply-add.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
unsafe fn scalar_fma(k: usize, a: *const f32, b: *const f32, c: *mut f32, rs: usize, add: bool) {
    // SAFETY: the caller's promise.
    unsafe { scalar(k, a, b, c, rs, add) }
}

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn scalar(k: usize, a: *const f32, b: *const f32, c: *mut f32, rs: usize, add: bool) {
    const MR: usize = AVX2.0;
    const NR: usize = AVX2.1;
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (std::slice::from_raw_parts(a, k * MR), std::slice::from_raw_parts(b, k * NR)) };
    let mut s = [[0.0f32; NR]; MR];
    for (a, b) in a.as_chunks::<MR>().0.iter().zip(b.as_chunks::<NR>().0) {
        for (s, a) in s.iter_mut().zip(a) {
            for (s, b) in s.iter_mut().zip(b) {
                *s = a.mul_add(*b, *s);
            }
        }
    }
    for (i, s) in s.iter().enumerate() {
        // SAFETY: c has MR rows of NR floats with stride rs.
        let row = unsafe { std::slice::from_raw_parts_mut(c.add(i * rs), NR) };
        if add {
            row.iter_mut().zip(s).for_each(|(c, s)| *c += s);
        } else {
            row.copy_from_slice(s);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    macro_rules! tile_kernel {
        ($name:ident, $feature:literal, $lanes:literal, $zero:ident, $set:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
            /// Tile of MR rows and two vectors.
            ///
            /// # Safety
            /// As `run`, and the CPU has the features.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name<const MR: usize>(
                k: usize,
                a: *const f32,
                b: *const f32,
                c: *mut f32,
                rs: usize,
                add: bool,
            ) {
                let mut s = [[$zero(); 2]; MR];
                // SAFETY: the caller's promise on the extent of a, b and c.
                unsafe {
                    for i in 0..MR {
                        _mm_prefetch::<_MM_HINT_T0>(c.add(i * rs).cast());
                        _mm_prefetch::<_MM_HINT_T0>(c.add(i * rs + 2 * $lanes - 1).cast());
                    }
                    for p in 0..k {
                        let (a, b) = (a.add(p * MR), b.add(p * 2 * $lanes));
                        let (b0, b1) = ($load(b), $load(b.add($lanes)));
                        for i in 0..MR {
                            let a = $set(*a.add(i));
                            s[i][0] = $fma(a, b0, s[i][0]);
                            s[i][1] = $fma(a, b1, s[i][1]);
                        }
                    }
                    for i in 0..MR {
                        for j in 0..2 {
                            let c = c.add(i * rs + j * $lanes);
                            $store(c, if add { $add($load(c), s[i][j]) } else { s[i][j] });
                        }
                    }
                }
            }
        };
    }

    tile_kernel!(
        avx2,
        "avx2,fma",
        8,
        _mm256_setzero_ps,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_fmadd_ps,
        _mm256_add_ps
    );
    tile_kernel!(
        avx512,
        "avx512f",
        16,
        _mm512_setzero_ps,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_fmadd_ps,
        _mm512_add_ps
    );
}

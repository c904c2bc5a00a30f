//! Register tiles: the innermost loop of the product.

use crate::mat::{Mat, MatMut};
use crate::simd::Level;
#[cfg(target_arch = "x86_64")]
use crate::simd::Path;

/// Most rows, and columns, of a tile on the 256-bit and scalar paths: 12 accumulators.
pub(super) const AVX2: (usize, usize) = (6, 16);
/// The same on the 512-bit path, of operands that lie in the first cache: 28 accumulators.
pub(super) const AVX512: (usize, usize) = (14, 32);
/// And of all others: 24 accumulators. An element of a serves four vectors and not two: fewer instructions a multiply-add, which tells
/// where another thread of the core takes half of what it can issue.
pub(super) const AVX512_WIDE: (usize, usize) = (6, 64);
const LARGEST: usize = AVX512.0 * AVX512.1;

/// Rows that a packed tile of the left operand has room for, on every path: those of a tile, and up to whole eights.
pub(super) const LANES: usize = 8;
const _: () = assert!(AVX2.0 <= LANES && AVX512_WIDE.0 <= LANES);

/// Where the operands of a tile are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the first cache.
    Near,
    /// b comes from the second cache, c from anywhere: both are asked for ahead.
    Far,
    /// The same, and a is packed: column after column, of [`LANES`] rows each.
    Packed,
}

/// c = s or c += s for one tile; a: up to MR rows x k in any layout, `b` a panel (k x `nr`), c: as many rows, up to `nr`
/// columns.
pub(super) fn tile(level: Level, place: Place, nr: usize, a: Mat, b: &[f32], mut c: MatMut, add: bool) {
    let (mr, most) = if place == Place::Near { super::tile(level) } else { super::wide(level) };
    let (rows, k) = (a.rows, a.cols);
    a.check();
    assert!(nr == most || nr == super::tile(level).1, "a panel of {nr} columns");
    assert!(b.len() == k * nr && rows <= mr, "tile of {rows} rows from a panel of {} for k = {k}", b.len());
    assert!(c.rows() == rows && c.cols() <= nr, "{rows} rows into a tile of {} x {}", c.rows(), c.cols());
    if c.cols() == nr {
        // SAFETY: the panel has k rows of NR, `a` covers its view, c is a whole tile with its stride.
        unsafe { run(level, place, nr, a, b.as_ptr(), c.ptr_at(0, 0), c.rs(), add) };
    } else {
        // The last columns take the same path into a full tile, of which a part is kept.
        let mut full = [0.0f32; LARGEST];
        // SAFETY: as above; `full` holds at least `rows` rows of stride nr.
        unsafe { run(level, place, nr, a, b.as_ptr(), full.as_mut_ptr(), nr, false) };
        for i in 0..rows {
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

/// Calls `$f::<rows>` for a number of rows that is only known at run time.
macro_rules! by_rows {
    ($rows:expr, [$($n:literal)*], $f:ident, $args:tt) => {
        match $rows {
            $($n => by_rows!(@call $f, $n, $args),)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
    (@call $f:ident, $n:literal, ($vectors:literal $place:literal; $($arg:expr),*)) => {
        $f::<$n, $vectors, $place>($($arg),*)
    };
    (@call $f:ident, $n:literal, ($($arg:expr),*)) => { $f::<$n>($($arg),*) };
}

/// # Safety
/// `a` covers its view (see [`Mat::check`]) and has at most MR rows; `b` holds `a.cols` * `nr` floats; c is `a.rows` rows
/// of `nr` writable floats with stride `rs`; such tiles are there.
#[allow(clippy::too_many_arguments)]
unsafe fn run(level: Level, place: Place, nr: usize, a: Mat, b: *const f32, c: *mut f32, rs: usize, add: bool) {
    let (rows, k) = (a.rows, a.cols);
    let a = Broadcast { ptr: a.data.as_ptr(), rs: a.rs, ks: a.cs };
    debug_assert!(place != Place::Packed || (a.rs, a.ks) == (1, LANES));
    // SAFETY: the caller's promise; a `Level` exists only for a path that the CPU has.
    unsafe {
        match level.path() {
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => {
                use x86::avx512;
                match (place, nr == AVX512_WIDE.1) {
                    (Place::Near, _) => {
                        by_rows!(rows, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], avx512, (2 0; k, a, b, c, rs, add))
                    }
                    (Place::Far, true) => by_rows!(rows, [1 2 3 4 5 6], avx512, (4 1; k, a, b, c, rs, add)),
                    (Place::Far, false) => by_rows!(rows, [1 2 3 4 5 6], avx512, (2 1; k, a, b, c, rs, add)),
                    (Place::Packed, true) => by_rows!(rows, [1 2 3 4 5 6], avx512, (4 2; k, a, b, c, rs, add)),
                    (Place::Packed, false) => by_rows!(rows, [1 2 3 4 5 6], avx512, (2 2; k, a, b, c, rs, add)),
                }
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => {
                use x86::avx2;
                match place {
                    Place::Near => by_rows!(rows, [1 2 3 4 5 6], avx2, (2 0; k, a, b, c, rs, add)),
                    Place::Far => by_rows!(rows, [1 2 3 4 5 6], avx2, (2 1; k, a, b, c, rs, add)),
                    Place::Packed => by_rows!(rows, [1 2 3 4 5 6], avx2, (2 2; k, a, b, c, rs, add)),
                }
            }
            #[cfg(target_arch = "x86_64")]
            Path::Fma => by_rows!(rows, [1 2 3 4 5 6], scalar_fma, (k, a, b, c, rs, add)),
            _ => by_rows!(rows, [1 2 3 4 5 6], scalar, (k, a, b, c, rs, add)),
        }
    }
}

/// The operand whose elements are spread over a vector: element (i, k) at `ptr + i * rs + k * ks`.
#[derive(Clone, Copy)]
struct Broadcast {
    ptr: *const f32,
    rs: usize,
    ks: usize,
}

/// # Safety
/// As [`run`], and the CPU has fused multiply-add.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
unsafe fn scalar_fma<const MR: usize>(k: usize, a: Broadcast, b: *const f32, c: *mut f32, rs: usize, add: bool) {
    // SAFETY: the caller's promise.
    unsafe { scalar::<MR>(k, a, b, c, rs, add) }
}

/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn scalar<const MR: usize>(k: usize, a: Broadcast, b: *const f32, c: *mut f32, rs: usize, add: bool) {
    const NR: usize = AVX2.1;
    // SAFETY: the caller's promise.
    let b = unsafe { std::slice::from_raw_parts(b, k * NR) };
    let mut s = [[0.0f32; NR]; MR];
    for (p, b) in b.as_chunks::<NR>().0.iter().enumerate() {
        for (i, s) in s.iter_mut().enumerate() {
            // SAFETY: element (i, p) of a.
            let a = unsafe { *a.ptr.add(i * a.rs + p * a.ks) };
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
    use super::Broadcast;
    use std::arch::asm;
    use std::arch::x86_64::*;

    /// Steps by which b is asked for before its use.
    const AHEAD: usize = 16;

    /// The same number, but the compiler does not know it. It would find the rows of a tile one from the other, and that chain of
    /// additions takes as long as the products themselves: nothing could be made up for after a wait.
    #[inline(always)]
    fn unrelated(mut number: usize) -> usize {
        #[cfg(not(miri))]
        // SAFETY: no instruction at all.
        unsafe {
            asm!("/* {0} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags));
        }
        number
    }

    macro_rules! tile_kernel {
        ($name:ident, $feature:literal, $lanes:literal, $zero:ident, $set:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
            /// Tile of MR rows and NV vectors; PLACE is a [`super::Place`].
            ///
            /// # Safety
            /// As `run`, and the CPU has the features.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name<const MR: usize, const NV: usize, const PLACE: u8>(
                k: usize,
                a: Broadcast,
                b: *const f32,
                c: *mut f32,
                rs: usize,
                add: bool,
            ) {
                let (a_rs, a_ks) = if PLACE == 2 { (1, super::LANES) } else { (a.rs, a.ks) };
                // Rows in fours, each found from a pointer of its own: see `unrelated`.
                let mut at = [a.ptr; 4];
                let three = if PLACE == 2 { 3 } else { unrelated(3 * a_rs) };
                for (n, at) in at.iter_mut().enumerate() {
                    let rows = 4 * n * a_rs;
                    *at = a.ptr.wrapping_add(if PLACE == 2 { rows } else { unrelated(rows) });
                }
                let mut b = b;
                let mut s = [[$zero(); NV]; MR];
                macro_rules! step {
                    () => {
                        let mut row = [$zero(); NV];
                        for (v, row) in row.iter_mut().enumerate() {
                            *row = $load(b.add(v * $lanes));
                            if PLACE > 0 {
                                _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add((AHEAD * NV + v) * $lanes).cast());
                            }
                        }
                        for i in 0..MR {
                            let from = if i % 4 == 3 { three } else { i % 4 * a_rs };
                            let a = $set(*at[i / 4].wrapping_add(from));
                            for (s, b) in s[i].iter_mut().zip(row) {
                                *s = $fma(a, b, *s);
                            }
                        }
                        // One step beyond the last element is never read.
                        for at in &mut at[..MR.div_ceil(4)] {
                            *at = at.wrapping_add(a_ks);
                        }
                        b = b.add(NV * $lanes);
                    };
                }
                // SAFETY: the caller's promise on the extent of a, b and c.
                unsafe {
                    let mut left = k;
                    if PLACE > 0 {
                        // A row at a time: all at once would take all fill buffers from a and b.
                        for i in 0..MR {
                            for v in 0..NV {
                                _mm_prefetch::<_MM_HINT_T0>(c.add(i * rs + v * $lanes).cast());
                            }
                            _mm_prefetch::<_MM_HINT_T0>(c.add(i * rs + NV * $lanes - 1).cast());
                            for _ in 0..k / MR / 2 {
                                step!();
                                step!();
                            }
                        }
                        left = k - k / MR / 2 * 2 * MR;
                    }
                    for _ in 0..left {
                        step!();
                    }
                    for i in 0..MR {
                        for (j, s) in s[i].into_iter().enumerate() {
                            let c = c.add(i * rs + j * $lanes);
                            $store(c, if add { $add($load(c), s) } else { s });
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

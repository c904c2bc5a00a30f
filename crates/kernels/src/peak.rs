//! Peak of the cores: a loop of fused multiply-adds that touches registers only.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
use crate::simd::Path;
use crate::simd::{Level, Simd};
use crate::together::together;

/// Short enough to fit between two interruptions of a busy machine.
const SAMPLE: Duration = Duration::from_millis(2);
const SAMPLES: usize = 10;
/// Rounds between looks at the clock.
const ROUNDS: usize = 5_000;

/// GFLOP/s of `threads` threads on path `simd`: best of a few samples, about 20 ms.
///
/// # Panics
/// If the CPU lacks `simd`.
pub fn measure_peak(simd: Simd, threads: usize) -> f64 {
    let level = Level::new(simd).unwrap_or_else(|e| panic!("{e}"));
    let sample = |barrier: &Barrier| {
        (0..SAMPLES)
            .map(|_| {
                barrier.wait();
                let (start, mut flops) = (Instant::now(), 0.0);
                while start.elapsed() < SAMPLE {
                    flops += rounds(level);
                }
                flops / start.elapsed().as_secs_f64() / 1e9
            })
            .collect::<Vec<_>>()
    };
    let per_thread = together(threads, sample);
    (0..SAMPLES).map(|i| per_thread.iter().map(|t| t[i]).sum()).fold(0.0, f64::max)
}

/// Floating-point operations of one call.
fn rounds(level: Level) -> f64 {
    match level.path() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Level` exists only for a path that the CPU has.
        Path::Avx512 => unsafe { x86::avx512(black_box(ROUNDS)) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above. Portable code is compiled for these vectors too, where the CPU has fused multiply-add.
        Path::Avx2 | Path::Fma => unsafe { x86::avx(black_box(ROUNDS)) },
        _ => chains(black_box(ROUNDS)),
    }
}

/// Eight scalar chains.
#[inline(always)]
fn chains(n: usize) -> f64 {
    let mut s = black_box([1.0f32; 8]);
    let (a, b) = (black_box(0.5f32), black_box(0.25f32));
    for _ in 0..n {
        for s in &mut s {
            *s = s.mul_add(a, b);
        }
    }
    black_box(s);
    (n * 8 * 2) as f64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    macro_rules! peak_loop {
        ($name:ident, $feature:literal, $lanes:literal, $set:ident, $fma:ident) => {
            /// Twelve chains cover the latency of two units.
            #[target_feature(enable = $feature)]
            pub(super) fn $name(n: usize) -> f64 {
                let (a, b) = ($set(black_box(0.5)), $set(black_box(0.25)));
                let mut s = [$set(black_box(1.0)); 12];
                for _ in 0..n {
                    for s in &mut s {
                        *s = $fma(*s, a, b);
                    }
                }
                black_box(s);
                (n * 12 * $lanes * 2) as f64
            }
        };
    }
    peak_loop!(avx, "avx,fma", 8, _mm256_set1_ps, _mm256_fmadd_ps);
    peak_loop!(avx512, "avx512f", 16, _mm512_set1_ps, _mm512_fmadd_ps);
}

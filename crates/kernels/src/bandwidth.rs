//! Memory bandwidth of the cores: the triad of STREAM (McCalpin 1995), a = b + s c.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use crate::together::together;

/// Elements of each of the three vectors of a thread: 32 MiB, more than a core's own caches hold.
const ELEMENTS: usize = 8 << 20;
/// Bytes that one pass reads and writes, as STREAM counts them: what a write fetches first is not counted.
const BYTES: f64 = 3.0 * 4.0 * ELEMENTS as f64;
const PASSES: usize = 8;

/// GB/s (10^9 bytes) of `threads` threads together: the best of a few passes, about 0.2 s.
pub fn measure_bandwidth(threads: usize) -> f64 {
    let passes = |barrier: &Barrier| {
        let (mut a, b, c) = (vec![1.0f32; ELEMENTS], vec![2.0f32; ELEMENTS], vec![3.0f32; ELEMENTS]);
        (0..PASSES)
            .map(|_| {
                barrier.wait();
                let start = Instant::now();
                triad(&mut a, &b, &c, black_box(0.5));
                black_box(&a);
                BYTES / start.elapsed().as_secs_f64() / 1e9
            })
            .collect::<Vec<_>>()
    };
    let per_thread = together(threads, passes);
    (0..PASSES).map(|i| per_thread.iter().map(|t| t[i]).sum()).fold(0.0, f64::max)
}

fn triad(a: &mut [f32], b: &[f32], c: &[f32], s: f32) {
    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
        *a = b + s * c;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_triad_and_has_a_bandwidth_of_this_world() {
        let mut a = [0.0; 3];
        triad(&mut a, &[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0], 0.5);
        assert_eq!(a, [3.0, 4.5, 6.0]);
        let one = measure_bandwidth(1);
        assert!((0.1..2_000.0).contains(&one), "{one} GB/s");
    }
}

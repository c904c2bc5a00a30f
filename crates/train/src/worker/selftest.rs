//! What a process shows of its device before it takes a place, and while it waits for one: known products with known bits.
//!
//! This finds a core whose arithmetic is wrong at all; it is no recomputation of a run's gradients, for which a spare would need
//! the parameters ([`crate::leaves`] is that, among the ranks of a world).

use std::time::Duration;

use kernels::{Acc, Ctx, Mat, MatMut, fill_normal, product};

use crate::error::TrainError;

/// Between two looks of a process that waits. One takes about a millisecond.
pub const EVERY: Duration = Duration::from_secs(5);

/// Rows, columns and inner size: whole and broken tiles of every kernel, more than one inner block.
const SIZES: [[usize; 3]; 2] = [[190, 70, 530], [70, 130, 64]];

/// The sum of the products' checksums, on every sound device: neither the instruction path nor the time changes a bit.
const KNOWN: u64 = 0xdb94a6ffffd62e11;

/// Looks once; `spoil` may change a product, for tests.
///
/// # Errors
/// [`TrainError::Device`] if a bit is another one.
pub fn look(ctx: &Ctx, mut spoil: impl FnMut(&mut [f32])) -> Result<(), TrainError> {
    let mut sum = 0u64;
    for [m, n, k] in SIZES {
        let normal = |stream: u64, len: usize| {
            let mut out = vec![0.0; len];
            fill_normal(ctx, 7, stream, 0, 1.0, &mut out);
            out
        };
        let (x, w, mut y) = (normal(1, m * k), normal(2, n * k), vec![0.0; m * n]);
        product(ctx, Mat::new(&x, m, k), Mat::new(&w, n, k).t(), MatMut::new(&mut y, m, n), Acc::Store);
        spoil(&mut y);
        sum = sum.rotate_left(1) ^ kernels::checksum(ctx, &y);
    }
    if sum == KNOWN {
        return Ok(());
    }
    Err(TrainError::Device(format!(
        "this process computes known products wrong (checksum {sum:#018x} instead of {KNOWN:#018x}): a device is broken; it takes no place"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::Simd;

    #[test]
    fn a_sound_device_passes_and_one_wrong_bit_does_not() {
        for threads in [1, 2] {
            let ctx = Ctx::new(Simd::detect(), threads);
            look(&ctx, |_| ()).unwrap();
            for at in [0, 190 * 70 - 1] {
                let mut first = true;
                let spoilt = look(&ctx, |y| {
                    if std::mem::take(&mut first) {
                        y[at] = f32::from_bits(y[at].to_bits() ^ 1);
                    }
                });
                assert!(matches!(spoilt, Err(TrainError::Device(_))));
            }
        }
    }
}

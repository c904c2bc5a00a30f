//! The bit law: what must not matter does not change a bit.

mod common;

use common::cases::CASES;
use common::{same, teams};
use kernels::{Ctx, Simd};

/// FNV-1a over the bits.
fn checksum(x: &[f32]) -> u64 {
    x.iter()
        .flat_map(|x| x.to_bits().to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |h, byte| (h ^ byte as u64).wrapping_mul(0x100_0000_01b3))
}

/// A change here is a change of numerics: raise `NUMERICS_VERSION` with it.
#[test]
fn bits_are_golden() {
    assert_eq!(kernels::NUMERICS_VERSION, 1, "the sums below are of version 1");
    let ctx = Ctx::new(Simd::Scalar, 1);
    let found: Vec<_> = CASES.iter().map(|case| (case.name, checksum(&(case.run)(&ctx, 0)))).collect();
    for (name, sum) in &found {
        println!("{name}: {sum:#018x}");
    }
    for (case, (name, sum)) in CASES.iter().zip(found) {
        assert_eq!(case.golden, sum, "{name}: {sum:#018x}");
    }
}

#[test]
fn paths_threads_and_alignment_are_free() {
    let teams = teams();
    for case in CASES {
        let expected = (case.run)(&Ctx::new(Simd::Scalar, 1), 0);
        assert!(expected.iter().any(|x| *x != 0.0) && !expected[..10].iter().any(|x| x.is_nan()), "{}", case.name);
        for ctx in &teams {
            for offset in [0, 1, 4, 7] {
                let what = format!("{} with {ctx:?} at offset {offset}", case.name);
                same(&what, &(case.run)(ctx, offset), &expected);
            }
        }
    }
}

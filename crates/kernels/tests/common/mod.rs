//! Inputs and comparisons shared by the tests.
#![allow(dead_code)]

pub mod cases;

use kernels::{Ctx, Simd, fill_normal};

/// Normal numbers of a named stream.
pub fn normal(stream: u64, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    fill_normal(&Ctx::new(Simd::Scalar, 1), 7, stream, 0, 1.0, &mut out);
    out
}

/// Bits, for comparisons where -0 is not +0 and NaN equals itself.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Panics at the first element where bits differ.
#[track_caller]
pub fn same(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
        panic!("{what}: element {i} of {} is {:e} and {:e}", a.len(), a[i], b[i]);
    }
}

/// Panics when |a - b| exceeds `tolerance` times (1 + |b|).
#[track_caller]
pub fn close(what: &str, a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    for i in 0..a.len() {
        let (off, allowed) = ((a[i] - b[i]).abs(), tolerance * (1.0 + b[i].abs()));
        assert!(off <= allowed, "{what}: element {i} is {:e}, twin {:e}: off by {off:e} of {allowed:e}", a[i], b[i]);
    }
}

/// Teams whose bits must agree with the first: every path, one thread and three.
pub fn teams() -> Vec<Ctx> {
    Simd::available().flat_map(|s| [Ctx::new(s, 1), Ctx::new(s, 3)]).collect()
}

/// A copy at `offset` floats from an allocation's start, and where it begins.
pub fn shifted(x: &[f32], offset: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; offset];
    out.extend_from_slice(x);
    out
}

/// Document starts of one sequence, from the lengths of its documents.
pub fn documents(lengths: &[usize]) -> Vec<u32> {
    let mut starts = Vec::new();
    for &n in lengths {
        let start = starts.len() as u32;
        starts.extend(std::iter::repeat_n(start, n));
    }
    starts
}

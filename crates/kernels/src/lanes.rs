//! Sums of one row in a fixed shape: element i goes to lane i mod 16, ascending; the lanes are added in one tree.

/// Lanes of a row sum.
pub(crate) const LANES: usize = 16;

/// Adds the lanes by halves.
// Out of line: inlined, it makes the compiler keep the lanes in scalars.
#[inline(never)]
pub(crate) fn tree(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds the lanes by halves.
#[inline(always)]
pub(crate) fn tree64(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of x * y.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (y_chunks, y_tail) = y.as_chunks::<LANES>();
    for (a, b) in x_chunks.iter().zip(y_chunks) {
        for l in 0..LANES {
            acc[l] = a[l].mul_add(b[l], acc[l]);
        }
    }
    for (l, (a, b)) in x_tail.iter().zip(y_tail).enumerate() {
        acc[l] = a.mul_add(*b, acc[l]);
    }
    tree(&acc)
}

/// Sum of (x * w) * y.
#[inline(always)]
pub(crate) fn dot3(x: &[f32], w: &[f32], y: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (w_chunks, w_tail) = w.as_chunks::<LANES>();
    let (y_chunks, y_tail) = y.as_chunks::<LANES>();
    for ((a, c), b) in x_chunks.iter().zip(w_chunks).zip(y_chunks) {
        for l in 0..LANES {
            acc[l] = (a[l] * c[l]).mul_add(b[l], acc[l]);
        }
    }
    for (l, ((a, c), b)) in x_tail.iter().zip(w_tail).zip(y_tail).enumerate() {
        acc[l] = (a * c).mul_add(*b, acc[l]);
    }
    tree(&acc)
}

/// Sum of x.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for a in chunks {
        for l in 0..LANES {
            acc[l] += a[l];
        }
    }
    for (l, a) in tail.iter().enumerate() {
        acc[l] += a;
    }
    tree(&acc)
}

/// The larger one; a NaN in `a` loses, so that NaN shows up in the sum and not in the maximum.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The largest lane. Out of line as [`tree`].
#[inline(never)]
fn largest(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = larger(lanes[i + half], lanes[i]);
        }
        half /= 2;
    }
    // One sign of zero, whatever the order met.
    lanes[0] + 0.0
}

/// Largest element; -inf for an empty row. Exact, so that the shape only serves speed.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for a in chunks {
        for l in 0..LANES {
            acc[l] = larger(a[l], acc[l]);
        }
    }
    for (l, a) in tail.iter().enumerate() {
        acc[l] = larger(*a, acc[l]);
    }
    largest(&acc)
}

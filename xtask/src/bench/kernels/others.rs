//! Products of others: the crates `matrixmultiply` and `gemm` (feature `peers`), and PyTorch where it is installed.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kernels::Mat;
use serde_json::json;

use super::products::{Form, Product};
use crate::bench::process;

/// Whether the crates are built in.
pub const BUILT: bool = cfg!(feature = "peers");
/// Longest run of the script.
const LIMIT: Duration = Duration::from_secs(300);

/// What the person should know of them.
pub fn notes(root: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    if !BUILT {
        notes.push("matrixmultiply and gemm: `cargo run --release -p xtask --features peers -- bench kernels`".into());
    }
    if !python(root).exists() {
        notes.push("PyTorch: `cargo xtask bench train --peer` installs it once".into());
    }
    notes
}

fn python(root: &Path) -> std::path::PathBuf {
    root.join("target").join("peer-env").join("bin").join("python")
}

/// GFLOP/s of PyTorch for each of `grid`, by `bench/peer/products.py`.
pub fn torch(root: &Path, threads: usize, rounds: u32, grid: &[Product]) -> Result<Vec<f64>, String> {
    let form = |form| match form {
        Form::Forward => "y",
        Form::Input => "dx",
        Form::Weight => "dw",
    };
    let grid: Vec<_> = grid.iter().map(|p| json!({"form": form(p.form), "m": p.m, "n": p.n, "k": p.k})).collect();
    let mut command = Command::new(python(root));
    command.arg("-B").arg(root.join("bench").join("peer").join("products.py"));
    command.arg(json!({"threads": threads, "rounds": rounds, "products": grid}).to_string());
    let output = process::output(&mut command, LIMIT)?;
    serde_json::from_str(output.trim()).map_err(|e| format!("products.py printed no list of numbers: {e}"))
}

#[cfg(feature = "peers")]
fn fits(a: Mat, b: Mat, c: &[f32]) {
    // A view whose every row and column can be cut lies in its data.
    let inside = |m: Mat| m.rows > 0 && m.cols > 0 && (m.rows - 1) * m.rs + (m.cols - 1) * m.cs < m.data.len();
    assert!(a.cols == b.rows && c.len() == a.rows * b.cols && inside(a) && inside(b), "shapes of a product");
}

/// c = a b or c += a b.
#[cfg(feature = "peers")]
pub fn matrixmultiply(a: Mat, b: Mat, c: &mut [f32], add: bool) {
    fits(a, b, c);
    let s = |stride: usize| stride as isize;
    let (beta, n) = (if add { 1.0 } else { 0.0 }, b.cols);
    // SAFETY: `fits` checked that all elements lie in their slices; c is borrowed alone.
    unsafe {
        ::matrixmultiply::sgemm(
            a.rows,
            a.cols,
            n,
            1.0,
            a.data.as_ptr(),
            s(a.rs),
            s(a.cs),
            b.data.as_ptr(),
            s(b.rs),
            s(b.cs),
            beta,
            c.as_mut_ptr(),
            s(n),
            1,
        );
    }
}

/// c = a b or c += a b.
#[cfg(feature = "peers")]
pub fn gemm(threads: usize, a: Mat, b: Mat, c: &mut [f32], add: bool) {
    fits(a, b, c);
    let s = |stride: usize| stride as isize;
    let parallelism = if threads == 1 { ::gemm::Parallelism::None } else { ::gemm::Parallelism::Rayon(threads) };
    // SAFETY: as above.
    unsafe {
        ::gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            c.as_mut_ptr(),
            1,
            s(b.cols),
            add,
            a.data.as_ptr(),
            s(a.cs),
            s(a.rs),
            b.data.as_ptr(),
            s(b.cs),
            s(b.rs),
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Not built in.
#[cfg(not(feature = "peers"))]
pub fn matrixmultiply(_: Mat, _: Mat, _: &mut [f32], _: bool) {}

/// Not built in.
#[cfg(not(feature = "peers"))]
pub fn gemm(_: usize, _: Mat, _: Mat, _: &mut [f32], _: bool) {}

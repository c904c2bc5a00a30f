//! The products that a shape really makes, in the three forms of a weight, and squares.

use kernels::{Acc, Mat, MatMut, product};

use super::{Bench, Limit, Measured, model, normal, others};
use crate::bench::shapes::Shape;

/// How a weight [out, in] is used.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Form {
    /// y = x w^T.
    Forward,
    /// dx = dy w.
    Input,
    /// dw += dy^T x.
    Weight,
}

/// One product c = a b.
pub struct Product {
    shape: &'static str,
    name: &'static str,
    pub form: Form,
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// All forms of every weight of `shape`, one microbatch a step.
pub fn of(shape: &Shape) -> Result<Vec<Product>, String> {
    let model = model(shape)?;
    let (hidden, q, kv) = (model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let tokens = shape.seq * shape.batch;
    let weights = [
        ("q", tokens, q, hidden),
        ("k, v", tokens, kv, hidden),
        ("o", tokens, hidden, q),
        ("gate, up", tokens, model.ffn, hidden),
        ("down", tokens, hidden, model.ffn),
        ("output", program::TokenBlocks::new(tokens, model.vocab_padded()).most(), model.vocab_padded(), hidden),
    ];
    Ok(weights.into_iter().flat_map(|(name, rows, out, inner)| forms(shape.name, name, rows, out, inner)).collect())
}

fn forms(shape: &'static str, name: &'static str, rows: usize, out: usize, inner: usize) -> [Product; 3] {
    let product = |form, m, n, k| Product { shape, name, form, m, n, k };
    [
        product(Form::Forward, rows, out, inner),
        product(Form::Input, rows, inner, out),
        product(Form::Weight, out, inner, rows),
    ]
}

/// Squares, plain.
pub fn squares() -> Vec<Product> {
    let square = |n| Product { shape: "square", name: "square", form: Form::Input, m: n, n, k: n };
    [64, 256, 512, 1024, 2048].map(square).into()
}

impl Product {
    /// Ours and others in turn; `torch` was measured apart.
    pub fn measure(&self, bench: &Bench, torch: Option<f64>) {
        let Self { m, n, k, .. } = *self;
        let (a, b) = (normal(1, m * k), normal(2, k * n));
        let (mut c, mut c1, mut c2) = (vec![0.0f32; m * n], vec![0.0f32; m * n], vec![0.0f32; m * n]);
        let a = if self.form == Form::Weight { Mat::new(&a, k, m).t() } else { Mat::new(&a, m, k) };
        let b = if self.form == Form::Forward { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
        let acc = if self.form == Form::Weight { Acc::Add } else { Acc::Store };
        let form = match self.form {
            Form::Forward => "y",
            Form::Input => "dx",
            Form::Weight => "dw",
        };
        let what = Measured {
            shape: self.shape,
            kernel: &format!("{} {form}", self.name),
            size: format!("{m} x {n} x {k}"),
            limit: Limit::Arithmetic,
            work: 2e-9 * (m * n * k) as f64,
        };
        let mut ours = || product(&bench.ctx, a, b, MatMut::new(&mut c, m, n), acc);
        let mut first = || others::matrixmultiply(a, b, &mut c1, acc == Acc::Add);
        let mut second = || others::gemm(bench.args.threads, a, b, &mut c2, acc == Acc::Add);
        let mut calls: Vec<&mut dyn FnMut()> = vec![&mut ours];
        let mut names = Vec::new();
        // It knows no threads as it is built here.
        if others::BUILT && bench.args.threads == 1 {
            calls.push(&mut first);
            names.push("matrixmultiply");
        }
        if others::BUILT {
            calls.push(&mut second);
            names.push("gemm");
        }
        let (rates, share) = bench.rates(&what, &mut calls);
        let mut beside: Vec<_> = names.into_iter().zip(rates[1..].iter().copied()).collect();
        beside.extend(torch.map(|rate| ("torch", rate)));
        bench.show(&what, rates[0], share, &beside);
    }
}

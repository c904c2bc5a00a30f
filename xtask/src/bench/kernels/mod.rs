//! `cargo xtask bench kernels`: each kernel beside the machine's limit and beside other products.

mod others;
mod products;
mod rows;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use kernels::{Ctx, Simd, fill_normal, measure_bandwidth, measure_peak};
use serde_json::json;

use super::machine::Machine;
use super::shapes::{SHAPES, Shape, pick};
use super::stats::median;

#[derive(clap::Args)]
pub struct Args {
    /// Threads of a kernel.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Instruction path: scalar, avx2 or avx512 [default: the best]
    #[arg(long)]
    simd: Option<Simd>,
    /// Rounds; medians are shown.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Shapes whose kernels are measured, such as S,M [default: all, and squares]
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// One JSON object per measurement.
    #[arg(long)]
    json: bool,
}

/// What bounds a kernel.
#[derive(Clone, Copy, PartialEq)]
enum Limit {
    /// GFLOP/s.
    Arithmetic,
    /// GB/s.
    Memory,
}

/// One kernel on one shape: `work` is 10^9 operations or bytes of a call.
struct Measured<'a> {
    shape: &'a str,
    kernel: &'a str,
    size: String,
    limit: Limit,
    work: f64,
}

/// Who measures, and where it is shown.
struct Bench<'a> {
    args: &'a Args,
    ctx: Ctx,
    bandwidth: f64,
}

/// Measures; true if everything asked for was.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let shapes = pick(&SHAPES, |s| s.name, &args.shapes)?;
    let simd = args.simd.unwrap_or_else(Simd::detect);
    let bandwidth = measure_bandwidth(args.threads);
    let bench = Bench { args, ctx: Ctx::new(simd, args.threads), bandwidth };
    Machine::look().notes(args.threads).iter().for_each(|note| bench.note(note));
    let peak = measure_peak(simd, args.threads);
    bench.note(&format!(
        "{simd}, {} threads: peak {peak:.0} GFLOP/s now (measured again beside each figure), {bandwidth:.1} GB/s",
        args.threads
    ));
    others::notes(root).iter().for_each(|note| bench.note(note));
    let mut grid = Vec::new();
    for shape in &shapes {
        grid.extend(products::of(shape)?);
    }
    if args.shapes.is_empty() {
        grid.extend(products::squares());
    }
    let torch = others::torch(root, args.threads, args.rounds, &grid);
    for (i, product) in grid.iter().enumerate() {
        let torch = torch.as_ref().ok().and_then(|all| all.get(i).copied());
        product.measure(&bench, torch);
    }
    for shape in &shapes {
        rows::measure(&bench, shape)?;
    }
    if let Err(why) = &torch {
        bench.note(&format!("PyTorch was not measured: {why}"));
    }
    Ok(true)
}

impl Bench<'_> {
    /// Medians over the rounds of the rate of each of `calls`, and of the first one's share of the peak of its moment:
    /// the clock of a core is not the same from one second to the next.
    fn rates(&self, what: &Measured, calls: &mut [&mut dyn FnMut()]) -> (Vec<f64>, f64) {
        let mut rates = vec![Vec::new(); calls.len()];
        let mut shares = Vec::new();
        for _ in 0..self.args.rounds {
            for (call, rates) in calls.iter_mut().zip(&mut rates) {
                rates.push(what.work / seconds(call));
            }
            let limit = match what.limit {
                Limit::Arithmetic => measure_peak(self.ctx.simd(), self.args.threads),
                Limit::Memory => self.bandwidth,
            };
            shares.push(rates[0].last().expect("just pushed") / limit);
        }
        (rates.into_iter().map(|r| median(r).unwrap_or(f64::NAN)).collect(), median(shares).unwrap_or(f64::NAN))
    }

    /// Measures and shows ours alone.
    fn alone(&self, what: &Measured, mut call: impl FnMut()) {
        let (rates, share) = self.rates(what, &mut [&mut call]);
        self.show(what, rates[0], share, &[]);
    }

    fn show(&self, what: &Measured, rate: f64, share: f64, others: &[(&str, f64)]) {
        let unit = if what.limit == Limit::Arithmetic { "GFLOP/s" } else { "GB/s" };
        let text = if self.args.json {
            json!({
                "bench": "kernels", "schema": events::SCHEMA, "shape": what.shape, "kernel": what.kernel,
                "size": what.size, "threads": self.args.threads, "unit": unit, "value": rate, "share": share,
                "others": others.iter().map(|(name, rate)| (name.to_string(), json!(rate))).collect::<serde_json::Map<_, _>>(),
            })
            .to_string()
        } else {
            let others: String = others.iter().map(|(name, rate)| format!("  {name} {rate:.1}")).collect();
            let share = 100.0 * share;
            format!(
                "{:<7} {:<20} {:<22} {rate:>7.1} {unit:<7} {share:>4.0}%{others}",
                what.shape, what.kernel, what.size
            )
        };
        // A closed pipe (`| head`) is no reason to fail.
        let _ = writeln!(std::io::stdout(), "{text}");
    }

    /// JSON lines stay pure.
    fn note(&self, text: &str) {
        if self.args.json {
            eprintln!("{text}");
        } else {
            let _ = writeln!(std::io::stdout(), "{text}");
        }
    }
}

/// Mean time of a call, over at least 20 ms, after one that warms up.
fn seconds(call: &mut dyn FnMut()) -> f64 {
    call();
    let (began, mut calls) = (Instant::now(), 0);
    while began.elapsed().as_secs_f64() < 0.02 {
        call();
        calls += 1;
    }
    began.elapsed().as_secs_f64() / f64::from(calls)
}

/// Normal numbers.
fn normal(stream: u64, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    fill_normal(&Ctx::new(Simd::detect(), 1), 1, stream, 0, 1.0, &mut out);
    out
}

/// The model of a shape.
fn model(shape: &Shape) -> Result<spec::Model, String> {
    Ok(shape.run(&super::shapes::MODES[0])?.model)
}

//! Measures the machine: peak, memory, products, transports; about 20 s.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use fabric::{Endpoint, FabricError, FabricOptions, Group, ShmWorld, TcpListenerHandle};
use kernels::{Acc, Ctx, Mat, MatMut, Simd};
use spec::Transport;
use spec::cluster::{ClusterLink, Product};
use train::pin;

/// Takes of the peak; the best counts.
const PEAKS: usize = 8;
/// (rows, inner, columns): the products of a model of hidden 256 and of one of 512, a large one, a thin one.
pub const PRODUCTS: [[usize; 3]; 4] = [[2048, 256, 704], [1024, 512, 1408], [2048, 2048, 2048], [64, 512, 512]];
/// Time for one size on one number of threads.
const PRODUCT_TIME: Duration = Duration::from_millis(700);
/// Round trips before the clock runs, and on it.
const ROUNDS: [usize; 2] = [200, 3_000];
/// Numbers of a large message: 16 MiB.
const LARGE: usize = 4 << 20;
/// Large messages in one take, and takes; the median counts.
const MESSAGES: [usize; 2] = [12, 5];

/// GFLOP/s of `threads` cores.
pub fn peak(simd: Simd, threads: usize) -> f64 {
    (0..PEAKS).map(|_| kernels::measure_peak(simd, threads)).fold(0.0, f64::max)
}

/// One size on one core and on `cores`.
pub fn product(simd: Simd, [rows, inner, cols]: [usize; 3], cores: usize) -> Product {
    let on = |threads| product_gflops(&Ctx::new(simd, threads), [rows, inner, cols]);
    let gflops_core = on(1);
    Product { rows, inner, cols, gflops_core, gflops: if cores > 1 { on(cores) } else { gflops_core } }
}

/// Median GFLOP/s of a product with a weight that is stored [cols, inner].
fn product_gflops(ctx: &Ctx, [rows, inner, cols]: [usize; 3]) -> f64 {
    let (x, w) = (vec![0.5f32; rows * inner], vec![0.25f32; cols * inner]);
    let mut y = vec![0.0f32; rows * cols];
    let mut once = || {
        let began = Instant::now();
        let (x, w) = (Mat::new(&x, rows, inner), Mat::new(&w, cols, inner));
        kernels::product(ctx, x, w.t(), MatMut::new(&mut y, rows, cols), Acc::Store);
        began.elapsed().as_secs_f64()
    };
    once();
    let began = Instant::now();
    let mut takes = Vec::new();
    while takes.is_empty() || began.elapsed() < PRODUCT_TIME {
        takes.push(once());
    }
    2.0 * (rows * inner * cols) as f64 / median(&mut takes) / 1e9
}

/// Two ranks of this machine over `transport`, each on a core of its own out of `cores` as far as there are two. Over
/// shared memory each maps it for itself, as processes do.
///
/// # Errors
/// The fabric's.
pub fn link(transport: Transport, cores: &[usize]) -> Result<ClusterLink, FabricError> {
    let options = FabricOptions::default();
    let ends = match transport {
        Transport::Threads => fabric::threads(2, &options)?,
        Transport::Shm => {
            let shared = ShmWorld::create(2, &options)?;
            let attach = |rank| ShmWorld::attach_path(&shared.path(), rank, 2, &options);
            vec![attach(0)?, attach(1)?]
        }
        Transport::Tcp => tcp(&options)?,
    };
    let group = Group::new(1, "doctor", vec![0, 1]);
    // Unpinned they measure the same, only less steadily.
    let on_core = |rank: usize| cores.get(rank).filter(|_| cores.len() > 1).map(|core| pin::hold(&[*core]));
    let (latency_us, gb_s) = std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            drop(on_core(1));
            answer(&ends[1], &group)
        });
        let clock = scope.spawn(|| {
            drop(on_core(0));
            let measured = ask(&ends[0], &group);
            if let Err(e) = &measured {
                ends[1].abort(&e.to_string());
            }
            measured
        });
        let join = "an end does not panic";
        echo.join().expect(join).and(clock.join().expect(join))
    })?;
    Ok(ClusterLink { transport: transport.to_string(), latency_us, gb_s })
}

fn tcp(options: &FabricOptions) -> Result<Vec<Endpoint>, FabricError> {
    let bound = (0..2).map(|_| TcpListenerHandle::bind(Ipv4Addr::LOCALHOST.into())).collect::<Result<Vec<_>, _>>()?;
    let (handles, addresses): (Vec<_>, Vec<_>) = bound.into_iter().unzip();
    // Nobody else is told it: the port is open for a moment only.
    let token = [7; 32];
    std::thread::scope(|scope| {
        let connect = |(rank, handle): (usize, TcpListenerHandle)| {
            let (addresses, token) = (&addresses, &token);
            scope.spawn(move || handle.connect(rank as u32, addresses, token, options))
        };
        let ends: Vec<_> = handles.into_iter().enumerate().map(connect).collect();
        ends.into_iter().map(|end| end.join().expect("connecting does not panic")).collect()
    })
}

/// The side with the clock: microseconds one way, GB/s one way.
fn ask(end: &Endpoint, group: &Group) -> Result<(f64, f64), FabricError> {
    let mut small = [1.0f32; 2];
    let mut trips = Vec::with_capacity(ROUNDS[1]);
    for round in 0..ROUNDS[0] + ROUNDS[1] {
        let began = Instant::now();
        end.send(group, 1, &small)?;
        end.recv(group, 1, &mut small)?;
        if round >= ROUNDS[0] {
            trips.push(began.elapsed().as_secs_f64() / 2.0);
        }
    }
    let large = vec![1.0f32; LARGE];
    let mut takes = Vec::new();
    for take in 0..=MESSAGES[1] {
        let began = Instant::now();
        for _ in 0..MESSAGES[0] {
            end.send(group, 1, &large)?;
        }
        end.recv(group, 1, &mut small)?;
        // The first one touches the memory.
        if take > 0 {
            takes.push((4 * LARGE * MESSAGES[0]) as f64 / began.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok((1e6 * median(&mut trips), median(&mut takes)))
}

/// The other side.
fn answer(end: &Endpoint, group: &Group) -> Result<(), FabricError> {
    let mut small = [0.0f32; 2];
    for _ in 0..ROUNDS[0] + ROUNDS[1] {
        end.recv(group, 0, &mut small)?;
        end.send(group, 0, &small)?;
    }
    let mut large = vec![0.0f32; LARGE];
    for _ in 0..=MESSAGES[1] {
        for _ in 0..MESSAGES[0] {
            end.recv(group, 0, &mut large)?;
        }
        end.send(group, 0, &small)?;
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

//! One rank of our side: joins the others, measures, and as rank 0 says what it measured.

use std::io::{BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Instant;

use fabric::{Endpoint, FabricError, FabricOptions, Group, ReducePlan, ShmWorld, TcpListenerHandle};

use super::{Sample, WARMUP};

/// Not a secret: the ranks of a bench meet on this host's loopback.
const TOKEN: [u8; 32] = *b"lockstep bench collectives ranks";

#[derive(clap::Args)]
pub struct Args {
    /// This rank.
    #[arg(long)]
    rank: u32,
    /// All ranks.
    #[arg(long)]
    ranks: u32,
    /// Where the shared memory is; without it ranks meet by TCP.
    #[arg(long)]
    memory: Option<PathBuf>,
    /// Operations.
    #[arg(long, value_delimiter = ',')]
    operations: Vec<String>,
    /// SIZE:ITERATIONS, such as 1024:300
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<String>,
}

/// The life of a rank.
///
/// # Errors
/// It cannot join, or an operation fails or sums up wrong.
pub fn run(args: &Args) -> Result<bool, String> {
    let options = FabricOptions::default();
    let shown = |e: FabricError| e.to_string();
    let end = match &args.memory {
        Some(path) => ShmWorld::attach_path(path, args.rank, args.ranks, &options).map_err(shown)?,
        None => meet(args, &options)?,
    };
    let sizes = args.sizes.iter().map(|pair| {
        let (bytes, iterations) = pair.split_once(':')?;
        Some((bytes.parse().ok()?, iterations.parse().ok()?))
    });
    let sizes: Vec<_> = sizes.collect::<Option<_>>().ok_or("--sizes takes SIZE:ITERATIONS")?;
    let samples = measure(&end, &args.operations, &sizes)?;
    for Sample { operation, bytes, seconds } in samples.iter().filter(|_| args.rank == 0) {
        println!("{}", serde_json::json!({ "operation": operation, "bytes": bytes, "seconds": seconds }));
    }
    Ok(true)
}

/// Says this rank's address, and learns all of them.
fn meet(args: &Args, options: &FabricOptions) -> Result<Endpoint, String> {
    let (handle, address) = TcpListenerHandle::bind(Ipv4Addr::LOCALHOST.into()).map_err(|e| e.to_string())?;
    println!("@{address}");
    std::io::stdout().flush().map_err(|e| e.to_string())?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).map_err(|e| e.to_string())?;
    let addresses: Result<Vec<SocketAddr>, _> = line.split_whitespace().map(str::parse).collect();
    let addresses = addresses.map_err(|e| format!("the addresses of the ranks: {e}"))?;
    handle.connect(args.rank, &addresses, &TOKEN, options).map_err(|e| e.to_string())
}

/// Measures every operation at every size (bytes, iterations) with the other ranks.
pub fn measure(end: &Endpoint, operations: &[String], sizes: &[(usize, usize)]) -> Result<Vec<Sample>, String> {
    let group = Group::new(0, "world", (0..end.world()).collect());
    let mut samples = Vec::new();
    for operation in operations {
        for &(bytes, iterations) in sizes {
            let seconds = row(end, &group, operation, bytes / 4, iterations).map_err(|e| e.to_string())??;
            samples.push(Sample { operation: operation.clone(), bytes, seconds });
        }
    }
    end.barrier(&group).map_err(|e| e.to_string())?;
    Ok(samples)
}

/// Seconds of one operation in a row of `iterations`; the inner error is a wrong result.
fn row(
    end: &Endpoint,
    group: &Group,
    operation: &str,
    len: usize,
    iterations: usize,
) -> Result<Result<f64, String>, FabricError> {
    let (me, members) = (end.rank() as usize, group.len());
    let plan = ReducePlan::even(members, members, len);
    let mine = vec![1.0f32; len];
    let leaf = [(me..me + 1, &mine[..])];
    let mut out = vec![0.0f32; if operation == "reduce_scatter" { plan.part_len(me) } else { len }];
    let part = vec![members as f32; plan.part_len(me)];
    let whole = vec![members as f32; if operation == "all_to_all" { len } else { 0 }];
    let to: Vec<&[f32]> =
        (0..members).map(|i| &whole[whole.len() * i / members..whole.len() * (i + 1) / members]).collect();
    let mut from = vec![Vec::new(); members];
    let mut once = || match operation {
        "all_gather" => end.all_gather(group, &plan.parts, &part, &mut out),
        "reduce_scatter" => end.reduce_scatter(group, &plan, &leaf, &mut out),
        "all_to_all" => end.all_to_all(group, &to, &mut from),
        _ => end.all_reduce(group, &plan, &leaf, &mut out),
    };
    (0..=WARMUP).try_for_each(|_| once())?;
    end.barrier(group)?;
    let began = Instant::now();
    (0..iterations).try_for_each(|_| once())?;
    let seconds = began.elapsed().as_secs_f64() / iterations as f64;
    if operation == "all_to_all" {
        out = from.concat();
    }
    if out.is_empty() || out.iter().any(|&x| x != members as f32) {
        return Ok(Err(format!("{operation} of {len} numbers on {members} ranks: wrong result")));
    }
    Ok(Ok(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_measured_at_every_size() {
        let ends = fabric::threads(3, &FabricOptions::default()).unwrap();
        let operations = super::super::OPERATIONS.map(str::to_owned);
        let sizes = [(48, 2), (4800, 1)];
        let all: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> = ends.iter().map(|end| scope.spawn(|| measure(end, &operations, &sizes))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
        });
        for samples in all {
            assert_eq!(samples.len(), 8);
            assert!(samples.iter().all(|sample| sample.seconds > 0.0));
        }
    }
}

//! `cargo xtask bench collectives`: rounds of our transports and of the peers in turn.
//!
//! Time is that of one operation in a row of them, on rank 0. Bandwidth as nccl-tests has it
//! (doc/PERFORMANCE.md there): the algorithm's is the bytes of the whole vector over the time;
//! the bus's is that times 2 (n - 1) / n for all_reduce and (n - 1) / n for the others, which
//! is what each of n ranks has to move.

pub mod rank;
mod sides;
mod table;

use std::path::Path;

use super::machine::Machine;
use super::shapes::pick;
use sides::{Side, Sides};
use table::Table;

/// Operations, by the names that all sides use.
const OPERATIONS: [&str; 4] = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
/// Our transports.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "threads"];
/// Bytes of the whole vector, from 1 KiB to 64 MiB.
const SIZES: [usize; 9] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];
/// Operations that do not count.
const WARMUP: usize = 2;
/// Operations that count: as many as move this, within the limits behind it.
const BYTES_MOVED: usize = 256 << 20;
const ITERATIONS_MIN: usize = 4;
const ITERATIONS_MAX: usize = 300;

#[derive(clap::Args)]
pub struct Args {
    /// Also measure gloo (PyTorch, under target/peer-env) and Open MPI (mpicc, mpirun), in turn.
    #[arg(long)]
    peer: bool,
    /// One JSON object per measurement.
    #[arg(long)]
    json: bool,
    /// Rounds of each side; medians are compared.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4], value_parser = clap::value_parser!(u32).range(2..))]
    ranks: Vec<u32>,
    /// Transports, such as shm,tcp [default: all]
    #[arg(long, value_delimiter = ',')]
    transports: Vec<String>,
    /// Operations, such as all_reduce [default: all]
    #[arg(long, value_delimiter = ',')]
    operations: Vec<String>,
    /// Smallest vector, KiB.
    #[arg(long, default_value_t = 1)]
    kib_min: usize,
    /// Largest vector, KiB.
    #[arg(long, default_value_t = 64 << 10)]
    kib_max: usize,
}

/// What every side measures.
pub struct Plan {
    ranks: usize,
    operations: Vec<&'static str>,
    /// Bytes of the whole vector, and operations that count.
    sizes: Vec<(usize, usize)>,
}

/// One operation of one size on one side.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    operation: String,
    bytes: usize,
    seconds: f64,
}

/// Bytes per second over the bus, as nccl-tests defines it.
fn bus_bandwidth(operation: &str, bytes: usize, ranks: usize, seconds: f64) -> f64 {
    let share = (ranks - 1) as f64 / ranks as f64;
    let factor = if operation == "all_reduce" { 2.0 * share } else { share };
    bytes as f64 / seconds * factor
}

fn iterations(bytes: usize) -> usize {
    (BYTES_MOVED / bytes).clamp(ITERATIONS_MIN, ITERATIONS_MAX)
}

/// Measures; true if everything asked for was.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    let operations = pick(&OPERATIONS, |o| o, &args.operations)?;
    let transports = pick(&TRANSPORTS, |t| t, &args.transports)?;
    let machine = Machine::look();
    let table = Table::new(args.json);
    let ranks_max = args.ranks.iter().copied().max().unwrap_or(1) as usize;
    machine.notes(ranks_max).iter().for_each(|note| table.note(note));
    let mut sides: Vec<Side> = transports.into_iter().map(Side::Ours).collect();
    let here = Sides::look(root, &machine);
    let mut complete = true;
    if args.peer {
        for (side, found) in [(Side::Gloo, here.gloo()), (Side::Mpi, here.mpi())] {
            match found {
                Ok(version) => {
                    table.note(&format!("{}: {version}", side.name()));
                    sides.push(side);
                }
                Err(why) => {
                    eprintln!("skipped: {}: {why}", side.name());
                    complete = false;
                }
            }
        }
    }
    for &ranks in &args.ranks {
        let sizes = SIZES.iter().filter(|&&bytes| (args.kib_min << 10..=args.kib_max << 10).contains(&bytes));
        let plan = Plan {
            ranks: ranks as usize,
            operations: operations.clone(),
            sizes: sizes.map(|&bytes| (bytes, iterations(bytes))).collect(),
        };
        let mut rounds: Vec<Vec<Sample>> = sides.iter().map(|_| Vec::new()).collect();
        for _ in 0..args.rounds {
            for (side, samples) in sides.iter().zip(&mut rounds) {
                match here.measure(side, &plan) {
                    Ok(more) => samples.extend(more),
                    Err(why) => {
                        eprintln!("error: {} with {ranks} ranks: {why}", side.name());
                        complete = false;
                    }
                }
            }
        }
        table.ranks(&plan, &sides, &rounds);
    }
    Ok(complete)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_bandwidth_is_what_each_rank_moves() {
        assert_eq!(bus_bandwidth("all_reduce", 100, 2, 1.0), 100.0);
        assert_eq!(bus_bandwidth("all_reduce", 100, 4, 0.5), 300.0);
        assert_eq!(bus_bandwidth("all_gather", 100, 4, 1.0), 75.0);
        assert_eq!(bus_bandwidth("reduce_scatter", 100, 2, 1.0), 50.0);
        assert_eq!(bus_bandwidth("all_to_all", 100, 4, 1.0), 75.0);
    }

    #[test]
    fn small_vectors_are_measured_often_and_large_ones_at_least_a_few_times() {
        assert_eq!((iterations(1 << 10), iterations(64 << 20)), (ITERATIONS_MAX, ITERATIONS_MIN));
        assert!(SIZES.iter().all(|bytes| bytes % 16 == 0), "4 ranks share whole numbers");
    }
}

//! `lockstep doctor`: is this machine fit, and how fast is it.

mod checks;
mod facts;
mod measure;

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kernels::Simd;
use spec::Transport;
use spec::cluster::{Cluster, KIND, SCHEMA};
use train::TrainError;

use crate::show::line;
use checks::Check;
use facts::Facts;

/// Exit code if something must be mended before anything can be trained.
const UNFIT: u8 = 2;
/// The name under which a machine finds its own figures.
const HERE: &str = "here";

#[derive(clap::Args)]
pub struct Args {
    /// Measure peak, memory, products and transports (about 20 s) and save them as the cluster `here`.
    #[arg(long)]
    measure: bool,
    /// With --measure: the file [default: lockstep/clusters/here.toml under $XDG_CONFIG_HOME, else under ~/.config]
    #[arg(long, value_name = "FILE", requires = "measure")]
    out: Option<PathBuf>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let out = if args.measure { Some(target(args.out.as_deref())?) } else { None };
    let facts = Facts::gather();
    let checks = checks::judge(&facts);
    if !args.json {
        print(&checks);
    }
    let cluster = out.as_ref().map(|path| measured(&facts, args.json, path)).transpose()?;
    if args.json {
        let check = |c: &Check| {
            let problem = c.problem.as_ref();
            let problem = problem.map(|p| serde_json::json!({ "fatal": p.fatal, "what": p.what, "remedy": p.remedy }));
            serde_json::json!({ "name": c.name, "found": c.found, "problem": problem })
        };
        let object = serde_json::json!({
            "kind": "doctor", "schema": events::SCHEMA, "checks": checks.iter().map(check).collect::<Vec<_>>(),
            "measured": cluster, "file": out,
        });
        line(&object.to_string());
    }
    let unfit = checks.iter().any(|check| check.problem.as_ref().is_some_and(|p| p.fatal));
    Ok(if unfit { UNFIT } else { 0 })
}

fn print(checks: &[Check]) {
    for check in checks {
        line(&format!("{:<14} {}", check.name, check.found));
    }
    let problems: Vec<_> = checks.iter().filter_map(|check| check.problem.as_ref()).collect();
    for problem in &problems {
        line(&format!("{}: {}", if problem.fatal { "PROBLEM" } else { "warning" }, problem.what));
        line(&format!("  remedy: {}", problem.remedy));
    }
    if problems.is_empty() {
        line("nothing to mend");
    }
}

/// Measures, and saves at `path`.
fn measured(facts: &Facts, json: bool, path: &Path) -> Result<Cluster, TrainError> {
    let say = |text: &str| {
        if !json {
            line(text)
        }
    };
    let (simd, cores) = (Simd::detect(), facts.cores_allowed.len().max(1));
    let all = format!("{cores} cores");
    let (peak_gflops_core, peak_gflops) = (measure::peak(simd, 1), measure::peak(simd, cores));
    say(&format!("{:<26} {:>10} {all:>12}", "", "1 core"));
    say(&format!("{:<26} {peak_gflops_core:>10.1} {peak_gflops:>12.1}  GFLOP/s", "peak"));
    let (memory_gb_s_core, memory_gb_s) = (kernels::measure_bandwidth(1), kernels::measure_bandwidth(cores));
    say(&format!("{:<26} {memory_gb_s_core:>10.1} {memory_gb_s:>12.1}  GB/s", "memory (triad)"));
    let mut product = Vec::new();
    for size in measure::PRODUCTS {
        let p = measure::product(simd, size, cores);
        let name = format!("product {} x {} x {}", p.rows, p.inner, p.cols);
        let of_peak = 100.0 * p.gflops_core / peak_gflops_core;
        say(&format!("{name:<26} {:>10.1} {:>12.1}  GFLOP/s, {of_peak:.0}% of peak on one", p.gflops_core, p.gflops));
        product.push(p);
    }
    say(&format!("{:<26} {:>10} {:>12}", "", "8 B", "16 MiB"));
    let mut link = Vec::new();
    for transport in [Transport::Shm, Transport::Tcp, Transport::Threads] {
        match measure::link(transport, &facts.cores_allowed) {
            Ok(l) => {
                say(&format!("{:<26} {:>7.1} us {:>7.2} GB/s", format!("transport {transport}"), l.latency_us, l.gb_s));
                link.push(l);
            }
            Err(e) => say(&format!("transport {transport} is left out: {e}")),
        }
    }
    let cluster = Cluster {
        kind: KIND.into(),
        schema: SCHEMA,
        name: HERE.into(),
        measured: crate::train_cmd::utc_now(),
        cpu: facts.cpu.clone(),
        cores,
        simd: simd.to_string(),
        memory_bytes: facts.memory,
        peak_gflops_core,
        peak_gflops,
        memory_gb_s_core,
        memory_gb_s,
        product,
        link,
    };
    save(&cluster, path).map_err(|source| TrainError::Io { what: "cannot write", path: path.to_owned(), source })?;
    say(&format!("saved as the cluster `{HERE}` in {}", path.display()));
    Ok(cluster)
}

/// Where the figures go; refused before anything is measured if a file there is not ours.
fn target(out: Option<&Path>) -> Result<PathBuf, TrainError> {
    let folder = |key: &str| env::var_os(key).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = || folder("XDG_CONFIG_HOME").or_else(|| Some(folder("HOME")?.join(".config")));
    let path =
        match out {
            Some(path) => path.to_owned(),
            None => config().map(|config| config.join("lockstep/clusters").join(format!("{HERE}.toml"))).ok_or_else(
                || TrainError::BadInput("neither XDG_CONFIG_HOME nor HOME is set; name the file with --out".into()),
            )?,
        };
    let refused = |why: &str| {
        let path = path.display();
        TrainError::BadInput(format!("{path} {why}; nothing was measured: choose another file with --out"))
    };
    match fs::read_to_string(&path) {
        Ok(text) if Cluster::owns(&text) => Ok(path),
        Ok(_) => Err(refused("is not a cluster file of lockstep and is left alone")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(path),
        Err(e) => Err(refused(&format!("cannot be written anew: {e}"))),
    }
}

/// Writes beside the target, then renames: a death in between leaves the old file.
fn save(cluster: &Cluster, path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = path.with_extension(format!("toml.{}", std::process::id()));
    fs::write(&beside, cluster.to_toml())?;
    fs::rename(&beside, path)
}

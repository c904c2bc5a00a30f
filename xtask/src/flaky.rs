//! `cargo xtask flaky`: the tests of the workspace, built once and run many times beside busy loops. What fails then depends on how
//! a race ends, in the test or in what it tests. CI sees a test once, and alone.

mod output;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::prove::launch::piped;
use output::{Failure, failures, passed};

#[derive(clap::Args)]
pub struct Args {
    /// How often every test is run.
    #[arg(long, default_value_t = 10)]
    times: usize,
    /// Busy loops beside the tests.
    #[arg(long, default_value_t = 2)]
    spinners: usize,
    /// Only the test program of this name, such as `cli`; no other is built.
    #[arg(long, value_name = "NAME", conflicts_with = "package")]
    test: Option<String>,
    /// Only test programs of this package, such as `lockstep-control`.
    #[arg(long, value_name = "NAME")]
    package: Option<String>,
    /// A test program that takes longer is ended: it hangs.
    #[arg(long, value_name = "MINUTES", default_value_t = 30.0)]
    limit_minutes: f64,
    /// Only tests with one of these words in their names.
    filter: Vec<String>,
}

/// A test program.
struct Program {
    /// Of the target: a crate, or a file of its tests.
    name: String,
    package: String,
    path: PathBuf,
    /// Where cargo runs it.
    folder: PathBuf,
}

/// Loops that take a core each, until dropped.
struct Spinners(Arc<AtomicBool>);

impl Spinners {
    fn start(count: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        for _ in 0..count {
            let over = over.clone();
            std::thread::spawn(move || while !over.load(Ordering::Relaxed) {});
        }
        Self(over)
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// See the module; true if no test failed.
pub fn run(root: &Path, args: &Args) -> Result<bool, String> {
    if args.times == 0 || !args.limit_minutes.is_finite() || args.limit_minutes <= 0.0 {
        return Err("--times and --limit-minutes must be above 0".into());
    }
    let programs = build(root, args)?;
    println!("{} test programs, {} times, beside {} busy loops", programs.len(), args.times, args.spinners);
    let _spinners = Spinners::start(args.spinners);
    let mut failed: BTreeMap<String, usize> = BTreeMap::new();
    for time in 1..=args.times {
        let (began, mut well, mut ill) = (Instant::now(), 0, 0);
        for program in &programs {
            let ran = once(program, &args.filter, Duration::from_secs_f64(60.0 * args.limit_minutes))?;
            well += ran.passed;
            ill += ran.failures.len();
            for Failure { test, output } in ran.failures {
                println!("\nrun {time}: {} {test} FAILED\n{}", program.name, output.trim_end());
                *failed.entry(format!("{} {test}", program.name)).or_default() += 1;
            }
        }
        println!("run {time} of {}: {well} passed, {ill} failed, {} s", args.times, began.elapsed().as_secs());
        if well + ill == 0 {
            return Err("no test has such a name".into());
        }
    }
    println!("\n{:>6}  test", "failed");
    failed.iter().for_each(|(test, count)| println!("{count:>3} of {:<3} {test}", args.times));
    if failed.is_empty() {
        println!("{:>6}", "none");
    }
    Ok(failed.is_empty())
}

/// Builds what `cargo test` of the README builds, or what is wanted of it.
fn build(root: &Path, args: &Args) -> Result<Vec<Program>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words =
        "test --workspace --features lockstep/tokenizers --locked --no-run --message-format json-render-diagnostics";
    let mut command = Command::new(cargo);
    command.args(words.split(' ')).current_dir(root).stderr(Stdio::inherit());
    command.args(args.test.iter().flat_map(|name| ["--test", name]));
    let output = command.output().map_err(|e| format!("cannot start cargo: {e}"))?;
    if !output.status.success() {
        return Err(format!("the build of the tests ended with {}", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let all = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests = all.filter(|message| message["profile"]["test"] == true).filter_map(|message| {
        let manifest = Path::new(message["manifest_path"].as_str()?);
        Some(Program {
            name: message["target"]["name"].as_str()?.into(),
            package: package(manifest),
            path: message["executable"].as_str()?.into(),
            folder: manifest.parent()?.into(),
        })
    });
    let wanted = |program: &Program| args.package.as_ref().is_none_or(|package| program.package == *package);
    let mut programs: Vec<Program> = tests.filter(wanted).collect();
    programs.sort_by(|a, b| a.path.cmp(&b.path));
    if programs.is_empty() {
        return Err("no package of that name has tests".into());
    }
    Ok(programs)
}

/// The name of the package of a manifest; empty if it has none.
fn package(manifest: &Path) -> String {
    let text = std::fs::read_to_string(manifest).unwrap_or_default();
    let name = toml::from_str::<toml::Table>(&text).ok().and_then(|table| {
        let name = table.get("package")?.get("name")?.as_str()?;
        Some(name.to_owned())
    });
    name.unwrap_or_default()
}

/// What came of running a test program.
struct Ran {
    passed: usize,
    failures: Vec<Failure>,
}

fn once(program: &Program, filter: &[String], limit: Duration) -> Result<Ran, String> {
    let mut command = Command::new(&program.path);
    command.args(filter).current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    let (mut child, mut output, errors) = piped(&mut command)?;
    let said = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = std::io::Read::read_to_end(&mut output, &mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    });
    let began = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|e| format!("cannot wait: {e}"))? {
            Some(status) => break Some(status),
            None if began.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
        }
    };
    let said = said.join().unwrap_or_default();
    let mut failures = failures(&said);
    let how = match status {
        None => Some(format!("it did not end within {} s", limit.as_secs())),
        Some(status) if !status.success() && failures.is_empty() => Some(format!("it ended with {status}")),
        Some(_) => None,
    };
    if let Some(how) = how {
        let output = format!("{how}\n{said}\n{}", errors.join().unwrap_or_default());
        failures.push(Failure { test: "(the test program)".into(), output });
    }
    Ok(Ran { passed: passed(&said), failures })
}

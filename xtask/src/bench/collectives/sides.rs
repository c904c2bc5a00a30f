//! The sides: our transports, gloo and Open MPI, each on the same cores.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fabric::{FabricOptions, ShmWorld};
use serde_json::{Value, json};

use super::super::machine::Machine;
use super::super::process;
use super::{Plan, Sample, WARMUP, rank};

/// Longest run of a side.
const LIMIT: Duration = Duration::from_secs(300);

/// Who is measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Side {
    /// Our fabric over this transport.
    Ours(&'static str),
    /// PyTorch's gloo.
    Gloo,
    /// Open MPI.
    Mpi,
}

impl Side {
    /// Its name in the table.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours(transport) => transport,
            Self::Gloo => "gloo",
            Self::Mpi => "mpi",
        }
    }
}

/// Where the sides are.
pub struct Sides<'a> {
    root: &'a Path,
    machine: &'a Machine,
}

impl<'a> Sides<'a> {
    /// The sides of the workspace at `root`.
    pub fn look(root: &'a Path, machine: &'a Machine) -> Self {
        Self { root, machine }
    }

    fn python(&self) -> PathBuf {
        self.root.join("target/peer-env/bin/python")
    }

    fn mpi_program(&self) -> PathBuf {
        self.root.join("target/collectives-mpi")
    }

    fn peer(&self, script: &str) -> PathBuf {
        self.root.join("bench/peer").join(script)
    }

    /// The version of gloo's PyTorch.
    ///
    /// # Errors
    /// It is not there.
    pub fn gloo(&self) -> Result<String, String> {
        let advice = "`cargo xtask bench train --peer` installs it";
        if !self.python().exists() {
            return Err(format!("there is no {}; {advice}", self.python().display()));
        }
        let mut command = Command::new(self.python());
        let said = process::output(command.arg("-B").arg(self.peer("collectives.py")).arg("--versions"), LIMIT)?;
        let said: Value = serde_json::from_str(said.trim()).map_err(|e| format!("it said {said}: {e}; {advice}"))?;
        Ok(format!("PyTorch {}", said["torch"].as_str().unwrap_or("of unknown version")))
    }

    /// The version of Open MPI, after building its program.
    ///
    /// # Errors
    /// Its compiler or launcher is not there.
    pub fn mpi(&self) -> Result<String, String> {
        let advice = "Debian has it in openmpi-bin and libopenmpi-dev";
        let mut compiler = Command::new("mpicc");
        compiler.arg("-O2").arg(self.peer("collectives.c")).arg("-o").arg(self.mpi_program());
        process::output(&mut compiler, LIMIT).map_err(|e| format!("{e}; {advice}"))?;
        let said = process::output(Command::new("mpirun").arg("--version"), LIMIT);
        let said = said.map_err(|e| format!("{e}; {advice}"))?;
        Ok(said.lines().next().unwrap_or_default().to_owned())
    }

    /// One round of a side.
    ///
    /// # Errors
    /// What a rank said when it failed.
    pub fn measure(&self, side: &Side, plan: &Plan) -> Result<Vec<Sample>, String> {
        match side {
            Side::Ours("threads") => threads(plan),
            Side::Ours(transport) => self.processes(*transport == "shm", plan),
            Side::Gloo => self.run_gloo(plan),
            Side::Mpi => self.run_mpi(plan),
        }
    }

    fn processes(&self, shm: bool, plan: &Plan) -> Result<Vec<Sample>, String> {
        let program = std::env::current_exe().map_err(|e| format!("where is this program: {e}"))?;
        let world = plan.ranks as u32;
        let memory = ShmWorld::create(world, &FabricOptions::default()).map_err(|e| e.to_string())?;
        let mut ranks = Ranks(Vec::new());
        for rank in 0..plan.ranks {
            let mut command = self.machine.rank_command(rank, &program);
            command.args(["bench", "collectives-rank", "--rank", &rank.to_string()]);
            command.args(["--ranks", &world.to_string(), "--operations", &plan.operations.join(",")]);
            command.args(["--sizes", &sizes(plan).join(",")]);
            if shm {
                command.arg("--memory").arg(memory.path());
            }
            let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
            ranks.0.push(child.map_err(|e| format!("cannot start a rank: {e}"))?);
        }
        if !shm {
            ranks.introduce()?;
        }
        ranks.end()
    }

    fn run_gloo(&self, plan: &Plan) -> Result<Vec<Sample>, String> {
        let (sizes, iterations): (Vec<_>, Vec<_>) = plan.sizes.iter().copied().unzip();
        let spec = json!({
            "ranks": plan.ranks, "cores": self.cores(), "operations": plan.operations, "sizes": sizes,
            "warmup": WARMUP, "iterations": iterations,
        });
        let mut command = Command::new(self.python());
        command.arg("-B").arg(self.peer("collectives.py")).arg(spec.to_string());
        Ok(samples(&process::output(&mut command, LIMIT)?))
    }

    fn run_mpi(&self, plan: &Plan) -> Result<Vec<Sample>, String> {
        let cores: Vec<String> = self.cores().iter().map(usize::to_string).collect();
        let mut command = Command::new("mpirun");
        // The program holds its ranks itself, on the same cores as the other sides.
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
        command.args(["-n", &plan.ranks.to_string()]).arg(self.mpi_program());
        command.args([&cores.join(","), &WARMUP.to_string(), &plan.operations.join(",")]).args(sizes(plan));
        Ok(samples(&process::output(&mut command, LIMIT)?))
    }

    fn cores(&self) -> &[usize] {
        match self.machine.cores() {
            [] => &[0],
            cores => cores,
        }
    }
}

fn sizes(plan: &Plan) -> Vec<String> {
    plan.sizes.iter().map(|(bytes, iterations)| format!("{bytes}:{iterations}")).collect()
}

/// What rank 0 of a side said; other lines are the libraries'.
fn samples(output: &str) -> Vec<Sample> {
    let read = |line: &str| {
        let object: Value = serde_json::from_str(line).ok()?;
        Some(Sample {
            operation: object["operation"].as_str()?.to_owned(),
            bytes: object["bytes"].as_u64()? as usize,
            seconds: object["seconds"].as_f64()?,
        })
    };
    output.lines().filter_map(read).collect()
}

/// All ranks as threads of this process.
fn threads(plan: &Plan) -> Result<Vec<Sample>, String> {
    let ends = fabric::threads(plan.ranks as u32, &FabricOptions::default()).map_err(|e| e.to_string())?;
    let operations: Vec<String> = plan.operations.iter().map(|o| (*o).to_owned()).collect();
    let measure = |end| rank::measure(end, &operations, &plan.sizes);
    std::thread::scope(|scope| {
        let measure = &measure;
        let ranks: Vec<_> = ends.iter().map(|end| scope.spawn(move || measure(end))).collect();
        let joined = ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank panicked".to_owned())?);
        let mut all: Vec<Vec<Sample>> = joined.collect::<Result<_, _>>()?;
        Ok(all.swap_remove(0))
    })
}

/// Rank processes; they end with this.
struct Ranks(Vec<Child>);

impl Ranks {
    /// Tells every rank the addresses of all.
    fn introduce(&mut self) -> Result<(), String> {
        let mut addresses = Vec::new();
        for child in &mut self.0 {
            let mut line = String::new();
            let output = child.stdout.as_mut().ok_or("a rank without output")?;
            // A rank says nothing more before it knows the others: the buffer swallows nothing.
            BufReader::new(output).read_line(&mut line).map_err(|e| format!("a rank cannot be read: {e}"))?;
            let address = line.trim().strip_prefix('@').ok_or("a rank ended before it said its address")?;
            addresses.push(address.to_owned());
        }
        for child in &mut self.0 {
            let input = child.stdin.as_mut().ok_or("a rank without input")?;
            writeln!(input, "{}", addresses.join(" ")).map_err(|e| format!("a rank does not listen: {e}"))?;
        }
        Ok(())
    }

    /// What rank 0 says, when all have ended well.
    fn end(mut self) -> Result<Vec<Sample>, String> {
        let output = self.0[0].stdout.take().ok_or("a rank without output")?;
        let lines: Vec<String> = BufReader::new(output).lines().map_while(Result::ok).collect();
        for (rank, child) in self.0.iter_mut().enumerate() {
            let status = child.wait().map_err(|e| format!("cannot wait for rank {rank}: {e}"))?;
            if !status.success() {
                return Err(format!("rank {rank} ended with {status}"));
            }
        }
        Ok(samples(&lines.join("\n")))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rank_0_said_is_read_and_the_rest_left() {
        let said =
            "[W a warning]\n{\"operation\": \"all_reduce\", \"bytes\": 1024, \"seconds\": 0.5}\n{\"missing\": 1}";
        let want = Sample { operation: "all_reduce".into(), bytes: 1024, seconds: 0.5 };
        assert_eq!(samples(said), [want]);
    }
}

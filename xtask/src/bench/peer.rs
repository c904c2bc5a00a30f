//! The peer: PyTorch in an environment of its own, running `bench/peer/train.py`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::machine::{Machine, has};
use super::ours::{STEPS_MIN, Sample, WARMUP};
use super::process::{self, Session};
use super::shapes::{Mode, Shape};

/// The version that numbers are stated for.
const TORCH: &str = "torch==2.11.0";
/// What is installed where that version is not to be had.
const TORCH_ANY: &str = "torch";
/// Longest installation: it is some gigabytes.
const INSTALL_LIMIT: Duration = Duration::from_secs(3600);
/// Longest run, with a compilation.
const LIMIT: Duration = Duration::from_secs(900);

/// A Python environment with PyTorch.
pub struct Peer<'a> {
    environment: PathBuf,
    script: PathBuf,
    machine: &'a Machine,
    compiler: bool,
    /// What is installed.
    pub versions: Versions,
}

/// What the script says about its environment.
#[derive(Debug, Clone, PartialEq)]
pub struct Versions {
    /// Python's version.
    pub python: String,
    /// PyTorch's version.
    pub torch: String,
    /// Resident memory after importing it and nothing else.
    pub import_bytes: u64,
}

impl<'a> Peer<'a> {
    /// The environment under `target/`, made where it is not there yet.
    ///
    /// # Errors
    /// No Python, no PyTorch.
    pub fn make(root: &Path, machine: &'a Machine) -> Result<Self, String> {
        let environment = root.join("target").join("peer-env");
        let script = root.join("bench").join("peer").join("train.py");
        let python = environment.join("bin").join("python");
        let look = || versions(&mut command(Command::new(&python), &script, &environment));
        let versions = match look() {
            Ok(versions) => versions,
            Err(_) => {
                install(&environment, &python)?;
                look().map_err(|e| format!("PyTorch was installed in {}, but: {e}", environment.display()))?
            }
        };
        // `torch.compile` builds C++.
        let compiler = std::env::var("CXX").is_ok_and(|cxx| has(&cxx)) || has("g++") || has("clang++");
        Ok(Self { environment, script, machine, compiler, versions })
    }

    /// What the person should know.
    pub fn notes(&self) -> Vec<String> {
        let Versions { python, torch, import_bytes } = &self.versions;
        let base = import_bytes >> 20;
        let mut notes = vec![format!("peer: PyTorch {torch}, Python {python}; {base} MiB resident after its import")];
        if !self.compiler {
            notes.push("torch.compile is skipped: it needs a C++ compiler (g++ or clang++)".into());
        }
        notes
    }

    /// The variants of `mode` that can run here.
    pub fn variants(&self, mode: &Mode) -> Vec<&'static str> {
        mode.variants.iter().copied().filter(|v| *v != "compiled" || self.compiler).collect()
    }

    /// Writes the weights and tokens that every variant starts from.
    pub fn save(&self, shape: &Shape, folder: &Path) -> Result<(), String> {
        let mut command = self.python(1);
        command.arg("--save").arg(folder).arg(json!({ "shape": shape.json()? }).to_string());
        process::output(&mut command, LIMIT).map(|_| ())
    }

    /// Starts `variant`, to be measured in rounds of about `seconds`.
    ///
    /// # Errors
    /// It ended twice before it was ready.
    pub fn start(&self, shape: &Shape, mode: &Mode, variant: &'static str, seconds: f64) -> Result<Contestant, String> {
        let mut of = shape.json()?;
        of["stages"] = json!(mode.stages(shape));
        let spec = spec(of, mode, variant, seconds).to_string();
        let once = || {
            let mut command = self.python(mode.cores());
            command.env("OMP_NUM_THREADS", mode.threads.to_string()).arg(&spec);
            let mut session = Session::start(&mut command)?;
            let loss = number(&session.object(LIMIT)?, "loss")?;
            Ok(Contestant { variant, loss, session })
        };
        once().or_else(|first: String| {
            eprintln!("{} {} {variant} is tried again: {first}", shape.name, mode.name);
            once()
        })
    }

    fn python(&self, cores: usize) -> Command {
        let python = self.environment.join("bin").join("python");
        command(self.machine.command(cores, &python), &self.script, &self.environment)
    }
}

/// The script in the environment; nothing is written beside it.
fn command(mut python: Command, script: &Path, environment: &Path) -> Command {
    python.arg("-B").arg(script).env("TORCHINDUCTOR_CACHE_DIR", environment.join("inductor"));
    python
}

fn spec(shape: Value, mode: &Mode, variant: &str, seconds: f64) -> Value {
    json!({
        "shape": shape, "variant": variant, "ranks": mode.ranks(), "threads": mode.threads,
        "seconds": seconds, "warmup": WARMUP, "steps_min": STEPS_MIN,
    })
}

/// A variant that is warm and waits for its rounds.
pub struct Contestant {
    /// The variant.
    pub variant: &'static str,
    /// The loss of its first step.
    pub loss: f64,
    session: Session,
}

impl Contestant {
    /// One round.
    ///
    /// # Errors
    /// It ended, or gave no numbers.
    pub fn measure(&mut self) -> Result<Sample, String> {
        sample(&self.session.ask(LIMIT)?)
    }
}

fn sample(line: &str) -> Result<Sample, String> {
    Ok(Sample {
        tokens_per_s: number(line, "tokens_per_s")?,
        peak_bytes: number(line, "peak_bytes")?,
        mfu: f64::NAN,
        compute: f64::NAN,
        exchange: f64::NAN,
        load: f64::NAN,
    })
}

fn number(line: &str, key: &str) -> Result<f64, String> {
    object(line)?[key].as_f64().ok_or_else(|| format!("the script printed no {key}: {line}"))
}

/// The last object that the script printed; libraries print lines of their own.
fn object(output: &str) -> Result<Value, String> {
    let line = output.lines().rev().find(|line| line.starts_with('{')).ok_or("the script printed no result")?;
    serde_json::from_str(line).map_err(|e| format!("the script printed {line}: {e}"))
}

fn versions(command: &mut Command) -> Result<Versions, String> {
    let said = object(&process::output(command.arg("--versions"), LIMIT)?)?;
    let text = |key: &str| said[key].as_str().unwrap_or("of unknown version").to_owned();
    let import_bytes = said["import_bytes"].as_u64().unwrap_or(0);
    Ok(Versions { python: text("python"), torch: text("torch"), import_bytes })
}

fn install(environment: &Path, python: &Path) -> Result<(), String> {
    let began = Instant::now();
    eprintln!("making the peer's environment in {} (once; some gigabytes)", environment.display());
    let shown = |e: String| format!("the peer needs Python with venv and PyTorch ({TORCH}); {e}");
    let venv = &mut Command::new("python3");
    process::output(venv.args(["-m", "venv"]).arg(environment), INSTALL_LIMIT)
        .map_err(|e| shown(format!("python3 -m venv: {e}")))?;
    let pip = |torch: &str| {
        let command = &mut Command::new(python);
        process::output(command.args(["-m", "pip", "install", "--quiet", torch, "numpy", "setuptools"]), INSTALL_LIMIT)
    };
    if let Err(pinned) = pip(TORCH) {
        eprintln!("{TORCH} is not to be had ({pinned}); trying the newest");
        pip(TORCH_ANY).map_err(|e| shown(format!("pip install {TORCH_ANY}: {e}")))?;
    }
    let gigabytes = size(environment) as f64 / 1e9;
    eprintln!("made in {:.0} s, {gigabytes:.1} GB", began.elapsed().as_secs_f64());
    Ok(())
}

/// Bytes of all files under `path`.
fn size(path: &Path) -> u64 {
    let entries = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => size(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    };
    entries.map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::super::shapes::{MODES, SHAPES};
    use super::*;

    #[test]
    fn the_result_is_the_last_object() {
        let output = "a warning\n{\"loss\": 5.5}\n{\"tokens_per_s\": 100.5, \"peak_bytes\": 7, \"steps\": 3}\nbye\n";
        let found = sample(output).unwrap();
        assert_eq!((found.tokens_per_s, found.peak_bytes), (100.5, 7.0));
        assert!(sample("a warning\n").unwrap_err().contains("no result"));
        assert!(number("{\"loss\": 5.5}", "tokens_per_s").unwrap_err().contains("tokens_per_s"));
        assert!(number("{\"loss\": NaN}", "loss").is_err());
    }

    #[test]
    fn the_script_is_told_shape_and_mode() {
        let spec = spec(SHAPES[0].json().unwrap(), MODES.iter().find(|mode| mode.name == "1x2").unwrap(), "eager", 3.0);
        assert_eq!((&spec["threads"], &spec["ranks"]), (&json!(2), &json!(1)));
        assert_eq!(spec["shape"]["batch"], 16);
    }

    #[test]
    fn what_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("bin").join("python");
        let error = versions(&mut command(Command::new(&absent), Path::new("x.py"), folder.path())).unwrap_err();
        assert!(error.contains("cannot start"), "{error}");
    }
}

//! `cargo xtask parity`: folders saved by transformers are evaluated here; what is exported here is loaded there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::bench::process;

const PACKAGES: [&str; 3] = ["torch==2.11.0", "transformers==5.24.0", "safetensors"];
const INSTALL_LIMIT: Duration = Duration::from_secs(3600);
const LIMIT: Duration = Duration::from_secs(600);
const CASES: [&str; 8] = [
    "llama",
    "llama-bf16-shards",
    "qwen3-tied",
    "qwen3-bf16-shards",
    "mixtral",
    "qwen3-moe",
    "mixtral-aux",
    "qwen3-moe-aux",
];
/// Layouts under which a folder is evaluated.
const LAYOUTS: [&[&str]; 2] = [&[], &["grid.tp=2", "layout.tp=2", "layout.pp=2"]];
/// Allowed errors: of the loss, and of logits and gradients relative to the largest entry of a tensor; ten times the
/// float32 error that the golden cases state, times four for a larger model.
const LOSS: f64 = 3e-5;
const RELATIVE: f64 = 1.5e-4;

/// Runs all cases; true if all agree.
///
/// # Errors
/// No Python, no packages, or a program that fails.
pub fn run(root: &Path) -> Result<bool, String> {
    let python = environment(root)?;
    let script = root.join("bench").join("peer").join("parity.py");
    let binary = crate::prove::launch::build(root)?;
    let work = tempfile::tempdir().map_err(|e| format!("cannot make a temporary directory: {e}"))?;
    let py =
        |args: &[&std::ffi::OsStr]| process::output(Command::new(&python).arg("-B").arg(&script).args(args), LIMIT);
    py(&["save".as_ref(), work.path().as_ref()])?;
    let (mut passed, mut failed) = (0, 0);
    for case in CASES {
        for layout in LAYOUTS {
            let result = one(&binary, work.path(), case, layout)
                .and_then(|()| py(&["compare".as_ref(), work.path().as_ref(), case.as_ref()]));
            let verdict = result.and_then(|text| judge(text.trim()));
            let layout = if layout.is_empty() { "one rank".into() } else { layout.join(" ") };
            match &verdict {
                Ok(text) => println!("{case:<18} | {layout:<32} | {text}"),
                Err(reason) => println!("{case:<18} | {layout:<32} | FAILED: {reason}"),
            }
            *(if verdict.is_ok() { &mut passed } else { &mut failed }) += 1;
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

/// Evaluates the case under `layout`; trains one step with learning rate 0 from it and exports that.
fn one(binary: &Path, work: &Path, case: &str, layout: &[&str]) -> Result<(), String> {
    let folder = work.join(case);
    let (out, run_dir, exported) = (folder.join("evaluated.safetensors"), folder.join("run"), folder.join("exported"));
    let _ = fs::remove_file(&out);
    let _ = fs::remove_dir_all(&run_dir);
    let _ = fs::remove_dir_all(&exported);
    let model = folder.join("model");
    let lockstep = |command: &mut Command| process::output(command, LIMIT).map(|_| ());
    let with = |command: &mut Command| {
        if !layout.is_empty() {
            command.arg("--set").args(layout);
        }
    };
    let mut eval = Command::new(binary);
    eval.arg("eval").arg("--model").arg(&model).arg("--batch").arg(folder.join("batch.json")).arg("--grads");
    eval.arg("--out").arg(&out);
    with(&mut eval);
    lockstep(&mut eval)?;
    let run_file = folder.join("run.toml");
    let text = format!(
        "[model]\nfrom = {:?}\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 4\nseq = 64\nlr = 0.0\n",
        model.display().to_string()
    );
    fs::write(&run_file, text).map_err(|e| format!("cannot write {}: {e}", run_file.display()))?;
    let mut train = Command::new(binary);
    train.arg("train").arg(&run_file).arg("--run-dir").arg(&run_dir);
    with(&mut train);
    lockstep(&mut train)?;
    lockstep(Command::new(binary).args(["ckpt", "export"]).arg(&run_dir).arg("--hf").arg(&exported))
}

fn judge(line: &str) -> Result<String, String> {
    let object: Value = serde_json::from_str(line).map_err(|e| format!("the script said {line:?}: {e}"))?;
    let number = |key: &str| object[key].as_f64().ok_or_else(|| format!("no {key} in {line}"));
    let (loss, logits, gradients) = (number("loss")?, number("logits")?, number("gradients")?);
    let equal = object["exported_equal"].as_bool() == Some(true);
    let text =
        format!("loss {loss:.1e}, logits {logits:.1e}, gradients {gradients:.1e}, exported logits equal: {equal}");
    if loss <= LOSS && logits <= RELATIVE && gradients <= RELATIVE && equal { Ok(text) } else { Err(text) }
}

/// Python with the packages, made once under `target/`.
fn environment(root: &Path) -> Result<PathBuf, String> {
    let folder = root.join("target").join("peer-env");
    let python = folder.join("bin").join("python");
    let works = || process::output(Command::new(&python).args(["-c", "import torch, transformers"]), LIMIT).is_ok();
    if works() {
        return Ok(python);
    }
    eprintln!("installing {} in {}: some gigabytes, once", PACKAGES.join(", "), folder.display());
    if !python.exists() {
        process::output(Command::new("python3").args(["-m", "venv"]).arg(&folder), INSTALL_LIMIT)?;
    }
    process::output(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES), INSTALL_LIMIT)?;
    if works() { Ok(python) } else { Err(format!("torch and transformers do not load in {}", folder.display())) }
}

#[cfg(test)]
mod tests {
    use super::judge;

    #[test]
    fn only_small_errors_and_equal_exports_pass() {
        let with = |loss: &str, equal: &str| {
            judge(&format!(r#"{{"loss": {loss}, "logits": 1e-6, "gradients": 1e-6, "exported_equal": {equal}}}"#))
        };
        assert!(with("1e-7", "true").is_ok());
        assert!(with("1e-3", "true").is_err() && with("1e-7", "false").is_err() && judge("{}").is_err());
    }
}

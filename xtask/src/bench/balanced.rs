//! Weights whose routers are in balance: trained once by one rank, and kept for all modes and rounds, and for the next bench.

use std::fs;
use std::path::PathBuf;

use super::ours::{LIMIT, Ours};
use super::process;
use super::shapes::Shape;

/// The folder with the weights that `shape` starts from, as Hugging Face has them, which every grid reads; none where it starts
/// from its initial ones.
///
/// # Errors
/// The training fails, or the folder cannot be written.
pub fn weights(ours: &Ours, shape: &Shape) -> Result<Option<PathBuf>, String> {
    let Some(run) = shape.balancing_file() else { return Ok(None) };
    let folder = ours.kept.join(shape.name);
    let (weights, made_of) = (folder.join("weights"), folder.join("run.toml"));
    // Written last: what is there was made by this very run file.
    if fs::read_to_string(&made_of).is_ok_and(|text| text == run) {
        return Ok(Some(weights));
    }
    let cores = ours.machine.cores().len().max(1);
    eprintln!(
        "{}: the routers are trained for {} steps first (once; kept in {})",
        shape.name,
        shape.balancing,
        folder.display()
    );
    let cannot = |e: std::io::Error| format!("cannot write {}: {e}", folder.display());
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(cannot)?;
    }
    fs::create_dir_all(&folder).map_err(cannot)?;
    let (run_file, run_dir) = (folder.join("unfinished.toml"), folder.join("run"));
    fs::write(&run_file, run).map_err(cannot)?;
    let mut train = ours.machine.command(cores, &ours.binary);
    train.arg("train").arg(&run_file).arg("--run-dir").arg(&run_dir).arg("--json").arg("--set");
    train.args([
        "grid.dp=1".into(),
        format!("grid.microbatch={}", shape.batch),
        format!("layout.threads={cores}"),
        "checkpoint.every=0".into(),
    ]);
    process::output(&mut train, LIMIT).map_err(|e| format!("the training before: {e}"))?;
    let mut export = ours.machine.command(cores, &ours.binary);
    export.arg("ckpt").arg("export").arg(&run_dir).arg("--hf").arg(&weights);
    process::output(&mut export, LIMIT).map_err(|e| format!("lockstep ckpt export: {e}"))?;
    fs::remove_dir_all(&run_dir).map_err(cannot)?;
    fs::rename(&run_file, &made_of).map_err(cannot)?;
    Ok(Some(weights))
}

//! `ckpt ls`, `verify` and `diff`: nothing is written.

use std::path::Path;
use std::time::Instant;

use checkpoint::foreign::{self, Structure};
use checkpoint::{Checkpoint, Difference};
use serde_json::json;
use train::TrainError;

use super::{Say, checkpoints_of, open};

/// Exit code where something is wrong with what was looked at.
const DAMAGED: u8 = 2;

pub fn list(say: Say, path: &Path) -> Result<u8, TrainError> {
    let Some(root) = checkpoints_of(path) else { return list_foreign(say, path) };
    let found = checkpoint::list(&root)?;
    if found.is_empty() {
        say.line(&format!("no checkpoint under {}", root.display()));
    }
    let mut code = 0;
    for (step, path) in found {
        match Checkpoint::open(&path) {
            Ok(open) => {
                let bytes: u64 = open.files().iter().map(|f| f.bytes).sum();
                let (digest, tp) = (open.meta().digest.clone().unwrap_or_default(), open.meta().tp);
                let files = open.files().len();
                say.line(&format!("step {step} | {:.1} MB | digest {digest} | {}", bytes as f64 / 1e6, path.display()));
                say.object(
                    "checkpoint_listed",
                    json!({"step": step, "bytes": bytes, "files": files, "tensors": open.tensors().len(), "tp": tp,
                        "cursor": open.meta().cursor, "digest": digest, "path": path}),
                );
            }
            Err(e) => {
                code = DAMAGED;
                say.line(&format!("step {step} | damaged: {e}"));
                say.object("checkpoint_damaged", json!({"step": step, "path": path, "problem": e.to_string()}));
            }
        }
    }
    Ok(code)
}

/// The structure of another program's checkpoint, or the reason why there is none.
fn structure(path: &Path) -> Result<Structure, TrainError> {
    foreign::look(path)?.ok_or_else(|| {
        TrainError::BadInput(format!(
            "{} is neither a run's folder, nor a checkpoint of one, nor one of torch (.metadata) or safetensors",
            path.display()
        ))
    })
}

fn list_foreign(say: Say, path: &Path) -> Result<u8, TrainError> {
    let found = structure(path)?;
    for tensor in &found.tensors {
        let shape = tensor.shape.as_ref().map_or(String::new(), |shape| {
            format!(" [{}]", shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
        });
        let (name, dtype, bytes) = (&tensor.name, &tensor.dtype, tensor.bytes);
        say.line(&format!("{name} | {dtype}{shape} | {bytes} bytes in {}", tensor.files.join(", ")));
        say.object(
            "tensor_listed",
            json!({"name": name, "dtype": dtype, "shape": tensor.shape, "bytes": bytes, "files": tensor.files}),
        );
    }
    verdict_foreign(say, path, &found)
}

fn verdict_foreign(say: Say, path: &Path, found: &Structure) -> Result<u8, TrainError> {
    found.problems.iter().for_each(|problem| say.line(problem));
    let good = found.problems.is_empty();
    let bytes: u64 = found.files.iter().map(|(_, bytes)| bytes).sum();
    say.line(&format!(
        "{}: {} of {}, {} entries, {} files, {:.1} MB; structure only, the format has no hashes",
        if good { "complete" } else { "DAMAGED" },
        found.format,
        path.display(),
        found.tensors.len(),
        found.files.len(),
        bytes as f64 / 1e6
    ));
    say.object(
        "structure_verified",
        json!({"format": found.format, "path": path, "good": good, "entries": found.tensors.len(),
            "files": found.files.len(), "bytes": bytes, "problems": found.problems, "hashes": false}),
    );
    Ok(if good { 0 } else { DAMAGED })
}

pub fn verify(say: Say, path: &Path, newest: bool, jobs: Option<usize>) -> Result<u8, TrainError> {
    let Some(root) = checkpoints_of(path) else {
        if path.join(checkpoint::MANIFEST).exists() {
            return Ok(verify_one(say, &Checkpoint::open(path)?, jobs));
        }
        return verdict_foreign(say, path, &structure(path)?);
    };
    let found = checkpoint::list(&root)?;
    if found.is_empty() {
        return Err(TrainError::BadInput(format!("no checkpoint under {}", root.display())));
    }
    let mut code = 0;
    for (step, path) in found.iter().rev().take(if newest { 1 } else { found.len() }) {
        let one = match Checkpoint::open(path) {
            Ok(found) => verify_one(say, &found, jobs),
            Err(e) => {
                say.line(&format!("{e}"));
                say.line(&format!("DAMAGED: step {step}, 1 problem"));
                say.object("verified", json!({"step": step, "path": path, "good": false, "problems": [e.to_string()]}));
                DAMAGED
            }
        };
        code = code.max(one);
    }
    Ok(code)
}

fn verify_one(say: Say, found: &Checkpoint, jobs: Option<usize>) -> u8 {
    let began = Instant::now();
    let report = found.verify_with(jobs.unwrap_or_else(crate::cores));
    let threads = report.threads;
    let seconds = began.elapsed().as_secs_f64();
    report.problems.iter().for_each(|problem| say.line(&format!("{problem}")));
    let rate = report.bytes as f64 / 1e9 / seconds;
    let verdict = if report.good() { "good" } else { "DAMAGED" };
    say.line(&format!(
        "{verdict}: step {}, {} files, {:.1} MB read, {} problems | {rate:.2} GB/s on {threads} threads, {:.2} each",
        report.step,
        report.files,
        report.bytes as f64 / 1e6,
        report.problems.len(),
        rate / threads as f64
    ));
    let bad = report.tensors.iter().filter(|tensor| tensor.bad_chunks > 0);
    let bad: Vec<_> = bad
        .map(|t| json!({"tensor": t.name, "state": t.kind.label(), "bad_chunks": t.bad_chunks, "chunks": t.chunks}))
        .collect();
    say.object(
        "verified",
        json!({"step": report.step, "path": found.path(), "good": report.good(), "files": report.files,
            "bytes": report.bytes, "seconds": seconds, "threads": threads, "gb_per_s": rate,
            "digest": report.digest.map(|d| d.to_hex().to_string()), "bad": bad,
            "problems": report.problems.iter().map(ToString::to_string).collect::<Vec<_>>()}),
    );
    if report.good() { 0 } else { DAMAGED }
}

pub fn diff(say: Say, a: &Path, b: &Path) -> Result<u8, TrainError> {
    let ((first, _), (second, _)) = (open(say, a)?, open(say, b)?);
    for checkpoint in [&first, &second] {
        // Equal hashes say nothing of bytes that are not theirs any more.
        if let Some(problem) = checkpoint.verify_with(crate::cores()).problems.into_iter().next() {
            return Err(TrainError::BadInput(format!("nothing was compared: {problem}")));
        }
    }
    let mut differing = 0;
    let compared = first.diff(&second, &mut |found| {
        differing += 1;
        let what = format!("{} of {}", found.kind, found.name);
        let (text, mut object) = match found.difference {
            Difference::OnlyFirst => (format!("{what} is only in the first"), json!({"only": "first"})),
            Difference::OnlySecond => (format!("{what} is only in the second"), json!({"only": "second"})),
            Difference::Shape([rows, cols, others, other_cols]) => (
                format!("{what} is {rows} x {cols} in the first, {others} x {other_cols} in the second"),
                json!({"shapes": [[rows, cols], [others, other_cols]]}),
            ),
            Difference::Values { count, of, max_abs, first: (row, col, x, y) } => (
                format!("{what}: {count} of {of} elements, max abs difference {max_abs:e}; the first at row {row}, column {col}: {x} and {y}"),
                json!({"count": count, "of": of, "max_abs": max_abs, "row": row, "col": col, "values": [x, y]}),
            ),
        };
        say.line(&text);
        object["tensor"] = found.name.into();
        object["state"] = found.kind.label().into();
        say.object("differs", object);
    })?;
    let same = differing == 0;
    let (steps, digests) =
        ([&first, &second].map(|c| c.meta().step), [&first, &second].map(|c| c.meta().digest.clone()));
    let verdict = if same { "all state is equal, bit for bit" } else { "they differ" };
    say.line(&format!(
        "{verdict}: {differing} of {compared} tensors of state | step {} and step {}",
        steps[0], steps[1]
    ));
    say.object(
        "compared",
        json!({"equal": same, "differing": differing, "compared": compared, "steps": steps, "digests": digests}),
    );
    Ok(if same { 0 } else { 1 })
}

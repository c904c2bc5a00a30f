//! `ckpt reshard`, `average` and `import`: a run's folder with one checkpoint, made of other state.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::hf::HfFolder;
use checkpoint::{Checkpoint, Disk, Kind, Meta, TensorEntry, Validations, mean, write_tensors};
use serde_json::json;
use spec::Run;
use spec::tensors::{Tensor, tensors};
use train::TrainError;
use train::corpus::Corpus;
use train::launch;
use train::persist::load_every_rank;

use super::{Say, open, regular};

/// How the last part of a definition begins: what the data turned out to be.
const DATA_FOUND: &str = "\n[data found]";

/// A folder, given by `flag`, that does not exist, or is empty.
fn fresh(out: &Path, flag: &str) -> Result<(), TrainError> {
    let empty = fs::read_dir(out).map(|mut found| found.next().is_none()).unwrap_or(!out.exists());
    match empty {
        true => Ok(()),
        false => Err(TrainError::BadInput(format!("{} holds something already; choose another {flag}", out.display()))),
    }
}

/// Has `make` fill a folder beside `out`, which gets that name when it is whole; after an error nothing of it is left.
pub fn whole<T>(out: &Path, flag: &str, make: impl FnOnce(&Path) -> Result<T, TrainError>) -> Result<T, TrainError> {
    fresh(out, flag)?;
    let io = |what, path: &Path| {
        let path = path.to_owned();
        move |source| TrainError::Io { what, path, source }
    };
    // Its full name: `DIR/..` and the like have no last part.
    let out = std::path::absolute(out).map_err(io("cannot resolve", out))?;
    let name =
        out.file_name().ok_or_else(|| TrainError::BadInput(format!("{flag} {}: it has no name", out.display())))?;
    let unfinished = out.with_file_name(format!(".{}.unfinished-{}", name.to_string_lossy(), std::process::id()));
    fs::create_dir_all(&unfinished).map_err(io("cannot create", &unfinished))?;
    let made = make(&unfinished).and_then(|made| {
        fs::rename(&unfinished, &out).map_err(io("cannot rename to", &out))?;
        Ok(made)
    });
    if made.is_err() {
        // The first error counts.
        drop(fs::remove_dir_all(&unfinished));
    }
    made
}

/// Writes the folder: the run file, then the checkpoint.
fn write(
    out: &Path,
    run_toml: &str,
    tensors: &[Tensor],
    meta: &Meta,
    source: &mut dyn FnMut(usize, Kind) -> Result<Vec<f32>, TrainError>,
) -> Result<Checkpoint, TrainError> {
    let io = |what, path: PathBuf| move |source| TrainError::Io { what, path, source };
    whole(out, "--out", |out| {
        let root = out.join("checkpoints");
        fs::create_dir_all(&root).map_err(io("cannot create", root.clone()))?;
        let file = out.join("run.toml");
        fs::write(&file, run_toml).map_err(io("cannot write", file))?;
        write_tensors(&Disk, &root, tensors, meta, source)
    })?;
    Ok(Checkpoint::open(&checkpoint::step_dir(&out.join("checkpoints"), meta.step))?)
}

/// That a checkpoint holds the tensors of a model, however they are cut.
fn holds(from: &Checkpoint, tensors: &[Tensor]) -> Result<(), TrainError> {
    let (ours, theirs) = (tensors.iter().map(|t| TensorEntry::of(t, from.meta().tp)), from.tensors());
    match ours.len() == theirs.len() && ours.zip(theirs).all(|(ours, theirs)| ours == *theirs) {
        true => Ok(()),
        false => Err(TrainError::BadInput(format!(
            "{} does not hold the tensors of the model in its run file (run.toml two folders up); was it moved?",
            from.path().display()
        ))),
    }
}

/// Keys of `[model]` that say how it is trained, not what it is.
const OF_TRAINING: [&str; 5] = ["from", "init_std", "router_bias_rate", "aux_loss", "aux_scope"];

/// That two checkpoints are of one model: none of them is to blame where they are not.
fn one_model(first: &Checkpoint, other: &Checkpoint) -> Result<(), TrainError> {
    let of = |one: &Checkpoint| -> BTreeMap<String, String> {
        let lines = one.meta().definition.lines().skip_while(|line| *line != "[model]").skip(1);
        let keys = lines.take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once(" = "));
        keys.filter(|(key, _)| !OF_TRAINING.contains(key)).map(|(key, value)| (key.into(), value.into())).collect()
    };
    let (ours, theirs) = (of(first), of(other));
    // What one of them does not say an older release did not write down.
    let both = ours.iter().filter_map(|(key, ours)| theirs.get(key).map(|theirs| (key, ours, theirs)));
    let differ: Vec<_> = both
        .filter(|(_, ours, theirs)| ours != theirs)
        .map(|(key, ours, theirs)| format!("model.{key} = {ours} in the first and {theirs} in the second"))
        .collect();
    let shapes = |one: &Checkpoint| -> BTreeMap<String, [usize; 2]> {
        one.tensors().iter().map(|tensor| (tensor.name.clone(), [tensor.rows, tensor.cols])).collect()
    };
    if differ.is_empty() && shapes(first) == shapes(other) {
        return Ok(());
    }
    let how = if differ.is_empty() { "their tensors have other names or shapes".into() } else { differ.join("; ") };
    Err(TrainError::BadInput(format!(
        "{} and {} are of two models: {how}; average checkpoints of one model",
        first.path().display(),
        other.path().display()
    )))
}

pub fn reshard(say: Say, path: &Path, sets: &[String], out: Option<&Path>) -> Result<u8, TrainError> {
    let (from, folder) = open(say, path)?;
    let name = folder.join("run.toml");
    regular(&name)?;
    let run = Run::load(&name, sets, crate::cores())?;
    let meta = from.meta();
    // What was changed in the run goes along, also what the checkpoint has not come to.
    let run = launch::with_course(&folder, &run, meta, crate::cores())?;
    let tensors = tensors(&run.model);
    holds(&from, &tensors)?;
    if run.grid.tp == meta.tp {
        let bytes = load_every_rank(&run, &from)?;
        let total: u64 = bytes.iter().sum();
        say.line(&format!(
            "nothing to rewrite: shards are named by tensor and slice, any layout reads them. Every rank of {} loaded step {}: {} ranks, {:.1} MB in all, at most {:.1} MB a rank",
            run.layout,
            meta.step,
            bytes.len(),
            total as f64 / 1e6,
            bytes.iter().max().copied().unwrap_or(0) as f64 / 1e6
        ));
        say.object(
            "reshard",
            json!({"step": meta.step, "layout": run.layout.to_string(), "rewritten": false, "bytes_by_rank": bytes}),
        );
        return Ok(0);
    }
    let Some(out) = out else {
        return Err(TrainError::BadInput(format!(
            "grid.tp = {} cuts the state otherwise than the checkpoint's {}: give --out DIR for the rewritten one",
            run.grid.tp, meta.tp
        )));
    };
    fresh(out, "--out")?;
    let found = meta.definition.find(DATA_FOUND).map_or("", |at| &meta.definition[at..]);
    let definition = spec::definition_until(&(run.definition() + found), meta.step);
    let meta = Meta { tp: run.grid.tp, definition, digest: None, ..meta.clone() };
    let mut source = |tensor, kind| Ok(from.read_tensor(tensor, kind)?);
    let made = write(out, &run.values.to_toml(), &tensors, &meta, &mut source)?;
    let bytes = load_every_rank(&run, &made)?;
    say.line(&format!(
        "step {} of {} cut for {} tensor cells in {}; every rank of {} loaded it",
        meta.step,
        from.path().display(),
        meta.tp,
        made.path().display(),
        run.layout
    ));
    say.object(
        "reshard",
        json!({"step": meta.step, "layout": run.layout.to_string(), "rewritten": true, "tp": meta.tp, "path": made.path(), "bytes_by_rank": bytes}),
    );
    Ok(0)
}

pub fn average(say: Say, paths: &[PathBuf], out: &Path) -> Result<u8, TrainError> {
    fresh(out, "--out")?;
    let (mut all, mut folders) = (Vec::new(), Vec::new());
    for path in paths {
        let (found, folder) = open(say, path)?;
        all.push(found);
        folders.push(folder);
    }
    all.iter().skip(1).try_for_each(|other| one_model(&all[0], other))?;
    let last = all.iter().enumerate().max_by_key(|(_, one)| one.meta().step).map_or(0, |(i, _)| i);
    let name = folders[last].join("run.toml");
    regular(&name)?;
    let run = Run::load(&name, &[], crate::cores())?;
    let tensors = tensors(&run.model);
    all.iter().try_for_each(|one| holds(one, &tensors))?;
    let steps: Vec<u64> = all.iter().map(|one| one.meta().step).collect();
    let of = steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let newest = all[last].meta();
    // It is no state that the run passed through: its definition says so, and the run does not go on from it unawares.
    // Nobody has validated it.
    let validations = Some(Validations::default());
    let definition = format!("{}\n[average]\nsteps = [{of}]\n", newest.definition);
    let meta = Meta { definition, digest: None, checked: None, unseen: None, validations, ..newest.clone() };
    let mut source = |tensor: usize, kind| -> Result<Vec<f32>, TrainError> {
        match kind {
            Kind::Param => Ok(mean(&all, &tensors[tensor].name)?),
            _ => Ok(all[last].read_tensor(tensor, kind)?),
        }
    };
    let text =
        fs::read_to_string(&name).map_err(|source| TrainError::Io { what: "cannot read", path: name, source })?;
    let made = write(out, &text, &tensors, &meta, &mut source)?;
    say.line(&format!(
        "parameters averaged over the steps {of} in float64, moments of step {}: {}; `lockstep ckpt export {} --hf DIR` makes a Hugging Face folder of it, which `eval` and model.from take",
        newest.step,
        made.path().display(),
        out.display()
    ));
    say.object(
        "average",
        json!({"steps": steps, "moments_of": newest.step, "path": made.path(), "digest": made.meta().digest}),
    );
    Ok(0)
}

pub fn import(say: Say, from: &Path, run: &Run, out: &Path) -> Result<u8, TrainError> {
    fresh(out, "--out")?;
    let weights = HfFolder::open(from, &run.model)?;
    let definition = Corpus::open(run)?.definition(run);
    let meta = Meta {
        step: 0,
        cursor: 0,
        definition,
        numerics_version: kernels::NUMERICS_VERSION,
        tp: run.grid.tp,
        digest: None,
        taken_unix_ms: None,
        checked: None,
        unseen: None,
        validations: Some(Validations::default()),
    };
    let tensors = tensors(&run.model);
    let mut source = |tensor: usize, kind| -> Result<Vec<f32>, TrainError> {
        let Tensor { rows, cols, .. } = tensors[tensor];
        let mut values = vec![0.0; rows * cols];
        if kind == Kind::Param {
            weights.read(tensor, 0, 1, 0..values.len(), &mut values)?;
        }
        Ok(values)
    };
    let made = write(out, &run.values.to_toml(), &tensors, &meta, &mut source)?;
    weights.notes().iter().for_each(|note| say.line(note));
    say.line(&format!(
        "weights of {} as step 0, moments zero: {}; `lockstep train RUN.toml --run-dir {} --resume` goes on from there",
        from.display(),
        made.path().display(),
        out.display()
    ));
    say.object("import", json!({"path": made.path(), "digest": made.meta().digest, "notes": weights.notes()}));
    Ok(0)
}

//! State to hashes and to disk: what each rank answers for, in names that no layout changes.

use std::path::Path;
use std::time::{Duration, Instant};

use checkpoint::{
    Checkpoint, CheckpointError, Digest, DigestBuilder, FileEntry, HashPiece, Kind, Meta, PieceRef, Retention,
    STATE_CHUNK, Timeline,
};
use events::regular;
use kernels::NUMERICS_VERSION;
use spec::Run;
use spec::tensors::Cut;

use crate::best::Best;
use crate::error::TrainError;
use crate::exec::Executor;
use crate::mutant::Mutant;
use crate::place::Place;
use crate::state::{BucketState, ChunkState};

/// The three kinds of state of a bucket, each with the range of the chunk's elements that it holds.
pub(crate) fn kinds(state: &ChunkState, bucket: usize) -> [(Kind, &[f32], std::ops::Range<usize>); 3] {
    let BucketState { plan, owned, moment1, moment2, .. } = &state.buckets[bucket];
    let owned = if plan.parameters { owned.clone() } else { 0..0 };
    let (params, kept) = state.kept(bucket);
    [(Kind::Param, params, kept), (Kind::Moment1, moment1, owned.clone()), (Kind::Moment2, moment2, owned)]
}

/// Hashes of all that this rank holds, replicas too: they are compared.
fn hash_pieces(executor: &Executor) -> Vec<HashPiece> {
    let mut pieces = Vec::new();
    for state in executor.states() {
        for (number, bucket) in state.buckets.iter().enumerate() {
            for (kind, data, range) in kinds(state, number) {
                for (held, slice, elements, at) in state.pieces(&range) {
                    let data = &data[at.start - range.start..at.end - range.start];
                    pieces.push(HashPiece {
                        tensor: held.index,
                        kind,
                        slice,
                        first_chunk: elements.start / STATE_CHUNK,
                        hashes: checkpoint::chunk_hashes(data),
                    });
                }
            }
            bucket.rest();
        }
    }
    pieces
}

/// The digest of the state after `cursor` sequences; on every rank.
///
/// # Errors
/// If two holders of one chunk disagree, or a chunk has no holder.
pub fn digest(executor: &mut Executor, cursor: u64) -> Result<Digest, TrainError> {
    executor.settle();
    digest_of(executor, cursor, &hash_pieces(executor))
}

/// [`digest`] from the hashes of all that this rank holds.
fn digest_of(executor: &Executor, cursor: u64, mine: &[HashPiece]) -> Result<Digest, TrainError> {
    let mine = checkpoint::encode_pieces(mine);
    let all = executor.comm.endpoint.all_gather_bytes(&executor.comm.world, &mine)?;
    let mut builder = DigestBuilder::new(&executor.tensors, executor.place.grid_tp, NUMERICS_VERSION);
    for piece in all.iter().map(|bytes| checkpoint::decode_pieces(bytes)) {
        for piece in piece? {
            builder.put_piece(&piece)?;
        }
    }
    Ok(builder.finish(cursor)?)
}

/// What a rank says after its part of a checkpoint: its files, or why there are none.
type Part = Result<Vec<FileEntry>, String>;

/// A checkpoint that was written.
#[derive(Debug, Clone)]
pub struct Saved {
    /// Its folder.
    pub path: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds from the copy to the manifest, if it was written in the background.
    pub written_s: Option<f64>,
    /// Where another checkpoint of the step is now that was in its place.
    pub aside: Option<String>,
}

/// What the checkpoint of the state after `step` belongs to; `best` is of the validations up to it.
pub(crate) fn meta(executor: &Executor, step: u64, digest: Option<String>, best: &Best) -> Meta {
    Meta {
        step,
        cursor: executor.run.cursor(step),
        definition: spec::definition_until(&executor.definition, step),
        numerics_version: NUMERICS_VERSION,
        tp: executor.place.grid_tp,
        digest,
        taken_unix_ms: None,
        checked: executor.checked,
        unseen: executor.unseen.filter(|first| *first <= step),
        validations: Some((*best).into()),
    }
}

/// Writes the state after `step` under `root`. Each state chunk is written by its owner on the data axis.
/// `Ok(Err(reason))`: it could not be written; all ranks agree on that and none is harmed.
///
/// # Errors
/// The fabric's.
///
/// `best` is of the validations up to `step`; the checkpoint of the best one is marked once it is there. Room is made by who
/// calls `make_room` then.
pub fn save(executor: &mut Executor, root: &Path, step: u64, best: &Best) -> Result<Result<Saved, String>, TrainError> {
    let cursor = executor.run.cursor(step);
    let disk_full = std::mem::take(&mut executor.faults.disk_full);
    executor.settle();
    let executor = &*executor;
    let (endpoint, world) = (&executor.comm.endpoint, &executor.comm.world);
    let first = executor.place.rank == 0;
    let (written, digest) = if executor.run.layout.offload.optimizer() {
        // One bucket after the other comes to memory.
        let digest = digest_of(executor, cursor, &hash_pieces(executor))?;
        (Ok(write_by_buckets(executor, root, step)), Ok(digest))
    } else {
        let (tp, tensors, pieces) = (executor.place.grid_tp, &executor.tensors, own_pieces(executor));
        // All that this rank holds is hashed, once, while the disk takes in what it writes.
        std::thread::scope(|scope| {
            let write = || checkpoint::write_unhashed(root, step, tensors, tp, &pieces);
            let writer = std::thread::Builder::new().name("checkpoint".into()).spawn_scoped(scope, write);
            let mine = hash_pieces(executor);
            let digest = digest_of(executor, cursor, &mine);
            // Where the system refuses the thread this one writes when it has hashed.
            let written = writer.map_or_else(|_| Ok(write()), |writer| writer.join());
            (written.map(|written| written.and_then(|files| files.with(tensors, &mine))), digest)
        })
    };
    let digest = digest?;
    let written = written.map_err(|_| TrainError::Internal("the writer of a checkpoint panicked".into()))?;
    let part: Part = match written {
        Ok(_) if disk_full => Err("no space left on device (injected)".into()),
        part => part.map_err(|e| e.to_string()),
    };
    let mine = serde_json::to_vec(&part).map_err(|e| TrainError::Internal(e.to_string()))?;
    let all = endpoint.all_gather_bytes(world, &mine)?;
    let mut verdict = Vec::new();
    if first {
        let result = gather(&all).and_then(|files| {
            let meta = meta(executor, step, Some(digest.to_string()), best);
            let bytes: u64 = files.iter().map(|f| f.bytes).sum();
            let path = checkpoint::commit(root, &executor.tensors, &meta, files).map_err(|e| e.to_string())?;
            Ok((path.display().to_string(), bytes))
        });
        let folder = checkpoint::step_dir(root, step);
        match &result {
            Ok(_) => mark_best(root, best),
            // What is left of a failed one must not fill the disk further.
            Err(_) if !folder.join(checkpoint::MANIFEST).exists() => drop(checkpoint::discard(root, step)),
            Err(_) => {}
        }
        verdict = serde_json::to_vec(&result).map_err(|e| TrainError::Internal(e.to_string()))?;
    }
    endpoint.broadcast(world, 0, &mut verdict)?;
    let result: Result<(String, u64), String> =
        serde_json::from_slice(&verdict).map_err(|e| TrainError::Internal(e.to_string()))?;
    Ok(result.map(|(path, bytes)| Saved { path, bytes, written_s: None, aside: None }))
}

/// Removes what is old once `step` is committed; `pending`: steps that must stay. Old ones that cannot be removed are no reason
/// to stop.
pub(crate) fn make_room(root: &Path, step: u64, run: &Run, best: &Best, pending: &[u64]) {
    let also = best.best.iter().map(|(step, _)| *step).chain(pending.iter().copied());
    // Where nobody can say what must stay, all does, until the run's next start mends that.
    let Ok(held) = held(root) else { return };
    let also = also.chain(sound(root, step, run.guard.recompute_every)).chain(held).collect();
    let retention = Retention { keep: run.checkpoint.keep, keep_every: run.checkpoint.keep_every, also };
    drop(checkpoint::retain(root, &retention));
}

/// Makes the room that will be there once `step`, the last one, is committed: what retention would remove then, but never the
/// newest good one. The steps that are gone.
pub(crate) fn make_room_before(root: &Path, step: u64, run: &Run, best: &Best, pending: &[u64]) -> Vec<u64> {
    let list = || checkpoint::list(root).unwrap_or_default().into_iter().map(|(step, _)| step).collect::<Vec<_>>();
    let before = list();
    let keep = (run.checkpoint.keep - 1).max(1);
    let mut run = run.clone();
    run.checkpoint.keep = keep;
    make_room(root, step, &run, best, pending);
    let after = list();
    before.into_iter().filter(|step| !after.contains(step)).collect()
}

/// The checkpoints to go back to if a device proves to be broken after `step`: of steps up to the last one that was checked; and
/// the one before this, which may be that of a later check when this one has taken long to write.
fn sound(root: &Path, step: u64, every: u64) -> Vec<u64> {
    if every < 2 {
        return Vec::new();
    }
    let before = |step| checkpoint::newest_before(root, step).ok()?.checkpoint.map(|found| found.meta().step);
    [step, step / every * every + 1].into_iter().filter_map(before).collect()
}

/// Where it stands which checkpoints must stay.
const HELD: &str = "held.json";

/// From now on the checkpoints of these steps stay. That it cannot be written is no reason to stop.
///
/// `checked`: all that was computed up to the checkpoint of this step was checked, as far as anybody ever asked for it. It holds
/// for the timeline that the folder is of now: what a run that goes back leaves here says nothing of what it makes then.
pub(crate) fn hold(root: &Path, steps: &[u64], checked: Option<u64>) {
    let (new, at) = (root.join("held.json.tmp"), root.join(HELD));
    let timeline = Timeline::of(root).name();
    let text = serde_json::json!({ "schema": 1, "steps": steps, "checked": checked, "timeline": timeline });
    let _ = regular::write(&new, text.to_string() + "\n").and_then(|()| std::fs::rename(&new, &at));
}

/// What [`hold`] wrote, if it did.
///
/// # Errors
/// Why it cannot be used: nobody knows then which checkpoints must stay.
fn read_held(root: &Path) -> Result<Option<serde_json::Value>, String> {
    let text = match regular::read_to_string(&root.join(HELD)) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let read: serde_json::Value = serde_json::from_str(&text).map_err(|e| format!("it is not JSON: {e}"))?;
    let steps = read["steps"].as_array().is_some_and(|steps| steps.iter().all(serde_json::Value::is_u64));
    let checked = read["checked"].is_u64() || read["checked"].is_null();
    match read["schema"] == 1 && steps && checked {
        true => Ok(Some(read)),
        false => Err("it has other fields than this release writes".into()),
    }
}

/// The steps that must stay.
///
/// # Errors
/// As [`read_held`].
fn held(root: &Path) -> Result<Vec<u64>, String> {
    let read = read_held(root)?.unwrap_or_default();
    Ok(read["steps"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_u64).collect())
}

/// The step up to which checkpoints under `root` are known to be checked, by the run's controller; none where that is not known.
pub(crate) fn checked(root: &Path) -> Option<u64> {
    let read = read_held(root).ok()??;
    read["checked"].as_u64().filter(|_| read["timeline"].as_str() == Some(&Timeline::of(root).name()))
}

/// Waits until the run's controller knows the checkpoint of `step`, at most so long: before that the one before it may be what the
/// run goes back to, and [`hold`] keeps it.
pub(crate) fn wait_until_known(root: &Path, step: u64, patience: Duration) {
    let until = Instant::now() + patience;
    while !held(root).iter().flatten().any(|known| *known >= step) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// At the start of a run: where it cannot be read which checkpoints must stay, all that are there stay, and none counts as
/// checked. What the person is told of that.
pub(crate) fn mend_held(root: &Path) -> Option<String> {
    let why = read_held(root).err()?;
    let aside = root.join(format!("{HELD}.damaged"));
    let kept = std::fs::rename(root.join(HELD), &aside).is_ok();
    let steps: Vec<u64> = checkpoint::list(root).unwrap_or_default().into_iter().map(|(step, _)| step).collect();
    hold(root, &steps, None);
    Some(format!(
        "{} is damaged ({why}): it said which checkpoints must stay and which steps were checked; all checkpoints that are there stay, \
         and none counts as checked{}",
        root.join(HELD).display(),
        if kept { format!("; it is kept as {}", aside.display()) } else { String::new() }
    ))
}

/// Writes `best.json` beside the checkpoints if the best validation's step has one. A marker that cannot be written is
/// no reason to stop.
pub(crate) fn mark_best(root: &Path, best: &Best) {
    let Some((step, loss)) = best.best.filter(|(step, _)| checkpoint::step_dir(root, *step).exists()) else { return };
    let text = serde_json::json!({ "schema": 1, "step": step, "validation_loss": loss }).to_string() + "\n";
    let (new, at) = (root.join("best.json.tmp"), root.join("best.json"));
    let _ = regular::write(&new, text).and_then(|()| std::fs::rename(&new, &at));
}

fn gather(parts: &[Vec<u8>]) -> Result<Vec<FileEntry>, String> {
    let mut files = Vec::new();
    for part in parts {
        let part: Part = serde_json::from_slice(part).map_err(|e| e.to_string())?;
        files.extend(part?);
    }
    Ok(files)
}

/// The pieces that this rank writes: its share on the data axis; whole tensors by tensor position 0.
pub(crate) fn own_pieces<'e>(executor: &'e Executor) -> Vec<PieceRef<'e>> {
    let states = executor.chunks.values();
    states.flat_map(|state| (0..state.buckets.len()).flat_map(move |i| pieces_of(executor, state, i))).collect()
}

/// Those of one bucket.
fn pieces_of<'e>(executor: &Executor, state: &'e ChunkState, bucket: usize) -> Vec<PieceRef<'e>> {
    let mut pieces = Vec::new();
    let BucketState { plan, part, .. } = &state.buckets[bucket];
    if !plan.parameters {
        return pieces;
    }
    for (kind, data, range) in kinds(state, bucket) {
        for (held, slice, elements, at) in state.pieces(part) {
            let replica = held.tensor.cut == Cut::Whole && executor.place.at.tp > 0;
            if !replica && held.counts {
                let data = &data[at.start - range.start..at.end - range.start];
                pieces.push(PieceRef { tensor: held.index, kind, slice, elements, data });
            }
        }
    }
    pieces
}

/// Writes the pieces of this rank bucket by bucket, where the moments of a bucket have to come from their file.
fn write_by_buckets(executor: &Executor, root: &Path, step: u64) -> Result<Vec<FileEntry>, CheckpointError> {
    let (tensors, tp) = (&executor.tensors, executor.place.grid_tp);
    let mut files = Vec::new();
    for state in executor.chunks.values() {
        for (i, bucket) in state.buckets.iter().enumerate() {
            files.extend(checkpoint::write_pieces(root, step, tensors, tp, &pieces_of(executor, state, i))?);
            bucket.rest();
        }
    }
    Ok(files)
}

/// Fills the state of this rank from a checkpoint; everything read is verified.
///
/// # Errors
/// What the checkpoint reports, with the tensor's name.
pub fn load(executor: &mut Executor, from: &Checkpoint) -> Result<(), TrainError> {
    let forgets = executor.mutant == Some(Mutant::MomentsForgotten);
    executor.states_mut().try_for_each(|state| load_chunk(state, from, forgets).map(drop))
}

/// Loads the state of every rank of `run`'s layout from a checkpoint, one rank after the other, and forgets it: that the
/// layout can go on from it. Returns the bytes that each rank read, by rank.
///
/// # Errors
/// As [`load`].
pub fn load_every_rank(run: &Run, from: &Checkpoint) -> Result<Vec<u64>, TrainError> {
    let rank = |rank| {
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, rank);
        let chunks = run.layout.chunks_of(place.at.pp);
        chunks.map(|chunk| load_chunk(&mut ChunkState::new(run, &place, chunk), from, false)).sum()
    };
    (0..run.layout.world()).map(rank).collect()
}

/// The bytes read.
fn load_chunk(state: &mut ChunkState, from: &Checkpoint, forgets: bool) -> Result<u64, TrainError> {
    let mut bytes = 0;
    for bucket in 0..state.buckets.len() {
        let pieces = |state: &ChunkState, range| {
            state.pieces(&range).map(|(h, s, e, at)| (h.index, s, e, at)).collect::<Vec<_>>()
        };
        let whole = pieces(state, state.kept(bucket).1);
        let (params, kept) = state.kept_mut(bucket);
        for (tensor, slice, elements, at) in whole {
            let at = at.start - kept.start..at.end - kept.start;
            bytes += 4 * at.len() as u64;
            from.read(tensor, Kind::Param, slice, elements, &mut params[at])?;
        }
        if !state.buckets[bucket].plan.parameters {
            continue;
        }
        let mine = pieces(state, state.buckets[bucket].owned.clone());
        let BucketState { owned, moment1, moment2, .. } = &mut state.buckets[bucket];
        for (tensor, slice, elements, at) in mine {
            let at = at.start - owned.start..at.end - owned.start;
            bytes += 8 * at.len() as u64;
            from.read(tensor, Kind::Moment1, slice, elements.clone(), &mut moment1[at.clone()])?;
            if !forgets {
                from.read(tensor, Kind::Moment2, slice, elements, &mut moment2[at])?;
            }
        }
        state.buckets[bucket].rest();
    }
    Ok(bytes)
}

//! Room for what is offloaded, looked for before anything is written.

use std::path::Path;

use program::kept::Kept;
use program::{Mode, Shelf};
use spec::{Offload, Run};

use crate::error::TrainError;
use crate::recover;

/// Refuses a folder that cannot take the files of all ranks; `own`: the run's folder, which may not be there yet.
///
/// # Errors
/// Bad input that names the bytes.
pub fn check(run: &Run, own: &Path) -> Result<(), TrainError> {
    if run.layout.offload == Offload::None {
        return Ok(());
    }
    let asked = run.layout.offload_folder.as_deref();
    let refused = |why: String| {
        let folder = asked.unwrap_or(own).display();
        TrainError::BadInput(format!(
            "layout.offload = {} puts state into {folder}: {why}; name a folder on a disk with room in \
             layout.offload_folder, or set layout.offload to none",
            run.layout.offload
        ))
    };
    if let Some(folder) = asked.filter(|folder| !folder.is_dir()) {
        return Err(refused(format!("{} is not a folder", folder.display())));
    }
    let there = asked.unwrap_or(own).ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    // A relative path has no ancestor that is there but the empty one.
    let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
    let stats = rustix::fs::statvfs(there).map_err(|e| refused(format!("its disk cannot be asked for room ({e})")))?;
    let (wanted, free) = (bytes(run), stats.f_bavail.saturating_mul(stats.f_frsize));
    if wanted > free {
        return Err(refused(format!("all ranks of a host need {wanted} bytes, and {free} are free")));
    }
    Ok(())
}

/// Most bytes in files of the ranks of a host, what they mirror included.
pub(crate) fn bytes(run: &Run) -> u64 {
    let layout = &run.layout;
    let mut hosts = vec![0; layout.host(layout.world() - 1) + 1];
    if layout.offload.optimizer() {
        for (rank, held) in recover::holdings(run).iter().enumerate() {
            let all = held.owned.iter().chain(&held.mirrored);
            hosts[layout.host(rank)] += 8 * all.map(|slot| slot.elements.len() as u64).sum::<u64>();
        }
    }
    if layout.offload.activations() {
        let sizes = Kept::new(&run.model, &run.grid, layout, run.train.seq);
        for rank in 0..layout.world() {
            let program = program::lower(run, rank, Mode::Train);
            hosts[layout.host(rank)] += Shelf::new(&program).most_away(&program, &sizes);
        }
    }
    hosts.into_iter().max().unwrap_or(0)
}

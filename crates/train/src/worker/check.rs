//! What a spare does while it waits: it computes the gradients of a step again, from the checkpoint before that step.
//!
//! The bits of a leaf depend on nobody who computes it: the ranks and a spare agree, or one of them has erred. A thread of its own
//! does it, less urgent than the ranks' work, and is left alone when the process gets a place: it ends at the next instruction.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use checkpoint::Checkpoint;
use control::wire::{CheckOrder, FromRank};
use data::Split;
use fabric::FabricOptions;
use kernels::Simd;
use program::{Mode, Op};
use spec::{Run, Unit};

use super::voice::Voice;
use crate::corpus::{self, Corpus};
use crate::error::TrainError;
use crate::exec::Executor;
use crate::launch::StateLaws;
use crate::{persist, rank, virtual_ranks};

/// How urgent it is: where ranks use every core it gets about a tenth of one.
const NICE: i32 = 10;

/// A check under way; it ends soon after this is dropped.
pub struct Check {
    stop: Arc<AtomicBool>,
}

impl Drop for Check {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Check {
    /// Begins what is ordered, with `data`, in `run`, the run of the world that made the step; what comes of it `voice` says.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn begin(
        order: CheckOrder,
        data: Arc<Corpus>,
        run: Run,
        cores: usize,
        simd: Simd,
        voice: Arc<Voice>,
    ) -> Result<Self, TrainError> {
        let stop = Arc::new(AtomicBool::new(false));
        let over = stop.clone();
        let work = move || {
            // Where that is refused it is only more urgent than it should be.
            let _ = rustix::process::nice(NICE);
            let began = Instant::now();
            let made = alone(&run, cores).and_then(|run| leaves(&run, &order.from, &data, simd, &over));
            if over.load(Ordering::Relaxed) {
                return;
            }
            let (leaves, problem) = match made {
                Ok(leaves) => (leaves, None),
                Err(e) => (Vec::new(), Some(e.to_string())),
            };
            let seconds = began.elapsed().as_secs_f64();
            voice.say(&FromRank::Checked { step: order.step, leaves, seconds, problem });
        };
        let thread = std::thread::Builder::new().name("check".into());
        thread.spawn(work).map_err(|e| TrainError::Internal(format!("cannot start a check: {e}")))?;
        Ok(Self { stop })
    }
}

/// `run` on one data position, whose ranks are threads of this process: they name leaves as those of the run do.
fn alone(run: &Run, cores: usize) -> Result<Run, TrainError> {
    let layout = &run.layout;
    let refused =
        |why: &str| TrainError::BadInput(format!("a spare cannot compute leaves of the layout {layout}: {why}"));
    if layout.group > 1 {
        return Err(refused("ranks share the experts of a group (layout.ep)"));
    }
    let few = policy::nearest(run, layout.cp * layout.tp * layout.pp, cores, &StateLaws);
    let one = few.filter(|one| {
        let one = &one.layout;
        (one.dp, one.cp, one.tp, one.pp, one.vpp) == (1, layout.cp, layout.tp, layout.pp, layout.vpp)
    });
    let one = one.ok_or_else(|| refused("it does not fit one data position"))?;
    let sets = ["layout.mirror=false", "layout.offload=none", "layout.threads=1"].map(String::from);
    let one = Run::parse(&one.values.to_toml(), "a spare's share", &sets, cores)?;
    // The others must not be pushed out of memory for it.
    let ranks = 0..one.layout.world();
    let need: u64 = ranks.map(|rank| rank::plan(&one, &program::lower(&one, rank, Mode::Train)).total()).sum();
    match available() {
        Some(bytes) if need > bytes / 2 => Err(refused(&format!(
            "it would take {:.0} MB, more than half of the {:.0} MB that this host has left",
            need as f64 / 1e6,
            bytes as f64 / 1e6
        ))),
        _ => Ok(one),
    }
}

/// Memory that can still be had here.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kb| 1024 * kb)
}

/// (key, hash) of every leaf of the step after the checkpoint in `from`; nothing of use after `stop`.
fn leaves(run: &Run, from: &Path, data: &Corpus, simd: Simd, stop: &AtomicBool) -> Result<Vec<(u64, u64)>, TrainError> {
    let from = Checkpoint::open(from)?;
    let bring = |executor: &mut Executor| persist::load(executor, &from);
    leaves_of(run, from.meta().step + 1, data, simd, stop, &bring)
}

/// Of `step`, with the state that `bring` brings to all ranks of `run`, which are threads.
fn leaves_of(
    run: &Run,
    step: u64,
    data: &Corpus,
    simd: Simd,
    stop: &AtomicBool,
    bring: &(dyn Fn(&mut Executor) -> Result<(), TrainError> + Sync),
) -> Result<Vec<(u64, u64)>, TrainError> {
    let first = run.first_sequence(step);
    let load = |unit: Unit| corpus::read(&data.main, Split::Train, run.grid.sequences(unit).map(|i| first + i as u64));
    let made = virtual_ranks::on_threads(run, simd, &FabricOptions::default(), |executor| {
        bring(executor)?;
        executor.watch = Some(BTreeMap::new());
        let program = program::lower(run, executor.place.rank, Mode::Train);
        for instr in &program.instrs {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            match (instr.op, instr.unit) {
                (Op::Load, Some(unit)) => executor.load(unit, &load)?,
                (Op::Vote, _) => break,
                _ => executor.instruction(instr, Mode::Train)?,
            }
        }
        Ok(executor.watch.take().unwrap_or_default())
    })?;
    Ok(made.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 4\nbatch = 16\nseq = 32\n[grid]\ndp = 4\ntp = 2\ncp = 2\n";

    fn made(run: &Run, step: u64) -> Vec<(u64, u64)> {
        let data = Corpus::open(run).unwrap();
        let made = leaves_of(run, step, &data, Simd::detect(), &AtomicBool::new(false), &|_| Ok(())).unwrap();
        let mut made = made;
        made.sort_unstable();
        made
    }

    /// A spare names leaves as the ranks do, and comes to the same bits; another step is another matter.
    #[test]
    fn a_spare_makes_of_a_step_what_the_ranks_make_of_it() {
        let layouts: [&[&str]; 8] = [
            &["layout.dp=2"],
            &["layout.dp=3"],
            &["layout.dp=4", "layout.zero=1"],
            &["layout.dp=2", "layout.tp=2"],
            &["layout.dp=2", "layout.pp=2"],
            &["layout.dp=2", "layout.cp=2"],
            &["layout.pp=2", "layout.tp=2"],
            &["layout.dp=4", "layout.zero=3", "grid.accumulate=reduced"],
        ];
        for sets in layouts {
            let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
            let run = Run::parse(BASE, "t", &sets, 1).unwrap();
            let (ranks, spare) = (made(&run, 3), made(&alone(&run, 1).unwrap(), 3));
            assert_eq!(ranks, spare, "{sets:?}");
            assert!(ranks.len() >= 8, "{sets:?}: {}", ranks.len());
            assert_ne!(ranks, made(&run, 4), "{sets:?}");
        }
    }

    #[test]
    fn what_a_spare_cannot_name_as_the_ranks_do_it_leaves_alone() {
        let text = "[model]\npreset = \"nano\"\nexperts = 4\nexperts_per_token = 2\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 4\nbatch = 16\nseq = 32\n[grid]\ndp = 4\nep = 2\n[layout]\ndp = 4\nep = 2\n";
        let run = Run::parse(text, "t", &[], 1).unwrap();
        assert!(alone(&run, 1).unwrap_err().to_string().contains("layout.ep"));
    }
}

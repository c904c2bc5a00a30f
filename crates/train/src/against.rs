//! `lockstep check --against single`: the asked layout and one rank, the same small model, and every tensor's bits.
//!
//! Grid, layers, layout, schedule and optimizer stay as they are; width, vocabulary, sequence and text are made small
//! (`reduced`), because none of them decides which rank adds what in which order.

use data::Split;
use fabric::FabricOptions;
use kernels::Simd;
use program::{Mode, lower};
use spec::run::Source;
use spec::{Grid, Layout, Model, Recompute, Run, Schedule, Unit};

use crate::corpus::{self, Corpus};
use crate::error::TrainError;
use crate::exec::Outcome;
use crate::persist;
use crate::virtual_ranks::on_threads;

/// Steps that are compared: the second begins with state that the first has made.
pub const STEPS: u64 = 2;
/// Most ranks that are run as threads of this process.
const RANKS_MAX: usize = 64;
/// Width of a head, inner width of a tensor cell's feed-forward, token ids, and least tokens of a sequence.
const HEAD_DIM: usize = 8;
const FFN_CELL: usize = 16;
const VOCAB: usize = 300;
const SEQ: usize = 16;

/// What was compared, and how it came out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// The reduced sizes in words.
    pub reduced: String,
    /// Tensors of state (parameters and both moments).
    pub tensors: usize,
    /// The first step and the first tensor in canonical order that differ.
    pub difference: Option<(u64, String)>,
    /// The digest on one rank after [`STEPS`].
    pub digest: String,
}

/// Runs [`STEPS`] steps of `run`, reduced, under its layout and on one rank.
///
/// # Errors
/// A layout of more than 64 ranks; what a rank reports.
pub fn single(run: &Run) -> Result<Comparison, TrainError> {
    let world = run.layout.world();
    if world > RANKS_MAX {
        return Err(TrainError::BadInput(format!(
            "--against single runs the layout's ranks as threads, at most {RANKS_MAX}, and layout.dp {} x layout.cp {} x layout.tp {} x layout.pp {} are {world}: lower one of them for the comparison",
            run.layout.dp, run.layout.cp, run.layout.tp, run.layout.pp
        )));
    }
    let many = reduced(run)?;
    let one = Run { layout: one_rank(&many), ..many.clone() };
    let (here, there) = (hashes(&one)?, hashes(&many)?);
    let differs = |step: usize| {
        let pairs = here[step].iter().zip(&there[step]);
        pairs.filter(|(a, b)| a != b).map(|((name, _), _)| (step as u64 + 1, name.clone())).next()
    };
    let model = &many.model;
    Ok(Comparison {
        reduced: format!(
            "{} layers, hidden {}, {} heads, {} kv_heads, ffn {}, vocab {}, sequences of {} tokens; {} microbatches of {} per data cell",
            model.layers,
            model.hidden,
            model.heads,
            model.kv_heads,
            model.ffn,
            model.vocab,
            many.train.seq,
            many.grid.microbatches,
            many.grid.microbatch
        ),
        tensors: here[0].len(),
        difference: (0..STEPS as usize).find_map(differs),
        digest: here.last().and_then(|step| step.last()).map(|(_, hash)| hash.clone()).unwrap_or_default(),
    })
}

/// `run` with small tensors: as many heads per key/value head as it has, and one of these per tensor cell.
fn reduced(run: &Run) -> Result<Run, TrainError> {
    let (model, tp) = (&run.model, run.grid.tp);
    let heads = tp * (model.heads / model.kv_heads).max(1);
    let mut small = Model {
        hidden: model.hidden.min(HEAD_DIM * heads),
        heads,
        kv_heads: tp,
        head_dim: model.head_dim.min(HEAD_DIM),
        ffn: model.ffn.min(FFN_CELL * tp),
        vocab: model.vocab.min(VOCAB),
        ..model.clone()
    };
    if let Some(moe) = &mut small.moe {
        moe.ffn = moe.ffn.min(FFN_CELL);
        moe.shared_ffn = moe.shared_ffn.min(FFN_CELL);
    }
    let mut many = run.clone();
    let step = 2 * tp * run.grid.cp;
    many.train.seq = run.train.seq.min(step * SEQ.div_ceil(step));
    let Grid { dp, cp, ep, microbatch, accumulate, .. } = run.grid;
    let grid = Grid::new(&small, run.grid.batch(), many.train.seq, microbatch, Some(dp), tp)?;
    many.grid = Grid { cp, ep, accumulate, ..grid };
    many.from = None;
    many.data.source = Source::Synthetic;
    (many.data.paths, many.data.weights) = (Vec::new(), Vec::new());
    (many.data.validation_paths, many.data.validation_sets) = (Vec::new(), Vec::new());
    many.data.vocab = small.vocab;
    many.layout.threads = 1;
    many.model = small;
    Ok(many)
}

/// The layout of one rank over the same grid.
fn one_rank(run: &Run) -> Layout {
    Layout {
        dp: 1,
        cp: 1,
        tp: 1,
        pp: 1,
        vpp: 1,
        schedule: Schedule::OneFOneB,
        orders: None,
        placement: vec![0],
        recompute: vec![Recompute::None; run.model.layers],
        group: 1,
        zero: 0,
        shard: 1,
        cells: std::iter::once(0..run.grid.dp).collect(),
        stages: std::iter::once(0..run.model.layers).collect(),
        ranks_per_host: None,
        ..run.layout.clone()
    }
}

/// Hashes of every tensor of state after each step, and last the digest.
fn hashes(run: &Run) -> Result<Vec<Vec<(String, String)>>, TrainError> {
    let data = Corpus::open(run)?;
    let batch = run.grid.batch() as u64;
    let of_ranks = on_threads(run, Simd::detect(), &FabricOptions::default(), |executor| {
        let program = lower(run, executor.place.rank, Mode::Train);
        let mut steps = Vec::new();
        for step in 1..=STEPS {
            let load = |unit: Unit| {
                let indices = run.grid.sequences(unit).map(|i| (step - 1) * batch + i as u64);
                corpus::read(&data.main, Split::Train, indices)
            };
            let Outcome::Step(_) = executor.run(&program, Mode::Train, step, &load)? else {
                return Err(TrainError::Internal("a training program gave no decision".into()));
            };
            let digest = persist::digest(executor, step * batch)?;
            let of = |t: &checkpoint::TensorDigest| (format!("{} ({})", t.name, t.kind), t.hash.to_hex().to_string());
            let total = ("digest".to_owned(), digest.to_string());
            steps.push(digest.tensors.iter().map(of).chain([total]).collect::<Vec<_>>());
        }
        Ok(steps)
    })?;
    Ok(of_ranks.into_iter().next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(sets: &[&str]) -> Run {
        let text = "[model]\npreset = \"tiny\"\ntied = true\n[data]\nsource = \"cargo\"\n[train]\nsteps = 9\nbatch = 8\nseq = 128\n[grid]\ndp = 4\ntp = 2\n";
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        Run::parse(text, "test", &sets, 1).unwrap()
    }

    #[test]
    fn layouts_agree_with_one_rank() {
        for sets in [&["layout.dp=2", "layout.tp=2", "layout.pp=2"][..], &["layout.pp=2", "layout.schedule=zbv"]] {
            let comparison = single(&run(sets)).unwrap();
            assert_eq!(comparison.difference, None, "{sets:?}");
            assert!(comparison.tensors > 3 * 10 && comparison.digest.len() == 64);
        }
    }

    #[test]
    fn too_many_ranks_are_refused() {
        let mut many = run(&[]);
        many.layout.dp = 65;
        assert!(single(&many).unwrap_err().to_string().contains("at most 64"));
    }
}

//! Loss, logits and gradients of a given model on a given batch, under any layout.
//!
//! The ranks are threads of this process; what they hold is put together as whole tensors.

mod assemble;
mod balance;
mod batch;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use checkpoint::hf::HfFolder;
use data::{Dataset, Split};
use fabric::FabricOptions;
use kernels::Simd;
use program::{Mode, Op};
use spec::tensors::Tensor;
use spec::{Run, Unit};

pub use assemble::{Captured, Of, Whole, put_state, whole_logits, whole_tensors};
pub use batch::Batch;

use crate::buffers::{LossSum, Tokens};
use crate::corpus;
use crate::error::TrainError;
use crate::exec::{Executor, Outcome};
use crate::segments::Routing;
use crate::virtual_ranks;
use crate::vote::{self, Decision};

/// What an evaluation came to.
#[derive(Debug, Default)]
pub struct Evaluation {
    /// What training lowers: the cross-entropy, and the auxiliary loss times its coefficient.
    pub loss: f64,
    /// Mean cross-entropy, nats per token with a target.
    pub cross_entropy: f64,
    /// Mean auxiliary loss of the routers without its coefficient; none where the model has none.
    pub auxiliary: Option<f64>,
    /// Tokens with a target.
    pub tokens: u64,
    /// Logits, [sequence, position, vocabulary] row-major.
    pub logits: Vec<f32>,
    /// Gradients of the mean loss, by tensor in canonical order; empty unless asked for.
    pub grads: Vec<Whole>,
    /// Norm of all gradients together; 0 unless asked for.
    pub grad_norm: f64,
}

/// Runs `body` on every rank of `run`, each with the weights of `folder`; the results by rank.
///
/// # Errors
/// The first rank's error.
pub fn on_ranks<T: Send>(
    run: &Run,
    folder: &HfFolder,
    simd: Simd,
    body: impl Fn(&mut Executor) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    virtual_ranks::on_threads(run, simd, &FabricOptions::default(), |executor| {
        executor.load_folder(folder)?;
        body(executor)
    })
}

/// Evaluates the model of `folder` on `batch`; `run` comes from [`Run::for_batch`].
///
/// # Errors
/// A weight that is not finite, or what a rank reports.
pub fn evaluate(
    run: &Run,
    folder: &HfFolder,
    batch: &Batch,
    simd: Simd,
    grads: bool,
) -> Result<Evaluation, TrainError> {
    let logits = Mutex::new(whole_logits(run));
    let tensors: Mutex<Vec<Whole>> = Mutex::new(if grads { whole_tensors(&run.model) } else { Vec::new() });
    let routing = Mutex::new(Vec::new());
    let outcomes = on_ranks(run, folder, simd, |executor| {
        let rank = executor.place.rank;
        executor.capture = Some(Vec::new());
        executor.routing = has_auxiliary(run).then(Vec::new);
        let program = program::lower(run, rank, Mode::Eval);
        let load = |unit| Ok(batch.tokens(run.grid.sequences(unit)));
        let Outcome::Eval(sum) = executor.run(&program, Mode::Eval, 1, &load)? else {
            return Err(TrainError::Internal("an evaluation gave no loss".into()));
        };
        let captured = executor.capture.take().unwrap_or_default();
        assemble::put_logits(run, executor, captured, &mut logits.lock().unwrap_or_else(|e| e.into_inner()));
        let routed = executor.routing.take().unwrap_or_default();
        routing.lock().unwrap_or_else(PoisonError::into_inner).extend(routed);
        let mut norm = 0.0;
        if grads {
            let decision = gradients(executor, batch)?;
            norm = decision.grad_norm;
            let mut all = tensors.lock().unwrap_or_else(|e| e.into_inner());
            assemble::put_state(executor, &mut all, Of::Gradients);
        }
        Ok((sum, norm))
    })?;
    let (sum, grad_norm) = outcomes[0];
    if sum.tokens == 0 {
        return Err(nothing("the batch"));
    }
    let mut grads = tensors.into_inner().unwrap_or_else(|e| e.into_inner());
    // Sums become the gradient of the mean, as the update would scale them.
    let scale = (1.0 / sum.tokens as f64) as f32;
    grads.iter_mut().for_each(|t| t.values.iter_mut().for_each(|v| *v *= scale));
    let logits = logits.into_inner().unwrap_or_else(|e| e.into_inner());
    let routing = routing.into_inner().unwrap_or_else(PoisonError::into_inner);
    let auxiliary = auxiliary(run, routing, &|unit| Ok(batch.tokens(run.grid.sequences(unit))))?;
    let mean = Means::new(run, &sum, auxiliary);
    let Means { loss, cross_entropy, auxiliary } = mean;
    Ok(Evaluation { loss, cross_entropy, auxiliary, tokens: sum.tokens, logits, grads, grad_norm })
}

/// The means of an evaluation; see [`Evaluation`].
#[derive(Debug, Clone, Copy)]
pub struct Means {
    /// See [`Evaluation::loss`].
    pub loss: f64,
    /// See [`Evaluation::cross_entropy`].
    pub cross_entropy: f64,
    /// See [`Evaluation::auxiliary`].
    pub auxiliary: Option<f64>,
}

impl Means {
    /// Out of the sums over all tokens; `auxiliary` is weighted by them.
    fn new(run: &Run, sum: &LossSum, auxiliary: Option<f64>) -> Self {
        let tokens = sum.tokens.max(1) as f64;
        let cross_entropy = sum.nats / tokens;
        let auxiliary = auxiliary.map(|sum| sum / tokens);
        let coefficient = run.model.moe.as_ref().map_or(0.0, |moe| moe.aux_loss);
        Self { loss: cross_entropy + coefficient * auxiliary.unwrap_or(0.0), cross_entropy, auxiliary }
    }
}

fn has_auxiliary(run: &Run) -> bool {
    run.model.moe.as_ref().is_some_and(|moe| moe.aux_loss > 0.0)
}

/// The auxiliary loss of one pass over a batch, weighted by its tokens with a target; `load` brings the tokens of a
/// microbatch of a data cell. None where the model has none.
fn auxiliary(
    run: &Run,
    routing: Vec<Routing>,
    load: &dyn Fn(Unit) -> Result<Tokens, TrainError>,
) -> Result<Option<f64>, TrainError> {
    let grid = &run.grid;
    let Some(moe) = run.model.moe.as_ref().filter(|_| has_auxiliary(run)) else { return Ok(None) };
    let mut targets = BTreeMap::new();
    for (cell, mb) in (0..grid.dp).flat_map(|cell| (0..grid.microbatches).map(move |mb| (cell, mb))) {
        let count = load(Unit { cell, mb })?.targets.iter().filter(|target| **target != data::IGNORE).count();
        *targets.entry((cell / grid.ep, mb)).or_insert(0) += count as u64;
    }
    Ok(Some(balance::auxiliary(moe, routing, &targets)))
}

/// A mean over nothing is no score.
fn nothing(of: &str) -> TrainError {
    TrainError::BadInput(format!(
        "there is nothing to score: no position of {of} has a target; give labels that are not all -100, or more than one token"
    ))
}

/// Runs a training step up to its vote; the summed gradients stay in the chunks.
fn gradients(executor: &mut Executor, batch: &Batch) -> Result<Decision, TrainError> {
    let run = executor.run;
    let program = program::lower(run, executor.place.rank, Mode::Train);
    for instr in &program.instrs {
        match (instr.op, instr.unit) {
            (Op::Load, Some(unit)) => executor.load(unit, &|unit| Ok(batch.tokens(run.grid.sequences(unit))))?,
            (Op::Vote, _) => break,
            _ => executor.instruction(instr, Mode::Train)?,
        }
    }
    Ok(vote::decide(&executor.tally(Mode::Train)?, &run.train.recipe.at(1)))
}

impl Executor<'_> {
    /// Fills the parameters of this rank from a Hugging Face folder.
    ///
    /// # Errors
    /// A weight that is not finite.
    pub fn load_folder(&mut self, folder: &HfFolder) -> Result<(), TrainError> {
        let tp = self.place.grid_tp;
        for state in self.states_mut() {
            for bucket in 0..state.buckets.len() {
                let range = state.kept(bucket).1;
                let pieces: Vec<_> = state.pieces(&range).map(|(h, s, e, at)| (h.index, s, e, at)).collect();
                let (params, kept) = state.kept_mut(bucket);
                for (tensor, slice, elements, at) in pieces {
                    folder.read(
                        tensor,
                        slice,
                        tp,
                        elements,
                        &mut params[at.start - kept.start..at.end - kept.start],
                    )?;
                }
            }
        }
        Ok(())
    }
}

/// The tensors of an evaluation under the names of a file: `logits`, `loss`, `grad.NAME`.
pub fn write(path: &std::path::Path, run: &Run, evaluation: &Evaluation, batch: &Batch) -> Result<(), TrainError> {
    use safetensors::tensor::{Dtype, TensorView};
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let shape = |t: &Tensor| if t.rows == 1 { vec![t.cols] } else { vec![t.real_rows, t.cols] };
    let logits_shape = vec![batch.rows(), batch.seq(), run.model.vocab];
    let mut parts = vec![
        ("logits".to_owned(), logits_shape, bytes(&evaluation.logits)),
        ("loss".to_owned(), vec![1], bytes(&[evaluation.loss as f32])),
    ];
    for grad in &evaluation.grads {
        parts.push((format!("grad.{}", grad.tensor.name), shape(&grad.tensor), bytes(&grad.values)));
    }
    let views = parts
        .iter()
        .map(|(name, shape, data)| TensorView::new(Dtype::F32, shape.clone(), data).map(|view| (name.as_str(), view)));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(|e| TrainError::Internal(e.to_string()))?;
    safetensors::serialize_to_file(views, None, path).map_err(|e| TrainError::Io {
        what: "cannot write",
        path: path.to_owned(),
        source: std::io::Error::other(e),
    })
}

/// Loss of the model of `folder` over one epoch of `data`, and its means; `run` comes from [`Run::for_batch`].
///
/// # Errors
/// A weight that is not finite, or what a rank reports.
pub fn evaluate_data(run: &Run, folder: &HfFolder, data: &Dataset, simd: Simd) -> Result<(LossSum, Means), TrainError> {
    let (wanted, batch) = (data.sequences(Split::Train), run.grid.batch() as u64);
    let rounds = wanted.div_ceil(batch);
    let load = |round: u64, unit: Unit| {
        let indices = run.grid.sequences(unit).map(|i| round * batch + i as u64);
        corpus::read_first(data, Split::Train, wanted, indices)
    };
    let routing: Mutex<BTreeMap<u64, Vec<Routing>>> = Mutex::default();
    let sums = on_ranks(run, folder, simd, |executor| {
        let program = program::lower(run, executor.place.rank, Mode::Eval);
        let mut total = LossSum::default();
        for round in 0..rounds {
            executor.routing = has_auxiliary(run).then(Vec::new);
            let Outcome::Eval(sum) = executor.run(&program, Mode::Eval, 1, &|unit| load(round, unit))? else {
                return Err(TrainError::Internal("an evaluation gave no loss".into()));
            };
            total.add(&sum);
            // What fills up the last round is no data.
            let real = |routing: &Routing| round * batch + (routing.sequence as u64) < wanted;
            let routed = executor.routing.take().unwrap_or_default().into_iter().filter(real);
            routing.lock().unwrap_or_else(PoisonError::into_inner).entry(round).or_default().extend(routed);
        }
        Ok(total)
    })?;
    if sums[0].tokens == 0 {
        return Err(nothing("the data"));
    }
    let routing = routing.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut weighted = None;
    for (round, routing) in routing {
        let of_round = auxiliary(run, routing, &|unit| load(round, unit))?;
        weighted = of_round.map(|sum| sum + weighted.unwrap_or(0.0)).or(weighted);
    }
    Ok((sums[0], Means::new(run, &sums[0], weighted)))
}

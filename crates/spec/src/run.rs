//! A whole run: every section, validated.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::error::SpecError;
use crate::grid::{Accumulate, Grid};
use crate::guard::{Guard, at_most_a_year, guard};
use crate::layout::{Layout, LayoutRequest, Offload, Pin, Reshard, Transport, words};
use crate::model::Model;
use crate::moe::Moe;
use crate::runfile::Values;
use crate::schedule::{Recompute, Schedule};
use crate::schedule_file::Orders;
use crate::store::StoreUrl;

/// Where the text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Six novels of Jane Austen, in the binary.
    Austen,
    /// Sources of the crates that the binary is built from.
    Cargo,
    /// A seeded language of known entropy.
    Synthetic,
    /// Text files and folders.
    Text,
    /// Token folders and Megatron files.
    Tokens,
}
words!(Source: Austen = "austen", Cargo = "cargo", Synthetic = "synthetic", Text = "text", Tokens = "tokens");

/// How documents become sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// One after another, cut every `train.seq` tokens.
    Stream,
    /// Whole documents, each where it leaves the least room; only longer ones are cut.
    BestFit,
}
words!(Packing: Stream = "stream", BestFit = "bestfit");

/// The learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LrSchedule {
    /// Half a cosine from the peak to the minimum.
    Cosine,
    /// A straight line from the peak to the minimum.
    Linear,
    /// The peak.
    Constant,
    /// The peak, then a straight line to the minimum over the last `decay` steps (warmup-stable-decay).
    Wsd,
    /// The peak times sqrt(warmup / step), never below the minimum.
    Rsqrt,
}
words!(LrSchedule: Cosine = "cosine", Linear = "linear", Constant = "constant", Wsd = "wsd", Rsqrt = "rsqrt");

/// How to draw text from the model.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleConfig {
    /// Steps between samples; 0: none.
    pub every: u64,
    /// What a sample continues.
    pub prompt: String,
    /// Tokens of a sample.
    pub tokens: usize,
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Tokens that may be drawn, the most likely first.
    pub top_k: usize,
}

/// `[data]`
#[derive(Debug, Clone, PartialEq)]
pub struct DataConfig {
    /// Where the text comes from.
    pub source: Source,
    /// Text files and folders, token folders or Megatron prefixes, as written.
    pub paths: Vec<String>,
    /// The share of each path in the mixture; empty: the paths are one source.
    pub weights: Vec<f64>,
    /// Text files and folders held out, as written.
    pub validation_paths: Vec<String>,
    /// Further held-out sets: name and path.
    pub validation_sets: Vec<(String, String)>,
    /// The field of a line of JSON that holds its text.
    pub field: String,
    /// Share of the text held out where `validation_paths` is empty.
    pub validation: f64,
    /// Documents packed into one sequence do not see each other; positions restart.
    pub masks: bool,
    /// An end-of-document token after every document.
    pub eod: bool,
    /// Seed of the data order.
    pub seed: u64,
    /// How documents become sequences.
    pub packing: Packing,
    /// The `tokenizer.json` of token files, as written; samples are written with it.
    pub tokenizer: Option<String>,
    /// Token ids that the model has; larger ones are refused.
    pub vocab: usize,
}

/// `[train]`; steps count from 1.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: u64,
    /// Tokens per sequence.
    pub seq: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the last step.
    pub lr_min: f64,
    /// What follows the warm-up.
    pub schedule: LrSchedule,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps of the final line (`wsd`).
    pub decay: u64,
    /// AdamW's first decay.
    pub beta1: f64,
    /// AdamW's second decay.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f64,
    /// Decoupled weight decay, on matrices only.
    pub weight_decay: f64,
    /// Tensors without decay: parts of names, `*` for anything.
    pub no_decay: Vec<String>,
    /// Limit of the global gradient norm; 0: none.
    pub clip: f64,
    /// Seed of the initial weights.
    pub seed: u64,
    /// Steps between validations; 0: only at the end.
    pub eval_every: u64,
    /// Sequences in a validation.
    pub eval_sequences: usize,
    /// Validations in a row without a new best after which the run ends; 0: never.
    pub patience: u64,
    /// Batches that are left out.
    pub skip: crate::Skips,
    /// Text samples.
    pub sample: SampleConfig,
}

/// `[checkpoint]`
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; 0: only at the end; `None`: from their cost and the rate of failures.
    pub every: Option<u64>,
    /// Newest checkpoints kept.
    pub keep: usize,
    /// Steps that are multiples of it are kept for good; 0: none.
    pub keep_every: u64,
    /// A checkpoint at every new best validation, kept beside the newest ones.
    pub best: bool,
    /// Ranks copy their state and go on while it is written.
    pub background: bool,
    /// In the background each rank begins to write so much later than the one before it, milliseconds.
    pub stagger_ms: u64,
    /// Where copies go.
    pub store: Option<StoreUrl>,
    /// How long the end of a run tries again to write its last checkpoint, seconds.
    pub last_wait_s: u64,
    /// Failures of a host in a day.
    pub failures_per_host_day: f64,
}

/// A validated run.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// The shape of the model.
    pub model: Model,
    /// The Hugging Face folder whose weights it starts from; `None`: random ones.
    pub from: Option<PathBuf>,
    /// Where the tokens come from.
    pub data: DataConfig,
    /// How the model is trained.
    pub train: TrainConfig,
    /// What the numbers are.
    pub grid: Grid,
    /// Where they are computed.
    pub layout: Layout,
    /// When state goes to disk.
    pub checkpoint: CheckpointConfig,
    /// The limits by which failures are noticed and answered.
    pub guard: Guard,
    /// Every value with its origin.
    pub values: Values,
}

impl Run {
    /// Reads and validates the run file at `path` under `sets` (`key=value`), for a machine with `cores`.
    ///
    /// # Errors
    /// Everything in [`SpecError`]; nothing was written.
    pub fn load(path: &Path, sets: &[String], cores: usize) -> Result<Self, SpecError> {
        let text = std::fs::read_to_string(path).map_err(|source| SpecError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, &path.display().to_string(), sets, cores)
    }

    /// The same from the text of a run file called `name`.
    ///
    /// # Errors
    /// Everything in [`SpecError`] but `Read`.
    pub fn parse(text: &str, name: &str, sets: &[String], cores: usize) -> Result<Self, SpecError> {
        let values = Values::parse(text, name, sets)?;
        let model = model(&values)?;
        model.check()?;
        let train = train(&values)?;
        let batch = values.need("train.batch")?;
        let grid = grid(&values, &model, batch, train.seq)?;
        let request = layout_request(&values)?;
        let layout = Layout::resolve(&request, &grid, &model, cores)?;
        let data = data(&values, &model)?;
        if train.sample.every > 0 && data.source == Source::Tokens && data.tokenizer.is_none() {
            return Err(SpecError::law(
                "train.sample_every asks for text, and data.source = \"tokens\" has ids",
                format!("sample_every {}, data.source {}", train.sample.every, data.source),
                "set data.tokenizer to the tokenizer.json that the tokens were written with, or train.sample_every to 0",
            ));
        }
        let checkpoint = checkpoint(&values)?;
        let guard = guard(&values)?;
        let from = values.text("model.from").map(PathBuf::from);
        Ok(Self { model, from, data, train, grid, layout, checkpoint, guard, values })
    }

    /// Refuses keys that were set by a person and do nothing in this run, and text for a model of tokens.
    ///
    /// # Errors
    /// The keys, why each does nothing, and what to do.
    pub fn check_effects(&self) -> Result<(), SpecError> {
        crate::effect::bytes_for_tokens(self)?;
        crate::effect::check(self)
    }

    /// Two runs with the same definition have the same digest, whatever their layouts.
    pub fn definition(&self) -> String {
        let resolved = format!("\n[resolved]\ngrid.dp = {}\nmodel.head_dim = {}\n", self.grid.dp, self.model.head_dim);
        self.values.definition() + &resolved
    }

    /// Whether spares compute gradients of the ranks again, each time after a checkpoint: false where there are none, or they are
    /// not asked to.
    ///
    /// # Errors
    /// Why they cannot.
    pub fn spares_check(&self) -> Result<bool, &'static str> {
        if self.guard.spares == 0 || !self.guard.spares_check {
            Ok(false)
        } else if self.checkpoint.every == Some(0) {
            Err("without checkpoints on the way (checkpoint.every = 0) they have nothing to compute from")
        } else if self.layout.group > 1 {
            Err("ranks share the experts of a group (layout.ep), for which it is not built")
        } else {
            Ok(true)
        }
    }

    /// Tokens of one step, with those that have no target.
    pub fn tokens_per_step(&self) -> usize {
        self.grid.batch() * self.train.seq
    }

    /// The first training sequence of `step`, from 1.
    pub fn first_sequence(&self, step: u64) -> u64 {
        (step.saturating_sub(1) + self.train.skip.before(step)) * self.grid.batch() as u64
    }

    /// Sequences consumed or left out when `step` is over.
    pub fn cursor(&self, step: u64) -> u64 {
        (step + self.train.skip.before(step)) * self.grid.batch() as u64
    }
}

pub(crate) fn grid(values: &Values, model: &Model, batch: usize, seq: usize) -> Result<Grid, SpecError> {
    let (microbatch, tp) = (values.need("grid.microbatch")?, values.need("grid.tp")?);
    let grid = Grid::new(model, batch, seq, microbatch, values.int("grid.dp"), tp)?;
    let grid = grid.with_context(values.int("grid.cp").unwrap_or(1), seq)?;
    let grid = grid.with_experts(model, values.need("grid.ep")?)?;
    match values.text("grid.accumulate") {
        None => Ok(grid),
        Some(_) => Ok(Grid { accumulate: word::<Accumulate>(values, "grid.accumulate")?, ..grid }),
    }
}

/// The schedule that the run file names, if any.
fn orders(values: &Values, schedule: Schedule) -> Result<Option<Arc<Orders>>, SpecError> {
    let Some(path) = values.text("layout.schedule_file") else { return Ok(None) };
    if schedule != Schedule::Csv {
        return Err(SpecError::law(
            format!("layout.schedule_file = {path:?} is read only with layout.schedule = csv"),
            format!("layout.schedule {schedule}"),
            "set layout.schedule to csv, or remove layout.schedule_file",
        ));
    }
    let text = std::fs::read_to_string(path)
        .map_err(|e| values.refuse("layout.schedule_file", format!("a file that can be read ({e})")))?;
    Ok(Some(Arc::new(Orders::parse(path, &text)?)))
}

pub(crate) fn layout_request(values: &Values) -> Result<LayoutRequest, SpecError> {
    let schedule = word::<Schedule>(values, "layout.schedule")?;
    Ok(LayoutRequest {
        dp: values.need("layout.dp")?,
        cp: values.need("layout.cp")?,
        ep: values.int("layout.ep"),
        tp: values.need("layout.tp")?,
        pp: values.need("layout.pp")?,
        vpp: values.int("layout.vpp"),
        schedule,
        orders: orders(values, schedule)?,
        recompute: word::<Recompute>(values, "layout.recompute")?,
        recompute_layers: values.ints("layout.recompute_layers"),
        zero: values.need("layout.zero")?,
        shard: values.int("layout.shard"),
        reshard: word::<Reshard>(values, "layout.reshard")?,
        mirror: values.bool("layout.mirror"),
        offload: word::<Offload>(values, "layout.offload")?,
        offload_folder: values.text("layout.offload_folder").map(PathBuf::from),
        keep_packed: values.bool("layout.keep_packed").unwrap_or(false),
        tp_overlap: values.bool("layout.tp_overlap").unwrap_or(true),
        tp_pairs: values.bool("layout.tp_pairs").unwrap_or(false),
        threads: values.int("layout.threads"),
        transport: word::<Transport>(values, "layout.transport")?,
        pin: word::<Pin>(values, "layout.pin")?,
        exchange_timeout_ms: values.need("layout.exchange_timeout_ms")?,
        cells: values.ints("layout.cells"),
        stages: values.ints("layout.stages"),
        ranks_per_host: values.int("cluster.ranks_per_host"),
    })
}

pub(crate) fn checkpoint(values: &Values) -> Result<CheckpointConfig, SpecError> {
    let failures_per_host_day = values.float("checkpoint.failures_per_host_day").expect("has a default");
    if failures_per_host_day < 0.0 {
        return Err(values.refuse("checkpoint.failures_per_host_day", "a rate, which is not negative".into()));
    }
    let stagger_ms = values.need("checkpoint.stagger_ms")? as u64;
    at_most_a_year("checkpoint.stagger_ms", stagger_ms)?;
    let last_wait_s = values.need("checkpoint.last_wait_s")? as u64;
    at_most_a_year("checkpoint.last_wait_s", last_wait_s)?;
    let store = values.text("checkpoint.store");
    let store = store.map(|url| url.parse().map_err(|expected| values.refuse("checkpoint.store", expected)));
    Ok(CheckpointConfig {
        store: store.transpose()?,
        // Auto is a word, no count.
        every: values.int("checkpoint.every").map(|every| every as u64),
        keep: values.need("checkpoint.keep")?.max(1),
        keep_every: values.need("checkpoint.keep_every")? as u64,
        best: values.bool("checkpoint.best").expect("has a default"),
        background: values.bool("checkpoint.background").expect("has a default"),
        stagger_ms,
        last_wait_s,
        failures_per_host_day,
    })
}

pub(crate) fn word<T: FromStr<Err = String> + fmt::Display>(values: &Values, path: &str) -> Result<T, SpecError> {
    let text = values.text(path).unwrap_or_default();
    text.parse().map_err(|expected| values.refuse(path, expected))
}

fn model(values: &Values) -> Result<Model, SpecError> {
    let float = |path| values.float(path).expect("has a default");
    let (hidden, heads) = (values.need("model.hidden")?, values.need("model.heads")?);
    let head_dim = match values.int("model.head_dim") {
        Some(dim) => dim,
        None if heads > 0 && hidden % heads == 0 => hidden / heads,
        None => return values.need("model.head_dim").map(|_| unreachable!()),
    };
    let moe = moe(values)?;
    Ok(Model {
        hidden,
        layers: values.need("model.layers")?,
        heads,
        kv_heads: values.int("model.kv_heads").unwrap_or(heads),
        head_dim,
        ffn: if moe.is_some() { values.int("model.ffn").unwrap_or(0).max(1) } else { values.need("model.ffn")? },
        vocab: values.need("model.vocab")?,
        rope_theta: float("model.rope_theta"),
        norm_eps: float("model.norm_eps") as f32,
        qk_norm: values.bool("model.qk_norm").expect("has a default"),
        tied: values.bool("model.tied").expect("has a default"),
        init_std: float("model.init_std") as f32,
        moe,
    })
}

fn moe(values: &Values) -> Result<Option<Moe>, SpecError> {
    let experts = values.need("model.experts")?;
    if experts == 0 {
        return Ok(None);
    }
    let float = |path| values.float(path).expect("has a default");
    let flag = |path| values.bool(path).expect("has a default");
    Ok(Some(Moe {
        experts,
        per_token: values.need("model.experts_per_token")?,
        ffn: values
            .int("model.expert_ffn")
            .or(values.int("model.ffn"))
            .map_or_else(|| values.need("model.expert_ffn"), Ok)?,
        shared_ffn: values.need("model.shared_ffn")?,
        scores: word(values, "model.router_scores")?,
        renorm: flag("model.router_renorm"),
        bias: flag("model.router_bias"),
        bias_rate: float("model.router_bias_rate"),
        aux_loss: float("model.aux_loss"),
        aux_scope: word(values, "model.aux_scope")?,
    }))
}

pub(crate) fn train(values: &Values) -> Result<TrainConfig, SpecError> {
    let float = |path| values.float(path).expect("has a default");
    let train = TrainConfig {
        steps: values.need("train.steps")? as u64,
        seq: values.need("train.seq")?,
        lr: float("train.lr"),
        lr_min: float("train.lr_min"),
        schedule: word(values, "train.schedule")?,
        warmup: values.need("train.warmup")? as u64,
        decay: values.need("train.decay")? as u64,
        beta1: float("train.beta1"),
        beta2: float("train.beta2"),
        eps: float("train.eps"),
        weight_decay: float("train.weight_decay"),
        no_decay: values.texts("train.no_decay"),
        clip: float("train.clip"),
        seed: values.need("train.seed")? as u64,
        eval_every: values.need("train.eval_every")? as u64,
        eval_sequences: values.need("train.eval_sequences")?,
        patience: values.need("train.patience")? as u64,
        skip: crate::Skips::read(values)?,
        sample: SampleConfig {
            every: values.need("train.sample_every")? as u64,
            prompt: values.text("train.sample_prompt").expect("has a default").to_owned(),
            tokens: values.need("train.sample_tokens")?,
            temperature: float("train.sample_temperature") as f32,
            top_k: values.need("train.sample_top_k")?,
        },
    };
    crate::train_law::check(&train)?;
    Ok(train)
}

pub(crate) fn data(values: &Values, model: &Model) -> Result<DataConfig, SpecError> {
    let data = DataConfig {
        source: word(values, "data.source")?,
        paths: values.texts("data.paths"),
        weights: values.floats("data.weights"),
        validation_paths: values.texts("data.validation_paths"),
        validation_sets: validation_sets(values)?,
        field: values.text("data.field").unwrap_or("text").to_owned(),
        validation: values.float("data.validation").expect("has a default"),
        masks: values.bool("data.masks").expect("has a default"),
        eod: values.bool("data.eod").expect("has a default"),
        seed: values.need("data.seed")? as u64,
        packing: if values.text("data.packing").is_some() { word(values, "data.packing")? } else { Packing::Stream },
        tokenizer: values.text("data.tokenizer").map(str::to_owned),
        vocab: model.vocab,
    };
    let needed = 256 + usize::from(data.eod);
    if data.source != Source::Tokens && model.vocab < needed {
        return Err(SpecError::law(
            format!("byte-level text needs model.vocab >= {needed}, but it is {}", model.vocab),
            format!("256 bytes, data.eod = {} adds {}", data.eod, needed - 256),
            format!("set model.vocab to {needed}{}", if data.eod { ", or data.eod to false" } else { "" }),
        ));
    }
    let what = match data.source {
        Source::Text => "text files or folders",
        Source::Tokens => "folders written by `lockstep data tokenize`, or Megatron prefixes",
        Source::Austen | Source::Cargo | Source::Synthetic => "",
    };
    if !what.is_empty() && data.paths.is_empty() {
        return Err(SpecError::Missing {
            key: "data.paths".into(),
            hint: format!("data.source = \"{}\" reads it: set it to {what}", data.source),
        });
    }
    mixture(&data, !what.is_empty())?;
    if data.packing == Packing::BestFit && !data.masks {
        return Err(SpecError::law(
            "data.packing = \"bestfit\" keeps documents apart, so it needs data.masks = true",
            "data.masks false",
            "set data.masks to true, or data.packing to \"stream\"",
        ));
    }
    if !(0.0..1.0).contains(&data.validation) {
        return Err(SpecError::law(
            format!("data.validation = {} is not a share of the text", data.validation),
            format!("data.validation {}", data.validation),
            "set it to at least 0 and below 1, such as 0.05",
        ));
    }
    Ok(data)
}

/// The law of `data.weights`.
fn mixture(data: &DataConfig, has_paths: bool) -> Result<(), SpecError> {
    let weights = &data.weights;
    if weights.is_empty() {
        return Ok(());
    }
    let factors = format!("data.weights {weights:?}, data.paths {:?}, data.source {}", data.paths, data.source);
    if !has_paths {
        return Err(SpecError::law(
            format!("data.weights mixes the sources in data.paths, but data.source = \"{}\" has none", data.source),
            factors,
            "remove data.weights, or set data.source to \"text\" or \"tokens\"",
        ));
    }
    if weights.len() != data.paths.len() {
        let (weights, paths) = (weights.len(), data.paths.len());
        return Err(SpecError::law(
            format!("data.weights has {weights} numbers for {paths} data.paths"),
            factors,
            "give one weight per path, in the same order",
        ));
    }
    let sum: f64 = weights.iter().sum();
    if weights.len() > SOURCES_MAX || !weights.iter().all(|&w| w > 0.0 && w / sum >= WEIGHT_MIN) || !sum.is_finite() {
        return Err(SpecError::law(
            format!(
                "data.weights are shares: at most {SOURCES_MAX} of them, each above 0 and at least {WEIGHT_MIN} of the sum"
            ),
            factors,
            "remove the path whose weight is 0, or raise a weight that is too small to be met in a block of sequences",
        ));
    }
    Ok(())
}

/// Most sources in a mixture.
const SOURCES_MAX: usize = 256;
/// Least share of a source, so that each stands in every block of the mixture (4096 sequences).
const WEIGHT_MIN: f64 = 1.0 / 4096.0;

fn validation_sets(values: &Values) -> Result<Vec<(String, String)>, SpecError> {
    const KEY: &str = "data.validation_sets";
    let mut sets: Vec<(String, String)> = Vec::new();
    for text in values.texts(KEY) {
        let named = text.split_once('=').filter(|(name, path)| !name.is_empty() && !path.is_empty());
        let (name, path) = named.ok_or_else(|| values.refuse(KEY, "texts such as \"code=held-out/code\"".into()))?;
        if sets.iter().any(|(other, _)| other == name) {
            return Err(values.refuse(KEY, format!("names that differ; `{name}` stands twice")));
        }
        sets.push((name.into(), path.into()));
    }
    Ok(sets)
}

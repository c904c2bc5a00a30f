//! A whole run: every section, validated.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::error::SpecError;
use crate::faults::Faults;
use crate::grid::{Accumulate, Grid};
use crate::guard::{Guard, at_most_a_year, guard};
use crate::keys::key;
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
    /// Learning rates, decay and clip of each step.
    pub recipe: crate::Recipes,
    /// What follows the warm-up.
    pub schedule: LrSchedule,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Steps of the final line (`wsd`).
    pub decay: u64,
    /// Tensors without decay: parts of names, `*` for anything.
    pub no_decay: Vec<String>,
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
        let mut faults = Faults::default();
        let Some(values) = Values::read(text, name, sets, &mut faults) else {
            faults.settle(&Values::default());
            return faults.give(None);
        };
        let run = Self::of(&values, cores, &mut faults);
        faults.settle(&values);
        faults.give(run)
    }

    /// What there is to be said of all sections goes to `faults`; none where a section could not be read.
    fn of(values: &Values, cores: usize, faults: &mut Faults) -> Option<Self> {
        let model = faults.take(model(values));
        let train = faults.take(train(values));
        let batch = faults.take(values.need("train.batch"));
        let request = layout_request(values, faults);
        let grid = match (&model, batch, values.int("train.seq")) {
            (Some(model), Some(batch), Some(seq)) => faults.take(grid(values, model, batch, seq)),
            _ => None,
        };
        let layout = match (&grid, &model) {
            (Some(grid), Some(model)) => faults.take(Layout::resolve(&request, grid, model, cores)),
            // What does not depend on them.
            _ => faults.take(request.check()).and(None),
        };
        let data = faults.take(data(values, values.int("model.vocab")));
        if let (Some(train), Some(data)) = (&train, &data)
            && train.sample.every > 0
            && data.source == Source::Tokens
            && data.tokenizer.is_none()
        {
            faults.law(
                "train.sample_every asks for text, and data.source = \"tokens\" has ids",
                format!("sample_every {}, data.source {}", train.sample.every, data.source),
                "set data.tokenizer to the tokenizer.json that the tokens were written with, or train.sample_every to 0",
            );
        }
        let checkpoint = faults.take(checkpoint(values));
        let guard = faults.take(guard(values));
        Some(Self {
            model: model?,
            from: values.text("model.from").map(PathBuf::from),
            data: data?,
            train: train?,
            grid: grid?,
            layout: layout?,
            checkpoint: checkpoint?,
            guard: guard?,
            values: values.clone(),
        })
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
    let mut faults = Faults::default();
    let accumulate = values.text("grid.accumulate").map(|_| faults.take(word(values, "grid.accumulate")));
    let (microbatch, tp) = (values.need("grid.microbatch")?, values.need("grid.tp")?);
    let grid = faults.take(Grid::new(model, batch, seq, microbatch, values.int("grid.dp"), tp));
    // Both need the cells of the grid before.
    let grid = grid.and_then(|grid| faults.take(grid.with_context(values.int("grid.cp").unwrap_or(1), seq)));
    let ep = values.need("grid.ep")?;
    let grid = grid.and_then(|grid| faults.take(grid.with_experts(model, ep)));
    let accumulate = accumulate.flatten().unwrap_or(Accumulate::Local);
    faults.give(grid.map(|grid| Grid { accumulate, ..grid }))
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

/// What is asked for; a default stands where a word is none, for what follows from it is not told.
pub(crate) fn layout_request(values: &Values, faults: &mut Faults) -> LayoutRequest {
    let count = |faults: &mut Faults, path| faults.or_default(values.need(path));
    let schedule = word_or_default::<Schedule>(values, "layout.schedule", faults);
    LayoutRequest {
        dp: count(faults, "layout.dp"),
        cp: count(faults, "layout.cp"),
        ep: values.int("layout.ep"),
        tp: count(faults, "layout.tp"),
        pp: count(faults, "layout.pp"),
        vpp: values.int("layout.vpp"),
        schedule,
        orders: faults.or_default(orders(values, schedule)),
        recompute: word_or_default::<Recompute>(values, "layout.recompute", faults),
        recompute_layers: values.ints("layout.recompute_layers"),
        zero: count(faults, "layout.zero"),
        shard: values.int("layout.shard"),
        reshard: word_or_default::<Reshard>(values, "layout.reshard", faults),
        mirror: values.bool("layout.mirror"),
        offload: word_or_default::<Offload>(values, "layout.offload", faults),
        offload_folder: values.text("layout.offload_folder").map(PathBuf::from),
        keep_packed: values.bool("layout.keep_packed").unwrap_or(false),
        tp_overlap: values.bool("layout.tp_overlap").unwrap_or(true),
        tp_pairs: values.bool("layout.tp_pairs").unwrap_or(false),
        threads: values.int("layout.threads"),
        transport: word_or_default::<Transport>(values, "layout.transport", faults),
        pin: word_or_default::<Pin>(values, "layout.pin", faults),
        exchange_timeout_ms: count(faults, "layout.exchange_timeout_ms"),
        cells: values.ints("layout.cells"),
        stages: values.ints("layout.stages"),
        ranks_per_host: values.int("cluster.ranks_per_host"),
    }
}

pub(crate) fn checkpoint(values: &Values) -> Result<CheckpointConfig, SpecError> {
    let mut faults = Faults::default();
    let need = |faults: &mut Faults, path| faults.or_default(values.need(path));
    let failures_per_host_day = values.float("checkpoint.failures_per_host_day").expect("has a default");
    if failures_per_host_day < 0.0 {
        faults.add(values.refuse("checkpoint.failures_per_host_day", "a rate, which is not negative".into()));
    }
    let stagger_ms = need(&mut faults, "checkpoint.stagger_ms") as u64;
    faults.take(at_most_a_year("checkpoint.stagger_ms", stagger_ms));
    let last_wait_s = need(&mut faults, "checkpoint.last_wait_s") as u64;
    faults.take(at_most_a_year("checkpoint.last_wait_s", last_wait_s));
    let store = values.text("checkpoint.store");
    let store = store.map(|url| url.parse().map_err(|expected| values.refuse("checkpoint.store", expected)));
    let config = CheckpointConfig {
        store: faults.or_default(store.transpose()),
        // Auto is a word, no count.
        every: values.int("checkpoint.every").map(|every| every as u64),
        keep: need(&mut faults, "checkpoint.keep").max(1),
        keep_every: need(&mut faults, "checkpoint.keep_every") as u64,
        best: values.bool("checkpoint.best").expect("has a default"),
        background: values.bool("checkpoint.background").expect("has a default"),
        stagger_ms,
        last_wait_s,
        failures_per_host_day,
    };
    faults.end(config)
}

pub(crate) fn word<T: FromStr<Err = String>>(values: &Values, path: &str) -> Result<T, SpecError> {
    let text = values.text(path).unwrap_or_default();
    text.parse().map_err(|expected| values.refuse(path, expected))
}

/// The word, or the default one where it is none.
fn word_or_default<T: FromStr<Err = String>>(values: &Values, path: &str, faults: &mut Faults) -> T {
    faults.take(word(values, path)).unwrap_or_else(|| {
        let default = key(path).map_or("", |key| key.default).trim_matches('"');
        default.parse().unwrap_or_else(|_| panic!("{path} has a word as default"))
    })
}

fn model(values: &Values) -> Result<Model, SpecError> {
    let mut faults = Faults::default();
    let float = |path| values.float(path).expect("has a default");
    let need = |faults: &mut Faults, path| faults.or_default(values.need(path));
    let (hidden, layers) = (need(&mut faults, "model.hidden"), need(&mut faults, "model.layers"));
    let heads = need(&mut faults, "model.heads");
    let head_dim = match values.int("model.head_dim") {
        Some(dim) => dim,
        None if heads > 0 && hidden % heads == 0 => hidden / heads,
        // It follows from these two.
        None if hidden == 0 || heads == 0 => 2,
        None => need(&mut faults, "model.head_dim"),
    };
    let moe = moe(values, &mut faults);
    let ffn = match &moe {
        Some(_) => values.int("model.ffn").unwrap_or(0).max(1),
        None => need(&mut faults, "model.ffn"),
    };
    let model = Model {
        hidden,
        layers,
        heads,
        kv_heads: values.int("model.kv_heads").unwrap_or(heads),
        head_dim,
        ffn,
        vocab: need(&mut faults, "model.vocab"),
        rope_theta: float("model.rope_theta"),
        norm_eps: float("model.norm_eps") as f32,
        qk_norm: values.bool("model.qk_norm").expect("has a default"),
        tied: values.bool("model.tied").expect("has a default"),
        init_std: float("model.init_std") as f32,
        moe,
    };
    if faults.is_empty() {
        model.check()?;
    }
    faults.end(model)
}

fn moe(values: &Values, faults: &mut Faults) -> Option<Moe> {
    let experts = faults.or_default(values.need("model.experts"));
    if experts == 0 {
        return None;
    }
    let float = |path| values.float(path).expect("has a default");
    let flag = |path| values.bool(path).expect("has a default");
    let ffn = values.int("model.expert_ffn").or(values.int("model.ffn"));
    Some(Moe {
        experts,
        per_token: faults.or_default(values.need("model.experts_per_token")),
        ffn: ffn.unwrap_or_else(|| faults.or_default(values.need("model.expert_ffn"))),
        shared_ffn: faults.or_default(values.need("model.shared_ffn")),
        scores: word_or_default(values, "model.router_scores", faults),
        renorm: flag("model.router_renorm"),
        bias: flag("model.router_bias"),
        bias_rate: float("model.router_bias_rate"),
        aux_loss: float("model.aux_loss"),
        aux_scope: word_or_default(values, "model.aux_scope", faults),
    })
}

pub(crate) fn train(values: &Values) -> Result<TrainConfig, SpecError> {
    let mut faults = Faults::default();
    let need = |faults: &mut Faults, path| faults.or_default(values.need(path));
    let float = |path| values.float(path).expect("has a default");
    let train = TrainConfig {
        steps: need(&mut faults, "train.steps") as u64,
        seq: need(&mut faults, "train.seq"),
        recipe: faults.take(crate::Recipes::read(values)).unwrap_or_else(|| crate::Recipes::unchanged(values)),
        schedule: word_or_default(values, "train.schedule", &mut faults),
        warmup: need(&mut faults, "train.warmup") as u64,
        decay: need(&mut faults, "train.decay") as u64,
        no_decay: values.texts("train.no_decay"),
        seed: values.seed("train.seed"),
        eval_every: need(&mut faults, "train.eval_every") as u64,
        eval_sequences: need(&mut faults, "train.eval_sequences"),
        patience: need(&mut faults, "train.patience") as u64,
        skip: faults.or_default(crate::Skips::read(values)),
        sample: SampleConfig {
            every: need(&mut faults, "train.sample_every") as u64,
            prompt: values.text("train.sample_prompt").expect("has a default").to_owned(),
            tokens: need(&mut faults, "train.sample_tokens"),
            temperature: float("train.sample_temperature") as f32,
            top_k: need(&mut faults, "train.sample_top_k"),
        },
    };
    // A number that is missing stands as 0, and is told of as missing.
    faults.take(crate::train_law::check(&train));
    faults.end(train)
}

/// `[data]` for a model of `vocab` token ids, if that is known.
pub(crate) fn data(values: &Values, vocab: Option<usize>) -> Result<DataConfig, SpecError> {
    let mut faults = Faults::default();
    let data = DataConfig {
        source: word_or_default(values, "data.source", &mut faults),
        paths: values.texts("data.paths"),
        weights: values.floats("data.weights"),
        validation_paths: values.texts("data.validation_paths"),
        validation_sets: faults.or_default(validation_sets(values)),
        field: values.text("data.field").unwrap_or("text").to_owned(),
        validation: values.float("data.validation").expect("has a default"),
        masks: values.bool("data.masks").expect("has a default"),
        eod: values.bool("data.eod").expect("has a default"),
        seed: values.seed("data.seed"),
        packing: match values.text("data.packing") {
            Some(_) => faults.take(word(values, "data.packing")).unwrap_or(Packing::Stream),
            None => Packing::Stream,
        },
        tokenizer: values.text("data.tokenizer").map(str::to_owned),
        vocab: vocab.unwrap_or_default(),
    };
    let needed = 256 + usize::from(data.eod);
    if let Some(vocab) = vocab
        && data.source != Source::Tokens
        && vocab < needed
    {
        faults.add(SpecError::law(
            format!("byte-level text needs model.vocab >= {needed}, but it is {vocab}"),
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
        faults.add(SpecError::Missing {
            key: "data.paths".into(),
            hint: format!("data.source = \"{}\" reads it: set it to {what}", data.source),
        });
    }
    faults.take(mixture(&data, !what.is_empty()));
    if data.packing == Packing::BestFit && !data.masks {
        faults.add(SpecError::law(
            "data.packing = \"bestfit\" keeps documents apart, so it needs data.masks = true",
            "data.masks false",
            "set data.masks to true, or data.packing to \"stream\"",
        ));
    }
    if !(0.0..1.0).contains(&data.validation) {
        faults.add(SpecError::law(
            format!("data.validation = {} is not a share of the text", data.validation),
            format!("data.validation {}", data.validation),
            "set it to at least 0 and below 1, such as 0.05",
        ));
    }
    faults.end(data)
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

//! `lockstep eval`.

use std::path::PathBuf;

use checkpoint::hf::{CONFIG, HfFolder};
use data::{Dataset, Split};
use kernels::Simd;
use spec::hf::HfConfig;
use spec::run::DataConfig;
use spec::{Grid, Run};
use train::TrainError;
use train::eval::{self, Batch, Means};

use crate::show::line;

#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face folder: config.json and safetensors.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A JSON file with `input_ids`, and if wanted `labels`, `position_ids`, `document_ids`: a list per sequence.
    #[arg(long, value_name = "FILE", required_unless_present = "data", conflicts_with = "data")]
    batch: Option<PathBuf>,
    /// Folders of tokens, Megatron prefixes or text (encoded with the model's tokenizer.json; without one, bytes): the
    /// loss over all of it.
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["grads", "out"])]
    data: Vec<String>,
    /// With --data: tokens of a sequence.
    #[arg(long, default_value_t = 512)]
    seq: usize,
    /// With --data: sequences at a time.
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Also the gradient of the loss for every parameter.
    #[arg(long)]
    grads: bool,
    /// Write `logits`, `loss` and `grad.NAME` to this safetensors file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Layout and grid, such as `layout.tp=2 grid.tp=2`.
    #[arg(long = "set", value_name = "KEY=VALUE", num_args = 1..)]
    sets: Vec<String>,
    /// Instruction path of the kernels [default: the widest there is]
    #[arg(long)]
    simd: Option<String>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<u8, TrainError> {
    let config = HfConfig::read(&args.model.join(CONFIG))?;
    let weights = HfFolder::open(&args.model, &config.model)?;
    let simd = match &args.simd {
        Some(word) => word.parse()?,
        None => Simd::detect(),
    };
    let Some(path) = &args.batch else { return over_data(args, &config, &weights, simd) };
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|e| TrainError::BadInput(format!("cannot read the batch {name}: {e}")))?;
    let batch = Batch::parse(&text, &name, config.model.vocab)?;
    if let Some(out) = args.out.as_ref().filter(|out| out.exists()) {
        return Err(TrainError::BadInput(format!("{} exists already; choose another --out", out.display())));
    }
    let run = Run::for_batch(&config.model, batch.rows(), batch.seq(), &args.sets, crate::cores())?;
    let evaluation = eval::evaluate(&run, &weights, &batch, simd, args.grads)?;
    if let Some(out) = &args.out {
        eval::write(out, &run, &evaluation, &batch)?;
    }
    let perplexity = evaluation.cross_entropy.exp();
    let norm = args.grads.then_some(evaluation.grad_norm);
    if args.json {
        let object = serde_json::json!({
            "kind": "evaluation", "schema": events::SCHEMA, "loss": evaluation.loss,
            "cross_entropy": evaluation.cross_entropy, "aux_loss": evaluation.auxiliary, "perplexity": perplexity,
            "tokens": evaluation.tokens, "grad_norm": norm, "layout": run.layout.to_string(),
            "notes": config.notes.iter().chain(weights.notes()).collect::<Vec<_>>(),
        });
        line(&object.to_string());
        return Ok(0);
    }
    config.notes.iter().chain(weights.notes()).for_each(|note| line(note));
    let parts = parts(&run, evaluation.cross_entropy, evaluation.auxiliary);
    line(&format!(
        "loss {:.6}{parts} | perplexity {perplexity:.4} | {} tokens | {}",
        evaluation.loss, evaluation.tokens, run.layout
    ));
    if let Some(norm) = norm {
        line(&format!("grad_norm {norm:.6}"));
    }
    if let Some(out) = &args.out {
        line(&format!("written to {}", out.display()));
    }
    Ok(0)
}

/// What a loss with an auxiliary part is made of; nothing where it is the cross-entropy alone.
fn parts(run: &Run, cross_entropy: f64, auxiliary: Option<f64>) -> String {
    let Some((auxiliary, moe)) = auxiliary.zip(run.model.moe.as_ref()) else { return String::new() };
    let Grid { dp, ep, microbatch, microbatches, .. } = run.grid;
    // The scope of transformers is the batch.
    let scope = if ep == dp && microbatches == 1 {
        String::new()
    } else {
        format!(" of {} sequences at a time", ep * microbatch)
    };
    format!(" = cross-entropy {cross_entropy:.6} + {} x auxiliary loss {auxiliary:.6}{scope}", moe.aux_loss)
}

/// Loss, perplexity and bits per byte over data.
fn over_data(args: &Args, config: &HfConfig, weights: &HfFolder, simd: Simd) -> Result<u8, TrainError> {
    let tokenizer = args.model.join("tokenizer.json");
    let (mut paths, text): (Vec<_>, Vec<_>) =
        args.data.iter().cloned().partition(|path| data::is_tokens(path.as_ref()));
    let aside = (!text.is_empty() && tokenizer.exists()).then(|| aside::tokenize(&tokenizer, &text)).transpose()?;
    match &aside {
        Some(folder) => paths.push(folder.path().display().to_string()),
        None => paths.clone_from(&args.data),
    }
    let run = Run::for_batch(&config.model, args.sequences, args.seq, &args.sets, crate::cores())?;
    let data = crate::data_cmd::of_paths(&paths);
    let data = Dataset::open(&DataConfig { vocab: config.model.vocab, ..data }, args.seq, None)?;
    let (sum, Means { loss, cross_entropy, auxiliary }) = eval::evaluate_data(&run, weights, &data, simd)?;
    // Of the text: the auxiliary loss says nothing about it.
    let perplexity = cross_entropy.exp();
    let known = data.knows_bytes(Split::Train);
    let bits = sum.bits_per_byte(known);
    let notes = config.notes.iter().chain(weights.notes());
    if args.json {
        let object = serde_json::json!({
            "kind": "evaluation", "schema": events::SCHEMA, "loss": loss, "cross_entropy": cross_entropy,
            "aux_loss": auxiliary, "perplexity": perplexity, "bits_per_byte": bits,
            "tokens": sum.tokens, "bytes": known.then_some(sum.bytes), "layout": run.layout.to_string(), "notes": notes.collect::<Vec<_>>(),
        });
        line(&object.to_string());
        return Ok(0);
    }
    notes.for_each(|note| line(note));
    data.describe().iter().for_each(|text| line(text));
    let bits = bits.map_or(String::new(), |bits| format!(" | {bits:.4} bits per byte"));
    let parts = parts(&run, cross_entropy, auxiliary);
    line(&format!("loss {loss:.6}{parts} | perplexity {perplexity:.4}{bits} | {} tokens | {}", sum.tokens, run.layout));
    Ok(0)
}

/// Text through the model's own tokenizer, in a folder that goes away with the evaluation.
#[cfg(feature = "tokenizers")]
mod aside {
    use std::path::Path;

    use data::tokenize::{self, Limits, Options, Vocabulary};
    use data::tokenizer::Tokenizer;
    use tempfile::TempDir;
    use train::TrainError;

    pub fn tokenize(tokenizer: &Path, text: &[String]) -> Result<TempDir, TrainError> {
        let tokenizer = Tokenizer::open(tokenizer)?;
        let folder =
            TempDir::new().map_err(|e| TrainError::BadInput(format!("cannot make a temporary folder: {e}")))?;
        let eod = tokenizer.eod()?.map(|eod| (eod.id, eod.name));
        let vocabulary = Vocabulary { ids: tokenizer.ids(), eod, hash: tokenizer.hash(), files: Vec::new() };
        let options = Options {
            inputs: text.to_vec(),
            field: "text".into(),
            out: folder.path().to_owned(),
            jobs: crate::cores(),
            // All of it is evaluated: nothing is filtered, and a broken line is an error.
            limits: Limits { document_bytes_max: u64::MAX, repeat_share_max: 1.0 },
            bad_lines_max: 0,
        };
        tokenize::run(&options, &vocabulary, &|| Box::new(tokenizer.encoder()), &mut |_| {})?;
        Ok(folder)
    }
}

/// This build has no tokenizers.
#[cfg(not(feature = "tokenizers"))]
mod aside {
    use std::path::{Path, PathBuf};

    use train::TrainError;

    /// Never made.
    pub struct Folder(PathBuf);

    impl Folder {
        pub fn path(&self) -> &Path {
            &self.0
        }
    }

    pub fn tokenize(tokenizer: &Path, text: &[String]) -> Result<Folder, TrainError> {
        Err(TrainError::BadInput(format!(
            "--data {} is text and the model has a tokenizer ({}), but this lockstep was built without tokenizers; build it with `cargo build --release --locked --features tokenizers`",
            text[0],
            tokenizer.display()
        )))
    }
}

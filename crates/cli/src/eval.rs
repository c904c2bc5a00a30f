//! `lockstep eval`.

use std::path::PathBuf;

use checkpoint::hf::{CONFIG, HfFolder};
use kernels::Simd;
use spec::Run;
use spec::hf::HfConfig;
use train::TrainError;
use train::eval::{self, Batch};

use crate::show::line;

#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face folder: config.json and safetensors.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A JSON file with `input_ids`, and if wanted `labels`, `position_ids`, `document_ids`: [sequence][position].
    #[arg(long, value_name = "FILE")]
    batch: PathBuf,
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
    let name = args.batch.display().to_string();
    let text = std::fs::read_to_string(&args.batch)
        .map_err(|e| TrainError::BadInput(format!("cannot read the batch {name}: {e}")))?;
    let batch = Batch::parse(&text, &name, config.model.vocab)?;
    if let Some(out) = args.out.as_ref().filter(|out| out.exists()) {
        return Err(TrainError::BadInput(format!("{} exists already; choose another --out", out.display())));
    }
    let simd = match &args.simd {
        Some(word) => word.parse()?,
        None => Simd::detect(),
    };
    let run = Run::for_batch(&config.model, batch.rows(), batch.seq(), &args.sets, crate::cores())?;
    let evaluation = eval::evaluate(&run, &weights, &batch, simd, args.grads)?;
    if let Some(out) = &args.out {
        eval::write(out, &run, &evaluation, &batch)?;
    }
    let perplexity = evaluation.loss.exp();
    let norm = args.grads.then_some(evaluation.grad_norm);
    if args.json {
        let object = serde_json::json!({
            "kind": "evaluation", "schema": events::SCHEMA, "loss": evaluation.loss, "perplexity": perplexity,
            "tokens": evaluation.tokens, "grad_norm": norm, "layout": run.layout.to_string(),
            "notes": config.notes.iter().chain(weights.notes()).collect::<Vec<_>>(),
        });
        line(&object.to_string());
        return Ok(0);
    }
    config.notes.iter().chain(weights.notes()).for_each(|note| line(note));
    line(&format!("loss {:.6} | perplexity {perplexity:.4} | {} tokens | {}", evaluation.loss, evaluation.tokens, run.layout));
    if let Some(norm) = norm {
        line(&format!("grad_norm {norm:.6}"));
    }
    if let Some(out) = &args.out {
        line(&format!("written to {}", out.display()));
    }
    Ok(0)
}

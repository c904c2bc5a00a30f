//! `lockstep data`.

use std::path::PathBuf;

use data::stats::{self, Stats};
use serde_json::json;
use spec::run::{DataConfig, Packing, Source};
use train::TrainError;

use crate::cores;
use crate::show::line;

/// Schema version of the JSON objects.
const SCHEMA: u32 = 1;

#[derive(clap::Subcommand)]
pub enum Command {
    /// Write a folder of tokens out of text, once; runs map it (data.source = "tokens").
    Tokenize(TokenizeArgs),
    /// Lengths, duplicates, and what each packing makes of the data.
    Stats(StatsArgs),
}

#[derive(clap::Args)]
#[cfg_attr(not(feature = "tokenizers"), allow(dead_code))] // this build has no tokenizers
pub struct TokenizeArgs {
    /// Files, folders or quoted globs: files of JSON objects, one per line, hold a document per line, other files are
    /// a document each; both also as .gz, .xz or .zst. Of folders, README and LICENSE files are left out.
    #[arg(required = true)]
    inputs: Vec<String>,
    /// The tokenizer.json.
    #[arg(long)]
    tokenizer: PathBuf,
    /// The folder to write; not there yet, or empty.
    #[arg(long)]
    out: PathBuf,
    /// Field of a JSON line that holds the text.
    #[arg(long, default_value = "text")]
    field: String,
    /// Threads that encode, 1 to 1024 [default: all cores]
    #[arg(long, value_name = "N", value_parser = crate::threads)]
    jobs: Option<usize>,
    /// The token that ends a document [default: what tokenizer_config.json or config.json beside
    /// the tokenizer says, else one with a usual name, such as <|endoftext|>]
    #[arg(long, value_name = "TOKEN")]
    eod: Option<String>,
    /// Broken JSON lines that are left out before it stops.
    #[arg(long, value_name = "N", default_value_t = 10)]
    bad_lines_max: u64,
    /// Longer documents are left out.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    document_bytes_max: u64,
    /// Documents are left out in which one line or one token is a larger share than this, 0.5 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    repeat_share_max: f64,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct StatsArgs {
    /// A run file (.toml), or folders of tokens, Megatron prefixes or text.
    #[arg(required = true)]
    paths: Vec<String>,
    /// Override a key of the run file.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Tokens per sequence, where there is no run file.
    #[arg(long, default_value_t = 2048)]
    seq: usize,
    /// Sequences per microbatch, where there is no run file.
    #[arg(long, default_value_t = 1)]
    microbatch: usize,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

pub fn run(command: &Command) -> Result<u8, TrainError> {
    match command {
        Command::Tokenize(args) => tokenize(args),
        Command::Stats(args) => show_stats(args),
    }
}

#[cfg(not(feature = "tokenizers"))]
fn tokenize(_: &TokenizeArgs) -> Result<u8, TrainError> {
    let feature = "this lockstep was built without tokenizers, for a shorter build; build it with `cargo build --release --locked --features tokenizers`";
    Err(TrainError::BadInput(feature.into()))
}

#[cfg(feature = "tokenizers")]
fn tokenize(args: &TokenizeArgs) -> Result<u8, TrainError> {
    use data::tokenize::{self, Limits, Options, Progress, Vocabulary};
    use data::tokenizer::{Eod, Tokenizer};

    if !(0.5..=1.0).contains(&args.repeat_share_max) {
        let share = args.repeat_share_max;
        return Err(TrainError::BadInput(format!("--repeat-share-max {share} is not from 0.5 to 1")));
    }
    let tokenizer = Tokenizer::open(&args.tokenizer)?;
    let eod = match &args.eod {
        None => tokenizer.eod()?,
        Some(name) => {
            let id = tokenizer.id(name).ok_or_else(|| {
                TrainError::BadInput(format!("--eod {name} is no token of {}", args.tokenizer.display()))
            })?;
            Some(Eod { id, name: name.clone(), said_by: "--eod".into() })
        }
    };
    let said = match &eod {
        Some(Eod { id, name, said_by }) => format!("end of a document: {name} (id {id}), by {said_by}"),
        None => "end of a document: no token; the tokenizer has none, and --eod names none".into(),
    };
    let eod = eod.map(|eod| (eod.id, eod.name));
    let vocabulary = Vocabulary { ids: tokenizer.ids(), eod, hash: tokenizer.hash(), files: tokenizer.files() };
    let options = Options {
        inputs: args.inputs.clone(),
        field: args.field.clone(),
        out: args.out.clone(),
        jobs: args.jobs.unwrap_or_else(cores),
        limits: Limits { document_bytes_max: args.document_bytes_max, repeat_share_max: args.repeat_share_max },
        bad_lines_max: args.bad_lines_max,
    };
    let began = std::time::Instant::now();
    let mut bar = None;
    let mut kinds = Vec::new();
    let mut progress = |progress: Progress<'_>| match progress {
        Progress::Begin(lines) => {
            kinds = lines.to_vec();
            if !args.json {
                kinds.iter().for_each(|kind| line(kind));
            }
        }
        Progress::Read { read, total } => {
            if let Some(bar) = bar.get_or_insert_with(|| crate::show::byte_bar(args.json, total)) {
                bar.set_position(read);
            }
        }
    };
    let report = tokenize::run(&options, &vocabulary, &|| Box::new(tokenizer.encoder()), &mut progress);
    if let Some(Some(bar)) = bar {
        bar.finish_and_clear();
    }
    let report = report?;
    let seconds = began.elapsed().as_secs_f64();
    let header = &report.header;
    let rate = header.bytes as f64 / 1e6 / seconds;
    if args.json {
        let left_out: serde_json::Map<_, _> = report
            .left_out
            .iter()
            .map(|(reason, kind)| (reason.name().into(), json!({ "count": kind.count, "first": kind.first })))
            .collect();
        let object = json!({
            "kind": "tokenize", "schema": SCHEMA, "out": args.out, "header": header, "files": report.files, "kinds": kinds,
            "left_out": left_out, "bad_lines": { "count": report.bad_lines.count, "first": report.bad_lines.first },
            "seconds": seconds, "mb_per_s": rate, "end_of_document": said,
        });
        line(&object.to_string());
        return Ok(0);
    }
    line(&said);
    for (reason, kind) in &report.left_out {
        line(&format!("left out: {} documents, {}: {}", kind.count, reason.name(), kind.first.join(", ")));
    }
    if report.bad_lines.count > 0 {
        line(&format!("left out: {} broken lines:\n  {}", report.bad_lines.count, report.bad_lines.first.join("\n  ")));
    }
    let eod = header.eod_token.as_ref().map_or("none".into(), |name| format!("{name} ({})", header.eod.unwrap_or(0)));
    line(&format!(
        "{} documents of {} files, {} bytes, {} tokens as {} ({:.2} bytes per token), vocabulary {}, end of document {eod}",
        header.documents,
        report.files,
        header.bytes,
        header.tokens,
        header.dtype,
        header.bytes as f64 / header.tokens as f64,
        header.vocab
    ));
    line(&format!("{} written in {seconds:.1} s, {rate:.1} MB/s with {} threads", args.out.display(), options.jobs));
    Ok(0)
}

fn show_stats(args: &StatsArgs) -> Result<u8, TrainError> {
    let (config, seq, microbatch) = match args.paths.as_slice() {
        [path] if path.ends_with(".toml") => {
            let run = spec::Run::load(path.as_ref(), &args.sets, cores())?;
            run.check_effects()?;
            (run.data, run.train.seq, run.grid.microbatch)
        }
        paths => (of_paths(paths), args.seq, args.microbatch),
    };
    let stats = stats::of(&config, seq, microbatch)?;
    if args.json {
        let mut object = json!({ "kind": "data_stats", "schema": SCHEMA });
        let fields = serde_json::to_value(&stats).map_err(|e| TrainError::Internal(e.to_string()))?;
        if let (Some(object), serde_json::Value::Object(fields)) = (object.as_object_mut(), fields) {
            object.extend(fields);
        }
        line(&object.to_string());
    } else {
        print(&stats);
    }
    Ok(0)
}

/// Paths without a run file: tokens if the first is of tokens, else text; nothing held out.
pub fn of_paths(paths: &[String]) -> DataConfig {
    let source = if data::is_tokens(paths[0].as_ref()) { Source::Tokens } else { Source::Text };
    DataConfig {
        source,
        paths: paths.to_vec(),
        weights: Vec::new(),
        validation_paths: Vec::new(),
        validation_sets: Vec::new(),
        field: "text".into(),
        validation: 0.0,
        masks: true,
        // A folder without such a token would be refused.
        eod: source == Source::Text || data::has_eod(paths[0].as_ref()),
        seed: 1,
        packing: Packing::Stream,
        tokenizer: None,
        vocab: usize::MAX,
    }
}

fn print(stats: &Stats) {
    let l = &stats.lengths;
    line(&format!("{} documents, {} tokens, {} bytes of text", l.documents, l.tokens, l.bytes));
    line(&format!("tokens of a document: min {}, median {}, p95 {}, max {}", l.min, l.median, l.p95, l.max));
    let d = &stats.duplicates;
    line(&format!("exact duplicates: {} documents, {} tokens, {} bytes", d.documents, d.tokens, d.bytes));
    for p in &stats.packings {
        let a = &p.attention;
        line(&format!(
            "{}: {} sequences of {} tokens, {:.2}% padding, {} documents cut that would fit; attention of a sequence {:.3} \
             of a full one (min {:.3}, max {:.3}), microbatches of {}: max {:.2} times the mean",
            p.packing,
            p.sequences,
            stats.seq,
            100.0 * p.padding,
            p.documents_cut,
            a.mean,
            a.min,
            a.max,
            stats.microbatch,
            a.microbatch_max_over_mean
        ));
    }
}

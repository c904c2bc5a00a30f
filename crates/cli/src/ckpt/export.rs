//! `ckpt export`: a checkpoint as a Hugging Face folder, with the tokenizer that its data was written with.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::hf::{self, Dtype, ExportOptions};
use data::folder::{self, TOKENIZER_FILES};
use spec::Run;
use spec::hf::{Export, HfConfig, Style};
use spec::run::Source;
use train::TrainError;

use super::{Say, make, open, regular};

pub fn export(say: Say, path: &Path, out: &Path, dtype: &str, shard_bytes_max: u64) -> Result<u8, TrainError> {
    let dtype = match dtype {
        "f32" => Dtype::F32,
        "bf16" => Dtype::Bf16,
        other => return Err(TrainError::BadInput(format!("--dtype {other}: it must be f32 or bf16"))),
    };
    let (found, folder) = open(say, path)?;
    let name = folder.join("run.toml");
    regular(&name)?;
    let run = Run::load(&name, &[], crate::cores())?;
    spec::hf::Arch::holds(&run.model)?;
    let source = run.from.as_ref().map(|from| HfConfig::read(&from.join(hf::CONFIG))).transpose()?;
    let words = Words::of(&run);
    // A folder goes back in the style in which it came.
    let newer = source.as_ref().is_some_and(|config| config.key("rope_parameters").is_some());
    let config = Export {
        style: if newer { Style::Hf5 } else { Style::Public },
        dtype: dtype.name(),
        max_positions: run.train.seq,
        eos_token_id: words.eod,
        base: source.as_ref(),
    };
    let config = config.config_json(&run.model);
    let options = ExportOptions { dtype, shard_bytes_max };
    let written = make::whole(out, "--hf", |out| {
        let written = hf::export_checkpoint(&found, &run.model, out, &config, options)?;
        if let Some(from) = &run.from {
            hf::copy_companions(from, out)?;
        }
        for (name, file) in &words.files {
            let io = |source| TrainError::Io { what: "cannot copy", path: file.clone(), source };
            fs::copy(file, out.join(name)).map_err(io)?;
        }
        Ok(written)
    })?;
    let no_tokenizer = words.missing.filter(|_| !out.join(TOKENIZER_FILES[0]).exists());
    say.object(
        "export",
        serde_json::json!({"step": found.meta().step, "path": out, "parameters": written.parameters, "files": written.files,
            "bytes": written.bytes, "eos_token_id": words.eod, "no_tokenizer": no_tokenizer}),
    );
    say.line(&format!(
        "step {} as {}: {} parameters, {} files, {:.1} MB",
        found.meta().step,
        out.display(),
        written.parameters,
        written.files,
        written.bytes as f64 / 1e6
    ));
    if let Some(why) = no_tokenizer {
        say.line(&format!("the folder has no tokenizer.json: {why}"));
    }
    Ok(0)
}

/// What the data of a run says of its vocabulary.
struct Words {
    /// The token that ends a document.
    eod: Option<usize>,
    /// The tokenizer and its settings, each with its name in the exported folder.
    files: Vec<(&'static str, PathBuf)>,
    /// Why there is no tokenizer although there should be one.
    missing: Option<String>,
}

impl Words {
    fn of(run: &Run) -> Self {
        match run.data.source {
            Source::Tokens => Self::of_tokens(run),
            _ => Self { eod: run.data.eod.then_some(data::EOD as usize), files: Vec::new(), missing: None },
        }
    }

    fn of_tokens(run: &Run) -> Self {
        let paths: Vec<&Path> = run.data.paths.iter().map(Path::new).collect();
        let headers: Vec<_> = paths.iter().filter_map(|path| folder::header(path, "data.paths").ok()).collect();
        let first = headers.first().filter(|_| headers.len() == paths.len());
        let Some(first) = first else {
            let why = "not all of data.paths are folders of tokens that can be read; copy the tokenizer's files there";
            return Self { eod: None, files: Vec::new(), missing: Some(why.into()) };
        };
        let alike = |same: &dyn Fn(&folder::Header) -> bool| headers.iter().all(same);
        let eod = first.eod.filter(|eod| run.data.eod && alike(&|header| header.eod == Some(*eod)));
        let eod = eod.map(|eod| eod as usize);
        if !alike(&|header| header.tokenizer_blake3 == first.tokenizer_blake3) {
            let why = "the folders of data.paths were written by different tokenizers; copy the right one there";
            return Self { eod, files: Vec::new(), missing: Some(why.into()) };
        }
        let named = run.data.tokenizer.iter().map(PathBuf::from);
        let kept = paths.iter().map(|path| path.join(TOKENIZER_FILES[0]));
        let is_it = |path: &PathBuf| {
            fs::read(path).is_ok_and(|bytes| *blake3::hash(&bytes).to_hex() == *first.tokenizer_blake3)
        };
        match named.chain(kept).find(is_it) {
            Some(tokenizer) => {
                let beside = TOKENIZER_FILES.map(|name| (name, tokenizer.with_file_name(name)));
                let settings = beside.into_iter().skip(1).filter(|(_, path)| path.is_file());
                let files = [(TOKENIZER_FILES[0], tokenizer.clone())].into_iter().chain(settings).collect();
                Self { eod, files, missing: None }
            }
            None => {
                let why = format!(
                    "neither data.tokenizer nor the folders of data.paths hold the one with blake3 {}; copy it there",
                    &first.tokenizer_blake3[..16]
                );
                Self { eod, files: Vec::new(), missing: Some(why) }
            }
        }
    }
}

//! What the tests share.

#[path = "../../src/scratch.rs"]
mod scratch;

pub use scratch::Scratch;
use spec::run::{DataConfig, Packing, Source};

/// A configuration of text without validation, masked, with end-of-document tokens.
pub fn text(paths: &[&str]) -> DataConfig {
    DataConfig {
        source: Source::Text,
        paths: paths.iter().map(|&path| path.to_owned()).collect(),
        validation_paths: Vec::new(),
        validation_sets: Vec::new(),
        field: "text".into(),
        validation: 0.0,
        masks: true,
        eod: true,
        seed: 1,
        weights: Vec::new(),
        packing: Packing::Stream,
        tokenizer: None,
        vocab: 257,
    }
}

/// The synthetic language with the defaults of a run file.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn synthetic() -> DataConfig {
    DataConfig { source: Source::Synthetic, paths: Vec::new(), validation: 0.05, ..text(&[]) }
}

/// An encoder whose tokens are bytes, 300 ids; 300 and up are out of its vocabulary.
#[allow(dead_code, reason = "not every test file needs it")]
pub struct Bytes;

impl data::tokenize::Encode for Bytes {
    fn encode(&mut self, text: &str, into: &mut Vec<u32>) -> Result<(), data::DataError> {
        into.extend(text.bytes().map(u32::from));
        Ok(())
    }
}

/// What to tokenize, with the defaults.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn options(inputs: &[&str], out: &std::path::Path) -> data::tokenize::Options {
    data::tokenize::Options {
        inputs: inputs.iter().map(|&input| input.to_owned()).collect(),
        field: "text".into(),
        out: out.to_owned(),
        jobs: 2,
        limits: data::tokenize::Limits::default(),
        bad_lines_max: 3,
    }
}

/// Tokenizes with [`Bytes`] under a vocabulary of `ids`.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn tokenize(options: &data::tokenize::Options, ids: usize) -> Result<data::tokenize::Report, data::DataError> {
    let eod = Some((299, "<eod>".to_owned()));
    let vocabulary = data::tokenize::Vocabulary { ids, eod, hash: [7; 32], files: Vec::new() };
    data::tokenize::run(options, &vocabulary, &|| Box::new(Bytes), &mut |_| {})
}

/// A configuration of tokens without validation, masked, with end-of-document tokens, for a model of 300 ids.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn tokens(paths: &[&str]) -> DataConfig {
    DataConfig { source: Source::Tokens, vocab: 300, ..text(paths) }
}

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
        validation: 0.0,
        masks: true,
        eod: true,
        seed: 1,
        weights: Vec::new(),
        packing: Packing::Stream,
        vocab: 257,
    }
}

/// The synthetic language with the defaults of a run file.
#[allow(dead_code, reason = "not every test file needs it")]
pub fn synthetic() -> DataConfig {
    DataConfig { source: Source::Synthetic, paths: Vec::new(), validation: 0.05, ..text(&[]) }
}

//! Text to ids and back for samples of a model: bytes, or the tokenizer of the run's token files.

use std::path::Path;

use spec::run::{DataConfig, Source};

use crate::{DataError, EOD};

/// How a run's model reads and writes text.
#[derive(Debug)]
pub struct Speech {
    vocabulary: Vocabulary,
}

#[derive(Debug)]
enum Vocabulary {
    Bytes,
    #[cfg(feature = "tokenizers")]
    Tokens(Box<crate::tokenizer::Tokenizer>),
}

impl Speech {
    /// Bytes for text; for token files the tokenizer that `data.tokenizer` names.
    ///
    /// # Errors
    /// A tokenizer that cannot be read, that is not the one that the token folders were written with, or that this
    /// binary was built without.
    pub fn open(config: &DataConfig) -> Result<Self, DataError> {
        match (config.source, &config.tokenizer) {
            (Source::Tokens, Some(path)) => Self::tokens(config, Path::new(path)),
            _ => Ok(Self { vocabulary: Vocabulary::Bytes }),
        }
    }

    #[cfg(not(feature = "tokenizers"))]
    fn tokens(_: &DataConfig, path: &Path) -> Result<Self, DataError> {
        let what = "this lockstep was built without tokenizers; build it with `cargo build --release --locked --features tokenizers`";
        Err(DataError::Tokenizer { path: path.to_owned(), what: what.into() })
    }

    #[cfg(feature = "tokenizers")]
    fn tokens(config: &DataConfig, path: &Path) -> Result<Self, DataError> {
        let tokenizer = crate::tokenizer::Tokenizer::open(path)?;
        let hash = blake3::Hash::from(tokenizer.hash()).to_hex().to_string();
        for first in config.paths.iter().map(Path::new).filter(|path| crate::folder::is_folder(path)) {
            let expected = crate::folder::header(first, "data.paths")?.tokenizer_blake3;
            if expected != hash {
                let [tokenizer, expected] = [hash, expected].map(|hash| format!("blake3 {}", &hash[..16]));
                return Err(DataError::Speech { path: path.to_owned(), tokenizer, folder: first.to_owned(), expected });
            }
        }
        Ok(Self { vocabulary: Vocabulary::Tokens(Box::new(tokenizer)) })
    }

    /// Ids below this may be drawn; of bytes, the end of document may not.
    pub fn ids(&self) -> usize {
        match &self.vocabulary {
            Vocabulary::Bytes => EOD as usize,
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(tokenizer) => tokenizer.ids(),
        }
    }

    /// The ids of `text`.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(tokenizer) => {
                let mut ids = Vec::new();
                tokenizer.encoder().encode(text, &mut ids)?;
                Ok(ids)
            }
        }
    }

    /// The text of `ids`; what is not UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(crate::decode(ids)),
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(tokenizer) => tokenizer.decode(ids, true),
        }
    }
}

//! Which token ends a document: what the files beside a `tokenizer.json` say, else a usual name.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::Tokenizer;
use crate::DataError;

/// Names that tokenizers give to the token that ends a document, the most usual first.
const NAMES: &[&str] =
    &["<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>", "<eod>", "[SEP]", "[EOS]"];

/// Files beside `tokenizer.json` that name the token, in the order in which they are asked.
const SAID_BY: [(&str, &str); 3] = [
    ("tokenizer_config.json", "eos_token"),
    ("config.json", "eos_token_id"),
    ("generation_config.json", "eos_token_id"),
];

/// Larger files are not read: these are settings, bytes.
const SETTINGS_BYTES_MAX: u64 = 64 << 20;

/// The token that ends a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eod {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub name: String,
    /// Who says so, for the person: a file and its key, or that it is a guess by the name.
    pub said_by: String,
}

impl Tokenizer {
    /// The token that ends a document. `tokenizer_config.json`, `config.json` and `generation_config.json` beside the
    /// tokenizer are asked in this order; if none of them says, a token with a usual name is taken. `None`: there is no such token.
    ///
    /// # Errors
    /// A file beside the tokenizer that is no JSON, or that names a token which the tokenizer does not have.
    pub fn eod(&self) -> Result<Option<Eod>, DataError> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        for (file, key) in SAID_BY {
            let path = folder.join(file);
            let Ok(found) = fs::metadata(&path) else { continue };
            if !found.is_file() || found.len() > SETTINGS_BYTES_MAX {
                continue;
            }
            let refuse = |what: String| {
                self.refuse(format!(
                    "{} {what}; mend that file, or give `lockstep data tokenize` the token with --eod",
                    path.display()
                ))
            };
            let bytes = fs::read(&path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
            let settings: Value = serde_json::from_slice(&bytes).map_err(|e| refuse(format!("is no JSON: {e}")))?;
            let said = &settings[key];
            if said.is_null() {
                continue;
            }
            let (id, name) =
                self.token(said).ok_or_else(|| refuse(format!("says {key} = {said}, which is no token of it")))?;
            return Ok(Some(Eod { id, name, said_by: format!("{key} of {file}") }));
        }
        let guess = |&name: &&str| {
            let id = self.id(name)?;
            Some(Eod { id, name: name.into(), said_by: "a guess by its name".into() })
        };
        Ok(NAMES.iter().find_map(guess))
    }

    /// The token that a value of a settings file means: its text, `{"content": text}`, its id, or the first of a list of ids.
    fn token(&self, said: &Value) -> Option<(u32, String)> {
        let text = said.as_str().or_else(|| said["content"].as_str());
        if let Some(name) = text {
            return Some((self.id(name)?, name.to_owned()));
        }
        let id = said.as_u64().or_else(|| said.as_array()?.first()?.as_u64())?;
        let id = u32::try_from(id).ok()?;
        Some((id, self.inner.id_to_token(id)?))
    }
}

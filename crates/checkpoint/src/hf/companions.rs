//! Files beside the weights that an exported folder takes over as they are.

use std::fs;
use std::path::Path;

use super::error::HfError;

/// Tokenizer, chat template and generation settings: a change of the weights does not touch them.
pub const COMPANIONS: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Copies those [`COMPANIONS`] that `from` has into `to`; returns their names.
///
/// # Errors
/// [`HfError::Io`].
pub fn copy_companions(from: &Path, to: &Path) -> Result<Vec<&'static str>, HfError> {
    let mut copied = Vec::new();
    for &name in COMPANIONS {
        let source = from.join(name);
        if source.is_file() {
            let (temporary, path) = (to.join(format!("{name}.tmp")), to.join(name));
            fs::copy(&source, &temporary).map_err(HfError::io("copy", source))?;
            fs::rename(&temporary, &path).map_err(HfError::io("rename", path))?;
            copied.push(name);
        }
    }
    Ok(copied)
}

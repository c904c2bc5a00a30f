//! Every way in which a request for a run can be wrong. All are the user's to mend (exit 2).

use std::path::PathBuf;

/// A run file, key or combination of keys that cannot be run. The text names the operands, then the remedy.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The run file cannot be read.
    #[error("cannot read the run file {path}: {source}")]
    Read {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The run file is not TOML.
    #[error("{path} is not valid TOML: {message}")]
    Syntax {
        /// The file (or `--set`).
        path: String,
        /// The parser's words, with line and column.
        message: String,
    },
    /// A key that no part of lockstep reads.
    #[error("unknown key `{key}` ({origin}); {hint}")]
    UnknownKey {
        /// The key as written, with its section.
        key: String,
        /// Where it was written.
        origin: String,
        /// The nearest known key.
        hint: String,
    },
    /// A value of the wrong kind.
    #[error("`{key}` = {given} ({origin}): expected {expected}")]
    WrongType {
        /// The key, with its section.
        key: String,
        /// The value as written.
        given: String,
        /// Where it was written.
        origin: String,
        /// What fits.
        expected: String,
    },
    /// A key without which there is no run.
    #[error("`{key}` is not set: {hint}")]
    Missing {
        /// The key, with its section.
        key: String,
        /// How to set it.
        hint: String,
    },
    /// A Hugging Face `config.json` that cannot be used.
    #[error("{path}: {what}\n  remedy: {remedy}")]
    Hf {
        /// The file.
        path: String,
        /// The key, its value and what is wrong with it.
        what: String,
        /// What to do.
        remedy: String,
    },
    /// Values that do not go together.
    #[error("{what}\n  factors: {factors}\n  remedy: {remedy}")]
    Law {
        /// The law that is broken, with its operands.
        what: String,
        /// Every number that enters it.
        factors: String,
        /// The nearest possible values, by key.
        remedy: String,
    },
}

impl SpecError {
    pub(crate) fn law(what: impl Into<String>, factors: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Law { what: what.into(), factors: factors.into(), remedy: remedy.into() }
    }
}

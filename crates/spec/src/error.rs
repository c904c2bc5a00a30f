//! Every way in which a request for a run can be wrong. All are the user's to mend (exit 2).

use std::path::PathBuf;

pub use crate::document::{Origin, Place};
use crate::keys::named;
use crate::runfile::Values;

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
        path: Origin,
        /// The parser's words, with line and column.
        message: String,
    },
    /// A key that no part of lockstep reads.
    #[error("unknown key `{key}` ({origin}); {hint}")]
    UnknownKey {
        /// The key as written, with its section.
        key: String,
        /// Where it was written.
        origin: Origin,
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
        origin: Origin,
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
    #[error("{what}\n{}  factors: {factors}\n  remedy: {remedy}", place(set_at))]
    Law {
        /// The law that is broken, with its operands.
        what: String,
        /// Where the keys that it names were set; empty: nobody looked, or nowhere.
        set_at: String,
        /// Every number that enters it.
        factors: String,
        /// The nearest possible values, by key.
        remedy: String,
    },
    /// Several of them, at least two, none of this kind.
    #[error("{}", list(.0))]
    Many(Vec<SpecError>),
}

fn place(set_at: &str) -> String {
    if set_at.is_empty() { String::new() } else { format!("  set at: {set_at}\n") }
}

/// One after another, numbered. Factors that were told before are not told again.
fn list(errors: &[SpecError]) -> String {
    let mut out = format!("{} settings are wrong:", errors.len());
    let mut told: Vec<&str> = Vec::new();
    for (i, error) in errors.iter().enumerate() {
        let mut text = error.to_string();
        if let SpecError::Law { factors, .. } = error {
            if told.contains(&factors.as_str()) {
                text = text.replacen(&format!("  factors: {factors}\n"), "", 1);
            }
            told.push(factors);
        }
        out += &format!("\n{}. {text}", i + 1);
    }
    out
}

impl SpecError {
    pub(crate) fn law(what: impl Into<String>, factors: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Law { what: what.into(), set_at: String::new(), factors: factors.into(), remedy: remedy.into() }
    }

    /// Where what is wrong stands.
    pub(crate) fn place(&self, values: &Values) -> Place {
        match self {
            Self::Syntax { path: origin, .. } | Self::UnknownKey { origin, .. } | Self::WrongType { origin, .. } => {
                origin.place()
            }
            Self::Law { what, .. } => values.places(what).first().map_or(Place::Other, |(_, origin)| origin.place()),
            Self::Read { .. } | Self::Missing { .. } | Self::Hf { .. } | Self::Many(_) => Place::Other,
        }
    }

    /// Notes where the keys were set that a broken law names.
    pub(crate) fn locate(&mut self, values: &Values) {
        if let Self::Law { what, set_at, .. } = self {
            let places = values.places(what);
            *set_at = places.iter().map(|(key, origin)| format!("{origin} ({key})")).collect::<Vec<_>>().join(", ");
        }
    }

    /// The key without a value that could be used, if that is what is wrong.
    pub(crate) fn unusable(&self) -> Option<&str> {
        match self {
            Self::Missing { key, .. } | Self::WrongType { key, .. } => Some(key),
            _ => None,
        }
    }

    /// True if it only follows from another error: one about one of the keys in `wrong`, or an unknown key that is near.
    pub(crate) fn follows(&self, values: &Values, wrong: &[String]) -> bool {
        match self {
            Self::Missing { key, .. } => values.is_meant(key),
            Self::Law { what, .. } => named(what).any(|key| wrong.iter().any(|w| w == key)),
            _ => false,
        }
    }

    /// Each single thing that is wrong.
    pub fn each(&self) -> &[SpecError] {
        match self {
            Self::Many(errors) => errors,
            one => std::slice::from_ref(one),
        }
    }
}

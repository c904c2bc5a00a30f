//! Reading single values of a `config.json`, each refused by name.

use serde_json::{Map, Value};

use super::keys::Neutral;
use crate::error::SpecError;

/// No width of a model is above this, elements.
const SIZE_MAX: u64 = 1 << 28;
/// Heads, width of a head and layers are not above this.
const COUNT_MAX: u64 = 1 << 16;

/// The keys of one file.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    pub path: &'a str,
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub fn fault(&self, what: impl Into<String>, remedy: impl Into<String>) -> SpecError {
        SpecError::Hf { path: self.path.into(), what: what.into(), remedy: remedy.into() }
    }

    /// Refuses the value of `key` as it stands.
    pub fn refuse(&self, key: &str, why: &str, remedy: impl Into<String>) -> SpecError {
        self.fault(format!("`{key}` = {}: {why}", shown(self.map.get(key).unwrap_or(&Value::Null))), remedy)
    }

    /// The value of `key`, unless it is absent or `null`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.refuse(key, "not a number", "write a number")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.refuse(key, "neither true nor false", "write true or false"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.refuse(key, "not a text", "write a text"))
    }

    /// A width: 1 to 2^28.
    pub fn size(&self, key: &str) -> Result<Option<usize>, SpecError> {
        self.int(key, SIZE_MAX)
    }

    /// A number of layers or heads, or the width of a head: 1 to 65536.
    pub fn count(&self, key: &str) -> Result<Option<usize>, SpecError> {
        self.int(key, COUNT_MAX)
    }

    fn int(&self, key: &str, max: u64) -> Result<Option<usize>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=max).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.refuse(key, &format!("not a whole number from 1 to {max}"), "write the size of the model")),
        }
    }

    /// A key without which the model has no shape.
    pub fn need(&self, key: &str, value: Option<usize>) -> Result<usize, SpecError> {
        value.ok_or_else(|| {
            self.fault(format!("`{key}` is not set"), format!("write `{key}` as the model was trained with"))
        })
    }

    /// Refuses `key` unless it is neutral.
    pub fn neutral(&self, key: &str, neutral: Neutral, asks_for: &str) -> Result<(), SpecError> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let good = match neutral {
            Neutral::Null => false,
            Neutral::False => value == &Value::Bool(false),
            Neutral::Number(number) => value.as_f64() == Some(number),
            Neutral::Empty => {
                value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
            }
            Neutral::Text(text) => value.as_str() == Some(text),
        };
        if good {
            return Ok(());
        }
        let instead = match neutral {
            Neutral::Null => "null".into(),
            Neutral::False => "false".into(),
            Neutral::Number(number) => format!("{number}"),
            Neutral::Empty => "[]".into(),
            Neutral::Text(text) => format!("{text:?}"),
        };
        Err(self.refuse(
            key,
            &format!("it asks for {asks_for}, which is not supported"),
            format!("use a model for which `{key}` is {instead}"),
        ))
    }
}

/// A value as JSON, cut short.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

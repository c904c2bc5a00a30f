//! The text of a run file, and the words of `--set`, as keys with values and the places where they stand.

use std::fmt;

use toml::Value;
use toml::de::{DeTable, DeValue};

use crate::error::SpecError;
use crate::faults::Faults;
use crate::keys::sections;

/// Where a value was set, for the person and to sort by.
#[derive(Debug, Clone, PartialEq)]
pub struct Origin {
    text: String,
    place: Place,
}

/// In the order in which errors are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A line of the run file, from 1.
    Line(usize),
    /// A `--set`, by its number.
    Set(usize),
    /// Set by no person: a default, a preset, the `config.json` of `model.from`.
    Other,
}

impl Origin {
    /// A value that no person set.
    pub(crate) fn other(text: impl Into<String>) -> Self {
        Self { text: text.into(), place: Place::Other }
    }

    /// For the order of errors.
    pub fn place(&self) -> Place {
        self.place
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One key as it was written.
pub(crate) struct Entry {
    /// The key with its section.
    pub path: String,
    /// Its value; or its text, where no value has room for it.
    pub value: Result<Value, String>,
    /// Where it stands.
    pub origin: Origin,
}

/// The keys of `text`, a run file named `name`, in its order; none if it is not TOML.
pub(crate) fn file(text: &str, name: &str, faults: &mut Faults) -> Option<Vec<Entry>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    // Around another error what is read may stand in the wrong section: it is not judged.
    let judged = errors.iter().all(|error| error.message() == "duplicate key");
    let mut told = 0;
    for error in errors {
        let line = 1 + error.span().map_or(0, |span| lines_before(text, span.start));
        // One slip makes several errors in its line.
        if line > told {
            told = line;
            let path = Origin { text: name.into(), place: Place::Line(line) };
            faults.add(SpecError::Syntax { path, message: error.to_string().trim_end().into() });
        }
    }
    if !judged {
        return None;
    }
    let mut reader = Reader { text, name, entries: Vec::new(), faults };
    reader.table("", table.get_ref());
    let mut entries = reader.entries;
    entries.sort_by_key(|entry| entry.origin.place);
    Some(entries)
}

/// The keys of `sets` (`key=value`).
pub(crate) fn sets(sets: &[String], faults: &mut Faults) -> Vec<Entry> {
    let mut entries = Vec::new();
    for (i, set) in sets.iter().enumerate() {
        let origin = Origin { text: format!("--set {set}"), place: Place::Set(i) };
        match set.split_once('=') {
            Some((path, value)) => {
                entries.push(Entry { path: path.trim().into(), value: Ok(word(value)), origin });
            }
            None => faults
                .add(SpecError::Syntax { path: origin, message: "expected key=value, such as layout.dp=2".into() }),
        }
    }
    entries
}

/// The value of a `--set`. A bare word is a text: `layout.schedule=gpipe` needs no quotes.
fn word(text: &str) -> Value {
    let table = format!("v = {text}").parse::<toml::Table>();
    table.ok().and_then(|mut table| table.remove("v")).unwrap_or_else(|| Value::String(text.into()))
}

struct Reader<'a> {
    text: &'a str,
    name: &'a str,
    entries: Vec<Entry>,
    faults: &'a mut Faults,
}

impl Reader<'_> {
    fn table(&mut self, section: &str, table: &DeTable<'_>) {
        for (key, value) in table {
            let field: &str = key.get_ref();
            let origin = self.at(key.span().start);
            let path = if section.is_empty() { field.to_owned() } else { format!("{section}.{field}") };
            let known = section.is_empty() && sections().any(|s| s == field);
            match value.get_ref() {
                DeValue::Table(inner) if section.is_empty() => {
                    if inner.is_empty() && !known {
                        self.faults.add(crate::runfile::unknown_section(field, &origin));
                    }
                    self.table(&path, inner);
                }
                _ => {
                    let written = || self.text[value.span()].to_owned();
                    let value = plain(value.get_ref()).ok_or_else(written);
                    self.entries.push(Entry { path, value, origin });
                }
            }
        }
    }

    fn at(&self, byte: usize) -> Origin {
        let line = 1 + lines_before(self.text, byte);
        Origin { text: format!("{}:{line}", self.name), place: Place::Line(line) }
    }
}

fn lines_before(text: &str, byte: usize) -> usize {
    text.as_bytes()[..byte.min(text.len())].iter().filter(|b| **b == b'\n').count()
}

/// As a value; none where a number in it has no room.
fn plain(value: &DeValue<'_>) -> Option<Value> {
    Some(match value {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(n) => Value::Integer(i64::from_str_radix(n.as_str(), n.radix()).ok()?),
        DeValue::Float(x) => Value::Float(x.as_str().parse().ok()?),
        DeValue::Boolean(b) => Value::Boolean(*b),
        DeValue::Datetime(at) => Value::Datetime(*at),
        DeValue::Array(list) => Value::Array(list.iter().map(|v| plain(v.get_ref())).collect::<Option<_>>()?),
        DeValue::Table(table) => {
            let field = |(k, v): (&toml::Spanned<toml::de::DeString<'_>>, &toml::Spanned<DeValue<'_>>)| {
                Some((k.get_ref().to_string(), plain(v.get_ref())?))
            };
            Value::Table(table.iter().map(field).collect::<Option<_>>()?)
        }
    })
}

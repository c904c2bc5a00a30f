//! A run file as typed values with their origins: default < preset < Hugging Face folder < file < `--set`.

use std::collections::{BTreeMap, BTreeSet};

use toml::Value;

use crate::error::SpecError;
use crate::hf::HfConfig;
use crate::keys::{COUNT_MAX, KEYS, Key, Kind, key, sections};
use crate::model::{PRESETS, preset_names};

/// Every set key with its value and where it came from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values {
    set: BTreeMap<&'static str, (Value, String)>,
    /// Keys whose value was written, and is another than the one beneath it: the default, a preset's, a folder's.
    asked: BTreeSet<&'static str>,
}

impl Values {
    /// Reads `text` (a run file named `name`), then `sets` (`key=value`, the last wins), over presets and defaults.
    ///
    /// # Errors
    /// Broken TOML, unknown or mistyped keys, an unknown preset.
    pub fn parse(text: &str, name: &str, sets: &[String]) -> Result<Self, SpecError> {
        let mut written = Self::default();
        let syntax = |path: &str, e: toml::de::Error| SpecError::Syntax { path: path.into(), message: e.to_string() };
        let table: toml::Table = text.parse().map_err(|e| syntax(name, e))?;
        written.take("", &table, name)?;
        for set in sets {
            let origin = format!("--set {set}");
            let Some((path, value)) = set.split_once('=') else {
                return Err(SpecError::Syntax {
                    path: origin,
                    message: "expected key=value, such as layout.dp=2".into(),
                });
            };
            // A bare word is a text: `layout.schedule=gpipe` needs no quotes.
            let value = format!("v = {value}")
                .parse::<toml::Table>()
                .map_or_else(|_| Value::String(value.into()), |mut t| t.remove("v").expect("just written"));
            written.put(path.trim(), value, &origin)?;
        }
        let mut all = Self::default();
        for known in KEYS.iter().filter(|k| !k.default.is_empty()) {
            let mut table: toml::Table = format!("v = {}", known.default).parse().expect("defaults are TOML");
            all.put(known.path, table.remove("v").expect("just written"), "default")?;
        }
        if let Some(preset) = written.text("model.preset") {
            let Some((_, shape)) = PRESETS.iter().find(|(name, _)| *name == preset) else {
                return Err(SpecError::WrongType {
                    key: "model.preset".into(),
                    given: format!("{preset:?}"),
                    origin: written.set["model.preset"].1.clone(),
                    expected: format!("one of {}", preset_names()),
                });
            };
            let names = ["hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"];
            for (field, value) in names.iter().zip(shape) {
                all.put(&format!("model.{field}"), Value::Integer(*value as i64), &format!("preset {preset}"))?;
            }
        }
        if let Some(folder) = written.text("model.from") {
            all.take_hf(folder)?;
        }
        let beneath = |key: &str| all.set.get(key).map(|(value, _)| value);
        let asked = written.set.iter().filter(|(key, (value, _))| beneath(key) != Some(value));
        all.asked = asked.map(|(key, _)| *key).collect();
        all.set.append(&mut written.set);
        Ok(all)
    }

    /// The shape of the model in a Hugging Face folder.
    fn take_hf(&mut self, folder: &str) -> Result<(), SpecError> {
        let path = std::path::Path::new(folder).join("config.json");
        let model = HfConfig::read(&path)?.model;
        let sizes = [
            ("hidden", model.hidden),
            ("layers", model.layers),
            ("heads", model.heads),
            ("kv_heads", model.kv_heads),
            ("head_dim", model.head_dim),
            ("ffn", model.ffn),
            ("vocab", model.vocab),
        ];
        let mut fields: Vec<_> = sizes.map(|(field, n)| (field, Value::Integer(n as i64))).into();
        // Through its shortest decimal form, which reads back as the same float32.
        let eps = model.norm_eps.to_string().parse().expect("a float prints as a number");
        fields.push(("norm_eps", Value::Float(eps)));
        fields.push(("rope_theta", Value::Float(model.rope_theta)));
        fields.push(("qk_norm", Value::Boolean(model.qk_norm)));
        fields.push(("tied", Value::Boolean(model.tied)));
        if let Some(moe) = &model.moe {
            let count = |n: usize| Value::Integer(n as i64);
            fields.extend([
                ("experts", count(moe.experts)),
                ("experts_per_token", count(moe.per_token)),
                ("expert_ffn", count(moe.ffn)),
                ("router_renorm", Value::Boolean(moe.renorm)),
                ("aux_loss", Value::Float(moe.aux_loss)),
                ("aux_scope", Value::String(moe.aux_scope.to_string())),
            ]);
        }
        let origin = path.display().to_string();
        fields.into_iter().try_for_each(|(field, value)| self.put(&format!("model.{field}"), value, &origin))
    }

    fn take(&mut self, section: &str, table: &toml::Table, name: &str) -> Result<(), SpecError> {
        for (field, value) in table {
            let path = if section.is_empty() { field.clone() } else { format!("{section}.{field}") };
            let known = section.is_empty() && sections().any(|s| s == field);
            match value {
                Value::Table(inner) if section.is_empty() => {
                    self.take(&path, inner, name)?;
                    if inner.is_empty() && !known {
                        return Err(unknown_section(field, name));
                    }
                }
                _ if known => {
                    return Err(SpecError::WrongType {
                        key: path,
                        given: value.to_string(),
                        origin: name.into(),
                        expected: format!("a section, such as [{field}]"),
                    });
                }
                _ => self.put(&path, value.clone(), name)?,
            }
        }
        Ok(())
    }

    fn put(&mut self, path: &str, value: Value, origin: &str) -> Result<(), SpecError> {
        let known = key(path).ok_or_else(|| unknown(path, origin))?;
        let value = typed(known, value).map_err(|given| SpecError::WrongType {
            key: path.into(),
            given,
            origin: origin.into(),
            expected: known.kind.expected().into(),
        })?;
        self.set.insert(known.path, (value, origin.into()));
        Ok(())
    }

    /// True if somebody wrote a value for `path` that it would not have without that.
    pub(crate) fn asked(&self, path: &str) -> bool {
        self.asked.contains(path)
    }

    /// A key with its value and its origin, for messages; it must be set.
    pub(crate) fn told(&self, path: &str) -> String {
        let (value, origin) = &self.set[path];
        format!("{path} = {value} ({origin})")
    }

    /// A word, if set.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.set.get(path).and_then(|(v, _)| v.as_str())
    }

    /// True if somebody gave the value: it is not a default.
    pub fn is_given(&self, path: &str) -> bool {
        self.set.get(path).is_some_and(|(_, origin)| origin != "default")
    }

    /// A count, if set.
    pub fn int(&self, path: &str) -> Option<usize> {
        self.set.get(path).and_then(|(v, _)| v.as_integer()).map(|n| n as usize)
    }

    /// A number, if set.
    pub fn float(&self, path: &str) -> Option<f64> {
        self.set.get(path).and_then(|(v, _)| v.as_float())
    }

    /// A switch, if set.
    pub fn bool(&self, path: &str) -> Option<bool> {
        self.set.get(path).and_then(|(v, _)| v.as_bool())
    }

    /// A list of words, empty if unset.
    pub fn texts(&self, path: &str) -> Vec<String> {
        let list = self.set.get(path).and_then(|(v, _)| v.as_array());
        list.map(|l| l.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect()).unwrap_or_default()
    }

    /// A list of counts, if set.
    pub fn ints(&self, path: &str) -> Option<Vec<usize>> {
        let list = self.set.get(path).and_then(|(v, _)| v.as_array())?;
        Some(list.iter().filter_map(|v| v.as_integer().map(|n| n as usize)).collect())
    }

    /// A list of numbers, empty if unset.
    pub fn floats(&self, path: &str) -> Vec<f64> {
        let list = self.set.get(path).and_then(|(v, _)| v.as_array());
        list.map(|l| l.iter().filter_map(Value::as_float).collect()).unwrap_or_default()
    }

    /// A count that must be set.
    pub fn need(&self, path: &str) -> Result<usize, SpecError> {
        self.int(path).ok_or_else(|| missing(path))
    }

    /// The error for a value of the right kind that is not one of the words it may be.
    pub fn refuse(&self, path: &str, expected: String) -> SpecError {
        let (value, origin) = &self.set[path];
        SpecError::WrongType { key: path.into(), given: value.to_string(), origin: origin.clone(), expected }
    }

    /// The resolved run file: every set key, with the origin of its value as a comment.
    pub fn to_toml(&self) -> String {
        self.write(|_| true, true)
    }

    /// The run's definition: what may change its digest, in one order, without origins.
    pub fn definition(&self) -> String {
        settled(&self.write(|k| k.defines, false))
    }

    fn write(&self, which: impl Fn(&Key) -> bool, origins: bool) -> String {
        let mut out = String::new();
        let mut section = "";
        for known in KEYS.iter().filter(|k| which(k)) {
            let Some((value, origin)) = self.set.get(known.path) else { continue };
            // A comment ends with its line.
            let origin = origin.replace(|c: char| c.is_control(), " ");
            let (in_section, field) = known.path.split_once('.').expect("every key has a section");
            if in_section != section {
                section = in_section;
                out += &format!("{}[{section}]\n", if out.is_empty() { "" } else { "\n" });
            }
            out += &if origins { format!("{field} = {value}  # {origin}\n") } else { format!("{field} = {value}\n") };
        }
        out
    }
}

/// Keys that mean the same unset and written out with this value.
const AS_UNSET: [(&str, &str, &str); 3] =
    [("[grid]", "cp", "1"), ("[grid]", "accumulate", "\"local\""), ("[data]", "packing", "\"stream\"")];

/// A definition without the lines that say what an unset key means: two runs that differ in these alone are one.
pub fn settled(definition: &str) -> String {
    let (mut out, mut section) = (String::new(), "");
    for line in definition.lines() {
        if line.starts_with('[') {
            section = line;
        }
        let says_nothing = |(of, key, value): &(&str, &str, &str)| *of == section && line == format!("{key} = {value}");
        if !AS_UNSET.iter().any(says_nothing) {
            out += line;
            out.push('\n');
        }
    }
    out
}

fn typed(known: &Key, value: Value) -> Result<Value, String> {
    let given = value.to_string();
    let fits = match (known.kind, value) {
        (Kind::IntOrAuto, Value::String(s)) if s == "auto" => Value::String(s),
        (Kind::Int | Kind::IntOrAuto, Value::Integer(n)) if (0..=COUNT_MAX).contains(&n) => Value::Integer(n),
        (Kind::Int | Kind::IntOrAuto, Value::String(s)) => {
            Value::Integer(suffixed(&s).filter(|n| *n <= COUNT_MAX).ok_or(given)?)
        }
        (Kind::Seed, Value::Integer(n)) if n >= 0 => Value::Integer(n),
        (Kind::Float, Value::Float(x)) if x.is_finite() => Value::Float(x),
        (Kind::Float, Value::Integer(n)) => Value::Float(n as f64),
        (Kind::Bool, Value::Boolean(b)) => Value::Boolean(b),
        (Kind::Text, Value::String(s)) => Value::String(s),
        // `--set layout.schedule=1f1b` reads as a word, a lone digit would not.
        (Kind::Texts, Value::Array(a)) if a.iter().all(Value::is_str) => Value::Array(a),
        (Kind::Ints, Value::Array(a)) if a.iter().all(is_count) => Value::Array(a),
        (Kind::Floats, Value::Array(a)) => {
            let float = |v| match v {
                Value::Float(x) if x.is_finite() => Some(Value::Float(x)),
                Value::Integer(n) => Some(Value::Float(n as f64)),
                _ => None,
            };
            Value::Array(a.into_iter().map(float).collect::<Option<_>>().ok_or(given)?)
        }
        _ => return Err(given),
    };
    Ok(fits)
}

fn is_count(value: &Value) -> bool {
    value.as_integer().is_some_and(|n| (0..=COUNT_MAX).contains(&n))
}

fn suffixed(text: &str) -> Option<i64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale: i64 = match &text[digits.len()..] {
        "" => 1,
        "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    digits.parse::<i64>().ok().filter(|n| *n >= 0)?.checked_mul(scale)
}

fn unknown(path: &str, origin: &str) -> SpecError {
    let name = |full: &str| full.rsplit('.').next().unwrap_or(full).to_owned();
    let nearest = KEYS.iter().map(|k| k.path).max_by(|a, b| {
        let near = |k: &str| strsim::jaro_winkler(k, path).max(0.95 * strsim::jaro_winkler(&name(k), &name(path)));
        // Of two as near, the one that begins like it for longer.
        let alike = |k: &str| k.bytes().zip(path.bytes()).take_while(|(a, b)| a == b).count();
        near(a).total_cmp(&near(b)).then_with(|| alike(a).cmp(&alike(b)))
    });
    let hint = format!("did you mean `{}`?", nearest.expect("the table is not empty"));
    SpecError::UnknownKey { key: path.into(), origin: origin.into(), hint }
}

fn unknown_section(section: &str, origin: &str) -> SpecError {
    let near = |s: &str| strsim::jaro_winkler(s, section);
    let nearest = sections().max_by(|a, b| near(a).total_cmp(&near(b))).expect("the table is not empty");
    let hint = format!("did you mean `{nearest}`?");
    SpecError::UnknownKey { key: section.into(), origin: origin.into(), hint }
}

fn missing(path: &str) -> SpecError {
    let doc = key(path).map_or("", |k| k.doc);
    let preset = if path.starts_with("model.") {
        format!(" (or choose model.preset: {})", preset_names())
    } else {
        String::new()
    };
    SpecError::Missing { key: path.into(), hint: format!("set it to {doc}{preset}") }
}

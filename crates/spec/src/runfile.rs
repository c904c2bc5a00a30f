//! A run file as typed values with their origins: default < preset < Hugging Face folder < file < `--set`.

use std::collections::{BTreeMap, BTreeSet};

use toml::Value;

use crate::document::{self, Origin, Place};
use crate::error::SpecError;
use crate::faults::Faults;
use crate::hf::HfConfig;
use crate::keys::{KEYS, Key, key, named, sections};
use crate::model::{PRESETS, preset_names};
use crate::typed::typed;

/// Every set key with its value and where it came from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values {
    set: BTreeMap<&'static str, (Value, Origin)>,
    /// Keys whose value was written, and is another than the one beneath it: the default, a preset's, a folder's.
    asked: BTreeSet<&'static str>,
    /// Keys that were set to what they do not take, or may be meant by an unknown key: it is not told that they are unset.
    meant: BTreeSet<&'static str>,
}

impl Values {
    /// Reads `text` (a run file named `name`), then `sets` (`key=value`, the last wins), over presets and defaults. What is
    /// wrong goes to `faults`: broken TOML, unknown or mistyped keys, an unknown preset. None: the file is not TOML.
    pub(crate) fn read(text: &str, name: &str, sets: &[String], faults: &mut Faults) -> Option<Self> {
        let mut written = Self::default();
        let in_file = document::file(text, name, faults);
        let is_toml = in_file.is_some();
        for entry in in_file.into_iter().flatten().chain(document::sets(sets, faults)) {
            written.put(&entry.path, entry.value, entry.origin).unwrap_or_else(|e| faults.add(e));
        }
        if !is_toml {
            return None;
        }
        let mut all = Self::default();
        for known in KEYS.iter().filter(|k| !k.default.is_empty()) {
            let mut table: toml::Table = format!("v = {}", known.default).parse().expect("defaults are TOML");
            let value = table.remove("v").expect("just written");
            all.put(known.path, Ok(value), Origin::other("default")).unwrap_or_else(|e| faults.add(e));
        }
        for shape in ["model.preset", "model.from"] {
            if written.meant.contains(shape) {
                all.meant.extend(model_keys());
            }
        }
        if let Some(preset) = written.text("model.preset") {
            match PRESETS.iter().find(|(name, _)| *name == preset) {
                Some((_, shape)) => {
                    let names = ["hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"];
                    let shape = names.into_iter().zip(shape).map(|(name, n)| (name, Value::Integer(*n as i64)));
                    all.put_model(shape, &format!("preset {preset}"), faults);
                }
                None => {
                    faults.add(written.refuse("model.preset", format!("one of {}", preset_names())));
                    all.meant.extend(model_keys());
                }
            }
        }
        if let Some(folder) = written.text("model.from") {
            all.take_hf(folder, faults);
        }
        let beneath = |key: &str| all.set.get(key).map(|(value, _)| value);
        let asked = written.set.iter().filter(|(key, (value, _))| beneath(key) != Some(value));
        all.asked = asked.map(|(key, _)| *key).collect();
        all.set.append(&mut written.set);
        all.meant.append(&mut written.meant);
        Some(all)
    }

    /// The shape of the model in a Hugging Face folder.
    fn take_hf(&mut self, folder: &str, faults: &mut Faults) {
        let path = std::path::Path::new(folder).join("config.json");
        let Some(HfConfig { model, .. }) = faults.take(HfConfig::read(&path)) else {
            self.meant.extend(model_keys());
            return;
        };
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
        self.put_model(fields, &path.display().to_string(), faults);
    }

    /// Keys of `[model]` that come from elsewhere.
    fn put_model<'a>(&mut self, fields: impl IntoIterator<Item = (&'a str, Value)>, origin: &str, faults: &mut Faults) {
        for (field, value) in fields {
            let put = self.put(&format!("model.{field}"), Ok(value), Origin::other(origin));
            put.unwrap_or_else(|e| faults.add(e));
        }
    }

    fn put(&mut self, path: &str, value: Result<Value, String>, origin: Origin) -> Result<(), SpecError> {
        let wrong = |given: String, expected: String| SpecError::WrongType {
            key: path.into(),
            given,
            origin: origin.clone(),
            expected,
        };
        let Some(known) = key(path) else {
            if sections().any(|section| section == path) {
                let given = value.map_or_else(|given| given, |value| value.to_string());
                return Err(wrong(given, format!("a section, such as [{path}]")));
            }
            let nearest = nearest(path);
            self.meant.insert(nearest);
            let hint = format!("did you mean `{nearest}`?");
            return Err(SpecError::UnknownKey { key: path.into(), origin, hint });
        };
        match typed(known, value) {
            Ok(value) => {
                self.set.insert(known.path, (value, origin));
                Ok(())
            }
            Err(given) => {
                self.meant.insert(known.path);
                Err(wrong(given, known.kind.expected().into()))
            }
        }
    }

    /// Where a sentence's keys were set, in the order in which it names them; those that a person set come first.
    pub(crate) fn places(&self, sentence: &str) -> Vec<(&'static str, &Origin)> {
        let place = |key: &'static str| self.set.get(key).map(|(_, origin)| (key, origin));
        let mut places: Vec<_> = named(sentence).filter_map(place).collect();
        places.sort_by_key(|(_, origin)| origin.place() == Place::Other);
        places
    }

    /// A person may have meant to set it.
    pub(crate) fn is_meant(&self, key: &str) -> bool {
        self.meant.contains(key)
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
        self.set.get(path).is_some_and(|(_, origin)| origin.to_string() != "default")
    }

    /// A count, if set.
    pub fn int(&self, path: &str) -> Option<usize> {
        self.set.get(path).and_then(|(v, _)| v.as_integer()).map(|n| n as usize)
    }

    /// A seed that has a default.
    pub fn seed(&self, path: &str) -> u64 {
        let value = self.set.get(path).map(|(v, _)| v);
        // One that TOML's numbers have no room for is a text.
        let large = |v: &Value| v.as_str().and_then(|text| text.parse().ok());
        value.and_then(|v| v.as_integer().map(|n| n as u64).or_else(|| large(v))).unwrap_or_default()
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
        let (given, origin) = match self.set.get(path) {
            Some((value, origin)) => (value.to_string(), origin.clone()),
            None => ("unset".into(), Origin::other("default")),
        };
        SpecError::WrongType { key: path.into(), given, origin, expected }
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
            let origin = origin.to_string().replace(|c: char| c.is_control(), " ");
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

/// The key that a person may have meant by one that there is not.
fn nearest(path: &str) -> &'static str {
    let name = |full: &str| full.rsplit('.').next().unwrap_or(full).to_owned();
    let nearest = KEYS.iter().map(|k| k.path).max_by(|a, b| {
        let near = |k: &str| strsim::jaro_winkler(k, path).max(0.95 * strsim::jaro_winkler(&name(k), &name(path)));
        // Of two as near, the one that begins like it for longer.
        let alike = |k: &str| k.bytes().zip(path.bytes()).take_while(|(a, b)| a == b).count();
        near(a).total_cmp(&near(b)).then_with(|| alike(a).cmp(&alike(b)))
    });
    nearest.expect("the table is not empty")
}

pub(crate) fn unknown_section(section: &str, origin: &Origin) -> SpecError {
    let near = |s: &str| strsim::jaro_winkler(s, section);
    let nearest = sections().max_by(|a, b| near(a).total_cmp(&near(b))).expect("the table is not empty");
    let hint = format!("did you mean `{nearest}`?");
    SpecError::UnknownKey { key: section.into(), origin: origin.clone(), hint }
}

fn model_keys() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|k| k.path).filter(|path| path.starts_with("model."))
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

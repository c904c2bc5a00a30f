//! Hugging Face `config.json`: to a [`Model`] and back.
//!
//! Nothing is ignored in silence: a key that changes the mathematics is read or refused, a
//! key that nobody here knows is in [`HfConfig::notes`].

mod experts;
mod export;
mod fields;
mod keys;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value};

use self::fields::{Fields, shown};
use crate::error::SpecError;
use crate::model::Model;

pub use export::{Export, Style};

/// Larger files are refused, bytes.
pub const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Models with more parameters are refused.
const PARAMETERS_MAX: u128 = 1 << 50;

/// The architectures that are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// `LlamaForCausalLM`.
    Llama,
    /// `Qwen3ForCausalLM`, dense: norms on query and key heads.
    Qwen3,
    /// `MixtralForCausalLM`.
    Mixtral,
    /// `Qwen3MoeForCausalLM`: experts in every layer.
    Qwen3Moe,
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 4] = [Arch::Llama, Arch::Qwen3, Arch::Mixtral, Arch::Qwen3Moe];

    /// The architecture that is nearest to `model`; [`Arch::holds`] says whether it can express it.
    pub fn of(model: &Model) -> Self {
        match (model.moe.is_some(), model.qk_norm) {
            (false, false) => Arch::Llama,
            (false, true) => Arch::Qwen3,
            (true, false) => Arch::Mixtral,
            (true, true) => Arch::Qwen3Moe,
        }
    }

    /// Refuses a model that no architecture of transformers computes.
    ///
    /// # Errors
    /// [`SpecError::Law`] names what it has that they do not.
    pub fn holds(model: &Model) -> Result<Self, SpecError> {
        let arch = Self::of(model);
        let Some(moe) = &model.moe else { return Ok(arch) };
        if moe.is_plain() && (moe.renorm || arch == Arch::Qwen3Moe) {
            return Ok(arch);
        }
        Err(SpecError::law(
            format!("{} has no form for this model's router", arch.class()),
            format!(
                "router_scores {}, router_renorm {}, router_bias {}, shared_ffn {}, qk_norm {}",
                moe.scores, moe.renorm, moe.bias, moe.shared_ffn, model.qk_norm
            ),
            "only softmax scores without bias and shared expert are written, Mixtral's renormalised; checkpoints hold every model",
        ))
    }

    /// Base of the rotary angles where a file does not say.
    fn rope_theta(self) -> f64 {
        if self == Arch::Mixtral { 1e6 } else { 1e4 }
    }

    /// Key/value heads where a file does not say; `None`: as many as query heads.
    fn kv_heads(self) -> Option<usize> {
        match self {
            Arch::Llama => None,
            Arch::Qwen3 => Some(32),
            Arch::Mixtral => Some(8),
            Arch::Qwen3Moe => Some(4),
        }
    }

    fn norm_eps(self) -> f64 {
        if self == Arch::Mixtral { 1e-5 } else { 1e-6 }
    }

    /// Its files name a window that `use_sliding_window` switches off.
    fn has_window_switch(self) -> bool {
        matches!(self, Arch::Qwen3 | Arch::Qwen3Moe)
    }

    /// Its entry in `architectures`.
    pub fn class(self) -> &'static str {
        match self {
            Arch::Llama => "LlamaForCausalLM",
            Arch::Qwen3 => "Qwen3ForCausalLM",
            Arch::Mixtral => "MixtralForCausalLM",
            Arch::Qwen3Moe => "Qwen3MoeForCausalLM",
        }
    }

    /// Its `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen3 => "qwen3",
            Arch::Mixtral => "mixtral",
            Arch::Qwen3Moe => "qwen3_moe",
        }
    }
}

/// A `config.json` that was understood.
#[derive(Debug, Clone, PartialEq)]
pub struct HfConfig {
    /// The shape it describes.
    pub model: Model,
    /// Its architecture.
    pub arch: Arch,
    /// Type of the stored weights as it is written there (`torch_dtype` or `dtype`). What
    /// counts is the type of each tensor in the files.
    pub dtype: Option<String>,
    /// Longest sequence that the model was made for, tokens.
    pub max_positions: Option<usize>,
    /// What the person should know: keys that are not known, settings that have no effect here.
    pub notes: Vec<String>,
    /// All keys of the file.
    keys: Map<String, Value>,
}

impl HfConfig {
    /// Reads the file `path`.
    ///
    /// # Errors
    /// [`SpecError::Hf`].
    pub fn read(path: &Path) -> Result<Self, SpecError> {
        let shown = path.display().to_string();
        let fault = |what: String, remedy: &str| SpecError::Hf { path: shown.clone(), what, remedy: remedy.into() };
        let absent = "give a Hugging Face folder with config.json and model.safetensors";
        let size = std::fs::metadata(path).map_err(|e| fault(format!("cannot be read: {e}"), absent))?.len();
        if size > CONFIG_BYTES_MAX {
            return Err(fault(format!("it has {size} bytes, at most {CONFIG_BYTES_MAX} are read"), absent));
        }
        let text = std::fs::read_to_string(path).map_err(|e| fault(format!("cannot be read: {e}"), absent))?;
        Self::parse(&shown, &text)
    }

    /// Parses `text`, the content of the file `path` (named in errors only).
    ///
    /// # Errors
    /// [`SpecError::Hf`] names the key, its value and a remedy.
    pub fn parse(path: &str, text: &str) -> Result<Self, SpecError> {
        let fault = |what: String| SpecError::Hf {
            path: path.into(),
            what,
            remedy: "copy config.json again from where the model came from".into(),
        };
        let keys = match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => keys,
            Ok(_) => return Err(fault("it is not a JSON object".into())),
            Err(error) => return Err(fault(format!("it is not JSON: {error}"))),
        };
        let mut notes = Vec::new();
        let fields = Fields { path, map: &keys };
        let arch = arch(fields)?;
        for (key, neutral, asks_for) in keys::NEUTRAL.iter().filter(|(key, ..)| !experts::reads(arch, key)) {
            fields.neutral(key, *neutral, asks_for)?;
        }
        window(fields, arch)?;
        let model = model(fields, arch, &mut notes)?;
        let dtype = fields.text("dtype")?.or(fields.text("torch_dtype")?).map(str::to_owned);
        let max_positions = fields.size("max_position_embeddings")?;
        if fields.number("attention_dropout")?.is_some_and(|share| share != 0.0) {
            let share = &keys["attention_dropout"];
            notes.push(format!("`attention_dropout` = {share} has no effect: nothing is dropped here"));
        }
        for (key, value) in &keys {
            let known = keys::READ.contains(&key.as_str())
                || keys::HARMLESS.contains(&key.as_str())
                || experts::reads(arch, key)
                || keys::NEUTRAL.iter().any(|(name, ..)| name == key);
            if !known {
                notes.push(format!("`{key}` = {} is not known and has no effect", shown(value)));
            }
        }
        Ok(Self { model, arch, dtype, max_positions, notes, keys })
    }

    /// The value of a key of the file as JSON text, such as the token ids.
    pub fn key(&self, key: &str) -> Option<String> {
        self.keys.get(key).map(Value::to_string)
    }
}

/// From `architectures` and `model_type`, which must agree; one of them suffices.
fn arch(fields: Fields<'_>) -> Result<Arch, SpecError> {
    let known = "use a folder of LlamaForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM or Qwen3MoeForCausalLM";
    let by_class = match fields.get("architectures") {
        None => None,
        Some(Value::Array(list)) if list.len() == 1 => {
            let found = Arch::ALL.into_iter().find(|arch| list[0].as_str() == Some(arch.class()));
            Some(found.ok_or_else(|| fields.refuse("architectures", "this architecture is not supported", known))?)
        }
        Some(_) => return Err(fields.refuse("architectures", "not a list of one architecture", known)),
    };
    let by_type = match fields.get("model_type") {
        None => None,
        Some(name) => {
            let found = Arch::ALL.into_iter().find(|arch| name.as_str() == Some(arch.model_type()));
            Some(found.ok_or_else(|| fields.refuse("model_type", "this model type is not supported", known))?)
        }
    };
    match (by_class, by_type) {
        (Some(class), Some(kind)) if class != kind => Err(fields.fault(
            format!("`architectures` is {} but `model_type` is {:?}", class.class(), kind.model_type()),
            "make them agree with the tensors of the folder",
        )),
        (Some(arch), _) | (None, Some(arch)) => Ok(arch),
        (None, None) => Err(fields.fault("neither `architectures` nor `model_type` is set", known)),
    }
}

/// Refuses every form of sliding window that is in use.
fn window(fields: Fields<'_>, arch: Arch) -> Result<(), SpecError> {
    let remedy = "use a model with full attention in every layer";
    if !arch.has_window_switch() && fields.get("sliding_window").is_some() {
        return Err(fields.refuse("sliding_window", "attention over a sliding window is not supported", remedy));
    }
    let Some(types) = fields.get("layer_types") else { return Ok(()) };
    let full = |kinds: &Vec<Value>| kinds.iter().all(|kind| kind.as_str() == Some("full_attention"));
    match types.as_array() {
        Some(kinds) if full(kinds) && Some(kinds.len()) == fields.count("num_hidden_layers")? => Ok(()),
        _ => Err(fields.refuse("layer_types", "every layer must have \"full_attention\"", remedy)),
    }
}

fn model(fields: Fields<'_>, arch: Arch, notes: &mut Vec<String>) -> Result<Model, SpecError> {
    let size = |key| fields.size(key).and_then(|value| fields.need(key, value));
    let count = |key| fields.count(key).and_then(|value| fields.need(key, value));
    let (hidden, heads) = (size("hidden_size")?, count("num_attention_heads")?);
    let kv_heads = match (fields.count("num_key_value_heads")?, arch) {
        (Some(kv_heads), _) => kv_heads,
        (None, arch) => arch.kv_heads().filter(|_| !fields.map.contains_key("num_key_value_heads")).unwrap_or(heads),
    };
    if heads % kv_heads != 0 {
        let why = format!("it does not divide `num_attention_heads` = {heads}");
        return Err(fields.refuse("num_key_value_heads", &why, "write the heads as the model was trained with"));
    }
    let head_dim = match (fields.count("head_dim")?, arch) {
        (Some(head_dim), _) => head_dim,
        (None, Arch::Qwen3) if !fields.map.contains_key("head_dim") => 128,
        (None, _) if hidden % heads == 0 => hidden / heads,
        (None, _) => {
            let what = format!(
                "`head_dim` is not set, and `hidden_size` / `num_attention_heads` = {hidden} / {heads} is not whole"
            );
            return Err(fields.fault(what, "write `head_dim` as the model was trained with"));
        }
    };
    if head_dim % 2 != 0 {
        let what = format!("the width of a head, {head_dim}, is odd, but the rotary embedding turns pairs");
        return Err(fields.fault(what, "write an even `head_dim`"));
    }
    let norm_eps = fields.number("rms_norm_eps")?.unwrap_or(arch.norm_eps());
    if !(0.0..1.0).contains(&norm_eps) {
        return Err(fields.refuse("rms_norm_eps", "not in 0..1", "write it as the model was trained with"));
    }
    let init_std = fields.number("initializer_range")?.unwrap_or(0.02);
    if !(0.0..=1e6).contains(&init_std) {
        return Err(fields.refuse("initializer_range", "not a standard deviation", "write 0.02"));
    }
    let model = Model {
        hidden,
        layers: count("num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim,
        ffn: size("intermediate_size")?,
        vocab: size("vocab_size")?,
        rope_theta: rope(fields, arch, notes)?,
        norm_eps: norm_eps as f32,
        qk_norm: matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe),
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        init_std: init_std as f32,
        moe: experts::read(fields, arch)?,
    };
    let wide = |n: usize| n as u128;
    let attention = wide(hidden) * wide(head_dim) * 2 * (wide(heads) + wide(kv_heads));
    let mlp = match &model.moe {
        Some(moe) => wide(moe.experts) * (wide(hidden) + 3 * wide(hidden) * wide(moe.ffn)),
        None => 3 * wide(hidden) * wide(model.ffn),
    };
    let layer = attention + mlp;
    let parameters = wide(model.layers) * layer + 2 * wide(model.vocab_padded()) * wide(hidden);
    if parameters > PARAMETERS_MAX {
        let what = format!("it describes a model of {parameters} parameters, at most {PARAMETERS_MAX} are read");
        return Err(fields.fault(what, "check the sizes"));
    }
    model.check()?;
    Ok(model)
}

/// The base of the rotary angles. Both styles are read; any scaling is refused.
fn rope(fields: Fields<'_>, arch: Arch, notes: &mut Vec<String>) -> Result<f64, SpecError> {
    let mut found = fields.number("rope_theta")?.map(|theta| ("rope_theta".to_string(), theta));
    for section in ["rope_parameters", "rope_scaling"] {
        let Some(value) = fields.get(section) else { continue };
        let Some(map) = value.as_object() else {
            return Err(fields.refuse(section, "not an object", "remove it"));
        };
        let inner = Fields { path: fields.path, map };
        for (key, value) in map {
            let neutral = match key.as_str() {
                "rope_theta" => true,
                "rope_type" | "type" => value.is_null() || value.as_str() == Some("default"),
                "partial_rotary_factor" => value.is_null() || value.as_f64() == Some(1.0),
                _ => false,
            };
            if !neutral {
                let why =
                    format!("`{key}` = {} asks for a scaled rotary embedding, which is not supported", shown(value));
                return Err(fields.refuse(
                    section,
                    &why,
                    "use a model whose rotary embedding has rope_type \"default\"",
                ));
            }
        }
        let Some(theta) = inner.number("rope_theta")? else { continue };
        let name = format!("{section}.rope_theta");
        match &found {
            Some((other, first)) if *first != theta => {
                let what = format!("`{other}` = {first} but `{name}` = {theta}");
                return Err(fields.fault(what, "keep the one that the model was trained with"));
            }
            _ => found = Some((name, theta)),
        }
    }
    let set = found.is_some();
    let theta = found.map_or(arch.rope_theta(), |(_, theta)| theta);
    if theta <= 1.0 {
        return Err(
            fields.fault(format!("`rope_theta` = {theta} is not above 1"), "write it as the model was trained with")
        );
    }
    if !set {
        notes.push(format!("`rope_theta` is not set: {theta} is used"));
    }
    Ok(theta)
}

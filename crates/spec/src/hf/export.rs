//! [`Model`] to `config.json`.

use serde_json::{Map, Number, Value, json};

use super::{Arch, HfConfig, experts};
use crate::model::Model;

/// The two ways to write the rotary base and the type of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Style {
    /// `rope_theta`, `torch_dtype`: the public checkpoints; every version of transformers reads it.
    #[default]
    Public,
    /// `rope_parameters`, `dtype`: as transformers 5 writes it; version 4 would not see the base.
    Hf5,
}

/// What is written beside the shape.
#[derive(Debug, Clone, Copy)]
pub struct Export<'a> {
    /// How.
    pub style: Style,
    /// Type of the stored weights: `float32` or `bfloat16`.
    pub dtype: &'a str,
    /// Longest sequence, tokens, where `base` does not say.
    pub max_positions: usize,
    /// Id of the token that ends a document, where `base` does not say.
    pub eos_token_id: Option<usize>,
    /// The config that the model came with: its other keys are kept.
    pub base: Option<&'a HfConfig>,
}

impl Export<'_> {
    /// The text of a `config.json` for `model`, keys sorted, with a line end.
    pub fn config_json(&self, model: &Model) -> String {
        let arch = Arch::of(model);
        let mut keys = Map::new();
        // Set where the base does not say.
        keys.insert("attention_bias".into(), json!(false));
        keys.insert("attention_dropout".into(), json!(0.0));
        keys.insert("bos_token_id".into(), Value::Null);
        keys.insert("eos_token_id".into(), json!(self.eos_token_id));
        keys.insert("pad_token_id".into(), Value::Null);
        keys.insert("hidden_act".into(), json!("silu"));
        keys.insert("max_position_embeddings".into(), json!(self.max_positions));
        keys.insert("use_cache".into(), json!(true));
        match arch {
            Arch::Llama => drop(keys.insert("mlp_bias".into(), json!(false))),
            Arch::Mixtral => {}
            Arch::Qwen3 | Arch::Qwen3Moe => drop(keys.insert("use_sliding_window".into(), json!(false))),
        };
        experts::write_defaults(model, &mut keys);
        if let Some(base) = self.base {
            keys.extend(base.keys.clone());
        }
        for old in ["rope_theta", "rope_parameters", "rope_scaling", "torch_dtype", "dtype"] {
            keys.remove(old);
        }
        if !arch.has_window_switch() {
            keys.remove("sliding_window");
        }
        if self.base.is_some_and(|base| base.model.layers != model.layers) {
            keys.remove("layer_types");
        }
        keys.insert("architectures".into(), json!([arch.class()]));
        keys.insert("model_type".into(), json!(arch.model_type()));
        keys.insert("hidden_size".into(), json!(model.hidden));
        keys.insert("intermediate_size".into(), json!(model.ffn));
        keys.insert("num_hidden_layers".into(), json!(model.layers));
        keys.insert("num_attention_heads".into(), json!(model.heads));
        keys.insert("num_key_value_heads".into(), json!(model.kv_heads));
        keys.insert("head_dim".into(), json!(model.head_dim));
        keys.insert("vocab_size".into(), json!(model.vocab));
        keys.insert("tie_word_embeddings".into(), json!(model.tied));
        experts::write(model, arch, &mut keys);
        self.insert_f32(&mut keys, "rms_norm_eps", model.norm_eps);
        self.insert_f32(&mut keys, "initializer_range", model.init_std);
        match self.style {
            Style::Public => {
                keys.insert("rope_theta".into(), json!(model.rope_theta));
                keys.insert("torch_dtype".into(), json!(self.dtype));
            }
            Style::Hf5 => {
                let rope = json!({"rope_theta": model.rope_theta, "rope_type": "default"});
                keys.insert("rope_parameters".into(), rope);
                keys.insert("dtype".into(), json!(self.dtype));
            }
        }
        let text = serde_json::to_string_pretty(&Value::Object(keys)).expect("plain data has a JSON form");
        text + "\n"
    }

    /// Keeps the number of the base where it means `value`; else the shortest one that does.
    fn insert_f32(&self, keys: &mut Map<String, Value>, key: &str, value: f32) {
        let same = |old: &Value| old.as_f64().is_some_and(|old| old as f32 == value);
        if self.base.is_some_and(|base| base.keys.get(key).is_some_and(same)) {
            return;
        }
        let shortest = value.to_string().parse().ok().and_then(Number::from_f64);
        keys.insert(key.into(), shortest.map_or(Value::Null, Value::Number));
    }
}

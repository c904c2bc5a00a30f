//! Laws of `config.json`: both styles, defaults, every refusal, round trips.

use serde_json::{Value, json};

use super::*;

/// A public Llama config with keys set over it; `null` stays `null`.
fn llama(over: Value) -> String {
    with(
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
            "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "float32",
        }),
        over,
    )
}

fn qwen3(over: Value) -> String {
    with(
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
            "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "use_sliding_window": false, "sliding_window": null, "max_window_layers": 36,
            "bos_token_id": 151643, "eos_token_id": 151645,
        }),
        over,
    )
}

fn with(mut base: Value, over: Value) -> String {
    let map = base.as_object_mut().unwrap();
    map.extend(over.as_object().unwrap().clone());
    map.retain(|_, value| value != "REMOVED");
    base.to_string()
}

fn parse(text: &str) -> HfConfig {
    HfConfig::parse("config.json", text).unwrap()
}

/// The whole error text of what must be refused.
fn refused(text: &str) -> String {
    let error = HfConfig::parse("some/config.json", text).unwrap_err();
    assert!(matches!(error, SpecError::Hf { .. }), "{error:?}");
    let shown = error.to_string();
    assert!(shown.starts_with("some/config.json: ") && shown.contains("remedy: "), "{shown}");
    shown
}

#[test]
fn llama_in_both_styles() {
    let public = parse(&llama(json!({})));
    let model = Model {
        hidden: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 176,
        vocab: 256,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        qk_norm: false,
        tied: false,
        init_std: 0.02,
        moe: None,
    };
    assert_eq!((&public.model, public.arch), (&model, Arch::Llama));
    assert_eq!(public.notes, Vec::<String>::new());
    let hf5 = parse(&llama(json!({
        "rope_theta": "REMOVED", "torch_dtype": "REMOVED", "dtype": "float32", "head_dim": 16,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    })));
    assert_eq!((hf5.model, hf5.dtype.as_deref()), (model, Some("float32")));
    assert_eq!(hf5.notes, Vec::<String>::new());
}

#[test]
fn qwen3_has_norms_on_heads() {
    let config = parse(&qwen3(json!({})));
    assert_eq!(config.arch, Arch::Qwen3);
    assert!(config.model.qk_norm && config.model.tied);
    assert_eq!((config.model.head_dim, config.model.rope_theta, config.model.vocab), (32, 1e6, 151_936));
    assert_eq!(config.notes, Vec::<String>::new());
    assert_eq!(config.key("eos_token_id").as_deref(), Some("151645"));
}

#[test]
fn defaults_are_those_of_the_architecture() {
    let gone = json!({
        "num_key_value_heads": "REMOVED", "rms_norm_eps": "REMOVED", "rope_theta": "REMOVED",
        "tie_word_embeddings": "REMOVED", "architectures": "REMOVED", "hidden_act": null,
    });
    let config = parse(&llama(gone));
    let model = &config.model;
    assert_eq!((model.kv_heads, model.norm_eps, model.rope_theta, model.tied), (4, 1e-6, 1e4, false));
    assert!(config.notes.len() == 1 && config.notes[0].contains("rope_theta"), "{:?}", config.notes);
    let gone = json!({
        "num_attention_heads": 64, "num_key_value_heads": "REMOVED", "head_dim": "REMOVED",
        "tie_word_embeddings": "REMOVED", "model_type": "REMOVED",
    });
    let model = parse(&qwen3(gone)).model;
    assert_eq!((model.kv_heads, model.head_dim, model.tied), (32, 128, false));
    // Null is not absent: the width of a head then follows from the others.
    assert_eq!(parse(&llama(json!({"head_dim": null}))).model.head_dim, 16);
}

#[test]
fn what_changes_the_mathematics_is_refused_by_name() {
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192});
    let cases = [
        ("architectures", json!(["MixtralForCausalLM"])),
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("architectures", json!(["LlamaForCausalLM", "Qwen3ForCausalLM"])),
        ("architectures", json!("LlamaForCausalLM")),
        ("model_type", json!("mistral")),
        ("model_type", json!("qwen3")),
        ("model_type", json!("qwen3_moe")),
        ("rope_scaling", scaling.clone()),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
        ("rope_scaling", json!("linear")),
        ("rope_scaling", json!({"factor": 2.0})),
        ("rope_parameters", scaling),
        ("rope_parameters", json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})),
        ("rope_parameters", json!({"rope_type": "default", "partial_rotary_factor": 0.5})),
        ("rope_parameters", json!({"full_attention": {"rope_type": "default", "rope_theta": 1e4}})),
        ("rope_parameters", json!({"rope_type": "default", "rope_theta": 5e5})),
        ("rope_theta", json!("10000")),
        ("rope_theta", json!(0.5)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("use_sliding_window", json!(true)),
        ("sliding_window", json!(4096)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("layer_types", json!(["full_attention"])),
        ("partial_rotary_factor", json!(0.5)),
        ("quantization_config", json!({"quant_method": "fp8"})),
        ("pretraining_tp", json!(2)),
        ("auto_map", json!({"AutoModel": "modeling.Mine"})),
        ("embedding_multiplier", json!(12.0)),
        ("num_local_experts", json!(8)),
        ("hidden_size", json!("REMOVED")),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(64.5)),
        ("hidden_size", json!(-64)),
        ("vocab_size", json!(u64::MAX)),
        ("num_hidden_layers", json!(1_000_000_000_000_u64)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(15)),
        ("rms_norm_eps", json!("1e-5")),
        ("rms_norm_eps", json!(-1.0)),
        ("tie_word_embeddings", json!("yes")),
        ("torch_dtype", json!(32)),
        ("initializer_range", json!(-0.02)),
    ];
    for (key, value) in cases {
        let shown = refused(&llama(json!({key: value})));
        assert!(shown.contains(&format!("`{key}")) || shown.contains(&format!("{key}`")), "{key}: {shown}");
    }
    // The product of sizes that are possible by themselves.
    let huge = json!({"hidden_size": 1 << 28, "intermediate_size": 1 << 28, "num_hidden_layers": 1 << 16});
    assert!(refused(&llama(huge)).contains("parameters"));
    assert!(refused(&llama(json!({"hidden_size": 66}))).contains("head_dim"));
    assert!(
        refused(&qwen3(json!({"layer_types": ["sliding_attention", "sliding_attention"]}))).contains("layer_types")
    );
    assert!(refused(&qwen3(json!({"architectures": "REMOVED", "model_type": null}))).contains("neither"));
    for text in ["", "{", "[]", "null", "{\"hidden_size\": NaN}"] {
        refused(text);
    }
}

#[test]
fn neutral_values_pass_in_silence() {
    let neutral = json!({
        "rope_scaling": {"rope_type": "default"}, "attention_bias": false, "mlp_bias": false,
        "use_sliding_window": false, "sliding_window": null, "layer_types": ["full_attention", "full_attention"],
        "partial_rotary_factor": 1.0, "quantization_config": null, "pretraining_tp": 1, "pruned_heads": {},
        "attention_dropout": 0.0, "bos_token_id": 1, "transformers_version": "4.40.0", "use_cache": true,
    });
    assert_eq!(parse(&llama(neutral)).notes, Vec::<String>::new());
    // A window that is switched off.
    assert_eq!(parse(&qwen3(json!({"sliding_window": 4096}))).notes, Vec::<String>::new());
}

#[test]
fn unknown_keys_are_told() {
    let config = parse(&llama(json!({"my_key": 3, "long": "x".repeat(500), "attention_dropout": 0.1})));
    assert_eq!(config.notes.len(), 3, "{:?}", config.notes);
    assert!(config.notes.iter().any(|note| note.contains("`my_key` = 3")));
    assert!(config.notes.iter().all(|note| note.len() < 160), "{:?}", config.notes);
}

#[test]
fn export_and_import_is_the_identity() {
    let texts = [llama(json!({"bos_token_id": 1, "my_key": [1, 2], "rms_norm_eps": 1.00000001e-5})), qwen3(json!({}))];
    for text in texts {
        let config = parse(&text);
        for style in [Style::Public, Style::Hf5] {
            for base in [Some(&config), None] {
                let export = Export { style, dtype: "bfloat16", max_positions: 77, eos_token_id: Some(3), base };
                let written = export.config_json(&config.model);
                let again = parse(&written);
                assert_eq!((&again.model, again.arch), (&config.model, config.arch));
                assert_eq!(again.dtype.as_deref(), Some("bfloat16"));
                let styles = (again.keys.contains_key("rope_theta"), again.keys.contains_key("rope_parameters"));
                assert_eq!(styles, (style == Style::Public, style == Style::Hf5));
                if base.is_none() {
                    assert_eq!((again.max_positions, again.key("eos_token_id")), (Some(77), Some("3".into())));
                    assert_eq!(again.notes, Vec::<String>::new());
                    continue;
                }
                let kept = ["bos_token_id", "eos_token_id", "my_key", "rms_norm_eps", "max_window_layers"];
                for key in kept.into_iter().filter(|key| config.keys.contains_key(*key)) {
                    assert_eq!(again.keys[key], config.keys[key], "{key}");
                }
            }
        }
    }
}

#[test]
fn another_model_under_an_old_config() {
    let base = parse(&qwen3(json!({"layer_types": ["full_attention", "full_attention"], "sliding_window": 4096})));
    let model = Model { qk_norm: false, layers: 3, norm_eps: 3e-4, ..base.model.clone() };
    let export =
        Export { style: Style::Public, dtype: "float32", max_positions: 8, eos_token_id: None, base: Some(&base) };
    assert_eq!(parse(&export.config_json(&model)).model, model);
}

proptest::proptest! {
    /// Whatever the file says: a model that obeys its laws, or a refusal; never a panic.
    #[test]
    fn garbage_never_panics(
        key in proptest::sample::select(keys::READ.to_vec()),
        number in proptest::num::f64::ANY,
        kind in 0..6,
        cut in 0..400usize,
    ) {
        let value = match kind {
            0 => json!(number),
            1 => json!(number as i64),
            2 => json!([number]),
            3 => json!({"rope_theta": number, "rope_type": null}),
            4 => json!(number.to_string()),
            _ => json!(number > 0.0),
        };
        let text = llama(json!({key: value}));
        if let Ok(config) = HfConfig::parse("config.json", &text) {
            proptest::prop_assert!(config.model.check().is_ok());
        }
        let end = cut.min(text.len() - 1);
        proptest::prop_assert!(HfConfig::parse("config.json", &text[..end]).is_err());
    }
}

fn mixtral(over: Value) -> String {
    with(
        json!({
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0, "sliding_window": null,
        }),
        over,
    )
}

fn qwen3_moe(over: Value) -> String {
    with(
        json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
            "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "vocab_size": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": false,
        }),
        over,
    )
}

#[test]
fn experts_in_both_architectures() {
    let config = parse(&mixtral(json!({})));
    let moe = config.model.moe.clone().unwrap();
    assert_eq!((config.arch, config.notes.len()), (Arch::Mixtral, 0));
    assert_eq!((moe.experts, moe.per_token, moe.ffn, moe.renorm, moe.aux_loss), (4, 2, 96, true, 0.0));
    let on = parse(&mixtral(json!({"output_router_logits": true}))).model.moe.unwrap();
    assert_eq!((on.aux_loss, on.aux_scope), (0.02, crate::moe::AuxScope::Pooled));
    let config = parse(&qwen3_moe(json!({})));
    let moe = config.model.moe.clone().unwrap();
    assert_eq!((config.arch, config.model.qk_norm, config.notes.len()), (Arch::Qwen3Moe, true, 0));
    assert_eq!((moe.experts, moe.per_token, moe.ffn, moe.renorm), (8, 3, 48, true));
    let defaults = parse(&qwen3_moe(json!({"norm_topk_prob": "REMOVED", "num_experts": "REMOVED"}))).model.moe.unwrap();
    assert_eq!((defaults.experts, defaults.renorm), (128, false));
    let newer = parse(&qwen3_moe(json!({"num_experts": "REMOVED", "num_local_experts": 6})));
    assert_eq!((newer.model.moe.unwrap().experts, newer.notes.len()), (6, 0));
}

#[test]
fn experts_that_are_not_supported_are_named() {
    let cases = [
        (mixtral(json!({"router_jitter_noise": 0.1})), "router_jitter_noise"),
        (mixtral(json!({"num_experts_per_tok": 5})), "num_experts_per_tok"),
        (mixtral(json!({"sliding_window": 4096})), "sliding_window"),
        (qwen3_moe(json!({"decoder_sparse_step": 2})), "decoder_sparse_step"),
        (qwen3_moe(json!({"mlp_only_layers": [0]})), "mlp_only_layers"),
        (qwen3_moe(json!({"n_routed_experts": 8})), "n_routed_experts"),
    ];
    for (text, key) in cases {
        assert!(refused(&text).contains(key), "{key}");
    }
}

#[test]
fn experts_survive_export_and_import() {
    for text in [mixtral(json!({"output_router_logits": true})), qwen3_moe(json!({"norm_topk_prob": false}))] {
        let config = parse(&text);
        assert_eq!(Arch::holds(&config.model).unwrap(), config.arch);
        for base in [Some(&config), None] {
            let export = Export { style: Style::Public, dtype: "float32", max_positions: 8, eos_token_id: None, base };
            let again = parse(&export.config_json(&config.model));
            assert_eq!((&again.model.moe, again.arch), (&config.model.moe, config.arch));
            assert_eq!(again.notes, Vec::<String>::new());
        }
        let moe = config.model.moe.clone().map(|moe| crate::moe::Moe { shared_ffn: 8, ..moe });
        assert!(Arch::holds(&Model { moe, ..config.model }).unwrap_err().to_string().contains("shared_ffn 8"));
    }
}

//! The keys of a `config.json` that describe experts.

use serde_json::{Map, Value, json};

use super::Arch;
use super::fields::Fields;
use crate::error::SpecError;
use crate::model::Model;
use crate::moe::{AuxScope, Moe, Scores};

/// Number of experts: the key in Mixtral, the key in Qwen3-MoE; transformers 5 writes the first for both.
const EXPERTS: [&str; 2] = ["num_local_experts", "num_experts"];
const AUX: &str = "router_aux_loss_coef";
const AUX_ON: &str = "output_router_logits";

/// Keys that `arch` has for its experts.
pub(super) fn reads(arch: Arch, key: &str) -> bool {
    match arch {
        Arch::Llama | Arch::Qwen3 => false,
        Arch::Mixtral => [EXPERTS[0], "num_experts_per_tok", AUX, AUX_ON, "router_jitter_noise"].contains(&key),
        Arch::Qwen3Moe => [
            EXPERTS[0],
            EXPERTS[1],
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
            AUX,
            AUX_ON,
        ]
        .contains(&key),
    }
}

/// The experts of a model of `arch`.
pub(super) fn read(fields: Fields<'_>, arch: Arch) -> Result<Option<Moe>, SpecError> {
    let mixtral = match arch {
        Arch::Llama | Arch::Qwen3 => return Ok(None),
        Arch::Mixtral => true,
        Arch::Qwen3Moe => false,
    };
    let (experts_key, experts, per_token) = if mixtral { (EXPERTS[0], 8, 2) } else { (EXPERTS[1], 128, 8) };
    let said = match fields.count(experts_key)? {
        None if !mixtral => fields.count(EXPERTS[0])?,
        said => said,
    };
    let experts = said.unwrap_or(experts);
    let per_token = fields.count("num_experts_per_tok")?.unwrap_or(per_token);
    if per_token > experts {
        let why = format!("there are `{experts_key}` = {experts} experts");
        return Err(fields.refuse("num_experts_per_tok", &why, "write it as the model was trained with"));
    }
    let ffn = if mixtral {
        let size = fields.size("intermediate_size")?;
        fields.need("intermediate_size", size)?
    } else {
        fields.size("moe_intermediate_size")?.unwrap_or(768)
    };
    if fields.number("router_jitter_noise")?.is_some_and(|noise| noise != 0.0) {
        return Err(fields.refuse("router_jitter_noise", "noise on the router is not supported", "write 0.0"));
    }
    let all_sparse = "use a model with experts in every layer";
    if fields.count("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        return Err(fields.refuse("decoder_sparse_step", "layers without experts are not supported", all_sparse));
    }
    if fields.get("mlp_only_layers").is_some_and(|layers| layers.as_array().is_none_or(|l| !l.is_empty())) {
        return Err(fields.refuse("mlp_only_layers", "layers without experts are not supported", all_sparse));
    }
    let aux = fields.number(AUX)?.unwrap_or(0.001);
    if !(0.0..=1e6).contains(&aux) {
        return Err(fields.refuse(AUX, "not in 0..=1e6", "write the coefficient that the model was trained with"));
    }
    // The rule of transformers: without the logits of the routers there is no auxiliary loss.
    let on = fields.flag(AUX_ON)?.unwrap_or(false);
    Ok(Some(Moe {
        experts,
        per_token,
        ffn,
        shared_ffn: 0,
        scores: Scores::Softmax,
        renorm: mixtral || fields.flag("norm_topk_prob")?.unwrap_or(false),
        bias: false,
        bias_rate: 0.0,
        aux_loss: if on { aux } else { 0.0 },
        aux_scope: AuxScope::Pooled,
    }))
}

/// Keys that a base may override.
pub(super) fn write_defaults(model: &Model, keys: &mut Map<String, Value>) {
    if model.moe.is_some() {
        keys.insert(AUX.into(), json!(0.001));
    }
}

/// Keys that follow from the model.
pub(super) fn write(model: &Model, arch: Arch, keys: &mut Map<String, Value>) {
    let Some(moe) = &model.moe else { return };
    keys.insert("num_experts_per_tok".into(), json!(moe.per_token));
    if arch == Arch::Mixtral {
        keys.insert(EXPERTS[0].into(), json!(moe.experts));
        keys.insert("intermediate_size".into(), json!(moe.ffn));
        keys.insert("router_jitter_noise".into(), json!(0.0));
    } else {
        keys.insert(EXPERTS[1].into(), json!(moe.experts));
        // Whatever the base called it.
        keys.entry(EXPERTS[0]).and_modify(|value| *value = json!(moe.experts));
        keys.insert("moe_intermediate_size".into(), json!(moe.ffn));
        keys.insert("norm_topk_prob".into(), json!(moe.renorm));
        keys.insert("decoder_sparse_step".into(), json!(1));
        keys.insert("mlp_only_layers".into(), json!([]));
    }
    // Only the pooled form is transformers' own; another one would not be what it computes.
    let on = moe.aux_loss > 0.0 && moe.aux_scope == AuxScope::Pooled;
    keys.insert(AUX_ON.into(), json!(on));
    if on {
        keys.insert(AUX.into(), json!(moe.aux_loss));
    }
}

//! The parameters of a model: names, shapes, and how the tensor cells divide them.
//!
//! Names are those of the public Hugging Face checkpoints; matrices are stored [out, in].

use std::ops::Range;

use crate::model::Model;

/// State is hashed, summed (gradient norm) and sharded in chunks of this many elements,
/// counted inside each (tensor, tensor cell) slice.
pub const STATE_CHUNK: usize = 16 * 1024;

/// How the tensor cells divide a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Every cell holds all of it.
    Whole,
    /// Contiguous parts of the rows (column-parallel: the output dimension).
    Rows,
    /// Contiguous parts of the columns (row-parallel: the input dimension).
    Cols,
}

/// The part of the model that a tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Home {
    /// The input embedding: before the first layer.
    Embed,
    /// A decoder layer.
    Layer(usize),
    /// Final norm and output projection: after the last layer.
    Head,
}

/// What a tensor is for; names its place in the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Role {
    Embed,
    AttnNorm,
    Q,
    K,
    V,
    QNorm,
    KNorm,
    O,
    MlpNorm,
    Gate,
    Up,
    Down,
    /// Logits of the experts.
    Router,
    /// Balancing bias of the choice; moved by counts, not by gradients.
    RouterBias,
    ExpertGate(usize),
    ExpertUp(usize),
    ExpertDown(usize),
    SharedGate,
    SharedUp,
    SharedDown,
    FinalNorm,
    LmHead,
}

impl Role {
    /// One of a layer's experts that not every token passes.
    pub fn is_expert(self) -> bool {
        self.expert().is_some()
    }

    /// Which of them.
    pub fn expert(self) -> Option<usize> {
        match self {
            Role::ExpertGate(e) | Role::ExpertUp(e) | Role::ExpertDown(e) => Some(e),
            _ => None,
        }
    }

    /// Weights that every tensor cell applies whole to its own sequence slice: their gradient has a leaf per tensor
    /// cell and step, not per microbatch.
    pub fn is_per_slice(self) -> bool {
        self.is_expert() || matches!(self, Role::SharedGate | Role::SharedUp | Role::SharedDown)
    }

    /// Whole tensors whose gradient is summed over the sequence slices at every microbatch: norms and routers.
    pub fn is_norm_like(self) -> bool {
        use Role::{AttnNorm, FinalNorm, KNorm, MlpNorm, QNorm, Router};
        matches!(self, AttnNorm | QNorm | KNorm | MlpNorm | FinalNorm | Router)
    }

    /// False for what no gradient moves.
    pub fn is_trained(self) -> bool {
        self != Role::RouterBias
    }
}

/// One parameter tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Its name in a Hugging Face folder.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Where it lives.
    pub home: Home,
    /// Output dimension; for the embedding and the output projection the padded vocabulary; 1 for vectors.
    pub rows: usize,
    /// Input dimension, or the length of a vector.
    pub cols: usize,
    /// Rows that are not padding; the rest starts at zero, gets no gradient and is never exported.
    pub real_rows: usize,
    /// How the tensor cells divide it.
    pub cut: Cut,
    /// Standard deviation of its initial values (0: zeros); `None`: ones.
    pub init_std: Option<f32>,
}

impl Tensor {
    /// Weight decay is for matrices only.
    pub fn decays(&self) -> bool {
        self.rows > 1
    }

    /// Number of slices under `tp` tensor cells.
    pub fn slices(&self, tp: usize) -> usize {
        if self.cut == Cut::Whole { 1 } else { tp }
    }

    /// Rows and columns of the slice of tensor cell `t` of `tp`.
    pub fn slice(&self, t: usize, tp: usize) -> (Range<usize>, Range<usize>) {
        let part = |n: usize| t * (n / tp)..(t + 1) * (n / tp);
        match self.cut {
            Cut::Whole => (0..self.rows, 0..self.cols),
            Cut::Rows => (part(self.rows), 0..self.cols),
            Cut::Cols => (0..self.rows, part(self.cols)),
        }
    }

    /// Elements of one slice under `tp` tensor cells.
    pub fn slice_len(&self, tp: usize) -> usize {
        self.rows * self.cols / self.slices(tp)
    }

    /// Elements that are not padding.
    pub fn real_len(&self) -> usize {
        self.real_rows * self.cols
    }
}

/// All tensors of `model` in canonical order (the order of the digest): embedding, layers ascending, head.
pub fn tensors(model: &Model) -> Vec<Tensor> {
    let mut all = vec![embedding(model)];
    for layer in 0..model.layers {
        all.extend(layer_tensors(model, layer));
    }
    all.push(vector("model.norm.weight".into(), Role::FinalNorm, Home::Head, model.hidden));
    if !model.tied {
        all.push(Tensor { name: "lm_head.weight".into(), role: Role::LmHead, home: Home::Head, ..embedding(model) });
    }
    all
}

fn embedding(model: &Model) -> Tensor {
    Tensor {
        name: "model.embed_tokens.weight".into(),
        role: Role::Embed,
        home: Home::Embed,
        rows: model.vocab_padded(),
        cols: model.hidden,
        real_rows: model.vocab,
        cut: Cut::Rows,
        init_std: Some(model.init_std),
    }
}

fn vector(name: String, role: Role, home: Home, cols: usize) -> Tensor {
    Tensor { name, role, home, rows: 1, cols, real_rows: 1, cut: Cut::Whole, init_std: None }
}

fn layer_tensors(model: &Model, layer: usize) -> Vec<Tensor> {
    let home = Home::Layer(layer);
    let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
    let residual_std = model.init_std / (2.0 * model.layers as f32).sqrt();
    let matrix = |part: &str, role, rows, cols, cut, std| Tensor {
        name: name(part),
        role,
        home,
        rows,
        cols,
        real_rows: rows,
        cut,
        init_std: Some(std),
    };
    let (h, f, std) = (model.hidden, model.ffn, model.init_std);
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let mut all = vec![
        vector(name("input_layernorm"), Role::AttnNorm, home, h),
        matrix("self_attn.q_proj", Role::Q, q, h, Cut::Rows, std),
        matrix("self_attn.k_proj", Role::K, kv, h, Cut::Rows, std),
        matrix("self_attn.v_proj", Role::V, kv, h, Cut::Rows, std),
    ];
    if model.qk_norm {
        all.push(vector(name("self_attn.q_norm"), Role::QNorm, home, model.head_dim));
        all.push(vector(name("self_attn.k_norm"), Role::KNorm, home, model.head_dim));
    }
    all.extend([
        matrix("self_attn.o_proj", Role::O, h, q, Cut::Cols, residual_std),
        vector(name("post_attention_layernorm"), Role::MlpNorm, home, h),
    ]);
    let Some(moe) = &model.moe else {
        all.extend([
            matrix("mlp.gate_proj", Role::Gate, f, h, Cut::Rows, std),
            matrix("mlp.up_proj", Role::Up, f, h, Cut::Rows, std),
            matrix("mlp.down_proj", Role::Down, h, f, Cut::Cols, residual_std),
        ]);
        return all;
    };
    // Mixtral has names of its own; all others follow Qwen3-MoE and DeepSeek-V3.
    let mixtral = moe.is_plain() && !model.qk_norm;
    let (block, [gate, up, down]) =
        if mixtral { ("block_sparse_moe", ["w1", "w3", "w2"]) } else { ("mlp", ["gate_proj", "up_proj", "down_proj"]) };
    all.push(matrix(&format!("{block}.gate"), Role::Router, moe.experts, h, Cut::Whole, std));
    if moe.bias {
        let name = format!("model.layers.{layer}.{block}.gate.e_score_correction_bias");
        let bias = vector(name, Role::RouterBias, home, moe.experts);
        all.push(Tensor { init_std: Some(0.0), ..bias });
    }
    let mut swiglu = |path: &str, roles: [Role; 3], f: usize| {
        let part = |name: &str| format!("{path}.{name}");
        all.push(matrix(&part(gate), roles[0], f, h, Cut::Whole, std));
        all.push(matrix(&part(up), roles[1], f, h, Cut::Whole, std));
        all.push(matrix(&part(down), roles[2], h, f, Cut::Whole, residual_std));
    };
    for e in 0..moe.experts {
        let roles = [Role::ExpertGate(e), Role::ExpertUp(e), Role::ExpertDown(e)];
        swiglu(&format!("{block}.experts.{e}"), roles, moe.ffn);
    }
    if moe.shared_ffn > 0 {
        swiglu(
            &format!("{block}.shared_experts"),
            [Role::SharedGate, Role::SharedUp, Role::SharedDown],
            moe.shared_ffn,
        );
    }
    all
}

/// Parameters of the model, without padding, the tied matrix counted once.
pub fn parameters(model: &Model) -> u64 {
    tensors(model).iter().map(|t| t.real_len() as u64).sum()
}

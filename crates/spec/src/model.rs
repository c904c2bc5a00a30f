//! The shape of a decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (dense or experts).

use crate::error::SpecError;
use crate::faults::Faults;
use crate::moe::Moe;

/// The vocabulary is padded to a multiple of this, whatever the number of tensor cells.
pub const VOCAB_MULTIPLE: usize = 64;

/// The shape of the model. Sizes are in elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even, free of `hidden / heads`.
    pub head_dim: usize,
    /// Inner width of the SwiGLU; with experts it only stands in `config.json`.
    pub ffn: usize,
    /// Token ids run from 0 to `vocab - 1`.
    pub vocab: usize,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Added to the mean square inside every RMSNorm.
    pub norm_eps: f32,
    /// RMSNorm on each query and key head before the rotation.
    pub qk_norm: bool,
    /// The output projection is the embedding matrix.
    pub tied: bool,
    /// Standard deviation of the initial matrices; the two that write to the residual
    /// stream get it divided by sqrt(2 x layers).
    pub init_std: f32,
    /// Experts in place of the SwiGLU of every layer.
    pub moe: Option<Moe>,
}

/// (name, hidden, layers, heads, kv heads, head_dim, ffn, vocab): the shapes that `model.preset` knows.
pub const PRESETS: &[(&str, [usize; 7])] = &[
    ("nano", [32, 4, 4, 2, 8, 96, 257]),
    ("tiny", [64, 4, 4, 2, 16, 176, 257]),
    ("demo", [128, 4, 4, 2, 32, 352, 257]),
    ("S", [128, 4, 4, 4, 32, 344, 256]),
    ("M", [256, 4, 8, 4, 32, 704, 4096]),
    ("L", [512, 8, 8, 4, 64, 1408, 8192]),
];

impl Model {
    /// Rows of the embedding and output matrices: `vocab` padded to [`VOCAB_MULTIPLE`].
    pub fn vocab_padded(&self) -> usize {
        self.vocab.next_multiple_of(VOCAB_MULTIPLE)
    }

    /// Parameters used by the products of a token: all matrices but the input embedding (the output
    /// projection counts also where it is tied); of the experts only the chosen ones.
    pub fn product_parameters(&self) -> u64 {
        let attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads);
        let mlp = self.moe.as_ref().map_or(3 * self.hidden * self.ffn, |moe| moe.active_parameters(self.hidden));
        (self.layers * (attention + mlp) + self.vocab * self.hidden) as u64
    }

    /// Model FLOPs per token, forward and backward, causal attention:
    /// 6 x product parameters + 6 x layers x heads x head_dim x seq (design section 7).
    pub fn flops_per_token(&self, seq: usize) -> f64 {
        6.0 * self.product_parameters() as f64 + 6.0 * (self.layers * self.heads * self.head_dim * seq) as f64
    }

    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let mut faults = Faults::default();
        let positive = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
        ];
        for (key, value) in positive {
            if value == 0 {
                faults.law(
                    format!("model.{key} = 0: every size of the model is at least 1"),
                    format!("model.{key} = 0"),
                    format!("set model.{key}, or model.preset to one of {}", preset_names()),
                );
            }
        }
        if self.kv_heads > 0 && !self.heads.is_multiple_of(self.kv_heads) {
            faults.law(
                format!("model.kv_heads = {} does not divide model.heads = {}", self.kv_heads, self.heads),
                format!("heads {}, kv_heads {}", self.heads, self.kv_heads),
                format!("set model.kv_heads to one of {:?}", divisors(self.heads)),
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            faults.law(
                format!("model.head_dim = {} is odd: the rotary embedding turns pairs", self.head_dim),
                format!("head_dim {}", self.head_dim),
                format!("set model.head_dim to {} or {}", self.head_dim - 1, self.head_dim + 1),
            );
        }
        if !(self.rope_theta > 1.0 && self.norm_eps >= 0.0 && self.init_std >= 0.0) {
            faults.law(
                "model.rope_theta must be above 1, model.norm_eps and model.init_std not negative",
                format!("rope_theta {}, norm_eps {}, init_std {}", self.rope_theta, self.norm_eps, self.init_std),
                "leave them unset for 10000, 1e-5 and 0.02",
            );
        }
        if let Some(moe) = &self.moe {
            faults.take(moe.check(self));
        }
        faults.end(())
    }
}

pub(crate) fn preset_names() -> String {
    PRESETS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// The divisors of `n`, ascending; in time sqrt(n), for what a person writes may be large.
pub(crate) fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=n.isqrt()).filter(|d| n.is_multiple_of(*d)).collect();
    let large = small.iter().rev().map(|d| n / d).filter(|d| d * d > n);
    small.iter().copied().chain(large).collect()
}

//! The shape of a mixture-of-experts layer, and its law.
//!
//! Routing of one token: scores s of all experts (softmax or sigmoid of the router's logits), the `per_token` experts
//! with the largest s (plus balancing bias, if there is one; of two equal ones the lower index), gates = their scores
//! without bias, divided by their sum if `renorm`. With softmax and `renorm` this is the same as a softmax over the
//! chosen logits alone (Mixtral, arXiv 2401.04088; Qwen3-MoE; DeepSeek-V3, arXiv 2412.19437 section 2.1.2).

use std::fmt;
use std::str::FromStr;

use crate::error::SpecError;
use crate::faults::Faults;
use crate::layout::words;
use crate::model::Model;

/// How logits of the router become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// Over all experts.
    Softmax,
    /// Of each expert by itself.
    Sigmoid,
}
words!(Scores: Softmax = "softmax", Sigmoid = "sigmoid");

/// Over which rows the auxiliary loss counts tokens and averages scores; always one microbatch of a group of data cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuxScope {
    /// Every layer by itself, summed over the layers: `E sum_e f_e P_e` with `f_e` = tokens of e / (rows x chosen), 1 at
    /// balance (Switch Transformer, arXiv 2101.03961 section 2.2).
    Layer,
    /// The rows of all layers together, with `f_e` = tokens of e / rows: what transformers computes for Mixtral.
    Pooled,
}
words!(AuxScope: Layer = "layer", Pooled = "pooled");

/// Experts in every layer, in place of one feed-forward. Sizes are in elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Moe {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts chosen for each token.
    pub per_token: usize,
    /// Inner width of an expert's SwiGLU.
    pub ffn: usize,
    /// Inner width of an expert that every token passes, added ungated; 0: none.
    pub shared_ffn: usize,
    /// How logits become scores.
    pub scores: Scores,
    /// The chosen scores are divided by their sum.
    pub renorm: bool,
    /// A bias per expert takes part in the choice alone.
    pub bias: bool,
    /// How far that bias moves in a step, towards balance (arXiv 2408.15664); 0: it stays.
    pub bias_rate: f64,
    /// Coefficient of the auxiliary loss; 0: none.
    pub aux_loss: f64,
    /// Scope of the auxiliary loss.
    pub aux_scope: AuxScope,
}

/// Experts of a layer, at most.
pub const EXPERTS_MAX: usize = 1 << 16;

impl Moe {
    /// Parameters of one expert.
    pub fn expert_parameters(&self, hidden: usize) -> usize {
        3 * hidden * self.ffn
    }

    /// Parameters that one token's products use in a layer: router, chosen and shared experts.
    pub fn active_parameters(&self, hidden: usize) -> usize {
        self.per_token * self.expert_parameters(hidden) + hidden * self.experts + 3 * hidden * self.shared_ffn
    }

    /// True if transformers' Mixtral and Qwen3-MoE compute the same for given weights.
    pub fn is_plain(&self) -> bool {
        self.scores == Scores::Softmax && !self.bias && self.shared_ffn == 0
    }

    pub(crate) fn check(&self, model: &Model) -> Result<(), SpecError> {
        let mut faults = Faults::default();
        let factors = format!(
            "experts {}, experts_per_token {}, expert_ffn {}, router_scores {}, router_bias {}, router_bias_rate {}, aux_loss {}; hidden {}",
            self.experts, self.per_token, self.ffn, self.scores, self.bias, self.bias_rate, self.aux_loss, model.hidden
        );
        let mut broken = |what: String, remedy: String| faults.law(what, factors.clone(), remedy);
        if self.experts > EXPERTS_MAX {
            broken(
                format!("model.experts = {} is more than {EXPERTS_MAX}", self.experts),
                format!("set model.experts to at most {EXPERTS_MAX}"),
            );
        }
        if self.per_token == 0 || self.per_token > self.experts {
            broken(
                format!(
                    "model.experts_per_token = {} is not in 1..={}, the experts of a layer",
                    self.per_token, self.experts
                ),
                format!("set model.experts_per_token to such as {}", 2.min(self.experts)),
            );
        }
        if self.ffn == 0 {
            broken("model.expert_ffn = 0".into(), "set model.expert_ffn to at least 1".into());
        }
        if self.bias_rate > 0.0 && !self.bias {
            broken(
                format!("model.router_bias_rate = {} moves a bias that the router does not have", self.bias_rate),
                "set model.router_bias to true, or model.router_bias_rate to 0".into(),
            );
        }
        for (key, value) in [("router_bias_rate", self.bias_rate), ("aux_loss", self.aux_loss)] {
            if !(0.0..=1e6).contains(&value) {
                broken(
                    format!("model.{key} = {value} is not in 0..=1e6"),
                    format!("set model.{key} to 0 or a small number such as 1e-3"),
                );
            }
        }
        faults.end(())
    }
}

//! Small models and layouts for the tests of this crate.

use spec::layout::LayoutRequest;
use spec::moe::{AuxScope, Scores};
use spec::{Grid, Layout, Model, Moe, Pin, Recompute, Schedule, Transport};

/// A model of `layers` small layers with 4 key/value heads.
pub fn model(layers: usize) -> Model {
    Model {
        hidden: 32,
        layers,
        heads: 8,
        kv_heads: 4,
        head_dim: 8,
        ffn: 96,
        vocab: 257,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        qk_norm: false,
        tied: false,
        init_std: 0.02,
        moe: None,
    }
}

/// Four experts, two for each token.
pub fn moe(shared: bool, aux: bool, pooled: bool) -> Moe {
    Moe {
        experts: 4,
        per_token: 2,
        ffn: 16,
        shared_ffn: if shared { 8 } else { 0 },
        scores: Scores::Softmax,
        renorm: true,
        bias: false,
        bias_rate: 0.0,
        aux_loss: if aux { 0.01 } else { 0.0 },
        aux_scope: if pooled { AuxScope::Pooled } else { AuxScope::Layer },
    }
}

/// A request for `[dp, tp, pp]` ranks, everything else at its default.
pub fn request([dp, tp, pp]: [usize; 3], schedule: Schedule, vpp: Option<usize>) -> LayoutRequest {
    LayoutRequest {
        dp,
        cp: 1,
        ep: None,
        tp,
        pp,
        vpp,
        schedule,
        orders: None,
        recompute: Recompute::None,
        recompute_layers: None,
        zero: 0,
        shard: None,
        reshard: spec::Reshard::Always,
        mirror: None,
        offload: spec::Offload::None,
        offload_folder: None,
        keep_packed: false,
        tp_overlap: true,
        tp_pairs: false,
        threads: None,
        transport: Transport::Threads,
        pin: Pin::Off,
        cells: None,
        stages: None,
        exchange_timeout_ms: 30_000,
        ranks_per_host: None,
    }
}

/// The layout of [`request`].
pub fn layout(model: &Model, grid: &Grid, ranks: [usize; 3], schedule: Schedule, vpp: Option<usize>) -> Layout {
    Layout::resolve(&request(ranks, schedule, vpp), grid, model, 1).unwrap()
}

//! What is proved: a few grids; [`super::rows`] has the layouts that must give their digests.

/// A run without its layout.
pub struct Grid {
    /// What rows call it.
    pub name: &'static str,
    /// What is special about it.
    pub about: &'static str,
    /// The run file.
    pub toml: &'static str,
}

/// The grids, in the order of the table. Between them a microbatch has more rows than a token block, a tensor more
/// elements than a state chunk, and a validation fewer sequences than its rounds have room for.
pub const GRIDS: &[Grid] = &[
    Grid {
        name: "G1",
        about: "dp4 tp2, untied, QK-norm, document masks, two token blocks per microbatch",
        toml: r#"
[model]
preset = "nano"
qk_norm = true
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 160
lr = 1e-2
warmup = 2
eval_every = 4
eval_sequences = 5
[grid]
dp = 4
tp = 2
microbatch = 2
"#,
    },
    Grid {
        name: "G2",
        about: "dp4 tp1, tied, 2 microbatches per cell, 6 layers",
        toml: r#"
[model]
preset = "nano"
layers = 6
vocab = 1000
tied = true
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 64
lr = 1e-2
eval_sequences = 9
[grid]
dp = 4
"#,
    },
    Grid {
        name: "G3",
        about: "dp1 tp4, tied, QK-norm, 4 microbatches per cell",
        toml: r#"
[model]
preset = "nano"
heads = 8
kv_heads = 4
head_dim = 8
qk_norm = true
tied = true
[data]
source = "synthetic"
[train]
steps = 6
batch = 4
seq = 64
lr = 1e-2
schedule = "linear"
eval_every = 3
eval_sequences = 4
[grid]
dp = 1
tp = 4
"#,
    },
    Grid {
        name: "G4",
        about: "dp8 tp2, untied, no masks, 3 microbatches per cell",
        toml: r#"
[model]
preset = "nano"
[data]
source = "synthetic"
masks = false
[train]
steps = 6
batch = 24
seq = 32
lr = 1e-2
eval_sequences = 7
[grid]
dp = 8
tp = 2
"#,
    },
    Grid {
        name: "G6",
        about: "experts: dp4 tp2, 8 experts top-2, renormalised, pooled auxiliary loss, 2 microbatches per cell",
        toml: r#"
[model]
preset = "nano"
experts = 8
experts_per_token = 2
expert_ffn = 24
aux_loss = 0.01
aux_scope = "pooled"
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 64
lr = 1e-2
eval_sequences = 5
[grid]
dp = 4
tp = 2
"#,
    },
    Grid {
        name: "G7",
        about: "experts: dp4, tied, QK-norm, sigmoid scores, balancing bias, shared expert, auxiliary loss per layer",
        toml: r#"
[model]
preset = "nano"
layers = 3
qk_norm = true
tied = true
experts = 6
experts_per_token = 3
expert_ffn = 16
shared_ffn = 24
router_scores = "sigmoid"
router_bias = true
router_bias_rate = 1e-2
aux_loss = 1e-3
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 64
lr = 1e-2
eval_sequences = 4
[grid]
dp = 4
"#,
    },
    Grid {
        name: "G5",
        about: "dp2 cp2 tp2, untied, QK-norm, document masks, 2 microbatches per cell, two token blocks per lane",
        toml: r#"
[model]
preset = "nano"
qk_norm = true
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 280
lr = 1e-2
eval_every = 3
eval_sequences = 5
[grid]
dp = 2
cp = 2
tp = 2
microbatch = 2
"#,
    },
    Grid {
        name: "G8",
        about: "dp4 cp4 tp1, tied, no masks, 2 microbatches per cell",
        toml: r#"
[model]
preset = "nano"
tied = true
[data]
source = "synthetic"
masks = false
[train]
steps = 6
batch = 8
seq = 144
lr = 1e-2
eval_sequences = 5
[grid]
dp = 4
cp = 4
"#,
    },
    Grid {
        name: "G9",
        about: "experts under context cells: dp2 cp2 tp2, 4 experts top-2, pooled auxiliary loss",
        toml: r#"
[model]
preset = "nano"
experts = 4
experts_per_token = 2
expert_ffn = 24
aux_loss = 0.01
aux_scope = "pooled"
[data]
source = "synthetic"
[train]
steps = 6
batch = 4
seq = 64
lr = 1e-2
eval_sequences = 4
[grid]
dp = 2
cp = 2
tp = 2
"#,
    },
    Grid {
        name: "G10",
        about: "dp4 cp2 tp2, tied, QK-norm, 2 microbatches per cell, sums over cells for each (accumulate = reduced)",
        toml: r#"
[model]
preset = "nano"
vocab = 1000
qk_norm = true
tied = true
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 32
lr = 1e-2
eval_every = 3
eval_sequences = 5
[grid]
dp = 4
cp = 2
tp = 2
accumulate = "reduced"
"#,
    },
    Grid {
        name: "G11",
        about: "experts in groups: dp4 cp2 tp2 ep4, 8 experts top-3, auxiliary loss per layer, 2 microbatches per cell",
        toml: r#"
[model]
preset = "nano"
experts = 8
experts_per_token = 3
expert_ffn = 24
shared_ffn = 16
aux_loss = 0.01
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 64
lr = 1e-2
eval_every = 4
eval_sequences = 5
[grid]
dp = 4
cp = 2
tp = 2
ep = 4
"#,
    },
    Grid {
        name: "G12",
        about: "experts in groups of two: dp4 tp2 ep2, 4 experts top-2, shared expert, accumulate = reduced",
        toml: r#"
[model]
preset = "nano"
experts = 4
experts_per_token = 2
expert_ffn = 24
shared_ffn = 16
aux_loss = 0.01
[data]
source = "synthetic"
[train]
steps = 6
batch = 8
seq = 64
lr = 1e-2
eval_sequences = 5
[grid]
dp = 4
tp = 2
ep = 2
accumulate = "reduced"
"#,
    },
];

/// The run of `grid` under `sets`.
pub fn parse(grid: usize, sets: &[String]) -> Result<spec::Run, String> {
    let Grid { name, toml, .. } = &GRIDS[grid];
    spec::Run::parse(toml, name, sets, 1).map_err(|e| e.to_string())
}

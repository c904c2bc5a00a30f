//! Keys that do nothing beside the rest of a run file.
//!
//! Whoever sets such a key believes something that is not so: that a tokenizer is used, that a schedule ends low, that
//! checkpoints are kept. So it is an error, from one table, which a test holds against the table of all keys. A value that is
//! there anyway (the default, a preset's, the Hugging Face folder's) is not asked for and refused by nobody.

use crate::error::SpecError;
use crate::layout::{Reshard, Transport};
use crate::run::{LrSchedule, Run, Source};

/// When a key does nothing.
struct Rule {
    key: &'static str,
    /// Why it does nothing in this run; `None` if it does something.
    idle: fn(&Run) -> Option<String>,
    /// What to do, beside leaving the key out.
    remedy: &'static str,
}

/// `why` where `idle`.
fn when(idle: bool, why: impl Into<String>) -> Option<String> {
    idle.then(|| why.into())
}

fn without_experts(run: &Run) -> Option<String> {
    when(run.model.moe.is_none(), "model.experts = 0: no layer has experts")
}

fn without_samples(run: &Run) -> Option<String> {
    when(run.train.sample.every == 0, "train.sample_every = 0: no sample is written")
}

/// The validation that decides what is best has no text.
fn without_validation(run: &Run) -> Option<String> {
    let none = run.data.validation_paths.is_empty() && run.data.validation <= 0.0;
    when(none, "data.validation = 0 and data.validation_paths is empty: nothing is held out to validate on")
}

const HOLD_OUT: &str = "set data.validation, such as to 0.05, or data.validation_paths";
const EXPERTS: &str = "set model.experts";
const SAMPLES: &str = "set train.sample_every";
const PROCESSES: &str = "set layout.transport to shm or tcp";

fn is_moe(run: &Run, idle: impl Fn(&crate::moe::Moe) -> Option<String>) -> Option<String> {
    run.model.moe.as_ref().map_or_else(|| without_experts(run), idle)
}

fn source_without_paths(run: &Run) -> Option<String> {
    let source = run.data.source;
    when(!matches!(source, Source::Text | Source::Tokens), format!("data.source = \"{source}\" reads no paths"))
}

fn threads(run: &Run) -> Option<String> {
    when(run.layout.transport == Transport::Threads, "layout.transport = threads: there are no rank processes")
}

const RULES: &[Rule] = &[
    Rule {
        key: "model.ffn",
        idle: |run| {
            let expert_ffn = run.values.int("model.expert_ffn").filter(|_| run.model.moe.is_some());
            expert_ffn.map(|n| format!("every layer has experts, whose width is model.expert_ffn = {n}"))
        },
        remedy: "set model.expert_ffn or model.ffn, not both",
    },
    Rule {
        key: "model.init_std",
        idle: |run| when(run.from.is_some(), "the weights come from model.from"),
        remedy: "leave model.from unset to begin with random weights",
    },
    Rule { key: "model.experts_per_token", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.expert_ffn", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.shared_ffn", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.router_scores", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.router_renorm", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.router_bias", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.router_bias_rate", idle: without_experts, remedy: EXPERTS },
    Rule { key: "model.aux_loss", idle: without_experts, remedy: EXPERTS },
    Rule {
        key: "model.aux_scope",
        idle: |run| is_moe(run, |moe| when(moe.aux_loss == 0.0, "model.aux_loss = 0: there is no auxiliary loss")),
        remedy: "set model.aux_loss, such as to 1e-2",
    },
    Rule {
        key: "data.paths",
        idle: source_without_paths,
        remedy: "set data.source to \"text\" (text files and folders) or \"tokens\" (folders that `lockstep data tokenize` \
                 wrote, Megatron prefixes)",
    },
    Rule {
        key: "data.field",
        idle: |run| {
            let data = &run.data;
            let reads = match data.source {
                Source::Text => true,
                Source::Tokens => false,
                _ => !data.validation_paths.is_empty() || !data.validation_sets.is_empty(),
            };
            when(!reads, format!("data.source = \"{}\" reads no JSON lines", data.source))
        },
        remedy: "set data.source to \"text\"",
    },
    Rule {
        key: "data.weights",
        idle: |run| when(run.data.weights.len() == 1, "there is one path, which is all of the mixture"),
        remedy: "name further paths in data.paths",
    },
    Rule {
        key: "data.validation",
        idle: |run| {
            let data = &run.data;
            when(
                data.validation > 0.0 && !data.validation_paths.is_empty(),
                "data.validation_paths says what is held out",
            )
        },
        remedy: "leave data.validation_paths empty to hold out a share",
    },
    Rule {
        key: "data.tokenizer",
        idle: |run| {
            let source = run.data.source;
            when(source != Source::Tokens, format!("data.source = \"{source}\" feeds bytes to the model, not tokens"))
        },
        remedy: "write tokens with `lockstep data tokenize --tokenizer FILE --out DIR INPUT...`, and set data.source to \
                 \"tokens\" and data.paths to [\"DIR\"]",
    },
    Rule {
        key: "train.lr_min",
        idle: |run| {
            when(
                run.train.schedule == LrSchedule::Constant,
                "train.schedule = constant keeps the learning rate at train.lr",
            )
        },
        remedy: "set train.schedule to cosine, linear, wsd or rsqrt",
    },
    Rule {
        key: "train.decay",
        idle: |run| {
            let schedule = run.train.schedule;
            when(schedule != LrSchedule::Wsd, format!("train.schedule = {schedule} has no last line of its own"))
        },
        remedy: "set train.schedule to wsd",
    },
    Rule {
        key: "train.no_decay",
        idle: |run| when(never_decays(run), "train.weight_decay = 0: nothing decays"),
        remedy: "set train.weight_decay",
    },
    Rule {
        key: "train.seed",
        idle: |run| when(run.from.is_some(), "it is the seed of the initial weights, and these come from model.from"),
        remedy: "data.seed is the seed of the data order",
    },
    Rule {
        key: "train.eval_every",
        idle: |run| without_validation(run).filter(|_| run.data.validation_sets.is_empty()),
        remedy: HOLD_OUT,
    },
    Rule { key: "train.patience", idle: without_validation, remedy: HOLD_OUT },
    Rule { key: "train.sample_prompt", idle: without_samples, remedy: SAMPLES },
    Rule { key: "train.sample_tokens", idle: without_samples, remedy: SAMPLES },
    Rule { key: "train.sample_temperature", idle: without_samples, remedy: SAMPLES },
    Rule {
        key: "train.sample_top_k",
        idle: |run| {
            let greedy = run.train.sample.temperature == 0.0;
            without_samples(run)
                .or_else(|| when(greedy, "train.sample_temperature = 0 always takes the most likely token"))
        },
        remedy: "set train.sample_every, and train.sample_temperature above 0",
    },
    Rule {
        key: "layout.reshard",
        idle: |run| when(run.layout.zero < 3 && run.layout.reshard != Reshard::Always, "no parameters are sharded"),
        remedy: "set layout.zero to 3",
    },
    Rule {
        key: "layout.tp_pairs",
        idle: |run| {
            let layout = &run.layout;
            let few = layout.cells.iter().all(|part| run.grid.units(part.clone()).count() < 2);
            when(
                layout.tp_pairs && !layout.pairs_tp(),
                "the exchanges over the tensor axis do not run beside other work",
            )
            .or_else(|| {
                when(layout.tp_pairs && few, "each rank has one microbatch in a step, and none to pair it with")
            })
        },
        remedy: "set layout.tp_overlap to true, and have several microbatches (grid.microbatch, layout.dp)",
    },
    Rule {
        key: "checkpoint.keep_every",
        idle: |run| {
            when(run.checkpoint.every == Some(0), "checkpoint.every = 0: the only checkpoint is that of the last step")
        },
        remedy: "set checkpoint.every",
    },
    Rule { key: "checkpoint.best", idle: without_validation, remedy: HOLD_OUT },
    Rule {
        key: "checkpoint.stagger_ms",
        idle: |run| {
            when(!run.checkpoint.background, "checkpoint.background = false: the ranks wait for each other's writes")
        },
        remedy: "set checkpoint.background to true",
    },
    Rule {
        key: "checkpoint.failures_per_host_day",
        idle: |run| when(run.checkpoint.every.is_some(), "it is read for checkpoint.every = \"auto\" alone"),
        remedy: "set checkpoint.every to \"auto\"",
    },
    Rule { key: "guard.spares", idle: threads, remedy: PROCESSES },
    Rule { key: "guard.skip_batches", idle: threads, remedy: PROCESSES },
    Rule {
        key: "guard.respawn_after_ms",
        idle: |run| {
            threads(run)
                .or_else(|| when(run.guard.restarts_max == 0, "guard.restarts_max = 0: any failure ends the run"))
        },
        remedy: "set guard.restarts_max, and layout.transport to shm or tcp",
    },
];

/// No step of the run has any weight decay.
fn never_decays(run: &Run) -> bool {
    let recipe = &run.train.recipe;
    std::iter::once(0).chain(recipe.changes().steps()).all(|step| recipe.at(step).weight_decay == 0.0)
}

/// Keys without a rule: those that always do something, and those of which what is set is true even where it changes nothing,
/// so that a sweep over layouts may leave them where they are.
#[cfg(test)]
const NO_RULE: &[(&str, &[&str])] = &[
    (
        "always do something",
        &[
            "model.from",
            "model.hidden",
            "model.layers",
            "model.heads",
            "model.kv_heads",
            "model.head_dim",
            "model.vocab",
            "model.rope_theta",
            "model.norm_eps",
            "model.qk_norm",
            "model.tied",
            "model.experts",
            "data.source",
            "data.validation_paths",
            "data.validation_sets",
            "data.masks",
            "data.seed",
            "data.packing",
            "train.steps",
            "train.batch",
            "train.seq",
            "train.lr",
            "train.schedule",
            "train.warmup",
            "train.beta1",
            "train.beta2",
            "train.eps",
            "train.weight_decay",
            "train.clip",
            "train.skip",
            "train.changes",
            "train.sample_every",
            "grid.dp",
            "grid.cp",
            "grid.tp",
            "grid.microbatch",
            "layout.dp",
            "layout.cp",
            "layout.tp",
            "layout.pp",
            "layout.recompute",
            "layout.offload",
            "layout.threads",
            "layout.transport",
            "layout.cells",
            "layout.stages",
            "checkpoint.every",
            "checkpoint.keep",
            "checkpoint.background",
            "checkpoint.store",
            "checkpoint.last_wait_s",
            "guard.hash_state",
            "guard.recompute_every",
        ],
    ),
    ("are what lies beneath: a preset, what a folder or the file says comes over it", &["model.preset"]),
    (
        "are refused by the law of layouts, grids or recipes where they do nothing",
        &[
            "grid.ep",
            "layout.ep",
            "layout.vpp",
            "layout.schedule_file",
            "layout.recompute_layers",
            "layout.shard",
            "layout.offload_folder",
        ],
    ),
    (
        "ask for what is so anyway: one position has one schedule, one rank keeps its state whole, Megatron files are as they are",
        &[
            "data.eod",
            "train.eval_sequences",
            "grid.accumulate",
            "layout.schedule",
            "layout.zero",
            "layout.mirror",
            "layout.keep_packed",
            "layout.tp_overlap",
            "layout.pin",
            "guard.spares_check",
            "cluster.ranks_per_host",
        ],
    ),
    (
        "are limits, which hold wherever what they limit happens",
        &[
            "layout.exchange_timeout_ms",
            "guard.beat_ms",
            "guard.heartbeat_timeout_ms",
            "guard.stopped_timeout_ms",
            "guard.progress_factor",
            "guard.progress_floor_ms",
            "guard.still_floor_ms",
            "guard.assemble_timeout_ms",
            "guard.restarts_max",
            "guard.restarts_window_s",
            "guard.evict_after",
        ],
    ),
];

/// Names of files in a Hugging Face folder that say that its model reads tokens.
const TOKENIZERS: [&str; 5] = ["tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt"];
/// A model of bytes has a few ids beside them at most.
const BYTE_VOCAB_MAX: usize = 512;

/// Refuses bytes of text for a model that was trained on tokens.
pub(crate) fn bytes_for_tokens(run: &Run) -> Result<(), SpecError> {
    let Some(from) = &run.from else { return Ok(()) };
    let (source, vocab) = (run.data.source, run.model.vocab);
    if matches!(source, Source::Tokens | Source::Synthetic) {
        return Ok(());
    }
    let tokenizer = TOKENIZERS.iter().find(|name| from.join(name).is_file());
    let why = match tokenizer {
        Some(name) => format!("it has a {name}"),
        None if vocab > BYTE_VOCAB_MAX => format!("it has {vocab} ids"),
        None => return Ok(()),
    };
    let from = from.display();
    let tokenizer = if tokenizer == Some(&"tokenizer.json") { format!("{from}/tokenizer.json") } else { "FILE".into() };
    Err(SpecError::law(
        format!("data.source = \"{source}\" feeds bytes to the model, but that of model.from reads tokens: {why}"),
        format!("model.from {from}, model.vocab {vocab}, data.source {source}"),
        format!(
            "write tokens with `lockstep data tokenize --tokenizer {tokenizer} --out DIR INPUT...`, and set data.source to \
             \"tokens\" and data.paths to [\"DIR\"]"
        ),
    ))
}

/// Refuses every key that was asked for and does nothing.
pub(crate) fn check(run: &Run) -> Result<(), SpecError> {
    let idle = RULES.iter().filter(|rule| run.values.asked(rule.key));
    let idle: Vec<_> = idle.filter_map(|rule| Some((rule, (rule.idle)(run)?))).collect();
    if idle.is_empty() {
        return Ok(());
    }
    let join = |parts: Vec<String>| parts.join("\n  ");
    Err(SpecError::law(
        join(idle.iter().map(|(rule, why)| format!("{} has no effect: {why}", rule.key)).collect()),
        join(idle.iter().map(|(rule, _)| run.values.told(rule.key)).collect()),
        join(idle.iter().map(|(rule, _)| format!("leave {} out, or {}", rule.key, rule.remedy)).collect()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KEYS;

    const BASE: &str =
        "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n";

    fn effects(sets: &[&str]) -> Result<(), String> {
        let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
        Run::parse(BASE, "run.toml", &sets, 1).expect("it obeys the laws").check_effects().map_err(|e| e.to_string())
    }

    #[test]
    fn every_key_has_a_rule_or_a_reason_for_none() {
        let ruled = RULES.iter().map(|rule| rule.key).chain(NO_RULE.iter().flat_map(|(_, keys)| keys.iter().copied()));
        let mut ruled: Vec<_> = ruled.collect();
        let mut keys: Vec<_> = KEYS.iter().map(|key| key.path).collect();
        ruled.sort_unstable();
        keys.sort_unstable();
        assert_eq!(ruled, keys);
    }

    #[test]
    fn what_does_nothing_is_refused_and_what_does_something_is_not() {
        let moe = ["model.experts=4"];
        let table: &[(&str, &[&str], &[&str])] = &[
            ("model.ffn=77", &["model.experts=4", "model.expert_ffn=8"], &moe),
            ("model.experts_per_token=1", &[], &moe),
            ("model.expert_ffn=8", &[], &moe),
            ("model.shared_ffn=8", &[], &moe),
            ("model.router_scores=sigmoid", &[], &moe),
            ("model.router_renorm=false", &[], &moe),
            ("model.router_bias=true", &[], &moe),
            ("model.router_bias_rate=0.1", &[], &["model.experts=4", "model.router_bias=true"]),
            ("model.aux_loss=0.1", &[], &moe),
            ("model.aux_scope=pooled", &moe, &["model.experts=4", "model.aux_loss=0.1"]),
            ("data.paths=[\"a\"]", &[], &["data.source=text"]),
            ("data.field=body", &[], &["data.source=text", "data.paths=[\"a\"]"]),
            ("data.validation=0.2", &["data.validation_paths=[\"a\"]"], &[]),
            ("data.tokenizer=t.json", &[], &["data.source=tokens", "data.paths=[\"a\"]"]),
            ("train.lr_min=1e-5", &["train.schedule=constant"], &[]),
            ("train.decay=2", &[], &["train.schedule=wsd"]),
            ("train.no_decay=[\"norm\"]", &["train.weight_decay=0"], &[]),
            ("train.eval_every=2", &["data.validation=0"], &[]),
            ("train.patience=2", &["train.eval_every=2", "data.validation=0"], &["train.eval_every=2"]),
            ("train.sample_prompt=So", &[], &["train.sample_every=2"]),
            ("train.sample_tokens=9", &[], &["train.sample_every=2"]),
            ("train.sample_temperature=1.0", &[], &["train.sample_every=2"]),
            (
                "train.sample_top_k=3",
                &["train.sample_every=2", "train.sample_temperature=0"],
                &["train.sample_every=2"],
            ),
            ("layout.reshard=after_backward", &[], &["layout.zero=3", "layout.dp=2", "grid.accumulate=reduced"]),
            (
                "layout.tp_pairs=true",
                &["grid.tp=2", "layout.tp=2", "layout.tp_overlap=false"],
                &["grid.tp=2", "layout.tp=2", "grid.dp=2"],
            ),
            ("checkpoint.keep_every=4", &[], &["checkpoint.every=2"]),
            ("checkpoint.best=true", &["data.validation=0"], &[]),
            ("checkpoint.stagger_ms=9", &["checkpoint.background=false"], &[]),
            ("checkpoint.failures_per_host_day=1.0", &[], &["checkpoint.every=auto"]),
            ("guard.spares=1", &["layout.transport=threads"], &[]),
            ("guard.skip_batches=1", &["layout.transport=threads"], &[]),
            ("guard.respawn_after_ms=9", &["guard.restarts_max=0"], &[]),
        ];
        for (set, idle, works) in table {
            let key = set.split('=').next().expect("a key");
            let said = effects(&[&[*set], *idle].concat()).expect_err(set);
            assert!(said.contains(&format!("{key} has no effect")) && said.contains("--set"), "{said}");
            let sets = [&[*set], *works].concat();
            effects(&sets).unwrap_or_else(|e| panic!("{sets:?}: {e}"));
        }
        let one = ["data.source=text", "data.paths=[\"a\"]", "data.weights=[1]"];
        assert!(effects(&one).unwrap_err().contains("data.weights has no effect"));
        let tested_otherwise = ["model.init_std", "train.seed", "data.weights"];
        let tested = |key: &str| table.iter().any(|(set, ..)| set.split('=').next() == Some(key));
        assert!(RULES.iter().all(|rule| tested(rule.key) || tested_otherwise.contains(&rule.key)));
    }

    #[test]
    fn a_value_that_is_there_anyway_is_not_asked_for() {
        for set in
            ["train.lr_min=0", "train.decay=0", "train.sample_tokens=64", "checkpoint.best=false", "model.aux_loss=0"]
        {
            effects(&[set, "train.schedule=constant", "data.validation=0"]).unwrap();
        }
        // The resolved copy of a run has every value.
        let run = Run::parse(BASE, "t", &["model.experts=4".into(), "model.expert_ffn=8".into()], 1).unwrap();
        Run::parse(&run.values.to_toml(), "run.toml", &[], 1).unwrap().check_effects().unwrap();
    }
}

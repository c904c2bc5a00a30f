//! Every key of a run file, as data: the parser, the resolved copy and the help read this table.

/// What a value must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A count; takes suffixes K, M, G, T (decimal) and Ki, Mi, Gi (binary) as a string.
    Int,
    /// A count, or the word auto.
    IntOrAuto,
    /// A whole number below 2^64; as a string where it is 2^63 or more, which TOML has no numbers for.
    Seed,
    /// A number.
    Float,
    /// true or false.
    Bool,
    /// A word or path.
    Text,
    /// A list of words or paths.
    Texts,
    /// A list of counts.
    Ints,
    /// A list of numbers.
    Floats,
}

impl Kind {
    /// For error messages.
    pub fn expected(self) -> &'static str {
        match self {
            Kind::Int => "a whole number of at most 1T, such as 8 or \"16Ki\"",
            Kind::IntOrAuto => "\"auto\" or a whole number of at most 1T, such as 100",
            Kind::Seed => "a whole number from 0 to 18446744073709551615, such as 1",
            Kind::Float => "a number, such as 3e-4",
            Kind::Bool => "true or false",
            Kind::Text => "a text, such as \"synthetic\"",
            Kind::Texts => "a list of texts, such as [\"a.txt\", \"b.txt\"]",
            Kind::Ints => "a list of whole numbers, such as [3, 1]",
            Kind::Floats => "a list of numbers, such as [0.7, 0.3]",
        }
    }
}

/// One key.
#[derive(Debug)]
pub struct Key {
    /// Section and name.
    pub path: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// The default, as TOML; empty: unset.
    pub default: &'static str,
    /// True if it is part of the run's definition: it may change the digest.
    pub defines: bool,
    /// One line.
    pub doc: &'static str,
}

macro_rules! keys {
    ($($path:literal $kind:ident $default:literal $defines:literal $doc:literal;)+) => {
        /// The table, in the order of the resolved run file.
        pub const KEYS: &[Key] = &[$(Key { path: $path, kind: Kind::$kind, default: $default, defines: $defines, doc: $doc }),+];
    };
}

keys! {
    "model.preset" Text "" false "shape to start from: nano, tiny, demo, S, M, L";
    "model.from" Text "" true "Hugging Face folder (config.json, safetensors) to start from";
    "model.hidden" Int "" true "width of the residual stream";
    "model.layers" Int "" true "decoder layers";
    "model.heads" Int "" true "query heads";
    "model.kv_heads" Int "" true "key/value heads; divides heads";
    "model.head_dim" Int "" true "width of a head; hidden / heads unless set";
    "model.ffn" Int "" true "inner width of the SwiGLU";
    "model.vocab" Int "" true "token ids";
    "model.rope_theta" Float "10000.0" true "base of the rotary angles";
    "model.norm_eps" Float "1e-5" true "added to the mean square in a norm";
    "model.qk_norm" Bool "false" true "RMSNorm on query and key heads";
    "model.tied" Bool "false" true "output projection = embedding";
    "model.init_std" Float "0.02" true "standard deviation of the initial matrices";
    "model.experts" Int "0" true "experts of every layer in place of the SwiGLU; 0: dense";
    "model.experts_per_token" Int "2" true "experts chosen for each token";
    "model.expert_ffn" Int "" true "inner width of an expert; ffn unset stands for it";
    "model.shared_ffn" Int "0" true "inner width of an expert that every token passes; 0: none";
    "model.router_scores" Text "\"softmax\"" true "scores of the experts: softmax over all, or sigmoid of each";
    "model.router_renorm" Bool "true" true "divide the chosen scores by their sum (softmax: the same as a softmax over the chosen)";
    "model.router_bias" Bool "false" true "a balancing bias per expert that takes part in the choice alone";
    "model.router_bias_rate" Float "0.0" true "how far the bias moves in a step, up where an expert had fewer tokens than the mean; 0: it stays";
    "model.aux_loss" Float "0.0" true "coefficient of the auxiliary loss that balances the experts; 0: none";
    "model.aux_scope" Text "\"layer\"" true "layer: balance in every layer, summed; pooled: rows of all layers together (Mixtral's)";
    "data.source" Text "\"austen\"" true "austen (six novels, in the binary), cargo (sources of the crates of lockstep), synthetic, text or tokens";
    "data.paths" Texts "[]" true "text, JSON lines, each also as .gz, .xz or .zst, and folders of them (source = \"text\"); token folders and Megatron prefixes (\"tokens\")";
    "data.field" Text "" true "the field of a JSON line that holds its text; unset: text";
    "data.weights" Floats "" true "share of each path in the mixture, such as [0.7, 0.3]; unset: the paths are one source";
    "data.validation_paths" Texts "[]" true "as paths, held out";
    "data.validation_sets" Texts "[]" true "further held-out sets, each \"name=path\", validated beside the first";
    "data.validation" Float "0.05" true "share of the text held out where validation_paths is empty: whole documents, or the ends of large ones";
    "data.masks" Bool "true" true "documents in a sequence do not see each other; positions restart";
    "data.eod" Bool "true" true "an end-of-document token after every document: id 256 of text, the tokenizer's of token folders; Megatron files stay as they are";
    "data.seed" Seed "1" true "seed of the data order";
    "data.tokenizer" Text "" false "the tokenizer.json of source = \"tokens\", for text samples";
    "data.packing" Text "" true "stream (unset): documents one after another; bestfit: whole documents where they leave the least room";
    "train.steps" Int "" true "optimizer steps";
    "train.batch" Int "" true "sequences per step";
    "train.seq" Int "" true "tokens per sequence";
    "train.lr" Float "1e-3" true "peak learning rate";
    "train.lr_min" Float "0.0" true "learning rate at the end";
    "train.schedule" Text "\"cosine\"" true "after the warm-up: cosine, linear, constant, wsd (stable, then a line down over train.decay steps) or rsqrt";
    "train.warmup" Int "0" true "steps of linear warm-up";
    "train.decay" Int "0" true "steps of the final line to lr_min (schedule = \"wsd\")";
    "train.beta1" Float "0.9" true "AdamW";
    "train.beta2" Float "0.95" true "AdamW";
    "train.eps" Float "1e-8" true "AdamW";
    "train.weight_decay" Float "0.1" true "AdamW, on matrices only";
    "train.no_decay" Texts "[]" true "tensors without decay: parts of names, `*` for anything, such as [\"embed_tokens\", \"layers.0.*.o_proj\"]";
    "train.clip" Float "1.0" true "limit of the global gradient norm; 0: none";
    "train.seed" Seed "1" true "seed of the initial weights";
    "train.eval_every" Int "0" true "steps between validations; 0: none but at the end";
    "train.eval_sequences" Int "16" true "sequences in a validation";
    "train.patience" Int "0" true "stop after so many validations in a row without a new best; 0: never";
    "train.skip" Texts "" true "batches left out, as a roll-back with guard.skip_batches writes them down: [\"13+2\"] leaves out two before step 13";
    "train.changes" Texts "" true "values of the recipe from a step on, as `lockstep reload` writes them down: [\"9: train.lr=1e-4\"]; of lr, lr_min, clip, weight_decay, beta1, beta2 and eps";
    "train.sample_every" Int "0" false "steps between text samples; 0: none";
    "train.sample_prompt" Text "\"The \"" false "what a sample continues";
    "train.sample_tokens" Int "64" false "tokens of a sample";
    "train.sample_temperature" Float "0.8" false "divides the logits; 0: the most likely token";
    "train.sample_top_k" Int "40" false "tokens that may be drawn";
    "grid.dp" Int "" true "data cells; unset: the largest power of two, at most 16, that divides the microbatches of a step";
    "grid.cp" Int "" true "context cells: each sequence in so many parts of two chunks; unset: 1";
    "grid.ep" Int "1" true "neighbouring data cells to a group: one product per expert takes in their tokens; experts in as many blocks";
    "grid.tp" Int "1" true "tensor cells";
    "grid.microbatch" Int "1" true "sequences per microbatch";
    "grid.accumulate" Text "" true "local (unset): gradients add up over the microbatches of a cell, then over cells; reduced: over cells for each microbatch, then over microbatches (for layout.zero = 2 and 3)";
    "layout.dp" Int "1" false "ranks on the data axis";
    "layout.cp" Int "1" false "ranks on the context axis; divides grid.cp";
    "layout.ep" Int "" false "ranks that share the work of a group's experts, whole experts each: those of the dp ranks that host it (unset); each holds its own experts only";
    "layout.tp" Int "1" false "ranks on the tensor axis";
    "layout.pp" Int "1" false "ranks on the pipeline axis";
    "layout.vpp" Int "" false "chunks per rank (2 for interleaved, zbv and dualpipe-v unless set)";
    "layout.schedule" Text "\"1f1b\"" false "gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipe-v or csv";
    "layout.schedule_file" Text "" false "the schedule of csv: a line per pipeline position, operations such as 0F0,0B0 (stage, F B I or W, microbatch)";
    "layout.recompute" Text "\"none\"" false "what backward computes again instead of keeping it: none, selective (attention) or full (the layer)";
    "layout.recompute_layers" Ints "" false "the layers that recompute is for, such as [0, 1]; unset: all";
    "layout.zero" Int "0" false "sharded over dp and cp: 1: optimizer state, 2: gradients too, 3: parameters too";
    "layout.shard" Int "" false "ranks that share one set of shards, replicated across groups; unset: dp x cp";
    "layout.reshard" Text "\"always\"" false "parameters of zero = 3 are freed: always (after each use) or after_backward (kept from a step's first use to its last)";
    "layout.mirror" Bool "" false "state that one rank alone would have is kept by a second one, too, by sending it the gradients of each step; unset: where ranks are processes";
    "layout.offload" Text "\"none\"" false "what lies in files and comes to memory for its use: none, optimizer (the moments), activations (what layers keep for backward), or optimizer+activations";
    "layout.offload_folder" Text "" false "where these files are, which have no name; unset: the run's folder";
    "layout.keep_packed" Bool "false" false "weights that are used again before the next update stay packed for the products, beside their own memory";
    "layout.tp_overlap" Bool "true" false "with tp > 1: exchanges of backward over the tensor axis run beside weight gradients; false: ranks wait for them";
    "layout.tp_pairs" Bool "false" false "with tp > 1, pp = 1 and several microbatches: the forward of one runs beside the backward of the one before, so that each hides the other's exchanges; keeps the activations of two";
    "layout.threads" Int "" false "threads per rank; unset: all cores at one rank, else 1";
    "layout.transport" Text "\"shm\"" false "shm, tcp or threads";
    "layout.pin" Text "\"auto\"" false "auto: each rank keeps to its share of the allowed cores, if there is a core for each; off: the system places them";
    "layout.exchange_timeout_ms" Int "30_000" false "the longest that one exchange between ranks may take, waiting for peers included";
    "layout.cells" Ints "" false "data cells of each dp rank, such as [3, 1]";
    "layout.stages" Ints "" false "layers of each chunk, such as [1, 3]";
    "checkpoint.every" IntOrAuto "0" false "steps between checkpoints; 0: only at the end; auto: from what one costs and how often hosts fail";
    "checkpoint.keep" Int "2" false "newest checkpoints kept";
    "checkpoint.keep_every" Int "0" false "checkpoints of steps that are multiples of this are kept for good; 0: none";
    "checkpoint.best" Bool "false" false "a checkpoint at every new best validation, kept beside the newest ones";
    "checkpoint.background" Bool "true" false "ranks copy their state and go on stepping while it is written; false: they wait for the disk";
    "checkpoint.stagger_ms" Int "0" false "in the background each rank begins to write so much later than the one before it";
    "checkpoint.store" Text "" false "where copies of checkpoints go, such as \"file:///backup/run-1\" or \"s3://bucket/run-1\", this run's alone; unset: nowhere";
    "checkpoint.last_wait_s" Int "300" false "how long the end of a run tries again to write its last checkpoint, where the disk is full or refuses";
    "checkpoint.failures_per_host_day" Float "0.0012" false "how often a host fails, for every = \"auto\"";
    "guard.beat_ms" Int "100" false "milliseconds between two signs of life of a rank process";
    "guard.heartbeat_timeout_ms" Int "5_000" false "a rank process that was silent for so long is taken for dead";
    "guard.stopped_timeout_ms" Int "500" false "a rank process that the system shows as stopped is taken for dead after so long";
    "guard.progress_factor" Float "10.0" false "no step for this many times the longest step seen is a hang";
    "guard.progress_floor_ms" Int "20_000" false "but never before so many milliseconds";
    "guard.still_floor_ms" Int "700" false "all ranks wait for each other and no byte has moved for so long, and the longest step seen, is a hang: a cut link";
    "guard.assemble_timeout_ms" Int "60_000" false "ranks must have their links and their state within this time";
    "guard.restarts_max" Int "16" false "recoveries within guard.restarts_window_s before the run gives up (exit code 5); 0: any failure ends it";
    "guard.restarts_window_s" Int "3_600" false "the window of guard.restarts_max and guard.evict_after, in seconds";
    "guard.spares" Int "0" false "rank processes that wait to take the place of one that dies";
    "guard.spares_check" Bool "true" false "while they wait, spares compute the gradients of the step after each checkpoint again, from that checkpoint, and compare them with the ranks'";
    "guard.evict_after" Int "3" false "failures of a host within the window after which it gets no ranks, if there are other hosts";
    "guard.respawn_after_ms" Int "0" false "how long the place of a process that died stays empty, the others going on without it; 0: a new one is started at once";
    "guard.hash_state" Bool "true" false "each rank hashes what it wrote, and looks again before the next step is committed: a bit that changed in memory is found";
    "guard.skip_batches" Int "0" false "a step whose loss or gradients are no numbers twice with the same bits: back to the newest checkpoint, on without the batches up to that step's, which counts as one of so many; 0: the run ends (exit code 4), as it does without rank processes";
    "guard.recompute_every" Int "0" false "steps between those whose gradients another rank computes, too, by which a bit that flips on the way is found, its rank named, and a broken device replaced; 0: never";
    "cluster.ranks_per_host" Int "" false "ranks that share a host; unset: all";
}

/// The largest count: products of a few of them can still be told.
pub const COUNT_MAX: i64 = 1_000_000_000_000;

/// The sections of a run file, each once.
pub fn sections() -> impl Iterator<Item = &'static str> {
    let section = |k: &Key| k.path.split('.').next().unwrap_or_default();
    let first = move |i: usize| i == 0 || section(&KEYS[i - 1]) != section(&KEYS[i]);
    (0..KEYS.len()).filter(move |i| first(*i)).map(move |i| section(&KEYS[i]))
}

/// The key of a path.
pub fn key(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.path == path)
}

/// The keys that a sentence names by their path, in its order, each once.
pub(crate) fn named(sentence: &str) -> impl Iterator<Item = &'static str> {
    let words = sentence.split(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || "._".contains(c)));
    let mut found: Vec<&'static str> = Vec::new();
    for path in words.filter_map(|word| key(word.trim_matches('.'))).map(|key| key.path) {
        if !found.contains(&path) {
            found.push(path);
        }
    }
    found.into_iter()
}

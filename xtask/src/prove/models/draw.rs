//! A model, a grid, a recipe and data that nobody thought of: a run file without its layout.

use super::super::random::Random;
use super::corpora::Corpora;

/// Most layers.
const LAYERS_MAX: usize = 6;
/// So large a vocabulary cuts the logits of a microbatch into blocks of 256 tokens.
const VOCAB_LARGE: usize = 16_400;

/// Keys of a run file with their values as TOML, in the order in which they were drawn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Drawn(pub Vec<(String, String)>);

impl Drawn {
    fn set(&mut self, key: &str, value: impl ToString) {
        self.0.push((key.to_owned(), value.to_string()));
    }

    fn word(&mut self, key: &str, value: &str) {
        self.set(key, format!("{value:?}"));
    }

    fn texts(&mut self, key: &str, values: &[String]) {
        self.set(key, format!("{values:?}"));
    }

    /// The run file.
    pub fn toml(&self) -> String {
        let mut out = String::new();
        let mut sections: Vec<&str> = Vec::new();
        for (key, _) in &self.0 {
            let section = key.split('.').next().unwrap_or_default();
            if !sections.contains(&section) {
                sections.push(section);
            }
        }
        for section in sections {
            out += &format!("[{section}]\n");
            for (key, value) in &self.0 {
                if let Some(name) = key.strip_prefix(section).and_then(|rest| rest.strip_prefix('.')) {
                    out += &format!("{name} = {value}\n");
                }
            }
        }
        out
    }

    /// The same without the key number `at`.
    pub fn without(&self, at: usize) -> Self {
        let mut keys = self.0.clone();
        keys.remove(at);
        Self(keys)
    }
}

/// The sizes on which the cells of the grid depend.
struct Cells {
    dp: usize,
    cp: usize,
    tp: usize,
    microbatch: usize,
    microbatches: usize,
}

/// A run file; nearly always one that `lockstep` accepts.
pub fn run_file(random: &mut Random, corpora: &Corpora) -> Drawn {
    let cells = Cells {
        dp: random.one(&[1, 2, 2, 3, 4, 4, 6, 8]),
        cp: random.one(&[1, 1, 1, 2, 2, 4]),
        tp: random.one(&[1, 1, 2, 2, 4]),
        microbatch: random.upto(3),
        microbatches: random.upto(3),
    };
    let mut out = Drawn::default();
    let large = random.chance(1, 12);
    let experts = random.chance(1, 2).then(|| random.one(&[2, 3, 4, 4, 6, 8]));
    model(&mut out, random, &cells, experts, large);
    let vocab = data(&mut out, random, corpora);
    out.set("model.vocab", if large { VOCAB_LARGE } else { vocab });
    recipe(&mut out, random, &cells, large);
    grid(&mut out, random, &cells, experts);
    out
}

fn model(out: &mut Drawn, random: &mut Random, cells: &Cells, experts: Option<usize>, large: bool) {
    // One of twelve does not fit the tensor cells: the law says so.
    let fits = |random: &mut Random, most: usize| {
        if random.chance(1, 12) { random.upto(most * cells.tp) } else { cells.tp * random.upto(most) }
    };
    let kv_heads = fits(random, 2);
    out.set("model.hidden", if large { 8 } else { random.one(&[8, 12, 16, 20, 24, 32, 33, 48]) });
    out.set("model.layers", random.upto(LAYERS_MAX));
    out.set("model.heads", kv_heads * random.upto(3));
    if random.chance(3, 4) {
        out.set("model.kv_heads", kv_heads);
    }
    out.set("model.head_dim", 2 * random.upto(8));
    out.set("model.ffn", fits(random, 24));
    out.set("model.qk_norm", random.chance(1, 2));
    out.set("model.tied", random.chance(1, 2));
    if random.chance(1, 4) {
        out.set("model.rope_theta", random.one(&["100.0", "500000.0"]));
        out.set("model.norm_eps", "1e-6");
        out.set("model.init_std", random.one(&["0.1", "0.5"]));
    }
    let Some(experts) = experts else { return };
    out.set("model.experts", experts);
    out.set("model.experts_per_token", random.upto(experts.min(4)));
    out.set("model.expert_ffn", random.upto(24));
    if random.chance(1, 2) {
        out.set("model.shared_ffn", random.upto(24));
    }
    out.word("model.router_scores", random.one(&["softmax", "sigmoid"]));
    out.set("model.router_renorm", random.chance(1, 2));
    if random.chance(1, 3) {
        out.set("model.router_bias", true);
        out.set("model.router_bias_rate", random.one(&["0.0", "1e-2"]));
    }
    if random.chance(2, 3) {
        out.set("model.aux_loss", random.one(&["1e-3", "0.1"]));
        out.word("model.aux_scope", random.one(&["layer", "pooled"]));
    }
}

/// Draws what is trained on; the vocabulary that it asks for.
fn data(out: &mut Drawn, random: &mut Random, corpora: &Corpora) -> usize {
    let (masks, eod) = (random.chance(3, 4), random.chance(3, 4));
    let vocab = match random.upto(3) {
        1 => {
            out.word("data.source", "synthetic");
            random.one(&[257, 257, 300, 320])
        }
        2 => {
            out.word("data.source", "text");
            paths(out, random, &corpora.texts, &corpora.held_out);
            random.one(&[257, 260, 321])
        }
        _ => {
            out.word("data.source", "tokens");
            paths(out, random, &corpora.tokens, &[]);
            random.one(&[corpora.ids, corpora.ids + 3, 131])
        }
    };
    out.set("data.masks", masks);
    out.set("data.eod", eod);
    out.set("data.seed", random.upto(1_000_000));
    if masks && random.chance(1, 3) {
        out.word("data.packing", "bestfit");
    }
    if random.chance(1, 2) {
        out.set("data.validation", random.one(&["0.0", "0.1", "0.5"]));
    }
    vocab
}

/// One or two of `all`, and at times what is held out.
fn paths(out: &mut Drawn, random: &mut Random, all: &[String], held_out: &[String]) {
    let first = random.upto(all.len()) - 1;
    let mut chosen = vec![all[first].clone()];
    if random.chance(1, 2) {
        chosen.push(all[(first + random.upto(all.len() - 1)) % all.len()].clone());
        if random.chance(1, 2) {
            out.set("data.weights", random.one(&["[0.7, 0.3]", "[1.0, 5.0]"]));
        }
    }
    out.texts("data.paths", &chosen);
    let Some(held_out) = held_out.first() else { return };
    if random.chance(1, 4) {
        out.texts("data.validation_paths", std::slice::from_ref(held_out));
    }
    if random.chance(1, 6) {
        out.texts("data.validation_sets", &[format!("other={held_out}")]);
    }
}

fn recipe(out: &mut Drawn, random: &mut Random, cells: &Cells, large: bool) {
    // Several blocks of tokens: more than 256 rows in a lane.
    let longer = if large { 300 / (2 * cells.tp * cells.microbatch) + 1 } else { 0 };
    let patience = random.chance(1, 6);
    let steps = if patience { 6 } else { 1 + random.upto(3) };
    out.set("train.steps", steps);
    out.set("train.batch", cells.dp * cells.microbatch * cells.microbatches);
    out.set("train.seq", 2 * cells.cp * cells.tp * (longer + random.upto(6)));
    out.set("train.lr", random.one(&["1e-3", "1e-2", "0.3"]));
    match random.upto(5) {
        1 => out.word("train.schedule", "linear"),
        2 => out.word("train.schedule", "constant"),
        3 => {
            out.word("train.schedule", "wsd");
            out.set("train.decay", 1);
        }
        4 => {
            out.word("train.schedule", "rsqrt");
            out.set("train.warmup", 1);
        }
        _ => out.set("train.warmup", random.upto(2) - 1),
    }
    if random.chance(1, 2) {
        out.set("train.lr_min", "1e-4");
        out.set("train.weight_decay", random.one(&["0.0", "0.5"]));
        out.set("train.clip", random.one(&["0.0", "0.05"]));
        out.set("train.beta1", random.one(&["0.0", "0.8"]));
        out.set("train.eps", random.one(&["1e-8", "1e-3"]));
    }
    if random.chance(1, 4) {
        out.set("train.no_decay", random.one(&[r#"["embed_tokens"]"#, r#"["layers.0.*.o_proj", "lm_head"]"#]));
    }
    out.set("train.seed", random.upto(1_000_000));
    out.set("train.eval_sequences", random.upto(9));
    if patience || random.chance(1, 3) {
        out.set("train.eval_every", random.upto(2));
    }
    if patience {
        out.set("train.patience", random.upto(2));
    }
    if random.chance(1, 8) {
        out.set("train.skip", r#"["2+1"]"#);
    }
}

fn grid(out: &mut Drawn, random: &mut Random, cells: &Cells, experts: Option<usize>) {
    let Cells { dp, cp, tp, microbatch, .. } = *cells;
    if random.chance(5, 6) {
        out.set("grid.dp", dp);
        // Groups are powers of two that divide both.
        let common = |n: &usize| dp.is_multiple_of(*n) && experts.is_some_and(|experts| experts.is_multiple_of(*n));
        let groups: Vec<usize> = [1, 2, 4, 8].into_iter().filter(common).collect();
        if groups.len() > 1 {
            out.set("grid.ep", random.one(&groups));
        }
    }
    out.set("grid.tp", tp);
    if cp > 1 || random.chance(1, 8) {
        out.set("grid.cp", cp);
    }
    out.set("grid.microbatch", microbatch);
    if random.chance(1, 2) {
        out.word("grid.accumulate", random.one(&["local", "reduced", "reduced"]));
    }
}

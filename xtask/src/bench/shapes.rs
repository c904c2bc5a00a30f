//! What is trained, and how it is split.

use std::path::Path;

use program::balance;
use serde_json::{Value, json};
use spec::Run;

/// A model of [`spec::model::PRESETS`] (E: M with experts) with the batch of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Its name on the command line and in the table.
    pub name: &'static str,
    /// The preset.
    pub preset: &'static str,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per step.
    pub batch: usize,
    /// What the model has more than its preset.
    pub experts: &'static str,
    /// Steps that it is trained before anything is measured, with an auxiliary loss; 0: it is measured with its initial weights.
    pub balancing: u64,
}

const DENSE: Shape = Shape { name: "", preset: "M", seq: 256, batch: 8, experts: "", balancing: 0 };

/// What the model of shape E has more than its preset.
const EXPERTS: &str = "experts = 8\nexperts_per_token = 2\nexpert_ffn = 352\n";
/// And that of E-even: every row chooses both.
const EVEN: &str = "experts = 2\nexperts_per_token = 2\nexpert_ffn = 352\n";
/// What balances the routers of a shape with `balancing`.
const BALANCE: &str = "aux_loss = 1e-2\n";

/// All shapes. Most rows of E choose the same two or three experts from its first step on, and the rank that has these makes the
/// other one wait; E-even has the work of E, and as many rows for every expert. E-balanced is E as it is in use: with routers
/// that were trained with an auxiliary loss.
pub const SHAPES: [Shape; 7] = [
    Shape { name: "S", preset: "S", seq: 128, batch: 16, ..DENSE },
    Shape { name: "M", ..DENSE },
    Shape { name: "L", preset: "L", batch: 4, ..DENSE },
    Shape { name: "long", seq: 2048, batch: 1, ..DENSE },
    Shape { name: "E", experts: EXPERTS, ..DENSE },
    Shape { name: "E-even", experts: EVEN, ..DENSE },
    Shape { name: "E-balanced", experts: EXPERTS, balancing: 300, ..DENSE },
];

/// A layout, and how the peer does the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    /// Its name on the command line and in the table.
    pub name: &'static str,
    /// Ranks on the data axis.
    pub dp: usize,
    /// Of these, ranks that share the work of experts.
    pub ep: usize,
    /// Ranks on the context axis.
    pub cp: usize,
    /// Ranks on the tensor axis.
    pub tp: usize,
    /// Tensor cells that each rank hosts.
    pub cells: usize,
    /// Runs at once, each on cores of its own, that share nothing but the machine: no layout on as many cores is faster by much.
    pub apart: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// They share the work evenly, the head counted, and not the layers.
    pub balanced: bool,
    /// ZeRO stage.
    pub zero: usize,
    /// Threads of a rank.
    pub threads: usize,
    /// What lies in files (`layout.offload`).
    pub offload: &'static str,
    /// What the peer runs; the fastest counts.
    pub variants: &'static [&'static str],
}

/// Microbatches of a step through the pipeline.
const PIPELINE_MICROBATCHES: usize = 4;

const ALONE: Mode = Mode {
    name: "",
    dp: 1,
    ep: 1,
    cp: 1,
    tp: 1,
    cells: 1,
    apart: 1,
    pp: 1,
    balanced: false,
    zero: 0,
    threads: 1,
    offload: "none",
    variants: &["eager", "compiled"],
};

/// One rank with one thread: what others are measured against.
pub const ONE: Mode = Mode { name: "1x1", ..ALONE };

/// All modes.
pub const MODES: [Mode; 14] = [
    ONE,
    Mode { name: "1x2", threads: 2, ..ALONE },
    Mode { name: "apart2", apart: 2, variants: &[], ..ALONE },
    Mode { name: "cells4", cells: 4, variants: &[], ..ALONE },
    Mode { name: "dp2-zero0", dp: 2, variants: &["ddp"], ..ALONE },
    Mode { name: "dp2-zero1", dp: 2, zero: 1, variants: &["zero", "fsdp2"], ..ALONE },
    Mode { name: "dp2-zero3", dp: 2, zero: 3, variants: &["fsdp2"], ..ALONE },
    Mode { name: "tp2", tp: 2, variants: &["dtensor"], ..ALONE },
    Mode { name: "pp2", pp: 2, variants: &["gpipe", "1f1b"], ..ALONE },
    Mode { name: "pp2-balanced", pp: 2, balanced: true, variants: &["gpipe", "1f1b"], ..ALONE },
    Mode { name: "cp2", cp: 2, variants: &[], ..ALONE },
    Mode { name: "ep2", dp: 2, ep: 2, variants: &[], ..ALONE },
    Mode { name: "offload-optimizer", offload: "optimizer", variants: &[], ..ALONE },
    Mode { name: "offload-all", offload: "optimizer+activations", variants: &[], ..ALONE },
];

impl Mode {
    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.dp * self.cp * self.tp * self.pp
    }

    /// True if `shape` is measured in this mode: one long sequence has only its context to share out, experts their work, and
    /// only a large state is worth a file.
    pub fn fits(&self, shape: &Shape) -> bool {
        if self.offload != ALONE.offload {
            return shape.name == "L";
        }
        let alone = self.ranks() == 1 && self.cells == 1;
        match shape.name {
            "S" if self.cells > 1 || self.balanced => false,
            "E" | "E-balanced" => alone || self.ep > 1,
            "E-even" => self.ep > 1 || self.apart > 1,
            "long" => alone || self.cp > 1,
            _ => self.cp * self.ep == 1,
        }
    }

    /// Cores that one run of it keeps busy.
    pub fn cores(&self) -> usize {
        self.ranks() * self.threads
    }

    /// Cores that all its runs keep busy.
    pub fn all_cores(&self) -> usize {
        self.apart * self.cores()
    }

    /// Grid and layout as overrides of a run; the grid is the one that is fastest under this layout.
    pub fn sets(&self, shape: &Shape) -> Vec<String> {
        let microbatches = if self.pp > 1 { PIPELINE_MICROBATCHES } else { 1 };
        let set = |key: &str, value: usize| format!("{key}={value}");
        let stages = self.stages(shape).map(|stages| format!("layout.stages={stages:?}"));
        let sets = vec![
            set("grid.dp", self.dp),
            set("grid.ep", self.ep),
            set("grid.cp", self.cp),
            set("grid.tp", self.tp * self.cells),
            set("grid.microbatch", shape.batch / self.dp / microbatches),
            set("layout.dp", self.dp),
            set("layout.cp", self.cp),
            set("layout.tp", self.tp),
            set("layout.pp", self.pp),
            set("layout.zero", self.zero),
            set("layout.threads", self.threads),
            format!("layout.offload={}", self.offload),
        ];
        sets.into_iter().chain(stages).collect()
    }

    /// Layers of each stage, where they are not the even ones.
    pub fn stages(&self, shape: &Shape) -> Option<Vec<usize>> {
        let even = Mode { balanced: false, ..*self };
        let run = self.balanced.then(|| shape.run(&even).expect("a shape has every mode of the table"))?;
        Some(balance::best(&run.model, &run.layout, shape.seq).0)
    }
}

impl Shape {
    /// The run file of `steps` steps on synthetic data: no validation, a checkpoint only at the end.
    pub fn run_file(&self, steps: u64) -> String {
        self.file(steps, "", "", "")
    }

    /// The same from trained weights. They stay what they are: the learning rate is next to nothing; and the data comes in
    /// another order than they were trained with.
    pub fn run_file_from(&self, steps: u64, weights: &Path) -> String {
        let model = format!("{BALANCE}from = {:?}\n", weights.display().to_string());
        self.file(steps, &model, "seed = 2\n", "lr = 1e-9\n")
    }

    /// The run file of the training that comes before, if there is one.
    pub fn balancing_file(&self) -> Option<String> {
        (self.balancing > 0).then(|| self.file(self.balancing, BALANCE, "", "warmup = 20\n"))
    }

    fn file(&self, steps: u64, model: &str, data: &str, train: &str) -> String {
        let Self { preset, seq, batch, experts, .. } = self;
        format!(
            "[model]\npreset = \"{preset}\"\n{experts}{model}\n[data]\nsource = \"synthetic\"\neod = false\n{data}\n\
             [train]\nsteps = {steps}\nbatch = {batch}\nseq = {seq}\neval_sequences = 0\n{train}"
        )
    }

    /// The run, to read its numbers.
    pub fn run(&self, mode: &Mode) -> Result<Run, String> {
        Run::parse(&self.run_file(1), self.name, &mode.sets(self), mode.cores()).map_err(|e| e.to_string())
    }

    /// The shape as the peer's script takes it.
    pub fn json(&self) -> Result<Value, String> {
        let model = self.run(&ALONE)?.model;
        Ok(json!({
            "hidden": model.hidden, "layers": model.layers, "heads": model.heads, "kv_heads": model.kv_heads,
            "ffn": model.ffn, "vocab": model.vocab, "seq": self.seq, "batch": self.batch,
            "experts": model.moe.as_ref().map_or(0, |moe| moe.experts),
            "experts_per_token": model.moe.as_ref().map_or(0, |moe| moe.per_token),
            "expert_ffn": model.moe.as_ref().map_or(0, |moe| moe.ffn),
        }))
    }
}

/// The entries of `all` named in `names`, in the order of `all`; all of them where none is named.
pub fn pick<T: Copy>(all: &[T], name: impl Fn(&T) -> &'static str, names: &[String]) -> Result<Vec<T>, String> {
    let known: Vec<_> = all.iter().map(&name).collect();
    if let Some(other) = names.iter().find(|n| !known.contains(&n.as_str())) {
        return Err(format!("{other:?} is none of {}", known.join(", ")));
    }
    Ok(all.iter().filter(|x| names.is_empty() || names.iter().any(|n| n == name(x))).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_has_every_mode() {
        for shape in SHAPES {
            for mode in MODES.iter().filter(|mode| mode.fits(&shape)) {
                let run = shape.run(mode).unwrap();
                assert_eq!(run.layout.world(), mode.ranks(), "{} {}", shape.name, mode.name);
                assert_eq!(run.layout.threads, mode.threads);
                assert_eq!(run.tokens_per_step(), shape.seq * shape.batch);
                assert_eq!(run.grid.microbatches, if mode.pp > 1 { 4 } else { 1 });
            }
        }
    }

    #[test]
    fn trained_weights_keep_the_shape_and_stay_what_they_are() {
        let balanced = SHAPES.iter().find(|shape| shape.balancing > 0).unwrap();
        let before = Run::parse(&balanced.balancing_file().unwrap(), "before", &[], 1).unwrap();
        assert_eq!((before.train.steps, before.model.moe.as_ref().unwrap().aux_loss), (balanced.balancing, 1e-2));
        let file = balanced.run_file_from(7, Path::new("a folder"));
        assert!(file.contains("from = \"a folder\"\n") && file.contains("lr = 1e-9\n"), "{file}");
        let plain = Run::parse(&file.replace("from = \"a folder\"\n", ""), "after", &[], 1).unwrap();
        assert_eq!(plain.model, before.model);
        assert!(SHAPES[0].balancing_file().is_none());
    }

    #[test]
    fn the_shapes_are_those_of_the_table() {
        let l = SHAPES[2].json().unwrap();
        let want = json!({
            "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192, "seq": 256, "batch": 4,
            "experts": 0, "experts_per_token": 0, "expert_ffn": 0,
        });
        assert_eq!(l, want);
    }

    #[test]
    fn names_are_picked_or_refused() {
        let names = |words: &[&str]| words.iter().map(|w| w.to_string()).collect::<Vec<_>>();
        let picked = |words: &[&str]| pick(&SHAPES, |s| s.name, &names(words));
        assert_eq!(picked(&[]).unwrap().len(), SHAPES.len());
        assert_eq!(picked(&["L", "S"]).unwrap(), [SHAPES[0], SHAPES[2]]);
        assert!(picked(&["XL"]).unwrap_err().contains("S, M, L, long, E, E-even, E-balanced"));
    }
}

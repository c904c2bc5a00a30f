//! Text from a trained model: the shortest way to see that it learned something.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use checkpoint::Checkpoint;
use data::Speech;
use fabric::FabricOptions;
use kernels::{Ctx, Simd};
use program::{Instr, Mode, Op, Program, Value};
use spec::{Run, Unit};

use crate::buffers::Tokens;
use crate::error::TrainError;
use crate::exec::Executor;
use crate::persist;

/// How to draw the next token.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Tokens that may be drawn, the most likely first.
    pub top_k: usize,
    /// Seed of the draw.
    pub seed: u64,
}

/// `len` tokens that follow `prompt`, by the model in `from`. `run` is any run of that model; its layout is not used.
///
/// # Errors
/// A checkpoint that is not of this model or is damaged.
pub fn continue_text(
    run: &Run,
    from: &Path,
    prompt: &str,
    len: usize,
    sampling: Sampling,
    simd: Simd,
) -> Result<String, TrainError> {
    let alone = ["dp=1", "cp=1", "tp=1", "pp=1", "vpp=1", "schedule=1f1b", "zero=0"].map(|set| format!("layout.{set}"));
    let mut values = run.values.to_toml();
    // Explicit splits do not fit one rank.
    values = values
        .lines()
        .filter(|l| !["cells =", "stages =", "shard ="].iter().any(|key| l.starts_with(key)))
        .collect::<Vec<_>>()
        .join("\n");
    let run = Run::parse(&values, "the run of the checkpoint", &alone, 1)?;
    let checkpoint = Checkpoint::open(from)?;
    let endpoint = fabric::threads(1, &FabricOptions::default())?.pop().expect("one rank, one endpoint");
    let ctx = Ctx::new(simd, run.layout.threads);
    let mut executor = Executor::new(&run, &ctx, endpoint, Arc::new(AtomicBool::new(false)));
    persist::load(&mut executor, &checkpoint)?;
    let program = program::lower(&run, 0, Mode::Eval);
    executor.write_text(&program, &Speech::open(&run.data)?, prompt, len, sampling)
}

fn draw(logits: &[f32], sampling: Sampling, index: u64) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    order.truncate(if sampling.temperature > 0.0 { sampling.top_k.max(1) } else { 1 });
    let best = logits[order[0]];
    let weights: Vec<f64> = order
        .iter()
        .map(|i| f64::from(kernels::math::exp((logits[*i] - best) / sampling.temperature.max(1e-6))))
        .collect();
    let random = kernels::uniform_u64(sampling.seed, 0, index) as f64 / u64::MAX as f64;
    let mut left = random * weights.iter().sum::<f64>();
    for (token, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left <= 0.0 {
            return *token as u32;
        }
    }
    order[order.len() - 1] as u32
}

impl Executor<'_> {
    /// `len` tokens that follow `prompt`. All ranks call it, with their validation program; all get the same text.
    ///
    /// # Errors
    /// What the fabric reports.
    pub fn write_text(
        &mut self,
        program: &Program,
        speech: &Speech,
        prompt: &str,
        len: usize,
        sampling: Sampling,
    ) -> Result<String, TrainError> {
        let mut tokens = speech.encode(prompt)?;
        if tokens.is_empty() {
            tokens.push(data::EOD.min(self.run.model.vocab as u32 - 1));
        }
        for i in 0..len {
            let window = &tokens[tokens.len().saturating_sub(self.run.train.seq)..];
            let logits = self.next_logits(program, window)?;
            // End of document and padding are not text.
            tokens.push(draw(&logits[..logits.len().min(speech.ids())], sampling, i as u64));
        }
        Ok(speech.decode(&tokens)?)
    }

    /// Logits after the last of `window`, at most a sequence of tokens: the forward of the first unit alone, by the ranks
    /// that host it. The others take part in the gathers of its parameters, which their own first unit has as well.
    fn next_logits(&mut self, program: &Program, window: &[u32]) -> Result<Vec<f32>, TrainError> {
        let (seq, rows) = (self.place.seq, self.place.batch * self.place.seq);
        // Where several ranks host the first group, each names its unit by the first cell that it hosts.
        let first = self.place.data_cells.start;
        let unit = Unit { cell: if first < self.place.group.blocks { first } else { 0 }, mb: 0 };
        self.capture = Some(Vec::new());
        let first = Unit { cell: self.run.layout.cells[self.place.at.dp].start, mb: 0 };
        let gathers = |op: &Op| {
            matches!(
                op,
                Op::Collective { value: Value::Params(_), .. }
                    | Op::Post { value: Value::Params(_), .. }
                    | Op::Release(_)
            )
        };
        let mine = |instr: &&Instr| instr.unit == Some(first) && (first == unit || gathers(&instr.op));
        for instr in program.instrs.iter().filter(mine) {
            if instr.op != Op::Load {
                self.instruction(instr, Mode::Eval)?;
                continue;
            }
            let mut tokens = Tokens {
                ids: vec![0; rows],
                targets: vec![data::IGNORE; rows],
                doc_start: vec![0; rows],
                positions: (0..rows).map(|row| (row % seq) as u32).collect(),
                target_bytes: Vec::new(),
            };
            tokens.ids[..window.len()].copy_from_slice(window);
            self.load(unit, &|_| Ok(tokens.clone()))?;
        }
        self.forget(unit);
        // The ranks of the last chunk have a slice of the vocabulary each.
        let row = window.len() - 1;
        let mut mine = Vec::new();
        for (_, block, i, values) in self.capture.take().unwrap_or_default() {
            let mut rows = self.place.token_blocks().rows(block);
            if let Some(n) = rows.position(|r| self.place.whole_row(unit, r).1 == row) {
                let (first, valid) = self.place.vocab_part(i);
                let at = n * self.place.vocab_cell;
                mine.extend(first.to_le_bytes());
                mine.extend((valid as u32).to_le_bytes());
                mine.extend(values[at..at + valid].iter().flat_map(|v| v.to_le_bytes()));
            }
        }
        let all = self.comm.endpoint.all_gather_bytes(&self.comm.world, &mine)?;
        let mut logits = vec![f32::NEG_INFINITY; self.place.vocab];
        for bytes in all {
            let words: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            let mut rest = &words[..];
            while let [first, valid, tail @ ..] = rest {
                let (first, valid) = (*first as usize, *valid as usize);
                let slice = logits.get_mut(first..first + valid).filter(|_| tail.len() >= valid);
                let slice = slice.ok_or_else(|| TrainError::Internal("a slice of logits does not fit".into()))?;
                slice.iter_mut().zip(tail).for_each(|(logit, bits)| *logit = f32::from_bits(*bits));
                rest = &tail[valid..];
            }
        }
        Ok(logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_best_and_top_k_cuts() {
        let logits = [0.0, 3.0, 2.9, -1.0];
        let greedy = Sampling { temperature: 0.0, top_k: 4, seed: 1 };
        assert_eq!(draw(&logits, greedy, 0), 1);
        let two = Sampling { temperature: 1.0, top_k: 2, seed: 1 };
        let drawn: std::collections::BTreeSet<_> = (0..200).map(|i| draw(&logits, two, i)).collect();
        assert_eq!(drawn, [1, 2].into());
    }
}

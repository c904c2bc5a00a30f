//! Text from a trained model: the shortest way to see that it learned something.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use checkpoint::Checkpoint;
use fabric::FabricOptions;
use kernels::{Acc, Ctx, Mat, MatMut, Simd};
use program::{Mode, Op, Segment};
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

/// `len` bytes that follow `prompt`, by the model in `from`. `run` is any run of that model; its layout is not used.
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
    let alone: Vec<String> = ["layout.dp=1", "layout.tp=1", "layout.pp=1", "layout.vpp=1", "layout.schedule=1f1b"]
        .map(String::from)
        .to_vec();
    let mut values = run.values.to_toml();
    // Explicit splits do not fit one rank.
    values = values
        .lines()
        .filter(|l| !l.starts_with("cells =") && !l.starts_with("stages ="))
        .collect::<Vec<_>>()
        .join("\n");
    let run = Run::parse(&values, "the run of the checkpoint", &alone, 1)?;
    let checkpoint = Checkpoint::open(from)?;
    let endpoint = fabric::threads(1, &FabricOptions::default())?.pop().expect("one rank, one endpoint");
    let ctx = Ctx::new(simd, run.layout.threads);
    let mut executor = Executor::new(&run, &ctx, endpoint, Arc::new(AtomicBool::new(false)));
    persist::load(&mut executor, &checkpoint)?;
    let mut tokens: Vec<u32> = prompt.bytes().map(u32::from).collect();
    for i in 0..len {
        let window = &tokens[tokens.len().saturating_sub(run.train.seq)..];
        let logits = executor.next_logits(window)?;
        // End of document and padding are not text.
        tokens.push(draw(&logits[..logits.len().min(256)], sampling, i as u64));
    }
    Ok(data::decode(&tokens))
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
    /// Logits after the last of `window`, at most a sequence of tokens, on a rank that hosts everything.
    fn next_logits(&mut self, window: &[u32]) -> Result<Vec<f32>, TrainError> {
        let (seq, rows) = (self.place.seq, self.place.rows());
        let mut tokens = Tokens {
            ids: vec![0; rows],
            targets: vec![data::IGNORE; rows],
            doc_start: vec![0; rows],
            positions: (0..rows).map(|row| (row % seq) as u32).collect(),
        };
        tokens.ids[..window.len()].copy_from_slice(window);
        let unit = Unit { cell: 0, mb: 0 };
        let program = program::lower(self.run, self.place.rank, Mode::Eval);
        let normed = self.run_until(&program, unit, tokens, Segment::HeadNorm)?;
        let state = &self.chunks[&0];
        let hidden = self.place.hidden;
        let row = Mat::new(&normed, rows, hidden).rows_range(window.len() - 1..window.len());
        let weight = state.param(0, state.head_role());
        let vocab = weight.len() / hidden;
        let mut logits = vec![0.0; vocab];
        let w = Mat::new(weight, vocab, hidden);
        kernels::product(self.ctx, row, w.t(), MatMut::new(&mut logits, 1, vocab), Acc::Store);
        logits.truncate(self.place.vocab);
        Ok(logits)
    }

    /// Runs the instructions of `unit` up to `segment`; gives the rows that it normed.
    fn run_until(
        &mut self,
        program: &program::Program,
        unit: Unit,
        tokens: Tokens,
        segment: Segment,
    ) -> Result<Vec<f32>, TrainError> {
        let end = program
            .instrs
            .iter()
            .position(|i| i.unit == Some(unit) && matches!(i.op, Op::Compute(_, s) if s == segment));
        let end = end.ok_or_else(|| TrainError::Internal(format!("no {segment:?} of {unit:?}")))?;
        let mut tokens = Some(tokens);
        for instr in &program.instrs[..=end] {
            match instr.op {
                Op::Load => self.put_tokens(unit, tokens.take().unwrap_or_default()),
                _ => self.instruction(instr, Mode::Eval)?,
            }
        }
        self.take_normed(unit)
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

//! The vote: every rank's ballot to all, and one decision from the same bits. Pure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use spec::Recipe;
use spec::moe::AuxScope;
use spec::tensors::{STATE_CHUNK, Tensor};
use spec::tree::sum_f64;
use spec::{Grid, Leaf, Run};

use crate::buffers::LossSum;
use crate::error::TrainError;
use crate::leaves::Seen;

/// What one rank knows at the end of its backward.
#[derive(Debug, Default, PartialEq)]
pub struct Ballot {
    /// The rank was asked to stop after this step.
    pub stop: bool,
    /// Its state is not what it wrote after the last step.
    pub corrupt: bool,
    /// Before a checkpoint: what its writer says ([`crate::saver::Word`]).
    pub writer: Option<[u64; 4]>,
    /// What it made of leaves, in a step that is checked.
    pub leaves: Vec<Seen>,
    /// Loss sums of the leaves whose loss this rank speaks for.
    pub losses: Vec<(Leaf, LossSum)>,
    /// Sums of squares: (tensor, slice, first state chunk, one sum per state chunk).
    pub squares: Vec<(usize, usize, usize, Vec<f64>)>,
    /// Shares of the auxiliary loss: (leaf, layer, tensor cell), value.
    pub aux: Vec<((Leaf, usize, usize), f64)>,
    /// Rows of each expert: (layer, by expert). Those of all ranks add up to the step's.
    pub loads: Vec<(usize, Vec<u64>)>,
    /// Rows sent to ranks with their experts.
    pub copies: u64,
}

impl Ballot {
    /// As bytes, little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |n: u64| out.extend(n.to_le_bytes());
        put(u64::from(self.stop) | u64::from(self.corrupt) << 1 | u64::from(self.writer.is_some()) << 2);
        self.writer.into_iter().flatten().for_each(&mut put);
        put(self.leaves.len() as u64);
        self.leaves.iter().for_each(|seen| [seen.pass, seen.key, seen.hash].into_iter().for_each(&mut put));
        put(self.losses.len() as u64);
        for (leaf, sum) in &self.losses {
            [leaf.cell as u64, leaf.mb as u64, sum.nats.to_bits(), sum.tokens, sum.bytes]
                .into_iter()
                .for_each(&mut put);
        }
        put(self.squares.len() as u64);
        for (tensor, slice, first, sums) in &self.squares {
            [*tensor, *slice, *first, sums.len()].into_iter().for_each(|n| put(n as u64));
            sums.iter().for_each(|s| put(s.to_bits()));
        }
        if self.aux.is_empty() && self.loads.is_empty() {
            return out;
        }
        put(self.aux.len() as u64);
        for ((leaf, layer, cell), value) in &self.aux {
            [leaf.cell as u64, leaf.mb as u64, *layer as u64, *cell as u64, value.to_bits()]
                .into_iter()
                .for_each(&mut put);
        }
        put(self.copies);
        put(self.loads.len() as u64);
        for (layer, counts) in &self.loads {
            [*layer as u64, counts.len() as u64].into_iter().chain(counts.iter().copied()).for_each(&mut put);
        }
        out
    }

    /// From bytes.
    ///
    /// # Errors
    /// If they are not what [`Ballot::encode`] wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, TrainError> {
        let short = || TrainError::Internal(format!("a ballot of {} bytes breaks off", bytes.len()));
        let mut words = bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")));
        let mut next = || words.next().ok_or_else(short);
        let flags = next()?;
        let mut ballot = Self { stop: flags & 1 != 0, corrupt: flags & 2 != 0, ..Self::default() };
        if flags & 4 != 0 {
            ballot.writer = Some([next()?, next()?, next()?, next()?]);
        }
        for _ in 0..next()? {
            ballot.leaves.push(Seen { pass: next()?, key: next()?, hash: next()? });
        }
        for _ in 0..next()? {
            let leaf = Leaf { cell: next()? as usize, mb: next()? as usize };
            let sum = LossSum { nats: f64::from_bits(next()?), tokens: next()?, bytes: next()? };
            ballot.losses.push((leaf, sum));
        }
        for _ in 0..next()? {
            let [tensor, slice, first, count] = [next()?, next()?, next()?, next()?].map(|n| n as usize);
            let sums = (0..count).map(|_| next().map(f64::from_bits)).collect::<Result<_, _>>()?;
            ballot.squares.push((tensor, slice, first, sums));
        }
        // What follows is there with experts only.
        let Ok(count) = next() else { return Ok(ballot) };
        for _ in 0..count {
            let leaf = Leaf { cell: next()? as usize, mb: next()? as usize };
            let at = (leaf, next()? as usize, next()? as usize);
            ballot.aux.push((at, f64::from_bits(next()?)));
        }
        ballot.copies = next()?;
        for _ in 0..next()? {
            let (layer, count) = (next()? as usize, next()?);
            ballot.loads.push((layer, (0..count).map(|_| next()).collect::<Result<_, _>>()?));
        }
        Ok(ballot)
    }
}

/// All ballots together.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally {
    /// Loss over the step: cells in tree order, microbatches of a cell ascending.
    pub loss: LossSum,
    /// Sum of squares of the summed gradient.
    pub squares: f64,
    /// Somebody was asked to stop.
    pub stop: bool,
    /// The ranks whose state is not what they wrote.
    pub corrupt: Vec<u32>,
    /// What the writers of all ranks say, before a checkpoint.
    pub writers: Option<Vec<[u64; 4]>>,
    /// What each rank made of leaves, in a step that is checked.
    pub leaves: Vec<Vec<Seen>>,
    /// Auxiliary loss of every unit, weighted by its tokens with a target and summed; without its coefficient.
    pub aux: f64,
    /// Rows of each expert, by layer; empty without experts.
    pub loads: Vec<Vec<u64>>,
    /// Rows sent to ranks with their experts, all layers.
    pub copies: u64,
}

/// Adds up the ballots. With `tensors` empty no squares are expected (validation).
///
/// # Errors
/// If a leaf or a state chunk is missing or spoken for twice.
pub fn tally(ballots: &[Ballot], grid: &Grid, tensors: &[Tensor]) -> Result<Tally, TrainError> {
    let mut by_leaf = HashMap::new();
    for (leaf, sum) in ballots.iter().flat_map(|b| &b.losses) {
        if by_leaf.insert(*leaf, *sum).is_some() {
            return Err(TrainError::Internal(format!("the loss of {leaf:?} is counted twice")));
        }
    }
    let mut tokens_bytes = (0, 0);
    let mut cells = vec![0.0; grid.leaves()];
    for (cell, nats) in cells.iter_mut().enumerate() {
        for leaf in (0..grid.microbatches).map(|mb| Leaf { cell, mb }) {
            let sum =
                by_leaf.get(&leaf).ok_or_else(|| TrainError::Internal(format!("the loss of {leaf:?} is missing")))?;
            *nats += sum.nats;
            tokens_bytes.0 += sum.tokens;
            tokens_bytes.1 += sum.bytes;
        }
    }
    let loss = LossSum { nats: sum_f64(&cells), tokens: tokens_bytes.0, bytes: tokens_bytes.1 };
    let stop = ballots.iter().any(|b| b.stop);
    let corrupt = (0..).zip(ballots).filter(|(_, b)| b.corrupt).map(|(rank, _)| rank).collect();
    let writers = ballots.iter().map(|b| b.writer).collect();
    let leaves = ballots.iter().map(|b| b.leaves.clone()).collect();
    let squares = squares(ballots, grid, tensors)?;
    Ok(Tally { loss, squares, stop, corrupt, writers, leaves, aux: 0.0, loads: Vec::new(), copies: 0 })
}

/// [`tally`] of a training step, with what the routers report.
///
/// # Errors
/// As [`tally`]; a row that did not reach all of its experts, a share of the auxiliary loss that is missing.
pub fn tally_step(ballots: &[Ballot], run: &Run, tensors: &[Tensor]) -> Result<Tally, TrainError> {
    let mut tally = tally(ballots, &run.grid, tensors)?;
    let Some(moe) = &run.model.moe else { return Ok(tally) };
    tally.copies = ballots.iter().map(|ballot| ballot.copies).sum();
    tally.loads = vec![vec![0; moe.experts]; run.model.layers];
    for (layer, counts) in ballots.iter().flat_map(|b| &b.loads) {
        let Some(sums) = tally.loads.get_mut(*layer).filter(|sums| sums.len() == counts.len()) else {
            return Err(TrainError::Internal(format!("router counts of layer {layer} with {} experts", counts.len())));
        };
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let want = (run.tokens_per_step() * moe.per_token) as u64;
    for (layer, counts) in tally.loads.iter().enumerate() {
        let got: u64 = counts.iter().sum();
        if got != want {
            return Err(TrainError::Internal(format!("the experts of layer {layer} got {got} rows of {want}")));
        }
    }
    if moe.aux_loss > 0.0 {
        tally.aux = aux(ballots, run, moe.aux_scope)?;
    }
    Ok(tally)
}

/// For each leaf the tree over the tensor cells in every layer, layers ascending; then leaves as the loss adds them.
fn aux(ballots: &[Ballot], run: &Run, scope: AuxScope) -> Result<f64, TrainError> {
    let shares: HashMap<_, _> = ballots.iter().flat_map(|b| &b.aux).copied().collect();
    let mut cells = vec![0.0; run.grid.leaves()];
    for (cell, sum) in cells.iter_mut().enumerate() {
        for leaf in (0..run.grid.microbatches).map(|mb| Leaf { cell, mb }) {
            let mut of_leaf = 0.0;
            for layer in 0..run.model.layers {
                let share = |t| shares.get(&(leaf, layer, t)).copied();
                let shares = (0..run.grid.tp).map(share).collect::<Option<Vec<_>>>().ok_or_else(|| {
                    TrainError::Internal(format!("the {scope} auxiliary loss of {leaf:?} in layer {layer} is missing"))
                })?;
                of_leaf += sum_f64(&shares);
            }
            *sum += of_leaf;
        }
    }
    Ok(sum_f64(&cells))
}

/// The tree over the chunks of each slice, then the tree over all slices in canonical order.
fn squares(ballots: &[Ballot], grid: &Grid, tensors: &[Tensor]) -> Result<f64, TrainError> {
    let mut slices = Vec::new();
    let mut first_of = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        first_of.push(slices.len());
        let chunks = tensor.slice_len(grid.tp).div_ceil(STATE_CHUNK);
        slices.extend(std::iter::repeat_n(vec![None; chunks], tensor.slices(grid.tp)));
    }
    for (tensor, slice, first, sums) in ballots.iter().flat_map(|b| &b.squares) {
        for (k, sum) in sums.iter().enumerate() {
            let place =
                first_of.get(*tensor).and_then(|at| slices.get_mut(at + slice)).and_then(|s| s.get_mut(first + k));
            match place {
                Some(place @ None) => *place = Some(*sum),
                _ => {
                    let at = format!("tensor {tensor} slice {slice} chunk {}", first + k);
                    return Err(TrainError::Internal(format!(
                        "the gradient of {at} is counted twice or does not exist"
                    )));
                }
            }
        }
    }
    let sums = slices.iter().map(|chunks| {
        let sums = chunks.iter().copied().collect::<Option<Vec<f64>>>();
        sums.map(|s| sum_f64(&s)).ok_or_else(|| TrainError::Internal("a state chunk's gradient is missing".into()))
    });
    Ok(sum_f64(&sums.collect::<Result<Vec<_>, _>>()?))
}

/// What all ranks do next.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Mean loss in nats per token.
    pub loss: f64,
    /// Norm of the gradient of the mean loss, before clipping.
    pub grad_norm: f64,
    /// Factor on the summed gradient: 1 / tokens, and the clip.
    pub grad_scale: f32,
    /// Loss and norm are finite.
    pub finite: bool,
    /// The step is applied: it is finite, and not to be computed again.
    pub commit: bool,
    /// Stop after this step.
    pub stop: bool,
    /// Mean auxiliary loss of the experts, without its coefficient; not part of `loss`.
    pub aux: f64,
    /// Tokens with a target. Where there are none, `loss` is 0 and means nothing; the update is that of a zero gradient.
    pub targets: u64,
}

/// Decides; the gradient is normalised by the tokens of the whole step and clipped as
/// min(1, clip / (norm + 1e-6)), by the recipe of the step.
pub fn decide(tally: &Tally, recipe: &Recipe) -> Decision {
    let tokens = tally.loss.tokens.max(1) as f64;
    let loss = tally.loss.nats / tokens;
    let grad_norm = tally.squares.sqrt() / tokens;
    let clip = if recipe.clip > 0.0 { (recipe.clip / (grad_norm + 1e-6)).min(1.0) } else { 1.0 };
    let finite = loss.is_finite() && grad_norm.is_finite();
    Decision {
        loss,
        grad_norm,
        grad_scale: (clip / tokens) as f32,
        finite,
        commit: finite,
        stop: tally.stop,
        aux: tally.aux / tokens,
        targets: tally.loss.tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ballot() -> Ballot {
        let sum = LossSum { nats: 1.5, tokens: 3, bytes: 2 };
        Ballot {
            stop: true,
            corrupt: true,
            writer: Some([0, u64::MAX, 7, 5]),
            leaves: vec![Seen { pass: 1, key: 2, hash: u64::MAX }],
            losses: vec![(Leaf { cell: 0, mb: 0 }, sum), (Leaf { cell: 1, mb: 0 }, sum)],
            squares: vec![(0, 0, 0, vec![4.0])],
            ..Ballot::default()
        }
    }

    fn grid() -> Grid {
        Grid { dp: 2, cp: 1, ep: 1, tp: 1, microbatch: 1, microbatches: 1, accumulate: spec::Accumulate::Local }
    }

    fn one_tensor() -> Vec<Tensor> {
        let model = Run::parse(
            "[model]\npreset = \"nano\"\n[train]\nsteps = 1\nbatch = 2\nseq = 8\n[data]\nsource = \"synthetic\"",
            "t",
            &[],
            1,
        );
        spec::tensors::tensors(&model.unwrap().model).into_iter().filter(|t| t.name == "model.norm.weight").collect()
    }
    use spec::Run;

    #[test]
    fn a_ballot_reads_back_and_a_torn_one_is_refused() {
        let bytes = ballot().encode();
        assert_eq!(Ballot::decode(&bytes).unwrap(), ballot());
        for cut in 0..bytes.len() / 8 {
            assert!(Ballot::decode(&bytes[..cut * 8]).is_err(), "cut at word {cut}");
        }
    }

    #[test]
    fn what_routers_report_reads_back() {
        let leaf = Leaf { cell: 1, mb: 0 };
        let ballot = Ballot { aux: vec![((leaf, 2, 1), 0.25)], loads: vec![(0, vec![5, 0, 7])], copies: 9, ..ballot() };
        let bytes = ballot.encode();
        assert_eq!(Ballot::decode(&bytes).unwrap(), ballot);
        assert!(Ballot::decode(&bytes[..bytes.len() - 8]).is_err());
    }

    #[test]
    fn every_leaf_and_chunk_is_counted_once() {
        let good = tally(&[ballot()], &grid(), &one_tensor()).unwrap();
        assert_eq!((&good.corrupt[..], good.writers), (&[0][..], Some(vec![[0, u64::MAX, 7, 5]])));
        assert_eq!((good.loss.nats, good.loss.tokens, good.squares, good.stop), (3.0, 6, 4.0, true));
        let twice = tally(&[ballot(), ballot()], &grid(), &one_tensor()).unwrap_err();
        assert!(twice.to_string().contains("twice"), "{twice}");
        let mut less = ballot();
        less.losses.pop();
        assert!(tally(&[less], &grid(), &one_tensor()).unwrap_err().to_string().contains("missing"));
        let no_squares = Ballot { squares: vec![], ..ballot() };
        assert!(tally(&[no_squares], &grid(), &one_tensor()).unwrap_err().to_string().contains("missing"));
    }
}

//! How evenly the positions of a pipeline share a step, and the split of layers that shares it best.
//!
//! By the model FLOPs of [`spec::Model::flops_per_token`]: every layer is as much work as the next, and the chunk with the
//! output projection has that, too. What is bound by memory, norms and the loss among them, is not counted.

use spec::{Layout, Model};

/// Model FLOPs per token of a layer, and of the output projection.
fn parts(model: &Model, seq: usize) -> (f64, f64) {
    let head = Model { layers: 0, ..model.clone() }.flops_per_token(seq);
    ((model.flops_per_token(seq) - head) / model.layers as f64, head)
}

/// Model FLOPs per token of each pipeline position, forward and backward, over the mean of all: 1 everywhere is even.
pub fn shares(model: &Model, layout: &Layout, seq: usize) -> Vec<f64> {
    let layers: Vec<_> = layout.stages.iter().map(|stage| stage.len()).collect();
    shares_of(&layers, model, layout, seq)
}

/// The same if the chunks had so many `layers`.
fn shares_of(layers: &[usize], model: &Model, layout: &Layout, seq: usize) -> Vec<f64> {
    let (layer, head) = parts(model, seq);
    let mean = (layer * model.layers as f64 + head) / layout.pp as f64;
    let mut positions = vec![0.0; layout.pp];
    for (chunk, layers) in layers.iter().enumerate() {
        positions[layout.chunk_pp(chunk)] += layer * *layers as f64 / mean;
    }
    positions[layout.chunk_pp(layers.len() - 1)] += head / mean;
    positions
}

/// Layers of each chunk, at least one, such that the busiest position has least to do: each further layer goes to the
/// position that has least, of equals to the last, which keeps the fewest microbatches. And the share of the busiest one then.
pub fn best(model: &Model, layout: &Layout, seq: usize) -> (Vec<usize>, f64) {
    let mut layers = vec![1; layout.chunks()];
    for _ in layers.len()..model.layers {
        let shares = shares_of(&layers, model, layout, seq);
        let least =
            (0..layout.pp).rev().min_by(|a, b| shares[*a].total_cmp(&shares[*b])).expect("a pipeline has a position");
        let chunk = layout.chunks_of(least).min_by_key(|chunk| layers[*chunk]).expect("a position has a chunk");
        layers[chunk] += 1;
    }
    let most = largest(&shares_of(&layers, model, layout, seq));
    (layers, most)
}

/// The largest of `shares`.
pub fn largest(shares: &[f64]) -> f64 {
    shares.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{layout, model};
    use spec::{Grid, Schedule};

    /// The busiest position of every split of the layers into chunks.
    fn all_splits(chunks: usize, layers: usize) -> Vec<Vec<usize>> {
        if chunks == 1 {
            return vec![vec![layers]];
        }
        let rest =
            |first: usize| all_splits(chunks - 1, layers - first).into_iter().map(move |r| [vec![first], r].concat());
        (1..=layers + 1 - chunks).flat_map(rest).collect()
    }

    #[test]
    fn no_split_has_a_busiest_position_with_less() {
        for (layers, pp, vpp, schedule) in [
            (4, 2, 1, Schedule::OneFOneB),
            (7, 2, 1, Schedule::OneFOneB),
            (8, 3, 1, Schedule::GPipe),
            (9, 4, 1, Schedule::OneFOneB),
            (8, 2, 2, Schedule::Interleaved),
            (9, 2, 2, Schedule::ZbV),
        ] {
            for vocab in [16, 2048, 65536] {
                let model = Model { vocab, ..model(layers) };
                let grid = Grid::new(&model, 8, 32, 1, None, 1).unwrap();
                let layout = layout(&model, &grid, [1, 1, pp], schedule, (vpp > 1).then_some(vpp));
                let (found, share) = best(&model, &layout, 32);
                let of = |split: &[usize]| largest(&shares_of(split, &model, &layout, 32));
                let least = all_splits(pp * vpp, layers).iter().map(|s| of(s)).fold(f64::MAX, f64::min);
                assert!(
                    (share - least).abs() < 1e-9,
                    "{layers} layers, vocab {vocab}, pp {pp}: {found:?} {share} > {least}"
                );
                let shares = shares(&model, &layout, 32);
                assert!((shares.iter().sum::<f64>() - pp as f64).abs() < 1e-9, "{shares:?}");
            }
        }
    }
}

//! Which state a chunk of layers holds.

use spec::tensors::{Cut, Home, Role, Tensor, tensors};
use spec::{Grid, Layout, Model};

/// The tensors of `chunk` in canonical order.
///
/// Chunk 0 holds the embedding, every chunk its layers, the last chunk the final norm and
/// the output projection. A tied embedding that is used on two chunks has a copy on each:
/// on the last chunk it comes at the end. With one chunk there is one copy.
pub fn chunk_tensors(model: &Model, layout: &Layout, chunk: usize) -> Vec<Tensor> {
    let last = layout.chunks() - 1;
    let all = tensors(model);
    let copy = (tied_apart(model, layout) && chunk == last)
        .then(|| all.iter().find(|t| t.role == Role::Embed).cloned())
        .flatten();
    let mut held: Vec<Tensor> = all
        .into_iter()
        .filter(|t| match t.home {
            Home::Embed => chunk == 0,
            Home::Layer(layer) => layout.stages[chunk].contains(&layer),
            Home::Head => chunk == last,
        })
        .collect();
    held.extend(copy);
    held
}

/// True if a tied embedding is used as input and as output on two chunks: each has a copy, also where both lie on one
/// rank (V placements), so that a chunk's state does not depend on its neighbours.
pub fn tied_apart(model: &Model, layout: &Layout) -> bool {
    model.tied && layout.chunks() > 1
}

/// Tensor cells that a rank hosts.
pub fn cells_hosted(grid: &Grid, layout: &Layout) -> usize {
    grid.tp / layout.tp
}

/// Lengths of the hosted slices of `tensor`: one of all elements where every cell holds all.
pub(crate) fn hosted(tensor: &Tensor, grid: &Grid, layout: &Layout) -> impl Iterator<Item = usize> + use<> {
    let slices = if tensor.cut == Cut::Whole { 1 } else { cells_hosted(grid, layout) };
    std::iter::repeat_n(tensor.slice_len(grid.tp), slices)
}

/// Elements of the norm and QK-norm vectors and routers of `chunk`, on the last chunk with the final norm.
pub fn norm_elements(model: &Model, layout: &Layout, chunk: usize) -> usize {
    let router = model.moe.as_ref().map_or(0, |moe| moe.experts * model.hidden);
    let layer = 2 * model.hidden + if model.qk_norm { 2 * model.head_dim } else { 0 } + router;
    let head = if chunk + 1 == layout.chunks() { model.hidden } else { 0 };
    layout.stages[chunk].len() * layer + head
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{layout, model};
    use spec::Schedule;

    fn names(model: &Model, layout: &Layout, chunk: usize) -> Vec<String> {
        chunk_tensors(model, layout, chunk).into_iter().map(|t| t.name).collect()
    }

    #[test]
    fn every_tensor_has_one_chunk_and_a_tied_one_two() {
        for tied in [false, true] {
            for pp in [1, 2, 4] {
                let model = Model { tied, ..model(4) };
                let grid = Grid::new(&model, 8, 32, 1, Some(4), 2).unwrap();
                let layout = layout(&model, &grid, [1, 1, pp], Schedule::OneFOneB, None);
                let got: Vec<_> = (0..pp).flat_map(|c| names(&model, &layout, c)).collect();
                let mut want: Vec<_> = tensors(&model).into_iter().map(|t| t.name).collect();
                if tied && pp > 1 {
                    want.push("model.embed_tokens.weight".into());
                }
                assert_eq!(got, want, "tied {tied} pp {pp}");
            }
        }
    }

    #[test]
    fn norms_are_the_whole_tensors() {
        for qk_norm in [false, true] {
            let model = Model { qk_norm, ..model(4) };
            let grid = Grid::new(&model, 8, 32, 1, Some(4), 2).unwrap();
            let layout = layout(&model, &grid, [1, 1, 2], Schedule::OneFOneB, None);
            for chunk in 0..2 {
                let want: usize = chunk_tensors(&model, &layout, chunk)
                    .iter()
                    .filter(|t| t.cut == Cut::Whole)
                    .map(|t| t.rows * t.cols)
                    .sum();
                assert_eq!(norm_elements(&model, &layout, chunk), want);
            }
        }
    }
}

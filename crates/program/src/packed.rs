//! Which weights stay packed as right operands of products: those that are used again before they change. Pure, from the
//! list alone.
//!
//! A weight is used in two forms, each with panels of its own. Experts are left out: which rows they see, and how many, the
//! routers tell.

use std::collections::{HashMap, HashSet};

use spec::tensors::Role;
use spec::{Grid, Layout, Model};

use crate::buckets::Bucket;
use crate::flow::Spare;
use crate::instr::{Instr, Op, Pass, Program, Segment};

/// Columns to which panels are filled up, at most.
const STRIP: usize = 32;

/// How a weight `w`, stored [out, in], stands in a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// x w^T: transposed.
    Forward,
    /// dy w: as it is.
    Input,
}

/// A weight of a chunk in one of its forms; layer-less ones stand at layer 0. The output projection is [`Role::LmHead`], also
/// where it is tied.
pub type Use = (usize, Role, Form);

/// The weights that an instruction multiplies with. `contexts`: there are context cells, so that queries, keys and values have a
/// segment of their own.
pub fn uses(pass: Pass, segment: Segment, contexts: bool) -> Vec<Use> {
    let form = match (pass, segment) {
        (Pass::BackwardWeight, _) => return Vec::new(),
        (Pass::Backward | Pass::BackwardInput, _) | (_, Segment::Loss(_)) => Form::Input,
        _ => Form::Forward,
    };
    let outputs = !matches!(pass, Pass::RecomputeKept);
    let (layer, roles): (usize, &[Role]) = match segment {
        Segment::Qkv(layer) => (layer, &[Role::Q, Role::K, Role::V]),
        Segment::Attn(layer) => match (contexts, outputs) {
            (true, true) => (layer, &[Role::O]),
            (true, false) => return Vec::new(),
            (false, true) => (layer, &[Role::Q, Role::K, Role::V, Role::O]),
            (false, false) => (layer, &[Role::Q, Role::K, Role::V]),
        },
        Segment::Mlp(layer) if outputs => (layer, &[Role::Gate, Role::Up, Role::Down]),
        Segment::Mlp(layer) => (layer, &[Role::Gate, Role::Up]),
        Segment::Logits(_) | Segment::Loss(_) => (0, &[Role::LmHead]),
        _ => return Vec::new(),
    };
    roles.iter().map(|role| (layer, *role, form)).collect()
}

fn uses_of(instr: &Instr, grid: &Grid) -> Vec<(usize, Use)> {
    match instr.op {
        Op::Compute(pass, segment) => {
            uses(pass, segment, grid.cp > 1).into_iter().map(|of| (instr.chunk, of)).collect()
        }
        _ => Vec::new(),
    }
}

/// The bucket of a weight: that of a tied output projection on the chunk of the input is the embedding's.
fn bucket_of(model: &Model, layout: &Layout, (layer, role, _): Use) -> Bucket {
    match role {
        Role::LmHead if model.tied && layout.chunks() == 1 => Bucket::Embed,
        Role::LmHead => Bucket::Head,
        _ => Bucket::Layer(layer),
    }
}

/// The weights that a rank keeps packed in a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Packed {
    kept: HashSet<(usize, Use)>,
}

impl Packed {
    /// Those that `program` uses more than once while they stay what they are: gathered parameters (zero 3) until they are
    /// released, others for the whole list. None where the layout refuses it.
    pub fn new(model: &Model, grid: &Grid, layout: &Layout, program: &Program) -> Self {
        let (mut kept, mut used) = (HashSet::new(), HashSet::new());
        if !layout.keep_packed {
            return Self { kept };
        }
        for instr in &program.instrs {
            if let Op::Release(bucket) = instr.op {
                used.retain(|(chunk, of)| *chunk != instr.chunk || bucket_of(model, layout, *of) != bucket);
            }
            for of in uses_of(instr, grid) {
                if !used.insert(of) {
                    kept.insert(of);
                }
            }
        }
        Self { kept }
    }

    /// Whether `of` on `chunk` is one of them.
    pub fn keeps(&self, chunk: usize, of: Use) -> bool {
        self.kept.contains(&(chunk, of))
    }

    /// Bytes of all panels: buffers of released ones are used again by length.
    pub fn bytes(&self, model: &Model, grid: &Grid, layout: &Layout, program: &Program) -> u64 {
        let (mut spare, mut alive) = (Spare::default(), HashSet::new());
        let lengths: HashMap<_, _> = self.kept.iter().map(|of| (*of, lengths(model, grid, layout, of.1))).collect();
        for instr in &program.instrs {
            if let Op::Release(bucket) = instr.op {
                alive.retain(|of: &(usize, Use)| {
                    let gone = of.0 == instr.chunk && bucket_of(model, layout, of.1) == bucket;
                    lengths[of].iter().filter(|_| gone).for_each(|len| spare.give(*len));
                    !gone
                });
            }
            for of in uses_of(instr, grid).into_iter().filter(|of| self.kept.contains(of)) {
                if alive.insert(of) {
                    lengths[&of].iter().for_each(|len| spare.take(*len));
                }
            }
        }
        4 * spare.elements()
    }
}

/// Numbers of the panels of a weight, one after the other: of all hosted tensor cells together, or of each.
fn lengths(model: &Model, grid: &Grid, layout: &Layout, (_, role, form): Use) -> Vec<usize> {
    let cells = grid.tp / layout.tp;
    let (hidden, dim) = (model.hidden, model.head_dim);
    let width = match role {
        Role::Q | Role::O => model.heads * dim,
        Role::K | Role::V => model.kv_heads * dim,
        Role::LmHead => model.vocab_padded(),
        _ => model.ffn,
    };
    let cell = width / grid.tp;
    let len = |k: usize, n: usize| k * n.next_multiple_of(STRIP);
    match (role, form) {
        (Role::O | Role::Down, Form::Forward) => vec![len(cell, hidden); cells],
        (Role::O | Role::Down, Form::Input) => vec![len(hidden, cell); cells],
        (Role::LmHead, Form::Forward) => vec![len(hidden, cell); cells],
        (_, Form::Forward) => vec![len(hidden, cells * cell)],
        (_, Form::Input) => vec![len(cell, hidden); cells],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instr::Mode;
    use crate::lower::lower_parts;
    use crate::testing::{model, request};
    use spec::Schedule;

    fn packed(microbatches: usize, zero: usize, keep: bool) -> (Packed, u64) {
        let model = model(4);
        let grid = Grid::new(&model, microbatches, 32, 1, Some(1), 1).unwrap();
        let request =
            spec::layout::LayoutRequest { zero, keep_packed: keep, ..request([1, 1, 1], Schedule::OneFOneB, None) };
        let layout = Layout::resolve(&request, &grid, &model, 1).unwrap();
        let program = lower_parts(&model, &grid, &layout, 32, 0, Mode::Train);
        let packed = Packed::new(&model, &grid, &layout, &program);
        let bytes = packed.bytes(&model, &grid, &layout, &program);
        (packed, bytes)
    }

    #[test]
    fn what_is_used_once_is_not_kept() {
        assert_eq!(packed(1, 0, true), (Packed::default(), 0));
        let (all, bytes) = packed(4, 0, true);
        assert!(all.keeps(0, (1, Role::Down, Form::Input)) && all.keeps(0, (0, Role::LmHead, Form::Forward)));
        assert!(bytes > 0);
        assert_eq!(packed(4, 0, false), (Packed::default(), 0));
    }

    #[test]
    fn gathered_weights_are_kept_until_they_are_released() {
        let model = model(4);
        let grid = Grid::new(&model, 4, 32, 1, Some(2), 1).unwrap();
        let of = |reshard| {
            let grid = Grid { accumulate: spec::Accumulate::Reduced, ..grid.clone() };
            let request = spec::layout::LayoutRequest {
                zero: 3,
                reshard,
                keep_packed: true,
                ..request([2, 1, 1], Schedule::OneFOneB, None)
            };
            let layout = Layout::resolve(&request, &grid, &model, 1).unwrap();
            let program = lower_parts(&model, &grid, &layout, 32, 0, Mode::Train);
            Packed::new(&model, &grid, &layout, &program)
        };
        let layer = (1, Role::Gate, Form::Forward);
        assert!(!of(spec::Reshard::Always).keeps(0, layer), "released after each use");
        assert!(of(spec::Reshard::AfterBackward).keeps(0, layer), "used by two microbatches");
    }
}

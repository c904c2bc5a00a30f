//! When what a layer keeps for backward leaves memory, and when it comes back (`layout.offload` with activations).
//!
//! A layer of a unit is put away when its forward is over, and fetched while the backward that comes before its own runs:
//! so two of them are in memory. What is used next is not put away: it would come back at once. That follows from a rank's
//! list alone, hence is no part of it: nothing is computed or said.

use std::collections::{BTreeMap, HashMap};

use spec::Unit;

use crate::instr::{Instr, Op, Pass, Program, Segment, Value};
use crate::kept::Kept;

/// What a layer keeps of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The chunk of layers.
    pub chunk: usize,
    /// The unit.
    pub unit: Unit,
    /// The layer.
    pub layer: usize,
}

/// What happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Move {
    /// It begins to go to the file. Its memory is free at the next move, whichever that is.
    Store(Key),
    /// It is used now: it must be there.
    Take(Key),
    /// It takes memory again and begins to come back.
    Want(Key),
}

/// The moves of one rank in a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shelf {
    /// By the number of the instruction that they come before.
    moves: BTreeMap<usize, Vec<Move>>,
}

/// The layer of a unit that keeps or reads something in `instr`.
fn key(instr: &Instr) -> Option<Key> {
    let layer = match instr.op {
        Op::Compute(_, segment) | Op::Drop(segment) => match segment {
            Segment::AttnNorm(l) | Segment::Qkv(l) | Segment::Attn(l) | Segment::MlpNorm(l) | Segment::Mlp(l) => l,
            Segment::Down(l) => l,
            Segment::Route(l) | Segment::Experts(l) | Segment::Residual(l) => l,
            Segment::Embed | Segment::HeadNorm | Segment::Logits(_) | Segment::Loss(_) => return None,
        },
        Op::Collective { value, .. } => match value {
            Value::KeyValues(l) | Value::KeyValueGrads(l) | Value::Dispatch(l) | Value::Combine(l) => l,
            Value::DispatchGrad(l) | Value::CombineGrad(l) => l,
            _ => return None,
        },
        _ => return None,
    };
    Some(Key { chunk: instr.chunk, unit: instr.unit?, layer })
}

/// The use of a layer: after its forward (number of the next instruction), and at the first instruction behind it.
struct Use {
    key: Key,
    over: usize,
    back: usize,
}

impl Shelf {
    /// The moves of a training step's list.
    pub fn new(program: &Program) -> Self {
        let mut over: HashMap<Key, usize> = HashMap::new();
        let mut uses: Vec<Use> = Vec::new();
        for (at, instr) in program.instrs.iter().enumerate() {
            let Some(key) = key(instr) else { continue };
            match instr.op {
                Op::Compute(Pass::Forward, Segment::Residual(_)) => drop(over.insert(key, at + 1)),
                Op::Drop(_) => drop(over.entry(key).and_modify(|over| *over = at + 1)),
                // The first time that something is read after the forward: uses come out in that order.
                _ => uses.extend(over.remove(&key).map(|over| Use { key, over, back: at })),
            }
        }
        let mut moves: BTreeMap<usize, Vec<Move>> = BTreeMap::new();
        for pair in uses.windows(2) {
            let Use { key, over, back } = pair[1];
            if over < pair[0].back {
                moves.entry(over).or_default().push(Move::Store(key));
                moves.entry(pair[0].back).or_default().push(Move::Want(key));
                moves.entry(back).or_default().push(Move::Take(key));
            }
        }
        moves.values_mut().for_each(|moves| moves.sort_unstable());
        Self { moves }
    }

    /// The moves before instruction number `at`, in order.
    pub fn before(&self, at: usize) -> &[Move] {
        self.moves.get(&at).map_or(&[], Vec::as_slice)
    }

    /// The list's moves and instructions in order, with the bytes that are in memory for backward and in the file after each.
    fn walk(&self, program: &Program, sizes: &Kept, mut see: impl FnMut(i64, i64)) {
        let (mut here, mut away, mut leaving) = (0, 0, 0);
        let mut of: HashMap<Key, i64> = HashMap::new();
        for (at, instr) in program.instrs.iter().enumerate() {
            for step in self.before(at) {
                here -= std::mem::take(&mut leaving);
                match step {
                    Move::Store(key) => {
                        leaving = of.get(key).copied().unwrap_or(0);
                        away += leaving;
                    }
                    Move::Want(key) => here += of.get(key).copied().unwrap_or(0),
                    // Its place in the file is free again.
                    Move::Take(key) => away -= of.get(key).copied().unwrap_or(0),
                }
                see(here, away);
            }
            let change = sizes.change(instr);
            here += change;
            // What a stream's end keeps is the head's.
            let end = matches!(instr.op, Op::Compute(_, Segment::Residual(_)));
            if let Some(key) = key(instr).filter(|_| !end) {
                *of.entry(key).or_default() += change;
            }
            see(here, away);
        }
    }

    /// Most bytes in memory for backward, with those on their way to the file or back.
    pub fn most_kept(&self, program: &Program, sizes: &Kept) -> u64 {
        let mut most = 0;
        self.walk(program, sizes, |here, _| most = most.max(here));
        most as u64
    }

    /// Most bytes in the file.
    pub fn most_away(&self, program: &Program, sizes: &Kept) -> u64 {
        let mut most = 0;
        self.walk(program, sizes, |_, away| most = most.max(away));
        most as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mode, lower_all_parts, testing};
    use spec::{Grid, Recompute, Schedule};
    use std::collections::HashSet;

    /// Whatever the schedule: a layer is in memory whenever an instruction names it, comes and goes as often, and what is in
    /// memory is less than without a file.
    #[test]
    fn a_layer_is_there_when_it_is_used() {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV] {
            for recompute in [Recompute::None, Recompute::Full] {
                let model = testing::model(8);
                let grid = Grid::new(&model, 8, 32, 1, Some(1), 1).unwrap();
                let mut layout = testing::layout(&model, &grid, [1, 1, 2], schedule, None);
                layout.recompute = vec![recompute; 8];
                let sizes = Kept::new(&model, &grid, &layout, 32);
                for program in lower_all_parts(&model, &grid, &layout, 32, Mode::Train) {
                    let shelf = Shelf::new(&program);
                    let (mut away, mut coming) = (HashSet::new(), HashSet::new());
                    for (at, instr) in program.instrs.iter().enumerate() {
                        for step in shelf.before(at) {
                            assert!(match step {
                                Move::Store(key) => away.insert(*key),
                                Move::Want(key) => away.remove(key) && coming.insert(*key),
                                Move::Take(key) => coming.remove(key),
                            });
                            assert!(coming.len() <= 1, "one is on its way");
                        }
                        let there = |key: Key| !away.contains(&key) && !coming.contains(&key);
                        assert!(key(instr).is_none_or(there), "{schedule} {recompute}: {instr}");
                    }
                    assert!(away.is_empty() && coming.is_empty());
                    let without = Shelf::default().most_kept(&program, &sizes);
                    let most = shelf.most_kept(&program, &sizes);
                    // Where weight parts are put off, what those need may be most of it; inputs alone are little.
                    let less = recompute == Recompute::None && matches!(schedule, Schedule::GPipe | Schedule::OneFOneB);
                    assert!(if less { most < without } else { most <= without }, "{schedule}: {most} of {without}");
                    assert!(most + shelf.most_away(&program, &sizes) >= without);
                    assert_eq!(Shelf::default().most_away(&program, &sizes), 0);
                }
            }
        }
    }

    /// One unit after the other on one rank: three of its eight layers are in memory, the rest is in the file.
    #[test]
    fn layers_in_memory_do_not_grow_with_the_model() {
        let most = |layers: usize| {
            let model = testing::model(layers);
            let grid = Grid::new(&model, 4, 32, 1, Some(1), 1).unwrap();
            let layout = testing::layout(&model, &grid, [1, 1, 1], Schedule::OneFOneB, None);
            let sizes = Kept::new(&model, &grid, &layout, 32);
            let program = &lower_all_parts(&model, &grid, &layout, 32, Mode::Train)[0];
            Shelf::new(program).most_kept(program, &sizes)
        };
        assert_eq!(most(4), most(16));
    }
}

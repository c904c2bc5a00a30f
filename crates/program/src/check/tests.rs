//! Lists from the lowering pass; mutants are refused for the right reason; other legal orders pass.

mod alike;
mod legal;
mod mutants;
mod posted;
mod rows;
mod shapes;

use spec::{Grid, Layout, Model, Schedule};

use super::*;
use crate::lower::lower_all_parts;
use crate::testing;

const SEQ: usize = 32;

/// Everything that a check needs, with the lists of one layout.
struct Case {
    model: Model,
    grid: Grid,
    layout: Layout,
    mode: Mode,
    programs: Vec<Program>,
}

impl std::fmt::Debug for Case {
    /// Without the lists.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} {:?} {:?}", self.model, self.grid, self.layout, self.mode)
    }
}

impl Case {
    fn new(model: Model, grid: Grid, layout: Layout, mode: Mode) -> Self {
        let programs = lower_all_parts(&model, &grid, &layout, SEQ, mode);
        Self { model, grid, layout, mode, programs }
    }

    /// 2 data cells of 4 microbatches, 8 layers.
    fn small(ranks: [usize; 3], schedule: Schedule, change: impl Fn(&mut Model, &mut Layout)) -> Self {
        let mut model = testing::model(8);
        let grid = Grid::new(&model, 8, SEQ, 1, Some(2), 2).unwrap();
        let mut layout = testing::layout(&model, &grid, ranks, schedule, None);
        change(&mut model, &mut layout);
        Self::new(model, grid, layout, Mode::Train)
    }

    fn check(&self) -> Result<Report, Vec<Violation>> {
        check(&self.programs, &self.model, &self.grid, &self.layout, SEQ, self.mode)
    }
}

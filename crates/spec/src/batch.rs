//! A run around a given model and batch, without a run file: for evaluation.

use crate::error::SpecError;
use crate::layout::Layout;
use crate::model::Model;
use crate::run::{Run, data, grid, layout_request, train};
use crate::runfile::Values;

/// What `sets` may touch: where it is computed, and the cells.
const SECTIONS: [&str; 3] = ["layout.", "grid.", "train."];

impl Run {
    /// One step of `model` over `batch` sequences of `seq` tokens; `sets` (`key=value`) may set the layout, the grid and
    /// the optimizer.
    ///
    /// # Errors
    /// As [`Run::parse`]; a key of another section.
    pub fn for_batch(
        model: &Model,
        batch: usize,
        seq: usize,
        sets: &[String],
        cores: usize,
    ) -> Result<Self, SpecError> {
        if let Some(other) = sets.iter().find(|set| !SECTIONS.iter().any(|s| set.starts_with(s))) {
            return Err(SpecError::law(
                format!("--set {other}: the model and the batch are given"),
                "settable here: layout.*, grid.*, train.*",
                "leave it out",
            ));
        }
        let text = format!("[train]\nsteps = 1\nbatch = {batch}\nseq = {seq}\n[data]\nsource = \"synthetic\"\n");
        let values = Values::parse(&text, "the batch", sets)?;
        model.check()?;
        let train = train(&values)?;
        let grid = grid(&values, model, batch, train.seq)?;
        let layout = Layout::resolve(&layout_request(&values)?, &grid, model, cores)?;
        // The tokens are given, whatever their vocabulary.
        let any_vocabulary = Model { vocab: usize::MAX, ..model.clone() };
        let data = data(&values, &any_vocabulary)?;
        let checkpoint = crate::run::checkpoint(&values)?;
        let guard = crate::guard::guard(&values)?;
        Ok(Self { model: model.clone(), from: None, data, train, grid, layout, checkpoint, guard, values })
    }
}

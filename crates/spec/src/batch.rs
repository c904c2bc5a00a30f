//! A run around a given model and batch, without a run file: for evaluation.

use crate::error::SpecError;
use crate::faults::Faults;
use crate::layout::Layout;
use crate::model::Model;
use crate::run::{Run, data, grid, layout_request, train};
use crate::runfile::Values;

/// What `sets` may touch: where it is computed, the cells, and the auxiliary loss, which is no part of the weights.
const SETTABLE: [&str; 5] = ["layout.", "grid.", "train.", AUX_LOSS, AUX_SCOPE];
/// What of these the batch says.
const GIVEN: [&str; 2] = ["train.batch", "train.seq"];
const AUX_LOSS: &str = "model.aux_loss";
const AUX_SCOPE: &str = "model.aux_scope";
/// Most data cells of the default grid, as for a run file.
const CELLS_MAX: usize = 16;

impl Run {
    /// One step of `model` over `batch` sequences of `seq` tokens; `sets` (`key=value`) may set the layout, the grid, the
    /// optimizer and the auxiliary loss.
    ///
    /// An auxiliary loss is taken over the whole batch, as transformers does, unless `grid.dp`, `grid.ep` or
    /// `grid.microbatch` say otherwise: the data cells are one group, of one microbatch.
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
        let key = |set: &String| set.split('=').next().unwrap_or_default().trim().to_owned();
        let settable = |key: String| SETTABLE.iter().any(|s| key.starts_with(s)) && !GIVEN.contains(&key.as_str());
        if let Some(other) = sets.iter().find(|set| !settable(key(set))) {
            return Err(SpecError::law(
                format!("--set {other}: the model and the batch are given"),
                format!(
                    "settable here: layout.*, grid.*, train.* but train.batch and train.seq, {AUX_LOSS}, {AUX_SCOPE}"
                ),
                "leave it out",
            ));
        }
        let text = format!("[train]\nsteps = 1\nbatch = {batch}\nseq = {seq}\n[data]\nsource = \"synthetic\"\n");
        let mut faults = Faults::default();
        // What is wrong with it is told when it is read again, below.
        let given = Values::read(&text, "the batch", sets, &mut Faults::default()).unwrap_or_default();
        let model = &faults.take(with_auxiliary(model, &given, sets)).unwrap_or_else(|| model.clone());
        let sets: Vec<String> = whole_batch(model, batch, &given).into_iter().chain(sets.iter().cloned()).collect();
        let values = Values::read(&text, "the batch", &sets, &mut faults).unwrap_or_default();
        faults.take(model.check());
        let train = faults.take(train(&values));
        let request = layout_request(&values, &mut faults);
        let grid = faults.take(grid(&values, model, batch, seq));
        let layout = grid.as_ref().and_then(|grid| faults.take(Layout::resolve(&request, grid, model, cores)));
        // The tokens are given, whatever their vocabulary.
        let data = faults.take(data(&values, Some(usize::MAX)));
        let checkpoint = faults.take(crate::run::checkpoint(&values));
        let guard = faults.take(crate::guard::guard(&values));
        faults.settle(&values);
        let run = || {
            let model = model.clone();
            let (data, train, grid, layout) = (data?, train?, grid?, layout?);
            let (checkpoint, guard) = (checkpoint?, guard?);
            Some(Self { model, from: None, data, train, grid, layout, checkpoint, guard, values })
        };
        faults.give(run())
    }
}

/// `model` with the auxiliary loss that `sets` ask for.
fn with_auxiliary(model: &Model, values: &Values, sets: &[String]) -> Result<Model, SpecError> {
    let mut model = model.clone();
    let Some(set) = sets.iter().find(|set| set.starts_with(AUX_LOSS) || set.starts_with(AUX_SCOPE)) else {
        return Ok(model);
    };
    let Some(moe) = &mut model.moe else {
        return Err(SpecError::law(
            format!("--set {set}: only experts have an auxiliary loss"),
            "the model has none",
            "leave it out",
        ));
    };
    if sets.iter().any(|set| set.starts_with(AUX_LOSS)) {
        moe.aux_loss = values.float(AUX_LOSS).unwrap_or(0.0);
    }
    if sets.iter().any(|set| set.starts_with(AUX_SCOPE)) {
        moe.aux_scope = crate::run::word(values, AUX_SCOPE)?;
    }
    Ok(model)
}

/// The grid in which an auxiliary loss has the whole batch as its scope, as far as it is not `given`: the data cells are
/// one group, whose microbatches are one unit.
fn whole_batch(model: &Model, batch: usize, given: &Values) -> Vec<String> {
    let Some(moe) = model.moe.as_ref().filter(|moe| moe.aux_loss > 0.0) else { return Vec::new() };
    let is_given =
        given.int("grid.dp").is_some() || ["grid.ep", "grid.microbatch"].iter().any(|key| given.is_given(key));
    // What the grid itself refuses, it refuses.
    if is_given || batch == 0 {
        return Vec::new();
    }
    let cuts = |n: &usize| batch.is_multiple_of(*n) && moe.experts.is_multiple_of(*n);
    // With context cells that are no power of two there are no groups.
    let groups = given.int("grid.cp").unwrap_or(1).is_power_of_two();
    let cells = [CELLS_MAX, 8, 4, 2].into_iter().filter(|_| groups).find(cuts).unwrap_or(1);
    vec![format!("grid.dp={cells}"), format!("grid.ep={cells}"), format!("grid.microbatch={}", batch / cells)]
}

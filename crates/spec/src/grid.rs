//! The grid: the part of a run's definition that names the leaves of every sum.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::error::SpecError;
use crate::faults::Faults;
use crate::layout::words;
use crate::model::{Model, divisors};

/// In which order the weight gradients of a step's microbatches add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// Ascending microbatch inside a data cell, then the tree over the cells.
    Local,
    /// The tree over the cells for each microbatch, then ascending microbatch: a gradient may leave
    /// for its owner as soon as a microbatch has it.
    Reduced,
}
words!(Accumulate: Local = "local", Reduced = "reduced");

/// How many cells the step is cut into, on each axis. It defines the numbers; which rank
/// computes a cell does not.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// Data cells: the batch of a step in `dp` equal contiguous parts.
    pub dp: usize,
    /// Context cells: each sequence in `cp` parts of two chunks; see [`zigzag`].
    pub cp: usize,
    /// Data cells of a group: neighbours whose tokens one product per expert takes in, and as many blocks of experts.
    pub ep: usize,
    /// Tensor cells: heads, feed-forward width, vocabulary and sequence slices.
    pub tp: usize,
    /// Sequences per microbatch.
    pub microbatch: usize,
    /// Microbatches of one data cell in a step.
    pub microbatches: usize,
    /// The order of the sum over microbatches and cells.
    pub accumulate: Accumulate,
}

/// Most microbatches of a step: the program names each of them.
pub const MICROBATCHES_MAX: usize = 1 << 20;

/// One microbatch of one data cell: the unit of pipeline work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    /// The data cell, `0..grid.dp`.
    pub cell: usize,
    /// The microbatch inside the cell, `0..grid.microbatches`.
    pub mb: usize,
}

/// One microbatch of one cell (d, c): the leaf of every sum over tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Leaf {
    /// Data cell x `grid.cp` + context cell: its place in the tree over the cells.
    pub cell: usize,
    /// The microbatch inside the cell.
    pub mb: usize,
}

/// What of one unit stands side by side on a rank: every hosted (data cell, context cell) is a lane.
///
/// Row buffers are lane-major. What is computed row by row runs over all lanes at once; what sums over rows runs lane by
/// lane, because each lane is a leaf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lanes {
    /// Data cells.
    pub cells: Range<usize>,
    /// Context cells of each.
    pub contexts: Range<usize>,
}

/// The positions of context cell `context` of `cells` in a sequence of `seq`, in the order of its rows: of 2 x `cells`
/// chunks the `context`-th from the front and from the back, so that causal attention is the same work for each cell.
pub fn zigzag(context: usize, cells: usize, seq: usize) -> [Range<usize>; 2] {
    let len = seq / (2 * cells);
    [context, 2 * cells - 1 - context].map(|chunk| chunk * len..(chunk + 1) * len)
}

impl Lanes {
    /// Number of lanes.
    #[allow(clippy::len_without_is_empty)] // a unit has at least one
    pub fn len(&self) -> usize {
        self.cells.len() * self.contexts.len()
    }

    /// (data cell, context cell) of every lane, context fastest.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let contexts = self.contexts.clone();
        self.cells.clone().flat_map(move |cell| contexts.clone().map(move |context| (cell, context)))
    }
}

impl Grid {
    /// The default number of data cells: the largest power of two, at most 16, that divides
    /// the microbatches of a step. It does not look at the layout.
    pub fn default_dp(microbatches_per_step: usize) -> usize {
        [16, 8, 4, 2].into_iter().find(|d| microbatches_per_step.is_multiple_of(*d)).unwrap_or(1)
    }

    /// The grid for `batch` sequences of `seq` tokens per step; `dp = None` asks for the default.
    ///
    /// # Errors
    /// Where a size does not divide: the law, every factor, and the nearest possible values.
    pub fn new(
        model: &Model,
        batch: usize,
        seq: usize,
        microbatch: usize,
        dp: Option<usize>,
        tp: usize,
    ) -> Result<Self, SpecError> {
        let factors = format!(
            "train.batch {batch}, train.seq {seq}, grid.microbatch {microbatch}, grid.dp {}, grid.tp {tp}, heads {}, kv_heads {}, ffn {}, vocab {} padded to {}",
            dp.map_or("unset".into(), |d| d.to_string()),
            model.heads,
            model.kv_heads,
            model.ffn,
            model.vocab,
            model.vocab_padded()
        );
        let mut faults = Faults::default();
        for (key, value) in
            [("train.batch", batch), ("train.seq", seq), ("grid.microbatch", microbatch), ("grid.tp", tp)]
        {
            if value == 0 {
                faults.law(format!("{key} = 0"), factors.clone(), format!("set {key} to at least 1"));
            }
        }
        if dp == Some(0) {
            faults.law("grid.dp = 0", factors.clone(), "set grid.dp to at least 1, or leave it unset");
        }
        let dp = if batch > 0 && microbatch > 0 && dp != Some(0) {
            faults.take(data_cells(batch, microbatch, dp, &factors))
        } else {
            None
        };
        if tp > 0 && seq > 0 {
            tensor_cells(model, seq, tp, &factors, &mut faults);
        }
        faults.give(dp.map(|dp| Self {
            dp,
            cp: 1,
            ep: 1,
            tp,
            microbatch,
            microbatches: batch / microbatch / dp,
            accumulate: Accumulate::Local,
        }))
    }

    /// The same grid with `ep` neighbouring data cells to a group, and experts in as many blocks.
    ///
    /// Groups are complete subtrees of the tree over the cells, wherever in the group an expert's gradient stands: hence
    /// powers of two.
    ///
    /// # Errors
    /// If `ep` is not a power of two that divides the data cells and the experts, or there are none.
    pub fn with_experts(self, model: &Model, ep: usize) -> Result<Self, SpecError> {
        let experts = model.moe.as_ref().map_or(0, |moe| moe.experts);
        let Self { dp, cp, .. } = self;
        let factors = format!("grid.ep {ep}, grid.dp {dp}, grid.cp {cp}, model.experts {experts}");
        let broken = |what: String, remedy: String| Err(SpecError::law(what, factors.clone(), remedy));
        if ep == 1 {
            return Ok(Self { ep, ..self });
        }
        if experts == 0 {
            return broken(
                format!("grid.ep = {ep} cuts experts into blocks, and model.experts = 0"),
                "leave grid.ep unset, or set model.experts".into(),
            );
        }
        let possible: Vec<usize> =
            divisors(dp).into_iter().filter(|n| n.is_power_of_two() && experts.is_multiple_of(*n)).collect();
        let remedy = format!("set grid.ep to one of {possible:?}");
        if ep == 0 || !dp.is_multiple_of(ep) {
            return broken(format!("grid.ep = {ep} does not divide grid.dp = {dp}"), remedy);
        }
        if !experts.is_multiple_of(ep) {
            return broken(format!("grid.ep = {ep} does not divide model.experts = {experts}"), remedy);
        }
        if !ep.is_power_of_two() {
            return broken(
                format!("grid.ep = {ep} is not a power of two, so a group is no subtree of the cells"),
                remedy,
            );
        }
        if !cp.is_power_of_two() {
            return broken(
                format!(
                    "grid.cp = {cp} is not a power of two, so with grid.ep = {ep} a group is no subtree of the cells"
                ),
                "set grid.cp to a power of two, or leave grid.ep unset".into(),
            );
        }
        Ok(Self { ep, ..self })
    }

    /// The same grid with `cp` context cells, for sequences of `seq` tokens.
    ///
    /// # Errors
    /// If 2 x `cp` x `grid.tp` does not divide `seq`.
    pub fn with_context(self, cp: usize, seq: usize) -> Result<Self, SpecError> {
        let Self { tp, .. } = self;
        let factors = format!("train.seq {seq}, grid.cp {cp}, grid.tp {tp}");
        if cp == 0 {
            return Err(SpecError::law("grid.cp = 0", factors, "set grid.cp to at least 1, or leave it unset"));
        }
        let parts = 2usize.saturating_mul(cp).saturating_mul(tp);
        if !seq.is_multiple_of(parts) {
            // The law of the grid without context cells: 2 tp divides seq.
            let ok = divisors(seq / (2 * tp));
            let longer = seq.div_ceil(parts).checked_mul(parts);
            return Err(SpecError::law(
                format!(
                    "2 x grid.cp x grid.tp = {parts} does not divide train.seq = {seq}: a sequence is cut into 2 chunks per context cell, and these into tensor slices"
                ),
                factors,
                format!(
                    "set grid.cp to one of {ok:?}{}",
                    longer.map_or(String::new(), |n| format!(", or train.seq to a multiple of {parts}, such as {n}"))
                ),
            ));
        }
        Ok(Self { cp, ..self })
    }

    /// Leaves of the tree over the cells (d, c).
    pub fn leaves(&self) -> usize {
        self.dp * self.cp
    }

    /// Leaves of the tree over (group of data cells, context cell), in which gradients of routed experts add up. A group is
    /// a subtree of the tree over the cells, so this is that tree with one leaf for the data cells of a group.
    pub fn expert_leaves(&self) -> usize {
        self.dp / self.ep * self.cp
    }

    /// Sequences in a step.
    pub fn batch(&self) -> usize {
        self.dp * self.microbatches * self.microbatch
    }

    /// Which sequences of the step's batch `unit` holds, ascending.
    pub fn sequences(&self, unit: Unit) -> Range<usize> {
        let first = (unit.cell * self.microbatches + unit.mb) * self.microbatch;
        first..first + self.microbatch
    }

    /// The units of a range of data cells, in the order in which their weight gradients add up. The data cells of a group
    /// are one unit, named by the first of them in the range.
    pub fn units(&self, cells: Range<usize>) -> impl Iterator<Item = Unit> + use<> {
        let cells: Vec<usize> = self.unit_cells(cells).collect();
        let (count, microbatches, accumulate) = (cells.len(), self.microbatches, self.accumulate);
        (0..count * microbatches).map(move |i| match accumulate {
            Accumulate::Local => Unit { cell: cells[i / microbatches], mb: i % microbatches },
            Accumulate::Reduced => Unit { cell: cells[i % count], mb: i / count },
        })
    }

    /// True if the gradients of the data cell are complete with `unit`: they are a leaf of the tree over the cells.
    pub fn completes(&self, unit: Unit) -> bool {
        self.accumulate == Accumulate::Reduced || unit.mb + 1 == self.microbatches
    }

    /// The data cells by which the units of a range of data cells are named: the first one of each group.
    pub fn unit_cells(&self, cells: Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let (ep, first) = (self.ep, cells.start);
        cells.filter(move |cell| *cell == first || cell.is_multiple_of(ep))
    }
}

/// The data cells of a step.
fn data_cells(batch: usize, microbatch: usize, dp: Option<usize>, factors: &str) -> Result<usize, SpecError> {
    if !batch.is_multiple_of(microbatch) {
        return Err(SpecError::law(
            format!("grid.microbatch = {microbatch} does not divide train.batch = {batch}"),
            factors,
            format!("set grid.microbatch to one of {:?}", divisors(batch)),
        ));
    }
    let per_step = batch / microbatch;
    if per_step > MICROBATCHES_MAX {
        return Err(SpecError::law(
            format!(
                "train.batch = {batch} in parts of grid.microbatch = {microbatch} makes {per_step} microbatches a step, at most {MICROBATCHES_MAX} are planned"
            ),
            factors,
            "raise grid.microbatch, or lower train.batch",
        ));
    }
    let dp = dp.unwrap_or_else(|| Grid::default_dp(per_step));
    if !per_step.is_multiple_of(dp) {
        return Err(SpecError::law(
            format!(
                "grid.dp = {dp} does not divide the {per_step} microbatches of a step (train.batch = {batch}, grid.microbatch = {microbatch})"
            ),
            factors,
            format!(
                "set grid.dp to one of {:?}, or train.batch to a multiple of {}",
                divisors(per_step),
                dp.saturating_mul(microbatch)
            ),
        ));
    }
    Ok(dp)
}

/// The law of tensor cells.
fn tensor_cells(model: &Model, seq: usize, tp: usize, factors: &str, faults: &mut Faults) {
    let cut = [
        ("model.heads", model.heads),
        ("model.kv_heads", model.kv_heads),
        // Experts are not cut.
        ("model.ffn", if model.moe.is_some() { 0 } else { model.ffn }),
        ("the padded vocabulary", model.vocab_padded()),
    ];
    let possible =
        |tp: usize| cut.iter().all(|(_, n)| n.is_multiple_of(tp)) && seq.is_multiple_of(tp.saturating_mul(2));
    let remedy = || {
        let ok: Vec<_> = divisors(model.kv_heads).into_iter().filter(|t| possible(*t)).collect();
        if ok.is_empty() {
            format!("set train.seq to an even number, such as {}", seq + 1)
        } else {
            format!("set grid.tp to one of {ok:?}, or change the size that it does not divide")
        }
    };
    for (key, value) in cut {
        if !value.is_multiple_of(tp) {
            faults.law(format!("grid.tp = {tp} does not divide {key} = {value}"), factors, remedy());
        }
    }
    let parts = tp.saturating_mul(2);
    if !seq.is_multiple_of(parts) {
        faults.law(format!("2 x grid.tp = {parts} does not divide train.seq = {seq}"), factors, remedy());
    }
}

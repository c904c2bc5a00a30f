//! What routers tell each other: token counts of a unit, and gradients that have a leaf per sequence slice.

use program::{Axis, Instr, Mode};
use spec::Unit;
use spec::moe::AuxScope;

use super::grads::{leaf_of, over_tensor_cells};
use super::{Executor, unhosted, unit_of};
use crate::buffers::{Memory, POOLED};
use crate::error::TrainError;
use crate::mutant::Mutant;
use crate::segments::need;

impl Executor<'_> {
    /// Rows of each expert over all sequence slices of the unit, in every layer of the chunk, and its rows that have a
    /// target: added up over the tensor positions, then over the context positions and the ranks of its group. They are whole numbers far below
    /// 2^24: float32 holds them, and their sums have no order.
    pub(super) fn router_counts(&mut self, chunk: usize, unit: Unit, axis: Axis) -> Result<(), TrainError> {
        let mine = match axis {
            Axis::Tp => self.own_counts(chunk, unit)?,
            _ => need(&mut self.memory.regs.router_counts, "router_counts")?,
        };
        let sum = self.sum_counts(axis, mine)?;
        let last = match (self.place.group.ranks > 1, self.place.grid_cp > 1) {
            (true, _) => Axis::Ep,
            (false, true) => Axis::Cp,
            (false, false) => Axis::Tp,
        };
        if axis != last {
            self.memory.regs.router_counts = Some(sum);
            return Ok(());
        }
        let experts = self.run.model.moe.as_ref().map_or(0, |moe| moe.experts);
        let saved = self.memory.saved.entry((chunk, unit)).or_default();
        let before = saved.counts.remove(&POOLED).filter(|_| chunk > 0);
        let mut pooled = before.unwrap_or_else(|| vec![0.0; experts]);
        for (layer, counts) in self.run.layout.stages[chunk].clone().zip(sum.chunks_exact(experts)) {
            add(&mut pooled, counts);
            saved.counts.insert(layer, counts.to_vec());
        }
        saved.counts.insert(POOLED, pooled);
        saved.targets = f64::from(sum[sum.len() - 1]);
        Ok(())
    }

    /// Those of the hosted slices, by layer and expert, and behind them the rows with a target.
    fn own_counts(&mut self, chunk: usize, unit: Unit) -> Result<Vec<f32>, TrainError> {
        let saved = self.memory.saved.entry((chunk, unit)).or_default();
        let mut mine = Vec::new();
        for layer in self.run.layout.stages[chunk].clone() {
            let routed = saved.layers.get(&layer).and_then(|kept| kept.routed.as_ref());
            let routed =
                routed.ok_or_else(|| TrainError::Internal(format!("layer {layer} has not routed {unit:?}")))?;
            mine.extend(routed.counts.iter().map(|count| *count as f32));
        }
        // Rows that have a target are known to every tensor position: the first one speaks.
        let targets = self.memory.tokens[&unit].targets.iter().filter(|t| **t != data::IGNORE).count();
        mine.push(if self.place.at.tp == 0 { targets as f32 } else { 0.0 });
        Ok(mine)
    }

    fn sum_counts(&self, axis: Axis, mine: Vec<f32>) -> Result<Vec<f32>, TrainError> {
        let group = self.comm.group(axis);
        if group.len() == 1 {
            return Ok(mine);
        }
        let part = |i: usize| std::iter::once(i * mine.len()..(i + 1) * mine.len()).collect();
        let parts: Vec<_> = (0..group.len()).map(part).collect();
        let mut all = vec![0.0; mine.len() * group.len()];
        self.comm.endpoint.all_gather(group, &parts, &mine, &mut all)?;
        let mut sum = vec![0.0; mine.len()];
        all.chunks_exact(mine.len()).for_each(|member| add(&mut sum, member));
        Ok(sum)
    }

    /// Experts whose counts ride along with the stream between chunks, for an auxiliary loss over all layers: forward
    /// those of the layers so far, backward those of all.
    pub(super) fn pooled_experts(&self, mode: Mode) -> usize {
        let pooled = self.run.model.moe.as_ref().filter(|moe| moe.aux_loss > 0.0 && moe.aux_scope == AuxScope::Pooled);
        pooled.filter(|_| mode == Mode::Train).map_or(0, |moe| moe.experts)
    }

    pub(super) fn with_pooled(&mut self, mode: Mode, instr: &Instr, buffer: Vec<f32>) -> Result<Vec<f32>, TrainError> {
        if self.pooled_experts(mode) == 0 {
            return Ok(buffer);
        }
        let Memory { saved, pool, .. } = &mut self.memory;
        let counts = saved.get(&(instr.chunk, unit_of(instr)?)).and_then(|s| s.counts.get(&POOLED));
        let counts = counts.ok_or_else(|| TrainError::Internal("no router counts to send along".into()))?;
        let mut both = pool.take(buffer.len() + counts.len());
        let (stream, behind) = both.split_at_mut(buffer.len());
        stream.copy_from_slice(&buffer);
        behind.copy_from_slice(counts);
        pool.give(buffer);
        Ok(both)
    }

    pub(super) fn keep_pooled(&mut self, instr: &Instr, counts: &[f32]) -> Result<(), TrainError> {
        if !counts.is_empty() {
            let saved = self.memory.saved.entry((instr.chunk, unit_of(instr)?)).or_default();
            saved.counts.insert(POOLED, counts.to_vec());
        }
        Ok(())
    }

    /// Gradients of whole experts of the data cell that ends: the tree over the tensor cells, then into its accumulators.
    pub(super) fn slice_grads(&mut self, instr: &Instr) -> Result<(), TrainError> {
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        let unit = unit_of(instr)?;
        let lanes = self.place.lanes(unit).len();
        let leaves = state.take_slice_leaves(leaf_of(&self.run.grid, unit), lanes);
        if leaves.first().is_none_or(Vec::is_empty) {
            return Ok(());
        }
        let apart = self.mutant == Some(Mutant::ExpertsOwnSlice);
        let total = over_tensor_cells(self.ctx, &self.comm, self.run, &self.place, leaves, apart)?;
        state.close_slices(&total, lanes);
        Ok(())
    }
}

/// Adds whole numbers.
fn add(sum: &mut [f32], counts: &[f32]) {
    sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

//! Ordered sums of gradients, and updated parameters from their owners.

use fabric::ReducePlan;
use program::{Exchange, Instr};
use spec::tensors::Role;
use spec::tree::Counter;

use super::{Executor, unhosted, unit_of};
use crate::error::TrainError;
use crate::mutant::{self, Mutant};
use crate::segments;

impl Executor<'_> {
    /// Norm gradients of one unit: those of each lane summed over its slices, then onto the lane's accumulators.
    pub(super) fn norm_grads(&mut self, instr: &Instr) -> Result<(), TrainError> {
        let unit = unit_of(instr)?;
        let lanes = self.place.lanes(unit).len();
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        state.open_cell(mutant::cell(self.mutant, state, unit.cell), lanes);
        let (places, of_lane) = segments::norm_layout(state);
        let len = lanes * of_lane;
        let leaves = std::mem::take(&mut self.memory.regs.norm_leaves);
        let mut sum = Counter::new(self.place.grid_tp);
        for (cell, leaf) in self.place.cells.clone().zip(leaves) {
            sum.push(cell..cell + 1, leaf, |left, right| kernels::add_assign(self.ctx, left, right));
        }
        let nodes = sum.into_nodes();
        let group = &self.comm.tp;
        let total = if group.len() == 1 || self.mutant == Some(Mutant::NormOwnSlice) {
            nodes.into_iter().next().map(|(_, data)| data).unwrap_or_default()
        } else {
            let members = group.len();
            let cells = (0..members).map(|t| self.run.layout.tensor_cells(t, self.place.grid_tp)).collect();
            let parts = (0..members).map(|i| len * i / members..len * (i + 1) / members).collect();
            let plan = ReducePlan::new(self.place.grid_tp, cells, parts);
            let mine: Vec<_> = nodes.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
            let mut total = vec![0.0; len];
            self.comm.endpoint.all_reduce(group, &plan, &mine, &mut total)?;
            total
        };
        for ((layer, role), at) in places {
            let to = state.held(layer, role).at.clone();
            for (grads, total) in state.grads.iter_mut().zip(total.chunks_exact(of_lane)) {
                kernels::add_assign(self.ctx, &mut grads[to.clone()], &total[at.clone()]);
            }
        }
        self.counts.units += 1;
        Ok(())
    }

    /// Gradients of a chunk over the cells.
    pub(super) fn grads(&mut self, instr: &Instr, exchange: Exchange) -> Result<(), TrainError> {
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        let mut nodes = state.take_closed(self.run.grid.leaves());
        let group = &self.comm.dp;
        if group.len() == 1 {
            state.total = nodes.pop().map(|(_, data)| data).ok_or_else(|| unhosted(instr))?;
        } else {
            let cells = self.run.layout.leaves(&self.run.grid);
            let mut plan = ReducePlan { leaves: self.run.grid.leaves(), cells, parts: state.parts.clone() };
            let mut mine: Vec<_> = nodes.iter().map(|(node, data)| (node.clone(), data.as_slice())).collect();
            mutant::leaves(self.mutant, &mut plan, &mut mine, self.place.holder);
            let mut total = state.buffer();
            match exchange {
                Exchange::AllReduce => self.comm.endpoint.all_reduce(group, &plan, &mine, &mut total)?,
                _ => {
                    let parts = &plan.parts[self.place.holder];
                    let mut own = self.memory.pool.take(parts.iter().map(|r| r.len()).sum());
                    self.comm.endpoint.reduce_scatter(group, &plan, &mine, &mut own)?;
                    let mut at = 0;
                    for range in parts {
                        total[range.clone()].copy_from_slice(&own[at..at + range.len()]);
                        at += range.len();
                    }
                    self.memory.pool.give(own);
                }
            }
            state.total = total;
            state.recycle(nodes.into_iter().map(|(_, data)| data));
        }
        if let Some(output) = state.tied_output.clone() {
            // Input + output, where this rank has both sums.
            let embed = state.held(0, Role::Embed).at.clone();
            let (flat, tail) = state.total.split_at_mut(output.start);
            let (lo, hi) = (embed.start.max(state.owned.start), embed.end.min(state.owned.end));
            if lo < hi {
                let from = lo - embed.start..hi - embed.start;
                kernels::add_assign(self.ctx, &mut flat[lo..hi], &tail[from]);
            }
        }
        Ok(())
    }

    /// Updated parameters from their owners.
    pub(super) fn params(&mut self, instr: &Instr) -> Result<(), TrainError> {
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        let parts: Vec<_> = state.owners.iter().map(|r| vec![r.clone()]).collect();
        self.comm.endpoint.all_gather_in_place(&self.comm.dp, &parts, &mut state.params)?;
        Ok(())
    }
}

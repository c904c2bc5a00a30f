//! Rows to the ranks of their experts and back, forward and backward. What lies in a parcel is decided in
//! [`crate::segments::dispatch`].

use program::{Instr, Mode};

use super::grads::leaf_of;
use super::{Executor, unhosted, unit_of};
use crate::buffers::Routed;
use crate::error::TrainError;
use crate::segments::dispatch::{Returned, missing};
use crate::segments::{self, Env, dispatch};

/// One of the four exchanges of a layer with experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trip {
    /// Rows to the ranks of their experts.
    Out,
    /// What they made of them.
    Back,
    /// Gradients of those outputs.
    GradOut,
    /// Gradients of the rows and gates.
    GradBack,
}

impl Executor<'_> {
    /// One exchange over the ranks of the group, of `layer`.
    pub(super) fn travel(&mut self, mode: Mode, instr: &Instr, layer: usize, trip: Trip) -> Result<(), TrainError> {
        let unit = unit_of(instr)?;
        let moe = self.run.model.moe.as_ref().ok_or_else(|| unhosted(instr))?;
        let env = Env::new(self.ctx, &self.run.model, &self.place, unit, &self.rope, mode, self.mutant);
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        if trip == Trip::GradBack {
            state.grads.turn_to(leaf_of(&self.run.grid, unit));
        }
        let mut kept = self.memory.take_layer(instr.chunk, unit, layer);
        let mut routed = kept.routed.take().ok_or_else(|| missing("the router's choice", unit, layer))?;
        let hidden = self.place.hidden;
        let parcels = match trip {
            Trip::Out => {
                let (parcels, sent) = dispatch::pack(&env, moe, &routed.chosen, &routed.gates, &kept.n_mlp);
                routed.sent = sent;
                parcels
            }
            Trip::GradOut => {
                let grad = self.memory.regs.grad.as_ref();
                let grad = grad.ok_or_else(|| missing("the gradient of the stream", unit, layer))?;
                routed.sent.iter().map(|sent| dispatch::gather(&env, grad, &sent.rows)).collect()
            }
            Trip::Back => routed.work.from.iter().map(|rows| dispatch::gather(&env, &routed.returned, rows)).collect(),
            Trip::GradBack => routed.work.from.iter().map(|rows| with_gates(&env, &routed, rows)).collect(),
        };
        let send: Vec<&[f32]> = parcels.iter().map(Vec::as_slice).collect();
        let mut received = vec![Vec::new(); send.len()];
        self.comm.endpoint.all_to_all(&self.comm.ep, &send, &mut received)?;
        routed.returned = Vec::new();
        match trip {
            Trip::Out => routed.work = dispatch::unpack(&env, moe, &received)?,
            Trip::GradOut => {
                routed.dy = vec![0.0; routed.work.rows() * hidden];
                for (rows, parcel) in routed.work.from.iter().zip(&received) {
                    for (row, values) in rows.iter().zip(parcel.chunks_exact(hidden)) {
                        routed.dy[*row as usize * hidden..(*row as usize + 1) * hidden].copy_from_slice(values);
                    }
                }
            }
            Trip::Back | Trip::GradBack => {
                if trip == Trip::GradBack {
                    routed.d_gates = vec![0.0; routed.gates.len()];
                    for (sent, parcel) in routed.sent.iter().zip(&mut received) {
                        let gates = parcel.split_off((sent.rows.len() * hidden).min(parcel.len()));
                        sent.choices.iter().zip(gates).for_each(|(c, d)| routed.d_gates[*c as usize] = d);
                    }
                    (routed.dy, routed.work) = (Vec::new(), dispatch::Work::default());
                }
                let returned = Returned::new(&routed.sent, env.rows_local());
                let all = received.concat();
                let mut out = self.memory.pool.take(env.rows_local() * hidden);
                kernels::combine(self.ctx, &all, hidden, &returned.terms(env.group), &mut out);
                let n = &kept.n_mlp;
                if trip == Trip::Back {
                    routed.shared = segments::add_shared(&env, state, &mut self.memory, layer, n, &mut out)?;
                } else {
                    let shared = &mut routed.shared;
                    segments::add_shared_backward(&env, state, &mut self.memory, layer, n, shared, &mut out)?;
                }
                self.memory.regs.reduced = Some(out);
            }
        }
        kept.routed = Some(routed);
        self.memory.put_layer(instr.chunk, unit, layer, kept);
        Ok(())
    }
}

/// Gradients of rows that a member sent, then those of their gates.
fn with_gates(env: &Env, routed: &Routed, rows: &[u32]) -> Vec<f32> {
    let mut parcel = dispatch::gather(env, &routed.returned, rows);
    let first = &routed.work.first;
    parcel.extend(
        rows.iter().flat_map(|row| &routed.d_gates[first[*row as usize] as usize..first[*row as usize + 1] as usize]),
    );
    parcel
}

//! Rows to the ranks of their experts and back, forward and backward. What lies in a parcel is decided in
//! [`crate::segments::dispatch`].

use std::time::Duration;

use kernels::Pieces;
use program::{Instr, Mode};

use super::grads::leaf_of;
use super::{Executor, unhosted, unit_of};
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
        let own_chunks = self.chunks.len();
        let state = self.chunks.get_mut(&instr.chunk).ok_or_else(|| unhosted(instr))?;
        if trip == Trip::GradBack {
            state.grads.turn_to(leaf_of(&self.run.grid, unit));
        }
        let mut kept = self.memory.take_layer(instr.chunk, unit, layer);
        let mut routed = kept.routed.take().ok_or_else(|| missing("the router's choice", unit, layer))?;
        let (hidden, me) = (self.place.hidden, self.place.group.me);
        let pool = &mut self.memory.pool;
        // What this rank has for itself stays where it is.
        let parcels = match trip {
            Trip::Out => {
                let (parcels, sent) = dispatch::pack(&env, pool, moe, &routed.chosen, &routed.gates, &kept.n_mlp);
                routed.sent = sent;
                parcels
            }
            Trip::GradOut => {
                let grad = self.memory.regs.grad.as_ref();
                let grad = grad.ok_or_else(|| missing("the gradient of the stream", unit, layer))?;
                dispatch::pack_gradients(&env, pool, grad, &routed.sent)
            }
            Trip::Back | Trip::GradBack => std::mem::take(&mut routed.returned),
        };
        let send: Vec<&[f32]> =
            parcels.iter().enumerate().map(|(member, parcel)| if member == me { &[] } else { &parcel[..] }).collect();
        let (later, mirrors) = (&mut self.later, &mut self.mirrors);
        let meanwhile = &mut || match (later.as_mut(), mirrors.as_mut()) {
            (Some(later), Some((_, mirrored))) => later.block(self.ctx, self.run, mirrored, &self.guard, own_chunks),
            _ => false,
        };
        let room = &mut |_, len| pool.take_loose(len);
        let mut received = self.comm.endpoint.all_to_all_into(&self.comm.ep, &send, room, meanwhile)?;
        self.late += self.later.as_mut().map_or(Duration::ZERO, |later| std::mem::take(&mut later.spent));
        let expected = |member: usize| match trip {
            Trip::Out => None,
            _ if member == me => Some(0),
            Trip::GradOut => Some(routed.work.from[member].len() * hidden),
            Trip::Back => Some(routed.sent[member].rows.len() * hidden),
            Trip::GradBack => Some(routed.sent[member].rows.len() * hidden + routed.sent[member].choices.len()),
        };
        if let Some((member, _)) =
            received.iter().enumerate().find(|(m, got)| expected(*m).is_some_and(|want| got.len() != want))
        {
            let (got, want) = (received[member].len(), expected(member).unwrap_or(0));
            return Err(TrainError::Internal(format!(
                "member {member} returned {got} numbers in layer {layer}, not {want}"
            )));
        }
        let mut parcels = parcels;
        match trip {
            Trip::Out => {
                received[me] = std::mem::take(&mut parcels[me]);
                routed.work = dispatch::unpack(&env, moe, received, &routed.sent[me])?;
            }
            Trip::GradOut => routed.dy = received,
            Trip::Back | Trip::GradBack => {
                received[me] = std::mem::take(&mut parcels[me]);
                if trip == Trip::GradBack {
                    routed.d_gates = vec![0.0; routed.gates.len()];
                    for (sent, parcel) in routed.sent.iter().zip(&received) {
                        let gates = &parcel[sent.rows.len() * hidden..];
                        sent.choices.iter().zip(gates).for_each(|(c, d)| routed.d_gates[*c as usize] = *d);
                    }
                    let work = std::mem::take(&mut routed.work);
                    let spent = std::mem::take(&mut routed.dy).into_iter().chain(work.parcels);
                    spent.for_each(|buffer| pool.give(buffer));
                }
                let returned = Returned::new(&routed.sent, env.rows_local());
                let rows = routed.sent.iter().zip(&received).map(|(sent, got)| &got[..sent.rows.len() * hidden]);
                let mut out = pool.take(env.rows_local() * hidden);
                kernels::combine_pieces(self.ctx, &Pieces::new(hidden, rows), &returned.terms(env.group), &mut out);
                received.into_iter().for_each(|buffer| pool.give(buffer));
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
        parcels.into_iter().for_each(|buffer| self.memory.pool.give(buffer));
        kept.routed = Some(routed);
        self.memory.put_layer(instr.chunk, unit, layer, kept);
        Ok(())
    }
}

//! The law of layouts: what fits a grid and a model, and what to change where it does not.

use std::ops::Range;

use super::{Layout, LayoutRequest, Transport};
use crate::error::SpecError;
use crate::faults::Faults;
use crate::grid::{Accumulate, Grid};
use crate::model::{Model, divisors};
use crate::schedule::Recompute;

/// The validity law, with its operands.
#[derive(Clone, Copy)]
pub(super) struct Law<'a> {
    pub request: &'a LayoutRequest,
    pub grid: &'a Grid,
    pub model: &'a Model,
}

impl Law<'_> {
    /// The layout that obeys it, on a machine with `cores`. What follows from another broken law is not told.
    pub fn resolve(&self, cores: usize) -> Result<Layout, SpecError> {
        let (law, Law { request, grid, model }) = (self, *self);
        let LayoutRequest { dp, cp, tp, pp, schedule, zero, .. } = *request;
        let mut faults = Faults::default();
        faults.take(request.check());
        if request.has_zero() {
            // Nothing is counted with it.
            return faults.give(None);
        }
        let fit = faults.find(|faults| law.axes(faults));
        let vpp = faults.take(law.chunks_per_rank());
        faults.take(law.whole_gradients());
        let shard = if fit { faults.take(law.shard_group()) } else { None };
        let cells = if fit {
            faults.take(law.split("layout.cells", request.cells.as_deref(), dp, grid.dp, "data cells"))
        } else {
            None
        };
        let group = cells.as_ref().and_then(|cells| faults.take(law.groups(cells)));
        if let Some(cells) = &cells {
            faults.take(law.orders(cells));
        }
        let stages = vpp.and_then(|vpp| {
            faults.take(law.split("layout.stages", request.stages.as_deref(), pp * vpp, model.layers, "layers"))
        });
        let world = dp.saturating_mul(cp).saturating_mul(tp).saturating_mul(pp);
        if let Some(per_host) = request.ranks_per_host
            && fit
            && !world.is_multiple_of(per_host)
        {
            faults.add(law.broken(
                format!("cluster.ranks_per_host = {per_host} does not divide the {world} ranks"),
                format!("set cluster.ranks_per_host to one of {:?}, or leave it unset", divisors(world)),
            ));
        }
        let recompute = faults.take(law.recompute());
        let made = || {
            let placement = match (&request.orders, vpp?) {
                (Some(orders), _) => orders.placement.clone(),
                (None, vpp) => schedule.placement(pp, vpp),
            };
            let LayoutRequest { transport, pin, exchange_timeout_ms, .. } = *request;
            Some(Layout {
                dp,
                cp,
                group: group?,
                tp,
                pp,
                vpp: vpp?,
                schedule,
                orders: request.orders.clone(),
                placement,
                recompute: recompute?,
                zero,
                shard: shard?,
                reshard: request.reshard,
                offload: request.offload,
                offload_folder: request.offload_folder.clone(),
                keep_packed: request.keep_packed,
                tp_overlap: request.tp_overlap,
                tp_pairs: request.tp_pairs,
                mirror: request.mirror.unwrap_or(transport != Transport::Threads),
                threads: request.threads.unwrap_or(if world == 1 { cores.max(1) } else { 1 }),
                transport,
                pin,
                exchange_timeout_ms,
                cells: cells?,
                stages: stages?,
                ranks_per_host: request.ranks_per_host,
            })
        };
        let layout = if faults.is_empty() { made() } else { None };
        faults.give(layout)
    }

    /// Each axis fits the grid.
    fn axes(&self, faults: &mut Faults) {
        let Law { grid, model, .. } = *self;
        let LayoutRequest { dp, cp, tp, .. } = *self.request;
        if dp > grid.dp {
            faults.add(self.broken(
                format!("layout.dp = {dp} needs at least {dp} data cells, but grid.dp = {}", grid.dp),
                format!(
                    "set layout.dp to at most {}, or raise grid.dp (a divisor of the {} microbatches of a step; it changes the numbers)",
                    grid.dp,
                    grid.dp * grid.microbatches
                ),
            ));
        }
        if !grid.cp.is_multiple_of(cp) {
            faults.add(self.broken(
                format!("layout.cp = {cp} does not divide grid.cp = {}", grid.cp),
                format!(
                    "set layout.cp to one of {:?}, or raise grid.cp to a multiple of {cp} (it changes the numbers)",
                    divisors(grid.cp)
                ),
            ));
        }
        if !grid.tp.is_multiple_of(tp) {
            // The law of the grid, except of the length of sequences, which can be changed with it.
            let cut =
                [model.heads, model.kv_heads, if model.moe.is_some() { 0 } else { model.ffn }, model.vocab_padded()];
            let possible =
                |n: &usize| *n > grid.tp && n.is_multiple_of(tp) && cut.iter().all(|size| size.is_multiple_of(*n));
            let raise = match divisors(model.kv_heads).into_iter().find(possible) {
                Some(n) => format!(", or raise grid.tp to {n} (it changes the numbers)"),
                None => format!(
                    ", or raise grid.tp to a multiple of {tp} (it changes the numbers) in a model whose heads, kv_heads and ffn it divides: this one has {}, {} and {}",
                    model.heads, model.kv_heads, model.ffn
                ),
            };
            faults.add(self.broken(
                format!("layout.tp = {tp} does not divide grid.tp = {}", grid.tp),
                format!("set layout.tp to one of {:?}{raise}", divisors(grid.tp)),
            ));
        }
    }

    fn broken(&self, what: String, remedy: String) -> SpecError {
        let r = self.request;
        let vpp = r.vpp.map_or("unset".into(), |v| v.to_string());
        let factors = format!(
            "layout.dp {} x layout.cp {} x layout.tp {} x layout.pp {} = {} ranks, layout.vpp {vpp}, schedule {}, zero {}; grid.dp {}, grid.cp {}, grid.ep {}, grid.tp {}, {} microbatches of {} sequences per cell; {} layers, {} heads, {} kv_heads",
            r.dp,
            r.cp,
            r.tp,
            r.pp,
            r.dp.saturating_mul(r.cp).saturating_mul(r.tp).saturating_mul(r.pp),
            r.schedule,
            r.zero,
            self.grid.dp,
            self.grid.cp,
            self.grid.ep,
            self.grid.tp,
            self.grid.microbatches,
            self.grid.microbatch,
            self.model.layers,
            self.model.heads,
            self.model.kv_heads
        );
        SpecError::law(what, factors, remedy)
    }

    /// The law of `layout.zero` and `grid.accumulate`.
    fn whole_gradients(&self) -> Result<(), SpecError> {
        let LayoutRequest { tp, pp, zero, .. } = *self.request;
        let Grid { microbatches, accumulate, .. } = *self.grid;
        if matches!(zero, 2 | 3) && accumulate == Accumulate::Local && microbatches > 1 {
            let parameters = crate::tensors::parameters(self.model) / tp.saturating_mul(pp) as u64;
            return Err(self.broken(
                format!(
                    "layout.zero = {zero} shards gradients, but grid.accumulate = local adds up the {microbatches} microbatches of a cell before the sum over cells: every rank would keep its gradients whole, 4 bytes x {parameters} parameters = {:.1} MB",
                    4.0 * parameters as f64 / 1e6
                ),
                "set grid.accumulate to \"reduced\" (it changes the numbers), or layout.zero to 1, or grid.microbatch so that a cell has one microbatch".into(),
            ));
        }
        Ok(())
    }

    /// The size of a shard group, where the axes fit the grid.
    fn shard_group(&self) -> Result<usize, SpecError> {
        let LayoutRequest { dp, cp, zero, shard, .. } = *self.request;
        match shard {
            _ if zero == 0 => Ok(1),
            None => Ok(dp * cp),
            Some(n) if !(dp * cp).is_multiple_of(n) => Err(self.broken(
                format!("layout.shard = {n} does not divide layout.dp = {dp} x layout.cp = {cp}"),
                format!("set layout.shard to one of {:?}, or leave it unset", divisors(dp * cp)),
            )),
            Some(n) => Ok(n),
        }
    }

    /// Data positions that host one group: whole groups each, or equal parts of one.
    fn groups(&self, cells: &[Range<usize>]) -> Result<usize, SpecError> {
        let (ep, asked) = (self.grid.ep, self.request.ep);
        let group = cells.iter().filter(|part| part.start < ep).count();
        let whole = |part: &Range<usize>| part.start.is_multiple_of(ep) && part.end.is_multiple_of(ep);
        let fits = |part: &Range<usize>| if group == 1 { whole(part) } else { part.len() * group == ep };
        if let Some(part) = cells.iter().find(|part| !fits(part)) {
            return Err(self.broken(
                format!(
                    "a data position has cells {part:?}: with grid.ep = {ep} each has whole groups of {ep} cells, or all have equal parts of one"
                ),
                format!("set layout.dp so that it divides grid.dp / {ep} groups or is a multiple of them, and leave layout.cells unset"),
            ));
        }
        let Some(asked) = asked else { return Ok(group) };
        if asked == 0 || !group.is_multiple_of(asked) {
            return Err(self.broken(
                format!("layout.ep = {asked} does not divide the {group} data positions that host a group"),
                format!("set layout.ep to {group}, or leave it unset"),
            ));
        }
        if asked != group {
            return Err(self.broken(
                format!("layout.ep = {asked}, but all {group} data positions that host a group share the work of its experts"),
                format!("set layout.ep to {group}, or leave it unset; layout.dp says how many host a group"),
            ));
        }
        Ok(group)
    }

    fn chunks_per_rank(&self) -> Result<usize, SpecError> {
        let r = self.request;
        let layers = self.model.layers;
        if r.pp > layers {
            return Err(self.broken(
                format!("layout.pp = {} asks for more stages than the {layers} layers of the model", r.pp),
                format!("set layout.pp to at most {layers}"),
            ));
        }
        let (default, may_differ) = r.schedule.chunks();
        let (default, may_differ) = match &r.orders {
            Some(orders) => (orders.placement.len() / orders.positions.len().max(1), false),
            None if r.pp == 1 => (1, false),
            None => (default, may_differ),
        };
        let vpp = r.vpp.unwrap_or(default);
        if vpp != default && !may_differ {
            let why = match r.pp {
                1 => "with layout.pp = 1: on one position every schedule is plain accumulation over one chunk".into(),
                _ => format!("with layout.schedule = {}, which keeps {default} per rank", r.schedule),
            };
            return Err(self.broken(
                format!("layout.vpp = {vpp} {why}"),
                format!(
                    "leave layout.vpp unset, or set it to {default}{}",
                    if r.pp > 1 { "; layout.schedule = interleaved takes any" } else { ", or set layout.pp" }
                ),
            ));
        }
        if r.pp.saturating_mul(vpp) > layers {
            return Err(self.broken(
                format!(
                    "layout.pp = {} x layout.vpp = {vpp} asks for {} chunks of {layers} layers",
                    r.pp,
                    r.pp.saturating_mul(vpp)
                ),
                format!(
                    "set layout.vpp to at most {}, or layout.pp to at most {}",
                    (layers / r.pp).max(1),
                    (layers / vpp).max(1)
                ),
            ));
        }
        Ok(vpp)
    }

    /// A schedule file fits the positions and the microbatches.
    fn orders(&self, cells: &[Range<usize>]) -> Result<(), SpecError> {
        let r = self.request;
        let Some(orders) = &r.orders else { return Ok(()) };
        if orders.positions.len() != r.pp {
            return Err(self.broken(
                format!("layout.schedule_file has {} lines for layout.pp = {}", orders.positions.len(), r.pp),
                format!("set layout.pp to {}, or give the file one line per position", orders.positions.len()),
            ));
        }
        let most = cells.iter().map(|part| self.grid.units(part.clone()).count()).max().unwrap_or(0);
        if orders.microbatches != most {
            return Err(self.broken(
                format!(
                    "layout.schedule_file has microbatches 0 to {}, but a data position has {most} in a step",
                    orders.microbatches.saturating_sub(1)
                ),
                format!("give every stage of the file the microbatches 0 to {}", most.saturating_sub(1)),
            ));
        }
        Ok(())
    }

    /// What is kept of each layer.
    fn recompute(&self) -> Result<Vec<Recompute>, SpecError> {
        let (r, layers) = (self.request, self.model.layers);
        let Some(chosen) = &r.recompute_layers else { return Ok(vec![r.recompute; layers]) };
        if let Some(layer) = chosen.iter().find(|layer| **layer >= layers) {
            return Err(self.broken(
                format!("layout.recompute_layers names layer {layer}"),
                format!("name layers 0 to {}", layers - 1),
            ));
        }
        Ok((0..layers).map(|l| if chosen.contains(&l) { r.recompute } else { Recompute::None }).collect())
    }

    /// Contiguous parts of `total`: the given counts, or as even as possible with the larger ones first.
    fn split(
        &self,
        key: &str,
        counts: Option<&[usize]>,
        parts: usize,
        total: usize,
        what: &str,
    ) -> Result<Vec<Range<usize>>, SpecError> {
        let even: Vec<usize> = (0..parts).map(|i| total / parts + usize::from(i < total % parts)).collect();
        let counts = counts.unwrap_or(&even);
        let sum = counts.iter().fold(0, |sum: usize, n| sum.saturating_add(*n));
        if counts.len() != parts || sum != total || counts.contains(&0) {
            return Err(self.broken(
                format!(
                    "{key} = {counts:?} must be {parts} numbers of at least 1 that add up to the {total} {what} (it has {}, adding up to {sum})",
                    counts.len(),
                ),
                format!("leave {key} unset, or set it to such as {even:?}"),
            ));
        }
        let mut at = 0;
        Ok(counts
            .iter()
            .map(|n| {
                at += n;
                at - n..at
            })
            .collect())
    }
}

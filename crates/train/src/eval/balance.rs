//! The auxiliary loss of an evaluation: the rule of training, out of what routers did in the forward alone.

use std::collections::BTreeMap;

use spec::Moe;
use spec::moe::AuxScope;

use crate::segments::Routing;

/// What the auxiliary loss of the units under `targets` (by group of data cells and microbatch: the tokens with a target)
/// comes to, weighted by these and summed; without its coefficient. `all` may come in any order: the sums are in one.
pub fn auxiliary(moe: &Moe, mut all: Vec<Routing>, targets: &BTreeMap<(usize, usize), u64>) -> f64 {
    all.sort_by_key(|routing| (routing.unit, routing.layer, routing.sequence, routing.slice));
    let mut scopes: BTreeMap<((usize, usize), usize), Scope> = BTreeMap::new();
    for routing in &all {
        // Pooled: the rows of all layers together.
        let layer = if moe.aux_scope == AuxScope::Layer { routing.layer } else { 0 };
        scopes.entry((routing.unit, layer)).or_insert_with(|| Scope::new(moe.experts)).add(routing);
    }
    let chosen = if moe.aux_scope == AuxScope::Layer { moe.per_token } else { 1 };
    let weighted = |((unit, _), scope): (&((usize, usize), usize), &Scope)| {
        scope.loss(chosen) * targets.get(unit).copied().unwrap_or(0) as f64
    };
    scopes.iter().map(weighted).sum()
}

/// The rows over which tokens are counted and scores averaged.
struct Scope {
    rows: usize,
    counts: Vec<u64>,
    scores: Vec<f64>,
}

impl Scope {
    fn new(experts: usize) -> Self {
        Self { rows: 0, counts: vec![0; experts], scores: vec![0.0; experts] }
    }

    fn add(&mut self, routing: &Routing) {
        self.rows += routing.rows;
        self.counts.iter_mut().zip(&routing.counts).for_each(|(sum, count)| *sum += count);
        self.scores.iter_mut().zip(&routing.scores).for_each(|(sum, score)| *sum += score);
    }

    /// Experts x the sum over them of (rows that chose it / rows / `chosen`) x its mean score.
    fn loss(&self, chosen: usize) -> f64 {
        let rows = self.rows as f64;
        let products = self.counts.iter().zip(&self.scores).map(|(count, sum)| *count as f64 * sum);
        products.sum::<f64>() * self.counts.len() as f64 / (rows * rows * chosen as f64)
    }
}

#[cfg(test)]
mod tests {
    use spec::moe::Scores;

    use super::*;

    fn moe(aux_scope: AuxScope) -> Moe {
        Moe {
            experts: 2,
            per_token: 2,
            ffn: 1,
            shared_ffn: 0,
            scores: Scores::Softmax,
            renorm: true,
            bias: false,
            bias_rate: 0.0,
            aux_loss: 0.5,
            aux_scope,
        }
    }

    fn routing(unit: (usize, usize), layer: usize, counts: [u64; 2], scores: [f64; 2]) -> Routing {
        let rows = (counts[0] + counts[1]) as usize / 2;
        Routing { unit, layer, sequence: 0, slice: (0, 0), rows, counts: counts.to_vec(), scores: scores.to_vec() }
    }

    #[test]
    fn balance_is_one_for_each_layer_and_the_chosen_experts_where_layers_are_pooled() {
        let even = |layer| routing((0, 0), layer, [4, 4], [2.0, 2.0]);
        let targets = BTreeMap::from([((0, 0), 3)]);
        let loss = |scope| auxiliary(&moe(scope), vec![even(1), even(0)], &targets);
        assert_eq!(loss(AuxScope::Layer), 3.0 * 2.0);
        assert_eq!(loss(AuxScope::Pooled), 3.0 * 2.0);
        // Experts that are chosen by all in turn: each layer is out of balance, all together are not.
        let odd = |layer, e: usize| {
            let of = |full: f64| if e == 0 { [full, 0.0] } else { [0.0, full] };
            routing((0, 0), layer, of(8.0).map(|n| n as u64), of(4.0))
        };
        let loss = |scope| auxiliary(&moe(scope), vec![odd(0, 0), odd(1, 1)], &targets);
        assert_eq!(loss(AuxScope::Layer), 3.0 * (2.0 + 2.0));
        assert_eq!(loss(AuxScope::Pooled), 3.0 * 2.0);
    }

    #[test]
    fn units_count_by_their_targets() {
        let all = vec![routing((0, 0), 0, [4, 4], [2.0, 2.0]), routing((1, 0), 0, [8, 0], [4.0, 0.0])];
        let targets = BTreeMap::from([((0, 0), 1), ((1, 0), 10)]);
        assert_eq!(auxiliary(&moe(AuxScope::Layer), all, &targets), 1.0 + 20.0);
    }
}

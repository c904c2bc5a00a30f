//! Learning rate and update.

use std::ops::Range;

use spec::Recipe;
use spec::run::{LrSchedule, TrainConfig};
use spec::tensors::STATE_CHUNK;

use crate::state::{BucketState, ChunkState};
use crate::vote::Decision;

/// The learning rate of step `step` (from 1): a line up to the peak at step `warmup`, then the schedule down to
/// `lr_min` at the last step. Peak and minimum are those of the step's recipe.
pub fn learning_rate(train: &TrainConfig, step: u64) -> f64 {
    let Recipe { lr, lr_min, .. } = train.recipe.at(step);
    if step < train.warmup {
        return lr * step as f64 / train.warmup as f64;
    }
    match train.schedule {
        LrSchedule::Wsd => {
            let left = (train.steps - step.min(train.steps)).min(train.decay);
            return lr_min + (lr - lr_min) * left as f64 / train.decay.max(1) as f64;
        }
        LrSchedule::Rsqrt => return (lr * (train.warmup as f64 / step as f64).sqrt()).max(lr_min),
        _ => {}
    }
    let rest = (train.steps - train.warmup).max(1) as f64;
    let done = (step - train.warmup) as f64 / rest;
    let share = match train.schedule {
        LrSchedule::Constant | LrSchedule::Wsd | LrSchedule::Rsqrt => return lr,
        LrSchedule::Linear => 1.0 - done,
        LrSchedule::Cosine => 0.5 * (1.0 + kernels::math::cos64(std::f64::consts::PI * done)),
    };
    lr_min + (lr - lr_min) * share
}

/// beta^step by repeated multiplication: the same bits on every machine.
fn power(beta: f64, step: u64) -> f64 {
    let (mut base, mut exponent, mut out) = (beta, step, 1.0);
    while exponent > 0 {
        if exponent & 1 == 1 {
            out *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    out
}

/// True if `part` occurs in `name`; `*` in it stands for anything.
fn names(part: &str, name: &str) -> bool {
    let mut rest = name;
    part.split('*').all(|piece| match rest.find(piece) {
        Some(at) => {
            rest = &rest[at + piece.len()..];
            true
        }
        None => false,
    })
}

/// AdamW on the elements that `chunk` owns, from the summed gradients. With `sums` the checksums of what it wrote.
pub fn apply(
    ctx: &kernels::Ctx,
    train: &TrainConfig,
    step: u64,
    decision: &Decision,
    chunk: &mut ChunkState,
    sums: bool,
) -> Option<Written> {
    let mut written = Vec::with_capacity(chunk.buckets.len());
    for number in 0..chunk.buckets.len() {
        // While one is updated, the next one comes from its file, if it has one.
        chunk.buckets.iter().skip(number).take(2).for_each(BucketState::want);
        let all = 0..chunk.buckets[number].owned.len();
        written.push(apply_to(ctx, train, step, decision, chunk, (number, all), sums));
        if chunk.buckets[number].plan.parameters {
            chunk.buckets[number].rest();
        }
    }
    sums.then_some(written)
}

/// [`apply`] to some of the elements that `chunk` owns of a bucket, counted from the first one that it owns; they begin where a
/// state chunk does.
pub fn apply_to(
    ctx: &kernels::Ctx,
    train: &TrainConfig,
    step: u64,
    decision: &Decision,
    chunk: &mut ChunkState,
    (number, at): (usize, Range<usize>),
    sums: bool,
) -> Vec<[u64; 3]> {
    let recipe = train.recipe.at(step);
    let base = kernels::AdamW {
        lr: learning_rate(train, step) as f32,
        beta1: recipe.beta1 as f32,
        beta2: recipe.beta2 as f32,
        eps: recipe.eps as f32,
        weight_decay: 0.0,
        correction1: (1.0 - power(recipe.beta1, step)) as f32,
        correction2: (1.0 - power(recipe.beta2, step)) as f32,
        grad_scale: decision.grad_scale,
    };
    let ChunkState { held, params, buckets, gathers, .. } = chunk;
    let BucketState { plan, owned, shard, moment1, moment2, total, .. } = &mut buckets[number];
    if !plan.parameters || at.is_empty() {
        return Vec::new();
    }
    debug_assert!(at.start.is_multiple_of(STATE_CHUNK));
    // In the flat vector.
    let here = owned.start + at.start..owned.start + at.end;
    let inside = held.iter().filter_map(|held| {
        let (lo, hi) = (held.at.start.max(here.start), held.at.end.min(here.end));
        (lo < hi && held.tensor.role.is_trained()).then(|| {
            let decays = held.tensor.decays() && !train.no_decay.iter().any(|part| names(part, &held.tensor.name));
            (lo - here.start..hi - here.start, if decays { recipe.weight_decay as f32 } else { 0.0 })
        })
    });
    let parts: Vec<_> = inside.collect();
    let p = if *gathers { &mut shard[at.clone()] } else { &mut params[here] };
    let state = kernels::AdamWState { p, m: &mut moment1[at.clone()], v: &mut moment2[at.clone()] };
    kernels::adamw_parts(ctx, &base, &parts, state, &total[at], STATE_CHUNK, sums)
}

/// By bucket, the checksums of every [`STATE_CHUNK`] owned elements of parameters, first and second moments.
pub type Written = Vec<Vec<[u64; 3]>>;

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Run;

    fn train(sets: &str) -> TrainConfig {
        let text = format!(
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 2\nseq = 8\nlr = 1.0\n{sets}"
        );
        Run::parse(&text, "test", &[], 1).unwrap().train
    }

    #[test]
    fn warmup_reaches_the_peak_and_the_schedules_end_at_the_minimum() {
        let cosine = train("warmup = 4\nlr_min = 0.1");
        let at = |s| learning_rate(&cosine, s);
        assert_eq!((at(1), at(2), at(4)), (0.25, 0.5, 1.0));
        assert!((at(7) - 0.55).abs() < 1e-12, "half way of the cosine");
        assert!((at(10) - 0.1).abs() < 1e-12);
        let linear = train("schedule = \"linear\"");
        assert!((learning_rate(&linear, 5) - 0.5).abs() < 1e-12);
        assert_eq!(learning_rate(&linear, 10), 0.0);
        assert_eq!(learning_rate(&train("schedule = \"constant\""), 10), 1.0);
    }

    #[test]
    fn stable_then_a_line_and_inverse_square_root() {
        let wsd = train("schedule = \"wsd\"\ndecay = 4\nwarmup = 2\nlr_min = 0.2");
        let at: Vec<f64> = (1..=10).map(|s| learning_rate(&wsd, s)).collect();
        assert_eq!(at[..6], [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert!((at[7] - 0.6).abs() < 1e-12 && (at[9] - 0.2).abs() < 1e-12, "{at:?}");
        let rsqrt = train("schedule = \"rsqrt\"\nwarmup = 2");
        assert_eq!((learning_rate(&rsqrt, 2), learning_rate(&rsqrt, 8)), (1.0, 0.5));
    }

    #[test]
    fn a_change_of_the_recipe_holds_from_its_step_on() {
        let sets = "schedule = \"linear\"\nchanges = [\"6: train.lr=0.5\", \"8: train.lr_min=0.1\"]";
        let (changed, plain) = (train(sets), train("schedule = \"linear\""));
        let at = |train: &TrainConfig, step| learning_rate(train, step);
        assert!((1..6).all(|step| at(&changed, step).to_bits() == at(&plain, step).to_bits()));
        assert_eq!((at(&changed, 6), at(&changed, 7)), (0.5 * at(&plain, 6), 0.5 * at(&plain, 7)));
        assert_eq!(at(&changed, 10), 0.1);
    }

    #[test]
    fn tensors_are_named_by_parts() {
        let name = "model.layers.0.self_attn.o_proj.weight";
        assert!(names("o_proj", name) && names("layers.0.*.o_proj", name) && names("*", name));
        assert!(!names("layers.1.*", name) && !names("o_proj*self_attn", name));
    }

    #[test]
    fn power_is_a_power() {
        assert!((power(0.9, 10) - 0.9f64.powi(10)).abs() < 1e-15);
        assert_eq!(power(0.5, 3), 0.125);
    }
}

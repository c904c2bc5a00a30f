//! The validity law of `[train]`.

use crate::error::SpecError;
use crate::run::{LrSchedule, TrainConfig};

/// Refuses what cannot be trained with; names the key, its range and a usual value.
pub(crate) fn check(train: &TrainConfig) -> Result<(), SpecError> {
    let TrainConfig { steps, warmup, decay, schedule, .. } = *train;
    if steps == 0 {
        return Err(SpecError::law("train.steps = 0", "steps count from 1", "set train.steps to at least 1"));
    }
    let factors = format!(
        "schedule {schedule}, steps {steps}, warmup {warmup}, decay {decay}, patience {}, eval_every {}",
        train.patience, train.eval_every
    );
    let law = |what: String, remedy: &str| Err(SpecError::law(what, factors.clone(), remedy));
    if warmup + decay > steps {
        let parts = if decay == 0 {
            format!("train.warmup = {warmup} is")
        } else {
            format!("train.warmup = {warmup} and train.decay = {decay} are")
        };
        let what = format!("{parts} longer than the run: train.steps = {steps}");
        return law(what, "lower them, or raise train.steps");
    }
    if schedule == LrSchedule::Wsd && decay == 0 {
        let what = "train.schedule = wsd needs its last line".into();
        return law(what, "set train.decay, such as a tenth of train.steps");
    }
    if schedule == LrSchedule::Rsqrt && warmup == 0 {
        return law("train.schedule = rsqrt falls from the end of the warm-up".into(), "set train.warmup");
    }
    if train.patience > 0 && train.eval_every == 0 {
        let what = "train.patience counts validations, and there are none before the end".into();
        return law(what, "set train.eval_every");
    }
    rates(train)
}

fn rates(train: &TrainConfig) -> Result<(), SpecError> {
    let share = "at least 0 and below 1";
    let temperature = f64::from(train.sample.temperature);
    let ranges = [
        ("train.lr", train.lr, train.lr >= 0.0, "at least 0", "1e-3"),
        ("train.lr_min", train.lr_min, train.lr_min >= 0.0, "at least 0", "0"),
        ("train.beta1", train.beta1, (0.0..1.0).contains(&train.beta1), share, "0.9"),
        ("train.beta2", train.beta2, (0.0..1.0).contains(&train.beta2), share, "0.95"),
        ("train.eps", train.eps, train.eps > 0.0, "above 0", "1e-8"),
        ("train.weight_decay", train.weight_decay, train.weight_decay >= 0.0, "at least 0", "0.1"),
        ("train.clip", train.clip, train.clip >= 0.0, "at least 0 (0: none)", "1"),
        ("train.sample_temperature", temperature, temperature >= 0.0, "at least 0", "0.8"),
    ];
    match ranges.into_iter().find(|(_, _, fits, ..)| !fits) {
        None => Ok(()),
        Some((key, value, _, range, usual)) => Err(SpecError::law(
            format!("{key} = {value} is out of range: it must be {range}"),
            format!("{key} {value}"),
            format!("set {key} to such as {usual}, or leave it unset"),
        )),
    }
}

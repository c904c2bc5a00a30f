//! The validity law of `[train]`.

use crate::error::SpecError;
use crate::faults::Faults;
use crate::recipe::Recipe;
use crate::run::{LrSchedule, TrainConfig};

/// Refuses settings under which nothing can be trained. Each error names the key, its range and a usual value.
pub(crate) fn check(train: &TrainConfig) -> Result<(), SpecError> {
    let TrainConfig { steps, warmup, decay, schedule, .. } = *train;
    let mut faults = Faults::default();
    let factors = format!(
        "schedule {schedule}, steps {steps}, warmup {warmup}, decay {decay}, patience {}, eval_every {}",
        train.patience, train.eval_every
    );
    let mut law = |what: String, remedy: &str| faults.law(what, factors.clone(), remedy);
    if steps == 0 {
        law("train.steps = 0: steps count from 1".into(), "set train.steps to at least 1");
    } else if warmup + decay > steps {
        let parts = if decay == 0 {
            format!("train.warmup = {warmup} is")
        } else {
            format!("train.warmup = {warmup} and train.decay = {decay} are")
        };
        let what = format!("{parts} longer than the run: train.steps = {steps}");
        law(what, "lower them, or raise train.steps");
    }
    if schedule == LrSchedule::Wsd && decay == 0 {
        let what = "train.schedule = wsd needs its last line, train.decay".into();
        law(what, "set train.decay, such as a tenth of train.steps");
    }
    if schedule == LrSchedule::Rsqrt && warmup == 0 {
        law("train.schedule = rsqrt falls from the end of train.warmup".into(), "set train.warmup");
    }
    if train.patience > 0 && train.eval_every == 0 {
        let what = "train.patience counts validations, and train.eval_every = 0 makes none before the end".into();
        law(what, "set train.eval_every");
    }
    if let Some(step) = train.recipe.changes().steps().find(|step| *step > steps) {
        let what = format!("train.changes begins at step {step}, after the last one: train.steps = {steps}");
        law(what, "name an earlier step, or remove the entry");
    }
    rates(train, None, &mut faults);
    train.recipe.changes().steps().for_each(|step| rates(train, Some(step), &mut faults));
    faults.end(())
}

/// The values of `step`; none: those that the run begins with.
fn rates(train: &TrainConfig, step: Option<u64>, faults: &mut Faults) {
    let share = "at least 0 and below 1";
    let temperature = f64::from(train.sample.temperature);
    let from = step.map_or(String::new(), |step| format!(" from step {step} on (train.changes)"));
    let Recipe { lr, lr_min, clip, weight_decay, beta1, beta2, eps } = train.recipe.at(step.unwrap_or(0));
    let ranges = [
        ("train.lr", lr, lr >= 0.0, "at least 0", "1e-3"),
        ("train.lr_min", lr_min, lr_min >= 0.0, "at least 0", "0"),
        ("train.beta1", beta1, (0.0..1.0).contains(&beta1), share, "0.9"),
        ("train.beta2", beta2, (0.0..1.0).contains(&beta2), share, "0.95"),
        ("train.eps", eps, eps > 0.0, "above 0", "1e-8"),
        ("train.weight_decay", weight_decay, weight_decay >= 0.0, "at least 0", "0.1"),
        ("train.clip", clip, clip >= 0.0, "at least 0 (0: none)", "1"),
        ("train.sample_temperature", temperature, temperature >= 0.0, "at least 0", "0.8"),
    ];
    for (key, value, _, range, usual) in ranges.into_iter().filter(|(_, _, fits, ..)| !fits) {
        faults.law(
            format!("{key} = {value}{from} is out of range: it must be {range}"),
            format!("{key} {value}"),
            format!("set {key} to such as {usual}, or leave it unset"),
        );
    }
    if lr_min > lr && lr >= 0.0 {
        faults.law(
            format!("train.lr_min = {lr_min} is above train.lr = {lr}: the rate would rise to its minimum"),
            format!("train.schedule {}, train.lr {lr}, train.lr_min {lr_min}", train.schedule),
            format!("set train.lr_min to at most {lr}, or leave it unset (0), or raise train.lr"),
        );
    }
}

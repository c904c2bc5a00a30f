//! Changes of what the run is: a person's, of its recipe; batches that come to no number. Each begins with a step, and holds for
//! whoever computes that step. It is written down before anybody acts on it: places are given when that was said to be done.

use spec::{Interventions, Run, is_of_recipe};

use super::{Next, Phase, Policy};
use crate::DIVERGED;
use crate::action::Action;

/// A change that waits until it is known with which step it begins.
#[derive(Debug, Clone)]
pub(super) enum Wish {
    /// A person's settings, each `key=value`, of the recipe and others that go with them.
    Reload(Vec<String>),
    /// This step comes to no number: the batches up to its own are left out.
    Skip(u64, String),
}

/// A change that is being written down.
#[derive(Debug, Clone)]
pub(super) struct Written {
    /// The run with it.
    run: Run,
    /// The step after which the run goes on, if that is an earlier one, and why.
    back: Option<(u64, String)>,
}

impl Policy {
    /// A person changes the run; the shell has validated it.
    pub(super) fn reload(&mut self, now: u64, sets: Vec<String>) {
        if sets.iter().any(|set| is_of_recipe(set)) {
            self.wishes.push_back(Wish::Reload(sets));
        } else {
            match self.with(&sets, &Interventions::default()) {
                Ok(run) => self.adopt(run),
                Err(reason) => return self.act(Action::Refuse, reason),
            }
        }
        if self.phase == Phase::Running {
            self.end_world(now, "the run was changed; it goes on from the last committed step");
        }
    }

    /// The run as it is wanted with more settings and interventions.
    fn with(&self, sets: &[String], more: &Interventions) -> Result<Run, String> {
        let all = Interventions::of(&self.wanted).then(more);
        let sets: Vec<_> = sets.iter().cloned().chain(all.sets()).collect();
        Run::parse(&self.wanted.values.to_toml(), "the changed run", &sets, self.cores).map_err(|e| e.to_string())
    }

    /// From the next world on this is the run.
    pub(super) fn adopt(&mut self, run: Run) {
        if self.guard.recompute_every == 0 && run.guard.recompute_every > 0 {
            self.saves.begin_checks(self.reached);
        }
        self.guard = run.guard.clone();
        self.wanted = run;
    }

    /// All is known of the world that ended, so the next step is: has changes that begin with it written down. True while
    /// places have to wait for that.
    pub(super) fn intervene(&mut self) -> bool {
        if !self.wishes.is_empty() && self.origin == Next::Saved && self.world.is_some() && !self.surveyed {
            // A step that nobody lived to tell of may be in a checkpoint: it was computed without the change.
            self.act(Action::Survey, "the run is changed, and goes on from disk");
            return true;
        }
        while self.written.is_none()
            && let Some(wish) = self.wishes.pop_front()
        {
            match wish {
                Wish::Reload(sets) => self.change_recipe(&sets),
                Wish::Skip(failed, reason) => self.skip(failed, reason),
            }
        }
        self.written.is_some()
    }

    fn change_recipe(&mut self, sets: &[String]) {
        let (recipe, others): (Vec<_>, Vec<_>) = sets.iter().cloned().partition(|set| is_of_recipe(set));
        // What was computed so far was computed by what held then.
        let step = self.reached.max(self.saves.newest_step()) + 1;
        if step > self.wanted.train.steps {
            let text = format!("no step is left: all of train.steps = {} are done", self.wanted.train.steps);
            return self.act(Action::Refuse, text);
        }
        let change = Interventions::from_step(step, &recipe);
        match self.with(&others, &change) {
            Ok(run) => self.write_down(step, recipe.join(" "), &change, Written { run, back: None }),
            Err(reason) => self.act(Action::Refuse, reason),
        }
    }

    /// Leaves out the batches up to that of step `failed` and as many more as are wanted, from the newest checkpoint on.
    fn skip(&mut self, failed: u64, reason: String) {
        let (saved, skips) = (self.saves.newest_step(), &self.wanted.train.skip);
        // The batch with which the next step begins then, counted from 0.
        let next = (failed - 1) + skips.before(failed) + self.guard.skip_batches;
        let batches = next.saturating_sub(saved + skips.before(saved));
        let set = format!("train.skip=[\"{}+{batches}\"]", saved + 1);
        let change = Interventions::of_set(&set).unwrap_or_default();
        match self.with(&[], &change) {
            Ok(run) => self.write_down(saved + 1, set, &change, Written { run, back: Some((saved, reason)) }),
            Err(why) => self.stop(DIVERGED, format!("{reason}; batches cannot be left out: {why}")),
        }
    }

    fn write_down(&mut self, step: u64, detail: String, change: &Interventions, written: Written) {
        let (run_toml, asked) = (written.run.values.to_toml(), written.back.is_none());
        let text = match &written.back {
            Some((_, reason)) => format!("batches are left out from step {step} on: {reason}"),
            None => format!("somebody changed the recipe from step {step} on"),
        };
        self.written = Some(written);
        self.act(Action::Intervene { step, detail, set: change.to_string(), run_toml, asked }, text);
    }

    /// The change is written down, or `refused` is why it could not be: then nothing of it holds.
    pub(super) fn recorded(&mut self, refused: Option<String>) {
        let Some(Written { run, back }) = self.written.take() else { return };
        match (refused, back) {
            (None, back) => {
                self.adopt(run);
                if let Some((after, _)) = back {
                    // At once: should all end here, nobody goes on from steps that are no more.
                    let text = format!("steps after {after} are computed again without some batches");
                    self.act(Action::Distrust { after }, text);
                }
            }
            (Some(why), Some((_, reason))) => {
                self.stop(
                    DIVERGED,
                    format!("{reason}; batches cannot be left out, as that cannot be written down: {why}"),
                );
            }
            // The run goes on unchanged; who could not write it down tells who asked.
            (Some(_), None) => {}
        }
    }
}

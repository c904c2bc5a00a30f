//! Spares check the ranks: after each checkpoint the ranks say what they made of the leaves of the next step, and a spare computes
//! them again in its own time, from that checkpoint. Where they differ the check is done once more, by another spare if there is
//! one: who then stands alone is wrong. If it is a rank the policy has the step computed again, with another rank's check.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use events::Event;
use policy::{Input, Origin, Process, World};

use super::Controller;
use crate::agent::Agents;
use crate::journal::{Entry, Leaves};
use crate::wire::{CheckOrder, ToRank};

/// A step for which nobody has asked yet is forgotten when there are so many newer ones.
const KEPT: usize = 64;

/// What is known of steps that can be checked.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// By step.
    steps: BTreeMap<u64, Claims>,
    /// By the last step in them.
    checkpoints: BTreeMap<u64, PathBuf>,
    under_way: Option<UnderWay>,
    /// The last step that was checked.
    done: u64,
    /// Checkpoints that must stay, and the newest one up to which all was checked: as they were told last.
    held: (Vec<u64>, Option<u64>),
    /// Why spares cannot do it was said.
    complained: bool,
}

/// What the ranks made of a step.
#[derive(Debug, Default)]
struct Claims {
    /// The world's run file.
    run_toml: String,
    /// How many ranks it had.
    ranks: usize,
    by: BTreeMap<Process, Leaves>,
}

#[derive(Debug)]
struct UnderWay {
    step: u64,
    spare: Process,
    /// What another check, or an earlier one by this spare, came to, if it was not what the ranks said.
    first: Option<(Process, Leaves)>,
}

/// What a check came to.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// So many leaves are as the ranks said.
    Alike(usize),
    /// These ranks said something else.
    Differ(Vec<Process>),
    /// They do not speak of the same leaves.
    Unclear,
}

fn compare(claims: &BTreeMap<Process, Leaves>, made: &Leaves) -> Verdict {
    let made: BTreeMap<u64, u64> = made.iter().copied().collect();
    let said = || claims.iter().flat_map(|(process, leaves)| leaves.iter().map(move |leaf| (*process, *leaf)));
    let keys: BTreeSet<u64> = said().map(|(_, (key, _))| key).collect();
    if keys.is_empty() || !keys.iter().eq(made.keys()) {
        return Verdict::Unclear;
    }
    let wrong: BTreeSet<Process> =
        said().filter(|(_, (key, hash))| made[key] != *hash).map(|(process, _)| process).collect();
    if wrong.is_empty() { Verdict::Alike(keys.len()) } else { Verdict::Differ(wrong.into_iter().collect()) }
}

impl Checks {
    /// The state goes back to before `step`: nothing that was said of it or of later ones counts.
    pub fn back(&mut self, step: u64) {
        self.steps.retain(|made, _| *made < step);
        self.checkpoints.retain(|made, _| *made < step);
        self.under_way = None;
        self.done = self.done.min(step.saturating_sub(1));
    }

    /// A checkpoint was written.
    pub fn checkpoint(&mut self, step: u64, path: PathBuf) {
        self.checkpoints.insert(step, path);
        while self.checkpoints.len() > KEPT {
            self.checkpoints.pop_first();
        }
    }

    /// `spare` is asked to check `step`; `first` as in [`UnderWay`].
    pub fn give(&mut self, step: u64, spare: Process, first: Option<(Process, Leaves)>) {
        self.under_way = Some(UnderWay { step, spare, first });
    }

    /// The folder has another timeline: what stands in it holds no more, and is written again.
    pub fn hold_again(&mut self) {
        self.held = <_>::default();
    }

    /// Nothing more is to come of the check of `step`.
    pub fn over(&mut self, step: u64) {
        self.done = self.done.max(step);
        self.under_way = None;
    }

    /// What is to be checked of `step`, if that is known.
    fn order(&self, step: u64) -> Option<CheckOrder> {
        let (claims, from) = (self.steps.get(&step)?, self.checkpoints.get(&(step - 1))?);
        Some(CheckOrder { step, from: from.clone(), run_toml: claims.run_toml.clone() })
    }

    /// The newest step that can be checked and was not.
    fn next(&self) -> Option<(u64, &Claims, &PathBuf)> {
        let whole = |(step, claims): (&u64, _)| {
            let claims: &Claims = claims;
            let from = self.checkpoints.get(&(step - 1))?;
            (*step > self.done && claims.by.len() == claims.ranks).then_some((*step, claims, from))
        };
        self.steps.iter().rev().find_map(|(step, claims)| whole((step, claims)))
    }
}

impl Controller<'_> {
    /// A world begins; from where another one may not have come nothing that was said counts.
    pub(super) fn checks_in(&mut self, world: &World) {
        if !matches!(world.origin, Origin::Peers { .. }) {
            self.checks.back(self.policy.reached() + 1);
        }
    }

    /// A rank tells what it made of the leaves of a step.
    pub(super) fn claimed(&mut self, process: Process, step: u64, leaves: Leaves) {
        self.journal.write(&Entry::Claimed { process, step, leaves: leaves.clone() });
        self.claim(process, step, leaves);
    }

    /// Takes in what a rank made of the leaves of a step.
    pub(super) fn claim(&mut self, process: Process, step: u64, leaves: Leaves) {
        let Some(world) = self.policy.world() else { return };
        let (run_toml, ranks) = (world.run_toml.clone(), world.processes.len());
        let claims = self.checks.steps.entry(step).or_default();
        if claims.run_toml != run_toml {
            *claims = Claims { run_toml, ranks, ..Claims::default() };
        }
        claims.by.insert(process, leaves);
        while self.checks.steps.len() > KEPT {
            self.checks.steps.pop_first();
        }
    }

    /// Gives a spare that has nothing to do a step to check.
    pub(super) fn check(&mut self, agents: &mut dyn Agents) {
        let spares = self.policy.waiting();
        if self.checks.under_way.as_ref().is_some_and(|work| !spares.contains(&work.spare)) {
            // It got a place, or is gone.
            self.checks.under_way = None;
        }
        if self.checks.under_way.is_none()
            && let Some((step, ..)) = self.checks.next()
            && let Some(spare) = spares.first().copied()
        {
            self.order(step, spare, None, agents);
        }
        self.hold();
    }

    fn order(&mut self, step: u64, spare: Process, first: Option<(Process, Leaves)>, agents: &mut dyn Agents) {
        let Some(order) = self.checks.order(step) else {
            self.checks.under_way = None;
            return;
        };
        self.journal.write(&Entry::Checking { spare, step, first: first.clone() });
        agents.say(spare, &ToRank::Check(Box::new(order)));
        self.checks.give(step, spare, first);
    }

    /// What a spare was asked for and has not answered, by the journal: it may not have heard it.
    pub(super) fn order_under_way(&self) -> Option<(Process, ToRank)> {
        let work = self.checks.under_way.as_ref()?;
        Some((work.spare, ToRank::Check(Box::new(self.checks.order(work.step)?))))
    }

    /// Nothing more comes of the check of `step`.
    fn check_over(&mut self, step: u64) {
        self.journal.write(&Entry::CheckOver { step });
        self.checks.over(step);
    }

    /// The checkpoints that nobody may remove: the newest one that this controller knows, the one from which a check is made, the one to
    /// go back to if a device is broken, and the newest of which all was checked.
    fn hold(&mut self) {
        let work = self.checks.under_way.as_ref().map(|work| work.step - 1);
        let vouched = self.policy.vouched();
        let known = self.policy.newest_saved();
        let mut steps: Vec<u64> = self.policy.sound().into_iter().chain(work).chain(vouched).chain(known).collect();
        steps.sort_unstable();
        steps.dedup();
        let held = (steps, vouched);
        if held != self.checks.held {
            self.trade.hold(&held.0, held.1);
            self.checks.held = held;
        }
    }

    /// A spare has checked a step.
    pub(super) fn checked(
        &mut self,
        spare: Process,
        (step, leaves, seconds): (u64, Leaves, f64),
        problem: Option<String>,
        agents: &mut dyn Agents,
        observe: &mut dyn FnMut(&Event),
    ) {
        let Some(work) = self.checks.under_way.take_if(|work| (work.spare, work.step) == (spare, step)) else { return };
        let verdict = match (self.checks.steps.get(&step), &problem) {
            (Some(claims), None) => compare(&claims.by, &leaves),
            _ => Verdict::Unclear,
        };
        match (verdict, work.first) {
            (Verdict::Unclear, _) => {
                self.check_over(step);
                let why = problem.unwrap_or_else(|| "it and the ranks do not speak of the same leaves".into());
                if !std::mem::replace(&mut self.checks.complained, true) {
                    let text = format!(
                        "{spare}, a spare, could not check step {step}, ranks go on unchecked by spares: {why}"
                    );
                    observe(&Event::Notice { text });
                }
            }
            (Verdict::Alike(count), first) => {
                self.checks.over(step);
                observe(&Event::Checked { step, leaves: count as u64, process: spare.0, seconds });
                self.feed(Input::Checked { step }, agents, observe);
                if let Some((wrong, _)) = first {
                    let detail = format!("it computed leaves of step {step} otherwise than the ranks and {spare} did");
                    self.feed(Input::Erred { process: wrong, detail }, agents, observe);
                }
            }
            (Verdict::Differ(_), None) => {
                // By another one, if there is one; else the same one looks again.
                let other = self.policy.waiting().into_iter().find(|other| *other != spare);
                self.order(step, other.unwrap_or(spare), Some((spare, leaves)), agents);
            }
            (Verdict::Differ(ranks), Some((other, before))) if before == leaves => {
                self.checks.over(step);
                let by =
                    if other == spare { format!("{spare} found twice") } else { format!("{other} and {spare} found") };
                let detail = format!(
                    "the gradients of step {step} came out differently where they were computed again: {by} the same"
                );
                self.feed(Input::Disputed { step, processes: ranks, detail }, agents, observe);
            }
            (Verdict::Differ(_), Some(_)) => {
                self.check_over(step);
                let detail = format!("leaves of step {step} came out differently each time they were computed again");
                self.feed(Input::Erred { process: spare, detail }, agents, observe);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(of: &[(u64, &[(u64, u64)])]) -> BTreeMap<Process, Leaves> {
        of.iter().map(|(process, leaves)| (Process(*process), leaves.to_vec())).collect()
    }

    #[test]
    fn who_made_something_else_of_a_leaf_is_named() {
        let said = claims(&[(0, &[(0, 10), (1, 11)]), (1, &[(2, 12)]), (2, &[(3, 13)])]);
        let made = |two: u64, three: u64| vec![(3, three), (0, 10), (1, 11), (2, two)];
        assert_eq!(compare(&said, &made(12, 13)), Verdict::Alike(4));
        assert_eq!(compare(&said, &made(7, 13)), Verdict::Differ(vec![Process(1)]));
        assert_eq!(compare(&said, &made(7, 7)), Verdict::Differ(vec![Process(1), Process(2)]));
        // Nothing is said of a leaf that nobody has computed, or that nobody has claimed.
        assert_eq!(compare(&said, &made(12, 13)[1..].to_vec()), Verdict::Unclear);
        assert_eq!(compare(&claims(&[(0, &[(0, 10)])]), &made(12, 13)), Verdict::Unclear);
        assert_eq!(compare(&claims(&[]), &Vec::new()), Verdict::Unclear);
    }

    #[test]
    fn the_newest_step_with_a_checkpoint_before_it_is_next() {
        let mut checks = Checks::default();
        for step in [4, 7, 10] {
            let by = claims(&[(0, &[(0, 1)]), (1, &[(1, 1)])]);
            checks.steps.insert(step, Claims { run_toml: String::new(), ranks: 2, by });
        }
        assert!(checks.next().is_none());
        checks.checkpoint(3, "c/3".into());
        checks.checkpoint(6, "c/6".into());
        assert_eq!(checks.next().unwrap().0, 7);
        checks.checkpoint(9, "c/9".into());
        checks.steps.get_mut(&10).unwrap().by.pop_first();
        assert_eq!(checks.next().unwrap().0, 7, "one has not said it yet");
        checks.done = 7;
        assert!(checks.next().is_none(), "older ones are passed over");
        checks.done = 0;
        checks.back(5);
        assert_eq!((checks.next().unwrap().0, checks.checkpoints.len()), (4, 1));
    }
}

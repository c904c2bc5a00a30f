//! The checkpoints that a run could go back to, and up to which step all that was computed is known to be good.

use std::path::PathBuf;

use super::Unchecked;

/// A checkpoint: its last step, and its folder.
pub(super) type Saved = (u64, PathBuf);

/// What there is to go back to.
#[derive(Debug, Default)]
pub(super) struct Saves {
    /// Ascending: the newest one up to which all was checked, and all after it.
    all: Vec<Saved>,
    /// The last step at which gradients were computed by two ranks and were alike; or from which nothing before is asked.
    checked: u64,
    /// The first step that nobody can check any more, as who made it is gone; checks of later ones say nothing of it.
    unseen: Option<u64>,
}

/// Steps that a broken device may have spoilt, and what is left of before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Back {
    /// The first of them.
    pub first: u64,
    /// The checkpoint to go on from; none: the start.
    pub to: Option<Saved>,
}

impl Back {
    /// What it goes on from, for the person.
    pub fn name(&self) -> String {
        match &self.to {
            Some((step, _)) => format!("the checkpoint of step {step}"),
            None => "the start of the run, as there is no checkpoint from before them".into(),
        }
    }
}

impl Saves {
    /// Of a run that begins with `from`, which is taken to be good.
    pub fn of(from: Option<Saved>) -> Self {
        Self { checked: from.as_ref().map_or(0, |(step, _)| *step), all: from.into_iter().collect(), unseen: None }
    }

    /// Of one that begins with `from`, where steps before it are in doubt.
    pub fn doubtful(from: Option<Saved>, unchecked: Unchecked) -> Self {
        let Unchecked { checked, sound, unseen } = unchecked;
        let doubtful = from.as_ref().is_some_and(|(step, _)| checked < *step).then_some(checked + 1);
        let unseen = unseen.into_iter().chain(doubtful).min();
        Self { checked, all: sound.into_iter().chain(from).collect(), unseen }
    }

    /// The last step that was checked.
    pub fn checked(&self) -> u64 {
        self.checked
    }

    /// The first step that nobody can check any more.
    pub fn unseen(&self) -> Option<u64> {
        self.unseen
    }

    /// Nobody can check steps from `first` on any more, and the run goes on with them.
    pub fn never_checked(&mut self, first: u64) {
        self.unseen = Some(self.unseen.map_or(first, |known| known.min(first)));
    }

    /// The last step up to which all were checked.
    pub fn all_checked(&self) -> u64 {
        self.unseen.map_or(self.checked, |first| self.checked.min(first - 1))
    }

    /// The step of the newest checkpoint up to `step`.
    pub fn newest_until(&self, step: u64) -> Option<u64> {
        self.all.iter().rev().map(|(saved, _)| *saved).find(|saved| *saved <= step)
    }

    /// The newest checkpoint.
    pub fn newest(&self) -> Option<&Saved> {
        self.all.last()
    }

    /// The step of the newest checkpoint, or of the start.
    pub fn newest_step(&self) -> u64 {
        self.newest().map_or(0, |(step, _)| *step)
    }

    /// What the run goes on from if nobody holds its state, for the person.
    pub fn name(&self) -> String {
        match self.newest() {
            Some((step, _)) => format!("the checkpoint of step {step}"),
            None => "the start of the run".into(),
        }
    }

    /// The step of the newest one up to the last check.
    pub fn sound(&self) -> Option<u64> {
        self.newest_until(self.checked)
    }

    /// A checkpoint was written.
    pub fn written(&mut self, step: u64, path: PathBuf) {
        // One that was told late is no newer for that.
        self.all.retain(|(saved, _)| *saved != step);
        let at = self.all.partition_point(|(saved, _)| *saved < step);
        self.all.insert(at, (step, path));
        self.tidy();
    }

    /// What is there. The folder is right: what was not told of counts, and what is not there does not.
    pub fn found(&mut self, saved: Vec<Saved>) {
        self.all = saved;
        self.tidy();
    }

    /// `step` was committed in a run that checks every `every`th one; 0: none.
    pub fn committed(&mut self, step: u64, every: u64) {
        if every > 0 && step.is_multiple_of(every) {
            self.checked = step;
            self.tidy();
        }
    }

    /// Everything up to `step` is known to be good, or is not asked about.
    pub fn begin_checks(&mut self, step: u64) {
        self.checked = self.checked.max(step);
        self.tidy();
    }

    /// Where to go back to if something has erred in some step from `wrong` on, and at the latest by `wrong`: steps that were
    /// committed, the last one `committed`, are not to be trusted from the last check before it on. None: no such step was.
    pub fn back(&self, wrong: u64, committed: u64) -> Option<Back> {
        let clean = self.checked.min(wrong.saturating_sub(1));
        let to = self.all.iter().rev().find(|(step, _)| *step <= clean).cloned();
        (clean < committed).then_some(Back { first: clean + 1, to })
    }

    /// The run goes back: what is newer is none any more.
    pub fn go(&mut self, back: &Back) {
        self.all.retain(|(step, _)| *step < back.first);
        self.goes_on(self.newest_step());
    }

    /// The run goes on from the state of `step`: what was checked after it is computed again, and not checked again by that.
    pub fn goes_on(&mut self, step: u64) {
        self.checked = self.checked.min(step);
        self.unseen = self.unseen.filter(|first| *first <= step);
    }

    fn tidy(&mut self) {
        let checked = self.all_checked();
        let sound = self.all.iter().rposition(|(step, _)| *step <= checked).unwrap_or(0);
        self.all.drain(..sound);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(saves: &mut Saves, steps: impl IntoIterator<Item = u64>) {
        steps.into_iter().for_each(|step| saves.written(step, format!("c/{step}").into()));
    }

    fn to(saves: &Saves, wrong: u64, committed: u64) -> Option<(u64, Option<u64>)> {
        saves.back(wrong, committed).map(|back| (back.first, back.to.map(|(step, _)| step)))
    }

    #[test]
    fn what_was_computed_since_the_last_check_is_gone_back_over() {
        let mut saves = Saves::of(None);
        for step in 1..=7 {
            saves.committed(step, 4);
            if step % 2 == 0 {
                written(&mut saves, [step]);
            }
        }
        // Found in step 8, which is not committed.
        assert_eq!(to(&saves, 8, 7), Some((5, Some(4))));
        assert_eq!(saves.newest_step(), 6);
        saves.go(&saves.back(8, 7).unwrap());
        assert_eq!((saves.newest_step(), to(&saves, 8, 7)), (4, Some((5, Some(4)))));
        // Checked at each step: nothing is in doubt.
        let mut saves = Saves::of(None);
        (1..=7).for_each(|step| saves.committed(step, 1));
        assert_eq!(to(&saves, 8, 7), None);
    }

    #[test]
    fn without_a_checkpoint_that_is_old_enough_it_is_the_start() {
        let mut saves = Saves::of(None);
        written(&mut saves, [2, 3]);
        (1..=3).for_each(|step| saves.committed(step, 4));
        assert_eq!(to(&saves, 4, 3), Some((1, None)));
        saves.go(&saves.back(4, 3).unwrap());
        assert_eq!(saves.newest(), None);
        // What a run begins with is its start, and is kept as long as nothing newer was checked.
        let mut saves = Saves::of(Some((10, "c/10".into())));
        written(&mut saves, [11]);
        assert_eq!(to(&saves, 12, 11), Some((11, Some(10))));
        saves.committed(12, 4);
        assert_eq!(to(&saves, 16, 15), Some((13, Some(11))));
    }

    #[test]
    fn a_check_counts_only_for_the_steps_that_it_saw() {
        let mut saves = Saves::of(None);
        (1..=7).for_each(|step| saves.committed(step, 6));
        // Back to the start for another reason; what is computed again is not what was checked.
        saves.goes_on(saves.newest_step());
        (1..=5).for_each(|step| saves.committed(step, 6));
        assert_eq!(to(&saves, 6, 5), Some((1, None)));
        (6..=7).for_each(|step| saves.committed(step, 6));
        assert_eq!(to(&saves, 8, 7), Some((7, None)));
        // A checkpoint after the last check makes no check of it.
        written(&mut saves, [7]);
        saves.goes_on(saves.newest_step());
        assert_eq!(to(&saves, 9, 8), Some((7, None)));
    }

    #[test]
    fn what_was_never_to_be_checked_is_not_asked_about() {
        let mut saves = Saves::of(None);
        (1..=9).for_each(|step| saves.committed(step, 0));
        written(&mut saves, [6, 9]);
        saves.begin_checks(9);
        assert_eq!(to(&saves, 12, 11), Some((10, Some(9))));
    }

    #[test]
    fn checks_of_later_steps_say_nothing_of_one_whose_maker_is_gone() {
        let mut saves = Saves::of(None);
        let steps = |saves: &mut Saves, steps: std::ops::RangeInclusive<u64>| {
            for step in steps {
                saves.committed(step, 5);
                written(saves, [step]);
            }
        };
        steps(&mut saves, 1..=13);
        saves.never_checked(11);
        saves.goes_on(13);
        steps(&mut saves, 14..=17);
        assert_eq!((saves.checked(), saves.all_checked(), saves.unseen()), (15, 10, Some(11)));
        // What is found now is of the ranks that agreed in step 15; the one to trust alone stays.
        assert_eq!((to(&saves, 18, 17), saves.sound()), (Some((16, Some(15))), Some(15)));
        assert_eq!(saves.newest_until(saves.all_checked()), Some(10));
        saves.goes_on(10);
        steps(&mut saves, 11..=15);
        assert_eq!((saves.all_checked(), saves.unseen()), (15, None));
        // Who goes on from steps in doubt never learns of them; nor does who goes on from where they were known before.
        let doubtful = |checked, unseen| {
            let unchecked = Unchecked { checked, sound: Some((10, "c/10".into())), unseen };
            Saves::doubtful(Some((12, "c/12".into())), unchecked)
        };
        let mut saves = doubtful(10, None);
        saves.begin_checks(13);
        assert_eq!((saves.checked(), saves.all_checked(), saves.sound()), (13, 10, Some(12)));
        assert_eq!((doubtful(12, Some(11)).all_checked(), doubtful(11, Some(4)).unseen()), (10, Some(4)));
    }

    #[test]
    fn what_is_found_counts_and_not_what_was_told() {
        let mut saves = Saves::of(None);
        written(&mut saves, [2, 4]);
        saves.found(vec![(2, "c/2".into()), (6, "c/6".into())]);
        assert_eq!((saves.newest_step(), saves.newest_until(5)), (6, Some(2)));
        saves.found(vec![]);
        assert_eq!(saves.newest(), None);
    }

    #[test]
    fn one_told_late_is_no_newer() {
        let mut saves = Saves::of(None);
        written(&mut saves, [4, 2]);
        assert_eq!(saves.newest_step(), 4);
    }
}

//! Batches that a run leaves out: an intervention, and from then on a part of what the run is.

use std::fmt;

use crate::error::SpecError;
use crate::runfile::Values;

const KEY: &str = "train.skip";

/// Which batches are left out. Before step s of each (s, n) so many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skips(Vec<(u64, u64)>);

impl Skips {
    /// `train.skip`.
    pub(crate) fn read(values: &Values) -> Result<Self, SpecError> {
        Self::of_texts(&values.texts(KEY))
    }

    /// Its entries.
    pub(crate) fn of_texts(texts: &[String]) -> Result<Self, SpecError> {
        let mut all: Vec<(u64, u64)> = Vec::new();
        for text in texts {
            let read = text.split_once('+').and_then(|(step, n)| Some((step.parse().ok()?, n.parse().ok()?)));
            let after = all.last().map_or(0, |(step, _)| *step);
            let Some((step, n)) = read.filter(|(step, n)| *step > after && *n > 0) else {
                return Err(SpecError::law(
                    format!("{KEY} has {text:?}, which is no step and number of batches above the entry before it"),
                    "each entry is STEP+BATCHES, in ascending steps, from step 1: so many batches are left out before that step",
                    format!("write {KEY} = [\"13+2\"] to leave out two batches before step 13"),
                ));
            };
            all.push((step, n));
        }
        Ok(Self(all))
    }

    /// Of (step, batches), in ascending steps.
    pub(crate) fn of(all: impl Iterator<Item = (u64, u64)>) -> Self {
        Self(all.collect())
    }

    /// Each step, and how many batches are left out before it.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }

    /// How many batches are left out before `step` and earlier ones.
    pub fn before(&self, step: u64) -> u64 {
        self.0.iter().filter(|(at, _)| *at <= step).map(|(_, n)| n).sum()
    }

    /// None.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// As a run file has it.
impl fmt::Display for Skips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.0.iter().map(|(step, n)| format!("\"{step}+{n}\"")).collect();
        write!(f, "[{}]", all.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use crate::Run;

    fn run(skip: &str) -> Result<Run, crate::SpecError> {
        let text =
            "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n";
        Run::parse(text, "t", &[format!("train.skip={skip}")], 1)
    }

    #[test]
    fn batches_move_on_from_a_step() {
        let one = run("[\"3+2\", \"7+1\"]").unwrap();
        let first = |step| one.first_sequence(step) / 8;
        assert_eq!((1..=8).map(first).collect::<Vec<_>>(), [0, 1, 4, 5, 6, 7, 9, 10]);
        assert_eq!((one.cursor(2), one.cursor(3), one.cursor(10)), (16, 40, 104));
        let skip = &one.train.skip;
        let again = run(&skip.to_string()).unwrap();
        assert_eq!(again.train.skip, *skip);
        assert!(again.definition().contains("skip = [\"3+2\", \"7+1\"]"));
        let plain = run("[]").unwrap();
        assert!(plain.train.skip.is_empty() && plain.first_sequence(5) == 32);
    }

    #[test]
    fn what_is_no_skip_is_told_with_the_form() {
        for wrong in ["[\"3\"]", "[\"0+1\"]", "[\"3+0\"]", "[\"3+1\", \"3+1\"]", "[\"x+1\"]"] {
            let error = run(wrong).unwrap_err().to_string();
            assert!(error.contains("train.skip") && error.contains("STEP+BATCHES"), "{error}");
        }
    }
}

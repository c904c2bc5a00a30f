//! The recipe, step by step: what of it may change in a run (`train.changes`), and what it is in a given step.

use std::fmt;

use crate::error::SpecError;
use crate::runfile::Values;

const KEY: &str = "train.changes";

/// The recipe of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the last step.
    pub lr_min: f64,
    /// Limit of the global gradient norm; 0: none.
    pub clip: f64,
    /// Decoupled weight decay, on matrices only.
    pub weight_decay: f64,
    /// AdamW's first decay.
    pub beta1: f64,
    /// AdamW's second decay.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f64,
}

/// The keys of the recipe that may change in a run.
pub const RECIPE: [&str; 7] =
    ["train.lr", "train.lr_min", "train.clip", "train.weight_decay", "train.beta1", "train.beta2", "train.eps"];

impl Recipe {
    fn set(&mut self, key: &str, value: f64) {
        match key {
            "train.lr" => self.lr = value,
            "train.lr_min" => self.lr_min = value,
            "train.clip" => self.clip = value,
            "train.weight_decay" => self.weight_decay = value,
            "train.beta1" => self.beta1 = value,
            "train.beta2" => self.beta2 = value,
            "train.eps" => self.eps = value,
            _ => {}
        }
    }
}

/// The recipe over a run: who wants a value of it has to say of which step.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipes {
    first: Recipe,
    changes: Changes,
}

impl Recipes {
    /// What the run file says of the first step, and of changes later on.
    ///
    /// # Errors
    /// An entry of `train.changes` that is no change.
    pub(crate) fn read(values: &Values) -> Result<Self, SpecError> {
        Ok(Self { changes: Changes::read(&values.texts(KEY))?, ..Self::unchanged(values) })
    }

    /// The same without the changes, where these cannot be read.
    pub(crate) fn unchanged(values: &Values) -> Self {
        let mut first = Recipe { lr: 0.0, lr_min: 0.0, clip: 0.0, weight_decay: 0.0, beta1: 0.0, beta2: 0.0, eps: 0.0 };
        for key in RECIPE {
            first.set(key, values.float(key).expect("has a default"));
        }
        Self { first, changes: Changes::default() }
    }

    /// The recipe of `step`, whoever computes it and however often.
    pub fn at(&self, step: u64) -> Recipe {
        let mut recipe = self.first;
        self.changes.0.iter().filter(|change| change.step <= step).for_each(|c| recipe.set(c.key, c.value));
        recipe
    }

    /// What changes.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }
}

/// A value from a step on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// The first step that has it.
    pub step: u64,
    /// One of [`RECIPE`].
    pub key: &'static str,
    /// The value, finite.
    pub value: f64,
}

/// Changes of the recipe, by step and then as [`RECIPE`] has the keys.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes(Vec<Change>);

impl Changes {
    /// The entries of `train.changes`.
    ///
    /// # Errors
    /// One that is no change, or changes what another one does.
    pub(crate) fn read(texts: &[String]) -> Result<Self, SpecError> {
        let mut all: Vec<Change> = Vec::new();
        for text in texts {
            let refused = |what: &str| {
                SpecError::law(
                    format!("{KEY} has {text:?}, {what}"),
                    format!(
                        "each entry is STEP: KEY=NUMBER, from that step on (1 is the first); the keys are {}",
                        RECIPE.join(", ")
                    ),
                    format!("write {KEY} = [\"9: train.lr=1e-4\"] to go on with this rate from step 9 on"),
                )
            };
            let change = change(text).ok_or_else(|| refused("which is no change of the recipe"))?;
            if all.iter().any(|other| (other.step, other.key) == (change.step, change.key)) {
                return Err(refused("and another entry for the same step and key"));
            }
            all.push(change);
        }
        Ok(Self::of(all))
    }

    pub(crate) fn of(mut all: Vec<Change>) -> Self {
        let place = |change: &Change| RECIPE.iter().position(|key| *key == change.key);
        all.sort_by_key(|change| (change.step, place(change)));
        Self(all)
    }

    /// Each change.
    pub fn iter(&self) -> impl Iterator<Item = &Change> {
        self.0.iter()
    }

    /// The steps at which something changes, ascending, each once.
    pub fn steps(&self) -> impl Iterator<Item = u64> {
        self.0.chunk_by(|a, b| a.step == b.step).map(|changes| changes[0].step)
    }
}

fn change(text: &str) -> Option<Change> {
    let (step, set) = text.split_once(':')?;
    let (key, value) = set.split_once('=')?;
    let key = RECIPE.into_iter().find(|known| *known == key.trim())?;
    let value: f64 = value.trim().parse().ok()?;
    let step = step.trim().parse().ok()?;
    (step > 0 && value.is_finite()).then_some(Change { step, key, value })
}

/// As an entry of `train.changes`; the number is the shortest that reads back as the same.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}={:?}", self.step, self.key, self.value)
    }
}

/// As a run file has them.
impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.0.iter().map(|change| format!("\"{change}\"")).collect();
        write!(f, "[{}]", all.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use crate::Run;

    fn run(changes: &str) -> Result<Run, crate::SpecError> {
        let text = "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\nbatch = 8\nseq = 16\nlr = 0.5\n";
        Run::parse(text, "t", &[format!("train.changes={changes}")], 1)
    }

    #[test]
    fn a_change_holds_from_its_step_on() {
        let one = run("[\"7: train.lr=1e-4\", \"3: train.lr = 0.25\", \"7: train.clip=0\"]").unwrap();
        let at = |step| one.train.recipe.at(step);
        assert_eq!([1, 2, 3, 6, 7, 10].map(|step| at(step).lr), [0.5, 0.5, 0.25, 0.25, 1e-4, 1e-4]);
        assert_eq!((at(6).clip, at(7).clip, at(7).beta1), (1.0, 0.0, 0.9));
        let written = one.train.recipe.changes().to_string();
        assert_eq!(written, "[\"3: train.lr=0.25\", \"7: train.lr=0.0001\", \"7: train.clip=0.0\"]");
        assert_eq!(run(&written).unwrap().train.recipe, one.train.recipe);
        assert_eq!(one.train.recipe.changes().steps().collect::<Vec<_>>(), [3, 7]);
    }

    #[test]
    fn what_is_no_change_is_told_with_the_form() {
        for wrong in
            ["3", "0: train.lr=1", "3: train.lr", "3: train.steps=9", "3: lr=1", "3: train.lr=nan", "3 train.lr=1"]
        {
            let error = run(&format!("[\"{wrong}\"]")).unwrap_err().to_string();
            assert!(error.contains("train.changes") && error.contains("STEP: KEY=NUMBER"), "{wrong}: {error}");
        }
        let error = run("[\"3: train.lr=1\", \"3: train.lr=2\"]").unwrap_err().to_string();
        assert!(error.contains("same step and key"), "{error}");
        for (wrong, word) in
            [("3: train.lr=-1", "train.lr = -1"), ("3: train.beta1=1", "train.beta1"), ("11: train.lr=1", "step 11")]
        {
            let error = run(&format!("[\"{wrong}\"]")).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("train.changes"), "{wrong}: {error}");
        }
    }
}

//! What was changed in a run on purpose, each change with its step: batches left out (`train.skip`), values of the recipe
//! (`train.changes`). They are a part of what the run is from that step on; before it they say nothing yet.

use std::collections::BTreeMap;
use std::fmt;

use crate::recipe::{Change, Changes, RECIPE};
use crate::run::Run;
use crate::skip::Skips;

const SKIP: &str = "train.skip";
const CHANGES: &str = "train.changes";

/// Changes by step and key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Interventions(BTreeMap<(u64, &'static str), Value>);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Value {
    Batches(u64),
    Number(f64),
}

impl Interventions {
    /// Those that the run file of `run` has.
    pub fn of(run: &Run) -> Self {
        Self::from(&run.train.skip, run.train.recipe.changes())
    }

    fn from(skips: &Skips, changes: &Changes) -> Self {
        let skips = skips.iter().map(|(step, batches)| ((step, SKIP), Value::Batches(batches)));
        let changes = changes.iter().map(|change| ((change.step, change.key), Value::Number(change.value)));
        Self(skips.chain(changes).collect())
    }

    /// The one of `key=value`, where the key is `train.skip` or `train.changes`; none: it is another one, or no such list.
    pub fn of_set(set: &str) -> Option<Self> {
        let (key, list) = set.split_once('=')?;
        let texts = texts(list)?;
        match key.trim() {
            SKIP => Some(Self::from(&Skips::of_texts(&texts).ok()?, &Changes::default())),
            CHANGES => Some(Self::from(&Skips::default(), &Changes::read(&texts).ok()?)),
            _ => None,
        }
    }

    /// Those in a run's definition.
    pub fn of_definition(definition: &str) -> Self {
        let sets = lines(definition).filter_map(|(_, set)| Self::of_set(&set?));
        Self(sets.flat_map(|one| one.0).collect())
    }

    /// Values of the recipe from `step` on, each `key=value`; other keys are passed over.
    pub fn from_step(step: u64, sets: &[String]) -> Self {
        let entries = sets.iter().map(|set| format!("{step}: {set}"));
        let read = entries.filter_map(|entry| Changes::read(&[entry]).ok());
        Self(read.flat_map(|changes| Self::from(&Skips::default(), &changes).0).collect())
    }

    /// None.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of steps up to `step`: what the state of that step has gone through.
    #[must_use]
    pub fn until(&self, step: u64) -> Self {
        Self(self.0.iter().filter(|((at, _), _)| *at <= step).map(|(at, value)| (*at, *value)).collect())
    }

    /// Those of later steps.
    #[must_use]
    pub fn after(&self, step: u64) -> Self {
        Self(self.0.iter().filter(|((at, _), _)| *at > step).map(|(at, value)| (*at, *value)).collect())
    }

    /// Those that `known` does not have, or not so.
    #[must_use]
    pub fn without(&self, known: &Self) -> Self {
        Self(self.0.iter().filter(|(at, value)| known.0.get(at) != Some(value)).map(|(at, v)| (*at, *v)).collect())
    }

    /// These, and those of `later`, which has the last word on a step and key.
    #[must_use]
    pub fn then(&self, later: &Self) -> Self {
        let mut all = self.clone();
        all.0.extend(later.0.iter().map(|(at, value)| (*at, *value)));
        all
    }

    /// As settings of a run file; lists that are empty are left out.
    pub fn sets(&self) -> Vec<String> {
        let skips = Skips::of(self.0.iter().filter_map(|((step, _), value)| match value {
            Value::Batches(batches) => Some((*step, *batches)),
            Value::Number(_) => None,
        }));
        let changes = Changes::of(
            self.0
                .iter()
                .filter_map(|(&(step, key), value)| match value {
                    Value::Number(value) => Some(Change { step, key, value: *value }),
                    Value::Batches(_) => None,
                })
                .collect(),
        );
        let mut sets = Vec::new();
        if !skips.is_empty() {
            sets.push(format!("{SKIP}={skips}"));
        }
        if changes.iter().next().is_some() {
            sets.push(format!("{CHANGES}={changes}"));
        }
        sets
    }

    /// Each as settings of its own, by step: those of one step and list together.
    pub fn by_step(&self) -> Vec<(u64, String)> {
        let mut steps: Vec<u64> = self.0.keys().map(|(step, _)| *step).collect();
        steps.dedup();
        let of = |step: u64| self.until(step).after(step - 1).sets().into_iter().map(move |set| (step, set));
        steps.into_iter().flat_map(of).collect()
    }
}

/// As settings of a run file.
impl fmt::Display for Interventions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sets().join(" "))
    }
}

/// True if `set` (`key=value`) is of a key of the recipe that may change in a run.
pub fn is_of_recipe(set: &str) -> bool {
    set.split_once('=').is_some_and(|(key, _)| RECIPE.contains(&key.trim()))
}

/// `definition` as far as the state of `step` has gone through it: interventions of later steps are not in it.
pub fn definition_until(definition: &str, step: u64) -> String {
    let mut out = String::new();
    for (line, set) in lines(definition) {
        match set.as_deref().and_then(Interventions::of_set) {
            Some(all) => {
                for set in all.until(step).sets() {
                    let (key, list) = set.split_once('=').expect("key and value");
                    out += &format!("{} = {list}\n", key.trim_start_matches("train."));
                }
            }
            None => out += &format!("{line}\n"),
        }
    }
    out
}

/// The lines of a definition; with those of interventions as `key=value`.
fn lines(definition: &str) -> impl Iterator<Item = (&str, Option<String>)> {
    let mut section = "";
    definition.lines().map(move |line| {
        if line.starts_with('[') {
            section = line;
        }
        let set = line.split_once(" = ").map(|(field, list)| (format!("train.{field}"), list));
        let ours = set.filter(|(key, _)| section == "[train]" && (key == SKIP || key == CHANGES));
        (line, ours.map(|(key, list)| format!("{key}={list}")))
    })
}

fn texts(list: &str) -> Option<Vec<String>> {
    let mut table: toml::Table = format!("v = {list}").parse().ok()?;
    let toml::Value::Array(all) = table.remove("v")? else { return None };
    all.into_iter().map(|text| text.as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "[model]\npreset = \"nano\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 20\nbatch = 8\nseq = 16\n";

    fn run(sets: &[&str]) -> Run {
        let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
        Run::parse(TEXT, "t", &sets, 1).unwrap()
    }

    const SETS: [&str; 2] =
        ["train.skip=[\"3+2\", \"7+1\"]", "train.changes=[\"7: train.lr=0.25\", \"9: train.clip=0.5\"]"];

    #[test]
    fn a_definition_tells_what_its_state_has_gone_through() {
        let one = run(&SETS);
        let all = Interventions::of(&one);
        assert_eq!(Interventions::of_definition(&one.definition()), all);
        assert_eq!(all.sets(), SETS);
        let plain = run(&[]).definition();
        assert_eq!(definition_until(&one.definition(), 2), plain);
        assert_eq!(definition_until(&one.definition(), 9), one.definition());
        let seven = definition_until(&one.definition(), 7);
        assert_eq!(Interventions::of_definition(&seven), all.until(7));
        assert_eq!(definition_until(&plain, 7), plain);
        // A list that says nothing is as none; a key of another section is another key.
        assert_eq!(definition_until(&run(&["train.skip=[]"]).definition(), 9), plain);
        assert_eq!(definition_until("[x]\nskip = [\"3+1\"]\n", 2), "[x]\nskip = [\"3+1\"]\n");
    }

    #[test]
    fn the_later_word_on_a_step_and_key_counts() {
        let all = Interventions::of(&run(&SETS));
        let later = Interventions::of_set("train.skip=[\"7+4\"]").unwrap();
        assert_eq!(all.then(&later).sets()[0], "train.skip=[\"3+2\", \"7+4\"]");
        assert_eq!(later.without(&all), later);
        assert!(all.until(7).without(&all).is_empty() && all.until(7).after(7).is_empty());
        let changes = Interventions::from_step(7, &["train.lr=1e-3".into(), "layout.dp=2".into()]);
        assert_eq!(changes.sets(), ["train.changes=[\"7: train.lr=0.001\"]"]);
        let by_step: Vec<_> = all.by_step();
        let want = [
            (3, "train.skip=[\"3+2\"]"),
            (7, "train.skip=[\"7+1\"]"),
            (7, "train.changes=[\"7: train.lr=0.25\"]"),
            (9, "train.changes=[\"9: train.clip=0.5\"]"),
        ];
        assert_eq!(by_step, want.map(|(step, set)| (step, set.to_string())));
        assert_eq!(Interventions::of_set("train.lr=3"), None);
        assert_eq!(Interventions::of_set("train.skip=[3]"), None);
    }
}

//! Collects what is wrong, so that a person hears all of it at once.

use crate::error::SpecError;
use crate::runfile::Values;

/// What is wrong so far.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<SpecError>);

impl Faults {
    /// Adds an error; several in one are taken apart.
    pub fn add(&mut self, error: SpecError) {
        match error {
            SpecError::Many(errors) => self.0.extend(errors),
            error => self.0.push(error),
        }
    }

    /// Adds a broken law.
    pub fn law(&mut self, what: impl Into<String>, factors: impl Into<String>, remedy: impl Into<String>) {
        self.add(SpecError::law(what, factors, remedy));
    }

    /// The value, if there is one.
    pub fn take<T>(&mut self, result: Result<T, SpecError>) -> Option<T> {
        result.map_err(|error| self.add(error)).ok()
    }

    /// The value, or one that stands for it until [`Faults::end`], which gives no value then.
    pub fn or_default<T: Default>(&mut self, result: Result<T, SpecError>) -> T {
        self.take(result).unwrap_or_default()
    }

    /// True if `search` adds nothing.
    pub fn find(&mut self, search: impl FnOnce(&mut Self)) -> bool {
        let before = self.0.len();
        search(self);
        self.0.len() == before
    }

    /// True if nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Leaves out what only follows from another error, says where keys were set, and puts all in the order of the file;
    /// then those of `--set`, then those that stand nowhere.
    pub fn settle(&mut self, values: &Values) {
        let wrong: Vec<String> = self.0.iter().filter_map(|error| error.unusable().map(str::to_owned)).collect();
        self.0.retain(|error| !error.follows(values, &wrong));
        self.0.iter_mut().for_each(|error| error.locate(values));
        self.0.sort_by_key(|error| error.place(values));
    }

    /// `value`, if nothing is wrong.
    pub fn end<T>(self, value: T) -> Result<T, SpecError> {
        self.give(Some(value))
    }

    /// The same where a value may be missing because of what is wrong.
    pub fn give<T>(mut self, value: Option<T>) -> Result<T, SpecError> {
        match (self.0.len(), value) {
            (0, Some(value)) => Ok(value),
            (0, None) => unreachable!("a value is missing, and nothing is wrong"),
            (1, _) => Err(self.0.remove(0)),
            _ => Err(SpecError::Many(self.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Run;
    use crate::error::SpecError;

    const SOUND: &str =
        "[model]\npreset = \"nano\"\n\n[data]\nsource = \"synthetic\"\n\n[train]\nsteps = 10\nbatch = 8\nseq = 16\n";

    fn errors(text: &str, sets: &[&str]) -> Vec<String> {
        let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
        let error = Run::parse(text, "run.toml", &sets, 1).unwrap_err();
        error.each().iter().map(ToString::to_string).collect()
    }

    /// Each error has its words, in this order, and there is no other.
    #[track_caller]
    fn are(errors: &[String], words: &[&[&str]]) {
        assert_eq!(errors.len(), words.len(), "{errors:#?}");
        for (error, words) in errors.iter().zip(words) {
            words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in {error:?} of {errors:#?}"));
        }
    }

    #[test]
    fn all_errors_are_told_at_once_in_the_order_of_the_file_with_their_lines() {
        let text = "[layout]\ndp = \"two\"\npin = \"on\"\nzero = 7\n[model]\npreset = \"nano\"\nkv_heads = 3\n[data]\nsource = \"synthetic\"\nvalidaton = 0.1\n[train]\nsteps = 10\nbatch = 8\nseq = 16\nwarmup = 20\nlr = 1e-3\nlr_min = 1e-2\nbeta1 = 2.0\n[guard]\nbeat_ms = 0\nspares = 1000\n[chekpoint]\nevery = 3\n";
        let found = errors(text, &["layout.transport=udp", "checkpoint.stagger_ms=1T"]);
        are(
            &found,
            &[
                &["`layout.dp` = \"two\" (run.toml:2)", "whole number"],
                &["`layout.pin` = \"on\" (run.toml:3)", "auto, off"],
                &["layout.zero = 7", "set at: run.toml:4 (layout.zero)"],
                &[
                    "model.kv_heads = 3 does not divide model.heads = 4",
                    "run.toml:7 (model.kv_heads), preset nano (model.heads)",
                ],
                &["unknown key `data.validaton` (run.toml:10)", "`data.validation`"],
                &["train.warmup = 20 is longer", "run.toml:15 (train.warmup), run.toml:12 (train.steps)"],
                &["train.lr_min = 0.01 is above train.lr = 0.001", "run.toml:17 (train.lr_min), run.toml:16"],
                &["train.beta1 = 2 is out of range", "run.toml:18"],
                &["guard.beat_ms = 0", "run.toml:20"],
                &["guard.spares = 1000", "run.toml:21"],
                &["unknown key `chekpoint.every` (run.toml:23)", "`checkpoint.every`"],
                &["`layout.transport` = \"udp\" (--set layout.transport=udp)"],
                &["checkpoint.stagger_ms = 1000000000000 is more than a year", "--set checkpoint.stagger_ms=1T"],
            ],
        );
        let whole = Run::parse(text, "run.toml", &["layout.transport=udp".into()], 1).unwrap_err().to_string();
        assert!(whole.starts_with("12 settings are wrong:\n1. `layout.dp`") && whole.contains("\n12. "), "{whole}");
    }

    #[test]
    fn one_error_is_told_as_itself() {
        let error = Run::parse(SOUND, "run.toml", &["train.lr=-1".into()], 1).unwrap_err();
        assert!(matches!(error, SpecError::Law { .. }) && error.to_string().starts_with("train.lr = -1 is"), "{error}");
    }

    #[test]
    fn what_only_follows_from_another_error_is_not_told() {
        let of = |text: &str, sets: &[&str], words: &[&[&str]]| are(&errors(text, sets), words);
        // The laws that a mistyped key enters.
        of(SOUND, &["train.steps=ten", "train.warmup=3"], &[&["`train.steps` = \"ten\""]]);
        of(SOUND, &["grid.tp=two", "layout.tp=2"], &[&["`grid.tp` = \"two\""]]);
        of(SOUND, &["grid.microbatch=x", "grid.dp=3"], &[&["`grid.microbatch` = \"x\""]]);
        of(SOUND, &["layout.schedule=cvs", "layout.schedule_file=x.csv"], &[&["`layout.schedule` = \"cvs\""]]);
        of(SOUND, &["layout.tp=4", "layout.pp=x"], &[&["layout.tp = 4 does not"], &["`layout.pp` = \"x\""]]);
        // A model that is named wrongly has no sizes to miss.
        of(SOUND, &["model.preset=hugh"], &[&["`model.preset` = \"hugh\""]]);
        of(SOUND, &["model.preset=3"], &[&["`model.preset` = 3"]]);
        of(&SOUND.replace("preset", "perset"), &[], &[&["unknown key `model.perset`", "`model.preset`"]]);
        of(SOUND, &["model.from=no/such/folder"], &[&["no/such/folder/config.json"]]);
        // A key that may be meant by an unknown one.
        of(&SOUND.replace("steps", "stepps"), &[], &[&["unknown key `train.stepps`", "`train.steps`"]]);
        of(SOUND, &["layout.dp=0", "layout.zero=1", "layout.shard=2"], &[&["layout.dp = 0", "at least 1"]]);
    }

    #[test]
    fn every_missing_key_is_named() {
        are(&errors("[model]\npreset = \"nano\"\n", &[]), &[&["`train.steps`"], &["`train.seq`"], &["`train.batch`"]]);
        let found = errors("", &[]);
        for key in ["hidden", "layers", "heads", "ffn", "vocab"] {
            assert!(found.iter().any(|error| error.contains(&format!("`model.{key}` is not set"))), "{found:#?}");
        }
    }

    #[test]
    fn text_that_is_no_toml_tells_each_line_and_the_words_of_set() {
        let found = errors("[model\npreset = 3\n[train]\nsteps = = 4\nsteps = 1\nseq = 1\nseq = 2\n", &["layout.dp"]);
        let twice = "duplicate key";
        are(
            &found,
            &[&["line 1"], &["line 4"], &["line 5", twice], &["line 7", twice], &["--set layout.dp", "key=value"]],
        );
        let found = errors(&SOUND.replace("seq = 16", "seq = 16\nseq = 32\nlearning_rate = 1.0"), &[]);
        are(&found, &[&["line 11", twice], &["train.learning_rate", "run.toml:12"]]);
    }

    #[test]
    fn laws_of_the_layout_are_told_together() {
        let sets = ["layout.dp=9", "layout.tp=2", "layout.cp=3", "layout.pp=5", "layout.zero=2", "layout.threads=5000"];
        let found = errors(SOUND, &sets);
        are(
            &found,
            &[
                &["layout.dp = 9 needs", "grid.dp = 8"],
                &["layout.tp = 2 does not divide grid.tp = 1", "raise grid.tp to 2"],
                &["layout.cp = 3 does not divide"],
                &["layout.pp = 5"],
                &["layout.threads = 5000"],
            ],
        );
    }
}

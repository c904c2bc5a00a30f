//! The data of a run: what it trains on, and every held-out set.

use data::{DataError, Dataset, Speech};
use spec::Run;
use spec::run::DataConfig;

/// All data of a run.
#[derive(Debug)]
pub struct Corpus {
    /// Training sequences, and the validation that decides what is best.
    pub main: Dataset,
    /// Further held-out sets, by name.
    pub sets: Vec<(String, Dataset)>,
    /// How samples are written; `None` where the run writes none.
    pub speech: Option<Speech>,
}

impl Corpus {
    /// The run's definition with what the data turned out to be: what a checkpoint belongs to.
    pub fn definition(&self, run: &Run) -> String {
        let facts = ["data order version", "text hash", "training documents"];
        let parts = self.main.fingerprint_parts();
        let found = parts.iter().filter(|(name, _)| facts.contains(name));
        let lines: String = found.map(|(name, value)| format!("{name} = {value}\n")).collect();
        run.definition() + "\n[data found]\n" + &lines
    }

    /// Opens everything that the run file names.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn open(run: &Run) -> Result<Self, DataError> {
        let open = |config: &DataConfig| Dataset::open(config, run.train.seq, None);
        let main = open(&run.data)?;
        let set = |(name, path): &(String, String)| {
            let validation_paths = vec![path.clone()];
            let config = DataConfig { validation_paths, validation_sets: Vec::new(), ..run.data.clone() };
            Ok((name.clone(), open(&config)?))
        };
        let sets = run.data.validation_sets.iter().map(set).collect::<Result<_, DataError>>()?;
        let speech = (run.train.sample.every > 0).then(|| Speech::open(&run.data)).transpose()?;
        Ok(Self { main, sets, speech })
    }
}

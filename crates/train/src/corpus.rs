//! The data of a run: what it trains on, and every held-out set.

use control::identity::Identity;
use data::content::{Known, Reading};
use data::{DataError, Dataset, Speech, Split};
use kernels::NUMERICS_VERSION;
use spec::Run;
use spec::run::DataConfig;

use crate::buffers::Tokens;
use crate::error::TrainError;

/// The training or validation sequences of `indices`, of files that are still what they were.
///
/// # Errors
/// A file of tokens that somebody has written to: what was taken from it may be anything.
pub fn read(set: &Dataset, split: Split, indices: impl Iterator<Item = u64>) -> Result<Tokens, TrainError> {
    let tokens = Tokens::of(indices.map(|index| set.sequence(split, index)));
    set.unchanged()?;
    Ok(tokens)
}

/// The same of the first `wanted` sequences only: rows of a sequence behind them have no targets, and fill up a batch.
///
/// # Errors
/// As for [`read`].
pub fn read_first(
    set: &Dataset,
    split: Split,
    wanted: u64,
    indices: impl Iterator<Item = u64>,
) -> Result<Tokens, TrainError> {
    let tokens = Tokens::of(indices.map(|index| {
        let mut sequence = set.sequence(split, index % wanted);
        if index >= wanted {
            sequence.targets.fill(data::IGNORE);
        }
        sequence
    }));
    set.unchanged()?;
    Ok(tokens)
}

/// The sequences that are validated have something to score.
fn scores(set: &Dataset, wanted: u64) -> Result<(), DataError> {
    let held_out = set.sequences(Split::Validation);
    let sequences = wanted.min(held_out);
    let has_target =
        |index| set.sequence(Split::Validation, index).targets.iter().any(|&target| target != data::IGNORE);
    if sequences == 0 || (0..sequences).any(has_target) {
        return Ok(());
    }
    Err(DataError::NothingScored { sequences, held_out })
}

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

    /// What every process of the run is.
    pub fn identity(&self, run: &Run) -> Identity {
        let run_file = blake3::hash(run.definition().as_bytes()).to_hex().to_string();
        let mut all =
            vec![("numerics version".into(), NUMERICS_VERSION.to_string()), ("run file (blake3)".into(), run_file)];
        all.extend(self.main.identity());
        for (name, set) in &self.sets {
            // The training data are the same.
            let own = set.identity().into_iter().filter(|part| !all.contains(part)).collect::<Vec<_>>();
            all.extend(own.into_iter().map(|(part, value)| (format!("validation set {name}: {part}"), value)));
        }
        Identity(all)
    }

    /// The files that were read whole, for other processes of this host.
    pub fn known(&self) -> Known {
        let mut known = Known::default();
        std::iter::once(&self.main).chain(self.sets.iter().map(|(_, set)| set)).for_each(|set| set.tell(&mut known));
        known
    }

    /// Opens everything that the run file names.
    ///
    /// # Errors
    /// As [`Dataset::open`]; validation that has nothing to score.
    pub fn open(run: &Run) -> Result<Self, DataError> {
        Self::open_with(run, Reading::ALL)
    }

    /// [`Corpus::open`]; files of tokens are read as `reading` says.
    ///
    /// # Errors
    /// As [`Corpus::open`].
    pub fn open_with(run: &Run, reading: Reading) -> Result<Self, DataError> {
        let open = |config: &DataConfig| {
            let set = Dataset::open_with(config, run.train.seq, None, reading)?;
            scores(&set, run.train.eval_sequences as u64)?;
            Ok::<_, DataError>(set)
        };
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

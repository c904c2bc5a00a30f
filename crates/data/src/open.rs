//! What `data.source` and `data.paths` name, as stores.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use spec::run::{DataConfig, Source};

use crate::content::Reading;
use crate::store::Store;
use crate::synthetic::{self, Language};
use crate::text::kinds::Kinds;
use crate::text::{self, Documents};
use crate::{DataError, EOD, austen, cargo, folder, megatron};

const PATHS: &str = "data.paths";
const HELD_OUT: &str = "data.validation_paths";

/// What is known of the synthetic language, in bits per byte.
#[derive(Debug)]
pub(crate) struct Entropy {
    pub(crate) rate: f64,
    /// With no byte of context, and with one.
    pub(crate) with_less: [f64; 2],
}

/// One source of a run, with the held-out documents behind its own if it is the last.
#[derive(Debug)]
pub(crate) struct Opened {
    /// What was read, for people.
    pub(crate) origin: String,
    pub(crate) store: Store,
    /// Documents of the source itself; those behind them are held out by path.
    pub(crate) own: usize,
    pub(crate) hash: [u8; 32],
    pub(crate) kinds: Kinds,
    pub(crate) entropy: Option<Entropy>,
}

/// Every source that `config` names: one, or one per path where there are weights.
pub(crate) fn open(config: &DataConfig, cargo_home: Option<&Path>, reading: Reading) -> Result<Vec<Opened>, DataError> {
    if matches!(config.source, Source::Text | Source::Tokens) && config.paths.is_empty() {
        return Err(DataError::NoPaths);
    }
    let groups: Vec<&[String]> =
        if config.weights.is_empty() { vec![&config.paths] } else { config.paths.chunks(1).collect() };
    let last = groups.len() - 1;
    let held_out = |at: usize| if at == last { config.validation_paths.as_slice() } else { &[] };
    if config.source == Source::Tokens {
        let mut tokens = Tokens { config, reading, first: None };
        return groups.iter().enumerate().map(|(at, paths)| tokens.open(paths, held_out(at))).collect();
    }
    let without = text::list::canonical_files(&config.validation_paths, HELD_OUT)?;
    groups.iter().enumerate().map(|(at, paths)| bytes(config, paths, held_out(at), &without, cargo_home)).collect()
}

/// A source of text.
fn bytes(
    config: &DataConfig,
    paths: &[String],
    held_out: &[String],
    without: &HashSet<PathBuf>,
    cargo_home: Option<&Path>,
) -> Result<Opened, DataError> {
    let mut documents = Documents::default();
    let field = config.field.as_str();
    let mut entropy = None;
    let origin = match config.source {
        Source::Austen => {
            documents = austen::read();
            "six novels of Jane Austen".into()
        }
        Source::Cargo => {
            documents = cargo::read(cargo_home).map_err(|what| DataError::Cargo { what })?;
            "sources of the crates of lockstep".into()
        }
        Source::Synthetic => {
            entropy = Some(synthetic(&mut documents));
            "synthetic language".into()
        }
        Source::Text | Source::Tokens => {
            text::read(&mut documents, paths, &text::Reading { key: PATHS, field, without })?;
            format!("text of {}", named(paths))
        }
    };
    let own = documents.ends.len();
    text::read(&mut documents, held_out, &text::Reading { key: HELD_OUT, field, without: &HashSet::new() })?;
    let Documents { bytes, ends, kinds } = documents;
    let hash = hash(&bytes, &ends);
    let store = Store::text(bytes, &ends, config.eod.then_some(EOD));
    Ok(Opened { origin, store, own, hash, kinds, entropy })
}

fn synthetic(documents: &mut Documents) -> Entropy {
    let language = Language::new();
    (0..synthetic::DOCUMENTS).for_each(|index| documents.push(&language.document(index)));
    Entropy { rate: language.entropy_bits(), with_less: language.entropy_bits_with_less() }
}

/// The first path, and how many there are.
fn named(paths: &[String]) -> String {
    match paths {
        [] => String::new(),
        [path] => path.clone(),
        [path, more @ ..] => format!("{path} and {} more", more.len()),
    }
}

/// BLAKE3 over documents, each as its length and its bytes.
fn hash(text: &[u8], ends: &[usize]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut start = 0;
    for &end in ends {
        hasher.update(&((end - start) as u64).to_le_bytes()).update(&text[start..end]);
        start = end;
    }
    hasher.finalize().into()
}

/// Opens sources of tokens; all folders of a run must be of one tokenizer.
struct Tokens<'a> {
    config: &'a DataConfig,
    reading: Reading<'a>,
    /// The first folder, what it says of its tokenizer, and its end-of-document token.
    first: Option<(PathBuf, String, Option<u32>)>,
}

impl Tokens<'_> {
    fn open(&mut self, paths: &[String], held_out: &[String]) -> Result<Opened, DataError> {
        let mut store = Store::default();
        let mut hasher = blake3::Hasher::new();
        let mut kinds = HashSet::new();
        for path in paths {
            kinds.insert(self.add(Path::new(path), PATHS, &mut store, &mut hasher)?);
        }
        let own = store.pieces.len();
        for path in held_out {
            kinds.insert(self.add(Path::new(path), HELD_OUT, &mut store, &mut hasher)?);
        }
        if kinds.len() > 1 {
            let [path, first] = [&paths[paths.len() - 1], &paths[0]].map(PathBuf::from);
            let [tokenizer, expected] =
                ["files with and without an end-of-document token".into(), "of one kind".into()];
            return Err(DataError::Tokenizers { path, tokenizer, first, expected });
        }
        store.eod = kinds.into_iter().next().flatten();
        let origin = format!("tokens of {}", named(paths));
        let hash = hasher.finalize().into();
        Ok(Opened { origin, store, own, hash, kinds: Kinds::default(), entropy: None })
    }

    /// Adds a path to `store`; returns the token that is to follow its documents.
    fn add(
        &mut self,
        path: &Path,
        key: &'static str,
        store: &mut Store,
        hasher: &mut blake3::Hasher,
    ) -> Result<Option<u32>, DataError> {
        if folder::is_folder(path) {
            let header = folder::header(path, key)?;
            self.fits(path, header.vocab)?;
            let folder::Folder { header, ids, documents } = folder::open(path, header, key, self.reading)?;
            let (eod, tokenizer) = (header.eod, header.tokenizer_blake3);
            let (first, expected, first_eod) =
                self.first.get_or_insert_with(|| (path.to_owned(), tokenizer.clone(), eod));
            if *expected != tokenizer || *first_eod != eod {
                let say = |hash: &str, eod: Option<u32>| format!("blake3 {}, end of document {eod:?}", &hash[..16]);
                let [tokenizer, expected] = [say(&tokenizer, eod), say(expected, *first_eod)];
                return Err(DataError::Tokenizers { path: path.to_owned(), tokenizer, first: first.clone(), expected });
            }
            hasher.update(header.tokens_blake3.as_bytes()).update(header.documents_blake3.as_bytes());
            store.push(ids, documents);
            return match eod {
                None if self.config.eod => Err(DataError::NoEod { path: path.to_owned() }),
                eod => Ok(eod.filter(|_| self.config.eod)),
            };
        }
        if !megatron::is_prefix(path) {
            return Err(DataError::NotTokens { path: path.to_owned(), key });
        }
        let (ids, index, hash) = megatron::open(path, self.config.vocab, key, self.reading)?;
        store.push(ids, index.documents.into_iter().map(|tokens| (tokens, 0)));
        hasher.update(&hash);
        Ok(None)
    }

    fn fits(&self, path: &Path, ids: u64) -> Result<(), DataError> {
        let vocab = self.config.vocab;
        if ids <= vocab as u64 {
            return Ok(());
        }
        Err(DataError::Vocabulary { path: path.to_owned(), ids, vocab })
    }
}

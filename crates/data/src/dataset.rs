//! A source, split into training and validation, as sequences at any index.

use std::collections::HashSet;
use std::path::Path;

use spec::run::{DataConfig, Source};

use crate::permute::Permutation;
use crate::random::key;
use crate::stream::Stream;
use crate::synthetic::{self, Language};
use crate::text::{self, Documents};
use crate::{DataError, Sequence, Split, cargo, holdout};

/// Changes with anything in this crate that changes which token stands at an index.
const ORDER_VERSION: u32 = 1;

/// The purpose of the keys of the training order, among all that `data.seed` is for.
const ORDER: u64 = 1;

/// The text of a run, cut into sequences. Immutable; any thread may ask for any sequence.
#[derive(Debug)]
pub struct Dataset {
    config: DataConfig,
    /// What was read, for people.
    origin: String,
    seq: usize,
    text: Vec<u8>,
    train: Stream,
    validation: Stream,
    held_out: String,
    hash: [u8; 32],
    skipped: u64,
    entropy: Option<Entropy>,
    notice: Option<String>,
}

/// What is known of the synthetic language, in bits per byte.
#[derive(Debug)]
struct Entropy {
    rate: f64,
    /// With no byte of context, and with one.
    with_less: [f64; 2],
}

impl Dataset {
    /// Reads the source that `config` names and cuts it into sequences of `seq` tokens. `cargo_home` is where Cargo
    /// keeps its files; `None`: as the environment says. Where the files of source `cargo` are not there, the
    /// synthetic language takes their place and [`Dataset::notice`] says so.
    ///
    /// Validation takes the documents of `validation_paths`, which are then not trained on; else about the share
    /// `validation` of the documents, chosen by a seeded hash of their content (so that copies stay together, and a
    /// new document moves no other), at least one and never all. Of a single document it takes the last part, by
    /// bytes. With a share of 0 there is no validation.
    ///
    /// # Errors
    /// [`DataError`], with the path or the numbers and a remedy: paths that cannot be read, hold no text or only NUL,
    /// less training text than one sequence, held-out text without a target.
    pub fn open(config: &DataConfig, seq: usize, cargo_home: Option<&Path>) -> Result<Self, DataError> {
        if seq == 0 || seq >= u32::MAX as usize {
            return Err(DataError::SequenceLength { seq, max: u32::MAX - 1 });
        }
        let held_out_key = "data.validation_paths";
        let without = text::canonical_files(&config.validation_paths, held_out_key)?;
        let Read { origin, mut documents, entropy, notice } = Read::source(config, &without, cargo_home)?;
        let of_source = documents.ends.len();
        text::read(&mut documents, &config.validation_paths, &HashSet::new(), held_out_key)?;
        let Documents { bytes: text, ends, skipped } = documents;
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let pieces: Vec<_> = starts.zip(&ends).map(|(start, &end)| start..end).collect();
        let hash = hash(&text, &ends);

        let parts = if config.validation_paths.is_empty() {
            holdout::choose(&text, pieces, config.validation, config.seed)
        } else {
            holdout::given(pieces, of_source)
        };
        let stream = |pieces| Stream::new(pieces, seq, config.eod, config.masks);
        let dataset = Self {
            config: config.clone(),
            origin,
            seq,
            train: stream(parts.train),
            validation: stream(parts.validation),
            held_out: parts.how,
            text,
            hash,
            skipped,
            entropy,
            notice,
        };
        dataset.check()?;
        Ok(dataset)
    }

    fn check(&self) -> Result<(), DataError> {
        let origin = || self.origin.clone();
        let found = self.train.bytes() as u64;
        if found < self.seq as u64 {
            return Err(DataError::TooLittle { origin: origin(), found, needed: self.seq as u64 });
        }
        if self.train.sequences() == 0 {
            return Err(DataError::NoTarget { origin: origin(), split: "train", found, needed: 2 });
        }
        let asked = self.config.validation > 0.0 || !self.config.validation_paths.is_empty();
        if asked && self.validation.sequences() == 0 {
            let (found, needed) = (self.validation.bytes() as u64, if self.config.eod { 1 } else { 2 });
            return Err(DataError::NoTarget { origin: origin(), split: "validate", found, needed });
        }
        Ok(())
    }

    /// Sequence `index` of the endless order of `split`: a pure function of the text, the configuration and `index`.
    ///
    /// Epoch `index / sequences` of training visits every sequence once, in an order of its own that `data.seed`
    /// names. Validation is in file order, and begins again at its end. The last sequence of the stream is padded. Every
    /// sequence has a target, unless it holds only documents of one token, or one token, with masks.
    ///
    /// # Panics
    /// If the split has no sequences: validation with a share of 0.
    pub fn sequence(&self, split: Split, index: u64) -> Sequence {
        self.stream(split).cut(&self.text, self.place(split, index))
    }

    /// Which sequence of the stream, counted from its beginning, stands at `index` of the order.
    ///
    /// # Panics
    /// As for [`Dataset::sequence`].
    pub fn place(&self, split: Split, index: u64) -> u64 {
        let n = self.sequences(split);
        assert!(n > 0, "sequence {index} of a split that has none; ask `sequences` first");
        match split {
            Split::Train => Permutation::new(n, key(self.config.seed, &[ORDER, index / n])).at(index % n),
            Split::Validation => index % n,
        }
    }

    /// Sequences of `split` in one epoch: 0 only for validation with a share of 0.
    pub fn sequences(&self, split: Split) -> u64 {
        self.stream(split).sequences()
    }

    /// Tokens in a sequence.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Documents of `split`.
    pub fn documents(&self, split: Split) -> usize {
        self.stream(split).documents()
    }

    /// The text of `split`: its documents in order, with nothing between them.
    pub fn bytes(&self, split: Split) -> Vec<u8> {
        let pieces = self.stream(split).pieces().iter();
        pieces.flat_map(|piece| &self.text[piece.clone()]).copied().collect()
    }

    /// BLAKE3 over all documents in order, each as its length (8 bytes, little-endian) and its bytes. File names do not
    /// enter.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Bits per byte below which no model gets on fresh text, where they are known: the entropy rate of the synthetic
    /// language. A model that has seen its training text often can undercut it there; text of `validation_paths` is not
    /// of that language.
    pub fn floor_bits_per_byte(&self) -> Option<f64> {
        self.entropy.as_ref().map(|entropy| entropy.rate)
    }

    /// The sentence to print when the synthetic language stands in for source `cargo`.
    pub fn notice(&self) -> Option<String> {
        self.notice.clone()
    }

    /// Everything that decides which token stands at an index, as names and values. Two data sets whose parts agree
    /// give the same sequence at every index; where they differ, the name tells what to mend.
    pub fn fingerprint_parts(&self) -> Vec<(&'static str, String)> {
        let mut train = blake3::Hasher::new();
        for piece in self.train.pieces() {
            train.update(&(piece.start as u64).to_le_bytes()).update(&(piece.end as u64).to_le_bytes());
        }
        vec![
            ("data order version", ORDER_VERSION.to_string()),
            ("text hash", hex(&self.hash)),
            ("training documents", train.finalize().to_hex().to_string()),
            ("train.seq", self.seq.to_string()),
            ("data.masks", self.config.masks.to_string()),
            ("data.eod", self.config.eod.to_string()),
            ("data.seed", self.config.seed.to_string()),
        ]
    }

    /// BLAKE3 over [`Dataset::fingerprint_parts`].
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for (name, value) in self.fingerprint_parts() {
            hasher.update(format!("{name}={value}\n").as_bytes());
        }
        hasher.finalize().into()
    }

    /// Lines to print at the start: the notice if any, the source with its size and hash, both splits, the floor.
    pub fn describe(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.notice.iter().map(|notice| format!("data: {notice}")).collect();
        let documents = self.train.documents() + self.validation.documents();
        let (bytes, hash) = (grouped(self.text.len()), &hex(&self.hash)[..16]);
        lines.push(format!("data: {}, {documents} documents, {bytes} bytes, blake3 {hash}", self.origin));
        if self.skipped > 0 {
            lines.push(format!("data: {} empty files in folders left out", self.skipped));
        }
        for (name, stream) in [("train", &self.train), ("validation", &self.validation)] {
            let (documents, bytes, sequences) = (stream.documents(), grouped(stream.bytes()), stream.sequences());
            let how = if name == "train" { String::new() } else { format!(" ({})", self.held_out) };
            lines.push(format!(
                "data: {name}: {documents} documents, {bytes} bytes, {sequences} sequences of {} tokens{how}",
                self.seq
            ));
        }
        if let Some(Entropy { rate, with_less: [none, one] }) = self.entropy {
            let nats = rate * std::f64::consts::LN_2;
            lines.push(format!(
                "data: floor of the loss on fresh text: {rate:.4} bits per byte ({nats:.4} nats), the entropy of the \
                 language; {one:.4} with one byte of context, {none:.4} with none"
            ));
            if self.config.eod {
                let lengths = synthetic::length_bits_per_byte();
                lines
                    .push(format!("data: end-of-document tokens add at least {lengths:.4} bits per byte to the floor"));
            }
        }
        lines
    }

    fn stream(&self, split: Split) -> &Stream {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }
}

/// What came of `data.source`.
struct Read {
    origin: String,
    documents: Documents,
    entropy: Option<Entropy>,
    notice: Option<String>,
}

impl Read {
    fn source(
        config: &DataConfig,
        without: &HashSet<std::path::PathBuf>,
        cargo_home: Option<&Path>,
    ) -> Result<Self, DataError> {
        match config.source {
            Source::Synthetic => Ok(Self::synthetic(None)),
            Source::Cargo => Ok(match cargo::read(cargo_home) {
                Ok(documents) => {
                    Self { origin: "sources of the crates of lockstep".into(), documents, entropy: None, notice: None }
                }
                Err(reason) => Self::synthetic(Some(format!(
                    "source `cargo` is not there, so the synthetic language is used: {reason}"
                ))),
            }),
            Source::Text if config.paths.is_empty() => Err(DataError::NoPaths),
            Source::Text => {
                let mut documents = Documents::default();
                text::read(&mut documents, &config.paths, without, "data.paths")?;
                let more = config.paths.len() - 1;
                let more = if more == 0 { String::new() } else { format!(" and {more} more") };
                Ok(Self {
                    origin: format!("text of {}{more}", config.paths[0]),
                    documents,
                    entropy: None,
                    notice: None,
                })
            }
        }
    }

    fn synthetic(notice: Option<String>) -> Self {
        let language = Language::new();
        let mut documents = Documents::default();
        (0..synthetic::DOCUMENTS).for_each(|index| documents.push(&language.document(index)));
        let entropy = Some(Entropy { rate: language.entropy_bits(), with_less: language.entropy_bits_with_less() });
        Self { origin: "synthetic language".into(), documents, entropy, notice }
    }
}

fn hash<'a>(text: &[u8], ends: impl IntoIterator<Item = &'a usize>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut start = 0;
    for &end in ends {
        hasher.update(&((end - start) as u64).to_le_bytes()).update(&text[start..end]);
        start = end;
    }
    hasher.finalize().into()
}

fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from(*hash).to_hex().to_string()
}

/// Digits in groups of three.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

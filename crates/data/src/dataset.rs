//! A source, split into training and validation, as sequences at any index.

use std::path::Path;

use spec::run::{DataConfig, Packing};

use crate::bestfit::BestFit;
use crate::content::{Known, Reading};
use crate::mixture::Mixture;
use crate::open::{self, Entropy, Opened};
use crate::permute::Permutation;
use crate::random::key;
use crate::store::{Piece, Store};
use crate::stream::Stream;
use crate::text::kinds::Kinds;
use crate::{DataError, Sequence, Split, holdout, synthetic};

/// Changes with anything in this crate that changes which token stands at an index.
const ORDER_VERSION: u32 = 1;

/// The purpose of the keys of the training order, among all that `data.seed` is for.
const ORDER: u64 = 1;

/// The data of a run, cut into sequences. Immutable; any thread may ask for any sequence.
#[derive(Debug)]
pub struct Dataset {
    pub(crate) config: DataConfig,
    pub(crate) seq: usize,
    pub(crate) parts: Vec<Part>,
    mixture: Option<Mixture>,
    hash: [u8; 32],
    kinds: Kinds,
    entropy: Option<Entropy>,
}

/// One source of a data set.
#[derive(Debug)]
pub(crate) struct Part {
    /// What was read, for people.
    pub(crate) origin: String,
    pub(crate) store: Store,
    pub(crate) train: Pack,
    pub(crate) validation: Stream,
    held_out: String,
    hash: [u8; 32],
}

/// Documents packed one way or the other.
#[derive(Debug)]
pub(crate) enum Pack {
    Stream(Stream),
    BestFit(BestFit),
}

impl Pack {
    pub(crate) fn new(packing: Packing, pieces: Vec<Piece>, seq: usize, eod: bool, masks: bool) -> Self {
        match packing {
            Packing::Stream => Self::Stream(Stream::new(pieces, seq, eod, masks)),
            Packing::BestFit => Self::BestFit(BestFit::new(pieces, seq, eod)),
        }
    }

    pub(crate) fn sequences(&self) -> u64 {
        match self {
            Self::Stream(stream) => stream.sequences(),
            Self::BestFit(plan) => plan.sequences(),
        }
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        match self {
            Self::Stream(stream) => stream.pieces(),
            Self::BestFit(plan) => plan.pieces(),
        }
    }

    /// Tokens of each document's part of sequence `place`.
    pub(crate) fn parts(&self, place: u64) -> Vec<usize> {
        match self {
            Self::Stream(stream) => stream.parts(place),
            Self::BestFit(plan) => plan.parts(place),
        }
    }

    fn cut(&self, store: &Store, place: u64) -> Sequence {
        match self {
            Self::Stream(stream) => stream.cut(store, place),
            Self::BestFit(plan) => plan.cut(store, place),
        }
    }
}

impl Part {
    fn new(opened: Opened, config: &DataConfig, seq: usize) -> Self {
        let Opened { origin, store, own, hash, .. } = opened;
        let pieces = store.pieces.clone();
        let parts = if config.validation_paths.is_empty() {
            holdout::choose(&store, pieces, config.validation, config.seed)
        } else {
            holdout::given(pieces, own)
        };
        let eod = store.eod.is_some();
        let train = Pack::new(config.packing, parts.train, seq, eod, config.masks);
        let validation = Stream::new(parts.validation, seq, eod, config.masks);
        Self { origin, store, train, validation, held_out: parts.how, hash }
    }

    fn pieces(&self, split: Split) -> &[Piece] {
        match split {
            Split::Train => self.train.pieces(),
            Split::Validation => self.validation.pieces(),
        }
    }

    fn sequences(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.train.sequences(),
            Split::Validation => self.validation.sequences(),
        }
    }

    fn tokens(&self, split: Split) -> usize {
        self.pieces(split).iter().map(Piece::len).sum()
    }

    fn unit(&self) -> &'static str {
        if self.store.is_text() { "bytes" } else { "tokens" }
    }

    fn check(&self, seq: usize) -> Result<(), DataError> {
        let (origin, unit) = (self.origin.clone(), self.unit());
        let found = self.tokens(Split::Train) as u64;
        if found < seq as u64 {
            return Err(DataError::TooLittle { origin, unit, found, needed: seq as u64 });
        }
        if !self.has_targets(Split::Train) {
            return Err(DataError::NoTarget { origin, split: "train", unit, found, needed: 2 });
        }
        Ok(())
    }

    /// Whether any token of `split` has a target.
    fn has_targets(&self, split: Split) -> bool {
        match (split, &self.train) {
            (Split::Train, Pack::Stream(stream)) => stream.has_targets(),
            // What has no target is not packed.
            (Split::Train, Pack::BestFit(plan)) => plan.sequences() > 0,
            (Split::Validation, _) => self.validation.has_targets(),
        }
    }
}

impl Dataset {
    /// Reads what `config` names and cuts it into sequences of `seq` tokens. `cargo_home` is where Cargo keeps its
    /// files; `None`: as the environment says.
    ///
    /// Validation takes the documents of `validation_paths`, which are then not trained on; else, of each source, about
    /// the share `validation` of the documents, chosen by a seeded hash of their content (so that copies stay together,
    /// and a new document moves no other), at least one and never all. Where whole documents would take a share that is
    /// off by more than half, it takes the ends of large documents instead, cut between paragraphs or lines. Of a single
    /// document it takes the last part. With a share of 0 there is no validation. Validation is always packed as a stream, so that it means the
    /// same under any packing.
    ///
    /// # Errors
    /// [`DataError`], with the path or the numbers and a remedy: paths that cannot be read, hold no text,
    /// damaged files of tokens, more ids than the model has, less training text than one sequence, held-out text
    /// without a target.
    pub fn open(config: &DataConfig, seq: usize, cargo_home: Option<&Path>) -> Result<Self, DataError> {
        Self::open_with(config, seq, cargo_home, Reading::ALL)
    }

    /// [`Dataset::open`]; files of tokens are read as `reading` says.
    ///
    /// # Errors
    /// As for [`Dataset::open`].
    pub fn open_with(
        config: &DataConfig,
        seq: usize,
        cargo_home: Option<&Path>,
        reading: Reading,
    ) -> Result<Self, DataError> {
        if seq == 0 || seq >= u32::MAX as usize {
            return Err(DataError::SequenceLength { seq, max: u32::MAX - 1 });
        }
        let mut opened = open::open(config, cargo_home, reading)?;
        let mut kinds = Kinds::default();
        opened.iter_mut().for_each(|source| kinds.merge(std::mem::take(&mut source.kinds)));
        let entropy = opened[0].entropy.take();
        let parts: Vec<Part> = opened.into_iter().map(|source| Part::new(source, config, seq)).collect();
        let hash = match parts.as_slice() {
            [part] => part.hash,
            parts => blake3::hash(parts.iter().map(|part| part.hash).collect::<Vec<_>>().as_flattened()).into(),
        };
        let mixture = (!config.weights.is_empty()).then(|| Mixture::new(&config.weights, config.seed));
        let dataset = Self { config: config.clone(), seq, parts, mixture, hash, kinds, entropy };
        dataset.parts.iter().try_for_each(|part| part.check(seq))?;
        let asked = config.validation > 0.0 || !config.validation_paths.is_empty();
        if asked && !dataset.has_targets(Split::Validation) {
            let part = &dataset.parts[dataset.parts.len() - 1];
            let found = dataset.parts.iter().map(|part| part.tokens(Split::Validation) as u64).sum();
            let (origin, needed) = (part.origin.clone(), if part.store.eod.is_some() { 1 } else { 2 });
            return Err(DataError::NoTarget { origin, split: "validate", unit: part.unit(), found, needed });
        }
        Ok(dataset)
    }

    /// Sequence `index` of the endless order of `split`: a pure function of the data, the configuration and `index`.
    ///
    /// Epoch `index / sequences` of training visits every sequence once, in an order of its own that `data.seed`
    /// names. In a mixture the seed and `index` name a source, and the order is that of the source, at the number of
    /// its earlier sequences. Validation is in file order, and begins again at its end. The last sequence of the stream
    /// is padded. Every sequence has a target, unless it holds only documents of one token, or one token, with masks.
    ///
    /// # Panics
    /// If the split has no sequences: validation with a share of 0.
    pub fn sequence(&self, split: Split, index: u64) -> Sequence {
        let (part, place) = self.locate(split, self.place(split, index));
        match split {
            Split::Train => part.train.cut(&part.store, place),
            Split::Validation => part.validation.cut(&part.store, place),
        }
    }

    /// The source and its own sequence at `place`.
    pub(crate) fn locate(&self, split: Split, mut place: u64) -> (&Part, u64) {
        for part in &self.parts {
            let sequences = part.sequences(split);
            if place < sequences {
                return (part, place);
            }
            place -= sequences;
        }
        panic!("a sequence {place} behind the last");
    }

    /// Which sequence, counted from the beginning of the first source, stands at `index` of the order.
    ///
    /// # Panics
    /// As for [`Dataset::sequence`].
    pub fn place(&self, split: Split, index: u64) -> u64 {
        let n = self.sequences(split);
        assert!(n > 0, "sequence {index} of a split that has none; ask `sequences` first");
        match (split, &self.mixture) {
            (Split::Validation, _) => index % n,
            (Split::Train, None) => Permutation::new(n, key(self.config.seed, &[ORDER, index / n])).at(index % n),
            (Split::Train, Some(mixture)) => {
                let (source, nth) = mixture.at(index);
                let before: u64 = self.parts[..source].iter().map(|part| part.train.sequences()).sum();
                let n = self.parts[source].train.sequences();
                let key = key(self.config.seed, &[ORDER, nth / n, source as u64]);
                before + Permutation::new(n, key).at(nth % n)
            }
        }
    }

    /// Whether any token of `split` has a target; without one there is nothing to learn from or to score.
    pub fn has_targets(&self, split: Split) -> bool {
        self.parts.iter().any(|part| part.has_targets(split))
    }

    /// That nobody wrote to a file of which tokens were taken since the last call. Sequences that were cut before it are
    /// what the data set held when it was opened. Text lies in memory, and nobody can.
    ///
    /// # Errors
    /// [`DataError::Changed`].
    pub fn unchanged(&self) -> Result<(), DataError> {
        self.parts.iter().try_for_each(|part| part.store.unchanged())
    }

    /// Notes in `known` the files that were read whole, for other processes of this host.
    pub fn tell(&self, known: &mut Known) {
        self.parts.iter().for_each(|part| part.store.tell(known));
    }

    /// Epochs begun and done of each source after `sequences` sequences of training, in the order of `data.paths`.
    pub fn epochs(&self, sequences: u64) -> Vec<f64> {
        let taken = |source: usize| match &self.mixture {
            None => sequences,
            Some(mixture) => {
                let last = (0..sequences).rev().take(crate::mixture::BLOCK).find(|&i| mixture.at(i).0 == source);
                last.map_or(0, |index| mixture.at(index).1 + 1)
            }
        };
        self.parts.iter().enumerate().map(|(i, part)| taken(i) as f64 / part.train.sequences() as f64).collect()
    }

    /// Sequences of `split` in one epoch of every source: 0 only for validation with a share of 0.
    pub fn sequences(&self, split: Split) -> u64 {
        self.parts.iter().map(|part| part.sequences(split)).sum()
    }

    /// Tokens in a sequence.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Documents of `split`.
    pub fn documents(&self, split: Split) -> usize {
        self.parts.iter().map(|part| part.pieces(split).len()).sum()
    }

    /// The text of `split`: its documents in order, with nothing between them; empty where tokens are not bytes.
    pub fn bytes(&self, split: Split) -> Vec<u8> {
        let text = |part: &Part| {
            part.pieces(split).iter().flat_map(|piece| part.store.bytes(piece).to_vec()).collect::<Vec<_>>()
        };
        self.parts.iter().flat_map(text).collect()
    }

    /// Whether the bytes of text behind every token of `split` are known; Megatron files do not tell them.
    pub fn knows_bytes(&self, split: Split) -> bool {
        self.parts.iter().flat_map(|part| part.pieces(split)).all(|piece| piece.bytes > 0)
    }

    /// BLAKE3 over all documents in order, each as its length (8 bytes, little-endian) and its bytes; of tokens, over the
    /// hashes of their files; of a mixture, over the hashes of its sources. File names do not enter.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Bits per byte below which no model gets on fresh text, where they are known: the entropy rate of the synthetic
    /// language. A model that has seen its training text often can undercut it there; text of `validation_paths` is not
    /// of that language.
    pub fn floor_bits_per_byte(&self) -> Option<f64> {
        self.entropy.as_ref().map(|entropy| entropy.rate)
    }

    /// Everything that decides which token stands at an index, as names and values. Two data sets whose parts agree
    /// give the same sequence at every index; where they differ, the name tells what to mend.
    pub fn fingerprint_parts(&self) -> Vec<(&'static str, String)> {
        let mut train = blake3::Hasher::new();
        for (number, part) in self.parts.iter().enumerate() {
            if number > 0 {
                train.update(b"next source");
            }
            for piece in part.train.pieces() {
                train.update(&(piece.start as u64).to_le_bytes()).update(&(piece.end as u64).to_le_bytes());
            }
        }
        let mut parts = vec![
            ("data order version", ORDER_VERSION.to_string()),
            ("text hash", hex(&self.hash)),
            ("training documents", train.finalize().to_hex().to_string()),
            ("train.seq", self.seq.to_string()),
            ("data.masks", self.config.masks.to_string()),
            ("data.eod", self.config.eod.to_string()),
            ("data.seed", self.config.seed.to_string()),
        ];
        if self.config.packing != Packing::Stream {
            parts.push(("data.packing", self.config.packing.to_string()));
        }
        if self.mixture.is_some() {
            parts.push(("data.weights", format!("{:?}", self.config.weights)));
        }
        if let Some(eod) = self.parts[0].store.eod.filter(|&eod| eod != crate::EOD) {
            parts.push(("end-of-document token", eod.to_string()));
        }
        parts
    }

    /// What there is of it, for comparison with another copy of the same data: content as it was read, no paths.
    pub fn identity(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        let several = self.parts.len() > 1;
        for (number, part) in self.parts.iter().enumerate() {
            let of = if several { format!("source {}: ", number + 1) } else { String::new() };
            let held = part.pieces(Split::Validation);
            all.push((format!("{of}documents"), part.store.pieces.len().to_string()));
            all.push((format!("{of}{}", part.unit()), part.store.len().to_string()));
            all.push((format!("{of}blake3"), hex(&part.hash)));
            all.push((format!("{of}documents held out"), held.len().to_string()));
        }
        // The hashes above say more than the one of all together.
        let settings = self.fingerprint_parts().into_iter().filter(|(name, _)| *name != "text hash");
        all.extend(settings.map(|(name, value)| (name.to_owned(), value)));
        all
    }

    /// BLAKE3 over [`Dataset::fingerprint_parts`].
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for (name, value) in self.fingerprint_parts() {
            hasher.update(format!("{name}={value}\n").as_bytes());
        }
        hasher.finalize().into()
    }

    /// Lines to print at the start: the source with its size and hash, what its files were read as, both splits, the floor.
    pub fn describe(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for part in &self.parts {
            let documents = part.store.pieces.len();
            let (tokens, unit, hash) = (grouped(part.store.len()), part.unit(), &hex(&part.hash)[..16]);
            lines.push(format!("data: {}, {documents} documents, {tokens} {unit}, blake3 {hash}", part.origin));
        }
        lines.extend(self.kinds.describe(&self.config.field).iter().map(|line| format!("data: {line}")));
        for (number, part) in self.parts.iter().enumerate() {
            let share = self.mixture.as_ref().map(|mixture| {
                let share = mixture.count(number) as f64 / crate::mixture::BLOCK as f64;
                format!(" of {}, {:.2}% of the sequences", part.origin, 100.0 * share)
            });
            for (name, split) in [("train", Split::Train), ("validation", Split::Validation)] {
                let (documents, tokens, sequences) =
                    (part.pieces(split).len(), grouped(part.tokens(split)), part.sequences(split));
                let how = match split {
                    Split::Train => share.clone().unwrap_or_default(),
                    Split::Validation => format!(" ({})", part.held_out),
                };
                let unit = part.unit();
                lines.push(format!(
                    "data: {name}: {documents} documents, {tokens} {unit}, {sequences} sequences of {} tokens{how}",
                    self.seq
                ));
            }
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

//! What a data set is like: lengths, duplicates, and what each packing makes of it.

use std::collections::HashSet;

use serde::Serialize;
use spec::run::{DataConfig, Packing};

use crate::store::Piece;
use crate::{DataError, Dataset, Split};

/// Most sequences looked at for the cost of attention, from the beginning of the training order.
const SEQUENCES_MAX: u64 = 1 << 20;

/// Lengths of documents in tokens, with their ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lengths {
    /// Documents.
    pub documents: u64,
    /// The sum.
    pub tokens: u64,
    /// Bytes of text; 0 where they are not known.
    pub bytes: u64,
    /// The shortest.
    pub min: usize,
    /// Half of the documents are at most so long.
    pub median: usize,
    /// 95 of 100 are.
    pub p95: usize,
    /// The longest.
    pub max: usize,
}

/// Documents that stand more than once, each time but the first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Duplicates {
    /// How many.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Bytes of their text; 0 where they are not known.
    pub bytes: u64,
}

/// Attention of a sequence: pairs of tokens that see each other, as a share of those of one document that fills it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Attention {
    /// Of the cheapest sequence.
    pub min: f64,
    /// On average.
    pub mean: f64,
    /// Of the dearest.
    pub max: f64,
    /// The dearest microbatch over the mean: what the others wait for.
    pub microbatch_max_over_mean: f64,
}

/// Training documents under one packing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Packed {
    /// `stream` or `bestfit`.
    pub packing: String,
    /// Sequences of an epoch.
    pub sequences: u64,
    /// Share of positions that hold padding.
    pub padding: f64,
    /// Documents that fit into one sequence but lie in several.
    pub documents_cut: u64,
    /// What attention costs.
    pub attention: Attention,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stats {
    /// Tokens of a sequence.
    pub seq: usize,
    /// Sequences of a microbatch.
    pub microbatch: usize,
    /// Of all documents, held out ones too.
    pub lengths: Lengths,
    /// Among all documents.
    pub duplicates: Duplicates,
    /// Under each packing.
    pub packings: Vec<Packed>,
}

/// Looks at the data that `config` names, in sequences of `seq` tokens and microbatches of `microbatch`.
///
/// # Errors
/// As for [`Dataset::open`].
pub fn of(config: &DataConfig, seq: usize, microbatch: usize) -> Result<Stats, DataError> {
    let open = |packing| {
        let masks = config.masks || packing == Packing::BestFit;
        Dataset::open(&DataConfig { packing, masks, ..config.clone() }, seq, None)
    };
    let stream = open(Packing::Stream)?;
    let microbatch = microbatch.max(1);
    let packings = vec![packed(&stream, microbatch), packed(&open(Packing::BestFit)?, microbatch)];
    Ok(Stats { seq, microbatch, lengths: lengths(&stream), duplicates: duplicates(&stream), packings })
}

fn lengths(data: &Dataset) -> Lengths {
    let mut all: Vec<usize> = Vec::new();
    let mut bytes = 0;
    for part in &data.parts {
        let eod = usize::from(part.store.eod.is_some());
        all.extend(part.store.pieces.iter().map(|piece| piece.len() + eod));
        bytes += part.store.pieces.iter().map(|piece| piece.bytes).sum::<u64>();
    }
    all.sort_unstable();
    let at = |share: f64| all[((all.len() as f64 * share).ceil() as usize).clamp(1, all.len()) - 1];
    Lengths {
        documents: all.len() as u64,
        tokens: all.iter().map(|&len| len as u64).sum(),
        bytes,
        min: at(0.0),
        median: at(0.5),
        p95: at(0.95),
        max: at(1.0),
    }
}

fn duplicates(data: &Dataset) -> Duplicates {
    let mut met = HashSet::new();
    let mut duplicates = Duplicates::default();
    let (mut tokens, mut bytes) = (Vec::new(), Vec::new());
    for part in &data.parts {
        for piece in &part.store.pieces {
            tokens.clear();
            bytes.clear();
            part.store.read(piece.range(), &mut tokens);
            tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
            if !met.insert(*blake3::hash(&bytes).as_bytes()) {
                duplicates.documents += 1;
                duplicates.tokens += piece.len() as u64;
                duplicates.bytes += piece.bytes;
            }
        }
    }
    duplicates
}

fn packed(data: &Dataset, microbatch: usize) -> Packed {
    let seq = data.seq();
    let sequences = data.sequences(Split::Train);
    let (mut filled, mut cut) = (0u64, 0);
    for part in &data.parts {
        let eod = usize::from(part.store.eod.is_some());
        let fits = |piece: &&Piece| piece.len() + eod <= seq;
        filled += (0..part.train.sequences()).flat_map(|place| part.train.parts(place)).map(|n| n as u64).sum::<u64>();
        if data.config.packing == Packing::Stream {
            let mut end = 0;
            for piece in part.train.pieces() {
                let start = end;
                end += piece.len() + eod;
                cut += u64::from(fits(&piece) && start / seq != (end - 1) / seq);
            }
        }
    }
    let looked_at = sequences.min(SEQUENCES_MAX);
    let costs: Vec<f64> = (0..looked_at).map(|index| cost(data, index)).collect();
    let mean = costs.iter().sum::<f64>() / costs.len() as f64;
    // The last microbatch of an epoch is filled up by the next epoch.
    let whole = costs.chunks_exact(microbatch).map(|costs| costs.iter().sum::<f64>() / microbatch as f64);
    let microbatches: Vec<f64> = if costs.len() < microbatch { vec![mean] } else { whole.collect() };
    let mean_of_microbatches = microbatches.iter().sum::<f64>() / microbatches.len() as f64;
    let largest = |list: &[f64]| list.iter().copied().fold(0.0, f64::max);
    Packed {
        packing: data.config.packing.to_string(),
        sequences,
        padding: 1.0 - filled as f64 / (sequences * seq as u64) as f64,
        documents_cut: cut,
        attention: Attention {
            min: costs.iter().copied().fold(f64::INFINITY, f64::min),
            mean,
            max: largest(&costs),
            microbatch_max_over_mean: largest(&microbatches) / mean_of_microbatches,
        },
    }
}

/// The cost of attention of sequence `index`.
fn cost(data: &Dataset, index: u64) -> f64 {
    let pairs = |n: usize| (n as f64) * (n as f64 + 1.0) / 2.0;
    if !data.config.masks {
        return 1.0;
    }
    let (part, place) = data.locate(Split::Train, data.place(Split::Train, index));
    part.train.parts(place).into_iter().map(pairs).sum::<f64>() / pairs(data.seq())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use spec::run::Source;

    #[test]
    fn a_data_set_by_hand() {
        let folder = Scratch::new();
        // With their ends 4, 4, 3 and 9 tokens, the second twice; sequences of 6.
        for (name, text) in [("a", "abc"), ("b", "abc"), ("c", "xy"), ("d", "12345678")] {
            folder.write(name, text);
        }
        let config = DataConfig {
            source: Source::Text,
            paths: vec![folder.path().display().to_string()],
            weights: Vec::new(),
            validation_paths: Vec::new(),
            validation_sets: Vec::new(),
            field: "text".into(),
            validation: 0.0,
            masks: true,
            eod: true,
            seed: 1,
            packing: Packing::Stream,
            tokenizer: None,
            vocab: 257,
        };
        let stats = of(&config, 6, 1).expect("opens");
        let lengths = Lengths { documents: 4, tokens: 20, bytes: 16, min: 3, median: 4, p95: 9, max: 9 };
        assert_eq!(stats.lengths, lengths);
        assert_eq!(stats.duplicates, Duplicates { documents: 1, tokens: 3, bytes: 3 });
        let [stream, bestfit] = stats.packings.as_slice() else { panic!("two packings") };
        // aaaabb|bbcccd|dddddd|dd----
        assert_eq!((stream.sequences, stream.documents_cut), (4, 1));
        assert!((stream.padding - 4.0 / 24.0).abs() < 1e-9);
        let [pairs1, pairs2, pairs3, pairs4, pairs6] = [1.0, 3.0, 6.0, 10.0, 21.0];
        let costs = [pairs4 + pairs2, pairs2 + pairs3 + pairs1, pairs6, pairs2];
        assert!((stream.attention.mean - costs.iter().sum::<f64>() / 4.0 / pairs6).abs() < 1e-9);
        assert!((stream.attention.max - 1.0).abs() < 1e-9);
        assert!((stream.attention.min - pairs2 / pairs6).abs() < 1e-9);
        let over = 1.0 / stream.attention.mean;
        assert!((stream.attention.microbatch_max_over_mean - over).abs() < 1e-9);
        // dddddd|aaaa--|bbbb--|cccddd
        assert_eq!((bestfit.sequences, bestfit.documents_cut), (4, 0));
        assert!((bestfit.padding - 4.0 / 24.0).abs() < 1e-9);
    }
}

//! Which documents are held out for validation.

use crate::random::{key, mix};
use crate::store::{Piece, Store};

/// The purpose of the key of the choice, among all that `data.seed` is for.
const HOLD_OUT: u64 = 2;

/// Fewest tokens held out of a single document: one that is seen and one that is predicted.
const PART_TOKENS_MIN: usize = 2;

/// Documents of both splits, in the order of the store.
pub(crate) struct Parts {
    pub(crate) train: Vec<Piece>,
    pub(crate) validation: Vec<Piece>,
    /// How they were chosen, for people.
    pub(crate) how: String,
}

/// The documents from the `first` on are held out.
pub(crate) fn given(mut documents: Vec<Piece>, first: usize) -> Parts {
    let validation = documents.split_off(first);
    Parts { train: documents, validation, how: "data.validation_paths".into() }
}

/// Holds out about the share `share` of `documents`: those whose content hashes low under `seed`, at least one and
/// never all, so that copies stay together. Of a single document, its last part.
pub(crate) fn choose(store: &Store, mut documents: Vec<Piece>, share: f64, seed: u64) -> Parts {
    let how = format!("data.validation = {share}");
    if share <= 0.0 || documents.is_empty() {
        return Parts { train: documents, validation: Vec::new(), how };
    }
    if documents.len() == 1 {
        let document = documents.remove(0);
        let len = document.len();
        let part = ((len as f64 * share).round() as usize).max(PART_TOKENS_MIN).min(len);
        let [rest, held] = document.split(len - part);
        documents.extend((rest.len() > 0).then_some(rest));
        let validation = vec![held];
        return Parts { train: documents, validation, how: format!("{how}: the end of the only document") };
    }
    let key = key(seed, &[HOLD_OUT]);
    let hashes: Vec<u64> = documents.iter().map(|document| place(key, store, document)).collect();
    // 2^53 places, so that the share converts without rounding surprises.
    let limit = (share * (1u64 << 53) as f64) as u64;
    let mut held: Vec<bool> = hashes.iter().map(|&hash| hash >> 11 < limit).collect();
    let (low, high) = (hashes.iter().min(), hashes.iter().max());
    if low == high {
        // Copies of one document: their content cannot tell them apart.
        held.fill(false);
        held[hashes.len() - 1] = true;
    } else if !held.contains(&true) {
        held = hashes.iter().map(|hash| Some(hash) == low).collect();
    } else if !held.contains(&false) {
        held = hashes.iter().map(|hash| Some(hash) != high).collect();
    }
    let mut parts = Parts { train: Vec::new(), validation: Vec::new(), how };
    for (document, held) in documents.into_iter().zip(held) {
        if held { &mut parts.validation } else { &mut parts.train }.push(document);
    }
    parts
}

/// Tokens at either end of a long document that stand for it.
const END_TOKENS: usize = 256;

/// Where a document falls in 0..2^64 under `key`: by its text, or by its length and its first and last tokens.
fn place(key: u64, store: &Store, document: &Piece) -> u64 {
    let hash = if store.is_text() {
        blake3::hash(store.bytes(document))
    } else {
        let mut tokens = Vec::new();
        if document.len() <= 2 * END_TOKENS {
            store.read(document.range(), &mut tokens);
        } else {
            store.read(document.start..document.start + END_TOKENS, &mut tokens);
            store.read(document.end - END_TOKENS..document.end, &mut tokens);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(document.len() as u64).to_le_bytes());
        tokens.iter().for_each(|token| {
            hasher.update(&token.to_le_bytes());
        });
        hasher.finalize()
    };
    let word = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"));
    mix(key ^ word)
}

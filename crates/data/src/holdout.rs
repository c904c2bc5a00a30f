//! Which documents are held out for validation.

use std::ops::Range;

use crate::random::{key, mix};

/// The purpose of the key of the choice, among all that `data.seed` is for.
const HOLD_OUT: u64 = 2;

/// Fewest bytes held out of a single document: one that is seen and one that is predicted.
const PART_BYTES_MIN: usize = 2;

/// Documents of both splits, as ranges of the text, in the order of the text.
pub(crate) struct Parts {
    pub(crate) train: Vec<Range<usize>>,
    pub(crate) validation: Vec<Range<usize>>,
    /// How they were chosen, for people.
    pub(crate) how: String,
}

/// The documents from the `first` on are held out.
pub(crate) fn given(mut documents: Vec<Range<usize>>, first: usize) -> Parts {
    let validation = documents.split_off(first);
    Parts { train: documents, validation, how: "data.validation_paths".into() }
}

/// Holds out about the share `share` of `documents`: those whose content hashes low under `seed`, at least one and
/// never all, so that copies stay together. Of a single document, its last part.
pub(crate) fn choose(text: &[u8], mut documents: Vec<Range<usize>>, share: f64, seed: u64) -> Parts {
    let how = format!("data.validation = {share}");
    if share <= 0.0 || documents.is_empty() {
        return Parts { train: documents, validation: Vec::new(), how };
    }
    if documents.len() == 1 {
        let Range { start, end } = documents[0];
        let part = (((end - start) as f64 * share).round() as usize).max(PART_BYTES_MIN).min(end - start);
        documents[0].end -= part;
        documents.push(end - part..end);
        let validation = documents.split_off(1);
        documents.retain(|document| !document.is_empty());
        return Parts { train: documents, validation, how: format!("{how}: the end of the only document") };
    }
    let key = key(seed, &[HOLD_OUT]);
    let hashes: Vec<u64> = documents.iter().map(|document| place(key, &text[document.clone()])).collect();
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

/// Where a document falls in 0..2^64 under `key`.
fn place(key: u64, document: &[u8]) -> u64 {
    let hash = blake3::hash(document);
    let word = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"));
    mix(key ^ word)
}

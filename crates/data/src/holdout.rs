//! Which text is held out for validation.
//!
//! Documents are chosen by a seeded hash of their content: copies stay together, and a new document moves no other.
//! Where documents are large that takes far more or less than asked for. Then the share is kept by tokens: each large
//! document gives its end, and of the small ones those with the lowest hashes are taken, up to the share.

use crate::random::{key, mix};
use crate::store::{Piece, Store};

/// The purpose of the key of the choice, among all that `data.seed` is for.
const HOLD_OUT: u64 = 2;

/// Fewest tokens held out of a single document: one that is seen and one that is predicted.
const PART_TOKENS_MIN: usize = 2;

/// A choice of whole documents stands if what it takes is off by no more than this part of what was asked for ...
const OFF_MAX: f64 = 0.5;
/// ... or by no more than so many tokens.
const OFF_TOKENS_MAX: usize = 512;
/// A document is large if it has more than this part of all tokens that one of the splits should have.
const LARGE: f64 = 0.5;

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
    let how = format!("data.validation_paths: {}", taken(&documents, &validation));
    Parts { train: documents, validation, how }
}

/// Holds out about the share `share` of `documents`, at least one and never all; of a single document its end.
pub(crate) fn choose(store: &Store, documents: Vec<Piece>, share: f64, seed: u64) -> Parts {
    if share <= 0.0 || documents.is_empty() {
        return Parts { train: documents, validation: Vec::new(), how: format!("data.validation = {share}") };
    }
    let lengths: Vec<usize> = documents.iter().map(Piece::len).collect();
    let asked = share * lengths.iter().sum::<usize>() as f64;
    let (cuts, how) = if let [len] = lengths[..] {
        let part = (asked.round() as usize).max(PART_TOKENS_MIN).min(len);
        (vec![len - part], ", the end of the only document".into())
    } else {
        let key = key(seed, &[HOLD_OUT]);
        let hashes: Vec<u64> = documents.iter().map(|document| place(key, store, document)).collect();
        let whole = by_hash(&hashes, share);
        let held: usize = whole.iter().zip(&lengths).map(|(&held, len)| if held { *len } else { 0 }).sum();
        let off = (held as f64 - asked).abs();
        if off <= OFF_MAX * asked || off <= OFF_TOKENS_MAX as f64 {
            (whole.iter().zip(&lengths).map(|(&held, &len)| if held { 0 } else { len }).collect(), String::new())
        } else {
            by_tokens(&hashes, &lengths, share, |at, cut, slack| line_start(store, &documents[at], cut, slack))
        }
    };
    let mut parts = Parts { train: Vec::new(), validation: Vec::new(), how: String::new() };
    for (document, cut) in documents.into_iter().zip(cuts) {
        if cut == 0 {
            parts.validation.push(document);
        } else if cut == document.len() {
            parts.train.push(document);
        } else {
            let [rest, held] = document.split(cut);
            parts.train.push(rest);
            parts.validation.push(held);
        }
    }
    parts.how = format!("data.validation = {share}: {}{how}", taken(&parts.train, &parts.validation));
    parts
}

/// What share of all tokens is held out, in words.
fn taken(train: &[Piece], validation: &[Piece]) -> String {
    let [train, held] = [train, validation].map(|pieces| pieces.iter().map(Piece::len).sum::<usize>() as f64);
    let percent = 100.0 * held / (train + held).max(1.0);
    // A share that is small is told to two digits.
    let places = if percent > 0.0 { (1.0 - percent.log10().floor()).clamp(1.0, 9.0) as usize } else { 1 };
    format!("{percent:.places$}% held out")
}

/// Whole documents: whether each is held out.
fn by_hash(hashes: &[u64], share: f64) -> Vec<bool> {
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
    held
}

/// Ends of large documents and whole small ones: for each document how many of its tokens stay, and what was done, for
/// people. `boundary(document, cut, slack)` moves a cut to a better place at most `slack` tokens away.
fn by_tokens(
    hashes: &[u64],
    lengths: &[usize],
    share: f64,
    boundary: impl Fn(usize, usize, usize) -> usize,
) -> (Vec<usize>, String) {
    let asked = |tokens: usize| share * tokens as f64;
    let all: usize = lengths.iter().sum();
    let large = |&at: &usize| lengths[at] as f64 > LARGE * asked(all).min(all as f64 - asked(all));
    let (ends, mut small): (Vec<usize>, Vec<usize>) = (0..lengths.len()).partition(large);
    let mut cuts = lengths.to_vec();
    for &at in &ends {
        let held = (asked(lengths[at]).round() as usize).min(lengths[at]);
        // A quarter of what is held out, either way. Copies are cut at the same place.
        cuts[at] = if held == 0 { lengths[at] } else { boundary(at, lengths[at] - held, held / 4) };
    }
    small.sort_by_key(|&at| (hashes[at], at));
    let wanted = asked(small.iter().map(|&at| lengths[at]).sum());
    let (mut held, mut whole) = (0usize, 0);
    // Copies have one hash, and stay together.
    for copies in small.chunk_by(|&a, &b| hashes[a] == hashes[b]) {
        let more: usize = copies.iter().map(|&at| lengths[at]).sum();
        if wanted - held as f64 <= more as f64 / 2.0 {
            break;
        }
        held += more;
        whole += copies.len();
        copies.iter().for_each(|&at| cuts[at] = 0);
    }
    if cuts == lengths {
        // So little is asked for that it is less than a token of each.
        let low = hashes.iter().min();
        for at in (0..lengths.len()).filter(|&at| hashes.get(at) == low) {
            cuts[at] = lengths[at].saturating_sub(PART_TOKENS_MIN.max(asked(all).round() as usize));
        }
    } else if cuts.iter().all(|&cut| cut == 0) {
        let high = hashes.iter().max();
        (0..lengths.len()).filter(|&at| hashes.get(at) == high).for_each(|at| cuts[at] = lengths[at]);
    }
    let cut = ends.iter().filter(|&&at| cuts[at] < lengths[at]).count();
    let plural = |n: usize| if n == 1 { "" } else { "s" };
    let how = match (cut, whole) {
        (0, _) => String::new(),
        (_, 0) => format!(", the end{} of {cut} large document{}", plural(cut), plural(cut)),
        _ => format!(", the end{} of {cut} large and {whole} small document{}", plural(cut), plural(whole)),
    };
    (cuts, how)
}

/// The best place to cut `document`, at most `slack` tokens from `cut`: the nearest beginning of a paragraph, else of a
/// line, else `cut` itself, but not within a character. Tokens that are not bytes are cut at `cut`.
fn line_start(store: &Store, document: &Piece, cut: usize, slack: usize) -> usize {
    let text = store.bytes(document);
    if text.is_empty() {
        return cut;
    }
    let (low, high) = (cut.saturating_sub(slack).max(2), (cut + slack).min(text.len() - 1));
    let near =
        |starts: &dyn Fn(usize) -> bool| (low..=high).filter(|&at| starts(at)).min_by_key(|&at| (at.abs_diff(cut), at));
    near(&|at| text[at - 1] == b'\n' && text[at - 2] == b'\n' && text[at] != b'\n')
        .or_else(|| near(&|at| text[at - 1] == b'\n'))
        .unwrap_or_else(|| (1..=cut).rev().take(4).find(|&at| text[at] & 0xc0 != 0x80).unwrap_or(cut))
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn store(documents: &[Vec<u8>]) -> Store {
        let mut end = 0;
        let ends: Vec<usize> = documents.iter().map(|document| (end += document.len(), end).1).collect();
        Store::text(documents.concat(), &ends, None)
    }

    fn share(parts: &Parts) -> f64 {
        let [train, held] = [&parts.train, &parts.validation].map(|p| p.iter().map(Piece::len).sum::<usize>());
        held as f64 / (train + held) as f64
    }

    /// Lines of 50 bytes, paragraphs of four lines.
    fn book(seed: u64, bytes: usize) -> Vec<u8> {
        let lines = (0..bytes / 50).map(|line| {
            let word = crate::random::word(seed, line as u64);
            let end = if line % 4 == 3 { "\n\n" } else { "\n" };
            let text = format!("{word:020} words of a line in a book of the number {seed:09}");
            text[..50 - end.len()].to_owned() + end
        });
        lines.collect::<String>().into_bytes()
    }

    #[test]
    fn of_a_few_novels_the_share_is_held_out_and_not_a_novel() {
        let sizes = [883_000, 883_000, 433_000, 467_000, 685_000, 674_000];
        let novels: Vec<_> = sizes.iter().zip(1..).map(|(&bytes, seed)| book(seed, bytes)).collect();
        let store = store(&novels);
        for (asked, seed) in [0.01, 0.05, 0.1, 0.2].into_iter().flat_map(|asked| [1, 2, 3].map(|seed| (asked, seed))) {
            let parts = choose(&store, store.pieces.clone(), asked, seed);
            assert!((share(&parts) / asked - 1.0).abs() < 0.5, "{asked} {seed}: {}", parts.how);
        }
        let parts = choose(&store, store.pieces.clone(), 0.05, 1);
        assert_eq!((parts.train.len(), parts.validation.len()), (6, 6));
        assert_eq!(parts.how, "data.validation = 0.05: 5.0% held out, the ends of 6 large documents");
        // A paragraph begins after two line ends.
        for piece in &parts.train {
            assert!(store.bytes(piece).ends_with(b"\n\n"));
        }
    }

    #[test]
    fn a_large_document_among_small_ones_does_not_decide() {
        let mut documents: Vec<_> = (0..200).map(|n| book(n, 1000)).collect();
        documents.push(book(777, 400_000));
        let store = store(&documents);
        for seed in 0..20 {
            let parts = choose(&store, store.pieces.clone(), 0.05, seed);
            assert!((0.025..0.075).contains(&share(&parts)), "{seed}: {}", parts.how);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn every_token_is_in_one_split_and_the_share_is_near(
            lengths in prop::collection::vec(1usize..20_000, 2..12), copies in 1usize..3, asked in 0.01f64..0.99, seed: u64,
        ) {
            let documents: Vec<_> = lengths.iter().zip(0..).map(|(&len, n)| {
                (0..len).map(|at| (crate::random::word(n, at as u64) % 97 + 10) as u8).collect::<Vec<u8>>()
            }).flat_map(|document| vec![document; copies]).collect();
            let store = store(&documents);
            let parts = choose(&store, store.pieces.clone(), asked, seed);
            prop_assert!(!parts.train.is_empty() && !parts.validation.is_empty());
            let mut pieces: Vec<_> = parts.train.iter().chain(&parts.validation).map(Piece::range).collect();
            pieces.sort_by_key(|range| range.start);
            prop_assert_eq!(pieces.first().map(|range| range.start), Some(0));
            prop_assert_eq!(pieces.last().map(|range| range.end), Some(store.len()));
            prop_assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
            let off = (share(&parts) - asked).abs();
            prop_assert!(off <= 0.5 * asked || off * store.len() as f64 <= 512.0 * copies as f64, "{}", parts.how);
        }
    }
}

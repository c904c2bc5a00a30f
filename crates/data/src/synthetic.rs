//! A seeded language whose entropy is known, so that a loss curve has a floor to be judged by.
//!
//! An order-2 Markov chain over 23 printable bytes, shaped like words: what may follow depends on the class of the last
//! letter, which letters are preferred depends on the last two. Probabilities are small integers over [`TOTAL`], so that
//! sampling is exact and the same on every machine. Every byte may follow every pair, so the chain is ergodic and has
//! one stationary distribution, found by power iteration; the first two bytes of a document are drawn from it.
//!
//! Entropy rate of a chain: Cover, Thomas, "Elements of Information Theory", theorem 4.2.4.

use crate::random::{below, key, mix, word};

/// The bytes of the language.
pub(crate) const ALPHABET: &[u8; SYMBOLS] = b"aeioubdfgklmnprstvz ,.\n";
const SYMBOLS: usize = 23;
const VOWELS: usize = 5;
const LETTERS: usize = 19;
const SPACE: usize = 19;
const COMMA: usize = 20;
const STOP: usize = 21;
const NEWLINE: usize = 22;

/// The sum of the weights of one context.
pub(crate) const TOTAL: usize = 512;

/// Documents of the corpus.
pub(crate) const DOCUMENTS: u64 = 400;
/// Fewest bytes of a document.
pub(crate) const DOCUMENT_BYTES_MIN: u64 = 200;
/// Most bytes of a document.
pub(crate) const DOCUMENT_BYTES_MAX: u64 = 4000;

/// The language is the same for every `data.seed`, so that its floor is a constant of `lockstep`.
const LANGUAGE_SEED: u64 = 0x6c6f_636b_7374_6570;

/// Power iteration ends when the distribution moves by less (sum of absolute differences).
const STATIONARY_ERROR_MAX: f64 = 1e-14;
const STATIONARY_ROUNDS_MAX: usize = 10_000;

/// The language: weights of each byte after each pair of bytes.
pub(crate) struct Language {
    /// `weights[a * SYMBOLS + b][c]`: how many of [`TOTAL`] times `c` follows `a b`.
    weights: Vec<[u16; SYMBOLS]>,
    /// The same as a table to draw from: `draw[context * TOTAL + r]` for a uniform `r`.
    draw: Vec<u8>,
    /// Probability of each pair.
    stationary: Vec<f64>,
}

impl Language {
    /// The language of `lockstep`.
    pub(crate) fn new() -> Self {
        let pairs = SYMBOLS * SYMBOLS;
        let weights: Vec<_> = (0..pairs).map(|pair| weights(pair / SYMBOLS, pair % SYMBOLS)).collect();
        let mut draw = Vec::with_capacity(pairs * TOTAL);
        for row in &weights {
            for (symbol, &weight) in row.iter().enumerate() {
                draw.extend(std::iter::repeat_n(symbol as u8, usize::from(weight)));
            }
        }
        debug_assert_eq!(draw.len(), pairs * TOTAL);
        let stationary = stationary(&weights);
        Self { weights, draw, stationary }
    }

    /// Bits per byte that no model can undercut on fresh text: the entropy of a byte given all before it.
    pub(crate) fn entropy_bits(&self) -> f64 {
        self.stationary.iter().zip(&self.weights).map(|(p, row)| p * conditional_bits(row)).sum()
    }

    /// Bits per byte that a model stays at which knows no byte before, or only one: how far a loss curve has come.
    pub(crate) fn entropy_bits_with_less(&self) -> [f64; 2] {
        let bits = |p: f64| -p * p.log2();
        let single: f64 = self.stationary.chunks(SYMBOLS).map(|row| bits(row.iter().sum())).sum();
        let pair: f64 = self.stationary.iter().copied().map(bits).sum();
        [single, pair - single]
    }

    /// Document `index`, at most [`DOCUMENT_BYTES_MAX`] bytes.
    pub(crate) fn document(&self, index: u64) -> Vec<u8> {
        let key = key(LANGUAGE_SEED, &[1, index]);
        let span = DOCUMENT_BYTES_MAX - DOCUMENT_BYTES_MIN + 1;
        let bytes = (DOCUMENT_BYTES_MIN + below(word(key, 0), span)) as usize;
        let mut pair = self.first_pair(word(key, 1));
        let mut text = Vec::with_capacity(bytes);
        text.extend([ALPHABET[pair / SYMBOLS], ALPHABET[pair % SYMBOLS]]);
        for at in 2..bytes {
            let random = word(key, at as u64) as usize % TOTAL;
            let next = usize::from(self.draw[pair * TOTAL + random]);
            text.push(ALPHABET[next]);
            pair = pair % SYMBOLS * SYMBOLS + next;
        }
        text
    }

    /// A pair of the stationary distribution, out of 53 random bits.
    fn first_pair(&self, random: u64) -> usize {
        let mut left = (random >> 11) as f64 / (1u64 << 53) as f64;
        for (pair, &p) in self.stationary.iter().enumerate() {
            left -= p;
            if left < 0.0 {
                return pair;
            }
        }
        // The probabilities sum to a little less than 1.
        self.stationary.len() - 1
    }
}

/// Bits that the length of a document adds to each of its bytes, at the least: with end-of-document tokens a model has
/// to tell it as well.
pub(crate) fn length_bits_per_byte() -> f64 {
    let lengths = (DOCUMENT_BYTES_MAX - DOCUMENT_BYTES_MIN + 1) as f64;
    lengths.log2() / ((DOCUMENT_BYTES_MAX + DOCUMENT_BYTES_MIN) as f64 / 2.0)
}

/// What follows `a b`: one for every byte, the rest by the shape of words.
fn weights(a: usize, b: usize) -> [u16; SYMBOLS] {
    let vowel = |symbol: usize| symbol < VOWELS;
    let letter = |symbol: usize| symbol < LETTERS;
    let mut row = [1u16; SYMBOLS];
    let rest = TOTAL - SYMBOLS;
    // Shares, in 64ths of the rest: vowels, consonants, space, comma, stop, newline.
    let shares: [usize; 6] = match (a, b) {
        (_, SPACE | NEWLINE) => [20, 44, 0, 0, 0, 0],
        (_, COMMA) => [0, 0, 64, 0, 0, 0],
        (_, STOP) => [0, 0, 44, 0, 0, 20],
        (a, b) if !letter(a) && vowel(b) => [2, 62, 0, 0, 0, 0],
        (a, _) if !letter(a) => [56, 8, 0, 0, 0, 0],
        (a, b) if vowel(b) => [4, if vowel(a) { 42 } else { 36 }, if vowel(a) { 12 } else { 18 }, 3, 3, 0],
        (a, _) if vowel(a) => [32, 6, 20, 3, 3, 0],
        _ => [52, 0, 9, 1, 2, 0],
    };
    let mut given = 0;
    let mut give = |symbol: usize, weight: usize| {
        row[symbol] += weight as u16;
        given += weight;
    };
    let key = key(LANGUAGE_SEED, &[0, (a * SYMBOLS + b) as u64]);
    favourites(0..VOWELS, rest * shares[0] / 64, word(key, 0), &mut give);
    favourites(VOWELS..LETTERS, rest * shares[1] / 64, word(key, 1), &mut give);
    for (symbol, share) in (SPACE..SYMBOLS).zip(&shares[2..]) {
        give(symbol, rest * share / 64);
    }
    // What rounding left goes to the likeliest.
    let likeliest = (0..SYMBOLS).max_by_key(|&symbol| (row[symbol], symbol)).unwrap_or(SPACE);
    row[likeliest] += (rest - given) as u16;
    row
}

/// Shares `weight` among three of `symbols` that `random` picks: 4 to 2 to 1.
fn favourites(symbols: std::ops::Range<usize>, weight: usize, random: u64, give: &mut impl FnMut(usize, usize)) {
    let mut order: Vec<usize> = symbols.collect();
    order.sort_by_key(|&symbol| (mix(random ^ mix(symbol as u64)), symbol));
    for (&symbol, parts) in order.iter().zip([4, 2, 1]) {
        give(symbol, weight * parts / 7);
    }
}

/// Entropy of one row of weights, in bits.
fn conditional_bits(row: &[u16; SYMBOLS]) -> f64 {
    let p = row.iter().map(|&weight| f64::from(weight) / TOTAL as f64);
    p.map(|p| -p * p.log2()).sum()
}

/// The distribution of pairs that the chain keeps, by power iteration from the uniform one.
fn stationary(weights: &[[u16; SYMBOLS]]) -> Vec<f64> {
    let mut now = vec![1.0 / weights.len() as f64; weights.len()];
    for _ in 0..STATIONARY_ROUNDS_MAX {
        let next = advance(weights, &now);
        let moved: f64 = now.iter().zip(&next).map(|(a, b)| (a - b).abs()).sum();
        now = next;
        if moved < STATIONARY_ERROR_MAX {
            break;
        }
    }
    now
}

/// The distribution of pairs one byte later.
fn advance(weights: &[[u16; SYMBOLS]], now: &[f64]) -> Vec<f64> {
    let mut next = vec![0.0; now.len()];
    for (pair, row) in weights.iter().enumerate() {
        let p = now[pair] / TOTAL as f64;
        let to = pair % SYMBOLS * SYMBOLS;
        for (slot, &weight) in next[to..to + SYMBOLS].iter_mut().zip(row) {
            *slot += p * f64::from(weight);
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn corpus(language: &Language) -> Vec<Vec<u8>> {
        (0..DOCUMENTS).map(|index| language.document(index)).collect()
    }

    #[test]
    fn weights_sum_to_the_total_and_leave_nothing_impossible() {
        for row in Language::new().weights {
            assert_eq!(row.iter().map(|&weight| usize::from(weight)).sum::<usize>(), TOTAL);
            assert!(row.iter().all(|&weight| weight > 0));
        }
    }

    #[test]
    fn the_distribution_is_kept() {
        let language = Language::new();
        let next = advance(&language.weights, &language.stationary);
        let moved: f64 = language.stationary.iter().zip(&next).map(|(a, b)| (a - b).abs()).sum();
        assert!(moved < 1e-12, "moved by {moved:e}");
        let sum: f64 = language.stationary.iter().sum();
        assert!((sum - 1.0).abs() < 1e-12, "sums to {sum}");
    }

    /// The mean of -log2 p of the text under its own law, and the plug-in estimate from its counts (which knows nothing
    /// of the law), both meet the stated entropy.
    #[test]
    fn the_text_has_the_stated_entropy() {
        let language = Language::new();
        let stated = language.entropy_bits();
        let index: HashMap<u8, usize> = ALPHABET.iter().copied().zip(0..).collect();
        let (mut bits, mut counts, mut triples) = (0.0, vec![[0u32; SYMBOLS]; SYMBOLS * SYMBOLS], 0u32);
        for document in (0..2 * DOCUMENTS).map(|i| language.document(i)) {
            for triple in document.windows(3) {
                let pair = index[&triple[0]] * SYMBOLS + index[&triple[1]];
                let next = index[&triple[2]];
                bits -= (f64::from(language.weights[pair][next]) / TOTAL as f64).log2();
                counts[pair][next] += 1;
                triples += 1;
            }
        }
        let under_law = bits / f64::from(triples);
        assert!((under_law - stated).abs() < 0.01, "text {under_law}, stated {stated}");
        let plug_in: f64 = counts
            .iter()
            .map(|row| {
                let sum = f64::from(row.iter().sum::<u32>());
                let seen = row.iter().filter(|&&count| count > 0);
                seen.map(|&count| -f64::from(count) * (f64::from(count) / sum).log2()).sum::<f64>()
            })
            .sum::<f64>()
            / f64::from(triples);
        // Counts see a little less than the law: about (rows x (symbols - 1)) / (2 ln 2 x triples) bits.
        assert!((-0.012..0.003).contains(&(plug_in - stated)), "counts {plug_in}, stated {stated}");
    }

    #[test]
    fn more_context_tells_more() {
        let language = Language::new();
        let [none, one] = language.entropy_bits_with_less();
        let two = language.entropy_bits();
        assert!((SYMBOLS as f64).log2() > none && none > one + 0.1 && one > two + 0.1, "{none} {one} {two}");
    }

    #[test]
    fn documents_begin_like_any_other_place() {
        let language = Language::new();
        let vowels = |share: usize| {
            let picks = (0..20_000).map(|i| language.document_start(i)[share]);
            picks.filter(|byte| b"aeiou".contains(byte)).count() as f64 / 20_000.0
        };
        let expected: f64 = language.stationary.chunks(SYMBOLS).take(VOWELS).flatten().sum();
        assert!((vowels(0) - expected).abs() < 0.015, "first byte {}, stationary {expected}", vowels(0));
        assert!((vowels(1) - expected).abs() < 0.015, "second byte {}, stationary {expected}", vowels(1));
    }

    impl Language {
        fn document_start(&self, index: u64) -> [u8; 2] {
            let pair = self.first_pair(word(key(LANGUAGE_SEED, &[1, index]), 1));
            [ALPHABET[pair / SYMBOLS], ALPHABET[pair % SYMBOLS]]
        }
    }

    #[test]
    fn documents_have_the_stated_lengths() {
        let documents = corpus(&Language::new());
        let lengths: Vec<u64> = documents.iter().map(|document| document.len() as u64).collect();
        assert!(lengths.iter().all(|length| (DOCUMENT_BYTES_MIN..=DOCUMENT_BYTES_MAX).contains(length)));
        assert!(lengths.iter().min() < Some(&300) && lengths.iter().max() > Some(&3900));
        let total: u64 = lengths.iter().sum();
        assert!((512 << 10..1 << 20).contains(&total), "{total} bytes");
    }
}

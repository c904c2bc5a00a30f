//! The short way through byte-level BPE: split, look the word up, ask the model only for words never met.
//!
//! Patterns of such tokenizers end in `\s+(?!\S)|\s+`: spaces, but the last one stays for the word that follows. That
//! look-ahead is the only thing in them that a finite automaton cannot do, so it is done by hand.

use std::borrow::Cow;
use std::collections::HashMap;

use regex_automata::Input;
use regex_automata::meta::{Cache, Regex};
use regex_automata::util::syntax;
use serde_json::Value;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::{Added, Shape};

/// What the pre-tokenizer `ByteLevel` splits by.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The end that is done by hand.
const SPACES: &str = r"|\s+(?!\S)|\s+";

/// Longest word kept in a table, in bytes.
const WORD_BYTES_MAX: usize = 48;
/// Most words in a table; then it begins anew.
const WORDS_MAX: usize = 1 << 17;

/// What is the same for all threads.
pub(super) struct Fast {
    /// Pattern 0 is the file's up to [`SPACES`], pattern 1 is `\s+`.
    split: Regex,
    /// Tokens that are cut out of the text before all else; a text with one goes the long way.
    added: Option<Regex>,
    nfc: bool,
    /// The alphabet of byte-level BPE.
    alphabet: [char; 256],
}

impl Fast {
    /// The short way, if the file is of the shape that allows it.
    pub(super) fn of(shape: &Shape) -> Option<Self> {
        let nfc = match &shape.normalizer {
            None => false,
            Some(normalizer) if normalizer["type"] == "NFC" => true,
            Some(_) => return None,
        };
        if shape.model.kind != "BPE" {
            return None;
        }
        let pattern = pattern(shape.pre_tokenizer.as_ref()?)?;
        let before = pattern.strip_suffix(SPACES)?;
        if is_possessive(before) || sets_flags(before) || may_be_empty(before) {
            return None;
        }
        // The library looks for a normalised token in its normal form. Here all tokens are looked for as they are written.
        let moved = |token: &&Added| {
            token.normalized && matches!(normal(&token.content, nfc), Cow::Owned(text) if text != token.content)
        };
        if shape.added_tokens.iter().any(|token| moved(&token)) {
            return None;
        }
        let split = Regex::new_many(&[before, r"\s+"]).ok()?;
        let contents: Vec<_> =
            shape.added_tokens.iter().filter(|t| !t.content.is_empty()).map(|t| literal(&t.content)).collect();
        let added = if contents.is_empty() { None } else { Some(Regex::new_many(&contents).ok()?) };
        Some(Self { split, added, nfc, alphabet: alphabet() })
    }
}

/// The pattern of a pre-tokenizer that does nothing but split and spell bytes.
fn pattern(pre: &Value) -> Option<String> {
    let plain = |v: &Value, regex: bool| {
        v["type"] == "ByteLevel" && v["add_prefix_space"] == false && v["use_regex"].as_bool().unwrap_or(true) == regex
    };
    if plain(pre, true) {
        return Some(GPT2.into());
    }
    let [split, bytes] = pre["pretokenizers"].as_array()?.as_slice() else { return None };
    let splits = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
    if pre["type"] != "Sequence" || !splits || !plain(bytes, false) {
        return None;
    }
    Some(split["pattern"]["Regex"].as_str()?.to_owned())
}

/// Whether a pattern may have a possessive quantifier, which the engine would read as something else.
fn is_possessive(pattern: &str) -> bool {
    let pairs = pattern.as_bytes().windows(3);
    let counted = |a: u8| a.is_ascii_digit() || a == b',';
    pattern.starts_with("++")
        || pairs
            .into_iter()
            .any(|w| matches!(w, [_, b'?' | b'*' | b'+', b'+']) || matches!(w, [a, b'}', b'+'] if counted(*a)))
}

/// Whether a pattern sets flags, such as `(?i)`, that would hold for its end, too. Flags of a group, as in `(?i:...)`, end with it.
fn sets_flags(pattern: &str) -> bool {
    pattern.match_indices("(?").any(|(at, _)| {
        let flags = pattern[at + 2..].trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '-');
        flags.starts_with(')')
    })
}

/// Whether a pattern may match nothing, or cannot be read.
fn may_be_empty(pattern: &str) -> bool {
    let least = syntax::parse(pattern).ok().and_then(|read| read.properties().minimum_len());
    least.is_none_or(|bytes| bytes == 0)
}

/// A pattern that matches `text` alone.
fn literal(text: &str) -> String {
    text.chars().flat_map(|c| ["\\x{".to_owned(), format!("{:x}", u32::from(c)), "}".to_owned()]).collect()
}

/// The character that stands for each byte: itself if it is printable, else one from 256 on, in order.
fn alphabet() -> [char; 256] {
    let mut next = 256;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { byte as u32 } else { next };
        next += u32::from(!printable);
        char::from_u32(code).expect("below the surrogates")
    })
}

/// The words that one thread has met.
pub(super) struct Words<'a> {
    fast: &'a Fast,
    cache: Cache,
    added: Option<Cache>,
    table: HashMap<Box<str>, (u32, u32)>,
    ids: Vec<u32>,
    spelled: String,
}

impl<'a> Words<'a> {
    pub(super) fn new(fast: &'a Fast) -> Self {
        Self {
            fast,
            cache: fast.split.create_cache(),
            added: fast.added.as_ref().map(Regex::create_cache),
            table: HashMap::new(),
            ids: Vec::new(),
            spelled: String::new(),
        }
    }

    /// Appends the ids of `text`, with those of new words from `miss`; false if the text needs the long way (then what
    /// was appended is to be dropped).
    pub(super) fn encode<E>(
        &mut self,
        text: &str,
        into: &mut Vec<u32>,
        mut miss: impl FnMut(&str, &mut Vec<u32>) -> Result<(), E>,
    ) -> Result<bool, E> {
        if self.has_added(text) {
            return Ok(false);
        }
        let text = normal(text, self.fast.nfc);
        if matches!(text, Cow::Owned(_)) && self.has_added(&text) {
            return Ok(false);
        }
        let mut at = 0;
        while at < text.len() {
            let found = self.fast.split.search_with(&mut self.cache, &Input::new(&*text).range(at..));
            let Some(found) = found else {
                self.word(&text[at..], into, &mut miss)?;
                break;
            };
            if found.is_empty() {
                return Ok(false);
            }
            if found.start() > at {
                self.word(&text[at..found.start()], into, &mut miss)?;
            }
            at = found.end();
            if found.pattern().as_usize() == 1 && at < text.len() {
                // The last of several spaces goes to the word behind it.
                let last = text[found.start()..at].chars().next_back().map_or(0, char::len_utf8);
                if found.len() > last {
                    at -= last;
                }
            }
            self.word(&text[found.start()..at], into, &mut miss)?;
        }
        Ok(true)
    }

    fn has_added(&mut self, text: &str) -> bool {
        let search = |(regex, cache): (&Regex, &mut Cache)| regex.search_half_with(cache, &Input::new(text)).is_some();
        self.fast.added.as_ref().zip(self.added.as_mut()).is_some_and(search)
    }

    fn word<E>(
        &mut self,
        word: &str,
        into: &mut Vec<u32>,
        miss: &mut impl FnMut(&str, &mut Vec<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Some(&(start, end)) = self.table.get(word) {
            into.extend_from_slice(&self.ids[start as usize..end as usize]);
            return Ok(());
        }
        self.spelled.clear();
        self.spelled.extend(word.bytes().map(|byte| self.fast.alphabet[usize::from(byte)]));
        let before = into.len();
        miss(&self.spelled, into)?;
        if word.len() <= WORD_BYTES_MAX {
            if self.table.len() == WORDS_MAX {
                self.table.clear();
                self.ids.clear();
            }
            let start = self.ids.len() as u32;
            self.ids.extend_from_slice(&into[before..]);
            self.table.insert(word.into(), (start, self.ids.len() as u32));
        }
        Ok(())
    }
}

/// `text` in normal form C if that is asked for.
fn normal(text: &str, nfc: bool) -> Cow<'_, str> {
    if !nfc || text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.nfc().map(|(c, _)| c).collect())
}

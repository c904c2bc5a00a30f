//! Documents that teach nothing, or something bad.

/// Fewest tokens of which one can be said to repeat.
const REPEAT_TOKENS_MIN: usize = 32;
/// Fewest lines of which one can be said to repeat.
const REPEAT_LINES_MIN: usize = 8;

/// Thresholds.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Longest document.
    pub document_bytes_max: u64,
    /// Largest share of one line among the lines of a document, or of one token among its tokens; at least 0.5, and 1
    /// lets everything pass.
    pub repeat_share_max: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { document_bytes_max: 64 << 20, repeat_share_max: 0.9 }
    }
}

/// Why a document is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Nothing but white space.
    Empty,
    /// Not UTF-8.
    InvalidText,
    /// Far over length.
    TooLong,
    /// Almost nothing but one line.
    RepeatedLine,
    /// Almost nothing but one token.
    RepeatedToken,
}

impl Reason {
    /// For people and for JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::InvalidText => "invalid_text",
            Self::TooLong => "too_long",
            Self::RepeatedLine => "repeated_line",
            Self::RepeatedToken => "repeated_token",
        }
    }
}

impl Limits {
    /// What is wrong with a text before it is encoded.
    pub(super) fn text(&self, text: &str) -> Option<Reason> {
        if text.trim().is_empty() {
            return Some(Reason::Empty);
        }
        if text.len() as u64 > self.document_bytes_max {
            return Some(Reason::TooLong);
        }
        let lines = || text.lines().map(str::trim_end).filter(|line| !line.is_empty());
        self.repeats(lines, REPEAT_LINES_MIN).then_some(Reason::RepeatedLine)
    }

    /// What is wrong with its tokens.
    pub(super) fn tokens(&self, tokens: &[u32]) -> Option<Reason> {
        if tokens.is_empty() {
            return Some(Reason::Empty);
        }
        self.repeats(|| tokens.iter().copied(), REPEAT_TOKENS_MIN).then_some(Reason::RepeatedToken)
    }

    /// Whether one item has more than its share: only a majority can, and a vote of pairs finds it (Boyer, Moore 1981).
    fn repeats<T: PartialEq + Copy, I: Iterator<Item = T>>(&self, items: impl Fn() -> I, min: usize) -> bool {
        let (mut candidate, mut votes, mut count) = (None, 0usize, 0usize);
        for item in items() {
            count += 1;
            if votes == 0 {
                candidate = Some(item);
            }
            votes = if candidate == Some(item) { votes + 1 } else { votes - 1 };
        }
        if count < min || votes == 0 {
            return false;
        }
        let met = items().filter(|&item| Some(item) == candidate).count();
        met as f64 > self.repeat_share_max.max(0.5) * count as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_vote_is_the_count(tokens in prop::collection::vec(0u32..3, 0..90), share in 0.5f64..1.0) {
            let limits = Limits { repeat_share_max: share, ..Limits::default() };
            let most = (0..3).map(|id| tokens.iter().filter(|&&token| token == id).count()).max().unwrap_or(0);
            let repeats = tokens.len() >= REPEAT_TOKENS_MIN && most as f64 > share * tokens.len() as f64;
            let expected = if tokens.is_empty() { Some(Reason::Empty) } else { repeats.then_some(Reason::RepeatedToken) };
            prop_assert_eq!(limits.tokens(&tokens), expected);
        }
    }

    #[test]
    fn texts_are_judged() {
        let limits = Limits { document_bytes_max: 100, ..Limits::default() };
        assert_eq!(limits.text(" \n\t"), Some(Reason::Empty));
        assert_eq!(limits.text(&"x".repeat(101)), Some(Reason::TooLong));
        assert_eq!(limits.text(&"again\n\n".repeat(8)), Some(Reason::RepeatedLine));
        assert_eq!(limits.text(&"again\n".repeat(7)), None, "too few to say");
        assert_eq!(limits.text("a\nb\na\nb\na\nb\na\nb\na\nb"), None);
        assert_eq!(Limits { repeat_share_max: 1.0, ..limits }.text(&"again\n".repeat(9)), None);
    }
}

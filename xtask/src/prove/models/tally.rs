//! What a search came to, in numbers.

use std::collections::BTreeMap;

/// Longest reason that is shown.
const REASON_MAX: usize = 110;

/// Counts of a search.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Models that trained on one rank.
    pub models: usize,
    /// Of these, models whose loss became no number.
    pub diverging: usize,
    /// Models that were refused, by reason.
    pub refused_models: BTreeMap<String, usize>,
    /// Layouts that ended with the numbers of one rank, and those of them whose ranks were processes.
    pub equal: usize,
    /// See [`Tally::equal`].
    pub processes: usize,
    /// Ranks of them all.
    pub ranks: usize,
    /// Layouts that were refused, by reason.
    pub refused: BTreeMap<String, usize>,
    /// Everything else.
    pub faults: Vec<String>,
}

impl Tally {
    /// Layouts that were drawn.
    pub fn layouts(&self) -> usize {
        self.equal + self.refused.values().sum::<usize>() + self.faults.len()
    }

    /// As lines of text.
    pub fn lines(&self) -> Vec<String> {
        let refused = |reasons: &BTreeMap<String, usize>| reasons.values().sum::<usize>();
        let mut out = vec![
            format!(
                "{} models ({} diverge, alike under every layout), {} refused",
                self.models,
                self.diverging,
                refused(&self.refused_models)
            ),
            format!(
                "{} layouts: {} with the numbers of one rank ({} with processes; {} ranks), {} refused, {} faults",
                self.layouts(),
                self.equal,
                self.processes,
                self.ranks,
                refused(&self.refused),
                self.faults.len()
            ),
        ];
        for (what, reasons) in [("models", &self.refused_models), ("layouts", &self.refused)] {
            let mut sorted: Vec<_> = reasons.iter().collect();
            sorted.sort_by_key(|(reason, count)| (std::cmp::Reverse(**count), *reason));
            out.extend(sorted.into_iter().map(|(reason, count)| format!("  {count:>5} {what} refused: {reason}")));
        }
        out
    }
}

/// The class of a refusal: its first line without its numbers and names.
pub fn class(reason: &str) -> String {
    let mut out = String::new();
    let (mut quoted, mut digits) = (false, false);
    for c in reason.lines().next().unwrap_or_default().chars() {
        match c {
            '"' => {
                quoted = !quoted;
                if quoted {
                    out.push('"');
                } else {
                    out += "..\"";
                }
            }
            _ if quoted => {}
            '0'..='9' if digits => {}
            '0'..='9' => out.push('N'),
            _ => out.push(c),
        }
        digits = c.is_ascii_digit();
    }
    // Lists are of any length.
    while out.contains("N, N") {
        out = out.replace("N, N", "N");
    }
    out.chars().take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_a_refusal_without_its_operands() {
        let one = class("layout.cells = [1, 2, 3] must be 2 numbers (\"x.txt\")\n  remedy: 7");
        assert_eq!(one, "layout.cells = [N] must be N numbers (\"..\")");
        assert_eq!(one, class("layout.cells = [10] must be 12 numbers (\"other\")"));
    }

    #[test]
    fn counts_add_up_and_reasons_are_listed_with_the_most_frequent_first() {
        let refused = BTreeMap::from([("rare".to_owned(), 1), ("frequent".to_owned(), 3)]);
        let tally = Tally { models: 2, equal: 5, refused, faults: vec!["x".into()], ..Tally::default() };
        assert_eq!(tally.layouts(), 10);
        let lines = tally.lines();
        assert!(lines[1].starts_with("10 layouts: 5 with"), "{lines:?}");
        assert!(lines[2].contains("3 layouts refused: frequent") && lines[3].contains("rare"), "{lines:?}");
    }
}

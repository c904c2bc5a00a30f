//! A batch of token ids from a JSON file.

use data::IGNORE;
use serde::Deserialize;

use crate::buffers::Tokens;
use crate::error::TrainError;

/// The label of a position without a target.
const NO_LABEL: i64 = -100;

/// Token ids with labels; every field is `[sequence][position]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// Token ids.
    pub input_ids: Vec<Vec<u32>>,
    /// The next token, or -100; absent: `input_ids` moved by one.
    pub labels: Option<Vec<Vec<i64>>>,
    /// Rotary positions; absent: they restart at each document.
    pub position_ids: Option<Vec<Vec<u32>>>,
    /// Documents, each a contiguous run of positions; absent: one per sequence.
    pub document_ids: Option<Vec<Vec<i64>>>,
}

impl Batch {
    /// Parses and checks a batch for a model with `vocab` ids; `name` is for messages.
    ///
    /// # Errors
    /// Broken JSON, rows of different lengths, ids that the model does not have, documents that are not contiguous.
    pub fn parse(text: &str, name: &str, vocab: usize) -> Result<Self, TrainError> {
        let bad = |what: String| TrainError::BadInput(format!("{name}: {what}"));
        let batch: Self = serde_json::from_str(text).map_err(|e| bad(format!("it is not a batch: {e}")))?;
        let (rows, seq) = (batch.rows(), batch.seq());
        if rows == 0 || seq == 0 {
            return Err(bad("input_ids is empty; give [sequence][position] token ids".into()));
        }
        let shape = |field: &str, lens: Vec<usize>| {
            if lens.len() == rows && lens.iter().all(|n| *n == seq) {
                return Ok(());
            }
            Err(bad(format!("{field} has rows of {lens:?} entries, input_ids has {rows} rows and {seq} in the first")))
        };
        shape("input_ids", batch.input_ids.iter().map(Vec::len).collect())?;
        let lens = |rows: &Vec<Vec<i64>>| rows.iter().map(Vec::len).collect();
        batch.labels.as_ref().map_or(Ok(()), |l| shape("labels", lens(l)))?;
        batch.document_ids.as_ref().map_or(Ok(()), |d| shape("document_ids", lens(d)))?;
        batch.position_ids.as_ref().map_or(Ok(()), |p| shape("position_ids", p.iter().map(Vec::len).collect()))?;
        for (row, ids) in batch.input_ids.iter().enumerate() {
            if let Some(at) = ids.iter().position(|id| *id as usize >= vocab) {
                return Err(bad(format!("input_ids[{row}][{at}] = {}, the model has ids below {vocab}", ids[at])));
            }
        }
        for (row, labels) in batch.labels.iter().flatten().enumerate() {
            let fits = |label: i64| label == NO_LABEL || (0..vocab as i64).contains(&label);
            if let Some(at) = labels.iter().position(|l| !fits(*l)) {
                let label = labels[at];
                return Err(bad(format!("labels[{row}][{at}] = {label}: it must be -100 or an id below {vocab}")));
            }
        }
        for (row, documents) in batch.document_ids.iter().flatten().enumerate() {
            let mut seen = std::collections::HashSet::new();
            let mut runs = documents.chunk_by(|a, b| a == b);
            if let Some(again) = runs.find(|run| !seen.insert(run[0])) {
                return Err(bad(format!("document {} of document_ids[{row}] is not one run of positions", again[0])));
            }
        }
        let longest = batch.position_ids.iter().flatten().flatten().max();
        if let Some(position) = longest.filter(|p| **p as usize >= seq) {
            return Err(bad(format!(
                "position {position} in position_ids: positions are below the {seq} of a sequence"
            )));
        }
        Ok(batch)
    }

    /// Sequences.
    pub fn rows(&self) -> usize {
        self.input_ids.len()
    }

    /// Positions of a sequence.
    pub fn seq(&self) -> usize {
        self.input_ids.first().map_or(0, Vec::len)
    }

    /// The tokens of `rows`, as segments read them.
    pub fn tokens(&self, rows: std::ops::Range<usize>) -> Tokens {
        let mut out = Tokens::default();
        for row in rows {
            let starts = self.doc_start(row);
            out.ids.extend(&self.input_ids[row]);
            out.targets.extend(self.targets(row));
            match &self.position_ids {
                Some(positions) => out.positions.extend(&positions[row]),
                None => out.positions.extend(starts.iter().enumerate().map(|(i, start)| i as u32 - start)),
            }
            out.doc_start.extend(starts);
        }
        out
    }

    fn targets(&self, row: usize) -> Vec<u32> {
        let ids = &self.input_ids[row];
        match &self.labels {
            Some(labels) => labels[row].iter().map(|l| u32::try_from(*l).unwrap_or(IGNORE)).collect(),
            None => ids[1..].iter().copied().chain([IGNORE]).collect(),
        }
    }

    fn doc_start(&self, row: usize) -> Vec<u32> {
        let Some(documents) = &self.document_ids else { return vec![0; self.seq()] };
        let mut start = 0;
        let of = |(i, id): (usize, &i64)| {
            if i > 0 && documents[row][i - 1] != *id {
                start = i as u32;
            }
            start
        };
        documents[row].iter().enumerate().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_restart_and_labels_default_to_the_next_token() {
        let text = r#"{"input_ids": [[5, 6, 7, 8]], "document_ids": [[3, 3, 9, 9]]}"#;
        let tokens = Batch::parse(text, "b", 10).unwrap().tokens(0..1);
        assert_eq!(tokens.targets, [6, 7, 8, IGNORE]);
        assert_eq!(tokens.doc_start, [0, 0, 2, 2]);
        assert_eq!(tokens.positions, [0, 1, 0, 1]);
    }

    #[test]
    fn bad_batches_are_named() {
        let cases = [
            (r#"{"input_ids": [[1, 2], [3]]}"#, "input_ids has rows of [2, 1]"),
            (r#"{"input_ids": [[1, 99]]}"#, "input_ids[0][1] = 99"),
            (r#"{"input_ids": [[1, 2]], "labels": [[1, -5]]}"#, "labels[0][1] = -5"),
            (r#"{"input_ids": [[1, 2, 3]], "document_ids": [[0, 1, 0]]}"#, "document 0"),
            (r#"{"input_ids": [[1, 2]], "position_ids": [[0, 2]]}"#, "position 2"),
            (r#"{"input_ids": []}"#, "empty"),
            (r#"{"ids": [[1]]}"#, "not a batch"),
        ];
        for (text, part) in cases {
            let error = Batch::parse(text, "b.json", 10).unwrap_err();
            assert!(error.to_string().contains(part) && error.exit_code() == 2, "{text}: {error}");
        }
    }
}

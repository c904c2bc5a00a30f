//! Documents of one split as a stream of tokens, cut into sequences.

use crate::store::{Piece, Store};
use crate::{IGNORE, PAD, Sequence};

/// The token stream of one split over a store.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The documents.
    pieces: Vec<Piece>,
    /// For each document, the tokens of the stream up to its end.
    ends: Vec<usize>,
    seq: usize,
    eod: bool,
    masks: bool,
    sequences: u64,
}

impl Stream {
    /// The stream of `pieces`, none of them empty, cut every `seq` tokens.
    pub(crate) fn new(pieces: Vec<Piece>, seq: usize, eod: bool, masks: bool) -> Self {
        let mut total = 0;
        let ends = pieces.iter().map(|piece| {
            total += piece.len() + usize::from(eod);
            total
        });
        let ends = ends.collect();
        let mut stream = Self { pieces, ends, seq, eod, masks, sequences: total.div_ceil(seq) as u64 };
        if !total.is_multiple_of(seq) && !stream.tail_has_target(total, total % seq) {
            stream.sequences -= 1;
        }
        stream
    }

    /// Whether any of the last `tail` of `total` tokens has a target: a sequence that teaches nothing is not cut.
    fn tail_has_target(&self, total: usize, tail: usize) -> bool {
        if !self.masks {
            return tail > 1;
        }
        let mut start = self.pieces.len();
        while start > 0 && self.ends[start - 1] > total - tail {
            start -= 1;
        }
        (start..self.pieces.len()).any(|document| {
            let begin = if document == 0 { 0 } else { self.ends[document - 1] };
            self.ends[document] - begin.max(total - tail) > 1
        })
    }

    /// Whether any token has a target. With masks a document of one token has none, wherever it is cut.
    pub(crate) fn has_targets(&self) -> bool {
        let longest = || self.pieces.iter().map(|piece| piece.len() + usize::from(self.eod)).max();
        let run = if self.masks { longest() } else { self.ends.last().copied() };
        self.sequences > 0 && run.is_some_and(|tokens| tokens > 1)
    }

    /// Sequences in one pass.
    pub(crate) fn sequences(&self) -> u64 {
        self.sequences
    }

    /// The documents.
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Tokens of each document's part of sequence `place`, in order.
    pub(crate) fn parts(&self, place: u64) -> Vec<usize> {
        let (first, total) = (place as usize * self.seq, self.ends.last().copied().unwrap_or(0));
        let last = (first + self.seq).min(total);
        let mut document = self.ends.partition_point(|&end| end <= first);
        let (mut at, mut parts) = (first, Vec::new());
        while at < last {
            let end = self.ends[document].min(last);
            parts.push(end - at);
            (at, document) = (end, document + 1);
        }
        parts
    }

    /// Sequence `place` of the stream over `store`; `place` must be below `sequences`.
    pub(crate) fn cut(&self, store: &Store, place: u64) -> Sequence {
        assert!(place < self.sequences, "sequence {place} of {}", self.sequences);
        let seq = self.seq;
        let first = place as usize * seq;
        // One token more than the sequence: the target of the last.
        let last = (first + seq + 1).min(*self.ends.last().expect("a sequence was cut"));
        let mut tokens = Vec::with_capacity(seq + 1);
        let mut bytes = Vec::with_capacity(seq + 1);
        let mut starts = Vec::with_capacity(seq + 1);
        let mut document = self.ends.partition_point(|&end| end <= first);
        while first + tokens.len() < last {
            let at = first + tokens.len();
            let piece = &self.pieces[document];
            let begin = self.ends[document] - piece.len() - usize::from(self.eod);
            let end = self.ends[document].min(last);
            let start = tokens.len() as u32;
            store.cut(piece, at - begin, end - begin, &mut tokens, &mut bytes);
            starts.resize(tokens.len(), start);
            document += 1;
        }
        let real = tokens.len().min(seq);
        let mut targets: Vec<u32> = tokens[1..].to_vec();
        let mut target_bytes = bytes[1..].to_vec();
        if self.masks {
            for (at, pair) in starts.windows(2).enumerate() {
                if pair[0] != pair[1] {
                    (targets[at], target_bytes[at]) = (IGNORE, 0);
                }
            }
        }
        targets.resize(seq, IGNORE);
        target_bytes.resize(seq, 0);
        tokens.truncate(real);
        tokens.resize(seq, PAD);
        let doc_start = if self.masks {
            starts.truncate(real);
            starts.resize(seq, real as u32);
            starts
        } else {
            vec![0; seq]
        };
        let positions = doc_start.iter().zip(0..).map(|(start, at): (&u32, u32)| at - start).collect();
        Sequence { tokens, targets, doc_start, positions, target_bytes }
    }
}

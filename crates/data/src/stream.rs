//! Documents of one split as a stream of tokens, cut into sequences.

use std::ops::Range;

use crate::{EOD, IGNORE, PAD, Sequence};

/// The token stream of one split over text that lies elsewhere.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The documents, as ranges of the text.
    pieces: Vec<Range<usize>>,
    /// For each document, the tokens of the stream up to its end.
    ends: Vec<usize>,
    seq: usize,
    eod: bool,
    masks: bool,
    sequences: u64,
}

impl Stream {
    /// The stream of `pieces`, none of them empty, cut every `seq` tokens.
    pub(crate) fn new(pieces: Vec<Range<usize>>, seq: usize, eod: bool, masks: bool) -> Self {
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

    /// Sequences in one pass.
    pub(crate) fn sequences(&self) -> u64 {
        self.sequences
    }

    /// Documents.
    pub(crate) fn documents(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes of text, end-of-document tokens not counted.
    pub(crate) fn bytes(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }

    /// The documents, as ranges of the text.
    pub(crate) fn pieces(&self) -> &[Range<usize>] {
        &self.pieces
    }

    /// Sequence `place` of the stream over `text`; `place` must be below `sequences`.
    pub(crate) fn cut(&self, text: &[u8], place: u64) -> Sequence {
        assert!(place < self.sequences, "sequence {place} of {}", self.sequences);
        let seq = self.seq;
        let first = place as usize * seq;
        // One token more than the sequence: the target of the last.
        let last = (first + seq + 1).min(*self.ends.last().expect("a sequence was cut"));
        let mut tokens = Vec::with_capacity(seq + 1);
        let mut starts = Vec::with_capacity(seq + 1);
        let mut document = self.ends.partition_point(|&end| end <= first);
        while first + tokens.len() < last {
            let at = first + tokens.len();
            let begin = self.ends[document] - self.pieces[document].len() - usize::from(self.eod);
            let end = self.ends[document].min(last);
            let start = tokens.len() as u32;
            let piece = &text[self.pieces[document].clone()];
            let bytes = &piece[at - begin..(end - begin).min(piece.len())];
            tokens.extend(bytes.iter().map(|&byte| u32::from(byte)));
            if end - begin > piece.len() {
                tokens.push(EOD);
            }
            starts.resize(tokens.len(), start);
            document += 1;
        }
        let real = tokens.len().min(seq);
        let mut targets: Vec<u32> = tokens[1..].to_vec();
        if self.masks {
            for (target, pair) in targets.iter_mut().zip(starts.windows(2)) {
                if pair[0] != pair[1] {
                    *target = IGNORE;
                }
            }
        }
        targets.resize(seq, IGNORE);
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
        Sequence { tokens, targets, doc_start, positions }
    }
}

//! Tokens of one source: bytes in memory, or files of tokens that are mapped.

use std::ops::Range;

use crate::DataError;
use crate::content::{Known, Mapped};

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its first token in the store.
    pub(crate) start: usize,
    /// The end of its tokens.
    pub(crate) end: usize,
    /// Bytes of its text; 0 where they are not known.
    pub(crate) bytes: u64,
}

impl Piece {
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.end
    }

    /// Bytes of text up to token `at`, the document's bytes spread evenly over its tokens.
    pub(crate) fn bytes_to(&self, at: usize) -> u64 {
        let (bytes, at, len) = (u128::from(self.bytes), at as u128, self.len().max(1) as u128);
        (bytes * at / len) as u64
    }

    /// The document cut in two after its token `at`.
    pub(crate) fn split(&self, at: usize) -> [Piece; 2] {
        let (bytes, middle) = (self.bytes_to(at), self.start + at);
        [
            Piece { start: self.start, end: middle, bytes },
            Piece { start: middle, end: self.end, bytes: self.bytes - bytes },
        ]
    }
}

/// Token ids back to back.
#[derive(Debug)]
pub(crate) enum Ids {
    /// A byte is a token.
    Bytes(Vec<u8>),
    /// A mapped file, of which all was read and is known.
    Mapped(Box<Mapped>),
    /// A file without a token, which cannot be mapped.
    None,
}

impl Ids {
    fn len(&self) -> usize {
        match self {
            Ids::Bytes(bytes) => bytes.len(),
            Ids::Mapped(file) => file.len(),
            Ids::None => 0,
        }
    }

    fn read(&self, range: Range<usize>, into: &mut Vec<u32>) {
        match self {
            Ids::Bytes(bytes) => into.extend(bytes[range].iter().map(|&byte| u32::from(byte))),
            Ids::Mapped(file) => file.read(range, into),
            Ids::None => {}
        }
    }
}

/// One file of a store.
#[derive(Debug)]
struct Segment {
    ids: Ids,
    /// Its end among the tokens of the store.
    end: usize,
}

/// Tokens of one source.
#[derive(Debug, Default)]
pub(crate) struct Store {
    segments: Vec<Segment>,
    /// The documents, in order. None straddles two files.
    pub(crate) pieces: Vec<Piece>,
    /// The token that follows each document; `None`: the documents stay as they are.
    pub(crate) eod: Option<u32>,
}

impl Store {
    /// A store of text: `ends` of its documents.
    pub(crate) fn text(bytes: Vec<u8>, ends: &[usize], eod: Option<u32>) -> Self {
        let mut store = Self { eod, ..Self::default() };
        let mut start = 0;
        let lengths = ends.iter().map(|&end| {
            let len = end - std::mem::replace(&mut start, end);
            (len, len as u64)
        });
        let lengths: Vec<_> = lengths.collect();
        store.push(Ids::Bytes(bytes), lengths);
        store
    }

    /// Adds a file with its documents: tokens and bytes of text of each. Documents without a token are left out.
    pub(crate) fn push(&mut self, ids: Ids, documents: impl IntoIterator<Item = (usize, u64)>) {
        let mut start = self.len();
        let end = start + ids.len();
        for (len, bytes) in documents {
            if len > 0 {
                self.pieces.push(Piece { start, end: start + len, bytes });
            }
            start += len;
        }
        debug_assert!(start <= end);
        self.segments.push(Segment { ids, end });
    }

    /// Tokens, end-of-document tokens not counted.
    pub(crate) fn len(&self) -> usize {
        self.segments.last().map_or(0, |segment| segment.end)
    }

    /// Appends the tokens of `range`, which lies within one document.
    pub(crate) fn read(&self, range: Range<usize>, into: &mut Vec<u32>) {
        let at = self.segments.partition_point(|segment| segment.end <= range.start);
        let Some(segment) = self.segments.get(at) else { return };
        let first = segment.end - segment.ids.len();
        segment.ids.read(range.start - first..range.end - first, into);
    }

    /// That nobody wrote to a file of which tokens were read since the last call.
    ///
    /// # Errors
    /// [`DataError::Changed`].
    pub(crate) fn unchanged(&self) -> Result<(), DataError> {
        self.files().try_for_each(Mapped::unchanged)
    }

    /// Notes every mapped file in `known`.
    pub(crate) fn tell(&self, known: &mut Known) {
        self.files().for_each(|file| known.add(file));
    }

    fn files(&self) -> impl Iterator<Item = &Mapped> {
        self.segments.iter().filter_map(|segment| match &segment.ids {
            Ids::Mapped(file) => Some(&**file),
            Ids::Bytes(_) | Ids::None => None,
        })
    }

    /// True where every token is a byte of text.
    pub(crate) fn is_text(&self) -> bool {
        self.segments.iter().all(|segment| matches!(segment.ids, Ids::Bytes(_)))
    }

    /// The text of a document; empty where tokens are not bytes.
    pub(crate) fn bytes(&self, piece: &Piece) -> &[u8] {
        match self.segments.as_slice() {
            [Segment { ids: Ids::Bytes(bytes), .. }] => &bytes[piece.range()],
            _ => &[],
        }
    }

    /// Appends the tokens `from..to` of `piece` with its end-of-document token, and the bytes of text of each.
    pub(crate) fn cut(&self, piece: &Piece, from: usize, to: usize, tokens: &mut Vec<u32>, bytes: &mut Vec<u32>) {
        let inside = to.min(piece.len());
        if from < inside {
            self.read(piece.start + from..piece.start + inside, tokens);
            if piece.bytes == piece.len() as u64 {
                bytes.resize(tokens.len(), 1);
            } else {
                let mut last = piece.bytes_to(from);
                bytes.extend((from..inside).map(|at| {
                    let next = piece.bytes_to(at + 1);
                    (next - std::mem::replace(&mut last, next)) as u32
                }));
            }
        }
        if to > piece.len() {
            tokens.push(self.eod.expect("a length that counts it"));
            bytes.push(0);
        }
    }
}

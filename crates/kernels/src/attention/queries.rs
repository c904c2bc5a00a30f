//! Which positions have queries, and how they are cut into tiles.

use std::ops::Range;

use super::BLOCK;

/// The positions of every sequence that have queries in a call: at most two spans, ascending. Keys have all positions.
///
/// A query's row does not depend on the other queries of the call. The sums of dk and dv do: their order is that of the
/// tiles, which begin anew with each span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries {
    spans: [Span; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: usize,
    len: usize,
}

impl Queries {
    /// All positions of a sequence of `seq`.
    pub fn all(seq: usize) -> Self {
        Queries { spans: [Span { start: 0, len: seq }, Span { start: seq, len: 0 }] }
    }

    /// Two spans, the second behind the first; spans that touch are one.
    ///
    /// # Panics
    /// If they overlap or descend.
    pub fn spans([first, second]: [Range<usize>; 2]) -> Self {
        assert!(
            first.start <= first.end && first.end <= second.start && second.start <= second.end,
            "spans {first:?} and {second:?} must ascend"
        );
        if first.end == second.start {
            let end = second.end;
            return Queries { spans: [first.start..end, end..end].map(Span::from) };
        }
        Queries { spans: [first, second].map(Span::from) }
    }

    /// Number of queries of a sequence.
    #[allow(clippy::len_without_is_empty)] // a call without queries asks for nothing
    pub fn len(&self) -> usize {
        self.spans[0].len + self.spans[1].len
    }

    /// Their positions, ascending.
    pub fn positions(&self) -> impl Iterator<Item = usize> + use<> {
        let [first, second] = self.spans.map(|s| s.start..s.start + s.len);
        first.chain(second)
    }

    /// First position behind them.
    pub(super) fn end(&self) -> usize {
        let last = if self.spans[1].len > 0 { self.spans[1] } else { self.spans[0] };
        last.start + last.len
    }

    /// Tiles of a sequence.
    pub(super) fn tiles(&self) -> usize {
        self.spans.iter().map(|s| s.len.div_ceil(BLOCK)).sum()
    }

    /// Tile number `index`; behind the last one an empty tile at the end.
    pub(super) fn tile(&self, index: usize) -> Tile {
        let [first, second] = self.spans;
        let of_first = first.len.div_ceil(BLOCK);
        let (span, before, index) =
            if index < of_first { (first, 0, index) } else { (second, first.len, index - of_first) };
        let skip = (index * BLOCK).min(span.len);
        Tile { row: before + skip, at: span.start + skip, rows: BLOCK.min(span.len - skip) }
    }
}

impl From<Range<usize>> for Span {
    fn from(range: Range<usize>) -> Self {
        Span { start: range.start, len: range.len() }
    }
}

/// Neighbouring queries of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// First among the queries of the sequence.
    pub row: usize,
    /// Its position.
    pub at: usize,
    /// How many.
    pub rows: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_queries_once_and_begin_with_each_span() {
        for (spans, starts) in [
            ([0..150, 150..150], vec![0, 64, 128]),
            ([0..70, 130..200], vec![0, 64, 130, 194]),
            ([10..74, 74..80], vec![10, 74]),
        ] {
            let queries = Queries::spans(spans);
            let tiles: Vec<Tile> = (0..queries.tiles()).map(|i| queries.tile(i)).collect();
            assert_eq!(tiles.iter().map(|t| t.at).collect::<Vec<_>>(), starts);
            let covered: Vec<usize> = tiles.iter().flat_map(|t| t.at..t.at + t.rows).collect();
            assert_eq!(covered, queries.positions().collect::<Vec<_>>());
            let rows: Vec<usize> = tiles.iter().flat_map(|t| t.row..t.row + t.rows).collect();
            assert_eq!(rows, (0..queries.len()).collect::<Vec<_>>());
            assert_eq!(queries.tile(queries.tiles()).row, queries.len());
        }
        assert_eq!(Queries::all(9), Queries::spans([0..4, 4..9]));
    }
}

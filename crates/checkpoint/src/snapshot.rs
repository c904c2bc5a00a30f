//! A copy of the pieces that a rank writes, so that the run can go on while they are written.

use std::ops::Range;

use crate::tensor::Kind;
use crate::write::PieceRef;

/// The copy. Its memory is kept from one use to the next.
#[derive(Debug, Default)]
pub struct Snapshot {
    values: Vec<f32>,
    /// Tensor, kind, slice, elements; the values follow one another.
    pieces: Vec<(usize, Kind, usize, Range<usize>)>,
}

impl Snapshot {
    /// Copies `pieces` over whatever was there.
    pub fn take(&mut self, pieces: &[PieceRef<'_>]) {
        self.values.clear();
        self.pieces.clear();
        self.values.reserve_exact(pieces.iter().map(|piece| piece.data.len()).sum());
        for piece in pieces {
            self.values.extend_from_slice(piece.data);
            self.pieces.push((piece.tensor, piece.kind, piece.slice, piece.elements.clone()));
        }
    }

    /// What was copied.
    pub fn pieces(&self) -> Vec<PieceRef<'_>> {
        let mut rest = &self.values[..];
        let piece = |(tensor, kind, slice, elements): &(usize, Kind, usize, Range<usize>)| {
            let (data, after) = rest.split_at(elements.len());
            rest = after;
            PieceRef { tensor: *tensor, kind: *kind, slice: *slice, elements: elements.clone(), data }
        };
        self.pieces.iter().map(piece).collect()
    }

    /// Bytes of the copy.
    pub fn bytes(&self) -> u64 {
        self.values.len() as u64 * 4
    }
}

//! What a tensor is to the digest and the manifest: name, shape, slices, kinds of state.

use std::fmt;

use serde::{Deserialize, Serialize};
use spec::tensors::{Cut, Tensor};

use crate::hash::chunks;

/// A kind of state that every parameter tensor has. The order is the order of the digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The parameter itself.
    Param,
    /// First moment of the optimizer.
    Moment1,
    /// Second moment of the optimizer.
    Moment2,
}

impl Kind {
    /// All kinds, in the order of the digest.
    pub const ALL: [Kind; 3] = [Kind::Param, Kind::Moment1, Kind::Moment2];

    /// Its name in files: `param`, `moment1`, `moment2`.
    pub fn label(self) -> &'static str {
        match self {
            Kind::Param => "param",
            Kind::Moment1 => "moment1",
            Kind::Moment2 => "moment2",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Cut", rename_all = "lowercase")]
enum CutText {
    Whole,
    Rows,
    Cols,
}

/// Shape and slices of one tensor, as written in the manifest. Sizes in elements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name in a Hugging Face folder.
    pub name: String,
    /// Rows, padding included; 1 for vectors.
    pub rows: usize,
    /// Columns, or the length of a vector.
    pub cols: usize,
    /// How the tensor cells divide it.
    #[serde(with = "CutText")]
    pub cut: Cut,
    /// Number of slices: 1 for [`Cut::Whole`], else the tensor cells of the grid.
    pub slices: usize,
}

impl TensorEntry {
    /// The entry of `tensor` under `tp` tensor cells.
    pub fn of(tensor: &Tensor, tp: usize) -> Self {
        let Tensor { name, rows, cols, cut, .. } = tensor;
        Self { name: name.clone(), rows: *rows, cols: *cols, cut: *cut, slices: tensor.slices(tp) }
    }

    /// Elements of one slice.
    pub fn slice_len(&self) -> usize {
        self.rows * self.cols / self.slices
    }

    /// State chunks of one slice.
    pub fn slice_chunks(&self) -> usize {
        chunks(self.slice_len())
    }

    /// Why this cannot be the entry of a tensor under `tp` tensor cells, if so.
    pub(crate) fn fault(&self, tp: usize) -> Option<String> {
        let want = if self.cut == Cut::Whole { 1 } else { tp };
        let divided = match self.cut {
            Cut::Whole => 1,
            Cut::Rows => self.rows,
            Cut::Cols => self.cols,
        };
        let bytes = self.rows.checked_mul(self.cols).and_then(|n| n.checked_mul(4));
        let Self { name, rows, cols, slices, .. } = self;
        match bytes {
            None => Some(format!("{name}: {rows} x {cols} elements do not fit in memory")),
            Some(0) => Some(format!("{name}: {rows} x {cols} has no elements")),
            Some(_) if *slices == 0 || *slices != want || divided % slices != 0 => {
                Some(format!("{name}: {slices} slices of {rows} x {cols} under {tp} tensor cells"))
            }
            Some(_) => None,
        }
    }
}

/// The entries of `tensors`, in canonical order.
pub(crate) fn entries(tensors: &[Tensor], tp: usize) -> Vec<TensorEntry> {
    tensors.iter().map(|tensor| TensorEntry::of(tensor, tp)).collect()
}

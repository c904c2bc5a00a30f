//! Two checkpoints, tensor by tensor.

use std::ops::Range;

use crate::error::CheckpointError;
use crate::hash::Hash;
use crate::read::Checkpoint;
use crate::tensor::Kind;

/// How one kind of one tensor differs between two checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub enum Difference {
    /// Only the first has the tensor.
    OnlyFirst,
    /// Only the second has it.
    OnlySecond,
    /// It has other sizes: rows and columns of both.
    Shape([usize; 4]),
    /// It has other bits.
    Values {
        /// Elements with other bits.
        count: usize,
        /// Of so many.
        of: usize,
        /// The largest absolute difference; infinite where one of a pair is no number.
        max_abs: f64,
        /// The first one: row, column, both values.
        first: (usize, usize, f32, f32),
    },
}

/// One kind of one tensor that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Differing {
    /// Tensor name.
    pub name: String,
    /// Kind of state.
    pub kind: Kind,
    /// How.
    pub difference: Difference,
}

impl Checkpoint {
    /// Calls `take` for everything that differs between this checkpoint and `other`, in canonical order; returns the
    /// (tensor, kind) compared. Slices need not be cut alike. What has equal hashes is not read.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn diff(&self, other: &Self, take: &mut dyn FnMut(Differing)) -> Result<usize, CheckpointError> {
        let mut compared = 0;
        for (i, ours) in self.tensors().iter().enumerate() {
            let theirs = other.tensor_index(&ours.name);
            for kind in Kind::ALL {
                compared += 1;
                let mut tell = |difference| take(Differing { name: ours.name.clone(), kind, difference });
                let Some(j) = theirs else {
                    tell(Difference::OnlyFirst);
                    continue;
                };
                let entry = &other.tensors()[j];
                if (ours.rows, ours.cols) != (entry.rows, entry.cols) {
                    tell(Difference::Shape([ours.rows, ours.cols, entry.rows, entry.cols]));
                    continue;
                }
                if *ours == *entry && self.hashes(i, kind) == other.hashes(j, kind) {
                    continue;
                }
                let (a, b) = (self.read_tensor(i, kind)?, other.read_tensor(j, kind)?);
                values(&a, &b, ours.cols).into_iter().for_each(tell);
            }
        }
        for theirs in other.tensors().iter().filter(|tensor| self.tensor_index(&tensor.name).is_none()) {
            for kind in Kind::ALL {
                compared += 1;
                take(Differing { name: theirs.name.clone(), kind, difference: Difference::OnlySecond });
            }
        }
        Ok(compared)
    }

    /// The written hashes of all chunks of one kind of a tensor, by slice.
    fn hashes(&self, tensor: usize, kind: Kind) -> Vec<Hash> {
        let slices: Range<(usize, Kind, usize)> = (tensor, kind, 0)..(tensor, kind, usize::MAX);
        let spots = self.index.range(slices).flat_map(|(_, spots)| spots);
        spots.flat_map(|spot| self.manifest.files[spot.file].pieces[spot.piece].hashes.iter().copied()).collect()
    }
}

fn values(a: &[f32], b: &[f32], cols: usize) -> Option<Difference> {
    let (mut count, mut max_abs, mut first) = (0, 0.0_f64, None);
    for (at, (x, y)) in a.iter().zip(b).enumerate().filter(|(_, (x, y))| x.to_bits() != y.to_bits()) {
        count += 1;
        let apart = (f64::from(*x) - f64::from(*y)).abs();
        max_abs = max_abs.max(if apart.is_nan() { f64::INFINITY } else { apart });
        first.get_or_insert((at / cols, at % cols, *x, *y));
    }
    first.map(|first| Difference::Values { count, of: a.len(), max_abs, first })
}

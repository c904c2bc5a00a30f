//! Whole tensors, put together from their slices: for export and for other grids.

use spec::tensors::Cut;

use crate::error::CheckpointError;
use crate::read::Checkpoint;
use crate::tensor::Kind;

impl Checkpoint {
    /// Index of the tensor called `name`, in canonical order.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.tensors().iter().position(|tensor| tensor.name == name)
    }

    /// One kind of a whole tensor, row-major, padding rows included.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_tensor(&self, tensor: usize, kind: Kind) -> Result<Vec<f32>, CheckpointError> {
        let Some(entry) = self.tensors().get(tensor) else {
            return Err(CheckpointError::NoSuchState(format!("tensor {tensor} of {}", self.tensors().len())));
        };
        let len = entry.slice_len();
        let mut whole = vec![0.0; len * entry.slices];
        if entry.cut != Cut::Cols {
            // Slices are runs of whole rows: they follow one another.
            for (slice, out) in whole.chunks_exact_mut(len).enumerate() {
                self.read(tensor, kind, slice, 0..len, out)?;
            }
            return Ok(whole);
        }
        let (mut part, width) = (vec![0.0; len], entry.cols / entry.slices);
        for slice in 0..entry.slices {
            self.read(tensor, kind, slice, 0..len, &mut part)?;
            for (row, values) in part.chunks_exact(width).enumerate() {
                let at = row * entry.cols + slice * width;
                whole[at..at + width].copy_from_slice(values);
            }
        }
        Ok(whole)
    }
}

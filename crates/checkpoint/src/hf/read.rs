//! Reading: any range of elements of any slice, in float32, checked to be finite.

use std::ops::Range;

use super::convert::{first_not_finite, widen};
use super::error::HfError;
use super::folder::HfFolder;

/// Elements that [`HfFolder::check_finite`] looks at at once.
const CHECK_ELEMENTS: usize = 1 << 18;

impl HfFolder {
    /// Reads `elements` of the slice of tensor cell `t` of `tp` of a tensor (index in canonical
    /// order) into `out`. Row-major inside the slice, as [`spec::tensors::Tensor::slice`] cuts
    /// it; padding rows are zero.
    ///
    /// # Errors
    /// [`HfError::NotFinite`] names the first NaN or infinite weight; [`HfError::NoSuchPart`].
    /// `out` is then partly written.
    pub fn read(
        &self,
        tensor: usize,
        t: usize,
        tp: usize,
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), HfError> {
        let no_such = |what: String| Err(HfError::NoSuchPart(what));
        let Some(shape) = self.tensors.get(tensor) else {
            return no_such(format!("tensor {tensor} of {}", self.tensors.len()));
        };
        if t >= tp || shape.slice(tp - 1, tp).0.end != shape.rows || shape.slice(tp - 1, tp).1.end != shape.cols {
            let (name, rows, cols) = (&shape.name, shape.rows, shape.cols);
            return no_such(format!("slice {t} of {tp} of {name} ({rows} x {cols})"));
        }
        let (rows, cols) = shape.slice(t, tp);
        let width = cols.len();
        if elements.start > elements.end || elements.end > rows.len() * width || out.len() != elements.len() {
            let (name, len) = (&shape.name, rows.len() * width);
            return no_such(format!(
                "elements {elements:?} of slice {t} of {tp} of {name} ({len}), into {}",
                out.len()
            ));
        }
        if elements.is_empty() {
            return Ok(());
        }
        // Index of an element of the slice in the whole tensor.
        let whole = |at: usize| (rows.start + at / width) * shape.cols + cols.start + at % width;
        let (first, last) = (whole(elements.start), whole(elements.end - 1));
        let filled = if width == shape.cols {
            self.fill(tensor, first, out)
        } else {
            let mut at = elements.start;
            let mut rest = &mut *out;
            loop {
                let run = (width - at % width).min(rest.len());
                let (row, after) = rest.split_at_mut(run);
                let filled = self.fill(tensor, whole(at), row);
                if filled.is_err() || after.is_empty() {
                    break filled;
                }
                (at, rest) = (at + run, after);
            }
        };
        let place = self.places[tensor];
        let byte = |at: usize| place.start + at.min(shape.real_len()) * place.dtype.bytes();
        self.shards[place.shard].release(byte(first)..byte(last + 1));
        filled
    }

    /// Fills `out` from element `start` of a whole tensor.
    fn fill(&self, tensor: usize, start: usize, out: &mut [f32]) -> Result<(), HfError> {
        let (shape, place) = (&self.tensors[tensor], self.places[tensor]);
        let real = shape.real_len().saturating_sub(start).min(out.len());
        let (real, padding) = out.split_at_mut(real);
        padding.fill(0.0);
        if real.is_empty() {
            return Ok(());
        }
        let shard = &self.shards[place.shard];
        let from = place.start + start * place.dtype.bytes();
        widen(place.dtype, shard.bytes(from..from + real.len() * place.dtype.bytes()), real);
        match first_not_finite(real) {
            None => Ok(()),
            Some(at) => Err(HfError::NotFinite {
                tensor: shape.name.clone(),
                row: (start + at) / shape.cols,
                col: (start + at) % shape.cols,
                value: real[at],
                place: shard.path.display().to_string(),
            }),
        }
    }

    /// Looks at every weight once, with a small buffer.
    ///
    /// # Errors
    /// [`HfError::NotFinite`] names the first NaN or infinite weight.
    pub fn check_finite(&self) -> Result<(), HfError> {
        let mut buffer = vec![0.0; CHECK_ELEMENTS];
        for (number, tensor) in self.tensors.iter().enumerate() {
            let len = tensor.real_len();
            for start in (0..len).step_by(CHECK_ELEMENTS) {
                let end = len.min(start + CHECK_ELEMENTS);
                self.read(number, 0, 1, start..end, &mut buffer[..end - start])?;
            }
        }
        Ok(())
    }
}

//! Reading: any range of elements of any slice, in float32, checked to be finite.

use std::ops::Range;

use super::convert::{first_not_finite, widen};
use super::error::HfError;
use super::folder::HfFolder;

/// Elements that are read before the memory behind them is given back.
const RUN_ELEMENTS: usize = 1 << 18;

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
        // Index of an element of the slice in the whole tensor.
        let whole = |at: usize| (rows.start + at / width) * shape.cols + cols.start + at % width;
        let place = self.places[tensor];
        let byte = |at: usize| place.start + at.min(shape.real_len()) * place.dtype.bytes();
        let mut at = elements.start;
        for run in out.chunks_mut(RUN_ELEMENTS) {
            let (first, last) = (whole(at), whole(at + run.len() - 1));
            let filled = match width == shape.cols {
                true => self.fill(tensor, first, run),
                false => parts(at, width, run).try_for_each(|(at, part)| self.fill(tensor, whole(at), part)),
            };
            at += run.len();
            self.shards[place.shard].release(byte(first)..byte(last + 1));
            filled?;
        }
        Ok(())
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
        let mut buffer = vec![0.0; RUN_ELEMENTS];
        for (number, tensor) in self.tensors.iter().enumerate() {
            let len = tensor.real_len();
            for start in (0..len).step_by(RUN_ELEMENTS) {
                let end = len.min(start + RUN_ELEMENTS);
                self.read(number, 0, 1, start..end, &mut buffer[..end - start])?;
            }
        }
        Ok(())
    }
}

/// `run`, which begins at element `at` of a slice, cut at the ends of rows of `width` elements:
/// (first element, part).
fn parts(mut at: usize, width: usize, mut run: &mut [f32]) -> impl Iterator<Item = (usize, &mut [f32])> {
    std::iter::from_fn(move || {
        let (start, len) = (at, (width - at % width).min(run.len()));
        let part = run.split_off_mut(..len)?;
        at += len;
        (len > 0).then_some((start, part))
    })
}

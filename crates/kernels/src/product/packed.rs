//! Right operands that stay packed over many products.

use std::fmt;

use super::pack::Buffer;
use super::{Panels, pack_all, wide};
use crate::ctx::Ctx;
use crate::mat::Mat;
use crate::simd::Level;

/// The panels of a right operand, for as long as its numbers stay what they are: who keeps them knows how long that is.
#[derive(Default)]
pub struct Packed {
    buffer: Buffer,
    k: usize,
    n: usize,
    /// Columns of a strip: those of the path that packed.
    strip: usize,
}

impl Packed {
    /// Packs `b` with the threads of `ctx`, in the place of what was there.
    ///
    /// # Panics
    /// If the view reaches outside of its data.
    pub fn pack(&mut self, ctx: &Ctx, b: Mat) {
        b.check();
        pack_all(ctx, &[b], &mut self.buffer);
        (self.k, self.n, self.strip) = (b.rows, b.cols, wide(ctx.level()).1);
    }

    /// Rows and columns of the operand.
    pub fn shape(&self) -> (usize, usize) {
        (self.k, self.n)
    }

    pub(super) fn panels(&self, level: Level) -> Panels<'_> {
        assert_eq!(self.strip, wide(level).1, "an operand packed on another path");
        Panels { data: self.buffer.filled(Panels::len(level, self.k, self.n)), k: self.k, n: self.n, strip: self.strip }
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packed").field("k", &self.k).field("n", &self.n).finish()
    }
}

/// A right operand as a product finds it.
#[derive(Clone, Copy, Debug)]
pub enum Right<'a> {
    /// In memory: each call packs it.
    Plain(Mat<'a>),
    /// Packed already.
    Packed(&'a Packed),
}

impl Right<'_> {
    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        match self {
            Right::Plain(b) => (b.rows, b.cols),
            Right::Packed(b) => b.shape(),
        }
    }
}

impl<'a> From<Mat<'a>> for Right<'a> {
    fn from(b: Mat<'a>) -> Self {
        Right::Plain(b)
    }
}

impl<'a> From<&'a Packed> for Right<'a> {
    fn from(b: &'a Packed) -> Self {
        Right::Packed(b)
    }
}

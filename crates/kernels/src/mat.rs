//! Matrix views.

use std::marker::PhantomData;
use std::ops::Range;

/// Matrix view with arbitrary strides, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    /// Element (i, j) is `data[i * rs + j * cs]`.
    pub data: &'a [f32],
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Row stride.
    pub rs: usize,
    /// Column stride.
    pub cs: usize,
}

impl<'a> Mat<'a> {
    /// Row-major contiguous view of the first `rows * cols` elements.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Row-major view with row stride `rs`.
    pub fn with_stride(data: &'a [f32], rows: usize, cols: usize, rs: usize) -> Self {
        let m = Mat { data, rows, cols, rs, cs: 1 };
        m.check();
        m
    }

    /// Panics when the view reaches outside of its data.
    pub(crate) fn check(&self) {
        if self.rows > 0 && self.cols > 0 {
            let last = (self.rows - 1)
                .checked_mul(self.rs)
                .zip((self.cols - 1).checked_mul(self.cs))
                .and_then(|(r, c)| r.checked_add(c));
            assert!(
                last.is_some_and(|l| l < self.data.len()),
                "matrix {} x {} with strides ({}, {}) does not fit {} elements",
                self.rows,
                self.cols,
                self.rs,
                self.cs,
                self.data.len()
            );
        }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Mat { data: self.data, rows: self.cols, cols: self.rows, rs: self.cs, cs: self.rs }
    }

    /// The columns of `range`.
    pub fn cols_range(self, range: Range<usize>) -> Self {
        self.t().rows_range(range).t()
    }

    /// The rows of `range`.
    pub fn rows_range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let empty = range.is_empty() || self.cols == 0;
        let data = if empty { &[] } else { &self.data[range.start * self.rs..] };
        Mat { data, rows: range.len(), ..self }
    }

    /// Element (i, j).
    pub fn at(&self, i: usize, j: usize) -> f32 {
        assert!(i < self.rows && j < self.cols, "element ({i}, {j}) of {} x {}", self.rows, self.cols);
        self.data[i * self.rs + j * self.cs]
    }
}

/// Mutable matrix view with column stride 1; cuts along rows and columns.
#[derive(Debug)]
pub struct MatMut<'a> {
    // Invariant: for i < rows, the `cols` elements from `ptr + i * rs` are valid, belong to this view alone for 'a,
    // and no two rows overlap.
    ptr: *mut f32,
    rows: usize,
    cols: usize,
    rs: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `MatMut` is an exclusive borrow of its elements, as `&mut [f32]` is.
unsafe impl Send for MatMut<'_> {}
// SAFETY: `&MatMut` gives shared reads only.
unsafe impl Sync for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// Row-major contiguous view of the first `rows * cols` elements.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Row-major view with row stride `rs >= cols`.
    pub fn with_stride(data: &'a mut [f32], rows: usize, cols: usize, rs: usize) -> Self {
        assert!(rs >= cols || rows <= 1, "row stride {rs} below {cols} columns");
        Mat { data, rows, cols, rs, cs: 1 }.check();
        MatMut { ptr: data.as_mut_ptr(), rows, cols, rs, borrow: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn rs(&self) -> usize {
        self.rs
    }

    /// Pointer to element (i, j), for product kernels that write whole tiles.
    pub(crate) fn ptr_at(&mut self, i: usize, j: usize) -> *mut f32 {
        assert!(i < self.rows && j < self.cols, "element ({i}, {j}) of {} x {}", self.rows, self.cols);
        // SAFETY: (i, j) lies in the view.
        unsafe { self.ptr.add(i * self.rs + j) }
    }

    /// Row `i`.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        if self.cols == 0 {
            return &mut [];
        }
        // SAFETY: by the invariant, the row is valid and ours.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * self.rs), self.cols) }
    }

    /// A shorter borrow of the same view.
    pub fn reborrow(&mut self) -> MatMut<'_> {
        MatMut { borrow: PhantomData, ..*self }
    }

    /// Cuts in front of row `at`.
    pub fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at <= self.rows, "cut at row {at} of {}", self.rows);
        // In-bounds only if both sides have elements.
        let inside = at < self.rows && self.cols > 0;
        // SAFETY: row `at` exists.
        let ptr = if inside { unsafe { self.ptr.add(at * self.rs) } } else { self.ptr };
        (MatMut { rows: at, ..self }, MatMut { ptr, rows: self.rows - at, ..self })
    }

    /// Cuts in front of column `at`.
    pub fn split_cols(self, at: usize) -> (Self, Self) {
        assert!(at <= self.cols, "cut at column {at} of {}", self.cols);
        let inside = at < self.cols && self.rows > 0;
        // SAFETY: column `at` exists.
        let ptr = if inside { unsafe { self.ptr.add(at) } } else { self.ptr };
        (MatMut { cols: at, ..self }, MatMut { ptr, cols: self.cols - at, ..self })
    }

    /// The rows of `range`.
    pub fn rows_range(self, range: Range<usize>) -> Self {
        self.split_rows(range.end).0.split_rows(range.start).1
    }

    /// The columns of `range`.
    pub fn cols_range(self, range: Range<usize>) -> Self {
        self.split_cols(range.end).0.split_cols(range.start).1
    }

    /// Stores `value` everywhere.
    pub fn fill(&mut self, value: f32) {
        for i in 0..self.rows {
            self.row_mut(i).fill(value);
        }
    }
}
